#include <algorithm>
#include <vector>

#include "error.h"
#include "ops.h"
#include "threads.h"
#include "vocab.h"

namespace kd::ops {
namespace {

using namespace kd::cpu;

// best[0..k) = the k best of the row, best first. Candidates are collected until there are k too many, then cut back to
// the best k, which raises the bar for those to come.
void best_k(std::vector<Candidate>& best, const VocabRow& row, size_t k) {
    best.clear();
    float bar = kNever;
    row.each([&](float logit, int id) {
        // Ids ascend, so one that only equals the k-th is worse than it.
        if (!(logit > bar) && best.size() >= k) return;
        best.push_back({logit, id});
        if (best.size() >= 2 * k + 32) {
            std::nth_element(best.begin(), best.begin() + (k - 1), best.end(), better);
            best.resize(k);
            bar = best[k - 1].logit;
        }
    });
    std::partial_sort(best.begin(), best.begin() + k, best.end(), better);
}

}  // namespace

void top_logprobs(Dev<int32_t> id, Dev<float> logprob, Dev<float> logits, Count n_rows, int k, const Shape& s) {
    KD_CHECK(k >= 1 && k <= s.vocab);
    const VocabRows rows(logits, s);
    const size_t width = static_cast<size_t>(k);
    const size_t row_bytes = width * (sizeof(int32_t) + sizeof(float));  // ids, then logprobs
    const size_t bytes = most_rows_of_rank(n_rows) * row_bytes;
    char* mine = static_cast<char*>(share_buffer(bytes));
    const int ranks = tp(), rank = cpu::rank();
    parallel_for(rows_of_rank(n_rows), grain_for(3.0 * s.vocab), [&](int begin, int end) {
        static thread_local std::vector<Candidate> best;
        for (int i = begin; i < end; i++) {
            const VocabRow row = rows.row(i * ranks + rank);
            best_k(best, row, width);
            const double log_sum = log_sum_exp(row, best[0].logit);
            auto* to_id = reinterpret_cast<int32_t*>(mine + i * row_bytes);
            auto* to_logprob = reinterpret_cast<float*>(to_id + width);
            for (size_t j = 0; j < width; j++) {
                to_id[j] = best[j].id;
                to_logprob[j] = log_probability(best[j].logit, log_sum);
            }
        }
    });
    const Shared all = share_filled(bytes);
    for (int r = 0; r < n_rows; r++) {
        const auto* from = static_cast<const char*>(all.of_rank[r % ranks]) + (r / ranks) * row_bytes;
        const auto* from_id = reinterpret_cast<const int32_t*>(from);
        const auto* from_logprob = reinterpret_cast<const float*>(from_id + width);
        std::copy(from_id, from_id + width, raw(id) + r * width);
        std::copy(from_logprob, from_logprob + width, raw(logprob) + r * width);
    }
}

}  // namespace kd::ops
