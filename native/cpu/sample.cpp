// Choosing a token. The noise of a candidate is a pure function of (seed, choice, position, id), and the tokens that
// top-k, top-p and min-p leave are found with sums in 64-bit fixed point, whose order does not matter: the same logits give
// the same token whatever the threads, the ranks and the company.

#include <algorithm>
#include <cmath>
#include <vector>

#include "ops.h"
#include "threads.h"
#include "vocab.h"

namespace kd::ops {
namespace {

using namespace kd::cpu;

constexpr double kOne = 1099511627776.0;  // 2^40: weight of the best token
constexpr uint32_t kPurpose = 0x6B640001;
constexpr double kMostNoise = 23;  // -log(-log(1 - 2^-33)) is 22.9

struct Chosen {
    uint64_t hash;
    int32_t token;
    float logprob;
};

// ---- hash -----------------------------------------------------------------------------------------------------------

uint64_t mix64(uint64_t x) {
    x += 0x9E3779B97F4A7C15;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return x ^ (x >> 31);
}

uint64_t hash_row(const VocabRow& row) {
    uint64_t sum[4] = {};  // four chains, so that multiplications overlap
    for (int i = 0; i < row.slices; i++) {
        const auto [logits, begin, n] = row.slice[i];
        const auto at = [&](int j) {
            return mix64(static_cast<uint64_t>(begin + j) << 32 | std::bit_cast<uint32_t>(logits[j]));
        };
        int j = 0;
        for (; j + 4 <= n; j += 4) {
            for (int lane = 0; lane < 4; lane++) sum[lane] += at(j + lane);
        }
        for (; j < n; j++) sum[0] += at(j);
    }
    return sum[0] + sum[1] + sum[2] + sum[3];
}

// ---- noise ----------------------------------------------------------------------------------------------------------

// Philox4x32-10 (Salmon et al., 2011).
void philox(uint32_t c[4], uint64_t key) {
    uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
    for (int round = 0; round < 10; round++) {
        const uint64_t p0 = uint64_t{0xD2511F53} * c[0], p1 = uint64_t{0xCD9E8D57} * c[2];
        c[0] = static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ k0;
        c[2] = static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ k1;
        c[1] = static_cast<uint32_t>(p1);
        c[3] = static_cast<uint32_t>(p0);
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
    }
}

// Noise bits by token; neighbours of four share one block.
class Noise {
  public:
    Noise(const Sampling& s, uint32_t position) : seed_(s.seed), choice_(s.choice), position_(position) {}

    uint32_t bits(int id) {
        const auto block = static_cast<uint32_t>(id) / 4;
        if (block != block_) {
            block_ = block;
            const uint32_t counter[4] = {block, position_, choice_, kPurpose};
            std::copy(counter, counter + 4, lane_);
            philox(lane_, seed_);
        }
        return lane_[static_cast<uint32_t>(id) % 4];
    }

  private:
    uint64_t seed_;
    uint32_t choice_, position_;
    uint32_t block_ = UINT32_MAX;  // no id has it
    uint32_t lane_[4];
};

double uniform(uint32_t bits) { return (static_cast<double>(bits) + 0.5) * 0x1p-32; }

// The best logit / T + noise so far.
class Race {
  public:
    Race(const Sampling& s, uint32_t position)
        : noise_(s, position), temperature_(static_cast<double>(s.temperature)) {}

    void enter(float logit, int id) {
        const double scaled = static_cast<double>(logit) / temperature_;
        if (scaled + kMostNoise < best_) return;
        const uint32_t bits = noise_.bits(id);
        if (hopeless(best_ - scaled, bits)) return;
        const double score = scaled - std::log(-std::log(uniform(bits)));
        if (token_ >= 0 && (score < best_ || (score == best_ && id > token_))) return;
        best_ = score;
        token_ = id;
        slack_ = 1e-14 * std::abs(score);
    }

    int winner() const { return token_; }

