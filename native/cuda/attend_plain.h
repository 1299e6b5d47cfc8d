// Attention of one row and head for any shape and alignment: fp32 throughout, by one block.
#pragma once

#include "keys.h"
#include "mma.h"

namespace kd::cuda {

constexpr int kPlainThreads = 128;
constexpr int kPlainBytes = 40 * 1024;  // of shared memory: q and o as fp32
constexpr int kPlainWidth = kPlainBytes / static_cast<int>(sizeof(float));

// o[dv] = softmax over n_keys keys of q[dk] . key, of their values; `find(i, key, value)` gives the rows of key i. Keys are folded 32
// at a time from the first, so the order is that of the keys alone. shared: dk + dv floats. All threads of the block call it.
template <class Find>
__device__ void attend_plain(bf16* o, const bf16* q, int dk, int dv, float scale, int n_keys, float* shared,
                             const Find& find) {
    __shared__ const bf16* key[kWarp];
    __shared__ const bf16* value[kWarp];
    __shared__ float score[kWarp], p[kWarp];
    const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp;
    float *query = shared, *acc = shared + dk;
    for (int c = thread; c < dk; c += kPlainThreads) query[c] = __bfloat162float(q[c]);
    for (int c = thread; c < dv; c += kPlainThreads) acc[c] = 0;
    float top = -INFINITY, sum = 0;
    for (int first = 0; first < n_keys; first += kWarp) {
        const int n = min(kWarp, n_keys - first);
        if (thread < n) find(first + thread, key[thread], value[thread]);
        __syncthreads();
        for (int k = thread / kWarp; k < n; k += kPlainThreads / kWarp) {
            float s = 0;
            for (int c = lane; c < dk; c += kWarp) s = __fmaf_rn(query[c], __bfloat162float(key[k][c]), s);
            s = warp_sum(s);
            if (lane == 0) score[k] = s * (scale * kLog2e);
        }
        __syncthreads();
        const float s = lane < n ? score[lane] : -INFINITY;
        const float best = fmaxf(top, warp_max(s));
        const float keep = exp2f(top - best), mine = exp2f(s - best);
        sum = __fmaf_rn(sum, keep, warp_sum(mine));
        top = best;
        if (thread < n) p[thread] = mine;
        __syncthreads();
        for (int c = thread; c < dv; c += kPlainThreads) {
            float a = acc[c] * keep;
            for (int k = 0; k < n; k++) a = __fmaf_rn(p[k], __bfloat162float(value[k][c]), a);
            acc[c] = a;
        }
        __syncthreads();
    }
    for (int c = thread; c < dv; c += kPlainThreads) o[c] = __float2bfloat16_rn(acc[c] / sum);
}

}  // namespace kd::cuda
