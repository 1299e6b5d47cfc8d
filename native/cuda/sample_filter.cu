// Top-k and top-p. The tokens that stay are a beginning of the row in order of rank. Its end is found by distributing tokens
// over buckets of falling logit, in parallel over the row, then looking closely at one bucket only, by one block.

#include "sample.h"

#include <algorithm>

namespace kd::cuda {
namespace {

constexpr unsigned kAll = 0xFFFFFFFFu;

// *sum += value in shared memory. Sums of 64 bits are a loop of comparing and exchanging there, which takes forever where many
// add to one; of 32 bits they are one instruction.
__device__ __forceinline__ void add_shared(unsigned long long* sum, unsigned long long value) {
    auto* word = reinterpret_cast<unsigned*>(sum);
    const auto low = static_cast<unsigned>(value);
    const unsigned carry = atomicAdd(&word[0], low) + low < low;
    const unsigned high = static_cast<unsigned>(value >> 32) + carry;
    if (high) atomicAdd(&word[1], high);
}

// visit(logit, id) for ids `begin` .. `end` - 1 of a row by a block's threads, so many of each on the way at once.
template <int kThreads, int kAtOnce, class F>
__device__ __forceinline__ void each_logit(const Slices& slices, int r, int begin, int end, F&& visit) {
    int at = 0;
    for (int first = begin + static_cast<int>(threadIdx.x); first < end; first += kAtOnce * kThreads) {
        float logit[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; i++) {
            const int id = first + i * kThreads;
            logit[i] = id < end ? slices.logit(r, id, at) : 0;
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; i++) {
            const int id = first + i * kThreads;
            if (id < end) visit(logit[i], id);
        }
    }
}

// ---- distribution ------------------------------------------------------------------------------------------------------

// Floor: 4 bytes a logit of the filtered rows, from the second-level cache, and an exponential in double for those near the
// best.
constexpr int kSpreadThreads = 512;

__device__ void spread(Histogram& own, Histogram& all, const Slices& slices, const Dealt& d, int r, float best,
                       int stretch) {
    for (int b = threadIdx.x; b < kBuckets; b += kSpreadThreads) {
        own.mass[b] = 0;
        own.count[b] = 0;
    }
    __syncthreads();
    const Sampling& way = d.way(r);
    const Scale scale(way, best);
    const bool weigh = by_top_p(way);
    const int end = min(d.vocab, (stretch + 1) * kStretch);
    unsigned far = 0;  // most tokens are in the last bucket
    each_logit<kSpreadThreads, 4>(slices, r, stretch * kStretch, end, [&](float logit, int) {
        const int bucket = scale.bucket(logit);
        if (bucket == kBuckets - 1) {
            far++;
            return;
        }
        atomicAdd(&own.count[bucket], 1u);
        const unsigned long long weight = weigh ? scale.weight(logit) : 0;
        if (weight) add_shared(&own.mass[bucket], weight);
    });
    far = __reduce_add_sync(kAll, far);
    if (threadIdx.x % 32 == 0 && far) atomicAdd(&own.count[kBuckets - 1], far);
    __syncthreads();
    for (int b = threadIdx.x; b < kBuckets; b += kSpreadThreads) {
        if (own.count[b]) atomicAdd(&all.count[b], own.count[b]);
        if (own.mass[b]) atomicAdd(&all.mass[b], own.mass[b]);
    }
}

__global__ void __launch_bounds__(kSpreadThreads)
    spread_kernel(Histogram* histogram, const Need* need, int stretches, const __grid_constant__ Dealt d) {
    extern __shared__ __align__(16) unsigned char shared[];
    auto& own = *reinterpret_cast<Histogram*>(shared);
    __shared__ Slices slices;
    __shared__ Ranked row_best;
    __shared__ Needy rows;
    slices.load(d.all, d.ranks);
    for (int begin = 0; begin < d.n(); begin += Needy::kMost) {
        rows.find(need, kEndAndRace, begin, d.n());
        for (int item = blockIdx.x; item < rows.n * stretches; item += gridDim.x) {
            const int i = begin + rows.i[item / stretches], r = d.row(i);
            if (threadIdx.x < 32) {
                const Ranked best = d.best(r);
                if (threadIdx.x == 0) row_best = best;
            }
            __syncthreads();
            spread(own, histogram[i], slices, d, r, logit_of(row_best), item % stretches);
            __syncthreads();
        }
    }
}

// ---- the end -----------------------------------------------------------------------------------------------------------

constexpr int kEndThreads = kBuckets;  // one a bucket
constexpr int kFew = 2048;

struct Work {
    Ranked few[kFew];
    unsigned long long digit[256];
    unsigned long long warps[32];
    Ranked any[32], all[32];  // digits of the tokens of each warp
    Slices slices;
    Needy rows;
    Ranked prefix;
    unsigned long long before;
    int bucket, n;
};

// Sum over all threads up to this one. Ends with a barrier.
__device__ unsigned long long running_total(Work& w, unsigned long long value) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int step = 1; step < 32; step *= 2) {
        const unsigned long long before = __shfl_up_sync(kAll, value, step);
        if (lane >= step) value += before;
    }
    if (lane == 31) w.warps[warp] = value;
    __syncthreads();
    unsigned long long before = 0;
    for (int i = 0; i < warp; i++) before += w.warps[i];
    __syncthreads();
    return before + value;
}