  private:
    // Whether noise from these bits is surely under `missing`: -log(-log u) < t is -log u > exp(-t), and -log u >= 1 - u.
    // exp(-t) is bounded from above by 2^n (1 + f), which is one integer in floating-point form. Most candidates end here,
    // without a logarithm.
    bool hopeless(double missing, uint32_t bits) const {
        const double t = missing - slack_;
        if (!(t > 0.5 && t < 80)) return false;
        const auto form = static_cast<int32_t>((127.0 - t * 1.4426950408889634) * 8388608.0) + 1;
        return (1 - uniform(bits)) > static_cast<double>(std::bit_cast<float>(form)) * 1.001;
    }

    Noise noise_;
    double temperature_;
    double best_ = -std::numeric_limits<double>::infinity();
    double slack_ = 0;  // what rounding of score and difference may amount to
    int token_ = -1;
};

// ---- top-k, top-p, min-p ----------------------------------------------------------------------------------------------

// The tokens that stay are a beginning of the row in order of `better`. Its end is found by distributing tokens over
// buckets of falling logit, then looking closely at one bucket only.
class Filter {
  public:
    // For a row whose best token is `best`; `where` is reused memory.
    Filter(const Sampling& s, const VocabRow& row, Candidate best, int vocab, std::vector<uint16_t>& where,
           std::vector<Candidate>& few)
        : row_(row), best_(best), temperature_(static_cast<double>(s.temperature)), where_(where), few_(few) {
        const bool top_k = s.top_k > 0 && s.top_k < vocab, top_p = s.top_p < 1;
        if (!top_k && !top_p) return;
        distribute(top_p);
        if (top_k) keep_k(s.top_k);
        if (top_p) keep_p(static_cast<double>(s.top_p));
    }

    // visit(logit, id) of each token that stays, in id order
    template <class F>
    void each(float min_p, F&& visit) const {
        const double least = static_cast<double>(min_p) * kOne;
        size_t i = 0;
        row_.each([&](float logit, int id) {
            if (last_bucket_ < kBuckets) {
                const int bucket = where_[i++];
                if (bucket > last_bucket_ || (bucket == last_bucket_ && better(last_, {logit, id}))) return;
            }
            if (min_p > 0 && id != best_.id && static_cast<double>(weight(logit)) < least) return;
            visit(logit, id);
        });
    }

  private:
    static constexpr int kBuckets = 1024;
    static constexpr double kBucketsPerNat = 32;  // weights are 0 from 28 nats on, so 32 nats hold all that counts

    double below_best(float logit) const {
        return logit == best_.logit ? 0
                                    : (static_cast<double>(best_.logit) - static_cast<double>(logit)) / temperature_;
    }
    static int bucket_of(double below) { return static_cast<int>(std::min(below * kBucketsPerNat, kBuckets - 1.0)); }
    static uint64_t weight_at(double below) { return below < 28 ? static_cast<uint64_t>(std::exp(-below) * kOne) : 0; }
    uint64_t weight(float logit) const { return weight_at(below_best(logit)); }

    void distribute(bool weigh) {
        where_.clear();
        row_.each([&](float logit, int) {
            const double below = below_best(logit);
            const int bucket = bucket_of(below);
            where_.push_back(static_cast<uint16_t>(bucket));
            count_[bucket]++;
            if (weigh) mass_[bucket] += weight_at(below);
        });
    }

    // few_ = the tokens of one bucket that still stay
    void collect(int bucket) {
        few_.clear();
        size_t i = 0;
        row_.each([&](float logit, int id) {
            if (where_[i++] != bucket) return;
            if (bucket == last_bucket_ && better(last_, {logit, id})) return;
            few_.push_back({logit, id});
        });
    }

