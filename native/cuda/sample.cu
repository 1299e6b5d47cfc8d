// Choosing a token. The noise of a candidate is a pure function of (seed, choice, position, id), and everything that is summed
// is summed as integers, whose order does not matter: the same logits give the same token whatever the grid, the ranks and
// the company.

#include "sample.h"

#include <algorithm>

#include "error.h"
#include "launch.h"
#include "ops.h"

namespace kd::ops {
namespace {

using namespace kd::cuda;

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
    look_kernel(Slice* slice, Seen* seen, const float* logits, int vocab_begin, int vocab_rank,
                const __grid_constant__ Dealt d) {
    __shared__ Seen warps[kLookWarps];
    wait_for_kernel_before();
    let_next_kernel_start();
    if (blockIdx.x == 0 && threadIdx.x == 0) *slice = {logits, vocab_begin, vocab_rank};
    const int items = d.v.n_out() * d.parts;
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        const int r = item / d.parts, part = item % d.parts;
        const Sampling& way = d.way(r);
        const int begin = part * kLookThreads * kItems, n = min(vocab_rank - begin, kLookThreads * kItems);
        const float* row = logits + static_cast<size_t>(r) * static_cast<size_t>(vocab_rank) + begin;
        const Seen own = look<kItems>(warps, row, vocab_begin + begin, n, way);
        if (threadIdx.x == 0) seen[item] = own;
        __syncthreads();
    }
}

__global__ void gather_kernel(ChoicePtr out, const __grid_constant__ Shared all, int ranks, Number n_out) {
    const int r = blockIdx.x * blockDim.x + threadIdx.x;
    wait_for_kernel_before();
    let_next_kernel_start();
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
    const int most_dealt = ceil_div(rows, ranks);
    const size_t bytes = kSliceBytes + static_cast<size_t>(rows) * static_cast<size_t>(parts) * sizeof(Seen);
    auto* slice = static_cast<Slice*>(share_buffer(bytes));
    auto* seen = reinterpret_cast<Seen*>(reinterpret_cast<char*>(slice) + kSliceBytes);
    Dealt d{{}, ranks, rank(), parts, s.vocab, raw(sampling), raw(v)};
    const int grid = std::min(parts * rows, 4 * bound().processors);
    if (spread)
        launch_as<look_kernel<few>>({.early = true}, grid, kLookThreads, slice, seen, raw(logits), s.vocab_begin,
                                    s.vocab_rank, d);
    else
        launch_as<look_kernel<many>>({.early = true}, grid, kLookThreads, slice, seen, raw(logits), s.vocab_begin,
                                     s.vocab_rank, d);
    d.all = share_filled(bytes);

    const ChoicePtr to{raw(out.token), reinterpret_cast<unsigned long long*>(raw(out.hash)), raw(out.logprob)};
    const size_t chosen_bytes = static_cast<size_t>(most_dealt) * sizeof(Chosen);
    Chosen* chosen = ranks > 1 ? static_cast<Chosen*>(share_buffer(chosen_bytes)) : nullptr;
    choose(to, chosen, d, most_dealt);
    if (ranks == 1) return;
    const Shared all = share_filled(chosen_bytes);
    launch<gather_kernel>(ceil_div(rows, 128), 128, to, all, ranks, number(v.n_out));
}

}  // namespace kd::ops
