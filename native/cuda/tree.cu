// Trees of builder `heap`, bit for bit: the same nodes in the same order as native/best_first.h.
//
// The best n prefixes of a table are those with the n smallest costs (sums of -log-probability), best first: a prefix costs no
// less than what it is a prefix of, and no less than its elder sibling. So no tree has to be grown, if costs are far enough
// apart that neither the order of sums nor the order among equals matters: they are found under a threshold and sorted by
// counting, all in parallel. A cost is written as that of the spine (the first of every row) down to its depth plus an excess for
// each depth that is not the first of its row, a deviation. A set of deviations stands for the prefixes of every length that has
// them. There are at most log2(n) deviations in one of the best n, for all subsets of them are better.
//   1. an upper bound of the n-th cost from the shortest prefixes of at most one deviation, by a histogram: hardly more than n
//      sets of one deviation have a prefix under it, whatever the table;
//   2. the sets that have one: each is one with a deviation less, and one of one deviation that is deeper. So all pairs of sets
//      are looked at, as many as n * n at most, side by side, and a better bound is had from the prefixes found;
//   3. their prefixes, sorted by the number of better ones.
// What is under a bound is found out in single precision, bounds raised by more than that can be wrong. The order is that of
// integers in units of 2^-42, right to 16 of these; the sums in double err by less. Where two neighbours of the order are closer
// than kClose and not parent and child, or the table is no table of log-probabilities, best first, the tree is grown node by
// node (tree_grow.h).

#include <math_constants.h>

#include <algorithm>
#include <cstdint>

#include "launch.h"
#include "mma.h"
#include "ops.h"
#include "raw.h"
#include "tree_grow.h"

namespace kd::ops {
namespace {

using namespace kd::cuda;

using Cost = unsigned long long;
constexpr unsigned kAll = 0xFFFFFFFFu;
constexpr int kUnit = 42;
constexpr float kMostCost = 64;  // of a tree's last node
constexpr Cost kClose = 64;      // costs that are further apart are in the order of their sums
constexpr int kDepths = 16, kBuckets = 128;
constexpr int kCounts = kBuckets + 4;          // one that nobody reads, for what is in none; a multiple of 16 bytes
constexpr int kDepthBits = 4, kSlotBits = 11;  // of a key, after the cost
static_assert(kDepths >= KD_MAX_DEPTH && kDepths == 1 << kDepthBits);
static_assert(Cost{72} << kUnit >> (64 - kDepthBits - kSlotBits) == 0);

// A cost, finite and not below 0, in units.
__device__ __forceinline__ Cost units_of(float cost) {
    constexpr int one = 150 - kUnit;  // biased exponent of a float whose last digit is a unit
    const uint32_t bits = __float_as_uint(cost) & 0x7FFFFFFFu;
    const int exponent = static_cast<int>(bits >> 23);
    const Cost digits = (bits & 0x7FFFFFu) | (exponent ? 0x800000u : 0u);
    if (exponent >= one) return digits << min(exponent - one, 39);
    return digits >> min(one - exponent, 39);
}

// A set of deviations: the last one, and the set without it.
struct alignas(8) Set {
    float excess;
    uint32_t bits;

    // Depth and rank of a prefix's last node if it ends there; 0, 0: of the spine, which has none.
    __device__ __forceinline__ int depth() const { return static_cast<int>(bits & 0xFF); }
    __device__ __forceinline__ int rank() const { return static_cast<int>(bits >> 8 & 0xFF); }
    __device__ __forceinline__ int without() const { return static_cast<int>(bits >> 16); }
    __device__ __forceinline__ uint32_t last() const { return bits & 0xFFFF; }
};
__device__ __forceinline__ Set set_that_ends(float excess, int depth, int rank) {
    return {excess, static_cast<uint32_t>(rank << 8 | depth)};
}

// kMost: nodes of a tree. kThreads: of a block, kEach: candidates of the table a thread.
template <int kMost_, int kThreads_>
struct Room {
    static constexpr int kMost = kMost_, kThreads = kThreads_;
    static constexpr int kEach = kDepths * kMost / kThreads;
    static constexpr int kSets = kMost <= 64 ? 1024 : 2560, kNodes = kThreads;
    static_assert(kNodes < 1 << kSlotBits && kThreads >= 4 * 32 && kMost % 32 == 0);

