// Choosing among the tokens of a row: top-k, top-p, min-p, and the race of logit / T + noise.
//
// The tokens that top-k and top-p leave are a beginning of the row in order of rank. Where it ends is found by distributing the
// row over buckets of falling logit and by looking closely at one bucket. Eight blocks that can read one another's shared memory
// have a row between them, which each of them reads once; before sm_90 it is one block. Sums are of integers, so that it does
// not matter who adds what.

#include <algorithm>
#include <atomic>

#include "launch.h"
#include "mma.h"
#include "noise.h"
#include "sample.h"

namespace kd::cuda {
namespace {

constexpr unsigned kAll = 0xFFFFFFFFu;
constexpr int kThreads = 384, kWarps = kThreads / 32;
static_assert(kBins == kThreads);
constexpr int kTeam = 8;               // blocks of a row
constexpr int kHeld = 163840 / kTeam;  // tokens that a block keeps; of larger vocabularies they are read again
constexpr int kFew = 320, kFewOfRow = kThreads;

// On a multiprocessor: as many as have room for what they keep.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900 && __CUDA_ARCH__ != 1000
constexpr int kBlocks = 1;
#else
constexpr int kBlocks = 2;
#endif

struct alignas(16) Bin {
    Sum mass;
    unsigned count;
};
struct alignas(16) Total {
    Sum sum;
    int few;
};

// Blocks of a row.
struct Team {
    int size, member;
    __device__ __forceinline__ void barrier() const {
        if (size > 1)
            cluster_barrier();
        else
            __syncthreads();
    }
    // Sixteen bytes of another member's shared memory.
    template <class T>
    __device__ __forceinline__ T read(const T& own, int other) const {
        static_assert(sizeof(T) == 16);
        float4 bits = size > 1 ? load_of_block(reinterpret_cast<const float*>(&own), other)
                               : *reinterpret_cast<const float4*>(&own);
        return *reinterpret_cast<T*>(&bits);
    }
};

// What a block has of a row: ids begin .. begin + n - 1; begin is a multiple of 4. held: in its shared memory.
struct Where {
    Team team;
    Scale scale;
    int r, vocab, begin, n;
    bool held;
};

struct Work {
    alignas(16) float logit[kHeld];
    union {
        Bin bin[kBins];
        struct {
            Ranked token[kFewOfRow];
            Sum amount[kFewOfRow];
        } all;  // of a bucket, of all blocks
    };
    alignas(16) Ranked few[kFew];  // of a bucket, of this block
    Total total, left;             // of this block, for the others to read
    alignas(16) Runner winner;
    Runner warp_winner[kWarps];
    Sum warp_sum[kWarps];
    int warp_rows[kWarps];
    uint16_t row[kThreads];
    Slices slices;
    Sampling way;
    Where where;
    Ranked best, end;
    int bin_found, few_found;
    Sum before;
};

struct Part : Where {
    Work& w;
    __device__ Part(Work& w) : Where(w.where), w(w) {}

    // Four neighbours from memory.
    __device__ __forceinline__ float4 fetch(int i) const {
        const int id = begin + 4 * i;
        int at = 0;
        while (id >= w.slices.of_rank[at].begin + w.slices.of_rank[at].n) at++;
        const Slice& s = w.slices.of_rank[at];
        const float* from =
            s.logits + static_cast<size_t>(r) * static_cast<size_t>(s.n) + static_cast<size_t>(id - s.begin);
        float4 four{kNever, kNever, kNever, kNever};
        if (id + 4 <= s.begin + s.n && reinterpret_cast<uintptr_t>(from) % 16 == 0) {
            four = *reinterpret_cast<const float4*>(from);
        } else {
            four.x = w.slices.logit(r, id, at);
            if (id + 1 < vocab) four.y = w.slices.logit(r, id + 1, at);
            if (id + 2 < vocab) four.z = w.slices.logit(r, id + 2, at);
            if (id + 3 < vocab) four.w = w.slices.logit(r, id + 3, at);
        }
        return {known(four.x), known(four.y), known(four.z), known(four.w)};
    }
    __device__ __forceinline__ float4 four(int i) const {
        return held ? reinterpret_cast<const float4*>(w.logit)[i] : fetch(i);
    }

