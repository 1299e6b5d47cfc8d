// The sum over the experts of a row, where their results are in memory: what ends a launch of experts for many rows.
#pragma once

#include "mma.h"
#include "raw.h"

namespace kd::cuda {

constexpr int kSlotsThreads = 256;

// y[r] += sum over slots, in their order, of weight * out of the pair. Floor: 4 bytes a pair and column, mostly in the
// second-level cache, and y twice.
template <bool kAligned>
__global__ void __launch_bounds__(kSlotsThreads) add_slots(RowsPtr y, const float* out, const int32_t* chunk_of,
                                                           const float* weight, Number n_rows, int slots, int width) {
    wait_for_kernel_before();
    let_next_kernel_start();
    const int n = n_rows(), c = (blockIdx.x * kSlotsThreads + threadIdx.x) * 4;
    if (c >= width) return;
    for (int r = blockIdx.y; r < n; r += gridDim.y) {
        float sum[4] = {};
        for (int slot = 0; slot < slots; slot++) {
            const int at = r * slots + slot;
            if (chunk_of[at] < 0) continue;
            const float w = weight[at];
            const float4 v = *reinterpret_cast<const float4*>(out + static_cast<size_t>(at) * width + c);
            sum[0] = __fmaf_rn(w, v.x, sum[0]);
            sum[1] = __fmaf_rn(w, v.y, sum[1]);
            sum[2] = __fmaf_rn(w, v.z, sum[2]);
            sum[3] = __fmaf_rn(w, v.w, sum[3]);
        }
        bf16* const to = y[r] + c;
        if constexpr (kAligned) {
            const uint2 old = *reinterpret_cast<uint2*>(to);
            *reinterpret_cast<uint2*>(to) = {pack_bf16(low_bf16(old.x) + sum[0], high_bf16(old.x) + sum[1]),
                                             pack_bf16(low_bf16(old.y) + sum[2], high_bf16(old.y) + sum[3])};
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++) to[i] = __float2bfloat16_rn(__bfloat162float(to[i]) + sum[i]);
        }
    }
}

}  // namespace kd::cuda