    int32_t token[kDepths * kMost];  // [depths][width]
    float first[kDepths], spine[kDepths],
        cheapest[kDepths];  // cheapest: shortest prefix of one deviation, a deeper one
    float most;
    Cost spine_units[kDepths], first_units[kDepths];
    alignas(16) unsigned histogram[2][kCounts];
    Set set[kSets];
    Cost set_units[kSets];
    uint16_t first_slot[kSets];        // of the set's shortest prefix; the longer ones follow
    alignas(16) Cost key[kNodes + 2];  // cost, depth, slot
    uint16_t set_of[kNodes], rank[kNodes];
    Cost sorted[kMost + 1];
    int added[kDepths + 1];  // sets of so many deviations
    int nodes;
};

// The bucket with which there are n, and one more.
__device__ __forceinline__ int bucket_of(const unsigned (&histogram)[kCounts], int n) {
    const int lane = threadIdx.x % 32;
    const uint4 own = reinterpret_cast<const uint4*>(histogram)[lane];
    const unsigned two = own.x + own.y, three = two + own.z;
    unsigned total = three + own.w;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const unsigned left = __shfl_up_sync(kAll, total, step);
        if (lane >= step) total += left;
    }
    const auto most = static_cast<unsigned>(n);
    const unsigned before = total - three - own.w, reached = __ballot_sync(kAll, total >= most);
    const int bucket = 4 * lane + 1 + (before + own.x < most) + (before + two < most) + (before + three < most);
    return __shfl_sync(kAll, bucket, reached ? __ffs(static_cast<int>(reached)) - 1 : 31);
}

// Places for the items of a warp's lanes, of which a lane has kEach: found[j] says which lanes have a j-th one. One atomic sum.
template <int kEach>
__device__ __forceinline__ int place_for(int* count, const unsigned (&found)[kEach]) {
    int total = 0;
#pragma unroll
    for (int j = 0; j < kEach; j++) total += __popc(found[j]);
    int at = 0;
    if (threadIdx.x % 32 == 0 && total) at = atomicAdd(count, total);
    return __shfl_sync(kAll, at, 0);
}
__device__ __forceinline__ int before_lane(unsigned found) { return __popc(found & ((1u << (threadIdx.x % 32)) - 1)); }

// What is added to, cleared before there is a table: nothing but shared memory. By all threads of a block.
template <class R>
__device__ __forceinline__ void clear(R& w) {
    const int thread = threadIdx.x;
    if (thread < kBuckets) w.histogram[0][thread] = w.histogram[1][thread] = 0;
    if (thread <= kDepths) w.added[thread] = 0;
    if (thread == 0) {
        w.nodes = 0;
        w.set[0] = set_that_ends(0, 0, 0);
        w.set_units[0] = 0;
    }
    __syncthreads();
}

// The best n prefixes of a table [depths][width] in rows of table_width to node_token, node_parent; false where it must be grown.
// By all threads of a block, after clear().
template <class R>
__device__ __forceinline__ bool choose(R& w, int32_t* node_token, int32_t* node_parent, const int32_t* token,
                                       const float* logprob, int depths, int width, int table_width, int n) {
    constexpr int kThreads = R::kThreads, kWarps = kThreads / 32, kGroups = kThreads / kDepths;
    const int thread = threadIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int group = threadIdx.x / kDepths, own_depth = threadIdx.x % kDepths;

    // The table; a warp each for the spine and a first bound, the spine in units, and the first deviation of every depth.
    int depth[R::kEach], rank[R::kEach];
    float value[R::kEach], elder[R::kEach];
    int32_t id[R::kEach];
    const float per_width = __fdividef(1, static_cast<float>(width));
    const bool has_row = lane < depths;
    const float first = warp < 3 && has_row ? logprob[lane * table_width] : 0;
    // The n - depth best of a row and what they hang on are under the last one's cost.
    const int last = warp == 2 ? 1 : n - 1 - lane;
    const bool enough = warp < 3 && has_row && last >= 0 && last < width;
    const float of_last = enough ? logprob[lane * table_width + last] : -CUDART_INF_F;
#pragma unroll
    for (int j = 0; j < R::kEach; j++) {
        const int i = thread + j * kThreads;
        depth[j] = static_cast<int>((static_cast<float>(i) + 0.5f) * per_width);
        rank[j] = i - depth[j] * width;
        const int at = depth[j] * table_width + rank[j];
        const bool there = depth[j] < depths;
        value[j] = there ? logprob[at] : -CUDART_INF_F;
        elder[j] = there && lane == 0 && rank[j] > 0 ? logprob[at - 1] : CUDART_INF_F;
        id[j] = there ? token[at] : 0;
        depth[j] = min(depth[j], kDepths - 1);
    }
    bool unsure = !(first <= 0);
    if (warp == 0) {
        float spine = -first;
#pragma unroll
        for (int step = 1; step < kDepths; step *= 2) {
            const float left = __shfl_up_sync(kAll, spine, step);
            if (lane >= step) spine += left;
        }
        const float all = enough ? first - of_last + spine : CUDART_INF_F;
        const unsigned most = __reduce_min_sync(kAll, __float_as_uint(fmaxf(all, 1e-30f)));
        if (lane == 0) w.most = __uint_as_float(most);
        if (lane < kDepths) {
            w.first[lane] = first;
            w.spine[lane] = has_row ? spine : CUDART_INF_F;
        }
    } else if (warp == 1) {
        const Cost own = has_row && first > -kMostCost ? units_of(first) : 0;
        Cost sum = own;
#pragma unroll
        for (int step = 1; step < kDepths; step *= 2) {
            const Cost left = __shfl_up_sync(kAll, sum, step);
            if (lane >= step) sum += left;
        }
        if (lane < kDepths) {
            w.spine_units[lane] = sum;
            w.first_units[lane] = own;
        }
    }
    __syncthreads();

    // The shortest prefixes of at most one deviation are counted.
    const float most = w.most;
    float per_bucket = __fdividef(kBuckets - 1, most);
    float excess[R::kEach], cost[R::kEach];  // cost: of the shortest prefix
    unsigned bucket[R::kEach];
#pragma unroll
    for (int j = 0; j < R::kEach; j++) {
        float left = __shfl_up_sync(kAll, value[j], 1);
        if (lane == 0) left = elder[j];
        unsure |= rank[j] > 0 && !(left >= value[j]);
        excess[j] = w.first[depth[j]] - value[j];
        cost[j] = excess[j] + w.spine[depth[j]];
        // An index whatever the table: whether it is one is not known yet.
        bucket[j] = cost[j] <= most ? min(__float2uint_rz(cost[j] * per_bucket), kBuckets - 1u) : kBuckets;
    }
#pragma unroll
    for (int j = 0; j < R::kEach; j++) {
        const int i = thread + j * kThreads;
        if (i < depths * width) w.token[i] = id[j];
        atomicAdd(&w.histogram[0][bucket[j]], 1u);
    }
    if (warp == 2) {
        float after = has_row ? first - of_last + w.spine[lane] : CUDART_INF_F;
        after = __shfl_down_sync(kAll, after, 1);
#pragma unroll
        for (int step = 1; step < kDepths; step *= 2) after = fminf(after, __shfl_down_sync(kAll, after, step));
        if (lane < kDepths) w.cheapest[lane] = after;
    }
    // All below takes costs to be no less than 0 and rows to be in order.
    if (__syncthreads_or(unsure)) return false;
    if (!(most < kMostCost)) return false;

    // More than what single precision and __fdividef can be wrong by.
    const auto bound = [&](const unsigned (&histogram)[kCounts], float top) {
        return min(static_cast<float>(bucket_of(histogram, n)) * (top * (1.0f / (kBuckets - 1))), top) *
                   (1 + 0x1p-15f) +
               0x1p-30f;
    };
    const float top = bound(w.histogram[0], most);

    // Sets of one deviation, no more than n and those of a bucket.
    unsigned found[R::kEach];
#pragma unroll
    for (int j = 0; j < R::kEach; j++) found[j] = __ballot_sync(kAll, rank[j] > 0 && cost[j] <= top);
    int at = 1 + place_for(&w.added[1], found);
#pragma unroll
    for (int j = 0; j < R::kEach; j++) {
        const int place = at + before_lane(found[j]);
        if (found[j] >> lane & 1 && place < R::kSets) {
            w.set[place] = set_that_ends(excess[j], depth[j], rank[j]);
            w.set_units[place] = units_of(value[j]) - w.first_units[depth[j]];
        }
        at += __popc(found[j]);
    }
    per_bucket = __fdividef(kBuckets - 1, top);
    const float own_spine = w.spine[own_depth];
    __syncthreads();
    const int singles = 1 + w.added[1];
    if (singles > R::kSets) return false;

    // All prefixes of sets are counted, by pairs of a set and a depth.
    constexpr int kAtOnce = 4;
    const auto count = [&](int from, int to) {
#pragma unroll 1
        for (; from < to; from += kAtOnce * kGroups) {
            int bucket[kAtOnce];  // all are read before one is added to
#pragma unroll
            for (int j = 0; j < kAtOnce; j++) {
                const int m = from + j * kGroups + group;
                const Set set = w.set[min(m, to - 1)];
                const float under = set.excess + own_spine;
                const bool counts = m < to && own_depth >= set.depth() && under <= top;
                bucket[j] = counts ? static_cast<int>(under * per_bucket) : kBuckets;
            }
#pragma unroll
            for (int j = 0; j < kAtOnce; j++) atomicAdd(&w.histogram[1][bucket[j]], 1u);
        }
    };
    count(0, singles);
    float limit = top;
    if constexpr (R::kMost > 64) {  // a better bound, where it saves more than it costs
        __syncthreads();
        limit = min(limit, bound(w.histogram[1], top));
    }

    // Of one more: pairs of a set and one of one deviation, deeper. A warp has 32 of these, a lane each, and every so many sets.
    constexpr int kColumns = R::kMost / 32, kRows = kWarps / kColumns;
    int begin = 1, end = singles;
    for (int level = 2; begin < end; level++) {
        for (int from = begin + warp / kColumns; from < end; from += 32 * kRows) {
            const int own = from + lane * kRows;
            const bool may = own < end && w.set[own].excess + w.cheapest[w.set[own].depth()] <= limit;
            const unsigned which = __ballot_sync(kAll, may);
            for (int other = 1 + warp % kColumns * 32 + lane; other < singles; other += 32 * kColumns) {
                const Set single = w.set[other];
                const float single_spine = w.spine[single.depth()];
                unsigned pairs = 0;
                for (unsigned left = which; left; left &= left - 1) {
                    const int i = __ffs(static_cast<int>(left)) - 1;
                    const Set set = w.set[from + i * kRows];
                    if (set.depth() < single.depth() && set.excess + single.excess + single_spine <= limit)
                        pairs |= 1u << i;
                }
                if (!pairs) continue;
                int place = end + atomicAdd(&w.added[level], __popc(pairs));
                for (; pairs && place < R::kSets; pairs &= pairs - 1, place++) {
                    const int m = from + (__ffs(static_cast<int>(pairs)) - 1) * kRows;
                    w.set[place] = {w.set[m].excess + single.excess, static_cast<uint32_t>(m) << 16 | single.last()};
                    w.set_units[place] = w.set_units[m] + w.set_units[other];
                }
            }
        }
        __syncthreads();
        begin = end;
        end += w.added[level];
        if (end > R::kSets) return false;
        if (level > 2 && (R::kMost <= 64 || begin == end)) continue;
        if (begin < end) {
            count(begin, end);
            __syncthreads();
        }
        limit = min(limit, bound(w.histogram[1], top));
    }

    // Their prefixes.
    const Cost own_units = w.spine_units[own_depth];
#pragma unroll 1
    for (int from = 0; from < end; from += kAtOnce * kGroups) {
        unsigned there[kAtOnce];
        int first_depth[kAtOnce];
        Cost units[kAtOnce];
#pragma unroll
        for (int j = 0; j < kAtOnce; j++) {
            const int m = from + j * kGroups + group;
            const Set set = w.set[min(m, end - 1)];
            first_depth[j] = set.depth();
            units[j] = w.set_units[min(m, end - 1)] + own_units;
            there[j] = __ballot_sync(kAll, m < end && own_depth >= set.depth() && set.excess + own_spine <= limit);
        }
        int slot = place_for(&w.nodes, there);
#pragma unroll
        for (int j = 0; j < kAtOnce; j++) {
            const int own = slot + before_lane(there[j]), m = from + j * kGroups + group;
            if (there[j] >> lane & 1 && own < R::kNodes) {
                w.key[own] = (units[j] << kDepthBits | static_cast<unsigned>(own_depth)) << kSlotBits |
                             static_cast<unsigned>(own);
                w.set_of[own] = static_cast<uint16_t>(m);
                if (own_depth == first_depth[j]) w.first_slot[m] = static_cast<uint16_t>(own);
            }
            slot += __popc(there[j]);
        }
    }
    __syncthreads();
    const int nodes = w.nodes;
    if (nodes > R::kNodes || nodes < n) return false;

    // Their order. Several threads count for one where there are threads enough; the first of them has the node.
    int shift = 0;
    while (shift < 3 && nodes << (shift + 1) <= kThreads) shift++;
    const int slot = thread >> shift, parts = 1 << shift, part = thread & (parts - 1);
    Cost own = 0;
    int d = 0, of_token = 0, above = 0;  // above: the slot of what it hangs on
    if (slot < nodes) {
        own = w.key[slot];
        d = static_cast<int>(own >> kSlotBits) & (kDepths - 1);
        const Set set = w.set[w.set_of[slot]];
        const bool deviates = d == set.depth() && set.rank() > 0;
        of_token = d * width + (deviates ? set.rank() : 0);
        above = deviates ? w.first_slot[set.without()] + d - 1 - w.set[set.without()].depth() : slot - 1;
    }
    int better = 0;
#pragma unroll 4
    for (int other = part; other < nodes / 2; other += parts) {
        const ulonglong2 two = *reinterpret_cast<const ulonglong2*>(&w.key[2 * other]);
        better += (two.x < own) + (two.y < own);
    }
    if (nodes % 2 && part == 0) better += w.key[nodes - 1] < own;
    for (int step = parts / 2; step; step /= 2) better += __shfl_xor_sync(kAll, better, step);
    const bool has_node = slot < nodes && part == 0;
    if (has_node) {
        w.rank[slot] = static_cast<uint16_t>(better);
        if (better <= n) w.sorted[better] = own;
        if (better < n) node_token[better] = w.token[of_token];
    }
    __syncthreads();
    bool close = false;
    if (has_node && better < n) {
        constexpr int kBits = kDepthBits + kSlotBits;
        const int parent = d > 0 ? w.rank[above] + 1 : 0;
        node_parent[better] = parent;
        if (better > 0) close = (own >> kBits) - (w.sorted[better - 1] >> kBits) <= kClose && parent != better;
        if (better == n - 1 && n < nodes) close |= (w.sorted[n] >> kBits) - (own >> kBits) <= kClose;
    }
    return !__syncthreads_or(close);
}

// Floor: two loads one after the other, some forty steps of a few instructions and a barrier.
template <class R>
__global__ void __launch_bounds__(R::kThreads, 1)
    tree_kernel(int32_t* node_token, int32_t* node_parent, int32_t* nodes, int stride, const int32_t* token,
                const float* logprob, const int32_t* first_row, const int32_t* depths_of, const int32_t* width_of,
                const int32_t* budget_of, Number n_streams, int table_width) {
    extern __shared__ __align__(16) unsigned char shared[];
    auto& room = *reinterpret_cast<R*>(shared);
    const int s = blockIdx.x;
    clear(room);
    wait_for_kernel_before();
    let_next_kernel_start();
    if (s >= n_streams()) return;
    // Volatile: read with the others, not after it is known that there is a table.
    const int row = *static_cast<const volatile int32_t*>(first_row + s);
    const int depths = min(max(depths_of[s], 0), KD_MAX_TABLE_DEPTH);
    const int budget = min(max(budget_of[s], 0), min(stride, KD_MAX_NODES));
    const int width = min(width_of ? min(table_width, width_of[s]) : table_width, budget);
    const size_t first = depths > 0 ? static_cast<size_t>(row) * static_cast<size_t>(table_width) : 0;
    node_token += s * stride;
    node_parent += s * stride;
    token += first;
    logprob += first;
    int n = 0;
    if (depths > 0 && width > 0) {
        n = budget;
        const bool fits = depths <= kDepths && budget <= R::kMost;
        if (!fits || !choose(room, node_token, node_parent, token, logprob, depths, width, table_width, n)) {
            auto& w = *reinterpret_cast<Growth*>(shared);
            __syncthreads();
            fetch<R::kThreads>(w, logprob, depths, width, table_width);
            if (threadIdx.x >= 32) return;
            n = grow(w, depths, width, budget);
            for (int i = threadIdx.x; i < n; i += 32) {
                const uint32_t place = w.taken[i + 1];
                node_token[i] = token[(depth_of(place) - 1) * table_width + rank_of(place)];
                node_parent[i] = parent_of(place);
            }
        }
    }
    if (threadIdx.x == 0) nodes[s] = n;
}

template <class R>
void build(const Nodes& out, Dev<int32_t> token, Dev<float> logprob, const Drafts& drafts, Dev<int32_t> budget,
           Count n_streams, int width) {
    constexpr int bytes = static_cast<int>(std::max(sizeof(R), growth_bytes(R::kMost)));
    launch_as<tree_kernel<R>, bytes>({.early = true}, static_cast<unsigned>(n_streams.most), R::kThreads,
                                     raw(out.token), raw(out.parent), raw(out.n), out.stride, raw(token), raw(logprob),
                                     raw(drafts.row), raw(drafts.depths), raw(drafts.width), raw(budget),
                                     number(n_streams), width);
}

}  // namespace

void tree_build(const Nodes& out, Dev<int32_t> token, Dev<float> logprob, const Drafts& drafts, Dev<int32_t> budget,
                Count n_streams, int width) {
    // No stream of a round has a budget above the table's width.
    if (width <= 64)
        build<Room<64, 512>>(out, token, logprob, drafts, budget, n_streams, width);
    else
        build<Room<KD_MAX_NODES, 1024>>(out, token, logprob, drafts, budget, n_streams, width);
}

}  // namespace kd::ops
