// V: 16 floats in one register (AVX-512), two (AVX2) or an array (plain). Included by kernels_impl.h only.
//
// Everything here and there is in an unnamed namespace and uses no library inlines: the linker must never take a
// copy compiled with -mavx512f for code that runs on any machine.
#pragma once

#include <cstddef>
#include <cstdint>
#if defined(KD_SIMD_AVX2) || defined(KD_SIMD_AVX512)
// gcc 12's AVX-512 intrinsics pass a register they leave undefined on purpose, and gcc warns about it (PR 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#endif

#define KD_INLINE inline __attribute__((always_inline))

namespace {

KD_INLINE float bits_to_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }
KD_INLINE float bf16_to_float(uint16_t bits) { return bits_to_float(static_cast<uint32_t>(bits) << 16); }

constexpr int kLanes = 16;

// load_part / store_part / bf16_part touch the first n (1 .. 15) elements only; missing lanes are 0.
// sum adds lanes 8, then 4, 2, 1 apart; sum4 does so for four vectors, max4 takes their largest lanes.
// w4: elements 0, 2, .. 30 and 1, 3, .. 31 of 32 four-bit weights, times their scale; w4_scales: two scales that lie
// side by side; split_pairs: 32 floats into the same order. transpose: rows of a 16 x 16 matrix become its columns.

#if defined(KD_SIMD_AVX512)

struct V {
    __m512 v;
};
constexpr int kTileRows = 6, kHeadTile = 8;
constexpr int kW4Rows = 4;
constexpr int w4_columns(int rows) { return rows <= 2 ? 8 : 4; }
constexpr int tile_columns(int rows) { return rows <= 3 ? 8 : 4; }
constexpr int kMixRows = 6;
constexpr int mix_columns(int rows) { return rows == 1 ? 16 : 4; }

KD_INLINE __mmask16 first(int n) { return static_cast<__mmask16>((1u << n) - 1); }
KD_INLINE V zero() { return {_mm512_setzero_ps()}; }
KD_INLINE V set(float x) { return {_mm512_set1_ps(x)}; }
KD_INLINE V load(const float* p) { return {_mm512_loadu_ps(p)}; }
KD_INLINE V load_part(const float* p, int n) { return {_mm512_maskz_loadu_ps(first(n), p)}; }
KD_INLINE void store(float* p, V a) { _mm512_storeu_ps(p, a.v); }
KD_INLINE void store_part(float* p, V a, int n) { _mm512_mask_storeu_ps(p, first(n), a.v); }
KD_INLINE V widen(__m256i h) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))}; }
KD_INLINE V bf16(const uint16_t* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
KD_INLINE V bf16_part(const uint16_t* p, int n) { return widen(_mm256_maskz_loadu_epi16(first(n), p)); }
KD_INLINE V add(V a, V b) { return {_mm512_add_ps(a.v, b.v)}; }
KD_INLINE V sub(V a, V b) { return {_mm512_sub_ps(a.v, b.v)}; }
KD_INLINE V mul(V a, V b) { return {_mm512_mul_ps(a.v, b.v)}; }
KD_INLINE V div(V a, V b) { return {_mm512_div_ps(a.v, b.v)}; }
KD_INLINE V max(V a, V b) { return {_mm512_max_ps(a.v, b.v)}; }
KD_INLINE V min(V a, V b) { return {_mm512_min_ps(a.v, b.v)}; }
KD_INLINE V fma(V a, V b, V c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }

// Lanes 0, 4, 8, 12: a, b, c, d folded.
template <class F>
KD_INLINE __m512 fold4(V a, V b, V c, V d, F&& f) {
    const __m512 ab = f(_mm512_shuffle_f32x4(a.v, b.v, 0x44), _mm512_shuffle_f32x4(a.v, b.v, 0xEE));
    const __m512 cd = f(_mm512_shuffle_f32x4(c.v, d.v, 0x44), _mm512_shuffle_f32x4(c.v, d.v, 0xEE));
    __m512 s = f(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xDD));
    s = f(s, _mm512_permute_ps(s, 0x4E));
    return f(s, _mm512_permute_ps(s, 0xB1));
}
KD_INLINE void store4(float* y, __m512 s) {
    const __m512i each_fourth = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    _mm_storeu_ps(y, _mm512_castps512_ps128(_mm512_permutexvar_ps(each_fourth, s)));
}
KD_INLINE __m512 sum4_lanes(V a, V b, V c, V d) {
    return fold4(a, b, c, d, [](__m512 x, __m512 y) __attribute__((always_inline)) { return _mm512_add_ps(x, y); });
}
KD_INLINE void sum4(float* y, V a, V b, V c, V d) { store4(y, sum4_lanes(a, b, c, d)); }
KD_INLINE float sum(V a) { return _mm512_cvtss_f32(sum4_lanes(a, a, a, a)); }
KD_INLINE void max4(float* y, V a, V b, V c, V d) {
    store4(y, fold4(a, b, c, d, [](__m512 x, __m512 z) __attribute__((always_inline)) { return _mm512_max_ps(x, z); }));
}

