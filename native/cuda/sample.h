// What the kernels of sample() tell one another: sample.cu looks at every row, sample_choose.cu chooses.
//
// A rank looks at its own logits of every row. What a row needs beside its best token is done by the rank it is dealt to, on
// the logits of all ranks: row i * ranks + rank is the i-th of a rank.
#pragma once

#include "raw.h"
#include "vocab.h"

namespace kd::cuda {

// Of a rank's part of a row.
struct Seen {
    ExpSum sum;  // if wanted
    unsigned long long hash;
    Ranked best;
};

struct Dealt {
    Shared all;  // of each rank: its Slice, then Seen [rows][parts]
    int ranks, rank, parts, vocab;
    const Sampling* sampling;
    ViewPtr v;

    __device__ int n() const { return (v.n_out() - rank + ranks - 1) / ranks; }  // dealt to this rank
    __device__ int row(int i) const { return i * ranks + rank; }
    __device__ const Sampling& way(int r) const { return sampling[v.stream[v.out_row[r]]]; }
    __device__ uint32_t position(int r) const { return static_cast<uint32_t>(v.position[v.out_row[r]]) + 1; }
    __device__ const Seen& seen(int r, int i) const {  // i < ranks * parts
        const auto* of_rank = static_cast<const char*>(all.of_rank[i / parts]) + kSliceBytes;
        return reinterpret_cast<const Seen*>(of_rank)[static_cast<size_t>(r) * parts + i % parts];
    }
    // By one warp.
    __device__ Ranked best(int r) const {
        Ranked best = 0;
        for (int i = static_cast<int>(threadIdx.x % 32); i < ranks * parts; i += 32) best = max(best, seen(r, i).best);
        return warp_best(best);
    }
};

__device__ __forceinline__ bool by_top_k(const Sampling& s, int vocab) { return s.top_k > 0 && s.top_k < vocab; }
__device__ __forceinline__ bool by_top_p(const Sampling& s) { return s.top_p < 1; }
__device__ __forceinline__ bool filtered(const Sampling& s, int vocab) {
    return s.temperature > 0 && (by_top_k(s, vocab) || by_top_p(s));
}

using Sum = unsigned long long;

// Buckets of falling logit.
constexpr int kBins = 384;
constexpr int kBinsNat = 32;  // all beyond 12 nats are in the last one

// Weights of tokens beside the best: 2^40 exp((logit - best) / temperature) to 22 bits.
struct Scale {
    float best, bins_per_logit, twos, more_twos;  // more: of a logit, what the other lacks

    __device__ void set(const Sampling& s, float best_logit) {
        const double temperature = static_cast<double>(s.temperature), exact = 1.4426950408889634074 / temperature;
        best = best_logit;
        bins_per_logit = static_cast<float>(kBinsNat / temperature);
        twos = static_cast<float>(exact);
        more_twos = static_cast<float>(exact - static_cast<double>(twos));
    }
    // Falls with the logit.
    __device__ __forceinline__ int bin(float logit) const {
        const float below = logit == best ? 0 : (best - logit) * bins_per_logit;
        return static_cast<int>(fminf(below, kBins - 1));
    }
    __device__ __forceinline__ Sum weight(float logit) const {
        if (logit == best) return Sum{1} << 40;
        const float x = logit - best;
        if (!(x * twos > -41)) return 0;
        const float shifted = fmaf(x, twos, kShift);
        const float f = fmaf(x, more_twos, fmaf(x, twos, kShift - shifted));
        float e;
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(f));
        const Sum digits = __float_as_uint(e + 2.0f) - __float_as_uint(2.0f);  // e * 2^22, rounded
        return digits << 18 >> -exponent_of(shifted);
    }
};

// *sum += value in shared memory. Sums of 64 bits are a loop of comparing and exchanging there, which takes forever where many
// add to one; of 32 bits they are one instruction.
__device__ __forceinline__ void add_shared(Sum* sum, Sum value) {
    auto* word = reinterpret_cast<unsigned*>(sum);
    const auto low = static_cast<unsigned>(value);
    const unsigned carry = atomicAdd(&word[0], low) + low < low;
    const unsigned high = static_cast<unsigned>(value >> 32) + carry;
    if (high) atomicAdd(&word[1], high);
}

// What is known of a row at the end. hash, logprob: if wanted, else 0.
struct Chosen {
    unsigned long long hash;
    int32_t token;
    float logprob;
};
struct ChoicePtr {
    int32_t* token;
    unsigned long long* hash;
    float* logprob;
    __device__ void put(int r, const Chosen& c) const {
        token[r] = c.token;
        hash[r] = c.hash;
        logprob[r] = c.logprob;
    }
};

// Chooses for the dealt rows, of which there are `most` at most: to `chosen`, or without it to `out`.
void choose(const ChoicePtr& out, Chosen* chosen, const Dealt& dealt, int most);

}  // namespace kd::cuda
