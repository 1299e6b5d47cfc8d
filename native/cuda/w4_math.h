// Four-bit weights on their way into a product.
#pragma once

#include "mma.h"

namespace kd::cuda::w4 {

// Two bf16 in a word, minus 136.
__device__ __forceinline__ uint32_t minus_136(uint32_t word) {
    const __nv_bfloat162 v = __hsub2(*reinterpret_cast<__nv_bfloat162*>(&word), __float2bfloat162_rn(136.0f));
    return *reinterpret_cast<const uint32_t*>(&v);
}

// The A operand of one product, nibble - 8 each: 0x4300 | nibble is 128 + nibble in bf16. One instruction does both; the
// compiler makes two of it.
__device__ __forceinline__ void widen(uint32_t (&a)[4], uint32_t word) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t v;
        asm("lop3.b32 %0, %1, %2, %3, 0xea;\n" : "=r"(v) : "r"(word >> 4 * i), "n"(0x000f000f), "r"(0x43004300));
        a[i] = minus_136(v);
    }
}

// Adds a brick of 32 x 32 weights times eight activations of 32 to d: of each tile of 16 rows, what mma_bf16 calls D. The sum
// over the brick's columns is multiplied with the scale in fp32. v: the lane's columns of activation lane / 4.
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
