#include <algorithm>

#include "error.h"
#include "launch.h"
#include "mma.h"
#include "ops.h"
#include "raw.h"

namespace kd::ops {

namespace {

using namespace kd::cuda;

// ---- scores ---------------------------------------------------------------------------------------------------------

// router . h by matrix products: a weight in fp32 is the sum of three in bf16, and each product of two bf16 is exact. Hidden is cut
// into eight parts, one a block, and a part into runs of 32; warp w of seven has runs w, w + 7, .. of it in one chain of products,
// smallest terms first. Warps are added in order, then parts, by the kernel after this. That is all the order there is, whatever
// the number of rows. Weights that are bf16 already, as in checkpoints of Kimi K2, take one product instead of three.
//
// Floor: the router's bytes, 11 MB of Kimi K2, 2.8 us at 4.0 TB/s. A block has 16 experts; a warp asks for its weights, and for no
// other warp's, before the kernel before has ended. Lane (g, t) of a fragment owns eight neighbours of k, 8 t .. 8 t + 7, of weights
// and rows alike, so that both come as vectors, rows right from memory.
constexpr int kParts = 8, kPartWarps = 7, kScoreThreads = kPartWarps * kWarp;
constexpr int kRun = 32, kAhead = 4;  // runs of a warp in shared memory: all, up to a hidden of 7,168
constexpr int kTile = 16;             // experts of a block
constexpr int kRows = 32;             // at a time
constexpr int kRunStride = kRun + 4, kSumStride = kTile + 4;  // floats: the lanes of a fragment are in different banks

struct Room {
    float weights[kPartWarps][kAhead][kTile][kRunStride];
    float sums[kPartWarps][kRows][kSumStride];
};

struct Scores {
    RowsPtr h;
    const float* router;
    int hidden, experts, part, first_expert;

    __device__ int runs() const { return (hidden + kParts * kRun - 1) / (kParts * kRun); }  // of a part
    __device__ int column(int run) const { return (part * runs() + run) * kRun; }

    // Runs first, first + kPartWarps, .. of this warp to shared memory. What is not there is zero, and adds nothing.
    template <bool kAligned>
    __device__ __forceinline__ void stage(float (&to)[kAhead][kTile][kRunStride], int first) const {
        constexpr int pieces = kRun / 4;
#pragma unroll 4
        for (int v = threadIdx.x % kWarp; v < kAhead * kTile * pieces; v += kWarp) {
            const int i = v / (kTile * pieces), e = v / pieces % kTile, run = first + i * kPartWarps;
            const int k = column(run) + v % pieces * 4;
            const bool there = run < runs() && first_expert + e < experts && k < hidden;
            const float* from = router + static_cast<size_t>(first_expert + e) * static_cast<size_t>(hidden) + k;
            float* const own = &to[i][e][v % pieces * 4];
            if constexpr (kAligned) {
                cp_async_16(own, there ? from : router, there);
            } else {
                for (int j = 0; j < 4; j++) own[j] = there && k + j < hidden ? from[j] : 0;
            }
        }
        cp_async_commit();
    }

    // Columns k .. k + 7 of a row.
    template <bool kAligned>
    __device__ __forceinline__ uint4 row(int r, int end, int k) const {
        if constexpr (kAligned) {
            return r < end && k < hidden ? load16(h[r] + k) : uint4{};
        } else {
            uint32_t word[4] = {};
            for (int i = 0; i < 8; i++) {
                if (r < end && k + i < hidden)
                    word[i / 2] |= static_cast<uint32_t>(__bfloat16_as_ushort(h[r][k + i])) << (16 * (i % 2));
            }
            return {word[0], word[1], word[2], word[3]};
        }
    }
};

// The largest of the three terms of weights w[0] (expert g), w[1] (g + 8), as operands of two products; it is taken off them.
__device__ __forceinline__ void term_of(uint32_t (&a)[2][4], float (&w)[2][8]) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float (&own)[8] = w[i % 2];
        const int k = 4 * (i / 4) + 2 * (i / 2 % 2);
        uint32_t& pair = a[i / 4][i % 4];
        pair = pack_bf16(own[k], own[k + 1]);
        own[k] -= low_bf16(pair);
        own[k + 1] -= high_bf16(pair);
    }
}
template <int kGroups>
__device__ __forceinline__ void take_term(float (&d)[kGroups][4], const uint32_t (&a)[2][4],
                                          const uint4 (&x)[kGroups]) {
#pragma unroll
    for (int b = 0; b < kGroups; b++) mma_bf16(d[b], a[0], {x[b].x, x[b].y});
#pragma unroll
    for (int b = 0; b < kGroups; b++) mma_bf16(d[b], a[1], {x[b].z, x[b].w});
}

