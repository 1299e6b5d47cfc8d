// The inner loops, written once over simd.h's V. Included by kernels_plain.cpp, kernels_avx2.cpp, kernels_avx512.cpp.
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
// n < 16; pair(): 32 that share a scale.
struct Bf16Weights {
    const uint16_t* w;
    size_t k;
    KD_INLINE Bf16Weights from(int j) const { return {w + static_cast<size_t>(j) * k, k}; }
    KD_INLINE V at(int j, int i) const { return bf16(w + static_cast<size_t>(j) * k + i); }
    KD_INLINE V part(int j, int i, int n) const { return bf16_part(w + static_cast<size_t>(j) * k + i, n); }
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
struct W4Weights {
    const uint32_t* q;
    const uint16_t* s;
    size_t k;
    KD_INLINE W4Weights from(int j) const {
        return {q + static_cast<size_t>(j) * (k / 8), s + static_cast<size_t>(j) * (k / 32), k};
    }
    KD_INLINE void pair(V& low, V& high, int j, int i) const {
        const size_t row = static_cast<size_t>(j);
        w4(low, high, q + row * (k / 8) + i / 8, bf16_to_float(s[row * (k / 32) + i / 32]));
    }
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

template <int R, int J, class W>
void tile(float* y, size_t y_stride, const float* const* x, W w, int k) {
    V acc[R][J];
    KD_UNROLL for (int r = 0; r < R; r++) { KD_UNROLL for (int j = 0; j < J; j++) acc[r][j] = zero(); }
    const float* row[R];
    KD_UNROLL for (int r = 0; r < R; r++) row[r] = x[r];
    int i = 0;
    if constexpr (requires(V v) { w.pair(v, v, 0, 0); }) {
        for (; i < k; i += 2 * kLanes) {
            V low[R], high[R];
            KD_UNROLL for (int r = 0; r < R; r++) low[r] = load(row[r] + i);
            KD_UNROLL for (int r = 0; r < R; r++) high[r] = load(row[r] + i + kLanes);
            KD_UNROLL for (int j = 0; j < J; j++) {
                V a, b;
                w.pair(a, b, j, i);
                KD_UNROLL for (int r = 0; r < R; r++) acc[r][j] = fma(high[r], b, fma(low[r], a, acc[r][j]));
            }
        }
    } else {
        for (; i + kLanes <= k; i += kLanes) {
            V v[R];
            KD_UNROLL for (int r = 0; r < R; r++) v[r] = load(row[r] + i);
            KD_UNROLL for (int j = 0; j < J; j++) {
                const V a = w.at(j, i);
                KD_UNROLL for (int r = 0; r < R; r++) acc[r][j] = fma(v[r], a, acc[r][j]);
            }
        }
        if (i < k) {
            V v[R];
            KD_UNROLL for (int r = 0; r < R; r++) v[r] = load_part(row[r] + i, k - i);
            KD_UNROLL for (int j = 0; j < J; j++) {
                const V a = w.part(j, i, k - i);
                KD_UNROLL for (int r = 0; r < R; r++) acc[r][j] = fma(v[r], a, acc[r][j]);
            }
        }
    }
    store_sums<R, J>(y, y_stride, acc);
}

template <int R, class W>
void tiles(float* y, size_t y_stride, const float* const* x, W w, int n, int k) {
    constexpr int J = tile_columns(R);
    int j = 0;
    for (; j + J <= n; j += J) tile<R, J>(y + j, y_stride, x, w.from(j), k);
    for (; j < n; j++) tile<R, 1>(y + j, y_stride, x, w.from(j), k);
}

// x: at least `rows` pointers.
template <class W>
KD_INLINE void dot_rows(float* y, size_t y_stride, const float* const* x, int rows, W w, int n, int k) {
    switch (rows) {
        case 1: return tiles<1>(y, y_stride, x, w, n, k);
        case 2: return tiles<2>(y, y_stride, x, w, n, k);
#if !defined(KD_SIMD_PLAIN)
        case 3: return tiles<3>(y, y_stride, x, w, n, k);
#endif
#if defined(KD_SIMD_AVX512)
        case 4: return tiles<4>(y, y_stride, x, w, n, k);
        case 5: return tiles<5>(y, y_stride, x, w, n, k);
        case 6: return tiles<6>(y, y_stride, x, w, n, k);
#endif
    }
}

template <class X, class W>
void dot(float* y, size_t y_stride, const X& x, int rows, W w, int n, int k) {
    for (int r = 0; r < rows; r += kTileRows) {
        const int some = smaller(kTileRows, rows - r);
        const float* row[kTileRows];
        for (int i = 0; i < some; i++) row[i] = row_of(x, r + i);
        dot_rows(y + static_cast<size_t>(r) * y_stride, y_stride, row, some, w, n, k);
    }
}

void dot_bf16(float* y, size_t y_stride, RowsIn x, int rows, const uint16_t* w, int n, int k) {
    dot(y, y_stride, x, rows, Bf16Weights{w, static_cast<size_t>(k)}, n, k);
}
void dot_f32(float* y, size_t y_stride, RowsIn x, int rows, const float* w, int n, int k) {
    dot(y, y_stride, x, rows, F32Weights{w, static_cast<size_t>(k)}, n, k);
}
void dot_w4(float* y, size_t y_stride, RowsIn x, int rows, const uint32_t* q, const uint16_t* s, int n, int k) {
    dot(y, y_stride, x, rows, W4Weights{q, s, static_cast<size_t>(k)}, n, k);
}

// ---- mixes: y[r][c] = sum_n a[r][n] w[n][c] -------------------------------------------------------------------------

// Columns 0 .. 16 C - 1, or `part` > 0 of them (then C = 1).
template <int R, int C>
void mix_tile(float* y, size_t y_stride, const float* a, size_t a_stride, const uint16_t* w, int n, size_t width,
              int part) {
    V acc[R][C];
    KD_UNROLL for (int r = 0; r < R; r++) { KD_UNROLL for (int c = 0; c < C; c++) acc[r][c] = zero(); }
    for (int i = 0; i < n; i++, w += width) {
        V v[C];
        KD_UNROLL for (int c = 0; c < C; c++) v[c] = C == 1 && part ? bf16_part(w, part) : bf16(w + c * kLanes);
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
    for (; c + kMixColumns * kLanes <= width; c += kMixColumns * kLanes)
        mix_tile<R, kMixColumns>(y + c, y_stride, a, a_stride, w + c, n, stride, 0);
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

// ---- attention ------------------------------------------------------------------------------------------------------

// Applies f to every vector of a row of `width`: f(offset, elements), elements < 16 for the last one if it is short.
template <class F>
KD_INLINE void over(int width, F&& f) {
    int i = 0;
    for (; i + kLanes <= width; i += kLanes) f(i, kLanes);
    if (i < width) f(i, width - i);
}
KD_INLINE V take(const float* p, int n) { return n == kLanes ? load(p) : load_part(p, n); }
KD_INLINE void put(float* p, V v, int n) { n == kLanes ? store(p, v) : store_part(p, v, n); }

void attend_begin(Attend& a) {
    store(a.max, set(-__builtin_inff()));
    store(a.sum, zero());
    for (int h = 0; h < a.heads; h++) {
        float* o = a.o + static_cast<size_t>(h) * a.o_stride;
        over(a.dv, [&](int c, int n) { put(o + c, zero(), n); });
    }
}

// For H heads from h0 on, keys in order: o[h] = o[h] * shrink(h, key) + p(h, key) * value[key]. Each: every key has a
// shrink of its own; otherwise only the first has one. p and shrink: [head][key], or [key][head] for Each.
template <bool Each, int H>
KD_INLINE void fold_heads(Attend& a, int h0, const float* shrink, const float* p, const float* const* values, int n) {
    constexpr int C = 2;  // vectors at a time
    const auto at = [&](int h, int key) { return Each ? key * kHeadBlock + h0 + h : (h0 + h) * kLanes + key; };
    float* o[H];
    KD_UNROLL for (int h = 0; h < H; h++) o[h] = a.o + static_cast<size_t>(h0 + h) * a.o_stride;
    int c = 0;
    for (; c + C * kLanes <= a.dv; c += C * kLanes) {
        V acc[H][C];
        KD_UNROLL for (int h = 0; h < H; h++) {
            KD_UNROLL for (int i = 0; i < C; i++) {
                acc[h][i] = load(o[h] + c + i * kLanes);
                if (!Each) acc[h][i] = mul(acc[h][i], set(shrink[h0 + h]));
            }
        }
        for (int key = 0; key < n; key++) {
            V v[C];
            KD_UNROLL for (int i = 0; i < C; i++) v[i] = load(values[key] + c + i * kLanes);
            KD_UNROLL for (int h = 0; h < H; h++) {
                const V f = set(p[at(h, key)]);
                KD_UNROLL for (int i = 0; i < C; i++) {
                    if (Each) acc[h][i] = mul(acc[h][i], set(shrink[at(h, key)]));
                    acc[h][i] = fma(f, v[i], acc[h][i]);
                }
            }
        }
        KD_UNROLL for (int h = 0; h < H; h++) {
            KD_UNROLL for (int i = 0; i < C; i++) store(o[h] + c + i * kLanes, acc[h][i]);
        }
    }
    for (; c < a.dv; c += kLanes) {
        const int some = smaller(kLanes, a.dv - c);
        for (int h = 0; h < H; h++) {
            V acc = take(o[h] + c, some);
            if (!Each) acc = mul(acc, set(shrink[h0 + h]));
            for (int key = 0; key < n; key++) {
                if (Each) acc = mul(acc, set(shrink[at(h, key)]));
                acc = fma(set(p[at(h, key)]), take(values[key] + c, some), acc);
            }
            put(o[h] + c, acc, some);
        }
    }
}

template <bool Each>
KD_INLINE void fold(Attend& a, const float* shrink, const float* p, const float* const* values, int n) {
    constexpr int H = kTileRows >= 6 ? 8 : 2;
    int h = 0;
    for (; h + H <= a.heads; h += H) fold_heads<Each, H>(a, h, shrink, p, values, n);
    for (; h < a.heads; h++) fold_heads<Each, 1>(a, h, shrink, p, values, n);
}

void attend_step(Attend& a, const float* const* keys, const float* const* values, int n) {
    alignas(64) float p[kHeadBlock * kLanes];  // [head][key]
    alignas(64) float now[kHeadBlock], step_sum[kHeadBlock], shrink[kHeadBlock];
    store(now, load(a.max));
    store(step_sum, zero());
    if (n < kLanes)
        for (int h = 0; h < a.heads; h++) store(p + h * kLanes, set(-__builtin_inff()));
    dot(p, kLanes, RowsIn{a.q, a.q_stride, nullptr}, a.heads, F32Rows{keys}, n, a.dk);
    for (int h = 0; h < a.heads; h++) {
        const V s = mul(load(p + h * kLanes), set(a.scale));
        const float best = max_lane(s);
        now[h] = best > now[h] ? best : now[h];
        const V e = exp(sub(s, set(now[h])));
        store(p + h * kLanes, e);
        step_sum[h] = sum(e);
    }
    const V less = exp(sub(load(a.max), load(now)));
    store(shrink, less);
    store(a.max, load(now));
    store(a.sum, fma(load(a.sum), less, load(step_sum)));
    fold<false>(a, shrink, p, values, n);
}

void attend_each(Attend& a, const float* const* keys, const float* const* values, int n) {
    alignas(64) float p[kAttendEach * kHeadBlock], shrink[kAttendEach * kHeadBlock];  // [key][head]
    if (a.heads < kHeadBlock)
        for (int key = 0; key < n; key++) store(p + key * kHeadBlock, zero());
    // Keys as rows and heads as weights: a product is the same either way round, so the bits are those of attend_step.
    dot(p, kHeadBlock, RowPointers{keys}, n, F32Weights{a.q, a.q_stride}, a.heads, a.dk);
    V best = load(a.max), total = load(a.sum);
    for (int key = 0; key < n; key++) {
        const V s = mul(load(p + key * kHeadBlock), set(a.scale));
        const V now = max(s, best);
        const V less = exp(sub(best, now)), e = exp(sub(s, now));
        total = fma(total, less, e);
        best = now;
        store(p + key * kHeadBlock, e);
        store(shrink + key * kHeadBlock, less);
    }
    store(a.max, best);
    store(a.sum, total);
    fold<true>(a, shrink, p, values, n);
}

void attend_end(Attend& a) {
    for (int h = 0; h < a.heads; h++) {
        float* o = a.o + static_cast<size_t>(h) * a.o_stride;
        const V total = set(a.sum[h]);
        over(a.dv, [&](int c, int n) { put(o + c, div(take(o + c, n), total), n); });
    }
}

// ---- rows -----------------------------------------------------------------------------------------------------------

void rms_norm(float* y, const float* x, const float* w, int width, float eps) {
    V squares = zero();
    over(width, [&](int i, int n) {
        const V v = take(x + i, n);
        squares = fma(v, v, squares);
    });
    const V scale = set(1.0f / __builtin_sqrtf(sum(squares) / static_cast<float>(width) + eps));
    over(width, [&](int i, int n) { put(y + i, mul(mul(take(x + i, n), scale), take(w + i, n)), n); });
}

void add_parts(float* x, const float* const* part, int parts, int width) {
    over(width, [&](int i, int n) {
        V total = take(part[0] + i, n);
        for (int p = 1; p < parts; p++) total = add(total, take(part[p] + i, n));
        put(x + i, add(take(x + i, n), total), n);
    });
}

KD_INLINE V sigmoid_of(V x) { return div(set(1.0f), add(set(1.0f), exp(sub(zero(), x)))); }

void swiglu(float* y, const float* gate, const float* up, int width) {
    over(width, [&](int i, int n) {
        const V g = take(gate + i, n);
        put(y + i, mul(div(g, add(set(1.0f), exp(sub(zero(), g)))), take(up + i, n)), n);
    });
}

void sigmoid(float* y, const float* x, int width) {
    over(width, [&](int i, int n) { put(y + i, sigmoid_of(take(x + i, n)), n); });
}

void add_weighted(float* y, RowsIn parts, const float* weight, int n_parts, int width) {
    over(width, [&](int i, int n) {
        V total = zero();
        for (int p = 0; p < n_parts; p++) total = fma(set(weight[p]), take(row_of(parts, p) + i, n), total);
        put(y + i, add(take(y + i, n), total), n);
    });
}

const Kernels kKernels = {dot_bf16,   dot_f32,  dot_w4,    mix_bf16, attend_begin, attend_step, attend_each,
                          attend_end, rms_norm, add_parts, swiglu,   sigmoid,      add_weighted};

}  // namespace
