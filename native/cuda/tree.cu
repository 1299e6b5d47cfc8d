// Trees of builder `heap`, bit for bit: the same nodes in the same order as native/best_first.h.
//
// The best n prefixes of a table are those with the n smallest costs (sums of -log-probability), best first: a prefix costs no
// less than what it is a prefix of, and no less than its elder sibling. So no tree has to be grown, if costs are far enough
// apart that neither the order of sums nor the order among equals matters: they are found under a threshold and sorted by
// counting, all in parallel. A cost is written as that of the spine (the first of every row) down to its depth plus an excess for
// each depth that is not the first of its row, a deviation. A set of deviations stands for the prefixes of every length that has
// them. There are at most log2(n) deviations in one of the best n, for all subsets of them are better.
//   1. an upper bound of the n-th cost from the prefixes of at most one deviation, by a histogram;
//   2. the sets that have a prefix under it: each is one with a deviation less, and one deeper;
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
struct Set {
    uint8_t depth, rank;  // of a prefix's last node if it ends there; 0, 0: of the spine, which has none
    uint16_t without;
};

// kMost: nodes of a tree. kThreads: of a block, kEach: candidates of the table a thread.
template <int kMost_, int kThreads_>
struct Room {
    static constexpr int kMost = kMost_, kThreads = kThreads_;
    static constexpr int kEach = kDepths * kMost / kThreads;
    static constexpr int kSets = kMost <= 64 ? 1024 : 2560, kNodes = kMost <= 64 ? 512 : 1024;
    static_assert(kNodes < 1 << kSlotBits && kThreads >= kBuckets);

    float cost[kDepths * kMost];  // [depths][width]
    int32_t token[kDepths * kMost];
    float spine[kDepths];
    Cost spine_units[kDepths], first_units[kDepths];  // first: of a row
    alignas(16) unsigned histogram[kBuckets];
    float set_excess[kSets];
    Cost set_units[kSets];
    Set set[kSets];
    uint16_t first_slot[kSets];        // of the set's shortest prefix; the longer ones follow
    alignas(16) Cost key[kNodes + 2];  // cost, depth, slot
    uint16_t set_of[kNodes], rank[kNodes];
    Cost sorted[kMost + 1];
    int added[kDepths + 1];  // sets of so many deviations
    int nodes;
};