__device__ unsigned long long block_total(Work& w, unsigned long long value) {
    value = warp_total(value);
    if (threadIdx.x % 32 == 0) w.warps[threadIdx.x / 32] = value;
    __syncthreads();
    unsigned long long all = 0;
    for (int i = 0; i < kEndThreads / 32; i++) all += w.warps[i];
    __syncthreads();
    return all;
}

// What is counted along the order of rank, and when it is enough.
struct Goal {
    bool by_mass;
    unsigned long long k;
    double mass;
    __device__ bool reached(unsigned long long sum) const {
        return by_mass ? static_cast<double>(sum) >= mass : sum >= k;
    }
};

// The tokens of one bucket that are not under `least`: in w.few if there is room for them.
struct Bucket {
    const Dealt& d;
    const Scale& scale;
    int r, bucket, n;
    Ranked least;

    // By all threads of a block.
    __device__ void collect(Work& w) {
        if (threadIdx.x == 0) w.n = 0;
        __syncthreads();
        each_of_row<8>(w, [&](Ranked token) {
            const int place = atomicAdd(&w.n, 1);
            if (place < kFew) w.few[place] = token;
        });
        __syncthreads();
        n = w.n;
    }

    template <class F>
    __device__ __forceinline__ void each(const Work& w, F&& visit) const {
        if (n > kFew) return each_of_row<1>(w, visit);
        for (int i = threadIdx.x; i < n; i += kEndThreads) {
            if (w.few[i] >= least) visit(w.few[i]);
        }
    }

  private:
    template <int kAtOnce, class F>
    __device__ __forceinline__ void each_of_row(const Work& w, F&& visit) const {
        each_logit<kEndThreads, kAtOnce>(w.slices, r, 0, d.vocab, [&](float logit, int id) {
            if (scale.bucket(logit) != bucket) return;
            const Ranked token = ranked(logit, id);
            if (token >= least) visit(token);
        });
    }
};

// The token of a bucket with which the goal is reached, `before` being what the buckets before have. Digit by digit, from the
// first: a row's place in the order is a number of eight digits. Those that all tokens share need no look.
__device__ Ranked last_of(Work& w, const Bucket& bucket, const Goal& goal, unsigned long long before) {
    Ranked any = 0, all = ~Ranked{0};
    bucket.each(w, [&](Ranked token) {
        any |= token;
        all &= token;
    });
    for (int step = 16; step; step /= 2) {
        any |= __shfl_xor_sync(kAll, any, step);
        all &= __shfl_xor_sync(kAll, all, step);
    }
    if (threadIdx.x % 32 == 0) {
        w.any[threadIdx.x / 32] = any;
        w.all[threadIdx.x / 32] = all;
    }
    __syncthreads();
    for (int i = 0; i < kEndThreads / 32; i++) {
        any |= w.any[i];
        all &= w.all[i];
    }
    int shift = 56;
    while (shift > 0 && !((any ^ all) >> shift)) shift -= 8;
    if (threadIdx.x == 0) {
        w.prefix = shift < 56 ? any >> (shift + 8) << (shift + 8) : 0;
        w.before = before;
    }
    for (; shift >= 0; shift -= 8) {
        if (threadIdx.x < 256) w.digit[threadIdx.x] = 0;
        __syncthreads();
        const Ranked prefix = w.prefix;
        bucket.each(w, [&](Ranked token) {
            if (shift < 56 && (token ^ prefix) >> (shift + 8)) return;
            const unsigned long long weight = goal.by_mass ? bucket.scale.weight(logit_of(token)) : 1;
            add_shared(&w.digit[255 - (token >> shift & 255)], weight);
        });
        __syncthreads();
        if (threadIdx.x < 32) {
            unsigned long long sum[8];
            unsigned long long lane_sum = 0;
            for (int i = 0; i < 8; i++) sum[i] = lane_sum += w.digit[threadIdx.x * 8 + i];
            unsigned long long total = lane_sum;
            for (int step = 1; step < 32; step *= 2) {
                const unsigned long long left = __shfl_up_sync(kAll, total, step);
                if (static_cast<int>(threadIdx.x) >= step) total += left;
            }
            const unsigned long long start = w.before + total - lane_sum;
            const unsigned reached = __ballot_sync(kAll, goal.reached(start + lane_sum));
            const int lane = reached ? __ffs(static_cast<int>(reached)) - 1 : 31;
            __syncwarp();  // all have read what is now written over
            if (static_cast<int>(threadIdx.x) == lane) {
                int i = 0;
                while (i < 7 && !goal.reached(start + sum[i])) i++;
                w.prefix = prefix | static_cast<Ranked>(255 - (threadIdx.x * 8 + i)) << shift;
                w.before = start + (i ? sum[i - 1] : 0);
            }
        }
        __syncthreads();
    }
    return w.prefix;
}

