// What the kernels of sample() tell one another: sample.cu looks at every row and lets tokens race, sample_filter.cu finds where
// top-k and top-p end.
//
// A rank looks at its own logits of every row. What a row needs beside its best token is done by the rank it is dealt to, on
// the logits of all ranks: row i * ranks + rank is the i-th of a rank.
#pragma once

#include "launch.h"
#include "raw.h"
#include "vocab.h"

namespace kd::cuda {

constexpr double kOne = 1099511627776.0;  // 2^40: weight of the best token
constexpr int kStretch = 8192;            // ids of a dealt row that one block works on

// Of a rank's part of a row.
struct Seen {
    ExpSum sum;  // if wanted
    unsigned long long hash;
    Ranked best;
};

// Tokens of a dealt row by how far they are below its best.
constexpr int kBuckets = 1024;
struct Histogram {
    unsigned long long mass[kBuckets];
    unsigned count[kBuckets];
};

// What a dealt row needs beside its best token.
enum Need : uint8_t { kBestOnly, kRaceOnly, kEndAndRace };

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

// Dealt rows that need something, found by a block: a grid of the size of the GPU walks over them, whatever the room of the
// call. Blocks that find nothing to do would cost more than all else.
struct Needy {
    static constexpr int kMost = 1024;
    int n;
    int before[kMost / 32 + 1];
    uint16_t i[kMost];  // ascending: every block has to find the same

    // Of rows `begin` .. `begin` + kMost - 1. By all threads of a block.
    __device__ void find(const Need* need, Need least, int begin, int end) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = static_cast<int>(blockDim.x) / 32;
        const auto needs = [=](int group) {
            const int row = begin + 32 * group + lane;
            return __ballot_sync(0xFFFFFFFFu, row < end && need[row] >= least);
        };
        __syncthreads();
        for (int group = warp; group < kMost / 32; group += warps) {
            const unsigned found = needs(group);
            if (lane == 0) before[group + 1] = __popc(found);
        }
        if (threadIdx.x == 0) before[0] = 0;
        __syncthreads();
        if (warp == 0) {
            int sum = before[lane + 1];
            for (int step = 1; step < 32; step *= 2) {
                const int left = __shfl_up_sync(0xFFFFFFFFu, sum, step);
                if (lane >= step) sum += left;
            }
            before[lane + 1] = sum;
            if (lane == 31) n = sum;
        }
        __syncthreads();
        for (int group = warp; group < kMost / 32; group += warps) {
            const unsigned found = needs(group);
            if (found >> lane & 1) {
                i[before[group] + __popc(found & ((1u << lane) - 1))] = static_cast<uint16_t>(32 * group + lane);
            }
        }
        __syncthreads();
    }
};

// Weights of tokens beside the best: 2^40 exp((logit - best) / temperature), rounded down. 64-bit integers, so that sums do not
// depend on their order.
struct Scale {
    float best;
    double temperature;
    float buckets_per_logit;

    __device__ Scale(const Sampling& s, float best)
        : best(best),
          temperature(static_cast<double>(s.temperature)),
          buckets_per_logit(static_cast<float>(32 / static_cast<double>(s.temperature))) {}

    // Falls with the logit; 32 buckets a nat. Weights are 0 from 28 nats on.
    __device__ float below(float logit) const { return logit == best ? 0 : (best - logit) * buckets_per_logit; }
    __device__ int bucket(float logit) const { return static_cast<int>(fminf(below(logit), kBuckets - 1)); }
    __device__ unsigned long long weight(float logit) const {
        if (below(logit) > 28.5f * 32) return 0;
        const double nats = logit == best ? 0 : (static_cast<double>(best) - static_cast<double>(logit)) / temperature;
        return nats < 28 ? static_cast<unsigned long long>(exp(-nats) * kOne) : 0;
    }
};

// end[i] = the last token of dealt row i that top-k and top-p leave, of rows that need it; their histogram [i] must be 0.
void find_ends(Ranked* end, Histogram* histogram, const Need* need, const Dealt& dealt, int most_dealt);

}  // namespace kd::cuda
