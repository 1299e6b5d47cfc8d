// The order of keys: which are folded together, and how partial results become one.
//
// Attention over many keys is cut into groups at fixed absolute positions. A group starts from nothing and leaves (m, l, o): the
// largest score, the sum of 2^(score - m) and the sum of 2^(score - m) * value, scores in units of log2. Partial results are
// merged in the order of groups; which block worked on which group is never part of the arithmetic.
#pragma once

#include "raw.h"

namespace kd::cuda {

constexpr int kStep = 16;  // keys that go through the matrix units together
constexpr float kLog2e = 1.4426950408889634f;

// Keys of a row below this are committed whatever the tree, and go through the matrix units.
__host__ __device__ inline int whole_keys(int position) {
    return position <= KD_MAX_DEPTH ? 0 : (position - KD_MAX_DEPTH) / kStep * kStep;
}
// Keys from whole_keys(position) to the row's own are at most this many.
constexpr int kMostTail = KD_MAX_DEPTH + kStep;

// Groups of 256 keys below 8k, of 1,024 below 64k, of 4,096 beyond: sizes by absolute position, so that a row's arithmetic is the
// same wherever its stream stands. Multiples of a page.
constexpr int kSmallEnd = 8192, kMiddleEnd = 65536;
constexpr int kSmall = 256, kMiddle = 1024, kLarge = 4096;
constexpr int kSmallGroups = kSmallEnd / kSmall, kMiddleGroups = (kMiddleEnd - kSmallEnd) / kMiddle;

__host__ __device__ constexpr int group_first(int g) {
    if (g <= kSmallGroups) return g * kSmall;
    g -= kSmallGroups;
    return g <= kMiddleGroups ? kSmallEnd + g * kMiddle : kMiddleEnd + (g - kMiddleGroups) * kLarge;
}
__host__ __device__ constexpr int group_keys(int g) { return group_first(g + 1) - group_first(g); }
// How many groups have keys below `keys`; the last may be cut short by it.
__host__ __device__ constexpr int groups_below(int keys) {
    if (keys <= kSmallEnd) return (keys + kSmall - 1) / kSmall;
    if (keys <= kMiddleEnd) return kSmallGroups + (keys - kSmallEnd + kMiddle - 1) / kMiddle;
    return kSmallGroups + kMiddleGroups + (keys - kMiddleEnd + kLarge - 1) / kLarge;
}
static_assert(groups_below(kSmallEnd) == kSmallGroups && group_first(kSmallGroups) == kSmallEnd);
static_assert(groups_below(kMiddleEnd + 1) == kSmallGroups + kMiddleGroups + 1);

// Slot of a row's key at absolute position `key`, not after the row's own: below the prefix they agree, from there on the set bits
// of the mask count.
__device__ inline int key_slot(int key, int prefix, const uint64_t* mask) {
    if (key < prefix) return key;
    int n = key - prefix;
    for (int w = 0; w < kMaskWords; w++) {
        uint64_t bits = mask[w];
        const int here = __popcll(bits);
        if (n < here) {
            for (; n > 0; n--) bits &= bits - 1;
            return prefix + 64 * w + __ffsll(static_cast<long long>(bits)) - 1;
        }
        n -= here;
    }
    return prefix;  // fewer bits than the position promises: no such view is made
}

// 2^x; results too small for a normal number are 0.
__device__ inline float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The sum of v over the lanes before, and the own.
__device__ inline int warp_sum_before(int v) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, v, d);
        if (lane >= d) v += other;
    }
    return v;
}

// How lane j's part joins a running total: total * keep + part * take.
struct Fold {
    float keep, take;
};

// Weights of 32 parts folded one after the other. `m`: the largest score of the lane's part, -inf for none. `top`: the largest
// so far, the same in every lane; moved on.
__device__ inline Fold fold_weights(float& top, float m) {
    constexpr unsigned all = 0xffffffffu;
    const int lane = static_cast<int>(threadIdx.x % 32);
    float best = m;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const float other = __shfl_up_sync(all, best, d);
        if (lane >= d) best = fmaxf(best, other);
    }
    best = fmaxf(best, top);
    float before = __shfl_up_sync(all, best, 1);
    if (lane == 0) before = top;
    top = __shfl_sync(all, best, 31);
    return {before == best ? 1.0f : exp2f(before - best), m == -INFINITY ? 0.0f : exp2f(m - best)};
}

}  // namespace kd::cuda
