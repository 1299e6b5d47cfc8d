// The noise that a token is chosen with: a pure function of (seed, choice, position, id), in double.
#pragma once

#include <cstdint>

#include "types.h"

namespace kd::cuda {

constexpr uint32_t kPurpose = 0x6B640001;
constexpr double kMostNoise = 23;  // -log(-log(1 - 2^-33)) is 22.9

// Noise bits of tokens 4 block .. 4 block + 3: Philox4x32-10 (Salmon et al., 2011).
__device__ __forceinline__ uint4 noise_bits(uint64_t seed, uint32_t choice, uint32_t position, uint32_t block) {
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
    uint4 c{block, position, choice, kPurpose};
#pragma unroll
    for (int round = 0; round < 10; round++) {
        const uint32_t high0 = __umulhi(0xD2511F53u, c.x), low0 = 0xD2511F53u * c.x;
        const uint32_t high1 = __umulhi(0xCD9E8D57u, c.z), low1 = 0xCD9E8D57u * c.z;
        c = {high1 ^ c.y ^ k0, low1, high0 ^ c.w ^ k1, low0};
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return c;
}
__device__ __forceinline__ uint32_t word_of(const uint4& c, int i) {
    return i < 2 ? (i == 0 ? c.x : c.y) : (i == 2 ? c.z : c.w);
}

// A token in the race for the largest logit / T + noise. Of equals the lowest id wins.
struct Runner {
    double score;
    int id;
    __device__ bool ahead_of(const Runner& other) const {
        return score != other.score ? score > other.score : id < other.id;
    }
};

// A thread's part of the race.
class Race {
  public:
    // `first` is in it from the start: a good mark saves most of the work.
    __device__ Race(const Sampling& s, uint32_t position, float first_logit, int first)
        : temperature_(static_cast<double>(s.temperature)), per_temperature_(static_cast<float>(1 / temperature_)) {
        const uint4 bits = noise_bits(s.seed, s.choice, position, static_cast<uint32_t>(first) / 4);
        lead({score(first_logit, word_of(bits, first % 4)), first});
    }

    // Whether no noise can help a token of this logit.
    __device__ bool out(float logit) const { return logit < least_; }

    // Whether noise from these bits is surely under what a token of this logit misses: -log(-log u) < t is -log u > exp(-t), and
    // -log u >= 1 - u. Nearly all tokens end here, without a logarithm, without a double, without a look at the filters. mark_ is
    // lowered by more than all rounding in this: t is right to 1e-6 of the score or of 80.
    __device__ bool hopeless(float logit, uint32_t bits) const {
        const float t = fmaf(-logit, per_temperature_, mark_);
        if (!(t > 0.5f && t < 80)) return false;
        return (static_cast<float>(~bits) + 0.5f) * 0x1p-32f > __expf(-t) * 1.01f;
    }

    __device__ void enter(float logit, int id, uint32_t bits) {
        const Runner runner{score(logit, bits), id};
        if (runner.ahead_of(best_)) lead(runner);
    }

    __device__ const Runner& winner() const { return best_; }

  private:
    __device__ double score(float logit, uint32_t bits) const {
        const double uniform = (static_cast<double>(bits) + 0.5) * 0x1p-32;
        return static_cast<double>(logit) / temperature_ - log(-log(uniform));
    }

    __device__ void lead(const Runner& runner) {
        best_ = runner;
        // The most noise is 0.09 less than kMostNoise, and the bound is moved by more than floats round.
        const float least = __double2float_rd((runner.score - kMostNoise) * temperature_);
        least_ = least - 3e-7f * fabsf(least);
        const auto mark = static_cast<float>(runner.score);
        mark_ = mark - 1e-3f - 2e-6f * fabsf(mark);
    }

    double temperature_;
    float per_temperature_;
    Runner best_{};
    float least_ = 0, mark_ = 0;
};

}  // namespace kd::cuda