    // visit(logit, id) of this block's part.
    template <class F>
    __device__ __forceinline__ void each(F&& visit) const {
#pragma unroll 2
        for (int i = threadIdx.x; 4 * i < n; i += kThreads) {
            const float4 logit = four(i);
            const int id = begin + 4 * i;
            visit(logit.x, id);
            if (4 * i + 1 < n) visit(logit.y, id + 1);
            if (4 * i + 2 < n) visit(logit.z, id + 2);
            if (4 * i + 3 < n) visit(logit.w, id + 3);
        }
    }
    __device__ Sum amount(bool by_mass, float logit) const { return by_mass ? scale.weight(logit) : 1; }
};

// Sum over all threads of a block up to this one, and of all. Ends with a barrier.
struct Running {
    Sum sum, total;
};
__device__ Running running_total(Work& w, Sum value) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int step = 1; step < 32; step *= 2) {
        const Sum before = __shfl_up_sync(kAll, value, step);
        if (lane >= step) value += before;
    }
    if (lane == 31) w.warp_sum[warp] = value;
    __syncthreads();
    Running all{value, 0};
    for (int i = 0; i < kWarps; i++) {
        const Sum one = w.warp_sum[i];
        if (i < warp) all.sum += one;
        all.total += one;
    }
    __syncthreads();
    return all;
}

// What is counted along the order of rank, and when it is enough.
struct Goal {
    bool by_mass;
    Sum k;
    double mass;
    __device__ bool reached(Sum sum) const { return by_mass ? static_cast<double>(sum) >= mass : sum >= k; }
};

// Of the blocks' bins, thread i's is the i-th. Ends where all have read all.
__device__ Bin sum_bins(const Part& p) {
    p.team.barrier();
    Bin sum{0, 0};
    for (int m = 0; m < p.team.size; m++) {
        const Bin one = p.team.read(p.w.bin[threadIdx.x], m);
        sum.mass += one.mass;
        sum.count += one.count;
    }
    return sum;
}

__device__ void clear_bins(Work& w) {
    w.bin[threadIdx.x] = {0, 0};
    __syncthreads();
}

// w.bin_found, w.before: the bin with which the goal is reached, and what the bins before have.
__device__ void find_bin(Work& w, const Goal& goal, Sum amount, Sum sum) {
    if (goal.reached(sum) && !goal.reached(sum - amount)) {
        w.bin_found = threadIdx.x;
        w.before = sum - amount;
    }
    __syncthreads();
}

// The token of a bucket with which the goal is reached, `before` being what the buckets before have; none of those under `least`.
// If there are too many to look at each beside each, digits of the order are found one after the other, from the first.
__device__ __noinline__ Ranked last_of(Work& w, int bucket, const Goal& goal, Sum before, Ranked least) {
    const Part p(w);
    const int thread = threadIdx.x;
    Ranked prefix = 0;
    int shift = 64;
    const auto each = [&](auto&& visit) {
        p.each([&](float logit, int id) {
            if (p.scale.bin(logit) != bucket) return;
            const Ranked token = ranked(logit, id);
            if (token >= least && (shift == 64 || token >> shift == prefix >> shift)) visit(logit, token);
        });
    };
    for (;;) {
        if (thread == 0) w.few_found = 0;
        __syncthreads();
        each([&](float, Ranked token) {
            const int place = atomicAdd(&w.few_found, 1);
            if (place < kFew) w.few[place] = token;
        });
        __syncthreads();
        if (thread == 0) w.total = {0, w.few_found};
        p.team.barrier();
        int first[kTeam + 1] = {};
        bool room = true;
#pragma unroll
        for (int m = 0; m < kTeam; m++) {
            const int here = m < p.team.size ? p.team.read(w.total, m).few : 0;
            room = room && here <= kFew;
            first[m + 1] = first[m] + here;
        }
        if (room && first[kTeam] <= kFewOfRow) {
            // Pairs of tokens from each block, to a place of their own.
            const int all = first[kTeam];
#pragma unroll
            for (int m = 0; m < kTeam; m++) {
                const int here = first[m + 1] - first[m];
                if (2 * thread >= here) continue;
                const auto two = p.team.read(*reinterpret_cast<const ulonglong2*>(&w.few[2 * thread]), m);
                w.all.token[first[m] + 2 * thread] = two.x;
                if (2 * thread + 1 < here) w.all.token[first[m] + 2 * thread + 1] = two.y;
            }
            __syncthreads();
            const Ranked own = thread < all ? w.all.token[thread] : 0;
            const Sum amount = own ? p.amount(goal.by_mass, logit_of(own)) : 0;
            w.all.amount[thread] = amount;
            __syncthreads();
            Sum sum = before;
            for (int i = 0; i < all; i++) sum += w.all.token[i] >= own ? w.all.amount[i] : 0;
            if (own && goal.reached(sum) && !goal.reached(sum - amount)) w.end = own;
            __syncthreads();
            return w.end;
        }
        const int above = shift;
        shift -= 8;
        clear_bins(w);
        p.each([&](float logit, int id) {
            if (p.scale.bin(logit) != bucket) return;
            const Ranked token = ranked(logit, id);
            if (token < least || (above < 64 && token >> above != prefix >> above)) return;
            const auto digit = static_cast<int>(token >> shift) & 255;
            add_shared(&w.bin[255 - digit].mass, p.amount(goal.by_mass, logit));
        });
        const Sum mass = sum_bins(p).mass, sum = before + running_total(w, mass).sum;
        find_bin(w, goal, mass, sum);
        before = w.before;
        prefix |= static_cast<Ranked>(255 - w.bin_found) << shift;
        __syncthreads();
        if (shift == 0) return prefix;
    }
}

