// The rows of a round, made from the state of its streams, and the state moved on at its end. A few kilobytes: what these
// kernels cost is their launch.

#include <algorithm>

#include "device_context.h"
#include "launch.h"
#include "ops.h"
#include "raw.h"

namespace kd::cuda {
namespace {

constexpr int kPath = KD_MAX_DEPTH + 1;  // rows a round can keep of one stream
constexpr int kThreads = 256;
static_assert(KD_MAX_STREAMS <= kThreads);

struct StreamsPtr {
    Number n;
    const int32_t *slot, *budget;
    int32_t *start, *draft_start, *root, *left;
    __device__ bool drafts(int s) const { return budget[s] > 0 && left[s] > 1; }
};

StreamsPtr raw_streams(const Streams& s) {
    return {number(s.n), raw(s.slot), raw(s.budget), raw(s.start), raw(s.draft_start), raw(s.root), raw(s.left)};
}

// The view's arrays to write.
struct RowsOut {
    int most;
    int32_t *token, *position, *stream, *slot, *prefix, *out_row;
    uint64_t* mask;
    __device__ void put(int row, int s, int at, int slot_, int before) const {
        position[row] = at;
        stream[row] = s;
        slot[row] = slot_;
        prefix[row] = before;
    }
};

RowsOut rows_out(const View& v) {
    return {v.n_rows.most, raw(v.token),  raw(v.position), raw(v.stream),
            raw(v.slot),   raw(v.prefix), raw(v.out_row),  raw(v.mask)};
}

// Sum of value(s) over s < `end`, the same in every thread of the block.
template <class F>
__device__ int sum_before(int end, F value) {
    __shared__ int total;
    if (threadIdx.x == 0) total = 0;
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < end) atomicAdd(&total, value(static_cast<int>(threadIdx.x)));
    __syncthreads();
    const int sum = total;
    __syncthreads();
    return sum;
}

// One block: a stream's place depends on all before it, and draft_start changes.
__global__ void plan_context_kernel(RowsOut v, int32_t* counts, int32_t* ring_row, StreamsPtr streams, int ring_rows) {
    __shared__ int first[KD_MAX_STREAMS + 1], from[KD_MAX_STREAMS];
    const int n = streams.n();
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < n) {
        const int waits = streams.start[thread] - streams.draft_start[thread];
        const bool due = streams.drafts(thread) || waits > ring_rows - kPath;
        from[thread] = streams.draft_start[thread];
        first[thread + 1] = streams.left[thread] > 0 && due ? waits : 0;
    }
    if (thread == 0) first[0] = 0;
    __syncthreads();
    if (thread == 0)
        for (int s = 0; s < n; s++) first[s + 1] = min(v.most, first[s] + first[s + 1]);
    __syncthreads();
    for (int s = 0; s < n; s++) {
        for (int i = thread; i < first[s + 1] - first[s]; i += kThreads) {
            const int row = first[s] + i, position = from[s] + i;
            v.put(row, s, position, position, position);
            ring_row[row] = streams.slot[s] * ring_rows + position % ring_rows;
        }
    }
    if (thread < n) streams.draft_start[thread] = from[thread] + first[thread + 1] - first[thread];
    if (thread == 0) {
        counts[0] = first[n];
        counts[1] = 0;
    }
}

__global__ void plan_draft_kernel(RowsOut v, int32_t* counts, int32_t* table_row, int32_t* depths, StreamsPtr streams,
                                  int block, int depth, int mask_token, int max_positions) {
    const int n = streams.n(), s = static_cast<int>(blockIdx.x), j = static_cast<int>(threadIdx.x);
    if (s >= n) return;
    const auto ready = [&](int i) { return streams.drafts(i) && streams.draft_start[i] == streams.start[i]; };
    const int before = sum_before(s, [&](int i) { return ready(i) ? 1 : 0; });
    const bool mine = ready(s);
    const int first = before * block, table = before * depth;
    for (int i = j; mine && i < block; i += kThreads) {
        const int position = min(streams.start[s] + i, max_positions - 1), row = first + i;
        v.put(row, s, position, position, streams.start[s]);
        v.token[row] = i == 0 ? streams.root[s] : mask_token;
        if (i >= 1 && i <= depth) v.out_row[table + i - 1] = row;
    }
    if (j != 0) return;
    table_row[s] = table;
    depths[s] = mine ? min(depth, streams.left[s] - 1) : 0;
    if (s != n - 1) return;
    counts[0] = first + (mine ? block : 0);
    counts[1] = table + (mine ? depth : 0);
}

