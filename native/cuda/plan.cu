// The rows of a round, made from the state of its streams, and the state moved on at its end. A few kilobytes: what these
// kernels cost is their launch.

#include <algorithm>

#include "comm.h"
#include "device_context.h"
#include "launch.h"
#include "mma.h"
#include "ops.h"
#include "raw.h"

namespace kd::cuda {
namespace {

constexpr int kPath = KD_MAX_DEPTH + 1;  // rows a round can keep of one stream
constexpr int kThreads = 256;
static_assert(KD_MAX_STREAMS <= kThreads);

// Launched early: the launch costs nothing then; all these kernels read comes from kernels before.
__device__ void follow_kernel_before() {
    let_next_kernel_start();
    wait_for_kernel_before();
}
constexpr Launch kEarly{.early = true};

__device__ uint64_t now_ns() {
    uint64_t ns;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
    return ns;
}

struct RunPtr {
    int32_t* ended;
    const int32_t* allowed;
    uint64_t *marks, most_ns;
    // When the run and this round began, if this is the first kernel of them. By one thread.
    __device__ void begin() const {
        if (marks[1]) return;
        marks[1] = now_ns();
        if (!marks[0]) marks[0] = marks[1];
    }
};

struct StreamsPtr {
    Number n;
    RunPtr run;
    const int32_t *slot, *budget, *stops;
    int32_t *start, *draft_start, *root, *left;
    __device__ bool drafts(int s) const { return budget[s] > 0 && left[s] > 1; }
};

StreamsPtr raw_streams(const Streams& s) {
    const RunPtr run{raw(s.run.ended), raw(s.run.allowed), raw(s.run.marks), s.run.most_ns};
    return {number(s.n),        run,         raw(s.slot), raw(s.budget), raw(s.stops), raw(s.start),
            raw(s.draft_start), raw(s.root), raw(s.left)};
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
    follow_kernel_before();
    const int n = streams.n();
    const int thread = static_cast<int>(threadIdx.x);
    if (thread == 0) streams.run.begin();
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
    follow_kernel_before();
    const int n = streams.n(), s = static_cast<int>(blockIdx.x), j = static_cast<int>(threadIdx.x);
    if (s >= n) return;
    if (s == 0 && j == 0) streams.run.begin();
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
    follow_kernel_before();
    const int n = streams.n(), s = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
    if (s >= n) return;
    if (s == 0 && thread == 0) streams.run.begin();
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

struct EmittedPtr {
    int streams;
    int32_t *n, *token;
    uint64_t* hash;
    float* logprob;
    int32_t *nodes, *draft_start;
    uint64_t* times;
};

struct KeptPtr {
    const int32_t *first_row, *n, *node;
};

struct ChoicePtr {
    const int32_t* token;
    const uint64_t* hash;
    const float* logprob;
};

constexpr int kEndThreads = 1024;
static_assert(kPath <= 32 && kStops == 32);

// By a warp: what stream s is given. Returns the tokens it may still be given.
__device__ int give(const EmittedPtr& out, size_t slot, int s, const StreamsPtr& streams, const KeptPtr& kept,
                    const ChoicePtr& choice) {
    constexpr unsigned kAll = 0xffffffff;
    const int j = static_cast<int>(threadIdx.x) % 32, most = kept.n[s], first = kept.first_row[s];
    const int row = j < most ? first + kept.node[s * kPath + j] : 0;
    const int token = j < most ? choice.token[row] : -1, mine = streams.stops[s * kStops + j];
    bool stop = false;
#pragma unroll
    for (int i = 0; i < kStops; i++) {
        const int one = __shfl_sync(kAll, mine, i);  // by all lanes, whatever they have found
        stop = stop || token == one;
    }
    const unsigned stopping = __ballot_sync(kAll, stop && j < most);
    const int n = stopping ? __ffs(static_cast<int>(stopping)) : most;
    if (j < n) {
        const size_t at = slot * kPath + static_cast<size_t>(j);
        out.token[at] = token;
        out.hash[at] = choice.hash[row];
        out.logprob[at] = choice.logprob[row];
        if (j == n - 1) streams.root[s] = token;
    }
    const int left = stopping ? 0 : streams.left[s] - n;
    __syncwarp();
    if (j == 0) {
        out.n[slot] = n;
        out.nodes[slot] = max(0, kept.first_row[s + 1] - first - 1);
        out.draft_start[slot] = streams.draft_start[s];
        streams.start[s] += n;
        streams.left[s] = left;
    }
    return left;
}

// One block, a warp a stream, so that its last thread knows when all has been written.
// Bytes: some 300 a stream over PCIe; what counts is one trip there and back for `allowed`, asked for first.
// kPeers: ranks that loop side by side. `allowed` and the clock may look otherwise to each, so rank 0 decides whether a round
// follows, and shows that where the ranks meet once more.
template <bool kPeers>
__global__ void __launch_bounds__(kEndThreads)
    end_round_kernel(EmittedPtr out, StreamsPtr streams, KeptPtr kept, ChoicePtr choice,
                     cudaGraphConditionalHandle loop, const __grid_constant__ Peers peers) {
    __shared__ int alive;
    follow_kernel_before();
    const int thread = static_cast<int>(threadIdx.x);
    const RunPtr& run = streams.run;
    const uint64_t round = run.marks[2];
    int allowed = 0;
    if (thread == 0) {
        allowed = *static_cast<const volatile int32_t*>(run.allowed);
        alive = 0;
    }
    __syncthreads();
    int left = 0;
    for (int s = thread / 32; s < streams.n(); s += static_cast<int>(blockDim.x) / 32)
        left |= give(out, round * static_cast<size_t>(out.streams) + static_cast<size_t>(s), s, streams, kept, choice);
    if (thread % 32 == 0 && left) alive = 1;
    __threadfence_system();
    __syncthreads();
    if (!kPeers && thread != 0) return;
    const int ended = static_cast<int>(round) + 1;
    const uint64_t began = run.marks[1], now = now_ns();
    bool again = loop && alive && ended < kRunRounds && ended < allowed &&
                 (run.most_ns == 0 || now - run.marks[0] < run.most_ns);
    if constexpr (kPeers) {
        const uint32_t turn = peers.next_turn();
        if (thread == 0 && peers.rank == 0) peers.box[0]->again = again;
        const bool here = meet(peers, turn);
        if (thread != 0) return;
        again = here && *static_cast<const volatile uint32_t*>(&peers.box[0]->again);
        ended_here(peers, turn);
    }
    if (loop) cudaGraphSetConditional(loop, again);
    run.marks[1] = 0;
    run.marks[2] = round + 1;
    *static_cast<volatile int32_t*>(run.ended) = ended + (again ? 0 : kRunOver);
    out.times[2 * round] = began;
    out.times[2 * round + 1] = now;
}

}  // namespace
}  // namespace kd::cuda

namespace kd::ops {

using namespace kd::cuda;

void plan_context(const View& v, Dev<int32_t> counts, Dev<int32_t> ring_row, const Streams& streams, int ring_rows) {
    launch_as<plan_context_kernel>(kEarly, 1, kThreads, rows_out(v), raw(counts), raw(ring_row), raw_streams(streams),
                                   ring_rows);
}

void plan_draft(const View& v, Dev<int32_t> counts, const Drafts& drafts, const Streams& streams, const DraftShape& d,
                const Shape& s) {
    launch_as<plan_draft_kernel>(kEarly, streams.n.most, kThreads, rows_out(v), raw(counts), raw(drafts.row),
                                 raw(drafts.depths), raw_streams(streams), d.block,
                                 std::min(d.depth(), int{KD_MAX_DEPTH}), d.mask_token, s.max_positions);
}

void plan_verify(const View& v, Dev<int32_t> counts, const Trees& trees, const Nodes& nodes, const Streams& streams) {
    launch_as<plan_verify_kernel>(kEarly, streams.n.most, kThreads, rows_out(v), raw(counts), raw(trees.first_row),
                                  raw(trees.parent), raw(nodes.n), raw(nodes.token), raw(nodes.parent), nodes.stride,
                                  raw_streams(streams));
}

void end_round(const Emitted& out, const Streams& streams, const Trees& trees, const Accepted& kept,
               const Choice& choice) {
    const EmittedPtr emitted{out.streams,      raw(out.n),     raw(out.token),       raw(out.hash),
                             raw(out.logprob), raw(out.nodes), raw(out.draft_start), raw(out.times)};
    const cudaGraphConditionalHandle loop = bound().loop;
    const auto go = [&]<bool kPeers>(const Peers& peers) {
        launch_as<end_round_kernel<kPeers>>(
            kEarly, 1, std::min(kEndThreads, 32 * streams.n.most), emitted, raw_streams(streams),
            KeptPtr{raw(trees.first_row), raw(kept.n), raw(kept.node)},
            ChoicePtr{raw(choice.token), raw(choice.hash), raw(choice.logprob)}, loop, peers);
    };
    loop&& tp() > 1 ? go.operator()<true>(peers(0)) : go.operator()<false>({});
}

}  // namespace kd::ops