// sums [kParts][rows][experts] of `here` rows, at most 8 kGroups. staged: the first of this warp's runs that is in shared memory.
template <int kGroups, bool kRouterAligned, bool kHAligned>
__device__ __forceinline__ void score_rows(Room& room, float* sums, const Scores& s, int& staged, int first_row,
                                           int here, int most_rows) {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, g = lane / 4, t = lane % 4;
    const int runs = s.runs(), end = first_row + here;
    auto& weights = room.weights[warp];
    const auto fetch = [&](uint4(&x)[kGroups], int run) {
#pragma unroll
        for (int b = 0; b < kGroups; b++)
            x[b] = s.row<kHAligned>(first_row + 8 * b + g, run < runs ? end : 0, s.column(run) + 8 * t);
    };
    float d[kGroups][4] = {};
    const auto multiply = [&](int i, const uint4(&x)[kGroups]) {
        float w[2][8];
        uint32_t bits = 0;
#pragma unroll
        for (int v = 0; v < 4; v++) {
            const float4 four = *reinterpret_cast<const float4*>(&weights[i][g + v / 2 * 8][8 * t + v % 2 * 4]);
            float* const to = &w[v / 2][v % 2 * 4];
            to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
            bits |=
                __float_as_uint(four.x) | __float_as_uint(four.y) | __float_as_uint(four.z) | __float_as_uint(four.w);
        }
        uint32_t large[2][4];
        term_of(large, w);
        if (__any_sync(0xffffffffu, (bits & 0xffffu) != 0)) {
            uint32_t middle[2][4], small[2][4];
            term_of(middle, w);
            term_of(small, w);
            take_term(d, small, x);
            take_term(d, middle, x);
        }
        take_term(d, large, x);
    };
    // Rows of the next run are on their way while one is multiplied.
    constexpr int kUnroll = kGroups == 1 ? kAhead / 2 : 1;  // as far as registers last
    static_assert(kAhead % 2 == 0);
    for (int first = warp; first < runs; first += kPartWarps * kAhead) {
        uint4 now[kGroups], next[kGroups];
        fetch(now, first);
        if (staged != first) {
            __syncwarp();  // all have read what is now written over
            s.stage<kRouterAligned>(weights, first);
            staged = first;
        }
        cp_async_wait<0>();
        __syncwarp();
#pragma unroll kUnroll
        for (int i = 0; i < kAhead; i += 2) {
            fetch(next, first + (i + 1) * kPartWarps);
            multiply(i, now);
            if (i + 2 < kAhead) fetch(now, first + (i + 2) * kPartWarps);
            multiply(i + 1, next);
        }
    }
#pragma unroll
    for (int b = 0; b < kGroups; b++)
#pragma unroll
        for (int i = 0; i < 4; i++) room.sums[warp][8 * b + 2 * t + i % 2][g + 8 * (i / 2)] = d[b][i];
    __syncthreads();
    for (int v = threadIdx.x; v < here * kTile; v += kScoreThreads) {
        const int r = v / kTile, e = v % kTile;
        if (s.first_expert + e >= s.experts) continue;
        float total = room.sums[0][r][e];
#pragma unroll
        for (int w = 1; w < kPartWarps; w++) total += room.sums[w][r][e];
        sums[static_cast<size_t>(s.part * most_rows + first_row + r) * s.experts + s.first_expert + e] = total;
    }
    __syncthreads();
}

