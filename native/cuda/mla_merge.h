// Attention over the latent cache, second part: partial results of groups, merged in their order, and the last keys one by one.
#pragma once

#include <type_traits>

#include "keys.h"
#include "mma.h"
#include "raw.h"

namespace kd::cuda {

constexpr int kMergeThreads = 128;
constexpr int kMergeEach = 4;  // columns a thread

// Partial results of a launch's rows [row][head][group], float or bf16, and what they are of.
struct MergeJob {
    RowsPtr q, kv;
    ViewPtr v;
    const float2* top_sum;
    const void* o;
    int groups;  // room for as many a row-head
    int heads, first_row;
    float scale;  // of scores, to log2
};

// Four columns.
__device__ inline float4 four(float4 v) { return v; }
__device__ inline float4 four(uint2 v) { return {low_bf16(v.x), high_bf16(v.x), low_bf16(v.y), high_bf16(v.y)}; }
__device__ inline void add_weighted(float4& o, float weight, float4 v) {
    o.x = __fmaf_rn(weight, v.x, o.x);
    o.y = __fmaf_rn(weight, v.y, o.y);
    o.z = __fmaf_rn(weight, v.z, o.z);
    o.w = __fmaf_rn(weight, v.w, o.w);
}

template <class K>
struct MergeShared {
    bf16 key[kMostTail][K::kStride];
    float score[kMostTail];
    int row[kMostTail];  // of the pool
};

// A block a row-head. groups_of(whole): how many groups a row has. What it reads before it waits was there before the kernel
// that makes the partial results began.
template <class K, class Part, auto groups_of>
__global__ __launch_bounds__(kMergeThreads) void merge_groups(RowsPtr o_lat, MergeJob job) {
    extern __shared__ __align__(16) char bytes[];
    MergeShared<K>& s = *reinterpret_cast<MergeShared<K>*>(bytes);
    static_assert(K::kKv <= kMergeThreads * kMergeEach && kMostTail == kWarp);
    let_next_kernel_start();  // what follows asks for weights first
    const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
    const int row = static_cast<int>(blockIdx.x) / job.heads, head = static_cast<int>(blockIdx.x) % job.heads;
    const int r = job.first_row + row;
    if (r >= job.v.n_rows()) {
        wait_for_kernel_before();
        return;
    }
    const int position = job.v.position[r], stream = job.v.stream[r], prefix = job.v.prefix[r];
    const int whole = whole_keys(position), tail = position + 1 - whole;
    if (thread < tail) {
        const int slot = key_slot(whole + thread, prefix, job.v.mask + static_cast<size_t>(r) * kMaskWords);
        s.row[thread] = job.v.pool_row(stream, slot);
    }
    constexpr int kPieces = K::kRow / 8, kMine = (kPieces + kWarp - 1) / kWarp;  // of a key; of a lane
    const bf16* q = job.q[r] + head * K::kRow;
    uint4 query[kMine];
#pragma unroll
    for (int i = 0; i < kMine; i++)
        query[i] = lane + i * kWarp < kPieces ? load16(q + (lane + i * kWarp) * 8) : uint4{};
    __syncthreads();
    for (int c = thread; c < tail * kPieces; c += kMergeThreads) {
        const int k = c / kPieces, piece = c % kPieces * 8;
        cp_async_16(&s.key[k][piece], job.kv[s.row[k]] + piece);
    }
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    for (int k = warp; k < tail; k += kMergeThreads / kWarp) {
        float dot = 0;
#pragma unroll
        for (int i = 0; i < kMine; i++) {
            if (lane + i * kWarp >= kPieces) break;
            const uint4 b = load16(&s.key[k][(lane + i * kWarp) * 8]);
            const uint32_t x[4] = {query[i].x, query[i].y, query[i].z, query[i].w}, y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                dot = __fmaf_rn(low_bf16(x[j]), low_bf16(y[j]), dot);
                dot = __fmaf_rn(high_bf16(x[j]), high_bf16(y[j]), dot);
            }
        }
        dot = warp_sum(dot);
        if (lane == 0) s.score[k] = dot * job.scale;
    }
    __syncthreads();
    const float score = lane < tail ? s.score[lane] : -INFINITY;

    wait_for_kernel_before();
    // Every warp weighs all of it: 2^(the largest score of a part - the largest of all).
    const bool mine = kMergeEach * thread < K::kKv;
    const int groups = groups_of(whole);
    const size_t part = static_cast<size_t>(row * job.heads + head) * static_cast<size_t>(job.groups);
    const float2* const top_sum = job.top_sum + part;
    using Four = std::conditional_t<sizeof(Part) == 4, float4, uint2>;
    const Part* from = static_cast<const Part*>(job.o) + part * K::kKv + kMergeEach * thread;
    float top = score;
    for (int j = lane; j < groups; j += kWarp) top = fmaxf(top, top_sum[j].x);
    top = warp_max(top);
    float4 o{};
    float sum = 0;
    for (int first = 0; first < groups; first += kWarp) {
        const int n = groups - first;
        const float2 own = lane < n ? top_sum[first + lane] : float2{-INFINITY, 0.0f};
        const float weight = exp2f(own.x - top);
        sum = __fmaf_rn(weight, own.y, sum);
        constexpr int kAtOnce = 16;
#pragma unroll 1
        for (int begin = 0; begin < min(n, kWarp); begin += kAtOnce, from += kAtOnce * K::kKv) {
            Four v[kAtOnce];
#pragma unroll
            for (int j = 0; j < kAtOnce; j++)
                v[j] = mine && begin + j < n ? *reinterpret_cast<const Four*>(from + j * K::kKv) : Four{};
#pragma unroll
            for (int j = 0; j < kAtOnce; j++)  // parts that are not there weigh nothing and are 0
                add_weighted(o, __shfl_sync(0xffffffffu, weight, begin + j), four(v[j]));
        }
    }
    const float weight = exp2f(score - top);
    sum = warp_sum(sum + weight);
    for (int k = 0; k < tail; k++) {
        const uint2 value = mine ? *reinterpret_cast<const uint2*>(&s.key[k][kMergeEach * thread]) : uint2{};
        add_weighted(o, __shfl_sync(0xffffffffu, weight, k), four(value));
    }
    if (mine)
        *reinterpret_cast<uint2*>(o_lat[r] + head * K::kKv + kMergeEach * thread) = {pack_bf16(o.x / sum, o.y / sum),
                                                                                     pack_bf16(o.z / sum, o.w / sum)};
}

}  // namespace kd::cuda
