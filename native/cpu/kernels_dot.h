// Dots and mixes over simd.h's V. Included by kernels_impl.h only.
#pragma once

#include "kernels.h"
#include "simd.h"

#define KD_UNROLL _Pragma("GCC unroll 16")

namespace {

using kd::cpu::Attend;
using kd::cpu::kAttendEach;
using kd::cpu::Kernels;
using kd::cpu::kHeadBlock;
using kd::cpu::RowsIn;

KD_INLINE int smaller(int a, int b) { return a < b ? a : b; }
KD_INLINE const float* row_of(const RowsIn& x, int i) {
    return x.p + static_cast<size_t>(x.index ? x.index[i] : i) * x.stride;
}
struct RowPointers {
    const float* const* row;
};
KD_INLINE const float* row_of(const RowPointers& x, int i) { return x.row[i]; }

// ---- dots: y[r][j] = sum_k x[r][k] w[j][k] --------------------------------------------------------------------------

// Where weights come from. from(j): the weights from row j on. at(): 16 of row j from element i on; part(): the last
// n < 16.
struct Bf16Weights {
    const uint16_t* w;
    size_t k;
    KD_INLINE Bf16Weights from(int j) const { return {w + static_cast<size_t>(j) * k, k}; }
    KD_INLINE V at(int j, int i) const { return bf16(w + static_cast<size_t>(j) * k + i); }
    KD_INLINE V part(int j, int i, int n) const { return bf16_part(w + static_cast<size_t>(j) * k + i, n); }
    KD_INLINE void ahead(int j, int i, size_t n) const { __builtin_prefetch(w + static_cast<size_t>(j) * k + i + n); }
};
struct F32Weights {
    const float* w;
    size_t stride;
    KD_INLINE F32Weights from(int j) const { return {w + static_cast<size_t>(j) * stride, stride}; }
    KD_INLINE V at(int j, int i) const { return load(w + static_cast<size_t>(j) * stride + i); }
    KD_INLINE V part(int j, int i, int n) const { return load_part(w + static_cast<size_t>(j) * stride + i, n); }
};
struct F32Rows {  // rows anywhere
    const float* const* row;
    KD_INLINE F32Rows from(int j) const { return {row + j}; }
    KD_INLINE V at(int j, int i) const { return load(row[j] + i); }
    KD_INLINE V part(int j, int i, int n) const { return load_part(row[j] + i, n); }
};
template <int R, int J>
KD_INLINE void store_sums(float* y, size_t y_stride, V (&acc)[R][J]) {
    KD_UNROLL for (int r = 0; r < R; r++) {
        float* to = y + static_cast<size_t>(r) * y_stride;
        if constexpr (J % 4 == 0) {
            KD_UNROLL for (int j = 0; j < J; j += 4)
                sum4(to + j, acc[r][j], acc[r][j + 1], acc[r][j + 2], acc[r][j + 3]);
        } else {
            KD_UNROLL for (int j = 0; j < J; j++) to[j] = sum(acc[r][j]);
        }
    }
}

constexpr int kAhead = 512;  // elements fetched ahead of use in each of a tile's matrix rows: 1 KiB

// acc[r][j] += the products of elements [0, k) in 16 lanes.
template <int R, int J, class W>
KD_INLINE void accumulate(V (&acc)[R][J], const float* const (&row)[R], W w, int k) {
    int i = 0;
    // Fetched ahead is the same matrix row, and near its end the start of the next tile's; short rows: the next tile's.
    const auto until = [&](int end, size_t ahead) __attribute__((always_inline)) {
        for (; i + kLanes <= end; i += kLanes) {
            V v[R];
            KD_UNROLL for (int r = 0; r < R; r++) v[r] = load(row[r] + i);
            KD_UNROLL for (int j = 0; j < J; j++) {
                const V a = w.at(j, i);
                if constexpr (requires { w.ahead(0, 0, 0); }) w.ahead(j, i, ahead);
                KD_UNROLL for (int r = 0; r < R; r++) acc[r][j] = fma(v[r], a, acc[r][j]);
            }
        }
    };
    const size_t tile = static_cast<size_t>(J) * static_cast<size_t>(k);
    if constexpr (requires { w.ahead(0, 0, 0); })
        if (k > kAhead) {
            until(k - kAhead, kAhead);
            until(k, tile - static_cast<size_t>(k - kAhead));
        }
    until(k, tile);
    if (i < k) {
        V v[R];
        KD_UNROLL for (int r = 0; r < R; r++) v[r] = load_part(row[r] + i, k - i);
        KD_UNROLL for (int j = 0; j < J; j++) {
            const V a = w.part(j, i, k - i);
            KD_UNROLL for (int r = 0; r < R; r++) acc[r][j] = fma(v[r], a, acc[r][j]);
        }
    }
}

template <int R, int J>
KD_INLINE void clear(V (&acc)[R][J]) {
    KD_UNROLL for (int r = 0; r < R; r++) { KD_UNROLL for (int j = 0; j < J; j++) acc[r][j] = zero(); }
}

template <int R, int J, class W>
void tile(float* y, size_t y_stride, const float* const* x, W w, int k) {
    V acc[R][J];
    clear(acc);
    const float* row[R];
    KD_UNROLL for (int r = 0; r < R; r++) row[r] = x[r];
    accumulate(acc, row, w, k);
    store_sums<R, J>(y, y_stride, acc);
}

template <int R, class W>
void tiles(float* y, size_t y_stride, const float* const* x, W w, int n, int k) {
    constexpr int J = tile_columns(R);
    int j = 0;
    for (; j + J <= n; j += J) tile<R, J>(y + j, y_stride, x, w.from(j), k);
    for (; j < n; j++) tile<R, 1>(y + j, y_stride, x, w.from(j), k);
}

template <int N>
struct Count {
    static constexpr int value = N;
};
// f(Count<rows>) for 1 <= rows <= kTileRows.
template <class F>
KD_INLINE void with_rows(int rows, F&& f) {
    static_assert(kTileRows <= 6);
    if (rows == 1) f(Count<1>{});
    if constexpr (kTileRows >= 2)
        if (rows == 2) f(Count<2>{});
    if constexpr (kTileRows >= 3)
        if (rows == 3) f(Count<3>{});
    if constexpr (kTileRows >= 6) {
        if (rows == 4) f(Count<4>{});
        if (rows == 5) f(Count<5>{});
        if (rows == 6) f(Count<6>{});
    }
}

template <class X, class W>
void dot(float* y, size_t y_stride, const X& x, int rows, W w, int n, int k) {
    for (int r = 0; r < rows; r += kTileRows) {
        const int some = smaller(kTileRows, rows - r);
        const float* row[kTileRows];
        for (int i = 0; i < some; i++) row[i] = row_of(x, r + i);
        with_rows(some, [&](auto count) __attribute__((always_inline)) {
            tiles<count.value>(y + static_cast<size_t>(r) * y_stride, y_stride, row, w, n, k);
        });
    }
}

// Many rows: a few matrix rows are widened once into a buffer that stays in the first-level cache, a stretch of k at a
// time, and the sums so far wait in `carry`. The same products in the same order as in a tile, so the same bits.
constexpr int kStretch = 512;
constexpr int kMany = 24;      // rows at a time
constexpr int kWide = 4;       // matrix rows
constexpr int kBf16Many = 24;  // rows from which the buffer beats widening bf16 in every tile

// As few parts of at most kMany rows as will do, about equally long, in whole tiles.
KD_INLINE int equal_part(int rows) {
    const int parts = (rows + kMany - 1) / kMany, each = (rows + parts - 1) / parts;
    return smaller(kMany, (each + kTileRows - 1) / kTileRows * kTileRows);
}

template <int R, int J>
KD_INLINE void stretch(float* y, size_t y_stride, const float* const* x, int x0, float* carry, const float* wide, int k,
                       bool first, bool last) {
    V acc[R][J];
    const float* row[R];
    KD_UNROLL for (int r = 0; r < R; r++) row[r] = x[r] + x0;
    KD_UNROLL for (int r = 0; r < R; r++) {
        KD_UNROLL for (int j = 0; j < J; j++) acc[r][j] = first ? zero() : load(carry + (r * kWide + j) * kLanes);
    }
    accumulate(acc, row, F32Weights{wide, kStretch}, k);
    if (last) return store_sums<R, J>(y, y_stride, acc);
    KD_UNROLL for (int r = 0; r < R; r++) {
        KD_UNROLL for (int j = 0; j < J; j++) store(carry + (r * kWide + j) * kLanes, acc[r][j]);
    }
}

// J of the kWide matrix rows at a time, as many as the registers hold.
template <int R>
void stretches(float* y, size_t y_stride, const float* const* x, int x0, float* carry, const float* wide, int n, int k,
               bool first, bool last) {
    constexpr int J = tile_columns(R) < kWide ? tile_columns(R) : kWide;
    int j = 0;
    for (; j + J <= n; j += J)
        stretch<R, J>(y + j, y_stride, x, x0, carry + j * kLanes, wide + j * kStretch, k, first, last);
    for (; j < n; j++) stretch<R, 1>(y + j, y_stride, x, x0, carry + j * kLanes, wide + j * kStretch, k, first, last);
}

// widen(to, j, k0, part): elements k0 .. k0 + part - 1 of matrix row j.
template <class F>
KD_INLINE void many(float* y, size_t y_stride, const float* const* x, int rows, int n, int k, F&& widen) {
    alignas(64) float wide[kWide * kStretch];
    alignas(64) float carry[kMany * kWide * kLanes];
    for (int j0 = 0; j0 < n; j0 += kWide) {
        const int some = smaller(kWide, n - j0);
        for (int k0 = 0; k0 < k; k0 += kStretch) {
            const int part = smaller(kStretch, k - k0);
            for (int j = 0; j < some; j++) widen(wide + j * kStretch, j0 + j, k0, part);
            const bool first = k0 == 0, last = k0 + part == k;
            for (int r = 0; r < rows; r += kTileRows)
                with_rows(smaller(kTileRows, rows - r), [&](auto count) __attribute__((always_inline)) {
                    stretches<count.value>(y + static_cast<size_t>(r) * y_stride + j0, y_stride, x + r, k0,
                                           carry + r * kWide * kLanes, wide, some, part, first, last);
                });
        }
    }
}

void dot_bf16(float* y, size_t y_stride, RowsIn x, int rows, const uint16_t* w, int n, int k) {
    const Bf16Weights weights{w, static_cast<size_t>(k)};
    if (rows < kBf16Many || k == 0) return dot(y, y_stride, x, rows, weights, n, k);
    const int at_once = equal_part(rows);
    for (int r = 0; r < rows; r += at_once) {
        const int some = smaller(at_once, rows - r);
        const float* row[kMany];
        for (int i = 0; i < some; i++) row[i] = row_of(x, r + i);
        many(y + static_cast<size_t>(r) * y_stride, y_stride, row, some, n, k,
             [&](float* wide, int j, int k0, int part) __attribute__((always_inline)) {
                 int i = 0;
                 for (; i + kLanes <= part; i += kLanes)
                     weights.ahead(j + kWide, k0 + i, 0), store(wide + i, weights.at(j, k0 + i));
                 if (i < part) store(wide + i, weights.part(j, k0 + i, part - i));
             });
    }
}
void dot_f32(float* y, size_t y_stride, RowsIn x, int rows, const float* w, int n, int k) {
    dot(y, y_stride, x, rows, F32Weights{w, static_cast<size_t>(k)}, n, k);
}

// ---- 4-bit dots

struct W4Matrix {
    const uint32_t* q;
    const uint16_t* s;
    size_t k;
    KD_INLINE const uint32_t* q_at(int j, int i) const {
        return q + (static_cast<size_t>(j) * k + static_cast<size_t>(i)) / 8;
    }
    KD_INLINE const uint16_t* s_at(int j, int i) const {
        return s + (static_cast<size_t>(j) * k + static_cast<size_t>(i)) / 32;
    }
};
constexpr int kGroup = 32;
constexpr int kShort = 1024;  // a tile of rows so short is over before its successor has arrived: two tiles ahead

// Few rows: weights go from 4 bits to registers and are used there.
template <int R, int J>
void w4_tile(float* y, size_t y_stride, const float* const* x, const W4Matrix& w, int j0, int k) {
    V acc[R][J];
    clear(acc);
    const float* row[R];
    KD_UNROLL for (int r = 0; r < R; r++) row[r] = x[r];
    const int next = j0 + (k < kShort ? 2 * J : J);
    const auto fetch = [](const void* from, int bytes) __attribute__((always_inline)) {
        __builtin_prefetch(static_cast<const char*>(from) + bytes, 0, 2);
    };
    const auto group = [&](int i, int j, V scale, const V(&even)[R], const V(&odd)[R]) __attribute__((always_inline)) {
        V a, b;
        w4(a, b, w4_load(w.q_at(j0 + j, i)), scale);
        KD_UNROLL for (int r = 0; r < R; r++) acc[r][j] = fma(odd[r], b, fma(even[r], a, acc[r][j]));
    };
    int i = 0;
    for (; i + 2 * kGroup <= k; i += 2 * kGroup) {
        V second[J], even[R], odd[R];
        KD_UNROLL for (int r = 0; r < R; r++) even[r] = load(row[r] + i), odd[r] = load(row[r] + i + kLanes);
        KD_UNROLL for (int j = 0; j < J; j++) {
            V first;
            w4_scales(first, second[j], w.s_at(j0 + j, i));
            // The next tile, line by line in the order of memory: many short matrix rows side by side are more streams
            // than the hardware follows. Into the second-level cache, as a tile may fill the first.
            if (j % 2 == 0) fetch(w.q_at(next, 0), i / 2 * J + j * 32);
            if (j == 0) fetch(w.s_at(next, 0), i / 16 * J);
            group(i, j, first, even, odd);
        }
        KD_UNROLL for (int r = 0; r < R; r++) even[r] = load(row[r] + i + kGroup),
                                              odd[r] = load(row[r] + i + kGroup + kLanes);
        KD_UNROLL for (int j = 0; j < J; j++) group(i + kGroup, j, second[j], even, odd);
    }
    if (i < k) {
        V even[R], odd[R];
        KD_UNROLL for (int r = 0; r < R; r++) even[r] = load(row[r] + i), odd[r] = load(row[r] + i + kLanes);
        KD_UNROLL for (int j = 0; j < J; j++) group(i, j, set(bf16_to_float(*w.s_at(j0 + j, i))), even, odd);
    }
    store_sums<R, J>(y, y_stride, acc);
}

template <int R>
void w4_tiles(float* y, size_t y_stride, const float* const* x, const W4Matrix& w, int n, int k) {
    constexpr int J = w4_columns(R);
    int j = 0;
    for (; j + J <= n; j += J) w4_tile<R, J>(y + j, y_stride, x, w, j, k);
    for (; j < n; j++) w4_tile<R, 1>(y + j, y_stride, x, w, j, k);
}

void dot_w4_many(float* y, size_t y_stride, const float* const* x, int rows, const W4Matrix& w, int n, int k) {
    many(y, y_stride, x, rows, n, k, [&](float* wide, int j, int k0, int part) __attribute__((always_inline)) {
        for (int i = 0; i < part; i += kGroup) {
            __builtin_prefetch(w.q_at(j + kWide, k0 + i));
            V even, odd;
            w4(even, odd, w4_load(w.q_at(j, k0 + i)), set(bf16_to_float(*w.s_at(j, k0 + i))));
            store(wide + i, even);
            store(wide + i + kLanes, odd);
        }
    });
}

void dot_w4(float* y, size_t y_stride, RowsIn x, int rows, const uint32_t* q, const uint16_t* s, int n, int k) {
    const W4Matrix w{q, s, static_cast<size_t>(k)};
    // Up to two tiles of rows, widening a second time costs less than the buffer does.
    const bool buffered = rows > 2 * kW4Rows;
    const int at_once = buffered ? equal_part(rows) : rows > kW4Rows ? (rows + 1) / 2 : rows;
    for (int r = 0; r < rows; r += at_once) {
        const int some = smaller(at_once, rows - r);
        const float* row[kMany];
        for (int i = 0; i < some; i++) row[i] = row_of(x, r + i);
        float* to = y + static_cast<size_t>(r) * y_stride;
        if (buffered) {
            dot_w4_many(to, y_stride, row, some, w, n, k);
        } else {
            with_rows(some, [&](auto count) __attribute__((always_inline)) {
                if constexpr (count.value <= kW4Rows) w4_tiles<count.value>(to, y_stride, row, w, n, k);
            });
        }
    }
}

void w4_order(float* y, const float* x, int width) {
    for (int i = 0; i < width; i += kGroup) {
        V even, odd;
        split_pairs(even, odd, load(x + i), load(x + i + kLanes));
        store(y + i, even);
        store(y + i + kLanes, odd);
    }
}

// ---- mixes: y[r][c] = sum_n a[r][n] w[n][c] -------------------------------------------------------------------------

constexpr size_t kMixAhead = 8;  // rows of w

// Columns 0 .. 16 C - 1, or `part` > 0 of them (then C = 1).
template <int R, int C>
void mix_tile(float* y, size_t y_stride, const float* a, size_t a_stride, const uint16_t* w, int n, size_t width,
              int part) {
    V acc[R][C];
    KD_UNROLL for (int r = 0; r < R; r++) { KD_UNROLL for (int c = 0; c < C; c++) acc[r][c] = zero(); }
    for (int i = 0; i < n; i++, w += width) {
        V v[C];
        KD_UNROLL for (int c = 0; c < C; c++) {
            v[c] = C == 1 && part ? bf16_part(w, part) : bf16(w + c * kLanes);
            if (c % 2 == 0) __builtin_prefetch(w + kMixAhead * width + c * kLanes);
        }
        KD_UNROLL for (int r = 0; r < R; r++) {
            const V f = set(a[static_cast<size_t>(r) * a_stride + static_cast<size_t>(i)]);
            KD_UNROLL for (int c = 0; c < C; c++) acc[r][c] = fma(f, v[c], acc[r][c]);
        }
    }
    KD_UNROLL for (int r = 0; r < R; r++) {
        float* to = y + static_cast<size_t>(r) * y_stride;
        KD_UNROLL for (int c = 0; c < C; c++) {
            if (C == 1 && part)
                store_part(to, acc[r][c], part);
            else
                store(to + c * kLanes, acc[r][c]);
        }
    }
}

template <int R>
void mix_rows(float* y, size_t y_stride, const float* a, size_t a_stride, const uint16_t* w, int n, int width) {
    const size_t stride = static_cast<size_t>(width);
    int c = 0;
    constexpr int C = mix_columns(R);
    for (; c + C * kLanes <= width; c += C * kLanes) mix_tile<R, C>(y + c, y_stride, a, a_stride, w + c, n, stride, 0);
    for (; c + kLanes <= width; c += kLanes) mix_tile<R, 1>(y + c, y_stride, a, a_stride, w + c, n, stride, 0);
    if (c < width) mix_tile<R, 1>(y + c, y_stride, a, a_stride, w + c, n, stride, width - c);
}

void mix_bf16(float* y, size_t y_stride, const float* a, size_t a_stride, int rows, const uint16_t* w, int n,
              int width) {
    int r = 0;
    for (; r + kMixRows <= rows; r += kMixRows)
        mix_rows<kMixRows>(y + static_cast<size_t>(r) * y_stride, y_stride, a + static_cast<size_t>(r) * a_stride,
                           a_stride, w, n, width);
    for (; r < rows; r++)
        mix_rows<1>(y + static_cast<size_t>(r) * y_stride, y_stride, a + static_cast<size_t>(r) * a_stride, a_stride, w,
                    n, width);
}

}  // namespace
