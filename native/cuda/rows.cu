// Movement of rows and norms. All of it is bound by memory: bytes read and written / bandwidth, and below some hundred rows
// of a model by the launch itself. One block a row (a row of 7,168 is 14 KB), every thread some pieces of eight elements.
#include "comm.h"
#include "launch.h"
#include "mma.h"
#include "ops.h"
#include "raw.h"

namespace kd::ops {

namespace {

using namespace cuda;

constexpr int kPiece = 8;  // elements moved at once: 16 bytes of Act
constexpr int kMoveThreads = 256;

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

template <bool kVector>
__global__ void __launch_bounds__(kMoveThreads)
    embed_kernel(RowsPtr y, const int32_t* token, const bf16* table, int begin, int held, int width, Number n_rows) {
    wait_for_kernel_before();
    let_next_kernel_start();
    const int r = blockIdx.x;
    if (r >= n_rows()) return;
    const int64_t row = static_cast<int64_t>(token[r]) - begin;
    if (row >= 0 && row < held) {
        copy_bits<kVector>(y[r], table + static_cast<size_t>(row) * static_cast<size_t>(width), width);
        return;
    }
    for (int i = threadIdx.x * kPiece; i < width; i += kMoveThreads * kPiece)
        write_piece<kVector>(y[r], i, width, Piece{});
}

template <bool kVector>
__global__ void __launch_bounds__(kMoveThreads) zero_kernel(float* x, int width, Number n_rows) {
    wait_for_kernel_before();
    let_next_kernel_start();
    const int r = blockIdx.x;
    if (r >= n_rows()) return;
    float* row = x + static_cast<size_t>(r) * static_cast<size_t>(width);
    for (int i = threadIdx.x * kPiece; i < width; i += kMoveThreads * kPiece)
        write_piece<kVector>(row, i, width, Piece{});
}

// A row written twice keeps the last: the blocks of the earlier ones stand back.
template <bool kVector>
__global__ void __launch_bounds__(kMoveThreads)
    copy_kernel(RowsPtr to, const int32_t* to_row, RowsPtr from, const int32_t* from_row, Number n, int width) {
    wait_for_kernel_before();
    let_next_kernel_start();
    const int i = blockIdx.x, rows = n();
    if (i >= rows) return;
    const int at = to_row ? to_row[i] : i;
    if (to_row) {
        bool again = false;
        for (int j = i + 1 + threadIdx.x; j < rows; j += kMoveThreads) again |= to_row[j] == at;
        if (__syncthreads_or(again)) return;
    }
    copy_bits<kVector>(to[at], from[from_row ? from_row[i] : i], width);
}

template <bool kVector>
__global__ void __launch_bounds__(kMoveThreads) tap_kernel(RowsPtr tap, const float* x, int width, Number n_rows) {
    wait_for_kernel_before();
    let_next_kernel_start();
    const int r = blockIdx.x;
    if (r >= n_rows()) return;
    const float* from = x + static_cast<size_t>(r) * static_cast<size_t>(width);
    for (int i = threadIdx.x * kPiece; i < width; i += kMoveThreads * kPiece)
        write_piece<kVector>(tap[r], i, width, read_piece<kVector>(from, i, width));
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

// y may be x: a thread writes where only it reads.
template <bool kVector, int kThreads>
__global__ void __launch_bounds__(kThreads)
    norm_kernel(RowsPtr y, RowsPtr x, const float* w, int width, float eps, Number n_rows) {
    wait_for_kernel_before();
    let_next_kernel_start();
    const int r = blockIdx.x;
    if (r >= n_rows()) return;
    const bf16* row = x[r];
    const auto read = [&](int i) { return read_piece<kVector>(row, i, width); };
    norm_row<kVector, kThreads>(y[r], w, width, eps, read, read);
}

struct PartsOfRanks {
    RowsPtr of_rank[KD_MAX_TP];
};

template <bool kVector, int kThreads>
__global__ void __launch_bounds__(kThreads)
    add_norm_kernel(RowsPtr h, float* x, const __grid_constant__ PartsOfRanks parts, int ranks, const float* w,
                    int width, float eps, Number n_rows) {
    wait_for_kernel_before();
    let_next_kernel_start();
    const int r = blockIdx.x;
    if (r >= n_rows()) return;
    float* row = x + static_cast<size_t>(r) * static_cast<size_t>(width);
    const auto read = [&](int i) {
        Piece total = read_piece<kVector>(parts.of_rank[0][r], i, width);
        for (int rank = 1; rank < ranks; rank++) {
            const Piece more = read_piece<kVector>(parts.of_rank[rank][r], i, width);
#pragma unroll
            for (int j = 0; j < kPiece; j++) total.v[j] += more.v[j];
        }
        Piece sum = read_piece<kVector>(row, i, width);
#pragma unroll
        for (int j = 0; j < kPiece; j++) sum.v[j] += total.v[j];
        write_piece<kVector>(row, i, width, sum);
        return sum;
    };
    const auto again = [&](int i) { return read_piece<kVector>(row, i, width); };
    norm_row<kVector, kThreads>(h[r], w, width, eps, read, again);
}

bool vectors(int width) { return width % kPiece == 0; }

}  // namespace

void embed(Rows y, Dev<int32_t> token, Mat table, int vocab_begin, Count n_rows) {
    const auto go = [&]<bool kVector>() {
        launch_as<embed_kernel<kVector>>({.early = true}, n_rows.most, kMoveThreads, raw(y), raw(token),
                                         reinterpret_cast<const bf16*>(raw(table.w)), vocab_begin, table.n, table.k,
                                         number(n_rows));
    };
    vectors(table.k) && aligned16(y) && aligned16(table.w) ? go.operator()<true>() : go.operator()<false>();
}

void zero(Dev<float> x, Count n_rows, int width) {
    const auto go = [&]<bool kVector>() {
        launch_as<zero_kernel<kVector>>({.early = true}, n_rows.most, kMoveThreads, raw(x), width, number(n_rows));
    };
    vectors(width) && aligned16(x) ? go.operator()<true>() : go.operator()<false>();
}

void copy_rows(Rows to, Dev<int32_t> to_row, Rows from, Dev<int32_t> from_row, Count n, int width) {
    const auto go = [&]<bool kVector>() {
        launch_as<copy_kernel<kVector>>({.early = true}, n.most, kMoveThreads, raw(to), raw(to_row), raw(from),
                                        raw(from_row), number(n), width);
    };
    vectors(width) && aligned16(to) && aligned16(from) ? go.operator()<true>() : go.operator()<false>();
}

void rms_norm(Rows y, Rows x, Vec w, Count n_rows, int width, float eps) {
    const auto go = [&]<bool kVector, int kThreads>() {
        launch_as<norm_kernel<kVector, kThreads>>({.early = true}, n_rows.most, kThreads, raw(y), raw(x), raw(w), width,
                                                  eps, number(n_rows));
    };
    if (!(vectors(width) && aligned16(y) && aligned16(x) && aligned16(w)))
        go.operator()<false, kWideThreads>();
    else if (width <= kNarrow)
        go.operator()<true, kNarrowThreads>();
    else
        go.operator()<true, kWideThreads>();
}

void add_norm(Rows h, Dev<float> x, Rows y, Vec w, Count n_rows, int width, float eps) {
    const int ranks = tp();
    PartsOfRanks parts{{raw(y)}};
    bool aligned = aligned16(y);
    if (ranks > 1) {
        const size_t bytes = static_cast<size_t>(n_rows.most) * static_cast<size_t>(width) * sizeof(bf16);
        const Rows mine{share_buffer(bytes), width, 0};
        copy_rows(mine, {}, y, {}, n_rows, width);
        const Shared all = share_filled(bytes);
        for (int i = 0; i < ranks; i++)
            parts.of_rank[i] = {const_cast<bf16*>(static_cast<const bf16*>(all.of_rank[i])), width};
        aligned = true;
    }
    const auto go = [&]<bool kVector, int kThreads>() {
        launch_as<add_norm_kernel<kVector, kThreads>>({.early = true}, n_rows.most, kThreads, raw(h), raw(x), parts,
                                                      ranks, raw(w), width, eps, number(n_rows));
    };
    if (!(vectors(width) && aligned && aligned16(h) && aligned16(x) && aligned16(w)))
        go.operator()<false, kWideThreads>();
    else if (width <= kNarrow)
        go.operator()<true, kNarrowThreads>();
    else
        go.operator()<true, kWideThreads>();
}

void keep_tap(Rows tap, Dev<float> x, Count n_rows, int width) {
    const auto go = [&]<bool kVector>() {
        launch_as<tap_kernel<kVector>>({.early = true}, n_rows.most, kMoveThreads, raw(tap), raw(x), width,
                                       number(n_rows));
    };
    vectors(width) && aligned16(tap) && aligned16(x) ? go.operator()<true>() : go.operator()<false>();
}

}  // namespace kd::ops
