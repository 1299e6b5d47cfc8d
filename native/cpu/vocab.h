// Logits rows over the whole vocabulary, as the ranks of a group hold them: each rank a range of ids.
//
// Ranks are threads of one process, so what they gather is where their slices are. Rows are then dealt out to ranks and
// each rank works on whole rows, in id order: a row's arithmetic is the same whatever the number of ranks, and an op needs
// two meetings, whatever the number of rows. A NaN counts as -inf everywhere but in the hash.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "comm.h"
#include "raw.h"
#include "types.h"

namespace kd::cpu {

constexpr float kNever = -std::numeric_limits<float>::infinity();

inline float known(float logit) { return logit == logit ? logit : kNever; }

struct Candidate {
    float logit;
    int id;
};

// The order among tokens: larger logit first, of equals the lowest id.
inline bool better(const Candidate& a, const Candidate& b) {
    return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
}

// One row: ids in ascending order, in as many slices as there are ranks.
struct VocabRow {
    struct Slice {
        const float* logits;
        int begin;  // id of logits[0]
        int n;
    } slice[KD_MAX_TP];
    int slices;

    float at(int id) const {
        int i = 0;
        while (id >= slice[i].begin + slice[i].n) i++;
        return known(slice[i].logits[id - slice[i].begin]);
    }

    // visit(logit, id) in id order, NaN as -inf
    template <class F>
    void each(F&& visit) const {
        for (int i = 0; i < slices; i++) {
            for (int j = 0; j < slice[i].n; j++) visit(known(slice[i].logits[j]), slice[i].begin + j);
        }
    }
};

// Where every rank's logits are. Valid until this rank's second collective after it.
class VocabRows {
  public:
    // [collective] logits: this rank's [n_rows][vocab_rank]
    VocabRows(Dev<float> logits, const Shape& s) {
        const VocabRow::Slice mine{raw(logits), s.vocab_begin, s.vocab_rank};
        const Shared all = share(&mine, sizeof mine);
        row_.slices = tp();
        for (int r = 0; r < row_.slices; r++) row_.slice[r] = *static_cast<const VocabRow::Slice*>(all.of_rank[r]);
    }

    VocabRow row(int r) const {
        VocabRow row = row_;
        for (int i = 0; i < row.slices; i++) row.slice[i].logits += static_cast<size_t>(r) * row.slice[i].n;
        return row;
    }

  private:
    VocabRow row_{};
};

// Rows are dealt out one by one: row r belongs to rank r % tp and is the (r / tp)-th of its rows.
inline int rows_of_rank(int n_rows) { return (n_rows - rank() + tp() - 1) / tp(); }
inline int most_rows_of_rank(int n_rows) { return (n_rows + tp() - 1) / tp(); }

// Sixteen at a time; the compiler splits them into what the instruction set has. Passed by reference: how a vector this
// long is passed by value depends on the instruction set.
typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));

inline void load16(Floats& v, const float* p) { __builtin_memcpy(&v, p, sizeof v); }

// The largest logit and the lowest id that has it; {-inf, first id} if all are NaN or -inf.
inline Candidate best_of(const VocabRow& row) {
    Candidate best{kNever, row.slice[0].begin};
    for (int i = 0; i < row.slices; i++) {
        const auto [logits, begin, n] = row.slice[i];
        Floats most = Floats{} + kNever;
        int j = 0;
        for (; j + 16 <= n; j += 16) {
            Floats v;
            load16(v, logits + j);
            most = v > most ? v : most;  // false for NaN
        }
        float top = kNever;
        for (int lane = 0; lane < 16; lane++) top = most[lane] > top ? most[lane] : top;
        for (; j < n; j++) top = logits[j] > top ? logits[j] : top;
        if (!(top > best.logit)) continue;
        int at = 0;
        while (logits[at] != top) at++;
        best = {top, begin + at};
    }
    return best;
}

// x = exp(x) for x <= 0, to 2e-7 relative; 0 below -87 and for NaN.
inline void exp16(Floats& x) {
    const Floats tiny = Floats{} - 87.0f;
    const Ints above = x > tiny;
    const Floats c = above ? x : tiny;
    const Floats shifted = c * 1.44269504f + 12582912.0f;  // rounds to an integer, left in the low bits
    const Floats whole = shifted - 12582912.0f;
    const Floats f = (c - whole * 0.693145752f) - whole * 1.42860677e-6f;
    Floats p = f * 1.38888889e-3f + 8.33333333e-3f;
    p = p * f + 4.16666667e-2f;
    p = p * f + 1.66666667e-1f;
    p = p * f + 0.5f;
    p = p * f + 1.0f;
    p = p * f + 1.0f;
    const Ints bits = reinterpret_cast<Ints>(p) + (reinterpret_cast<Ints>(shifted) << 23);
    x = above ? reinterpret_cast<Floats>(bits) : Floats{};
}

// log(sum over the vocabulary of exp(logit)). `most` is the largest logit. Lanes and partial sums go by id, not by slice: the
// same bits for any number of ranks.
inline double log_sum_exp(const VocabRow& row, float most) {
    const VocabRow::Slice* slice = row.slice;
    const VocabRow::Slice* const last = slice + row.slices - 1;
    const int vocab = last->begin + last->n;
    double sum = 0;
    Floats part{};
    for (int id = 0; id < vocab; id += 16) {
        while (id >= slice->begin + slice->n) slice++;
        Floats v;
        if (id + 16 <= slice->begin + slice->n) {
            load16(v, slice->logits + (id - slice->begin));
        } else {
            const VocabRow::Slice* at = slice;
            float across[16];
            for (int lane = 0; lane < 16; lane++) {
                while (at < last && id + lane >= at->begin + at->n) at++;
                across[lane] = id + lane < vocab ? at->logits[id + lane - at->begin] : kNever;
            }
            load16(v, across);
        }
        v -= most;
        exp16(v);
        part += v;
        if (id % 1024 == 1008 || id + 16 >= vocab) {  // short sums in fp32, the long one in double
            for (int lane = 0; lane < 16; lane++) sum += static_cast<double>(part[lane]);
            part = Floats{};
        }
    }
    return static_cast<double>(most) + std::log(sum);
}

inline float log_probability(float logit, double log_sum) {
    return logit == kNever ? kNever : static_cast<float>(static_cast<double>(logit) - log_sum);
}

}  // namespace kd::cpu
