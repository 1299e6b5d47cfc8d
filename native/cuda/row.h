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

__device__ __forceinline__ Piece operator+(Piece a, const Piece& b) {
#pragma unroll
    for (int j = 0; j < kPiece; j++) a.v[j] += b.v[j];
    return a;
}

__device__ __forceinline__ Piece piece_of(uint4 w) {
    return {{low_bf16(w.x), high_bf16(w.x), low_bf16(w.y), high_bf16(w.y), low_bf16(w.z), high_bf16(w.z), low_bf16(w.w),
             high_bf16(w.w)}};
}
__device__ __forceinline__ Piece piece_of(uint4 a, uint4 b) {
    return {{__uint_as_float(a.x), __uint_as_float(a.y), __uint_as_float(a.z), __uint_as_float(a.w),
             __uint_as_float(b.x), __uint_as_float(b.y), __uint_as_float(b.z), __uint_as_float(b.w)}};
}
__device__ __forceinline__ uint4 words_of(const float* v) {
    return make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3]));
}

// Elements i .. i + 7 of a row of `width`; those past it are 0. Vectors where kVector.
template <bool kVector>
__device__ __forceinline__ Piece read_piece(const bf16* row, int i, int width) {
    if constexpr (kVector) {
        return piece_of(load16(row + i));
    } else {
        Piece p;
#pragma unroll
        for (int j = 0; j < kPiece; j++) p.v[j] = i + j < width ? __bfloat162float(row[i + j]) : 0.0f;
        return p;
    }
}

template <bool kVector>
__device__ __forceinline__ Piece read_piece(const float* row, int i, int width) {
    if constexpr (kVector) {
        return piece_of(load16(row + i), load16(row + i + 4));
    } else {
        Piece p;
#pragma unroll
        for (int j = 0; j < kPiece; j++) p.v[j] = i + j < width ? row[i + j] : 0.0f;
        return p;
    }
}

// The same, asked for here (ask16).
template <bool kVector>
__device__ __forceinline__ Piece ask_piece(const bf16* row, int i, int width) {
    if constexpr (kVector)
        return piece_of(ask16(row + i));
    else
        return read_piece<false>(row, i, width);
}
template <bool kVector>
__device__ __forceinline__ Piece ask_piece(const float* row, int i, int width) {
    if constexpr (kVector)
        return piece_of(ask16(row + i), ask16(row + i + 4));
    else
        return read_piece<false>(row, i, width);
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

// Brings a row to the cache, by the threads of a block.
template <class T>
__device__ __forceinline__ void prefetch_row(const T* row, int width) {
#pragma unroll 1
    for (int i = threadIdx.x * kPiece; i < width; i += blockDim.x * kPiece) prefetch(row + i);
}

// Who norms a row: the threads of a block.
template <int kThreads>
struct BlockTeam {
    static __device__ __forceinline__ int thread() { return threadIdx.x; }
    static __device__ __forceinline__ float sum(float v) { return block_sum<kThreads>(v); }
};

// y = v * w / sqrt(mean(v^2) + eps) of one row by one team, in steps: a norm is all latency, so memory is asked for as early as
// it may be. A thread's squares are summed in the order of its pieces, then those of the warp and of the team.
// kEarly: ask_weights() is called first of all, and pieces are asked for at once, which takes a read() that changes nothing. Else,
// where registers do not last, one comes after the other, and weights, brought near before, after the sum.
template <bool kVector, int kThreads, bool kEarly = true, class Team = BlockTeam<kThreads>>
struct Norm {
    const float* w;
    int width;
    Piece weight[kKept], kept[kKept];

    __device__ __forceinline__ Norm(const float* weights, int wide) : w(weights), width(wide) {}

    __device__ __forceinline__ int at(int c) const { return (Team::thread() + c * kThreads) * kPiece; }
    // Where a thread without a piece reads another's, which it drops: a branch would keep loads apart.
    __device__ __forceinline__ int within(int c) const { return kVector ? min(at(c), width - kPiece) : at(c); }

    // The weights are constants: to be called before wait_for_kernel_before().
    __device__ __forceinline__ void ask_weights() {
#pragma unroll
        for (int c = 0; c < kKept; c++) weight[c] = read_piece<kVector>(w, within(c), width);
    }
    // The first pieces of v; read(i) gives elements i .. i + 7.
    template <class Read>
    __device__ __forceinline__ void ask(Read read) {
#pragma unroll
        for (int c = 0; c < kKept; c++) {
            if constexpr (kEarly)
                kept[c] = read(within(c));
            else if (at(c) < width)
                kept[c] = read(at(c));
        }
    }
    // keep(i, piece) is given each piece before the sum; again(i) gives what is beyond the first ones once more.
    template <class Read, class Keep, class Again>
    __device__ __forceinline__ void finish(bf16* y, float eps, Read read, Keep keep, Again again) {
        float squares = 0;
        const auto add = [&](int i, const Piece& p) {
            keep(i, p);
#pragma unroll
            for (int j = 0; j < kPiece; j++) squares = __fmaf_rn(p.v[j], p.v[j], squares);
        };
#pragma unroll
        for (int c = 0; c < kKept; c++)
            if (at(c) < width) add(at(c), kept[c]);
#pragma unroll 1  // few rows are so wide, and code must be fetched
        for (int i = at(kKept); i < width; i += kThreads * kPiece) add(i, read(i));
        const float scale = 1.0f / sqrtf(Team::sum(squares) / static_cast<float>(width) + eps);
        const auto put = [&](int i, Piece p, const Piece& norm) {
#pragma unroll
            for (int j = 0; j < kPiece; j++) p.v[j] = p.v[j] * scale * norm.v[j];
            write_piece<kVector>(y, i, width, p);
        };
#pragma unroll
        for (int c = 0; c < kKept; c++)
            if (at(c) < width) put(at(c), kept[c], kEarly ? weight[c] : read_piece<kVector>(w, at(c), width));
#pragma unroll 1
        for (int i = at(kKept); i < width; i += kThreads * kPiece) put(i, again(i), read_piece<kVector>(w, i, width));
    }
};

// y = norm of x of one block's row, which may be x: a thread writes where only it reads, but for what it drops. All of a kernel,
// with wait_for_kernel_before().
template <bool kVector, int kThreads>
__device__ __forceinline__ void norm_row(RowsPtr y, RowsPtr x, const float* w, int width, float eps, Number n_rows,
                                         int r) {
    const bf16* const row = x[r];
    Norm<kVector, kThreads> norm(w, width);
    norm.ask_weights();
    const bool likely = n_rows.likely(r);
    wait_for_kernel_before();
    let_next_kernel_start();
    if (!likely && r >= n_rows()) return;
    const int n = n_rows();  // on its way with the row; of one that is not there nothing is used
    norm.ask([&](int i) { return ask_piece<kVector>(row, i, width); });
    if (r >= n) return;
    const auto read = [&](int i) { return read_piece<kVector>(row, i, width); };
    norm.finish(y[r], eps, read, [](int, const Piece&) {}, read);
}

inline bool vectors(int width) { return width % kPiece == 0; }

}  // namespace kd::cuda