// The last token that top-k and top-p leave.
__device__ Ranked end_of(const Part& p, Ranked best) {
    Work& w = p.w;
    const bool weigh = by_top_p(w.way), count = by_top_k(w.way, p.vocab);
    clear_bins(w);
    unsigned far = 0;
    Sum far_mass = 0;
    p.each([&](float logit, int) {
        const int bin = p.scale.bin(logit);
        const Sum weight = weigh ? p.scale.weight(logit) : 0;
        if (bin == kBins - 1) {
            far++;
            far_mass += weight;
            return;
        }
        if (count) atomicAdd(&w.bin[bin].count, 1u);
        if (weight) add_shared(&w.bin[bin].mass, weight);
    });
    far = __reduce_add_sync(kAll, far);
    far_mass = warp_total(far_mass);
    if (threadIdx.x % 32 == 0) {
        atomicAdd(&w.bin[kBins - 1].count, far);
        add_shared(&w.bin[kBins - 1].mass, far_mass);
    }
    Bin own = sum_bins(p);
    Ranked last = 0;
    if (count) {
        const Goal goal{false, static_cast<Sum>(w.way.top_k), 0};
        find_bin(w, goal, own.count, running_total(w, own.count).sum);
        const int bin = w.bin_found;
        last = last_of(w, bin, goal, w.before, 0);
        if (weigh) {  // what follows sees only what stays
            Sum left = 0;
            p.each([&](float logit, int id) {
                if (p.scale.bin(logit) == bin && ranked(logit, id) >= last) left += p.scale.weight(logit);
            });
            left = running_total(w, left).total;
            if (threadIdx.x == 0) w.left = {left, 0};
            p.team.barrier();
            left = 0;
            for (int m = 0; m < p.team.size; m++) left += p.team.read(w.left, m).sum;
            p.team.barrier();
            const int thread = threadIdx.x;
            own.mass = thread == bin ? left : thread > bin ? 0 : own.mass;
        }
    }
    if (!weigh) return last;
    const Running mass = running_total(w, own.mass);
    const Goal goal{true, 0, static_cast<double>(w.way.top_p) * static_cast<double>(mass.total)};
    if (!(goal.mass > 0)) return best;
    find_bin(w, goal, own.mass, mass.sum);
    return last_of(w, w.bin_found, goal, w.before, last);
}

