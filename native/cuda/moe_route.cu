#include <algorithm>

#include "error.h"
#include "launch.h"
#include "mma.h"
#include "ops.h"
#include "raw.h"

namespace kd::ops {

namespace {

using namespace kd::cuda;

constexpr int kThreads = 256;

// ---- scores ---------------------------------------------------------------------------------------------------------

// router . h in fp32: hidden is cut into slices of 256, one a block, and these into four runs of 64. A run is one chain
// of fused multiply-adds, k rising; runs are added in order, and slices in order by the kernel after this. That is all
// the order there is, whatever the number of rows.
//
// Floor: the router's bytes, 11 MB of Kimi K2, 2.8 us at 4.0 TB/s; from 34 rows on the fused multiply-adds, 2.75 M a
// row, 0.082 us at 33.5 T/s. A block keeps 32 experts' slice in shared memory and takes 8, 16 or 32 rows at a time; a
// thread has 4 x 1 .. 4 scores of one run.
constexpr int kSlice = 256, kRuns = 4, kRun = kSlice / kRuns;
constexpr int kExperts = 32;                   // of a block
constexpr int kRunThreads = kThreads / kRuns;  // 8 x 8, each with experts i, i + 8, .. and rows j, j + 8, ..
constexpr int kEach = kExperts / 8;            // experts of a thread
constexpr int kRouterStride = kSlice + 4;      // floats: 8 experts' 16 bytes lie in different banks
constexpr int kHStride = kSlice + 8;           // bf16, likewise
constexpr int kRouterBytes = kExperts * kRouterStride * sizeof(float);
static_assert(kRunThreads == 64);

constexpr int kRows = 32;  // at a time
constexpr int kHBytes = kRows * kHStride * sizeof(bf16);
constexpr int kScoreBytes = kRouterBytes + kHBytes + kRuns * kRows * kExperts * sizeof(float);

// runs [kRuns][kRows][kExperts] of 8 * kRowsEach rows.
template <int kRowsEach>
__device__ __forceinline__ void score_rows(float* runs, const float* weights, const bf16* rows) {
    const int run = threadIdx.x / kRunThreads, i = threadIdx.x % 8, j = threadIdx.x / 8 % 8;
    float sum[kEach][kRowsEach] = {};
#pragma unroll 2
    for (int k = run * kRun; k < (run + 1) * kRun; k += 4) {
        float4 w[kEach];
        float x[kRowsEach][4];
#pragma unroll
        for (int a = 0; a < kEach; a++)
            w[a] = *reinterpret_cast<const float4*>(weights + (i + 8 * a) * kRouterStride + k);
#pragma unroll
        for (int b = 0; b < kRowsEach; b++) {
            const uint2 four = *reinterpret_cast<const uint2*>(rows + (j + 8 * b) * kHStride + k);
            x[b][0] = low_bf16(four.x);
            x[b][1] = high_bf16(four.x);
            x[b][2] = low_bf16(four.y);
            x[b][3] = high_bf16(four.y);
        }
#pragma unroll
        for (int a = 0; a < kEach; a++)
#pragma unroll
            for (int b = 0; b < kRowsEach; b++) {
                sum[a][b] = __fmaf_rn(w[a].x, x[b][0], sum[a][b]);
                sum[a][b] = __fmaf_rn(w[a].y, x[b][1], sum[a][b]);
                sum[a][b] = __fmaf_rn(w[a].z, x[b][2], sum[a][b]);
                sum[a][b] = __fmaf_rn(w[a].w, x[b][3], sum[a][b]);
            }
    }
#pragma unroll
    for (int a = 0; a < kEach; a++)
#pragma unroll
        for (int b = 0; b < kRowsEach; b++) runs[(run * kRows + j + 8 * b) * kExperts + i + 8 * a] = sum[a][b];
}

// sums [slices][rows][experts]. kRouterAligned, kHAligned: 16 bytes can be moved at once.
template <bool kRouterAligned, bool kHAligned>
__global__ void __launch_bounds__(kThreads)
    score_slices(float* sums, RowsPtr h, const float* router, Number n_rows, int hidden, int experts) {
    extern __shared__ float memory[];
    float* const weights = memory;
    bf16* const rows = reinterpret_cast<bf16*>(memory + kExperts * kRouterStride);
    float* const runs = memory + (kRouterBytes + kHBytes) / sizeof(float);
    const int k0 = blockIdx.x * kSlice, width = min(kSlice, hidden - k0);
    const int first_expert = blockIdx.y * kExperts, n_experts = min(kExperts, experts - first_expert);

    // What is not there is zero, and adds nothing.
    for (int i = threadIdx.x; i < kExperts * kSlice / 4; i += kThreads) {
        const int e = i / (kSlice / 4), k = i % (kSlice / 4) * 4;
        float* const to = weights + e * kRouterStride + k;
        const float* const from = router + static_cast<size_t>(first_expert + e) * hidden + k0 + k;
        if constexpr (kRouterAligned) {
            const bool there = e < n_experts && k < width;
            cp_async_16(to, there ? from : router, there);
        } else {
            for (int j = 0; j < 4; j++) to[j] = e < n_experts && k + j < width ? from[j] : 0;
        }
    }
    cp_async_commit();
    wait_for_kernel_before();
    let_next_kernel_start();
    const int n = n_rows();

    for (int first_row = blockIdx.z * kRows; first_row < n; first_row += gridDim.z * kRows) {
        const int here = min(kRows, n - first_row), tiled = here <= 8 ? 8 : here <= 16 ? 16 : kRows;
        for (int v = threadIdx.x; v < tiled * kSlice / 8; v += kThreads) {
            const int r = v / (kSlice / 8), k = v % (kSlice / 8) * 8;
            bf16* const to = rows + r * kHStride + k;
            const bf16* const from = h[r < here ? first_row + r : 0] + k0 + k;
            if constexpr (kHAligned) {
                store16(to, r < here && k < width ? load16(from) : uint4{});
            } else {
                for (int x = 0; x < 8; x++) to[x] = r < here && k + x < width ? from[x] : bf16{};
            }
        }
        cp_async_wait<0>();
        __syncthreads();
        if (tiled == 8)
            score_rows<1>(runs, weights, rows);
        else if (tiled == 16)
            score_rows<2>(runs, weights, rows);
        else
            score_rows<kRows / 8>(runs, weights, rows);
        __syncthreads();
        for (int v = threadIdx.x; v < here * kExperts; v += kThreads) {
            const int r = v / kExperts, e = v % kExperts;
            if (e >= n_experts) continue;
            float total = runs[v];
#pragma unroll
            for (int other = 1; other < kRuns; other++) total += runs[other * kRows * kExperts + v];
            sums[(static_cast<size_t>(blockIdx.x) * n_rows.most + first_row + r) * experts + first_expert + e] = total;
        }
        __syncthreads();
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

// A block a row: all threads sum the slices, then the first warp takes the best of s + bias, one at a time.
// Floor: 4 bytes a slice and expert from the second-level cache.
constexpr int kAtOnce = 16, kChooseThreads = 384;
template <int kMost>
__global__ void __launch_bounds__(kChooseThreads)
    choose_experts(int32_t* expert, float* weight, const float* sums, const float* bias, Number n_rows, int slices,
                   int experts, int slots, bool norm_topk, float scale) {
    extern __shared__ float score[];                               // [kMost]
    auto* const key = reinterpret_cast<uint32_t*>(score + kMost);  // [kMost] 0: taken
    const int lane = threadIdx.x;
    wait_for_kernel_before();
    let_next_kernel_start();
    const int n = n_rows();
    for (int r = blockIdx.x; r < n; r += gridDim.x) {
        __syncthreads();  // the row before has been chosen for
        for (int e = threadIdx.x; e < experts; e += kChooseThreads) {
            const size_t step = static_cast<size_t>(n_rows.most) * experts;
            const float* from = sums + static_cast<size_t>(r) * experts + e;
            float total = 0;
            for (int first = 0; first < slices; first += kAtOnce) {
                float part[kAtOnce];  // all on their way before the first is needed
#pragma unroll
                for (int i = 0; i < kAtOnce; i++, from += step) part[i] = first + i < slices ? *from : 0;
#pragma unroll
                for (int i = 0; i < kAtOnce; i++)
                    if (first + i < slices) total += part[i];
            }
            score[e] = 1 / (1 + expf(-total));
            key[e] = order_of(score[e] + bias[e]);
        }
        __syncthreads();
        if (threadIdx.x >= kWarp) continue;
        float total = 0;
        for (int slot = 0; slot < slots; slot++) {
            uint64_t best = 0;  // key, then the complement of the id
            for (int e = lane; e < experts; e += kWarp)
                best = max(best, static_cast<uint64_t>(key[e]) << 32 | ~static_cast<uint32_t>(e));
#pragma unroll
            for (int step = kWarp / 2; step > 0; step /= 2) best = max(best, __shfl_xor_sync(0xffffffffu, best, step));
            const int e = static_cast<int>(~static_cast<uint32_t>(best));
            total += score[e];
            __syncwarp();  // all have read what is now written over
            if (lane == 0) {
                key[e] = 0;
                expert[r * slots + slot] = e;
                weight[r * slots + slot] = score[e];
            }
            __syncwarp();
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
    const int slices = ceil_div(s.hidden, kSlice);
    const size_t n = static_cast<size_t>(n_rows.most) * static_cast<size_t>(s.experts);
    float* const sums = scratch<float>(Use::moe_rows, static_cast<size_t>(slices) * n);
    const bool router_aligned = s.hidden % 4 == 0 && aligned16(router), h_aligned = s.hidden % 8 == 0 && aligned16(h);
    // A block goes over all rows with the weights it has; only for many are there several of one kind.
    const dim3 grid(static_cast<unsigned>(slices), static_cast<unsigned>(ceil_div(s.experts, kExperts)),
                    static_cast<unsigned>(std::min(ceil_div(n_rows.most, 128), 4)));
    const auto scores = [&]<bool kRouterAligned, bool kHAligned>() {
        launch_as<score_slices<kRouterAligned, kHAligned>, kScoreBytes>(
            {.early = true}, grid, kThreads, sums, raw(h), raw(router), number(n_rows), s.hidden, s.experts);
    };
    if (router_aligned && h_aligned)
        scores.template operator()<true, true>();
    else if (router_aligned)
        scores.template operator()<true, false>();
    else
        scores.template operator()<false, false>();
    const auto choose = [&]<int kMost>() {
        launch_as<choose_experts<kMost>, kMost * 8>({.early = true}, static_cast<unsigned>(std::min(n_rows.most, 256)),
                                                    kChooseThreads, raw(expert), raw(weight), sums, raw(bias),
                                                    number(n_rows), slices, s.experts, s.experts_per_token, s.norm_topk,
                                                    s.routed_scale);
    };
    s.experts <= few ? choose.template operator()<few>() : choose.template operator()<many>();
}

}  // namespace kd::ops
