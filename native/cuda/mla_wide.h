// Attention over the latent cache on sm_90, first part: keys below whole_keys(position) to partial results (mla_attention.cu).
//
// Inside an item (mla_wide_plan.h), a step is a page: 64 keys against 64 row-heads. One warpgroup multiplies queries with keys and
// makes probabilities; two others, each with half of the columns, accumulate values in registers, while the first is a step
// ahead. Keys come as boxes of 64 columns by tensor copies, three at a time; scores begin with the first three.
#pragma once

#include "launch.h"
#include "mla_wide_plan.h"

namespace kd::cuda {

constexpr int kWideKv = 512, kWideRow = 576;
constexpr int kBoxes = kWideRow / 64, kValueBoxes = kWideKv / 64;
constexpr int kBoxBytes = 64 * 64 * static_cast<int>(sizeof(bf16));
constexpr int kCopies = 3, kBoxesCopied = kBoxes / kCopies;  // of a step
constexpr int kWideStages = 2;
// Of the queries, boxes that the first warpgroup holds in registers: products then read less from shared memory.
constexpr int kHeldBoxes = 6;

struct alignas(1024) WideShared {
    using Box = bf16[64][64];
    Box query[kBoxes];
    Box key[kWideStages][kBoxes];
    Box prob;
    Barrier full[kWideStages][kCopies];  // barriers: boxes have come
    Barrier empty[kWideStages];          // the warps that sum values are done with the keys,
    Barrier used;                        // and with the probabilities
    float keep[kTileRows];               // what the step multiplies a row-head's sums by
    WidePlan plan;
};
static_assert(sizeof(WidePlanning) <= sizeof(WideShared::Box));
static_assert(KD_PAGE_TOKENS == 64 && keys_of_size(kSizes - 1) <= 64 * kWarp, "a lane a page of an item");

// Where piece p, of 8 columns, of a row lies in a box.
__device__ inline bf16* piece_of(WideShared::Box& box, int row, int p) { return &box[row][(p ^ (row & 7)) * 8]; }

// Brings keys, page after page, item after item. One warp.
struct WideLoader {
    int item, step = 0, steps = 0, page = 0;