    void keep_k(int k) {
        int bucket = 0, before = 0;
        while (before + count_[bucket] < k) before += count_[bucket++];
        collect(bucket);
        const int kth = k - before - 1;
        std::nth_element(few_.begin(), few_.begin() + kth, few_.end(), better);
        last_bucket_ = bucket;
        last_ = few_[kth];
        // What follows sees only what stays.
        mass_[bucket] = 0;
        for (int i = 0; i <= kth; i++) mass_[bucket] += weight(few_[i].logit);
    }

    void keep_p(double p) {
        const int end = std::min(last_bucket_ + 1, kBuckets);
        uint64_t total = 0;
        for (int bucket = 0; bucket < end; bucket++) total += mass_[bucket];
        const double enough = p * static_cast<double>(total);
        uint64_t before = 0;
        for (int bucket = 0; bucket < end; bucket++) {
            if (static_cast<double>(before + mass_[bucket]) < enough) {
                before += mass_[bucket];
                continue;
            }
            collect(bucket);
            std::sort(few_.begin(), few_.end(), better);
            last_bucket_ = bucket;
            last_ = few_[0];
            for (const Candidate& c : few_) {
                if (!(static_cast<double>(before) < enough)) break;
                last_ = c;
                before += weight(c.logit);
            }
            return;
        }
    }

    const VocabRow& row_;
    const Candidate best_;
    const double temperature_;
    std::vector<uint16_t>& where_;  // bucket of each token, in id order
    std::vector<Candidate>& few_;
    int count_[kBuckets] = {};
    uint64_t mass_[kBuckets] = {};
    int last_bucket_ = kBuckets;  // of the last token that stays; kBuckets: all stay
    Candidate last_{};
};

int choose(const VocabRow& row, Candidate best, const Sampling& s, uint32_t position, int vocab) {
    if (!(s.temperature > 0) || best.logit == kNever) return best.id;
    Race race(s, position);
    race.enter(best.logit, best.id);  // it always stays, and a good mark from the start saves most of the work
    const auto enter = [&](float logit, int id) { race.enter(logit, id); };
    const bool filtered = (s.top_k > 0 && s.top_k < vocab) || s.top_p < 1 || s.min_p > 0;
    if (!filtered) {
        row.each(enter);
    } else {
        static thread_local std::vector<uint16_t> where;
        static thread_local std::vector<Candidate> few;
        Filter(s, row, best, vocab, where, few).each(s.min_p, enter);
    }
    return race.winner();
}

}  // namespace

void sample(const Choice& out, Dev<float> logits, Dev<const Sampling> sampling, const View& v, const Shape& s) {
    const VocabRows rows(logits, s);
    const int n_rows = v.n_out;
    const size_t bytes = most_rows_of_rank(n_rows) * sizeof(Chosen);
    auto* mine = static_cast<Chosen*>(share_buffer(bytes));
    const int ranks = tp(), rank = cpu::rank();
    parallel_for(rows_of_rank(n_rows), grain_for(4.0 * s.vocab), [&](int begin, int end) {
        for (int i = begin; i < end; i++) {
            const VocabRow row = rows.row(i * ranks + rank);
            const int view_row = raw(v.out_row)[i * ranks + rank];
            const Sampling& how = raw(sampling)[raw(v.stream)[view_row]];
            const auto position = static_cast<uint32_t>(raw(v.position)[view_row]) + 1;
            const Candidate best = best_of(row);
            Chosen& chosen = mine[i];
            chosen.token = choose(row, best, how, position, s.vocab);
            chosen.hash = how.want_hash ? hash_row(row) : 0;
            chosen.logprob = how.want_logprob ? log_probability(row.at(chosen.token), log_sum_exp(row, best.logit)) : 0;
        }
    });
    const Shared all = share_filled(bytes);
    for (int r = 0; r < n_rows; r++) {
        const Chosen& chosen = static_cast<const Chosen*>(all.of_rank[r % ranks])[r / ranks];
        raw(out.token)[r] = chosen.token;
        raw(out.hash)[r] = chosen.hash;
        raw(out.logprob)[r] = chosen.logprob;
    }
}

}  // namespace kd::ops