// The bucket with which there are n, and one more.
__device__ __forceinline__ int bucket_of(const unsigned (&histogram)[kBuckets], int n) {
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

// The best n prefixes of a table [depths][width] in rows of table_width to node_token, node_parent; false where it must be grown.
// By all threads of a block.
template <class R>
__device__ __forceinline__ bool choose(R& w, int32_t* node_token, int32_t* node_parent, const int32_t* token,
                                       const float* logprob, int depths, int width, int table_width, int n) {
    constexpr int kThreads = R::kThreads, kGroups = kThreads / kDepths;
    const int thread = threadIdx.x, lane = thread % 32, group = thread / kDepths, own_depth = thread % kDepths;

    // The table. Every warp works out the spine for itself.
    int depth[R::kEach], rank[R::kEach];
    float value[R::kEach], elder[R::kEach];
    int32_t id[R::kEach];
    const float per_width = 1.0f / static_cast<float>(width);
    const float first = lane < depths ? logprob[lane * table_width] : 0;
#pragma unroll
    for (int j = 0; j < R::kEach; j++) {
        const int i = thread + j * kThreads;
        depth[j] = static_cast<int>((static_cast<float>(i) + 0.5f) * per_width);
        rank[j] = i - depth[j] * width;
        const int at = depth[j] * table_width + rank[j];
        const bool there = depth[j] < depths;
        value[j] = there ? logprob[at] : -CUDART_INF_F;
        elder[j] = there && lane == 0 && rank[j] > 0 ? logprob[at - 1] : 0;
        id[j] = there ? token[at] : 0;
    }
    if (thread < kBuckets) w.histogram[thread] = 0;
    if (thread <= kDepths) w.added[thread] = 0;
    if (thread == 0) {
        w.nodes = 0;
        w.set_excess[0] = 0;
        w.set_units[0] = 0;
        w.set[0] = {0, 0, 0};
    }
    bool unsure = !(first <= 0);
    float spine = -first;
#pragma unroll
    for (int step = 1; step < kDepths; step *= 2) {
        const float left = __shfl_up_sync(kAll, spine, step);
        if (lane >= step) spine += left;
    }
    if (thread < depths) w.spine[thread] = spine;
    float excess[R::kEach], cost[R::kEach];  // cost: of the shortest prefix
#pragma unroll
    for (int j = 0; j < R::kEach; j++) {
        const float of_first = __shfl_sync(kAll, first, depth[j] % 32),
                    so_far = __shfl_sync(kAll, spine, depth[j] % 32);
        float left = __shfl_up_sync(kAll, value[j], 1);
        if (lane == 0) left = elder[j];
        const bool there = depth[j] < depths;
        unsure |= there && rank[j] > 0 && !(left >= value[j]);
        excess[j] = there ? of_first - value[j] : CUDART_INF_F;
        cost[j] = excess[j] + so_far;
        if (!there) continue;
        w.cost[thread + j * kThreads] = -value[j];
        w.token[thread + j * kThreads] = id[j];
    }
    if (thread / 32 == kThreads / 32 - 1) {  // meanwhile
        const Cost own = lane < depths && first > -kMostCost ? units_of(first) : 0;
        Cost sum = own;
#pragma unroll
        for (int step = 1; step < kDepths; step *= 2) {
            const Cost left = __shfl_up_sync(kAll, sum, step);
            if (lane >= step) sum += left;
        }
        if (lane < depths) {
            w.spine_units[lane] = sum;
            w.first_units[lane] = own;
        }
    }
    // All below takes costs to be no less than 0 and rows to be in order.
    if (__syncthreads_or(unsure)) return false;

    // A first bound: the n - depth best of a row and what they hang on.
    const int last = n - 1 - lane;
    const bool enough = lane < depths && last >= 0 && last < width;
    const float all = enough ? w.cost[lane * width + last] + first + spine : CUDART_INF_F;
    const float most = __uint_as_float(__reduce_min_sync(kAll, __float_as_uint(fmaxf(all, 1e-30f))));
    if (!(most < kMostCost)) return false;
    const float per_bucket = __fdividef(kBuckets - 1, most), of_bucket = most * (1.0f / (kBuckets - 1));

    // Sets of one deviation that have a prefix under it; then all their prefixes are counted, by pairs of a set and a depth.
    unsigned found[R::kEach];
#pragma unroll
    for (int j = 0; j < R::kEach; j++) found[j] = __ballot_sync(kAll, rank[j] > 0 && cost[j] <= most);
    int at = 1 + place_for(&w.added[1], found);
#pragma unroll
    for (int j = 0; j < R::kEach; j++) {
        const int place = at + before_lane(found[j]);
        if (found[j] >> lane & 1 && place < R::kSets) {
            w.set_excess[place] = excess[j];
            w.set_units[place] = units_of(value[j]) - w.first_units[depth[j]];
            w.set[place] = {static_cast<uint8_t>(depth[j]), static_cast<uint8_t>(rank[j]), 0};
        }
        at += __popc(found[j]);
    }
    const float own_spine = own_depth < depths ? w.spine[own_depth] : CUDART_INF_F;
    __syncthreads();
    int begin = 0, end = 1 + w.added[1];
    if (end > R::kSets) return false;
    const auto count = [&] {
        for (int m = begin + group; m < end; m += kGroups) {
            const float under = w.set_excess[m] + own_spine;
            if (own_depth >= w.set[m].depth && under <= most)
                atomicAdd(&w.histogram[static_cast<int>(under * per_bucket)], 1u);
        }
        __syncthreads();
        // More than what single precision and __fdividef can be wrong by.
        return min(static_cast<float>(bucket_of(w.histogram, n)) * of_bucket, most) * (1 + 0x1p-15f) + 0x1p-30f;
    };
    float limit = count();

    // Of one more, by pairs of a set and a depth below its own.
    const float own_first = own_depth < depths ? w.cost[own_depth * width] : 0;
    begin = 1;
    for (int level = 2; begin < end; level++) {
        for (int m = begin + group; m < end; m += kGroups) {
            const float set_excess = w.set_excess[m];
            const auto under = [&](int r) {
                return r < width && set_excess + (w.cost[own_depth * width + r] - own_first) + own_spine <= limit;
            };
            if (own_depth <= w.set[m].depth || !under(1)) continue;
            int more = 1;
            while (under(1 + more)) more++;
            const int place = end + atomicAdd(&w.added[level], more);
            const Cost units = w.set_units[m] - w.first_units[own_depth];
            for (int i = 0; i < more && place + i < R::kSets; i++) {
                const float cost = w.cost[own_depth * width + 1 + i];
                w.set_excess[place + i] = set_excess + (cost - own_first);
                w.set_units[place + i] = units + units_of(cost);
                w.set[place + i] = {static_cast<uint8_t>(own_depth), static_cast<uint8_t>(1 + i),
                                    static_cast<uint16_t>(m)};
            }
        }
        __syncthreads();
        begin = end;
        end += w.added[level];
        if (end > R::kSets) return false;
        // A better bound by them, where it saves more than it costs.
        if (begin < end && (level == 2 || R::kMost > 64)) limit = min(limit, count());
    }

    // Their prefixes.
    constexpr int kAtOnce = 4;
    const Cost own_units = own_depth < depths ? w.spine_units[own_depth] : 0;
    for (int from = 0; from < end; from += kAtOnce * kGroups) {
        unsigned there[kAtOnce];
        int first_depth[kAtOnce];
#pragma unroll
        for (int j = 0; j < kAtOnce; j++) {
            const int m = from + j * kGroups + group;
            const float under = m < end ? w.set_excess[m] + own_spine : CUDART_INF_F;
            first_depth[j] = m < end ? w.set[m].depth : kDepths;
            there[j] = __ballot_sync(kAll, own_depth >= first_depth[j] && under <= limit);
        }
        int slot = place_for(&w.nodes, there);
#pragma unroll
        for (int j = 0; j < kAtOnce; j++) {
            const int own = slot + before_lane(there[j]), m = from + j * kGroups + group;
            if (there[j] >> lane & 1 && own < R::kNodes) {
                const Cost units = w.set_units[m] + own_units;
                w.key[own] =
                    (units << kDepthBits | static_cast<unsigned>(own_depth)) << kSlotBits | static_cast<unsigned>(own);
                w.set_of[own] = static_cast<uint16_t>(m);
                if (own_depth == first_depth[j]) w.first_slot[m] = static_cast<uint16_t>(own);
            }
            slot += __popc(there[j]);
        }
    }
    __syncthreads();
    const int nodes = w.nodes;
    if (nodes > R::kNodes || nodes < n) return false;

    // Their order. Several threads count for one where there are threads enough.
    int parts = 1;
    while (parts < 8 && 2 * parts * nodes <= kThreads) parts *= 2;
    for (int i = thread / parts; i - thread / parts < nodes; i += kThreads / parts) {
        const Cost own = i < nodes ? w.key[i] : 0;
        int better = 0;
#pragma unroll 4
        for (int other = thread % parts; other < nodes / 2; other += parts) {
            const ulonglong2 two = *reinterpret_cast<const ulonglong2*>(&w.key[2 * other]);
            better += (two.x < own) + (two.y < own);
        }
        if (nodes % 2 && thread % parts == 0) better += w.key[nodes - 1] < own;
        for (int step = parts / 2; step; step /= 2) better += __shfl_xor_sync(kAll, better, step);
        if (thread % parts || i >= nodes) continue;
        if (better <= n) w.sorted[better] = own;
        w.rank[i] = static_cast<uint16_t>(better);
    }
    __syncthreads();
    bool close = false;
    for (int i = thread; i < n; i += kThreads) {
        constexpr int kBits = kDepthBits + kSlotBits;
        const Cost own = w.sorted[i];
        const int slot = static_cast<int>(own) & ((1 << kSlotBits) - 1);
        const int d = static_cast<int>(own >> kSlotBits) & (kDepths - 1);
        const Set set = w.set[w.set_of[slot]];
        const bool deviates = d == set.depth && set.rank > 0;
        int parent = 0;
        if (d > 0) {
            const int above = deviates ? w.first_slot[set.without] + d - 1 - w.set[set.without].depth : slot - 1;
            parent = w.rank[above] + 1;
        }
        if (i > 0) close |= (own >> kBits) - (w.sorted[i - 1] >> kBits) <= kClose && parent != i;
        if (i == n - 1 && n < nodes) close |= (w.sorted[n] >> kBits) - (own >> kBits) <= kClose;
        node_token[i] = w.token[d * width + (deviates ? set.rank : 0)];
        node_parent[i] = parent;
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
    const int s = blockIdx.x;
    wait_for_kernel_before();
    let_next_kernel_start();
    if (s >= n_streams()) return;
    const int depths = min(max(depths_of[s], 0), KD_MAX_TABLE_DEPTH);
    const int budget = min(max(budget_of[s], 0), min(stride, KD_MAX_NODES));
    const int width = min(width_of ? min(table_width, width_of[s]) : table_width, budget);
    const size_t first = depths > 0 ? static_cast<size_t>(first_row[s]) * static_cast<size_t>(table_width) : 0;
    node_token += s * stride;
    node_parent += s * stride;
    token += first;
    logprob += first;
    int n = 0;
    if (depths > 0 && width > 0) {
        n = budget;
        const bool fits = depths <= kDepths && budget <= R::kMost;
        auto& room = *reinterpret_cast<R*>(shared);
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