// exp's parts: the nearest integer of a, |a| < 200, and 2^i for such an integer, |i| < 126.
KD_INLINE V nearest(V a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
KD_INLINE V power_of_two(V i) {
    return {
        _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(i.v), _mm512_set1_epi32(127)), 23))};
}
KD_INLINE V zero_where_below(V y, V x, float limit) {
    return {_mm512_mask_mov_ps(y.v, _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(limit), _CMP_LT_OQ), _mm512_setzero_ps())};
}

// A table look-up takes the low 4 bits of a lane, so the even nibbles need no mask.
struct Nibbles {
    __m512i byte;  // one in each lane
};
KD_INLINE Nibbles w4_load(const uint32_t* q) {
    return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(q)))};
}
KD_INLINE void w4(V& even, V& odd, Nibbles n, V scale) {
    const __m512 value = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    const __m512 table = _mm512_mul_ps(value, scale.v);
    even.v = _mm512_permutexvar_ps(n.byte, table);
    odd.v = _mm512_permutexvar_ps(_mm512_srli_epi32(n.byte, 4), table);
}
KD_INLINE void w4_scales(V& first, V& second, const uint16_t* s) {
    uint32_t both;
    __builtin_memcpy(&both, s, sizeof both);
    const __m512i all = _mm512_set1_epi32(static_cast<int>(both));
    first.v = _mm512_castsi512_ps(_mm512_slli_epi32(all, 16));
    second.v = _mm512_castsi512_ps(_mm512_and_si512(all, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u))));
}

KD_INLINE void split_pairs(V& even, V& odd, V low, V high) {
    const __m512i e = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i o = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    even.v = _mm512_permutex2var_ps(low.v, e, high.v);
    odd.v = _mm512_permutex2var_ps(low.v, o, high.v);
}

KD_INLINE __m512 pairs_low(__m512 a, __m512 b) {
    return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
}
KD_INLINE __m512 pairs_high(__m512 a, __m512 b) {
    return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
}
KD_INLINE void transpose(V (&m)[kLanes]) {
    __m512 t[kLanes], u[kLanes];
#pragma GCC unroll 8
    for (int i = 0; i < kLanes; i += 2) {
        t[i] = _mm512_unpacklo_ps(m[i].v, m[i + 1].v);
        t[i + 1] = _mm512_unpackhi_ps(m[i].v, m[i + 1].v);
    }
    // u[4 i + c]: of columns c, 4 + c, 8 + c, 12 + c, rows 4 i .. 4 i + 3.
#pragma GCC unroll 4
    for (int i = 0; i < kLanes; i += 4) {
        u[i] = pairs_low(t[i], t[i + 2]);
        u[i + 1] = pairs_high(t[i], t[i + 2]);
        u[i + 2] = pairs_low(t[i + 1], t[i + 3]);
        u[i + 3] = pairs_high(t[i + 1], t[i + 3]);
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        const __m512 a = _mm512_shuffle_f32x4(u[c], u[4 + c], 0x88), b = _mm512_shuffle_f32x4(u[c], u[4 + c], 0xDD);
        const __m512 d = _mm512_shuffle_f32x4(u[8 + c], u[12 + c], 0x88);
        const __m512 e = _mm512_shuffle_f32x4(u[8 + c], u[12 + c], 0xDD);
        m[c].v = _mm512_shuffle_f32x4(a, d, 0x88);
        m[8 + c].v = _mm512_shuffle_f32x4(a, d, 0xDD);
        m[4 + c].v = _mm512_shuffle_f32x4(b, e, 0x88);
        m[12 + c].v = _mm512_shuffle_f32x4(b, e, 0xDD);
    }
}

