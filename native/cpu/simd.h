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
// sum adds lanes 8, then 4, 2, 1 apart. sum4 does so for four vectors.

#if defined(KD_SIMD_AVX512)

struct V {
    __m512 v;
};
constexpr int kTileRows = 6;
constexpr int tile_columns(int rows) { return rows <= 3 ? 8 : 4; }
constexpr int kMixRows = 6, kMixColumns = 4;

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

// Lanes 0, 4, 8, 12: the sums of a, b, c, d.
KD_INLINE __m512 sum4_lanes(V a, V b, V c, V d) {
    const __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a.v, b.v, 0x44), _mm512_shuffle_f32x4(a.v, b.v, 0xEE));
    const __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(c.v, d.v, 0x44), _mm512_shuffle_f32x4(c.v, d.v, 0xEE));
    __m512 s = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xDD));
    s = _mm512_add_ps(s, _mm512_permute_ps(s, 0x4E));
    return _mm512_add_ps(s, _mm512_permute_ps(s, 0xB1));
}
KD_INLINE void sum4(float* y, V a, V b, V c, V d) {
    const __m512i each_fourth = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    _mm_storeu_ps(y, _mm512_castps512_ps128(_mm512_permutexvar_ps(each_fourth, sum4_lanes(a, b, c, d))));
}
KD_INLINE float sum(V a) { return _mm512_cvtss_f32(sum4_lanes(a, a, a, a)); }

// exp's parts: the nearest integer of a, |a| < 200, and 2^i for such an integer, |i| < 126.
KD_INLINE V nearest(V a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
KD_INLINE V power_of_two(V i) {
    return {
        _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(i.v), _mm512_set1_epi32(127)), 23))};
}
KD_INLINE V zero_where_below(V y, V x, float limit) {
    return {_mm512_mask_mov_ps(y.v, _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(limit), _CMP_LT_OQ), _mm512_setzero_ps())};
}

// 32 four-bit weights times their scale.
KD_INLINE void w4(V& low, V& high, const uint32_t* q, float scale) {
    const __m512 value = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    const __m512i shift = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
    const __m512i word01 = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    const __m512i word23 = _mm512_setr_epi32(2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
    const __m512i words = _mm512_castsi128_si512(_mm_loadu_si128(reinterpret_cast<const __m128i*>(q)));
    const __m512 table = _mm512_mul_ps(value, _mm512_set1_ps(scale));
    low.v = _mm512_permutexvar_ps(_mm512_srlv_epi32(_mm512_permutexvar_epi32(word01, words), shift), table);
    high.v = _mm512_permutexvar_ps(_mm512_srlv_epi32(_mm512_permutexvar_epi32(word23, words), shift), table);
}

#elif defined(KD_SIMD_AVX2)

struct V {
    __m256 a, b;  // lanes 0 .. 7, 8 .. 15
};
constexpr int kTileRows = 3;
constexpr int tile_columns(int rows) { return rows == 1 ? 4 : 2; }
constexpr int kMixRows = 3, kMixColumns = 2;

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

KD_INLINE __m128 sum_to4(V x) {
    const __m256 s = _mm256_add_ps(x.a, x.b);
    return _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
}
KD_INLINE void sum4(float* y, V a, V b, V c, V d) {
    const __m128 p = sum_to4(a), q = sum_to4(b), r = sum_to4(c), s = sum_to4(d);
    const __m128 pq = _mm_add_ps(_mm_unpacklo_ps(p, q), _mm_unpackhi_ps(p, q));
    const __m128 rs = _mm_add_ps(_mm_unpacklo_ps(r, s), _mm_unpackhi_ps(r, s));
    _mm_storeu_ps(y, _mm_add_ps(_mm_movelh_ps(pq, rs), _mm_movehl_ps(rs, pq)));
}
KD_INLINE float sum(V x) {
    const __m128 s = sum_to4(x);
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

KD_INLINE __m256 w4_word(uint32_t word, __m256 scale) {
    const __m256i shift = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    const __m256i nibble =
        _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(static_cast<int>(word)), shift), _mm256_set1_epi32(15));
    return _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_sub_epi32(nibble, _mm256_set1_epi32(8))), scale);
}
KD_INLINE void w4(V& low, V& high, const uint32_t* q, float scale) {
    const __m256 s = _mm256_set1_ps(scale);
    low = {w4_word(q[0], s), w4_word(q[1], s)};
    high = {w4_word(q[2], s), w4_word(q[3], s)};
}

#else

struct V {
    float v[kLanes];
};
constexpr int kTileRows = 2;
constexpr int tile_columns(int) { return 2; }
constexpr int kMixRows = 2, kMixColumns = 2;

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
KD_INLINE void w4(V& low, V& high, const uint32_t* q, float scale) {
    const auto weight = [&](int e) {
        return static_cast<float>(static_cast<int>(q[e / 8] >> (4 * (e % 8)) & 15) - 8) * scale;
    };
    low = each([&](int i) { return weight(i); });
    high = each([&](int i) { return weight(kLanes + i); });
}

#endif

KD_INLINE float max_lane(V a) {
    alignas(64) float x[kLanes];
    store(x, a);
    float best = x[0];
    for (int i = 1; i < kLanes; i++) best = x[i] > best ? x[i] : best;
    return best;
}

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