// A block a stream; a thread walks up from its node, at most KD_MAX_DEPTH steps.
__global__ void plan_verify_kernel(RowsOut v, int32_t* counts, int32_t* first_row, int32_t* row_parent,
                                   const int32_t* nodes, const int32_t* node_token, const int32_t* node_parent,
                                   int stride, StreamsPtr streams) {
    __shared__ int16_t up[KD_MAX_NODES + 1];
    const int n = streams.n(), s = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
    if (s >= n) return;
    const auto rows_of = [&](int i) { return streams.left[i] > 0 ? nodes[i] + 1 : 0; };
    const int first = sum_before(s, rows_of), rows = rows_of(s), start = streams.start[s];
    const size_t at = static_cast<size_t>(s) * static_cast<size_t>(stride);
    for (int i = thread; i < rows; i += kThreads) up[i] = static_cast<int16_t>(i ? node_parent[at + i - 1] : -1);
    __syncthreads();
    for (int i = thread; i < rows; i += kThreads) {
        const int row = first + i;
        uint64_t mask[kMaskWords] = {};
        int depth = -1;
        for (int node = i; node >= 0; node = up[node]) {
#pragma unroll
            for (int w = 0; w < kMaskWords; w++)
                if (node / 64 == w) mask[w] |= uint64_t{1} << (node % 64);
            depth++;
        }
        v.put(row, s, start + depth, start + i, start);
        v.token[row] = i ? node_token[at + i - 1] : streams.root[s];
        v.out_row[row] = row;
        row_parent[row] = up[i];
#pragma unroll
        for (int w = 0; w < kMaskWords; w++) v.mask[static_cast<size_t>(row) * kMaskWords + w] = mask[w];
    }
    if (thread != 0) return;
    first_row[s] = first;
    if (s != n - 1) return;
    first_row[n] = first + rows;
    counts[0] = counts[1] = first + rows;
}

// A warp a stream.
__global__ void end_round_kernel(int32_t* out_n, int32_t* out_nodes, int32_t* token, uint64_t* hash, float* logprob,
                                 StreamsPtr streams, const int32_t* first_row, const int32_t* kept, const int32_t* node,
                                 const int32_t* chosen, const uint64_t* chosen_hash, const float* chosen_logprob) {
    const int s = static_cast<int>(blockIdx.x), j = static_cast<int>(threadIdx.x);
    if (s >= streams.n()) return;
    const int n = kept[s], first = first_row[s];
    const size_t at = static_cast<size_t>(s) * kPath + j;
    if (j < n) {
        const int row = first + node[at];
        token[at] = chosen[row];
        hash[at] = chosen_hash[row];
        logprob[at] = chosen_logprob[row];
        if (j == n - 1) streams.root[s] = chosen[row];
    }
    if (j != 0) return;
    out_n[s] = n;
    out_nodes[s] = max(0, first_row[s + 1] - first - 1);
    streams.start[s] += n;
    streams.left[s] -= n;
}

}  // namespace
}  // namespace kd::cuda

namespace kd::ops {

using namespace kd::cuda;

void plan_context(const View& v, Dev<int32_t> counts, Dev<int32_t> ring_row, const Streams& streams, int ring_rows) {
    launch<plan_context_kernel>(1, kThreads, rows_out(v), raw(counts), raw(ring_row), raw_streams(streams), ring_rows);
}

void plan_draft(const View& v, Dev<int32_t> counts, const Drafts& drafts, const Streams& streams, const DraftShape& d,
                const Shape& s) {
    launch<plan_draft_kernel>(streams.n.most, kThreads, rows_out(v), raw(counts), raw(drafts.row), raw(drafts.depths),
                              raw_streams(streams), d.block, std::min(d.depth(), int{KD_MAX_DEPTH}), d.mask_token,
                              s.max_positions);
}

void plan_verify(const View& v, Dev<int32_t> counts, const Trees& trees, const Nodes& nodes, const Streams& streams) {
    launch<plan_verify_kernel>(streams.n.most, kThreads, rows_out(v), raw(counts), raw(trees.first_row),
                               raw(trees.parent), raw(nodes.n), raw(nodes.token), raw(nodes.parent), nodes.stride,
                               raw_streams(streams));
}

void end_round(const Emitted& out, const Streams& streams, const Trees& trees, const Accepted& kept,
               const Choice& choice) {
    static_assert(kPath <= 32);
    launch<end_round_kernel>(streams.n.most, 32, raw(out.n), raw(out.nodes), raw(out.token), raw(out.hash),
                             raw(out.logprob), raw_streams(streams), raw(trees.first_row), raw(kept.n), raw(kept.node),
                             raw(choice.token), raw(choice.hash), raw(choice.logprob));
}

}  // namespace kd::ops