    __device__ void enter(const WideShared& s, const WideJob& job) {
        step = steps = 0;
        if (item >= s.plan.items) return;
        const WideItem w = wide_item(s.plan, job, item);
        const int stream = job.v.stream[job.first_row + w.tile.first];
        steps = (w.keys + 63) / 64;
        const int lane = static_cast<int>(threadIdx.x) % kWarp;
        page = lane < steps ? job.v.page_table[stream * job.v.max_pages + w.first / KD_PAGE_TOKENS + lane] : 0;
    }
    __device__ void next(WideShared& s, const WideJob& job, const CUtensorMap& keys, unsigned n) {
        if (step == steps) return;  // no more items
        const int y = __shfl_sync(0xffffffffu, page, step) * KD_PAGE_TOKENS;
        const unsigned stage = n % kWideStages;
        if (threadIdx.x % kWarp == 0) {
            for (int i = 0; i < kCopies; i++) {
                arrive_and_expect(&s.full[stage][i], kBoxesCopied * kBoxBytes);
                copy_boxes(s.key[stage][i * kBoxesCopied], keys, y, i * kBoxesCopied, &s.full[stage][i]);
            }
        }
        if (++step == steps) {
            item += static_cast<int>(gridDim.x);
            enter(s, job);
        }
    }
};

// Starts bringing the queries of an item, if they are others than those of `row_head`; returns whose they are. The first warpgroup.
__device__ inline int start_queries(WideShared& s, const WideJob& job, int item, int row_head) {
    const WideItem w = wide_item(s.plan, job, item);
    if (w.row_head == row_head) return row_head;
    const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
#pragma unroll 1
    for (int i = 0; i < 4; i++) {  // four rows a warp at a time, eight lanes each
        const int at = warp * 16 + i * 4 + lane / 8;
        const bool there = at < w.count;
        const int mine = w.row_head + (there ? at : 0), r = job.row_of(mine);
        const bf16* from = job.q[job.first_row + r] + (mine - r * job.heads) * kWideRow + lane % 8 * 8;
#pragma unroll
        for (int b = 0; b < kBoxes; b++) cp_async_16(piece_of(s.query[b], at, lane % 8), from + b * 64, there);
    }
    cp_async_commit();
    return w.row_head;
}

// The first warpgroup.
__device__ inline void wide_scores(WideShared& s, const WideJob& job) {
    const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
    const int g = lane / 4, t = lane % 4;
    unsigned n = 0;  // steps of all items so far
    int item = static_cast<int>(blockIdx.x), row_head = -1;
    uint32_t q[4 * kHeldBoxes][4];
    if (item < s.plan.items) row_head = start_queries(s, job, item, row_head);
    for (; item < s.plan.items; item += static_cast<int>(gridDim.x)) {
        const WideItem w = wide_item(s.plan, job, item);
        cp_async_wait<0>();
        fence_for_products();
        meet<2, kWarpgroup>();
#pragma unroll
        for (int i = 0; i < 4 * kHeldBoxes; i++)
            ldmatrix_x4(q[i], piece_of(s.query[i / 4], warp * 16 + lane % 16, i % 4 * 2 + lane / 16));
        int have[2];
        float top[2] = {-INFINITY, -INFINITY}, sum[2] = {};
#pragma unroll
        for (int h = 0; h < 2; h++) have[h] = wide_keys(s.plan, job, w, warp * 16 + h * 8 + g);

        for (int step = 0; step * 64 < w.keys; step++, n++) {
            const unsigned stage = n % kWideStages, parity = n / kWideStages % 2;
            float d[32];
#pragma unroll
            for (int b = 0; b < kBoxes; b++) {
                if (b % kBoxesCopied == 0) {
                    wait_in_place(&s.full[stage][b / kBoxesCopied], parity);
                    products_begin();
                }
                const uint64_t from = matrix_at(s.query[b]), k = matrix_at(s.key[stage][b]);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    if (b < kHeldBoxes)
                        product_rows(d, q[b < kHeldBoxes ? 4 * b + i : 0], k + 2 * i, b + i > 0);
                    else
                        product_rows(d, from + 2 * i, k + 2 * i, b + i > 0);
                }
            }
            products_commit();
            products_wait<0>();
            const int next = item + static_cast<int>(gridDim.x);
            if (step * 64 + 64 >= w.keys && next < s.plan.items) {
                meet<2, kWarpgroup>();  // the queries have been multiplied
                row_head = start_queries(s, job, next, row_head);
            }
            // Values of the step before have been added, so their probabilities may go.
            if (n > 0) wait_in_place(&s.used, (n - 1) % 2);

            uint32_t p[32 / 2];
            const int mine[2] = {have[0] - step * 64, have[1] - step * 64};  // keys of the step, a multiple of 16
            if (__any_sync(0xffffffffu, mine[0] < 64 || mine[1] < 64)) {
#pragma unroll
                for (int i = 0; i < 32; i++)
                    if (i / 8 * 16 >= mine[i / 2 % 2]) d[i] = -INFINITY;
            }
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float best[4];
#pragma unroll
                for (int c = 0; c < 4; c++)
                    best[c] = fmaxf(fmaxf(d[8 * c + 2 * h], d[8 * c + 2 * h + 1]),
                                    fmaxf(d[8 * c + 4 + 2 * h], d[8 * c + 5 + 2 * h]));
                float most = fmaxf(fmaxf(best[0], best[1]), fmaxf(best[2], best[3]));
                most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
                most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
                most = mine[h] > 0 ? fmaxf(most * job.scale, top[h]) : top[h];
                const float keep = mine[h] > 0 ? exp2_fast(top[h] - most) : 1.0f;
                const float less = mine[h] > 0 ? most : 0.0f;
                if (t == 0) s.keep[warp * 16 + h * 8 + g] = keep;
                float more[4];
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    float x[4];
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        x[i] = exp2_fast(__fmaf_rn(d[8 * c + i / 2 * 4 + 2 * h + i % 2], job.scale, -less));
                    more[c] = (x[0] + x[1]) + (x[2] + x[3]);
                    p[4 * c + h] = pack_bf16(x[0], x[1]);
                    p[4 * c + 2 + h] = pack_bf16(x[2], x[3]);
                }
                sum[h] = __fmaf_rn(sum[h], keep, (more[0] + more[1]) + (more[2] + more[3]));
                top[h] = most;
            }
#pragma unroll
            for (int c = 0; c < 4; c++)
                store_matrices(piece_of(s.prob, warp * 16 + lane % 16, 2 * c + lane / 16), p[4 * c], p[4 * c + 1],
                               p[4 * c + 2], p[4 * c + 3]);
            // Keys that no row of the tile has may hold anything: as values they are multiplied by 0.
            const int left = w.keys - step * 64;
            if (left < 64) {
                for (int c = left * 64 + thread; c < 64 * 64; c += kWarpgroup)
                    store16(&s.key[stage][c % 8][c / 64][c / 8 % 8 * 8], uint4{});
            }
            fence_for_products();
            announce<1, kWideThreads>();
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 1);
            sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 2);
            const int at = warp * 16 + h * 8 + g;
            if (t == 0 && have[h] > 0)
                job.top_sum[static_cast<size_t>(w.row_head + at) * static_cast<size_t>(job.groups) +
                            static_cast<size_t>(w.group)] = {top[h], sum[h]};
        }
    }
}

// What the item leaves goes to memory by way of the last step's keys, which nobody needs any more.
constexpr int kLeftStride = kWideKv / 2 + 8;  // elements: rows then start in different banks
static_assert(2 * kTileRows * kLeftStride <= kBoxes * 64 * 64);
__device__ __forceinline__ void leave_parts(WideShared::Box* keys, const WidePlan& plan, const WideJob& job, int item,
                                            const float (&o)[128], int half) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) % kWarpgroup / kWarp;
    const int first = warp * 16;
    meet<4, 2 * kWarpgroup>();
    bf16* const rows = &keys[0][0][0] + (half * kTileRows + first) * kLeftStride;
    bf16* const to = rows + lane % 16 * kLeftStride + lane / 16 * 8;
