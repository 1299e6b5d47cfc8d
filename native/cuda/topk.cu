// The k best of logits rows. Tokens and logits are ranked as one integer each, so that "the k best" is a set whatever the
// order things are found in; what finds it is free to be cut as it likes.

#include <algorithm>

#include "error.h"
#include "launch.h"
#include "ops.h"
#include "raw.h"
#include "vocab.h"

namespace kd::ops {
namespace {

using namespace kd::cuda;

constexpr int kMostK = 256;
constexpr int kMostList = 1024;  // candidates a block keeps in shared memory: at least kMostK

// Tokens that may be among the k best of what a block looks at.
struct Narrow {
    Ranked list[kMostList];
    uint32_t bar[32];  // of each warp
    int count[33];
};

// Lanes in falling order.
__device__ __forceinline__ uint32_t warp_sort(uint32_t value) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int size = 2; size <= 32; size *= 2) {
#pragma unroll
        for (int step = size / 2; step; step /= 2) {
            const uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, value, step);
            const bool upper = (lane & step) != 0, falling = (lane & size) == 0 || size == 32;
            value = upper == falling ? min(value, other) : max(value, other);
        }
    }
    return value;
}

// The largest v such that at least k of each(visit) are >= v, or 0 if there are fewer. By all threads of a block.
template <int kWarps, class Each>
__device__ __forceinline__ Ranked kth_best(Narrow& s, const Each& each, int k) {
    Ranked best = 0;
#pragma unroll 1
    for (int bit = 63; bit >= 0; bit--) {
        const Ranked attempt = best | Ranked{1} << bit;
        int mine = 0;
        each(static_cast<uint32_t>(attempt >> 32), [&](Ranked token) { mine += token >= attempt; });
        mine = __reduce_add_sync(0xFFFFFFFFu, mine);
        if (threadIdx.x % 32 == 0) s.count[threadIdx.x / 32] = mine;
        __syncthreads();
        int all = 0;
        for (int w = 0; w < kWarps; w++) all += s.count[w];
        if (all >= k) best = attempt;
        __syncthreads();
    }
    return best;
}

// How many of s.list's n tokens are better than this one: its place among them.
__device__ __forceinline__ int better_than(const Narrow& s, int n, Ranked token) {
    int better = 0;
    for (int i = 0; i < n; i += 2) {
        const ulonglong2 two = *reinterpret_cast<const ulonglong2*>(&s.list[i]);
        better += (two.x > token) + (two.y > token);
    }
    return better;
}
// It looks at tokens in pairs. Ends with a barrier.
__device__ __forceinline__ void pad(Narrow& s, int n) {
    if (n % 2 && threadIdx.x == 0) s.list[n] = 0;
    __syncthreads();
}

// s.list = tokens among which are the k best of all threads', in no particular order. Returns how many. The k best are not under
// the bar: in every warp, of the best of each thread, the (k / warps)-th. Those over the bar are k and rarely many more; if they
// are too many, because there are ties or some threads have all that is good, the bar is found exactly. `top`: sortable logit of
// the thread's best token, 0 if it has none. each(least, visit) visits the thread's tokens, at least those whose sortable logit
// is not under `least`.
template <int kWarps, class Each, class Again>
__device__ __forceinline__ int narrow(Narrow& s, const Each& each, const Again& again, uint32_t top, int k, int room) {
    static_assert(kWarps * 32 >= kMostK);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int need = (k + kWarps - 1) / kWarps;
    const uint32_t sorted = warp_sort(top);
    if (lane == need - 1) s.bar[warp] = sorted;
    int& count = s.count[32];
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    const uint32_t lowest = __reduce_min_sync(0xFFFFFFFFu, s.bar[lane % kWarps]);
    const auto keep = [&](Ranked token) {
        const int place = atomicAdd(&count, 1);
        if (place < kMostList) s.list[place] = token;
    };
    each(lowest, keep);
    __syncthreads();
    int n = count;
    if (n <= room) return n;
    if (n <= kMostList) {  // cut to k
        Ranked kept[kMostList / (kWarps * 32)];
        int place[kMostList / (kWarps * 32)];
        pad(s, n);
        for (int i = 0; i < kMostList / (kWarps * 32); i++) {
            const int from = i * kWarps * 32 + static_cast<int>(threadIdx.x);
            kept[i] = from < n ? s.list[from] : 0;
            place[i] = from < n ? better_than(s, n, kept[i]) : k;
        }
        __syncthreads();
        for (int i = 0; i < kMostList / (kWarps * 32); i++) {
            if (place[i] < k) s.list[place[i]] = kept[i];
        }
        __syncthreads();
        return k;
    }
    const Ranked bar = max(kth_best<kWarps>(s, again, k), Ranked{1});
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    again(static_cast<uint32_t>(bar >> 32), [&](Ranked token) {
        if (token >= bar) keep(token);
    });
    __syncthreads();
    n = count;
    return n;
}

