#include <cstring>

#include "device_context.h"
#include "error.h"
#include "kernels.h"
#include "ops.h"
#include "raw.h"

namespace kd::ops {

using cpu::grain_for;
using cpu::kernels;
using cpu::parallel_for;

void embed(Rows y, Dev<int32_t> token, Mat table, int vocab_begin, Count n_rows) {
    parallel_for(n_rows, grain_for(table.k), [&](int begin, int end) {
        for (int r = begin; r < end; r++) {
            const int64_t row = static_cast<int64_t>(raw(token)[r]) - vocab_begin;
            float* to = raw(y, r);
            if (row < 0 || row >= table.n) {
                memset(to, 0, static_cast<size_t>(table.k) * sizeof(float));
                continue;
            }
            const uint16_t* from = raw(table.w) + row * table.k;
            for (int i = 0; i < table.k; i++) {
                const uint32_t bits = static_cast<uint32_t>(from[i]) << 16;
                memcpy(to + i, &bits, sizeof bits);
            }
        }
    });
}

void zero(Dev<float> x, Count n_rows, int width) {
    memset(raw(x), 0, static_cast<size_t>(n_rows) * static_cast<size_t>(width) * sizeof(float));
}

void copy_rows(Rows to, Dev<int32_t> to_row, Rows from, Dev<int32_t> from_row, Count n, int width) {
    for (int i = 0; i < n; i++)  // one after the other: a row written twice keeps the last
        memcpy(raw(to, to_row ? raw(to_row)[i] : i), raw(from, from_row ? raw(from_row)[i] : i),
               static_cast<size_t>(width) * sizeof(float));
}

void rms_norm(Rows y, Rows x, Vec w, Count n_rows, int width, float eps) {
    parallel_for(n_rows, grain_for(width), [&](int begin, int end) {
        for (int r = begin; r < end; r++) kernels().rms_norm(raw(y, r), raw(x, r), raw(w), width, eps);
    });
}

void add_norm(Rows h, Dev<float> x, Rows y, Vec w, Count n_rows, int width, float eps) {
    const int ranks = cpu::tp();
    const size_t row = static_cast<size_t>(width);
    cpu::Shared all{};
    if (ranks > 1) {
        const size_t bytes = static_cast<size_t>(n_rows) * row * sizeof(float);
        float* mine = static_cast<float*>(cpu::share_buffer(bytes));
        for (int r = 0; r < n_rows; r++) memcpy(mine + static_cast<size_t>(r) * row, raw(y, r), row * sizeof(float));
        all = cpu::share_filled(bytes);
    }
    parallel_for(n_rows, grain_for(static_cast<double>(width) * (ranks + 1)), [&](int begin, int end) {
        for (int r = begin; r < end; r++) {
            const float* part[KD_MAX_TP] = {raw(y, r)};
            for (int i = 0; i < ranks && ranks > 1; i++)
                part[i] = static_cast<const float*>(all.of_rank[i]) + static_cast<size_t>(r) * row;
            float* to = raw(x) + static_cast<size_t>(r) * row;
            kernels().add_parts(to, part, ranks, width);
            kernels().rms_norm(raw(h, r), to, raw(w), width, eps);
        }
    });
}

void keep_tap(Rows tap, Dev<float> x, Count n_rows, int width) {
    for (int r = 0; r < n_rows; r++)
        memcpy(raw(tap, r), raw(x) + static_cast<size_t>(r) * static_cast<size_t>(width),
               static_cast<size_t>(width) * sizeof(float));
}

}  // namespace kd::ops
