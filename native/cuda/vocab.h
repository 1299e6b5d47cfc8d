// Logits rows over the whole vocabulary, as the ranks of a group hold them: each rank a range of ids.
//
// Everything that is found out about a row is put together from parts of it in ways whose order does not matter (maxima of
// ranked tokens, sums of integers), so that a row gives the same bits however it is cut: by blocks, by ranks, by the number
// of rows. A NaN counts as -inf everywhere but in the hash.
#pragma once

#include <cstdint>

#include "comm.h"
#include "mma.h"
#include "types.h"

namespace kd::cuda {

constexpr float kNever = -__builtin_huge_valf();

__device__ __forceinline__ float known(float logit) { return fmaxf(logit, kNever); }

// ---- the order among tokens -------------------------------------------------------------------------------------------

// A logit as an integer of the same order. -0 is 0.
__device__ __forceinline__ uint32_t sortable(float logit) {
    const uint32_t bits = __float_as_uint(logit + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// A token and its logit as one number, the larger the better: larger logit first, of equals the lowest id. 0 is no token.
using Ranked = unsigned long long;

__device__ __forceinline__ Ranked ranked(uint32_t sortable_logit, int id) {
    return static_cast<Ranked>(sortable_logit) << 32 | (0xFFFFFFFFu - static_cast<uint32_t>(id));
}
__device__ __forceinline__ Ranked ranked(float logit, int id) { return ranked(sortable(logit), id); }
__device__ __forceinline__ int id_of(Ranked token) {
    return static_cast<int>(0xFFFFFFFFu - static_cast<uint32_t>(token));
}
__device__ __forceinline__ float logit_of(uint32_t sortable_logit) {
    return __uint_as_float(sortable_logit & 0x80000000u ? sortable_logit & 0x7FFFFFFFu : ~sortable_logit);
}
__device__ __forceinline__ float logit_of(Ranked token) { return logit_of(static_cast<uint32_t>(token >> 32)); }

// ---- sum of exponentials ------------------------------------------------------------------------------------------------

// exp(x) = e * 2^r with r = round(x / ln 2) and e in 0.7 .. 1.42 to 22 bits behind the point. Terms are added as integers, apart
// for each group of sixteen r; the four largest groups hold all that counts: what is lost is under 2^-47 of the largest term,
// each.
constexpr int kGroups = 4;
constexpr int kNoGroup = -(1 << 20);
constexpr float kShift = 12582912.0f;  // 1.5 * 2^23: a number of up to 22 bits added to it is rounded to an integer
constexpr float kMostLogit = 2e6f;     // what is larger counts as that: r stays within those bits

struct ExpSum {
    unsigned long long part[kGroups];  // part[g]: terms of group top - g, in units of 2^(16 (top - g) - 22)
    int top;
};

// r, in the low bits of kShift + r. Monotone.
__device__ __forceinline__ float shifted_exponent(float x) { return fmaf(x, 1.44269504f, kShift); }
__device__ __forceinline__ int exponent_of(float shifted) { return __float_as_int(shifted) - __float_as_int(kShift); }
__device__ __forceinline__ float clamped(float x) { return fminf(fmaxf(x, -kMostLogit), kMostLogit); }
__device__ __forceinline__ int group_of(float x) {
    return x == kNever ? kNoGroup : exponent_of(shifted_exponent(clamped(x))) >> 4;
}

__device__ __forceinline__ void clear(ExpSum& s, int top) {
    for (int g = 0; g < kGroups; g++) s.part[g] = 0;
    s.top = top;
}

// x must not be of a group above s.top. -inf adds nothing.
__device__ __forceinline__ void add_exp(ExpSum& s, float x) {
    x = clamped(x);
    const float shifted = shifted_exponent(x), n = shifted - kShift;
    const float f = fmaf(x, 1.92596303e-8f, fmaf(x, 1.44269502f, -n));  // log2(e) in two parts
    float e;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(f));
    const uint32_t digits = __float_as_uint(e + 2.0f) - __float_as_uint(2.0f);  // e * 2^22, rounded
    const int r = exponent_of(shifted), group = s.top - (r >> 4);
    const uint32_t scale = 1u << (r & 15);
#pragma unroll
    for (int g = 0; g < kGroups; g++) {
        s.part[g] += static_cast<unsigned long long>(digits) * (group == g ? scale : 0);
    }
}

__device__ inline void add(ExpSum& s, const ExpSum& more) {
    const int top = max(s.top, more.top), down = top - s.top, more_down = top - more.top;
    unsigned long long sum[kGroups];
#pragma unroll
    for (int g = 0; g < kGroups; g++) {
        sum[g] = 0;
#pragma unroll
        for (int from = 0; from <= g; from++) {
            if (g - from == down) sum[g] += s.part[from];
            if (g - from == more_down) sum[g] += more.part[from];
        }
    }
#pragma unroll
    for (int g = 0; g < kGroups; g++) s.part[g] = sum[g];
    s.top = top;
}

__device__ inline double log_of(const ExpSum& s) {
    double sum = 0;
    for (int g = kGroups - 1; g >= 0; g--) sum = sum * 0x1p-16 + static_cast<double>(s.part[g]);
    return log(sum) + static_cast<double>(16 * s.top - 22) * 0.693147180559945309417;
}

__device__ inline float log_probability(float logit, double log_sum) {
    return logit == kNever ? kNever : static_cast<float>(static_cast<double>(logit) - log_sum);
}

// ---- over a warp: order does not matter in any of them --------------------------------------------------------------------

__device__ __forceinline__ Ranked warp_best(Ranked value) {
    for (int step = 16; step; step /= 2) value = max(value, __shfl_xor_sync(0xFFFFFFFFu, value, step));
    return value;
}
__device__ __forceinline__ unsigned long long warp_total(unsigned long long value) {
    for (int step = 16; step; step /= 2) value += __shfl_xor_sync(0xFFFFFFFFu, value, step);
    return value;
}
__device__ __forceinline__ int warp_largest(int value) { return __reduce_max_sync(0xFFFFFFFFu, value); }

__device__ inline ExpSum warp_total(ExpSum s) {
    for (int step = 16; step; step /= 2) {
        ExpSum other;
        for (int g = 0; g < kGroups; g++) other.part[g] = __shfl_xor_sync(0xFFFFFFFFu, s.part[g], step);
        other.top = __shfl_xor_sync(0xFFFFFFFFu, s.top, step);
        add(s, other);
    }
    return s;
}

// ---- rows across ranks ------------------------------------------------------------------------------------------------------

// The ids of a rank: as many as every other's, but for the last ones. The same on all ranks.
inline int most_ids_of_rank(const Shape& s) { return (s.vocab + tp() - 1) / tp(); }

// What a rank shows of its logits, at the start of a shared buffer.
struct Slice {
    const float* logits;  // [rows][n]
    int begin, n;         // ids begin .. begin + n - 1
};
constexpr int kSliceBytes = 64;

// The slices of all ranks, in shared memory of a block; ids ascend.
struct Slices {
    Slice of_rank[KD_MAX_TP];

    // By all threads of a block; a barrier must follow.
    __device__ void load(const Shared& all, int ranks) {
        if (static_cast<int>(threadIdx.x) < ranks) {
            of_rank[threadIdx.x] = *static_cast<const Slice*>(all.of_rank[threadIdx.x]);
        }
    }
    // logit of `id` < vocab in row r. `at`: any rank not after the one that has the id; it moves on to that one.
    __device__ float logit(int r, int id, int& at) const {
        while (id >= of_rank[at].begin + of_rank[at].n) at++;
        const Slice& s = of_rank[at];
        return known(s.logits[static_cast<size_t>(r) * static_cast<size_t>(s.n) + static_cast<size_t>(id - s.begin)]);
    }
};

}  // namespace kd::cuda