// The winner of this block's part: in thread 0. Most tokens are out by a comparison; of the others four share one block of noise.
__device__ Runner race(const Part& p, uint32_t position, Ranked best, Ranked end) {
    const Sampling& way = p.w.way;
    const float end_logit = end ? logit_of(end) : kNever, least_weight = way.min_p;
    const uint64_t seed = way.seed;
    const uint32_t choice = way.choice;
    const int best_id = id_of(best);
    Race own(way, position, logit_of(best), best_id);
    const auto stays = [&](float logit, int id) {
        if (ranked(logit, id) < end) return false;
        if (!(least_weight > 0) || id == best_id || logit == p.scale.best) return true;
        const double below = static_cast<double>(p.scale.best) - static_cast<double>(logit);
        return exp(-below / static_cast<double>(way.temperature)) >= static_cast<double>(least_weight);
    };
#pragma unroll 2
    for (int i = threadIdx.x; 4 * i < p.n; i += kThreads) {
        const float4 four = p.four(i);
        const float most = fmaxf(fmaxf(four.x, four.y), fmaxf(four.z, four.w));
        if (most < end_logit || own.out(most)) continue;
        const int id = p.begin + 4 * i;
        const uint4 bits = noise_bits(seed, choice, position, static_cast<uint32_t>(id) / 4);
        const auto run = [&](float logit, int j, uint32_t word) {
            if (logit < end_logit || own.out(logit) || own.hopeless(logit, word) || 4 * i + j >= p.n) return;
            if (stays(logit, id + j)) own.enter(logit, id + j, word);
        };
        run(four.x, 0, bits.x);
        run(four.y, 1, bits.y);
        run(four.z, 2, bits.z);
        run(four.w, 3, bits.w);
    }
    Runner winner = own.winner();
    const auto meet = [&](int step) {
        const Runner other{__shfl_xor_sync(kAll, winner.score, step), __shfl_xor_sync(kAll, winner.id, step)};
        if (other.ahead_of(winner)) winner = other;
    };
    for (int step = 16; step; step /= 2) meet(step);
    if (threadIdx.x % 32 == 0) p.w.warp_winner[threadIdx.x / 32] = winner;
    __syncthreads();
    if (threadIdx.x < 32) {
        winner = p.w.warp_winner[threadIdx.x < kWarps ? threadIdx.x : 0];
        for (int step = 16; step; step /= 2) meet(step);
    }
    return winner;
}

// A dealt row's token and what else is wanted of it. By one warp. `token`: -1 for the best.
__device__ void finish(const ChoicePtr& out, Chosen* chosen, const Dealt& d, const Slices& slices, int i, int token) {
    const int lane = threadIdx.x % 32, r = d.row(i);
    const Sampling& way = d.way(r);
    Seen all;
    clear(all.sum, kNoGroup);
    all.hash = 0;
    all.best = 0;
    for (int p = lane; p < d.ranks * d.parts; p += 32) {
        const Seen& seen = d.seen(r, p);
        all.best = max(all.best, seen.best);
        if (way.want_hash) all.hash += seen.hash;
        if (way.want_logprob) add(all.sum, seen.sum);
    }
    Chosen c{0, token, 0};
    if (token < 0) c.token = id_of(warp_best(all.best));
    if (way.want_hash) c.hash = warp_total(all.hash);
    if (way.want_logprob) {
        const ExpSum sum = warp_total(all.sum);
        int at = 0;
        if (lane == 0) c.logprob = log_probability(slices.logit(r, c.token, at), log_of(sum));
    }
    if (lane != 0) return;
    if (chosen)
        chosen[i] = c;
    else
        out.put(r, c);
}

// The token of a dealt row with a temperature. By all blocks of a team.
__device__ void choose_one(Work& w, Team team, const ChoicePtr& out, Chosen* chosen, const Dealt& d, int i) {
    const int r = d.row(i), thread = threadIdx.x;
    if (thread == 32) w.way = d.way(r);
    if (thread < 32) {
        const Ranked best = d.best(r);
        if (thread == 0) w.best = best;
    }
    __syncthreads();
    const Ranked best = w.best;
    int token = -1;
    if (logit_of(best) != kNever) {
        const int each = ((d.vocab + team.size - 1) / team.size + 3) / 4 * 4, begin = team.member * each;
        const bool filters = filtered(w.way, d.vocab);
        if (thread == 0) {
            w.where = {team, {}, r, d.vocab, begin, min(max(d.vocab - begin, 0), each), filters && each <= kHeld};
            w.where.scale.set(w.way, logit_of(best));
        }
        __syncthreads();
        const Part p(w);
        if (p.held) {
#pragma unroll 4
            for (int i = thread; 4 * i < p.n; i += kThreads) reinterpret_cast<float4*>(w.logit)[i] = p.fetch(i);
            __syncthreads();
        }
        const Ranked end = filters ? end_of(p, best) : 0;
        Runner winner = race(p, d.position(r), best, end);
        if (thread == 0) w.winner = winner;
        team.barrier();
        if (team.member == 0 && thread < 32) {
            winner = team.read(w.winner, thread % team.size);
            for (int step = kTeam / 2; step; step /= 2) {
                const Runner other{__shfl_xor_sync(kAll, winner.score, step), __shfl_xor_sync(kAll, winner.id, step)};
                if (other.ahead_of(winner)) winner = other;
            }
            token = winner.id;
        }
    }
    if (team.member == 0 && thread < 32) finish(out, chosen, d, w.slices, i, token);
    team.barrier();
}

