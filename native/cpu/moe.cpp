#include <algorithm>

#include "device_context.h"
#include "error.h"
#include "kernels.h"
#include "ops.h"
#include "raw.h"

namespace kd::ops {

namespace {

// Work is cut into pieces of one expert: this many rows of a matrix, for this many (row, slot) pairs at a time.
constexpr int kMatrixRows = 32;  // also what w4_order works on
constexpr int kPairs = 24;
constexpr int kRouterRows = 8;

const uint32_t* row_q(const W4& w, int expert, int row) {
    return raw(w.q) + (static_cast<size_t>(expert) * static_cast<size_t>(w.n) + static_cast<size_t>(row)) *
                          static_cast<size_t>(w.k / 8);
}
const uint16_t* row_s(const W4& w, int expert, int row) {
    return raw(w.s) + (static_cast<size_t>(expert) * static_cast<size_t>(w.n) + static_cast<size_t>(row)) *
                          static_cast<size_t>(w.k / 32);
}

// The pairs of each expert, in order of rows, then slots.
struct Lists {
    int32_t* begin;   // [experts + 1] into the two below
    int32_t* row;     // [pairs] of h
    int32_t* place;   // [n_rows * slots]: where a pair is in this order
    int32_t* active;  // [<= experts] those with pairs
    int n_active;
};

Lists group(const int32_t* expert, int n_rows, int slots, int experts) {
    const size_t pairs = static_cast<size_t>(n_rows) * static_cast<size_t>(slots), e = static_cast<size_t>(experts);
    int32_t* p = cpu::scratch<int32_t>(cpu::Use::moe_lists, 3 * e + 1 + 2 * pairs);
    Lists l{p, p + e + 1 + e, p + e + 1 + e + pairs, p + e + 1, 0};
    int32_t* next = p + 2 * e + 1 + 2 * pairs;
    std::fill(l.begin, l.begin + e + 1, 0);
    for (size_t i = 0; i < pairs; i++) {
        KD_CHECK(expert[i] >= 0 && expert[i] < experts);
        l.begin[expert[i] + 1]++;
    }
    for (int i = 0; i < experts; i++) {
        if (l.begin[i + 1] > 0) l.active[l.n_active++] = i;
        l.begin[i + 1] += l.begin[i];
        next[i] = l.begin[i];
    }
    for (size_t i = 0; i < pairs; i++) {
        const int32_t to = next[expert[i]]++;
        l.row[to] = static_cast<int32_t>(i / static_cast<size_t>(slots));
        l.place[i] = to;
    }
    return l;
}

}  // namespace

// Nothing to move: the kernels go along the words and scales of a matrix row as the checkpoint has them. What they reorder is
// the activations (w4_order), once a row.
void pack_experts(const Experts&) {}

void route(Dev<int32_t> expert, Dev<float> weight, Rows h, Dev<const float> router, Vec bias, Count n_rows,
           const Shape& s) {
    const int slots = s.experts_per_token;
    const size_t stride = static_cast<size_t>(s.experts);
    float* const all_scores = cpu::scratch<float>(cpu::Use::rows, static_cast<size_t>(n_rows) * stride);
    // Few rows share out the experts, many rows themselves.
    const bool few = n_rows < 2 * cpu::threads();
    const double ops = static_cast<double>(s.hidden) * (few ? kRouterRows * n_rows.most : s.experts);
    const int pieces = few ? (s.experts + kRouterRows - 1) / kRouterRows : n_rows.most;
    cpu::parallel_for(pieces, cpu::grain_for(ops), [&](int begin, int end) {
        const int row = few ? 0 : begin, rows = few ? n_rows.most : end - begin;
        const int e = few ? begin * kRouterRows : 0, n = few ? std::min(end * kRouterRows, s.experts) - e : s.experts;
        cpu::kernels().dot_f32(all_scores + static_cast<size_t>(row) * stride + e, stride,
                               {raw(h, row), static_cast<size_t>(h.stride), nullptr}, rows,
                               raw(router) + static_cast<size_t>(e) * static_cast<size_t>(s.hidden), n, s.hidden);
    });
    cpu::parallel_for(n_rows, cpu::grain_for(static_cast<double>(s.experts) * slots), [&](int begin, int end) {
        for (int r = begin; r < end; r++) {
            float* score = all_scores + static_cast<size_t>(r) * static_cast<size_t>(s.experts);
            cpu::kernels().sigmoid(score, score, s.experts);
            int32_t* chosen = raw(expert) + static_cast<size_t>(r) * static_cast<size_t>(slots);
            float* to = raw(weight) + static_cast<size_t>(r) * static_cast<size_t>(slots);
            float total = 0;
            for (int slot = 0; slot < slots; slot++) {
                int best = -1;
                float best_value = 0;
                for (int e = 0; e < s.experts; e++) {
                    const float value = score[e] + raw(bias)[e];
                    if ((best < 0 || value > best_value) && std::find(chosen, chosen + slot, e) == chosen + slot) {
                        best = e;
                        best_value = value;
                    }
                }
                chosen[slot] = best;
                to[slot] = score[best];
                total += score[best];
            }
            const float divisor = s.norm_topk ? total + 1e-20f : 1.0f;
            for (int slot = 0; slot < slots; slot++) to[slot] = to[slot] / divisor * s.routed_scale;
        }
    });
}

void moe(Rows y, Rows h, Dev<int32_t> expert, Dev<float> weight, const Experts& w, Count n_rows, const Shape& s) {
    if (n_rows <= 0) return;
    const int slots = s.experts_per_token, hidden = w.gate_up.k, inter = w.down.k;
    const size_t pairs = static_cast<size_t>(n_rows) * static_cast<size_t>(slots), wide = static_cast<size_t>(inter);
    const Lists lists = group(raw(expert), n_rows, slots, w.count);
    float* const in_order =
        cpu::scratch<float>(cpu::Use::moe_rows, static_cast<size_t>(n_rows) * static_cast<size_t>(hidden));
    float* const acts = cpu::scratch<float>(cpu::Use::moe_inter, pairs * wide);
    float* const outs = cpu::scratch<float>(cpu::Use::moe_out, pairs * static_cast<size_t>(hidden));
    const double pairs_per_expert = static_cast<double>(pairs) / lists.n_active;

    for (int r = 0; r < n_rows; r++)
        cpu::kernels().w4_order(in_order + static_cast<size_t>(r) * static_cast<size_t>(hidden), raw(h, r), hidden);

    // acts[pair] = silu(gate h) * up h, in w4 order
    const int up_pieces = (inter + kMatrixRows - 1) / kMatrixRows;
    cpu::parallel_for(lists.n_active * up_pieces, cpu::grain_for(pairs_per_expert * 2 * kMatrixRows * hidden),
                      [&](int begin, int end) {
                          const cpu::Kernels& kernels = cpu::kernels();
                          alignas(64) float gate[kPairs * kMatrixRows], up[kPairs * kMatrixRows];
                          for (int piece = begin; piece < end; piece++) {
                              const int e = lists.active[piece / up_pieces], i = piece % up_pieces * kMatrixRows;
                              const int n = std::min(kMatrixRows, inter - i);
                              for (int p = lists.begin[e]; p < lists.begin[e + 1]; p += kPairs) {
                                  const int some = std::min(kPairs, lists.begin[e + 1] - p);
                                  const cpu::RowsIn in{in_order, static_cast<size_t>(hidden), lists.row + p};
                                  kernels.dot_w4(gate, kMatrixRows, in, some, row_q(w.gate_up, e, i),
                                                 row_s(w.gate_up, e, i), n, hidden);
                                  kernels.dot_w4(up, kMatrixRows, in, some, row_q(w.gate_up, e, inter + i),
                                                 row_s(w.gate_up, e, inter + i), n, hidden);
                                  for (int k = 0; k < some; k++) {
                                      float* g = gate + k * kMatrixRows;
                                      kernels.swiglu(g, g, up + k * kMatrixRows, n);
                                      kernels.w4_order(acts + static_cast<size_t>(p + k) * wide + i, g, n);
                                  }
                              }
                          }
                      });

    // outs[pair] = down acts[pair]
    const int down_pieces = (hidden + kMatrixRows - 1) / kMatrixRows;
    cpu::parallel_for(
        lists.n_active * down_pieces, cpu::grain_for(pairs_per_expert * kMatrixRows * inter), [&](int begin, int end) {
            for (int piece = begin; piece < end; piece++) {
                const int e = lists.active[piece / down_pieces], i = piece % down_pieces * kMatrixRows;
                const int p = lists.begin[e];
                cpu::kernels().dot_w4(
                    outs + static_cast<size_t>(p) * static_cast<size_t>(hidden) + i, static_cast<size_t>(hidden),
                    {acts + static_cast<size_t>(p) * wide, wide, nullptr}, lists.begin[e + 1] - p, row_q(w.down, e, i),
                    row_s(w.down, e, i), std::min(kMatrixRows, hidden - i), inter);
            }
        });

    cpu::parallel_for(n_rows, cpu::grain_for(static_cast<double>(slots) * hidden), [&](int begin, int end) {
        for (int r = begin; r < end; r++) {
            const size_t first = static_cast<size_t>(r) * static_cast<size_t>(slots);
            cpu::kernels().add_weighted(raw(y, r), {outs, static_cast<size_t>(hidden), lists.place + first},
                                        raw(weight) + first, slots, hidden);
        }
    });
}

}  // namespace kd::ops