// ---- of each part of a row ---------------------------------------------------------------------------------------------

// What a block found in its part of a row; candidates [room] follow elsewhere.
struct Part {
    ExpSum sum;
    int candidates;
};

struct Parts {
    Part* part;         // [rows][parts]
    Ranked* candidate;  // [rows][parts][room]
    int parts, room;
};
__host__ __device__ size_t part_bytes(int rows, int parts) {
    return (static_cast<size_t>(rows) * static_cast<size_t>(parts) * sizeof(Part) + 15) / 16 * 16;
}
__host__ __device__ Parts parts_at(const void* p, int rows, int parts, int room) {
    auto* bytes = static_cast<char*>(const_cast<void*>(p));
    return {reinterpret_cast<Part*>(bytes), reinterpret_cast<Ranked*>(bytes + part_bytes(rows, parts)), parts, room};
}

// Floor: 4 bytes a logit, read once: a block keeps its part in registers.
constexpr int kPartThreads = 512;
constexpr int kPartWarps = kPartThreads / 32;

template <int kItems>
__global__ void __launch_bounds__(kPartThreads, 2)
    part_kernel(Parts to, const float* logits, int vocab_begin, int vocab_rank, int k, Number n_rows) {
    extern __shared__ __align__(16) unsigned char shared[];
    auto& s = *reinterpret_cast<Narrow*>(shared);
    __shared__ unsigned long long sums[kGroups][kPartWarps];
    __shared__ int groups[kPartWarps];
    wait_for_kernel_before();
    let_next_kernel_start();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, parts = n_rows() * to.parts;
    // A grid of the size of the GPU walks over the parts of as many rows as there are.
    for (int at = blockIdx.x; at < parts; at += gridDim.x) {
        const int r = at / to.parts, begin = at % to.parts * kPartThreads * kItems;
        const int n = min(vocab_rank - begin, kPartThreads * kItems);
        const float* row = logits + static_cast<size_t>(r) * static_cast<size_t>(vocab_rank) + begin;

        float item[kItems];
#pragma unroll
        for (int i = 0; i < kItems; i++) {
            const int j = i * kPartThreads + threadIdx.x;
            item[i] = j < n ? row[j] : kNever;
        }
        float top = kNever;
#pragma unroll
        for (int i = 0; i < kItems; i++) {
            item[i] = known(item[i]);
            top = fmaxf(top, item[i]);
        }
        const int group = warp_largest(group_of(top));
        if (lane == 0) groups[warp] = group;
        const auto each = [&](uint32_t least, auto&& visit) {
            const float bar = least > sortable(kNever) ? logit_of(least) : kNever;
#pragma unroll
            for (int i = 0; i < kItems; i++) {
                const int j = i * kPartThreads + threadIdx.x;
                if (item[i] >= bar && j < n) visit(ranked(item[i], vocab_begin + begin + j));
            }
        };
        const auto again = [&](uint32_t least, auto&& visit) {  // from the cache, so that it needs no registers
#pragma unroll 1
            for (int j = threadIdx.x; j < n; j += kPartThreads) {
                const uint32_t key = sortable(known(row[j]));
                if (key >= least) visit(ranked(key, vocab_begin + begin + j));
            }
        };
        const int candidates =
            narrow<kPartWarps>(s, each, again, static_cast<int>(threadIdx.x) < n ? sortable(top) : 0, k, to.room);

        ExpSum sum;
        clear(sum, warp_largest(groups[lane % kPartWarps]));
#pragma unroll
        for (int i = 0; i < kItems; i++) add_exp(sum, item[i]);
#pragma unroll
        for (int g = 0; g < kGroups; g++) {
            const unsigned long long total = warp_total(sum.part[g]);
            if (lane == 0) sums[g][warp] = total;
        }
        for (int i = threadIdx.x; i < candidates; i += kPartThreads) {
            to.candidate[static_cast<size_t>(at) * static_cast<size_t>(to.room) + i] = s.list[i];
        }
        __syncthreads();
        if (warp < kGroups) {
            const unsigned long long total = warp_total(lane < kPartWarps ? sums[warp][lane] : 0);
            if (lane == 0) to.part[at].sum.part[warp] = total;
        }
        if (threadIdx.x == 0) {
            to.part[at].sum.top = sum.top;
            to.part[at].candidates = candidates;
        }
        __syncthreads();
    }
}

// ---- of a row ----------------------------------------------------------------------------------------------------------

// Floor: what the parts found, some hundred candidates each. One block a row; every rank does all rows, so that there is
// nothing to tell one another afterwards.
constexpr int kMergeThreads = 512;
constexpr int kMostParts = 2048;  // of all ranks together

struct Merge {
    Narrow narrow;
    double log_sum;
    uint16_t candidates[kMostParts];
};