// kRouterAligned, kHAligned: 16 bytes can be moved at once.
template <bool kRouterAligned, bool kHAligned>
__global__ void __launch_bounds__(kScoreThreads, 2)
    score_parts(float* sums, RowsPtr h, const float* router, Number n_rows, int hidden, int experts) {
    extern __shared__ __align__(16) unsigned char memory[];
    auto& room = *reinterpret_cast<Room*>(memory);
    const int warp = threadIdx.x / kWarp;
    const Scores s{h, router, hidden, experts, static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y) * kTile};
    int staged = blockIdx.z == 0 ? warp : -1;  // the others may find no rows
    if (staged == warp) s.stage<kRouterAligned>(room.weights[warp], warp);
    wait_for_kernel_before();
    let_next_kernel_start();
    const int n = n_rows();
    for (int first_row = blockIdx.z * kRows; first_row < n; first_row += gridDim.z * kRows) {
        const int here = min(kRows, n - first_row);
        if (here <= 8)
            score_rows<1, kRouterAligned, kHAligned>(room, sums, s, staged, first_row, here, n_rows.most);
        else if (here <= 16)
            score_rows<2, kRouterAligned, kHAligned>(room, sums, s, staged, first_row, here, n_rows.most);
        else
            score_rows<4, kRouterAligned, kHAligned>(room, sums, s, staged, first_row, here, n_rows.most);
    }
    cp_async_wait<0>();
}

// ---- choice ---------------------------------------------------------------------------------------------------------

// A float as an integer in the same order; NaN below all, and above 0.
__device__ __forceinline__ uint32_t order_of(float v) {
    if (isnan(v)) return 1;
    const uint32_t bits = __float_as_uint(v + 0.0f);  // -0 and 0 are equal
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// A block a row: all threads sum the parts, then the first warp takes the best of s + bias, one at a time.
// Floor: 32 bytes an expert from the second-level cache.
constexpr int kChooseThreads = 384;

// Of a row's keys, whose best is taken again and again: `take` gives the expert of the largest key, of equals the lowest. By one warp.
// Few: a lane keeps its keys in registers. Many: they stay in shared memory.
template <int kMost>
struct Keys {
    static constexpr int kEach = kMost / kWarp;
    uint32_t own[kEach];
    uint32_t best;
    int place;

    __device__ __forceinline__ void look() {
        best = 0;
        place = 0;
#pragma unroll
        for (int i = 0; i < kEach; i++) {
            if (own[i] > best) best = own[i], place = i;
        }
    }
    __device__ __forceinline__ Keys(const uint32_t* key, int experts) {
        const int lane = threadIdx.x;
#pragma unroll
        for (int i = 0; i < kEach; i++) own[i] = lane + i * kWarp < experts ? key[lane + i * kWarp] : 0;
        look();
    }
    __device__ __forceinline__ int take() {
        const int lane = threadIdx.x;
        const uint32_t top = __reduce_max_sync(0xffffffffu, best);
        const uint32_t id =
            __reduce_min_sync(0xffffffffu, best == top ? static_cast<uint32_t>(lane + place * kWarp) : ~0u);
        if (static_cast<int>(id % kWarp) == lane) {
#pragma unroll
            for (int i = 0; i < kEach; i++) own[i] = i == place ? 0 : own[i];
            look();
        }
        return static_cast<int>(id);
    }
};

template <int kMost>
__global__ void __launch_bounds__(kChooseThreads)
    choose_experts(int32_t* expert, float* weight, const float* sums, const float* bias, Number n_rows, int experts,
                   int slots, bool norm_topk, float scale) {
    extern __shared__ float score[];                               // [kMost]
    auto* const key = reinterpret_cast<uint32_t*>(score + kMost);  // [kMost] 0: taken
    const int lane = threadIdx.x;
    const float first_bias = lane < experts ? bias[lane] : 0;
    wait_for_kernel_before();
    let_next_kernel_start();
    const int n = n_rows();
    for (int r = blockIdx.x; r < n; r += gridDim.x) {
        __syncthreads();  // the row before has been chosen for
        for (int e = threadIdx.x; e < experts; e += kChooseThreads) {
            const size_t step = static_cast<size_t>(n_rows.most) * experts;
            const float* from = sums + static_cast<size_t>(r) * experts + e;
            float part[kParts];
#pragma unroll
            for (int i = 0; i < kParts; i++) part[i] = from[i * step];
            float total = part[0];
#pragma unroll
            for (int i = 1; i < kParts; i++) total += part[i];
            const float own = 1 / (1 + expf(-total));
            score[e] = own;
            key[e] = order_of(own + (e == lane ? first_bias : bias[e]));
        }
        __syncthreads();
        if (threadIdx.x >= kWarp) continue;
        float total = 0;
        const auto put = [&](int slot, int e) {
            total += score[e];
            if (lane == 0) expert[r * slots + slot] = e;
            if (lane == slot % kWarp) weight[r * slots + slot] = score[e];
        };
        if constexpr (kMost <= 512) {
            Keys<kMost> keys(key, experts);
            for (int slot = 0; slot < slots; slot++) put(slot, keys.take());
        } else {
            for (int slot = 0; slot < slots; slot++) {
                uint64_t best = 0;  // key, then the complement of the id
                for (int e = lane; e < experts; e += kWarp)
                    best = max(best, static_cast<uint64_t>(key[e]) << 32 | ~static_cast<uint32_t>(e));
#pragma unroll
                for (int step = kWarp / 2; step > 0; step /= 2)
                    best = max(best, __shfl_xor_sync(0xffffffffu, best, step));
                const int e = static_cast<int>(~static_cast<uint32_t>(best));
                put(slot, e);
                __syncwarp();  // all have read what is now written over
                if (lane == 0) key[e] = 0;
                __syncwarp();
            }
        }
        const float divisor = norm_topk ? total + 1e-20f : 1.0f;
        for (int slot = lane; slot < slots; slot += kWarp)
            weight[r * slots + slot] = weight[r * slots + slot] / divisor * scale;
    }
}

}  // namespace

