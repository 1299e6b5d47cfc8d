#include <algorithm>

#include "device_context.h"
#include "kernels.h"
#include "ops.h"
#include "raw.h"

namespace kd::ops {

namespace {

// Rows of weights are handled in eights (a multiple of every tile), and as many at a time as stay in the first-level
// cache while the rows of x pass by.
constexpr int kEight = 8;
constexpr int kBlockBytes = 16 << 10;

void product(float* y, size_t y_stride, Rows x, Mat w, Count n_rows) {
    if (n_rows <= 0) return;
    const int eights = (w.n + kEight - 1) / kEight;
    const int block = std::max(1, kBlockBytes / (kEight * 2 * std::max(w.k, 1))) * kEight;
    const cpu::RowsIn in{raw(x), static_cast<size_t>(x.stride), nullptr};
    cpu::parallel_for(eights, cpu::grain_for(static_cast<double>(n_rows) * w.k * kEight), [&](int begin, int end) {
        const int last = std::min(end * kEight, w.n);
        for (int j = begin * kEight; j < last; j += block)
            cpu::kernels().dot_bf16(y + j, y_stride, in, n_rows,
                                    raw(w.w) + static_cast<size_t>(j) * static_cast<size_t>(w.k),
                                    std::min(block, last - j), w.k);
    });
}

}  // namespace

void linear(Rows y, Rows x, Mat w, Count n_rows) { product(raw(y), static_cast<size_t>(y.stride), x, w, n_rows); }

void logits(Dev<float> y, int stride, Rows x, Mat w, Count n_rows) {
    product(raw(y), static_cast<size_t>(stride), x, w, n_rows);
}

void swiglu(Rows y, Rows x, Count n_rows, int width) {
    constexpr double kExp = 8;  // an exp and a division, in multiply-adds
    cpu::parallel_for(n_rows, cpu::grain_for(width * kExp), [&](int begin, int end) {
        for (int r = begin; r < end; r++) cpu::kernels().swiglu(raw(y, r), raw(x, r), raw(x, r) + width, width);
    });
}

}  // namespace kd::ops