// Floor: 4 bytes a logit of the filtered rows for each of the two, by one multiprocessor a row.
__device__ Ranked end_of(Work& w, const Histogram& histogram, const Dealt& d, int r) {
    const int own = threadIdx.x;
    const Sampling& way = d.way(r);
    if (threadIdx.x < 32) {
        const Ranked best = d.best(r);
        if (threadIdx.x == 0) w.prefix = best;
    }
    __syncthreads();
    const Ranked best = w.prefix;
    const Scale scale(way, logit_of(best));
    unsigned long long mass = histogram.mass[own];
    Bucket bucket{d, scale, r, kBuckets, 0, 0};
    __syncthreads();

    Ranked last = 0;
    if (by_top_k(way, d.vocab)) {
        const Goal goal{false, static_cast<unsigned long long>(way.top_k), 0};
        const unsigned long long count = histogram.count[own];
        const unsigned long long sum = running_total(w, count);
        if (goal.reached(sum) && !goal.reached(sum - count)) {
            w.bucket = own;
            w.before = sum - count;
        }
        __syncthreads();
        const unsigned long long before = w.before;
        bucket.bucket = w.bucket;
        bucket.collect(w);
        last = bucket.least = last_of(w, bucket, goal, before);
        // What follows sees only what stays.
        unsigned long long left = 0;
        if (by_top_p(way)) bucket.each(w, [&](Ranked token) { left += scale.weight(logit_of(token)); });
        left = block_total(w, left);
        if (own == bucket.bucket) mass = left;
        if (own > bucket.bucket) mass = 0;
    }
    if (by_top_p(way)) {
        const unsigned long long sum = running_total(w, mass), total = block_total(w, mass);
        const Goal goal{true, 0, static_cast<double>(way.top_p) * static_cast<double>(total)};
        if (goal.mass > 0) {
            if (goal.reached(sum) && !goal.reached(sum - mass)) {
                w.bucket = own;
                w.before = sum - mass;
            }
            __syncthreads();
            const unsigned long long before = w.before;
            if (bucket.bucket != w.bucket) {
                bucket.bucket = w.bucket;
                bucket.collect(w);
            }
            last = last_of(w, bucket, goal, before);
        } else {
            last = best;
        }
    }
    return last;
}

__global__ void __launch_bounds__(kEndThreads)
    end_kernel(Ranked* end, const Histogram* histogram, const Need* need, const __grid_constant__ Dealt d) {
    extern __shared__ __align__(16) unsigned char shared[];
    auto& w = *reinterpret_cast<Work*>(shared);
    w.slices.load(d.all, d.ranks);
    for (int begin = 0; begin < d.n(); begin += Needy::kMost) {
        w.rows.find(need, kEndAndRace, begin, d.n());
        for (int item = blockIdx.x; item < w.rows.n; item += gridDim.x) {
            const int i = begin + w.rows.i[item];
            const Ranked last = end_of(w, histogram[i], d, d.row(i));
            if (threadIdx.x == 0) end[i] = last;
            __syncthreads();
        }
    }
}

}  // namespace

void find_ends(Ranked* end, Histogram* histogram, const Need* need, const Dealt& dealt, int most_dealt) {
    const int stretches = ceil_div(dealt.vocab, kStretch), processors = bound().processors;
    launch<spread_kernel, sizeof(Histogram)>(std::min(most_dealt * stretches, 2 * processors), kSpreadThreads,
                                             histogram, need, stretches, dealt);
    launch<end_kernel, sizeof(Work)>(std::min(most_dealt, processors), kEndThreads, end, histogram, need, dealt);
}

}  // namespace kd::cuda