// Floor: 4 bytes a logit of the rows with a temperature, read once, and some thirty to sixty instructions for each.
__global__ void __launch_bounds__(kThreads, kBlocks)
    choose_kernel(ChoicePtr out, Chosen* chosen, int team_size, const __grid_constant__ Dealt d) {
    extern __shared__ __align__(16) unsigned char shared[];
    auto& w = *reinterpret_cast<Work*>(shared);
    wait_for_kernel_before();
    let_next_kernel_start();
    const Team team{team_size, static_cast<int>(blockIdx.y)};
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, n = d.n();
    w.slices.load(d.all, d.ranks);
    // The others are done by warps.
    __syncthreads();
    for (int i = (blockIdx.x * team.size + team.member) * kWarps + warp; i < n; i += gridDim.x * team.size * kWarps) {
        if (!(d.way(d.row(i)).temperature > 0)) finish(out, chosen, d, w.slices, i, -1);
    }
    for (int begin = 0; begin < n; begin += kThreads) {
        const bool needs = begin + thread < n && d.way(d.row(begin + thread)).temperature > 0;
        const unsigned found = __ballot_sync(kAll, needs);
        if (lane == 0) w.warp_rows[warp] = __popc(found);
        __syncthreads();
        int before = 0, rows = 0;
        for (int i = 0; i < kWarps; i++) {
            before += i < warp ? w.warp_rows[i] : 0;
            rows += w.warp_rows[i];
        }
        if (needs) w.row[before + __popc(found & ((1u << lane) - 1))] = static_cast<uint16_t>(thread);
        __syncthreads();
        for (int i = blockIdx.x; i < rows; i += gridDim.x) choose_one(w, team, out, chosen, d, begin + w.row[i]);
        __syncthreads();
    }
}

// Teams that run at the same time: clusters of blocks do not fill a GPU that is not made of equal parts.
int teams_at_once(int size) {
    const device::Context& c = bound();
    if (size == 1) return kBlocks * c.processors;
    static std::atomic<int> known[64];
    std::atomic<int>& teams = known[c.device % 64];
    if (teams.load(std::memory_order_relaxed) == 0) {
        constexpr int bytes = static_cast<int>(sizeof(Work));
        check(cudaFuncSetAttribute(choose_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "choose_kernel");
        cudaLaunchAttribute cluster{};
        cluster.id = cudaLaunchAttributeClusterDimension;
        cluster.val.clusterDim = {1, static_cast<unsigned>(size), 1};
        const cudaLaunchConfig_t config{dim3(1, size), dim3(kThreads), bytes, nullptr, &cluster, 1};
        int n = 0;
        check(cudaOccupancyMaxActiveClusters(&n, choose_kernel, &config), "cudaOccupancyMaxActiveClusters");
        teams.store(std::max(n, 1), std::memory_order_relaxed);
    }
    return teams.load(std::memory_order_relaxed);
}

}  // namespace

void choose(const ChoicePtr& out, Chosen* chosen, const Dealt& dealt, int most) {
    const int size = bound().major >= 9 ? kTeam : 1;
    launch_as<choose_kernel, static_cast<int>(sizeof(Work))>({.early = dealt.ranks == 1, .cluster = size},
                                                             dim3(std::min(most, teams_at_once(size)), size), kThreads,
                                                             out, chosen, size, dealt);
}

}  // namespace kd::cuda
