// Four-bit weights on their way into a product.
#pragma once

#include "mma.h"

namespace kd::cuda::w4 {

// A bf16 whose upper byte is 0 is its lower byte times 2^-133: the rules of the smallest numbers and of the first that have a
// leading one meet at 128. So a nibble is a number where it lies, in the lower half of a byte once, in the upper 16 times, and is
// only masked; every other one needs no shift. What is subtracted, 8, is exact there too. Products with such numbers are as exact as
// others but too small to be added, so activations are lifted before they are multiplied, and sums brought down, those of rows g + 8
// by 16 times as much. These factors are powers of two: they round nothing, with activations under 2^64, that is not under 2^-80.
constexpr float kLift = 0x1p64f, kLower = 0x1p69f, kLowerUpper = 0x1p65f;

__device__ __forceinline__ uint32_t lift(uint32_t word) {
    const __nv_bfloat162 v = __hmul2(*reinterpret_cast<__nv_bfloat162*>(&word), __float2bfloat162_rn(kLift));
    return *reinterpret_cast<const uint32_t*>(&v);
}
__device__ __forceinline__ uint4 lift(uint4 v) { return {lift(v.x), lift(v.y), lift(v.z), lift(v.w)}; }

// The factor of value i of what mma_bf16 calls D.
__device__ constexpr float lowered(int i) { return i < 2 ? kLower : kLowerUpper; }

__device__ __forceinline__ uint32_t minus(uint32_t word, uint32_t other) {
    const __nv_bfloat162 v =
        __hsub2(*reinterpret_cast<__nv_bfloat162*>(&word), *reinterpret_cast<__nv_bfloat162*>(&other));
    return *reinterpret_cast<const uint32_t*>(&v);
}

// The A operand of one product, nibble - 8 each, in rows g + 8 times 16.
__device__ __forceinline__ void widen(uint32_t (&a)[4], uint32_t word) {
    constexpr uint32_t kNibble = 0x000f000f, kEight = 0x00080008;
#pragma unroll
    for (int i = 0; i < 4; i += 2, word >>= 8) {
        a[i] = minus(word & kNibble, kEight);
        a[i + 1] = minus(word & kNibble << 4, kEight << 4);
    }
}

// Adds a brick of 32 x 32 weights times eight activations of 32 to d: of each tile of 16 rows, what mma_bf16 calls D, to be
// lowered. The sum over the brick's columns is multiplied with the scale in fp32. v: the lane's columns of activation lane / 4,
// lifted.
__device__ __forceinline__ void multiply_brick(float (&d)[2][4], uint4 words, uint2 scales, uint4 v) {
#pragma unroll
    for (int tile = 0; tile < 2; tile++) {
        uint32_t a[2][4];
        widen(a[0], tile == 0 ? words.x : words.z);
        widen(a[1], tile == 0 ? words.y : words.w);
        const uint32_t both = tile == 0 ? scales.x : scales.y;
        const float low = low_bf16(both), high = high_bf16(both);
        float sum[4] = {};
        mma_bf16(sum, a[0], {v.x, v.y});
        mma_bf16(sum, a[1], {v.z, v.w});
        d[tile][0] = __fmaf_rn(low, sum[0], d[tile][0]);
        d[tile][1] = __fmaf_rn(low, sum[1], d[tile][1]);
        d[tile][2] = __fmaf_rn(high, sum[2], d[tile][2]);
        d[tile][3] = __fmaf_rn(high, sum[3], d[tile][3]);
    }
}

}  // namespace kd::cuda::w4
