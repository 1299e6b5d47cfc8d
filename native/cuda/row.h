// A row of a model in the hands of one block: moved in pieces, normed.
#pragma once

#include <cstdint>

#include "mma.h"
#include "raw.h"

namespace kd::cuda {

constexpr int kPiece = 8;  // elements moved at once: 16 bytes of Act
// Threads of a block that norms a row: by its width alone, as the order of the sum depends on it.
constexpr int kNarrowThreads = 64, kWideThreads = 512;
constexpr int kNarrow = 1024;
// Pieces of a row a thread keeps in registers between the sum and the result; it reads what is beyond again.
constexpr int kKept = 2;

struct Piece {
    float v[kPiece];
};

// Elements i .. i + 7 of a row of `width`; those past it are 0. Vectors where kVector.
template <bool kVector>
__device__ __forceinline__ Piece read_piece(const bf16* row, int i, int width) {
    Piece p;
    if constexpr (kVector) {
        const uint4 words = load16(row + i);
        const uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            p.v[2 * j] = low_bf16(word[j]);
            p.v[2 * j + 1] = high_bf16(word[j]);
        }
    } else {
#pragma unroll
        for (int j = 0; j < kPiece; j++) p.v[j] = i + j < width ? __bfloat162float(row[i + j]) : 0.0f;
    }
    return p;
}

template <bool kVector>
__device__ __forceinline__ Piece read_piece(const float* row, int i, int width) {
    Piece p;
    if constexpr (kVector) {
        const float4 a = *reinterpret_cast<const float4*>(row + i), b = *reinterpret_cast<const float4*>(row + i + 4);
        p = {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
    } else {
#pragma unroll
        for (int j = 0; j < kPiece; j++) p.v[j] = i + j < width ? row[i + j] : 0.0f;
    }
    return p;
}

template <bool kVector>
__device__ __forceinline__ void write_piece(bf16* row, int i, int width, const Piece& p) {
    if constexpr (kVector) {
        store16(row + i, {pack_bf16(p.v[0], p.v[1]), pack_bf16(p.v[2], p.v[3]), pack_bf16(p.v[4], p.v[5]),
                          pack_bf16(p.v[6], p.v[7])});
    } else {
#pragma unroll
        for (int j = 0; j < kPiece; j++)
            if (i + j < width) row[i + j] = __float2bfloat16_rn(p.v[j]);
    }
}

template <bool kVector>
__device__ __forceinline__ void write_piece(float* row, int i, int width, const Piece& p) {
    if constexpr (kVector) {
        *reinterpret_cast<float4*>(row + i) = make_float4(p.v[0], p.v[1], p.v[2], p.v[3]);
        *reinterpret_cast<float4*>(row + i + 4) = make_float4(p.v[4], p.v[5], p.v[6], p.v[7]);
    } else {
#pragma unroll
        for (int j = 0; j < kPiece; j++)
            if (i + j < width) row[i + j] = p.v[j];
    }
}

// Bits of a row, by the threads of a block.
template <bool kVector>
__device__ __forceinline__ void copy_bits(bf16* to, const bf16* from, int width) {
    if constexpr (kVector) {
        for (int i = threadIdx.x * kPiece; i < width; i += blockDim.x * kPiece) store16(to + i, load16(from + i));
    } else {
        const uint16_t* bits = reinterpret_cast<const uint16_t*>(from);
        for (int i = threadIdx.x; i < width; i += blockDim.x) reinterpret_cast<uint16_t*>(to)[i] = bits[i];
    }
}

// y = v * w / sqrt(mean(v^2) + eps) of one row by one block. read(i) gives elements i .. i + 7 of v before the sum, again(i)
// after it. A thread's squares are summed in the order of its pieces, then those of the warp and of the block.
template <bool kVector, int kThreads, class Read, class Again>
__device__ __forceinline__ void norm_row(bf16* y, const float* w, int width, float eps, Read read, Again again) {
    Piece kept[kKept];
    float squares = 0;
    const auto add = [&](const Piece& p) {
#pragma unroll
        for (int j = 0; j < kPiece; j++) squares = __fmaf_rn(p.v[j], p.v[j], squares);
    };
    const int first = threadIdx.x * kPiece;
#pragma unroll
    for (int c = 0; c < kKept; c++) {
        const int i = first + c * kThreads * kPiece;
        kept[c] = i < width ? read(i) : Piece{};
        add(kept[c]);
    }
    for (int i = first + kKept * kThreads * kPiece; i < width; i += kThreads * kPiece) add(read(i));
    const float scale = 1.0f / sqrtf(block_sum<kThreads>(squares) / static_cast<float>(width) + eps);
    const auto put = [&](int i, Piece p) {
        const Piece norm = read_piece<kVector>(w, i, width);
#pragma unroll
        for (int j = 0; j < kPiece; j++) p.v[j] = p.v[j] * scale * norm.v[j];
        write_piece<kVector>(y, i, width, p);
    };
#pragma unroll
    for (int c = 0; c < kKept; c++) {
        const int i = first + c * kThreads * kPiece;
        if (i < width) put(i, kept[c]);
    }
    for (int i = first + kKept * kThreads * kPiece; i < width; i += kThreads * kPiece) put(i, again(i));
}

inline bool vectors(int width) { return width % kPiece == 0; }

}  // namespace kd::cuda
