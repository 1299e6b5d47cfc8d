// Movement of rows and norms. All of it is bound by memory: bytes read and written / bandwidth, and below some hundred rows
// of a model by the launch itself. One block a row (a row of 7,168 is 14 KB), every thread some pieces of eight elements.
#include "launch.h"
#include "mma.h"
#include "ops.h"
#include "raw.h"
#include "row.h"

namespace kd::ops {

namespace {

using namespace cuda;

constexpr int kMoveThreads = 256;

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

template <bool kVector, int kThreads>
__global__ void __launch_bounds__(kThreads)
    norm_kernel(RowsPtr y, RowsPtr x, const float* w, int width, float eps, Number n_rows) {
    norm_row<kVector, kThreads>(y, x, w, width, eps, n_rows, blockIdx.x);
}

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

void keep_tap(Rows tap, Dev<float> x, Count n_rows, int width) {
    const auto go = [&]<bool kVector>() {
        launch_as<tap_kernel<kVector>>({.early = true}, n_rows.most, kMoveThreads, raw(tap), raw(x), width,
                                       number(n_rows));
    };
    vectors(width) && aligned16(tap) && aligned16(x) ? go.operator()<true>() : go.operator()<false>();
}

}  // namespace kd::ops