#elif defined(KD_SIMD_AVX2)

struct V {
    __m256 a, b;  // lanes 0 .. 7, 8 .. 15
};
constexpr int kTileRows = 3, kHeadTile = 4;
constexpr int kW4Rows = 2;
constexpr int w4_columns(int) { return 2; }
constexpr int tile_columns(int rows) { return rows == 1 ? 4 : 2; }
constexpr int kMixRows = 3;
constexpr int mix_columns(int rows) { return rows == 1 ? 4 : 2; }

KD_INLINE __m256i first8(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
KD_INLINE V zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
KD_INLINE V set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
KD_INLINE V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
KD_INLINE V load_part(const float* p, int n) {
    return {_mm256_maskload_ps(p, first8(n)), _mm256_maskload_ps(p + 8, first8(n - 8))};
}
KD_INLINE void store(float* p, V x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
KD_INLINE void store_part(float* p, V x, int n) {
    _mm256_maskstore_ps(p, first8(n), x.a);
    _mm256_maskstore_ps(p + 8, first8(n - 8), x.b);
}
KD_INLINE __m256 widen(__m128i h) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16)); }
KD_INLINE V bf16(const uint16_t* p) {
    const __m128i* q = reinterpret_cast<const __m128i*>(p);
    return {widen(_mm_loadu_si128(q)), widen(_mm_loadu_si128(q + 1))};
}
KD_INLINE V bf16_part(const uint16_t* p, int n) {
    alignas(32) uint16_t all[kLanes] = {};
    for (int i = 0; i < n; i++) all[i] = p[i];
    return bf16(all);
}
KD_INLINE V add(V x, V y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
KD_INLINE V sub(V x, V y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
KD_INLINE V mul(V x, V y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
KD_INLINE V div(V x, V y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
KD_INLINE V max(V x, V y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
KD_INLINE V min(V x, V y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
KD_INLINE V fma(V x, V y, V z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }

struct Add {
    KD_INLINE __m256 operator()(__m256 x, __m256 y) const { return _mm256_add_ps(x, y); }
    KD_INLINE __m128 operator()(__m128 x, __m128 y) const { return _mm_add_ps(x, y); }
};
struct Larger {
    KD_INLINE __m256 operator()(__m256 x, __m256 y) const { return _mm256_max_ps(x, y); }
    KD_INLINE __m128 operator()(__m128 x, __m128 y) const { return _mm_max_ps(x, y); }
};
template <class F>
KD_INLINE __m128 fold_to4(V x, F f) {
    const __m256 s = f(x.a, x.b);
    return f(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
}
template <class F>
KD_INLINE void fold4(float* y, V a, V b, V c, V d, F f) {
    const __m128 p = fold_to4(a, f), q = fold_to4(b, f), r = fold_to4(c, f), s = fold_to4(d, f);
    const __m128 pq = f(_mm_unpacklo_ps(p, q), _mm_unpackhi_ps(p, q));
    const __m128 rs = f(_mm_unpacklo_ps(r, s), _mm_unpackhi_ps(r, s));
    _mm_storeu_ps(y, f(_mm_movelh_ps(pq, rs), _mm_movehl_ps(rs, pq)));
}
KD_INLINE void sum4(float* y, V a, V b, V c, V d) { fold4(y, a, b, c, d, Add{}); }
KD_INLINE void max4(float* y, V a, V b, V c, V d) { fold4(y, a, b, c, d, Larger{}); }
KD_INLINE float sum(V x) {
    const __m128 s = fold_to4(x, Add{});
    const __m128 t = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(t, _mm_shuffle_ps(t, t, 1)));
}

KD_INLINE V nearest(V x) {
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}
KD_INLINE __m256 power_of_two8(__m256 i) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(i), _mm256_set1_epi32(127)), 23));
}
KD_INLINE V power_of_two(V i) { return {power_of_two8(i.a), power_of_two8(i.b)}; }
KD_INLINE V zero_where_below(V y, V x, float limit) {
    const __m256 l = _mm256_set1_ps(limit);
    return {_mm256_andnot_ps(_mm256_cmp_ps(x.a, l, _CMP_LT_OQ), y.a),
            _mm256_andnot_ps(_mm256_cmp_ps(x.b, l, _CMP_LT_OQ), y.b)};
}

struct Nibbles {
    __m256i a, b;  // one byte in each lane
};
KD_INLINE Nibbles w4_load(const uint32_t* q) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(q));
    return {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))};
}
// (nibble - 8) * scale; exact, so fusing differs from the table of AVX-512 in nothing.
KD_INLINE __m256 w4_value(__m256i nibble, __m256 scale, __m256 minus_8_scale) {
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(nibble), scale, minus_8_scale);
}
KD_INLINE void w4(V& even, V& odd, Nibbles n, V scale) {
    const __m256i low = _mm256_set1_epi32(15);
    const __m256 shift = _mm256_mul_ps(scale.a, _mm256_set1_ps(-8.0f));
    even.a = w4_value(_mm256_and_si256(n.a, low), scale.a, shift);
    even.b = w4_value(_mm256_and_si256(n.b, low), scale.a, shift);
    odd.a = w4_value(_mm256_srli_epi32(n.a, 4), scale.a, shift);
    odd.b = w4_value(_mm256_srli_epi32(n.b, 4), scale.a, shift);
}
KD_INLINE void w4_scales(V& first, V& second, const uint16_t* s) {
    first = set(bf16_to_float(s[0]));
    second = set(bf16_to_float(s[1]));
}

