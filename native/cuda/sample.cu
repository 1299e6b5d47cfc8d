// Choosing a token. The noise of a candidate is a pure function of (seed, choice, position, id), and everything that is summed
// is summed as integers, whose order does not matter: the same logits give the same token whatever the grid, the ranks and
// the company.

#include "sample.h"

#include <algorithm>

#include "error.h"
#include "noise.h"
#include "ops.h"

namespace kd::ops {
namespace {

using namespace kd::cuda;

struct Chosen {
    unsigned long long hash;
    int32_t token;
    float logprob;
};

// ---- a rank's logits of every row -------------------------------------------------------------------------------------

__device__ __forceinline__ unsigned long long mix64(unsigned long long x) {
    x += 0x9E3779B97F4A7C15;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return x ^ (x >> 31);
}

// Floor: 4 bytes a logit, read once: a block keeps its part of a row in registers.
constexpr int kLookThreads = 256;
constexpr int kLookWarps = kLookThreads / 32;

// One part of a row. Ends with what is found in thread 0.
template <int kItems>
__device__ __forceinline__ Seen look(Seen (&warps)[kLookWarps], const float* row, int begin_id, int n,
                                     const Sampling& way) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first_id = begin_id + static_cast<int>(threadIdx.x);
    float item[kItems];
#pragma unroll
    for (int i = 0; i < kItems; i++) {
        const int j = i * kLookThreads + threadIdx.x;
        item[i] = j < n ? row[j] : kNever;
    }
    Seen own;
    own.hash = 0;
    if (way.want_hash) {
#pragma unroll
        for (int i = 0; i < kItems; i++) {
            const int id = first_id + i * kLookThreads;
            if (id < begin_id + n) {
                own.hash += mix64(static_cast<unsigned long long>(id) << 32 | __float_as_uint(item[i]));
            }
        }
    }
    uint32_t top = 0;
    int place = 0;
#pragma unroll
    for (int i = 0; i < kItems; i++) {
        item[i] = known(item[i]);
        const uint32_t key = sortable(item[i]);
        if (key > top) {
            top = key;
            place = i;
        }
    }
    own.best = static_cast<int>(threadIdx.x) < n ? ranked(top, first_id + place * kLookThreads) : 0;
    own.best = warp_best(own.best);
    own.hash = warp_total(own.hash);
    clear(own.sum, kNoGroup);
    if (way.want_logprob) {
        const int group = own.best ? group_of(logit_of(own.best)) : kNoGroup;
        clear(own.sum, group);
#pragma unroll
        for (int i = 0; i < kItems; i++) add_exp(own.sum, item[i]);
#pragma unroll
        for (int g = 0; g < kGroups; g++) own.sum.part[g] = warp_total(own.sum.part[g]);
    }
    if (lane == 0) warps[warp] = own;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < kLookWarps; w++) {
            own.best = max(own.best, warps[w].best);
            own.hash += warps[w].hash;
            if (way.want_logprob) add(own.sum, warps[w].sum);
        }
    }
    return own;
}

template <int kItems>
__global__ void __launch_bounds__(kLookThreads, 4)
    look_kernel(Slice* slice, Seen* seen, Histogram* histogram, Need* need, const float* logits, int vocab_begin,
                int vocab_rank, const __grid_constant__ Dealt d) {
    __shared__ Seen warps[kLookWarps];
    if (blockIdx.x == 0 && threadIdx.x == 0) *slice = {logits, vocab_begin, vocab_rank};
    const int items = d.v.n_out() * d.parts;
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        const int r = item / d.parts, part = item % d.parts;
        const Sampling& way = d.way(r);
        if (part == 0 && r % d.ranks == d.rank) {
            const bool end = filtered(way, d.vocab);
            if (threadIdx.x == 0) need[r / d.ranks] = end ? kEndAndRace : way.temperature > 0 ? kRaceOnly : kBestOnly;
            auto* words = reinterpret_cast<unsigned*>(&histogram[r / d.ranks]);
            for (int i = threadIdx.x; end && i < static_cast<int>(sizeof(Histogram) / sizeof(unsigned));
                 i += kLookThreads) {
                words[i] = 0;
            }
        }
        const int begin = part * kLookThreads * kItems, n = min(vocab_rank - begin, kLookThreads * kItems);
        const float* row = logits + static_cast<size_t>(r) * static_cast<size_t>(vocab_rank) + begin;
        const Seen own = look<kItems>(warps, row, vocab_begin + begin, n, way);
        if (threadIdx.x == 0) seen[item] = own;
        __syncthreads();
    }
}

