// The inner loops that are compiled once per instruction set (kernels_plain, _avx2, _avx512.cpp, all from
// kernels_impl.h) and chosen when the group is opened. Everything around them is compiled once, for any machine.
//
// Sums over k run in 16 lanes: lane i adds elements i, i + 16, ... in order, then the lanes are added in pairs (8, 4,
// 2, 1 apart). Every element of a result is computed alone in that order, so tiling and threads change nothing.
// AVX2 and AVX-512 give the same bits (both fuse multiply and add); plain does not fuse.
//
// This header is included by files built with -mavx512*: only plain declarations, nothing inline, no library types.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kd::cpu {

// Which rows: row i starts at p + (index ? index[i] : i) * stride.
struct RowsIn {
    const float* p;
    size_t stride;
    const int32_t* index;
};

constexpr int kHeadBlock = 16;  // heads one Attend holds at most

// Online softmax of a block of heads over keys that all of them share.
struct Attend {
    float* o;  // [heads][o_stride]: sum of exp(score - max) * value so far; dv elements each
    size_t o_stride;
    const float* q;
    size_t q_stride;
    int heads;  // <= kHeadBlock
    int dk, dv;
    float scale;
    alignas(64) float max[kHeadBlock];
    alignas(64) float sum[kHeadBlock];
};

constexpr int kAttendEach = 32;  // keys attend_each takes at most

struct Kernels {
    // y[r * y_stride + j] = sum_k x[r][k] w[j][k] for r < rows, j < n.
    void (*dot_bf16)(float* y, size_t y_stride, RowsIn x, int rows, const uint16_t* w, int n, int k);
    void (*dot_f32)(float* y, size_t y_stride, RowsIn x, int rows, const float* w, int n, int k);
    // The same with 4-bit weights as in types.h (W4), which are exact in fp32 once scaled. q, s: row 0 of the n rows.
    // The rows of x are in w4 order: of each 32 elements the even ones, then the odd ones, as nibbles come out.
    void (*dot_w4)(float* y, size_t y_stride, RowsIn x, int rows, const uint32_t* q, const uint16_t* s, int n, int k);
    // y = x in w4 order; width % 32 == 0.
    void (*w4_order)(float* y, const float* x, int width);
    // y[r * y_stride + c] = sum_n a[r * a_stride + n] w[n][c] for c < width, added in order of n.
    void (*mix_bf16)(float* y, size_t y_stride, const float* a, size_t a_stride, int rows, const uint16_t* w, int n,
                     int width);

    // packed[i][key] = element i of the key, for n keys (<= 16); [dk][16], rows of missing keys are 0.
    void (*attend_pack)(float* packed, const float* const* keys, int n, int dk);
    void (*attend_begin)(Attend& a);
    // One step: n keys (<= 16) folded together. A score is summed in order of its elements.
    void (*attend_step)(Attend& a, const float* packed, const float* const* values, int n);
    // `n` keys (<= kAttendEach), each a step of its own.
    void (*attend_each)(Attend& a, const float* const* keys, const float* const* values, int n);
    void (*attend_end)(Attend& a);  // o /= sum

    // y = x * w / sqrt(mean(x^2) + eps)
    void (*rms_norm)(float* y, const float* x, const float* w, int width, float eps);
    // x += ((part[0] + part[1]) + part[2]) + ...
    void (*add_parts)(float* x, const float* const* part, int parts, int width);
    // y = silu(gate) * up
    void (*swiglu)(float* y, const float* gate, const float* up, int width);
    // y = 1 / (1 + exp(-x))
    void (*sigmoid)(float* y, const float* x, int width);
    // y += ((weight[0] * part[0]) + weight[1] * part[1]) + ...; part i starts at p + index[i] * stride
    void (*add_weighted)(float* y, RowsIn parts, const float* weight, int n, int width);
};

const Kernels* kernels_plain();
const Kernels* kernels_avx2();
const Kernels* kernels_avx512();

}  // namespace kd::cpu