__global__ void __launch_bounds__(kMergeThreads, 2)
    merge_kernel(int32_t* id, float* logprob, const __grid_constant__ Shared from, int ranks, int most_rows, int parts,
                 int room_bits, int k, Number n_rows) {
    extern __shared__ __align__(16) unsigned char shared[];
    auto& s = *reinterpret_cast<Merge*>(shared);
    wait_for_kernel_before();
    let_next_kernel_start();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, all = ranks * parts, rows = n_rows();
    for (int r = blockIdx.x; r < rows; r += gridDim.x) {
        const auto parts_of = [&](int i) {
            return parts_at(from.of_rank[i / parts], most_rows, parts, 1 << room_bits);
        };
        ExpSum sum;
        clear(sum, kNoGroup);
        for (int i = threadIdx.x; i < all; i += kMergeThreads) {
            const Part& part = parts_of(i).part[r * parts + i % parts];
            s.candidates[i] = static_cast<uint16_t>(part.candidates);
        }
        if (warp == kMergeThreads / 32 - 1) {  // meanwhile
            for (int i = lane; i < all; i += 32) add(sum, parts_of(i).part[r * parts + i % parts].sum);
            sum = warp_total(sum);
            if (lane == 0) s.log_sum = log_of(sum);
        }
        __syncthreads();
        // Threads stride over the first candidates of all parts, then the second ones, and so on, so that all have some: the bar is
        // as good as the worst warp's.
        int most = 0;
        for (int i = lane; i < all; i += 32) most = max(most, static_cast<int>(s.candidates[i]));
        most = warp_largest(most);
        const auto each = [&](uint32_t least, auto&& visit) {
            for (int i = threadIdx.x; i < most * all; i += kMergeThreads) {
                const int part = i % all, place = i / all;
                if (place >= s.candidates[part]) continue;
                const Parts p = parts_of(part);
                const Ranked token = p.candidate[(static_cast<size_t>(r * parts + part % parts) << room_bits) + place];
                if (static_cast<uint32_t>(token >> 32) >= least) visit(token);
            }
        };
        Ranked best = 0;
        each(0, [&](Ranked token) { best = max(best, token); });
        const int n = narrow<kMergeThreads / 32>(s.narrow, each, each, static_cast<uint32_t>(best >> 32), k, kMostList);

        pad(s.narrow, n);
        for (int i = threadIdx.x; i < n; i += kMergeThreads) {
            const Ranked token = s.narrow.list[i];
            const int place = better_than(s.narrow, n, token);
            if (place >= k) continue;
            const size_t to = static_cast<size_t>(r) * static_cast<size_t>(k) + place;
            id[to] = id_of(token);
            logprob[to] = log_probability(logit_of(token), s.log_sum);
        }
        __syncthreads();
    }
}

template <int kItems>
void find_parts(const Parts& to, Dev<float> logits, Count n_rows, int k, const Shape& s) {
    const int grid = std::min(to.parts * n_rows.most, 2 * bound().processors);
    launch_as<part_kernel<kItems>, sizeof(Narrow)>({.early = true}, grid, kPartThreads, to, raw(logits), s.vocab_begin,
                                                   s.vocab_rank, k, number(n_rows));
}

}  // namespace

void top_logprobs(Dev<int32_t> id, Dev<float> logprob, Dev<float> logits, Count n_rows, int k, const Shape& s) {
    KD_CHECK(k >= 1 && k <= s.vocab && k <= kMostK);
    const int rows = n_rows.most, ids = most_ids_of_rank(s), processors = bound().processors;
    KD_CHECK(s.vocab_rank <= ids);
    // Few rows: smaller parts, so that there are enough of them for all multiprocessors.
    constexpr int few = 8, many = 16;
    const int large = ceil_div(ids, kPartThreads * many);
    const bool spread = rows * large < 2 * processors;
    const int parts = spread ? ceil_div(ids, kPartThreads * few) : large;
    KD_CHECK(parts * tp() <= kMostParts);
    const int room_bits = k <= 64 ? 8 : 10, room = 1 << room_bits;
    const size_t bytes =
        part_bytes(rows, parts) + static_cast<size_t>(rows) * static_cast<size_t>(parts * room) * sizeof(Ranked);
    const Parts to = parts_at(share_buffer(bytes), rows, parts, room);
    if (spread)
        find_parts<few>(to, logits, n_rows, k, s);
    else
        find_parts<many>(to, logits, n_rows, k, s);
    const Shared all = share_filled(bytes);
    launch_as<merge_kernel, sizeof(Merge)>({.early = tp() == 1}, std::min(rows, 2 * processors), kMergeThreads, raw(id),
                                           raw(logprob), all, tp(), rows, parts, room_bits, k, number(n_rows));
}

}  // namespace kd::ops