// ---- the race -----------------------------------------------------------------------------------------------------------

// Floor: 4 bytes a logit of the rows with a temperature, from the second-level cache. Most tokens are out by a comparison; of
// the others four share one block of noise.
constexpr int kRaceThreads = 256;

__device__ void race(Runner& winner, Runner (&warps)[kRaceThreads / 32], const Slices& slices, const Dealt& d, int r,
                     Ranked row_best, Ranked least, int stretch) {
    const Sampling& way = d.way(r);
    const float best_logit = logit_of(row_best);
    if (best_logit == kNever) return;
    const int best_id = id_of(row_best);
    const uint32_t position = d.position(r);
    const Scale scale(way, best_logit);
    const double least_weight = static_cast<double>(way.min_p) * kOne;

    Race own(way, position, best_logit, best_id);
    const auto stays = [&](float logit, int id) {
        return ranked(logit, id) >= least &&
               !(way.min_p > 0 && id != best_id && static_cast<double>(scale.weight(logit)) < least_weight);
    };
    int at = 0;
    constexpr int kBlocks = 2;  // of four tokens, on the way at once
    for (int i = threadIdx.x; i < kStretch / 4; i += kBlocks * kRaceThreads) {
        const int first = stretch * (kStretch / 4) + i;
        float logit[kBlocks][4];
#pragma unroll
        for (int b = 0; b < kBlocks; b++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int id = 4 * (first + b * kRaceThreads) + j;
                logit[b][j] = id < d.vocab ? slices.logit(r, id, at) : kNever;
            }
        }
#pragma unroll
        for (int b = 0; b < kBlocks; b++) {
            const int block = first + b * kRaceThreads;
            const float most = fmaxf(fmaxf(logit[b][0], logit[b][1]), fmaxf(logit[b][2], logit[b][3]));
            if (own.out(most) || 4 * block >= d.vocab) continue;
            const uint4 bits = noise_bits(way.seed, way.choice, position, static_cast<uint32_t>(block));
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const uint32_t word = j < 2 ? (j == 0 ? bits.x : bits.y) : (j == 2 ? bits.z : bits.w);
                if (own.out(logit[b][j]) || own.hopeless(logit[b][j], word)) continue;
                const int id = 4 * block + j;
                if (id < d.vocab && stays(logit[b][j], id)) own.enter(logit[b][j], id, word);
            }
        }
    }
    Runner best = own.winner();
    for (int step = 16; step; step /= 2) {
        const Runner other{__shfl_xor_sync(0xFFFFFFFFu, best.score, step), __shfl_xor_sync(0xFFFFFFFFu, best.id, step)};
        if (other.ahead_of(best)) best = other;
    }
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = best;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int w = 1; w < kRaceThreads / 32; w++) {
        if (warps[w].ahead_of(best)) best = warps[w];
    }
    winner = best;
}

__global__ void __launch_bounds__(kRaceThreads)
    race_kernel(Runner* winner, const Ranked* end, const Need* need, int stretches, const __grid_constant__ Dealt d) {
    __shared__ Slices slices;
    __shared__ Ranked row_best;
    __shared__ Runner warps[kRaceThreads / 32];
    __shared__ Needy rows;
    slices.load(d.all, d.ranks);
    for (int begin = 0; begin < d.n(); begin += Needy::kMost) {
        rows.find(need, kRaceOnly, begin, d.n());
        for (int item = blockIdx.x; item < rows.n * stretches; item += gridDim.x) {
            const int i = begin + rows.i[item / stretches], r = d.row(i);
            if (threadIdx.x < 32) {
                const Ranked best = d.best(r);
                if (threadIdx.x == 0) row_best = best;
            }
            __syncthreads();
            race(winner[static_cast<size_t>(i) * static_cast<size_t>(stretches) + item % stretches], warps, slices, d,
                 r, row_best, need[i] == kEndAndRace ? end[i] : 0, item % stretches);
            __syncthreads();
        }
    }
}

// ---- what was chosen ------------------------------------------------------------------------------------------------------

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

// A warp a dealt row. One rank: to `out`; else to `chosen`, for the others to see.
constexpr int kFinishWarps = 4;

