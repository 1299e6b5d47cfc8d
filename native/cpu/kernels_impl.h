// The inner loops, written once over simd.h's V. Included by kernels_plain.cpp, kernels_avx2.cpp, kernels_avx512.cpp.
#pragma once

#include "kernels.h"
#include "kernels_dot.h"
#include "simd.h"

namespace {

using kd::cpu::Attend;
using kd::cpu::kAttendEach;
using kd::cpu::Kernels;
using kd::cpu::kHeadBlock;

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
    constexpr int H = kTileRows >= 6 ? 8 : 2;  // by registers
    int h = 0;
    for (; h + H <= a.heads; h += H) fold_heads<Each, H>(a, h, shrink, p, values, n);
    for (; h < a.heads; h++) fold_heads<Each, 1>(a, h, shrink, p, values, n);
}

void attend_pack(float* packed, const float* const* keys, int n, int dk) {
    for (int i = 0; i < dk; i += kLanes) {
        const int some = smaller(kLanes, dk - i);
        V m[kLanes];
        KD_UNROLL for (int key = 0; key < kLanes; key++) m[key] = key < n ? take(keys[key] + i, some) : zero();
        transpose(m);
        if (some == kLanes) {
            KD_UNROLL for (int e = 0; e < kLanes; e++) store(packed + (i + e) * kLanes, m[e]);
        } else {
            for (int e = 0; e < some; e++) store(packed + (i + e) * kLanes, m[e]);
        }
    }
}

// p[head][key]: scores of H heads.
template <int H>
KD_INLINE void score_heads(float* p, const Attend& a, int h0, const float* packed) {
    const float* q[H];
    V acc[H];
    KD_UNROLL for (int h = 0; h < H; h++) q[h] = a.q + static_cast<size_t>(h0 + h) * a.q_stride, acc[h] = zero();
    for (int i = 0; i < a.dk; i++) {
        const V key = load(packed + i * kLanes);
        KD_UNROLL for (int h = 0; h < H; h++) acc[h] = fma(set(q[h][i]), key, acc[h]);
    }
    KD_UNROLL for (int h = 0; h < H; h++) store(p + (h0 + h) * kLanes, mul(acc[h], set(a.scale)));
}

void attend_step(Attend& a, const float* packed, const float* const* values, int n) {
    alignas(64) float p[kHeadBlock * kLanes];  // [head][key]
    alignas(64) float now[kHeadBlock], step_sum[kHeadBlock], shrink[kHeadBlock];
    int h = 0;
    for (; h + kHeadTile <= a.heads; h += kHeadTile) score_heads<kHeadTile>(p, a, h, packed);
    for (; h < a.heads; h++) score_heads<1>(p, a, h, packed);
    for (; h % 4 != 0; h++) store(p + h * kLanes, zero());  // heads are looked at in fours
    if (n < kLanes) {
        for (int head = 0; head < h; head++)
            for (int key = n; key < kLanes; key++) p[head * kLanes + key] = -__builtin_inff();
    }
    store(now, zero());
    store(step_sum, zero());
    for (int i = 0; i < h; i += 4) {
        const float* s = p + i * kLanes;
        max4(now + i, load(s), load(s + kLanes), load(s + 2 * kLanes), load(s + 3 * kLanes));
    }
    const V best = max(load(now), load(a.max));
    store(now, best);
    for (int i = 0; i < h; i += 4) {
        V e[4];
        KD_UNROLL for (int j = 0; j < 4; j++) {
            e[j] = exp(sub(load(p + (i + j) * kLanes), set(now[i + j])));
            store(p + (i + j) * kLanes, e[j]);
        }
        sum4(step_sum + i, e[0], e[1], e[2], e[3]);
    }
    const V less = exp(sub(load(a.max), best));
    store(shrink, less);
    store(a.max, best);
    store(a.sum, fma(load(a.sum), less, load(step_sum)));
    fold<false>(a, shrink, p, values, n);
}

void attend_each(Attend& a, const float* const* keys, const float* const* values, int n) {
    alignas(64) float p[kAttendEach * kHeadBlock], shrink[kAttendEach * kHeadBlock];  // [key][head]
    if (a.heads < kHeadBlock)
        for (int key = 0; key < n; key++) store(p + key * kHeadBlock, zero());
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

const Kernels kKernels = {dot_bf16,    dot_f32,      dot_w4,      w4_order,    mix_bf16,
                          attend_pack, attend_begin, attend_step, attend_each, attend_end,
                          rms_norm,    add_parts,    swiglu,      sigmoid,     add_weighted};

}  // namespace
