// How a matrix product with bf16 weights is computed: rows of w are the 16-row operand, rows of x the 8-wide one.
//
// The arithmetic of one result, fixed by k alone: the columns are cut into panels of 64; panel j belongs to part j % 8; a part
// is one chain of m16n8k16 products over its panels in order, 16 columns at a time, from 0; the parts are added as
// ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)) in fp32. Who computes which part is free (Tile, below), and so is how many rows of x
// share a tile: choices by speed, which change no bit. On sm_90 the chain may be one of warpgroup products of 64 x 16 .. 128 x 16:
// 49,152 of their results were compared with those of m16n8k16 there, and none differs. Columns past k are zeros and add nothing.
// Rows past the last, of w or x, are whatever shared memory holds: each is a row or a column of a product of its own that nobody
// keeps.
#pragma once

#include <algorithm>

#include "launch.h"
#include "linear_sums.h"
#include "mma.h"
#include "raw.h"
#include "wgmma.h"

namespace kd::cuda {

constexpr int kParts = 8;
constexpr int kPanel = 64;               // columns; 128 bytes of a row, one line
constexpr int kRound = kParts * kPanel;  // columns of one panel of every part
constexpr int kPanelRow = kPanel * 2;    // bytes
constexpr int kPieceBytes = 16;          // of a panel row, at piece ^ (row % 8): eight rows of a column hit all banks
constexpr int kPieces = kPanelRow / kPieceBytes;
constexpr int kColumns = kPieceBytes / 2;  // of a piece
constexpr int kFlagBytes = 1024;           // more than a product declares statically: a flag
constexpr int kMostResults = 1 << 14;      // tiles of results in one launch that several blocks share

// Who multiplies: warps, or, on sm_90, warpgroups.
enum class Way { warps, groups };

// How a block works: kDown warps down the rows of w (16 kTall each) times kAcross warps along k, for kRows rows of x. A warp
// computes kInTurn neighbouring parts one after the other; if kAcross * kInTurn < kParts, several blocks share a tile of
// results. They are a cluster and add what each has in shared memory; before sm_90, the one that comes last adds what all have
// left in memory. At most kDepth steps are in shared memory.
template <int kDown_, int kAcross_, int kInTurn_, int kRows_, int kDepth = 16, int kTall_ = 1, Way kWay_ = Way::warps>
struct Tile {
    static constexpr int kDown = kDown_, kAcross = kAcross_, kInTurn = kInTurn_, kRows = kRows_, kTall = kTall_;
    static constexpr Way kWay = kWay_;
    static constexpr bool kHopper = kWay != Way::warps;
    static constexpr int kWarps = kDown * kAcross;
    static constexpr int kThreads = kWarps * kWarp;
    static constexpr int kSixteens = kDown * kTall;
    static constexpr int kOut = 16 * kSixteens;                   // rows of w
    static constexpr int kBlocks = kParts / (kAcross * kInTurn);  // that share a tile of results, at most
    static constexpr int kWeightBytes = kOut * kAcross * kPanelRow;
    static constexpr int kStageBytes = kWeightBytes + kRows * kAcross * kPanelRow;
    static constexpr int kRoom =
        (kHopper ? kHopperBlockBytes - 1024 : kBlockBytes) - kFlagBytes;  // 1024: to align stages
    static constexpr int kFit = kRoom / kStageBytes;
    static constexpr int kStages = kFit < kDepth ? kFit : kDepth;
    static constexpr int kSumBytes = kAcross * kSixteens * kRows * kSumStride * 4;
    static constexpr int kBytes = kStages * kStageBytes > kSumBytes ? kStages * kStageBytes : kSumBytes;
    static_assert(kBytes <= kRoom);
    static_assert(kStages >= 2 && kRows % 8 == 0 && (kRows == 8 || kRows % 16 == 0));
    static_assert(kBlocks * kAcross * kInTurn == kParts);
    static_assert(!kHopper || (kDown % 4 == 0 && kTall == 1), "a warpgroup has 64 rows");
};

// Eight columns to shared memory; those from `columns` on (all, if it is not positive) are 0 and not read.
template <bool kVector>
__device__ __forceinline__ void fill_piece(void* to, const bf16* from, int columns) {
    if constexpr (kVector) {
        cp_async_16(to, from, columns > 0);
    } else {
        const uint16_t* bits = reinterpret_cast<const uint16_t*>(from);
        uint32_t word[4] = {};
#pragma unroll
        for (int j = 0; j < kColumns; j++)
            if (j < columns) word[j / 2] |= static_cast<uint32_t>(bits[j]) << (j % 2 * 16);
        store16(to, {word[0], word[1], word[2], word[3]});
    }
}

// Adds one panel of weights times one of x: sum[h][e] is the product of weights 16 h .. and rows 8 e .. of x, for e < kLive.
template <int kLive, int kTall, int kEights>
__device__ __forceinline__ void multiply_panel(float (&sum)[kTall][kEights][4], const char* weights, const char* x) {
    const int lane = threadIdx.x % kWarp;
    const auto piece_at = [](const char* panel, int row, int piece) {
        return panel + row * kPanelRow + ((piece ^ row % 8) * kPieceBytes);
    };
    if constexpr (kLive == 1) {
#pragma unroll
        for (int s = 0; s < kPanel / 32; s++) {
            uint32_t b[4];
            ldmatrix_x4(b, piece_at(x, lane % 8, 4 * s + lane / 8));
#pragma unroll
            for (int h = 0; h < kTall; h++) {
                uint32_t a[2][4];
                ldmatrix_x4(a[0], piece_at(weights, h * 16 + lane % 16, 4 * s + lane / 16));
                ldmatrix_x4(a[1], piece_at(weights, h * 16 + lane % 16, 4 * s + 2 + lane / 16));
                mma_bf16(sum[h][0], a[0], {b[0], b[1]});
                mma_bf16(sum[h][0], a[1], {b[2], b[3]});
            }
        }
    } else {
#pragma unroll
        for (int s = 0; s < kPanel / 16; s++) {
            uint32_t a[kTall][4], b[kLive / 2][4];
#pragma unroll
            for (int h = 0; h < kTall; h++) ldmatrix_x4(a[h], piece_at(weights, h * 16 + lane % 16, 2 * s + lane / 16));
#pragma unroll
            for (int e = 0; e < kLive; e += 2)
                ldmatrix_x4(b[e / 2], piece_at(x, e * 8 + lane % 8 + lane / 16 * 8, 2 * s + lane / 8 % 2));
#pragma unroll
            for (int e = 0; e < kLive; e += 2) {
#pragma unroll
                for (int h = 0; h < kTall; h++) {
                    mma_bf16(sum[h][e], a[h], {b[e / 2][0], b[e / 2][1]});
                    mma_bf16(sum[h][e + 1], a[h], {b[e / 2][2], b[e / 2][3]});
                }
            }
        }
    }
}

// The same for the smallest kLive that holds `rows`: straight code for each, so that loads run ahead of products.
template <int kLive, int kTall, int kEights>
__device__ __forceinline__ void multiply_rows(float (&sum)[kTall][kEights][4], const char* weights, const char* x,
                                              int rows) {
    if constexpr (kLive >= 4) {
        if (rows <= kLive * 4) return multiply_rows<kLive / 2>(sum, weights, x, rows);
    }
    multiply_panel<kLive>(sum, weights, x);
}

// By a warpgroup: starts adding a panel of 64 rows of weights times one of x.
template <int kEights>
__device__ __forceinline__ void start_panel(float (&sum)[1][kEights][4], const char* weights, const char* x) {
    const uint64_t a = matrix_at(weights), b = matrix_at(x);
    products_begin();
#pragma unroll
    for (int i = 0; i < kPanel / 16; i++)
        product_rows(reinterpret_cast<float (&)[4 * kEights]>(sum), a + 2 * i, b + 2 * i, true);
    products_commit();
}
// Until all but kPending panels have been added; kPending 0: the sums may be read.
template <int kPending, int kEights>
__device__ __forceinline__ void end_panel(float (&sum)[1][kEights][4]) {
    products_wait<kPending>();
    if constexpr (kPending == 0) products_in(reinterpret_cast<float (&)[4 * kEights]>(sum));
}

// grid: tiles of rows of x, blocks that share results, tiles of rows of w. Only the first is made for `most`. early: it was launched
// early, and asks for the weights of its first steps before the kernel before has ended; the next one may start when it has asked
// for all of them.
template <class T, bool kVector, class Out, bool kCluster>
__device__ __forceinline__ void product_of_pieces(char* stages, Out* y, size_t y_stride, RowsPtr x, const bf16* w,
                                                  int n, int k, Number n_rows, Shares shares, bool early) {
    const int row0 = blockIdx.x * T::kRows, out0 = blockIdx.z * T::kOut, outs = n - out0;
    const int thread = threadIdx.x, warp = thread / kWarp;
    const int down = warp % T::kDown, across = warp / T::kDown;
    const int part0 = blockIdx.y * T::kAcross * T::kInTurn;
    const int rounds = (k + kRound - 1) / kRound, steps = rounds * T::kInTurn;

    // What a thread brings of each step, one panel of each of the parts that are being computed: a piece of some rows of w and x.
    const int my_row = thread / (kPieces * T::kAcross), my_across = thread / kPieces % T::kAcross;
    const int my_piece = thread % kPieces;
    constexpr int kStep = T::kThreads / (kPieces * T::kAcross);  // rows between those of one thread
    static_assert(kStep * kPieces * T::kAcross == T::kThreads && T::kOut % kStep == 0);
    const auto place = [&](int panel_rows, int row) {
        return (my_across * panel_rows + row) * kPanelRow + ((my_piece ^ row % 8) * kPieceBytes);
    };
    const int my_column = (part0 + my_across * T::kInTurn) * kPanel + my_piece * kColumns;
    const bf16* my_weights = w + static_cast<size_t>(out0 + my_row) * static_cast<size_t>(k) + my_column;
    const bf16* my_x = x[row0 + my_row] + my_column;
    int rows = 0;  // not known yet
    const size_t weights_step = static_cast<size_t>(kStep) * static_cast<size_t>(k);
    const size_t x_step = static_cast<size_t>(kStep) * static_cast<size_t>(x.stride);
    int load_round = 0, load_turn = 0;
    const auto load_columns = [&]<bool kAll, bool kOfWeights, bool kOfX>(char* stage) {
        const int column = load_round * kRound + load_turn * kPanel;
        const int left = kAll ? kColumns : k - column - my_column;
        const bf16 *from_weights = my_weights + column, *from_x = my_x + column;
        if constexpr (kOfWeights) {
#pragma unroll
            for (int i = 0; i < T::kOut; i += kStep) {
                if (i + my_row < outs) fill_piece<kVector>(stage + place(T::kOut, i + my_row), from_weights, left);
                from_weights += weights_step;
            }
        }
        if constexpr (kOfX) {
#pragma unroll
            for (int i = 0; i < T::kRows; i += kStep) {
                if (i + my_row < rows)
                    fill_piece<kVector>(stage + T::kWeightBytes + place(T::kRows, i + my_row), from_x, left);
                from_x += x_step;
            }
        }
        if (++load_round == rounds) load_round = 0, load_turn++;
    };
    const bool all_columns = k % kRound == 0;
    const auto load = [&]<bool kOfWeights, bool kOfX>(int slot) {
        char* stage = stages + slot * T::kStageBytes;
        all_columns ? load_columns.template operator()<true, kOfWeights, kOfX>(stage)
                    : load_columns.template operator()<false, kOfWeights, kOfX>(stage);
    };
    constexpr int kFirst = T::kStages - 1;                     // steps that are asked for before one is multiplied
    const bool weights_first = kVector && early && row0 == 0;  // those rows are there
    if (weights_first) {
#pragma unroll 1
        for (int step = 0; step < min(kFirst, steps); step++) load.template operator()<true, false>(step);
        load_round = load_turn = 0;
    }
    wait_for_kernel_before();
    rows = min(n_rows() - row0, static_cast<int>(T::kRows));
    if (rows <= 0) {
        cp_async_commit();
        cp_async_wait<0>();
        return;
    }

    constexpr int kEights = T::kRows / 8;
    constexpr int kLevels = T::kInTurn == 8 ? 3 : T::kInTurn == 4 ? 2 : 1;
    float sum[T::kTall][kEights][4] = {};
    [[maybe_unused]] float held[kLevels][T::kTall][kEights][4];

    if (weights_first) {
#pragma unroll 1
        for (int step = 0; step < kFirst; step++) {
            if (step < steps) load.template operator()<false, true>(step);
            cp_async_commit();
        }
    } else {
#pragma unroll
        for (int step = 0; step < kFirst; step++) {
            if (step < steps) load.template operator()<true, true>(step);
            cp_async_commit();
        }
    }
    int slot = 0, ahead = kFirst, round = 0, turn = 0;
    for (int step = 0; step < steps; step++) {
        cp_async_wait<T::kStages - 2>();
        if constexpr (T::kWay == Way::groups) fence_for_products();
        __syncthreads();
        const char* weights = stages + slot * T::kStageBytes;
        const char* from_x = weights + T::kWeightBytes + across * T::kRows * kPanelRow;
        if constexpr (T::kWay == Way::groups)
            start_panel(sum, weights + (across * T::kOut + down / 4 * 64) * kPanelRow, from_x);
        if (step + kFirst < steps)
            load.template operator()<true, true>(ahead);
        else if (early)
            let_next_kernel_start();
        cp_async_commit();
        if constexpr (T::kWay == Way::groups)
            end_panel<0>(sum);
        else
            multiply_rows<kEights>(sum, weights + (across * T::kOut + down * 16 * T::kTall) * kPanelRow, from_x, rows);
        ahead = slot;
        slot = slot + 1 == T::kStages ? 0 : slot + 1;
        if constexpr (T::kInTurn > 1) {
            if (++round == rounds) {
                end_part<0>(sum, held, turn);
                if (++turn < T::kInTurn) each_sum<T::kTall, kEights>([&](int h, int e, int i) { sum[h][e][i] = 0; });
                round = 0;
            }
        }
    }
    cp_async_wait<0>();
    __syncthreads();

    add_up<T, kCluster>(y, y_stride, sum, stages, rows, outs, shares);
}

template <class T, bool kVector, class Out, bool kCluster>
__global__ void __launch_bounds__(T::kThreads, 1)
    product_kernel(Out* y, size_t y_stride, RowsPtr x, const bf16* w, int n, int k, Number n_rows, Shares shares,
                   bool early) {
    extern __shared__ __align__(1024) char stages[];
    if constexpr (!T::kHopper || KD_HOPPER)
        product_of_pieces<T, kVector, Out, kCluster>(stages, y, y_stride, x, w, n, k, n_rows, shares, early);
}

template <class Out>
struct Product {
    Out* y;
    size_t y_stride;
    Rows x;
    Mat w;
    Count n_rows;
};

// How a product is launched: choices by speed.
struct How {
    bool early = false;   // launch.h; its weights then compete with what the kernel before still reads
    bool cluster = true;  // the blocks that share results, where the GPU has clusters
};

// How many blocks share a tile of results, and where those leave their sums that are no cluster.
struct Sharing {
    int row_tiles, out_tiles, blocks, cluster;
    Shares shares;
    dim3 grid() const {
        return dim3(static_cast<unsigned>(row_tiles), static_cast<unsigned>(blocks), static_cast<unsigned>(out_tiles));
    }
};
template <class T, class Out>
Sharing sharing(const Product<Out>& p, How how) {
    Sharing s{ceil_div(p.n_rows.most, T::kRows), ceil_div(p.w.n, T::kOut), 1, 1, {}};
    const int parts = std::min(kParts, ceil_div(p.w.k, kPanel));
    s.blocks = std::max(1, std::min(T::kBlocks, ceil_div(parts, T::kAcross * T::kInTurn)));
    s.cluster = how.cluster && bound().major >= 9 ? s.blocks : 1;
    if (s.blocks > s.cluster) {
        const size_t tiles = static_cast<size_t>(s.row_tiles) * static_cast<size_t>(s.out_tiles);
        KD_CHECK(tiles <= kMostResults);
        s.shares.arrived = scratch<uint32_t>(Use::linear, kMostResults + tiles * s.blocks * T::kRows * T::kOut);
        s.shares.sum = reinterpret_cast<float*>(s.shares.arrived + kMostResults);
    }
    return s;
}

template <class T, bool kVector, class Out>
void run(const Product<Out>& p, How how = {}) {
    static_assert(kVector || !T::kHopper);
    static_assert(T::kHopper || T::kBytes + kFlagBytes <= kBlockBytes, "more shared memory than a block has on sm_120");
    const Sharing s = sharing<T>(p, how);
    const auto go = [&]<bool kCluster>() {
        launch_with<product_kernel<T, kVector, Out, kCluster>, T::kBytes>(
            {how.early, s.cluster}, s.grid(), T::kThreads, p.y, p.y_stride, raw(p.x),
            reinterpret_cast<const bf16*>(raw(p.w.w)), p.w.n, p.w.k, number(p.n_rows), s.shares, how.early);
    };
    if constexpr (T::kBlocks > 1) {
        if (s.cluster == s.blocks) return go.template operator()<true>();
    }
    go.template operator()<false>();
}

}  // namespace kd::cuda