__global__ void __launch_bounds__(kFinishWarps * 32)
    finish_kernel(ChoicePtr out, Chosen* chosen, const Runner* winner, int stretches, const __grid_constant__ Dealt d) {
    __shared__ Slices slices;
    slices.load(d.all, d.ranks);
    __syncthreads();
    const int lane = threadIdx.x % 32, i = blockIdx.x * kFinishWarps + static_cast<int>(threadIdx.x) / 32, r = d.row(i);
    if (r >= d.v.n_out()) return;
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
    all.best = warp_best(all.best);
    all.hash = warp_total(all.hash);
    Chosen c{all.hash, id_of(all.best), 0};
    if (way.temperature > 0 && logit_of(all.best) != kNever) {
        const Runner* own = winner + static_cast<size_t>(i) * static_cast<size_t>(stretches);
        Runner best = own[lane < stretches ? lane : 0];
        for (int p = lane + 32; p < stretches; p += 32) {
            if (own[p].ahead_of(best)) best = own[p];
        }
        for (int step = 16; step; step /= 2) {
            const Runner other{__shfl_xor_sync(0xFFFFFFFFu, best.score, step),
                               __shfl_xor_sync(0xFFFFFFFFu, best.id, step)};
            if (other.ahead_of(best)) best = other;
        }
        c.token = best.id;
    }
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

__global__ void gather_kernel(ChoicePtr out, const __grid_constant__ Shared all, int ranks, Number n_out) {
    const int r = blockIdx.x * blockDim.x + threadIdx.x;
    if (r < n_out()) out.put(r, static_cast<const Chosen*>(all.of_rank[r % ranks])[r / ranks]);
}

}  // namespace

void sample(const Choice& out, Dev<float> logits, Dev<const Sampling> sampling, const View& v, const Shape& s) {
    const int rows = v.n_out.most, ids = most_ids_of_rank(s), ranks = tp();
    KD_CHECK(s.vocab_rank <= ids);
    if (rows == 0) return;
    // Few rows: smaller parts, so that there are enough of them for all multiprocessors.
    constexpr int few = 8, many = 32;
    const int large = ceil_div(ids, kLookThreads * many);
    const bool spread = rows * large < 4 * bound().processors;
    const int parts = spread ? ceil_div(ids, kLookThreads * few) : large;
    const int most_dealt = ceil_div(rows, ranks), stretches = ceil_div(s.vocab, kStretch);

    const size_t dealt_rows = static_cast<size_t>(most_dealt);
    const size_t own_bytes =
        dealt_rows * (sizeof(Histogram) + sizeof(Ranked) + stretches * sizeof(Runner) + sizeof(Need));
    auto* histogram = reinterpret_cast<Histogram*>(scratch<char>(Use::vocab, own_bytes));
    auto* winner = reinterpret_cast<Runner*>(histogram + dealt_rows);
    auto* end = reinterpret_cast<Ranked*>(winner + dealt_rows * stretches);
    auto* need = reinterpret_cast<Need*>(end + dealt_rows);

    const size_t bytes = kSliceBytes + static_cast<size_t>(rows) * static_cast<size_t>(parts) * sizeof(Seen);
    auto* slice = static_cast<Slice*>(share_buffer(bytes));
    auto* seen = reinterpret_cast<Seen*>(reinterpret_cast<char*>(slice) + kSliceBytes);
    Dealt d{{}, ranks, rank(), parts, s.vocab, raw(sampling), raw(v)};
    const int processors = bound().processors, grid = std::min(parts * rows, 4 * processors);
    if (spread)
        launch<look_kernel<few>>(grid, kLookThreads, slice, seen, histogram, need, raw(logits), s.vocab_begin,
                                 s.vocab_rank, d);
    else
        launch<look_kernel<many>>(grid, kLookThreads, slice, seen, histogram, need, raw(logits), s.vocab_begin,
                                  s.vocab_rank, d);
    d.all = share_filled(bytes);

    find_ends(end, histogram, need, d, most_dealt);
    launch<race_kernel>(std::min(stretches * most_dealt, 4 * processors), kRaceThreads, winner, end, need, stretches,
                        d);
    const ChoicePtr to{raw(out.token), reinterpret_cast<unsigned long long*>(raw(out.hash)), raw(out.logprob)};
    const size_t chosen_bytes = dealt_rows * sizeof(Chosen);
    Chosen* chosen = ranks > 1 ? static_cast<Chosen*>(share_buffer(chosen_bytes)) : nullptr;
    launch<finish_kernel>(ceil_div(most_dealt, kFinishWarps), kFinishWarps * 32, to, chosen, winner, stretches, d);
    if (ranks == 1) return;
    const Shared all = share_filled(chosen_bytes);
    launch<gather_kernel>(ceil_div(rows, 128), 128, to, all, ranks, number(v.n_out));
}

}  // namespace kd::ops