void route(Dev<int32_t> expert, Dev<float> weight, Rows h, Dev<const float> router, Vec bias, Count n_rows,
           const Shape& s) {
    if (n_rows.most <= 0) return;
    constexpr int few = 512, many = 4096;  // experts; the loader takes no more
    KD_CHECK(s.experts <= many && s.experts_per_token <= s.experts);
    const size_t n = static_cast<size_t>(n_rows.most) * static_cast<size_t>(s.experts);
    float* const sums = scratch<float>(Use::moe_rows, kParts * n);
    const bool router_aligned = s.hidden % 8 == 0 && aligned16(router), h_aligned = s.hidden % 8 == 0 && aligned16(h);
    // A block goes over all rows with the weights it has; only for many are there several of one kind.
    const dim3 grid(kParts, static_cast<unsigned>(ceil_div(s.experts, kTile)),
                    static_cast<unsigned>(std::min(ceil_div(n_rows.most, 4 * kRows), 4)));
    const auto scores = [&]<bool kRouterAligned, bool kHAligned>() {
        launch_as<score_parts<kRouterAligned, kHAligned>, static_cast<int>(sizeof(Room))>(
            {.early = true}, grid, kScoreThreads, sums, raw(h), raw(router), number(n_rows), s.hidden, s.experts);
    };
    if (router_aligned && h_aligned)
        scores.template operator()<true, true>();
    else if (router_aligned)
        scores.template operator()<true, false>();
    else
        scores.template operator()<false, false>();
    const auto choose = [&]<int kMost>() {
        launch_as<choose_experts<kMost>, kMost * 8>(
            {.early = true}, static_cast<unsigned>(std::min(n_rows.most, 256)), kChooseThreads, raw(expert),
            raw(weight), sums, raw(bias), number(n_rows), s.experts, s.experts_per_token, s.norm_topk, s.routed_scale);
    };
    s.experts <= few ? choose.template operator()<few>() : choose.template operator()<many>();
}

}  // namespace kd::ops