// Even and odd elements of 16.
KD_INLINE __m256 in_order(__m256 x) { return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(x), 0xD8)); }
KD_INLINE void split_pairs(V& even, V& odd, V low, V high) {
    even.a = in_order(_mm256_shuffle_ps(low.a, low.b, 0x88));
    even.b = in_order(_mm256_shuffle_ps(high.a, high.b, 0x88));
    odd.a = in_order(_mm256_shuffle_ps(low.a, low.b, 0xDD));
    odd.b = in_order(_mm256_shuffle_ps(high.a, high.b, 0xDD));
}

KD_INLINE void transpose8(__m256 (&m)[8]) {
    __m256 t[8], u[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(m[i], m[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(m[i], m[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        u[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        u[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xEE);
        u[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        u[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xEE);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        m[i] = _mm256_permute2f128_ps(u[i], u[4 + i], 0x20);
        m[4 + i] = _mm256_permute2f128_ps(u[i], u[4 + i], 0x31);
    }
}
KD_INLINE void transpose(V (&m)[kLanes]) {
    __m256 aa[8], ab[8], ba[8], bb[8];  // quarters: rows 0 .. 7 or 8 .. 15, columns likewise
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        aa[i] = m[i].a;
        ab[i] = m[i].b;
        ba[i] = m[8 + i].a;
        bb[i] = m[8 + i].b;
    }
    transpose8(aa);
    transpose8(ab);
    transpose8(ba);
    transpose8(bb);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        m[i] = {aa[i], ba[i]};
        m[8 + i] = {ab[i], bb[i]};
    }
}

#else

struct V {
    float v[kLanes];
};
constexpr int kTileRows = 2, kHeadTile = 2;
constexpr int kW4Rows = 2;
constexpr int w4_columns(int) { return 2; }
constexpr int tile_columns(int) { return 2; }
constexpr int kMixRows = 2;
constexpr int mix_columns(int) { return 2; }

template <class F>
KD_INLINE V each(F&& f) {
    V y;
    for (int i = 0; i < kLanes; i++) y.v[i] = f(i);
    return y;
}
KD_INLINE V set(float x) {
    return each([&](int) { return x; });
}
KD_INLINE V zero() { return set(0); }
KD_INLINE V load(const float* p) {
    return each([&](int i) { return p[i]; });
}
KD_INLINE V load_part(const float* p, int n) {
    return each([&](int i) { return i < n ? p[i] : 0.0f; });
}
KD_INLINE void store_part(float* p, V a, int n) {
    for (int i = 0; i < n; i++) p[i] = a.v[i];
}
KD_INLINE void store(float* p, V a) { store_part(p, a, kLanes); }
KD_INLINE V bf16(const uint16_t* p) {
    return each([&](int i) { return bf16_to_float(p[i]); });
}
KD_INLINE V bf16_part(const uint16_t* p, int n) {
    return each([&](int i) { return i < n ? bf16_to_float(p[i]) : 0.0f; });
}
KD_INLINE V add(V a, V b) {
    return each([&](int i) { return a.v[i] + b.v[i]; });
}
KD_INLINE V sub(V a, V b) {
    return each([&](int i) { return a.v[i] - b.v[i]; });
}
KD_INLINE V mul(V a, V b) {
    return each([&](int i) { return a.v[i] * b.v[i]; });
}
KD_INLINE V div(V a, V b) {
    return each([&](int i) { return a.v[i] / b.v[i]; });
}
KD_INLINE V max(V a, V b) {  // as maxps: b where either is NaN
    return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
KD_INLINE V min(V a, V b) {
    return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
KD_INLINE V fma(V a, V b, V c) {  // two roundings: a machine without fused multiply-add would need a library call
    return each([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
}
KD_INLINE float sum(V a) {
    for (int half = kLanes / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) a.v[i] += a.v[i + half];
    return a.v[0];
}
KD_INLINE void sum4(float* y, V a, V b, V c, V d) {
    y[0] = sum(a);
    y[1] = sum(b);
    y[2] = sum(c);
    y[3] = sum(d);
}
KD_INLINE V nearest(V a) {  // adding and taking away 1.5 * 2^23 rounds to an integer, ties to even
    return each([&](int i) { return (a.v[i] + 12582912.0f) - 12582912.0f; });
}
KD_INLINE V power_of_two(V a) {
    return each([&](int i) { return bits_to_float(static_cast<uint32_t>(static_cast<int32_t>(a.v[i]) + 127) << 23); });
}
KD_INLINE V zero_where_below(V y, V x, float limit) {
    return each([&](int i) { return x.v[i] < limit ? 0.0f : y.v[i]; });
}
KD_INLINE void max4(float* y, V a, V b, V c, V d) {
    const V* from[4] = {&a, &b, &c, &d};
    for (int k = 0; k < 4; k++) {
        y[k] = from[k]->v[0];
        for (int i = 1; i < kLanes; i++) y[k] = from[k]->v[i] > y[k] ? from[k]->v[i] : y[k];
    }
}
struct Nibbles {
    const uint32_t* q;
};
KD_INLINE Nibbles w4_load(const uint32_t* q) { return {q}; }
KD_INLINE void w4(V& even, V& odd, Nibbles n, V scale) {
    const auto value = [&](int e) {
        return static_cast<float>(static_cast<int>(n.q[e / 8] >> (4 * (e % 8)) & 15) - 8);
    };
    even = each([&](int i) { return value(2 * i) * scale.v[i]; });
    odd = each([&](int i) { return value(2 * i + 1) * scale.v[i]; });
}
KD_INLINE void w4_scales(V& first, V& second, const uint16_t* s) {
    first = set(bf16_to_float(s[0]));
    second = set(bf16_to_float(s[1]));
}
KD_INLINE void split_pairs(V& even, V& odd, V low, V high) {
    const auto at = [&](int i) { return i < kLanes ? low.v[i] : high.v[i - kLanes]; };
    even = each([&](int i) { return at(2 * i); });
    odd = each([&](int i) { return at(2 * i + 1); });
}
KD_INLINE void transpose(V (&m)[kLanes]) {
    for (int i = 0; i < kLanes; i++) {
        for (int j = 0; j < i; j++) {
            const float x = m[i].v[j];
            m[i].v[j] = m[j].v[i];
            m[j].v[i] = x;
        }
    }
}

#endif

// e^x within 2 ulp; exactly 1 at 0; 0 below -87.33 (no subnormal results), infinity above 88.73; NaN stays NaN.
KD_INLINE V exp(V x) {
    // min and max return their second operand when one is NaN.
    const V c = max(set(-88.0f), min(set(89.0f), x));
    const V i = nearest(mul(c, set(1.44269504f)));
    // ln 2 in two parts, the first short enough for i * part to be exact.
    V r = fma(i, set(-0.693359375f), c);
    r = fma(i, set(2.12194440e-4f), r);
    V p = set(1.9875691500e-4f);
    p = fma(p, r, set(1.3981999507e-3f));
    p = fma(p, r, set(8.3334519073e-3f));
    p = fma(p, r, set(4.1665795894e-2f));
    p = fma(p, r, set(1.6666665459e-1f));
    p = fma(p, r, set(5.0000001201e-1f));
    p = fma(mul(r, r), p, r);
    p = add(p, set(1.0f));
    // 2^i as two factors: i reaches 128, the largest exponent is 127.
    const V half = nearest(mul(i, set(0.5f)));
    return zero_where_below(mul(mul(p, power_of_two(half)), power_of_two(sub(i, half))), x, -87.33f);
}

}  // namespace