#pragma unroll
    for (int c = 0; c < 32; c += 2)
        store_matrices(to + c * 8, pack_bf16(o[4 * c], o[4 * c + 1]), pack_bf16(o[4 * c + 2], o[4 * c + 3]),
                       pack_bf16(o[4 * c + 4], o[4 * c + 5]), pack_bf16(o[4 * c + 6], o[4 * c + 7]));
    fence_for_products();
    __syncwarp();
    const WideItem w = wide_item(plan, job, item);
    if (lane < 16 && wide_keys(plan, job, w, first + lane) > 0) {
        const size_t part = static_cast<size_t>(w.row_head + first + lane) * static_cast<size_t>(job.groups) +
                            static_cast<size_t>(w.group);
        copy_out(job.o + part * kWideKv + half * (kWideKv / 2), rows + lane * kLeftStride, kWideKv / 2 * 2);
    }
    copied_out();
    __syncwarp();
}

// The others: `half` of the columns.
__device__ inline void wide_values(WideShared& s, const WideJob& job, const CUtensorMap& map, int half) {
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroup, lane = thread % kWarp, warp = thread / kWarp;
    const int g = lane / 4;
    const bool loads = half == 0 && warp == 0;
    WideLoader loader{static_cast<int>(blockIdx.x)};
    if (loads) {
        see_global_memory_in_copies();
        loader.enter(s, job);
        for (unsigned n = 0; n < kWideStages; n++) loader.next(s, job, map, n);
    }
    wait_for_kernel_before();  // partial results of a launch before may still be read
    unsigned n = 0;
    float o[128];
    for (int item = static_cast<int>(blockIdx.x); item < s.plan.items; item += static_cast<int>(gridDim.x)) {
        const int keys = wide_item(s.plan, job, item).keys;
        for (int step = 0; step * 64 < keys; step++, n++) {
            const unsigned stage = n % kWideStages;
            meet<1, kWideThreads>();
            if (step > 0) {
                // Read by the lanes that tell that it has been.
                float low = 1, high = 1;
                if (lane % 4 == 0) low = s.keep[warp * 16 + g], high = s.keep[warp * 16 + 8 + g];
                low = __shfl_sync(0xffffffffu, low, lane & ~3);
                high = __shfl_sync(0xffffffffu, high, lane & ~3);
                if (__any_sync(0xffffffffu, low != 1.0f || high != 1.0f)) {  // times 1 changes nothing
#pragma unroll
                    for (int c = 0; c < 32; c++) {
                        o[4 * c] *= low;
                        o[4 * c + 1] *= low;
                        o[4 * c + 2] *= high;
                        o[4 * c + 3] *= high;
                    }
                }
            }
            products_begin();
            const uint64_t p = matrix_at(s.prob), v = matrix_at<kBoxBytes>(s.key[stage][half * kValueBoxes / 2]);
#pragma unroll
            for (int i = 0; i < 4; i++) product_columns(o, p + 2 * i, v + i * (16 * 128 / 16), step + i > 0);
            products_commit();
            products_wait<0>();
            __syncwarp();
            if (lane % 4 == 0) arrive(&s.used);
            if (step * 64 + 64 >= keys) leave_parts(s.key[stage], s.plan, job, item, o, half);
            if (lane == 0) arrive(&s.empty[stage]);
            if (loads) {
                wait_in_place(&s.empty[stage], n / kWideStages % 2);
                loader.next(s, job, map, n + kWideStages);
            }
        }
    }
}

// Before it waits it plans, and asks for the first pages: rows' places and keys below whole_keys were there before the kernel before
// began (ops.h), and only queries are that one's.
__global__ __launch_bounds__(kWideThreads, 1) void fold_wide(const __grid_constant__ CUtensorMap keys, WideJob job) {
#if KD_HOPPER
    extern __shared__ __align__(1024) char aligned_bytes[];
    WideShared& s = *reinterpret_cast<WideShared*>(aligned_bytes);
    if (threadIdx.x == 0) {
        prefetch_map(keys);
        for (int i = 0; i < kWideStages; i++) {
            for (int c = 0; c < kCopies; c++) init_barrier(&s.full[i][c], 1);
            init_barrier(&s.empty[i], 2 * kWarpgroup / kWarp);
        }
        init_barrier(&s.used, 2 * kWarpgroup / 4);
        show_barriers_to_copies();
    }
    plan_wide(s.plan, reinterpret_cast<WidePlanning&>(s.prob), job);
    const int group = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
    if (group == 0) {
        wait_for_kernel_before();
        let_next_kernel_start();
        wide_scores(s, job);
    } else {
        wide_values(s, job, keys, group - 1);
    }
#endif
}

inline void launch_wide(dim3 grid, const CUtensorMap& keys, const WideJob& job) {
    static_assert(sizeof(WideShared) <= kHopperBlockBytes);  // nothing is declared statically
    launch_with<fold_wide, static_cast<int>(sizeof(WideShared))>({.early = true}, grid, kWideThreads, keys, job);
}

}  // namespace kd::cuda
