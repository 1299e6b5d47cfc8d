// The end of a matrix product (linear_tile.h): sums of parts to results.
//
// Whatever computed the parts, they are added as ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)): those a warp had one after the other in
// its registers, those of a block's warps in shared memory, those of the blocks that share a tile of results in the shared memory
// of their cluster, or in memory.
#pragma once

#include "mma.h"
#include "raw.h"

namespace kd::cuda {

constexpr int kSumStride = 20;  // floats between rows of x when sums are exchanged: no bank twice

// Where the blocks that share results leave their sums, if they are no cluster.
struct Shares {
    float* sum;         // [tile][block][row of x][row of w]
    uint32_t* arrived;  // [tile], 0 between launches
};

__device__ __forceinline__ float4 operator+(float4 a, float4 b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// Sum of at(0) .. at(kN - 1) by halves.
template <int kN, class At>
__device__ __forceinline__ float4 sum_by_halves(At at, int first = 0) {
    if constexpr (kN == 1)
        return at(first);
    else
        return sum_by_halves<kN / 2>(at, first) + sum_by_halves<kN / 2>(at, first + kN / 2);
}

// f(h, e, i) for every element of a warp's sums.
template <int kTall, int kEights, class F>
__device__ __forceinline__ void each_sum(F f) {
#pragma unroll
    for (int h = 0; h < kTall; h++) {
#pragma unroll
        for (int e = 0; e < kEights; e++) {
#pragma unroll
            for (int i = 0; i < 4; i++) f(h, e, i);
        }
    }
}

// The sum of parts done in turn, by halves: held[l] is that of 2^l parts. `sum` holds part `turn`, or all after the last.
template <int kLevel, int kLevels, int kTall, int kEights>
__device__ __forceinline__ void end_part(float (&sum)[kTall][kEights][4], float (&held)[kLevels][kTall][kEights][4],
                                         int turn) {
    if constexpr (kLevel < kLevels) {
        if (turn >> kLevel & 1) {
            each_sum<kTall, kEights>([&](int h, int e, int i) { sum[h][e][i] = held[kLevel][h][e][i] + sum[h][e][i]; });
            end_part<kLevel + 1>(sum, held, turn);
        } else {
            each_sum<kTall, kEights>([&](int h, int e, int i) { held[kLevel][h][e][i] = sum[h][e][i]; });
        }
    }
}

// Four neighbouring results of a row, of which `outs` exist; kWhole: in one store.
__device__ __forceinline__ void put(float* y, float4 v, int outs, bool whole) {
    if (whole && outs >= 4) {
        *reinterpret_cast<float4*>(y) = v;
        return;
    }
    if (outs > 0) y[0] = v.x;
    if (outs > 1) y[1] = v.y;
    if (outs > 2) y[2] = v.z;
    if (outs > 3) y[3] = v.w;
}
__device__ __forceinline__ void put(bf16* y, float4 v, int outs, bool whole) {
    if (whole && outs >= 4) {
        *reinterpret_cast<uint2*>(y) = make_uint2(pack_bf16(v.x, v.y), pack_bf16(v.z, v.w));
        return;
    }
    if (outs > 0) y[0] = __float2bfloat16_rn(v.x);
    if (outs > 1) y[1] = __float2bfloat16_rn(v.y);
    if (outs > 2) y[2] = __float2bfloat16_rn(v.z);
    if (outs > 3) y[3] = __float2bfloat16_rn(v.w);
}

// To y: the results of the block's tile, `rows` of x by `outs` of w. sum: those of a warp's parts. All threads of
// the block, when no more copies to `stages` are under way.
template <class T, bool kCluster, class Out>
__device__ __forceinline__ void add_up(Out* y, size_t y_stride, const float (&sum)[T::kTall][T::kRows / 8][4],
                                       char* stages, int rows, int outs, Shares shares) {
    __shared__ bool last;
    const int row0 = blockIdx.x * T::kRows, out0 = blockIdx.z * T::kOut;
    const int thread = threadIdx.x, lane = thread % kWarp, warp = thread / kWarp;
    const int down = warp % T::kDown, across = warp / T::kDown;
    // The sums of the block's warps: [across][sixteen of w][row of x][16], then those of the blocks. A thread adds four at once.
    float* sums = reinterpret_cast<float*>(stages);
    float* mine = sums + (across * T::kSixteens + down * T::kTall) * T::kRows * kSumStride;
    each_sum<T::kTall, T::kRows / 8>([&](int h, int e, int i) {
        const int row = h * T::kRows + e * 8 + 2 * (lane % 4) + i % 2;
        mine[row * kSumStride + lane / 4 + i / 2 * 8] = sum[h][e][i];
    });
    __syncthreads();
    constexpr int kFours = T::kOut / 4;
    const int blocks = gridDim.y, fours = rows * kFours;
    const auto four_of = [&](int i, int a) {
        const int row = i / kFours, out = i % kFours * 4;
        return sums + ((a * T::kSixteens + out / 16) * T::kRows + row) * kSumStride + out % 16;
    };
    const auto block_sum_of = [&](int i) {
        return sum_by_halves<T::kAcross>([&](int a) { return *reinterpret_cast<const float4*>(four_of(i, a)); });
    };
    const bool whole = (reinterpret_cast<uintptr_t>(y) | y_stride * sizeof(Out)) % (4 * sizeof(Out)) == 0;
    const auto finish = [&](int i, float4 v) {
        const int row = i / kFours, out = i % kFours * 4;
        // + 0: a sum is never -0, whether parts that are not there were added to it or not
        put(y + static_cast<size_t>(row0 + row) * y_stride + out0 + out, v + make_float4(0, 0, 0, 0), outs - out,
            whole);
    };
    if (T::kBlocks == 1 || blocks == 1) {
        for (int i = thread; i < fours; i += T::kThreads) finish(i, block_sum_of(i));
        return;
    }
    if constexpr (kCluster) {
        // Each block finishes a share of the results.
        if constexpr (T::kAcross > 1) {
            for (int i = thread; i < fours; i += T::kThreads)
                *reinterpret_cast<float4*>(four_of(i, 0)) = block_sum_of(i);
        }
        cluster_barrier();
        for (int i = thread + blockIdx.y * T::kThreads; i < fours; i += T::kThreads * blocks) {
            finish(i, sum_by_halves<T::kBlocks>([&](int b) {
                       return b < blocks ? load_of_block(four_of(i, 0), b) : make_float4(0, 0, 0, 0);
                   }));
        }
        cluster_barrier();  // a block's memory lasts as long as others read it
        return;
    }

    const size_t tile = static_cast<size_t>(blockIdx.z) * gridDim.x + blockIdx.x;
    constexpr int kResults = T::kRows * kFours;
    float4* all = reinterpret_cast<float4*>(shares.sum) + tile * blocks * kResults;
    for (int i = thread; i < fours; i += T::kThreads) __stcg(all + blockIdx.y * kResults + i, block_sum_of(i));
    __threadfence();
    __syncthreads();
    if (thread == 0) last = atomicAdd(shares.arrived + tile, 1u) == static_cast<uint32_t>(blocks) - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
    for (int i = thread; i < fours; i += T::kThreads) {
        finish(i, sum_by_halves<T::kBlocks>(
                      [&](int b) { return b < blocks ? __ldcg(all + b * kResults + i) : make_float4(0, 0, 0, 0); }));
    }
    if (thread == 0) shares.arrived[tile] = 0;
}

}  // namespace kd::cuda
