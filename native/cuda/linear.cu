// Matrix products with bf16 weights, and the gate of an MLP.
//
// Floor of a product: the bytes of w / bandwidth up to some hundred rows, 2 n k rows operations / bf16 rate above.
#include "linear_tile.h"
#include "ops.h"

namespace kd::ops {

namespace {

using namespace cuda;

// Which tile: a choice by speed alone, measured with bench/linear_tiles.cu on an H200 (SPEED.md). What counts is that all of w
// is under way soon, so enough blocks for some 132 multiprocessors; how often x passes from the L2 cache to them, once a
// tile of rows of w; and, from some 32 rows on, how many products a fragment is used for.
struct Choice {
    int rows, k, sixteens;
    bool narrow, few, short_rows;
    explicit Choice(int rows, const Mat& w) : rows(rows), k(w.k), sixteens(ceil_div(w.n, 16)) {
        narrow = sixteens < 200;           // less than a block and a half for each multiprocessor
        few = sixteens <= 64 && k > 2048;  // half of them idle unless blocks share results
        short_rows = k <= 4 * kPanel;      // not even a panel for every part
    }
    // Launched early, the blocks of a grid of about one a multiprocessor may crowd those that the kernel before leaves free: from
    // some rows on only narrow ones gain.
    bool early() const { return rows <= 16 || k <= 1536 || (rows <= 256 && narrow); }
};

// Products of warpgroups, on sm_90. False where others are no slower: up to 8 rows, and up to 32 of w that is narrow or short.
template <int kDown, int kAcross, int kInTurn, int kRows, int kDepth = 16>
using Wide = Tile<kDown, kAcross, kInTurn, kRows, kDepth, 1, Way::groups>;
template <class Out>
bool wide_product(const Product<Out>& p, const Choice& c) {
    const How how{c.early(), true};
    const auto take = [&]<class T>(How how) {
        run<T, true>(p, how);
        return true;
    };
    if (c.rows <= 8 || (c.rows <= 32 && (c.narrow || c.short_rows))) return false;
    // A row of 1,024 fits into eight stages; with more, a block would find no room beside those of the kernel before.
    if (c.rows <= 16 && c.k <= 2 * kRound) return take.template operator()<Wide<4, 2, 4, 16, 8>>(how);
    if (c.rows <= 16) return take.template operator()<Wide<4, 2, 4, 16>>(how);
    if (c.rows <= 32) return take.template operator()<Wide<4, 2, 4, 32>>(how);
    if (c.rows <= 64) {
        if (c.short_rows) return take.template operator()<Wide<4, 2, 2, 64>>(how);
        if (c.few) return take.template operator()<Wide<4, 1, 1, 64>>(how);
        // Some hundred blocks: as clusters of four they would not all run at once.
        if (c.narrow) return take.template operator()<Wide<4, 2, 1, 64>>({how.early, c.sixteens <= 100});
        return take.template operator()<Wide<4, 2, 4, 64>>(how);
    }
    if (c.rows <= 128 && c.few) return take.template operator()<Wide<4, 2, 1, 64>>(how);
    if (c.rows <= 128 && c.narrow && !c.short_rows) return take.template operator()<Wide<4, 4, 1, 64>>(how);
    if (!c.short_rows && c.k <= 2304) return take.template operator()<Wide<4, 2, 4, 64>>(how);
    return take.template operator()<Wide<4, 2, 2, 128>>(how);
}

// Products of warps, everywhere.
template <class Out>
void base_product(const Product<Out>& p, const Choice& c) {
    const int rows = c.rows, k = c.k, sixteens = c.sixteens;
    const bool narrow = c.narrow, few = c.few, short_rows = c.short_rows;
    const How how{c.early(), !(narrow && sixteens > 100 && rows > 16)};
    if (rows <= 8) {
        if (few) return run<Tile<1, 4, 1, 8>, true>(p, how);
        if (short_rows) return run<Tile<2, 2, 2, 8>, true>(p, how);
        if (narrow || sixteens >= 800) return run<Tile<1, 8, 1, 8>, true>(p, how);
        return run<Tile<2, 4, 2, 8>, true>(p, how);
    }
    if (rows <= 16) {
        if (short_rows) return run<Tile<2, 2, 2, 16>, true>(p, how);
        if (narrow) return run<Tile<1, 4, 1, 16>, true>(p, how);
        if (k <= 2048) return run<Tile<2, 4, 2, 16, 3>, true>(p, how);
        return sixteens >= 800 ? run<Tile<1, 4, 2, 16>, true>(p, how) : run<Tile<4, 2, 2, 16>, true>(p, how);
    }
    if (rows <= 32) {
        if (short_rows) return run<Tile<2, 2, 2, 32>, true>(p, how);
        if (narrow) return run<Tile<2, 2, 1, 32>, true>(p, how);
        return k <= 2048 ? run<Tile<2, 2, 4, 32>, true>(p, how) : run<Tile<8, 1, 2, 32>, true>(p, how);
    }
    if (rows <= 64) {
        if (short_rows) return run<Tile<2, 2, 2, 64>, true>(p, how);
        if (narrow) return run<Tile<2, 2, 1, 64>, true>(p, how);
    }
    if (short_rows) return run<Tile<4, 1, 4, 64>, true>(p, how);
    if (few && rows <= 128) return run<Tile<2, 2, 1, 64>, true>(p, how);
    if (narrow && rows <= 128) return run<Tile<2, 2, 2, 64>, true>(p, {how.early, true});
    run<Tile<4, 1, 2, 64, 16, 2>, true>(p, {how.early, true});
}

template <class Out>
void product(const Product<Out>& p) {
    if (p.n_rows.most <= 0 || p.w.n <= 0) return;
    if (p.w.k % kColumns != 0 || !aligned16(p.x) || !aligned16(p.w.w)) return run<Tile<1, 4, 2, 16>, false>(p);
    const Choice c(p.n_rows.most, p.w);
    if (bound().group.name == "sm_90" && wide_product(p, c)) return;
    base_product(p, c);
}

constexpr int kGateThreads = 128;

__device__ __forceinline__ float gated(float gate, float up) { return gate / (1.0f + expf(-gate)) * up; }

// grid: pieces of eight elements, rows. Floor: 6 bytes an element / bandwidth.
template <bool kVector>
__global__ void __launch_bounds__(kGateThreads) swiglu_kernel(RowsPtr y, RowsPtr x, int width, Number n_rows) {
    let_next_kernel_start();  // the product behind it asks for weights first
    wait_for_kernel_before();
    const int r = blockIdx.y;
    if (r >= n_rows()) return;
    const int i = (blockIdx.x * kGateThreads + threadIdx.x) * kColumns;
    if (i >= width) return;
    const bf16 *gate = x[r] + i, *up = gate + width;
    bf16* to = y[r] + i;
    if constexpr (kVector) {
        const uint4 g = load16(gate), u = load16(up);
        const auto two = [](uint32_t a, uint32_t b) {
            return pack_bf16(gated(low_bf16(a), low_bf16(b)), gated(high_bf16(a), high_bf16(b)));
        };
        store16(to, {two(g.x, u.x), two(g.y, u.y), two(g.z, u.z), two(g.w, u.w)});
    } else {
        for (int j = 0; j < min(kColumns, width - i); j++)
            to[j] = __float2bfloat16_rn(gated(__bfloat162float(gate[j]), __bfloat162float(up[j])));
    }
}

}  // namespace

void linear(Rows y, Rows x, Mat w, Count n_rows) {
    const RowsPtr to = raw(y);
    product(Product<bf16>{to.p, static_cast<size_t>(to.stride), x, w, n_rows});
}

void logits(Dev<float> y, int stride, Rows x, Mat w, Count n_rows) {
    product(Product<float>{raw(y), static_cast<size_t>(stride), x, w, n_rows});
}

void swiglu(Rows y, Rows x, Count n_rows, int width) {
    const dim3 grid(ceil_div(width, kGateThreads * kColumns), n_rows.most);
    if (width % kColumns == 0 && aligned16(y) && aligned16(x))
        launch_as<swiglu_kernel<true>>({.early = true}, grid, kGateThreads, raw(y), raw(x), width, number(n_rows));
    else
        launch_as<swiglu_kernel<false>>({.early = true}, grid, kGateThreads, raw(y), raw(x), width, number(n_rows));
}

}  // namespace kd::ops
