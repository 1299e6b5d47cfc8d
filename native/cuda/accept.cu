// The end of a round: which rows the target itself would have walked, and moving what they left behind to the front.

#include <algorithm>

#include "error.h"
#include "launch.h"
#include "mma.h"
#include "ops.h"
#include "raw.h"

namespace kd::ops {
namespace {

using namespace kd::cuda;

constexpr int kPath = KD_MAX_DEPTH + 1;

struct TreesPtr {
    const int32_t *first_row, *parent;
};
TreesPtr raw(const Trees& t) { return {kd::raw(t.first_row), kd::raw(t.parent)}; }

struct AcceptedPtr {
    int32_t *n, *node;
};
AcceptedPtr raw(const Accepted& a) { return {kd::raw(a.n), kd::raw(a.node)}; }

// Floor: 12 bytes a row, that is nothing; it is two loads one after the other, and a walk of at most sixteen steps in shared
// memory. One block a stream; every node looks whether its parent's row chose it.
constexpr int kAcceptThreads = 256;

__global__ void __launch_bounds__(kAcceptThreads)
    accept_kernel(AcceptedPtr out, TreesPtr trees, const int32_t* choice, const int32_t* tokens, Number n_streams) {
    __shared__ int next[KD_MAX_NODES + 1];  // the first child that its parent chose
    wait_for_kernel_before();
    let_next_kernel_start();
    const int s = blockIdx.x;
    if (s >= n_streams()) return;
    const int first = trees.first_row[s], n = trees.first_row[s + 1] - first;
    for (int i = threadIdx.x; i <= KD_MAX_NODES; i += kAcceptThreads) next[i] = n;
    __syncthreads();
    for (int i = 1 + threadIdx.x; i < n; i += kAcceptThreads) {
        const int parent = trees.parent[first + i];
        if (tokens[first + i] == choice[first + parent]) atomicMin(&next[parent], i);
    }
    __syncthreads();
    if (threadIdx.x >= 32) return;
    int at = 0, kept = 0, mine = -1;
    if (n > 0) {
        do {
            if (static_cast<int>(threadIdx.x) == kept) mine = at;
            kept++;
            at = next[at];
        } while (at < n && kept < kPath);
    }
    if (threadIdx.x < kPath) out.node[s * kPath + static_cast<int>(threadIdx.x)] = mine;
    if (threadIdx.x == 0) out.n[s] = kept;
}

// Where a stream's tree is.
struct Round {
    int first, kept;
    int stream, prefix, position;  // of the root

    __device__ Round(const AcceptedPtr& a, const TreesPtr& t, const ViewPtr& v, int s)
        : first(t.first_row[s]), kept(a.n[s]), stream(0), prefix(0), position(0) {
        if (kept == 0) return;
        stream = v.stream[first];
        prefix = v.prefix[first];
        position = v.position[first];
    }
};

// Floor: 4 width bytes of each kept row and layer, that is nothing: it is four loads one after the other. A thread owns a column of a
// layer. Kept nodes ascend and node[j] >= j, so a row is read before it is moved over, and some rows at a time need no barrier.
constexpr int kCommitThreads = 256, kMostPools = 128, kCommitRows = 8;

struct Pools {
    bf16* p[kMostPools];
    int stride;
};

template <class Piece>
__global__ void __launch_bounds__(kCommitThreads) commit_kernel(const __grid_constant__ Pools pools, AcceptedPtr kept,
                                                                TreesPtr trees, ViewPtr v, int layers, int pieces) {
    wait_for_kernel_before();
    let_next_kernel_start();
    const int s = blockIdx.y;
    if (s >= v.n_streams()) return;
    const Round round(kept, trees, v, s);
    __shared__ int from[kPath], to[kPath];
    bool moves = false;
    if (static_cast<int>(threadIdx.x) < round.kept) {
        const int j = threadIdx.x, node = kept.node[s * kPath + j];
        moves = node != j;
        from[j] = v.pool_row(round.stream, round.prefix + node);
        to[j] = v.pool_row(round.stream, round.prefix + j);
    }
    if (!__syncthreads_or(moves)) return;
    const int i = blockIdx.x * kCommitThreads + threadIdx.x, layer = i / pieces, column = i % pieces;
    if (layer >= layers) return;
    bf16* const pool = pools.p[layer];
    const auto at = [=](int row) {
        return reinterpret_cast<Piece*>(pool + static_cast<size_t>(row) * static_cast<size_t>(pools.stride)) + column;
    };
    for (int first = 1; first < round.kept; first += kCommitRows) {
        Piece piece[kCommitRows];
#pragma unroll
        for (int j = 0; j < kCommitRows; j++) {
            if (first + j < round.kept) piece[j] = *at(from[first + j]);
        }
#pragma unroll
        for (int j = 0; j < kCommitRows; j++) {
            if (first + j < round.kept) *at(to[first + j]) = piece[j];
        }
    }
}

// Floor: 4 width bytes of each kept row. The rows of a ring are distinct: a block has a stretch of columns of every
// kTapRows-th row of a stream.
constexpr int kTapThreads = 256;
constexpr int kTapPieces = 4;  // of a thread
constexpr int kTapRows = 6;    // more are seldom kept

template <class Piece>
__global__ void __launch_bounds__(kTapThreads)
    taps_kernel(RowsPtr ring, RowsPtr taps, const int32_t* ring_slot, AcceptedPtr kept, TreesPtr trees, ViewPtr v,
                int ring_rows, int pieces) {
    wait_for_kernel_before();
    let_next_kernel_start();
    const int s = blockIdx.z;
    if (s >= v.n_streams() || static_cast<int>(blockIdx.y) >= kept.n[s]) return;
    const Round round(kept, trees, v, s);
    const int begin = blockIdx.x * kTapThreads * kTapPieces + threadIdx.x;
    for (int j = blockIdx.y; j < round.kept; j += kTapRows) {
        const auto* from = reinterpret_cast<const Piece*>(taps[round.first + kept.node[s * kPath + j]]);
        auto* to =
            reinterpret_cast<Piece*>(ring[ring_slot[round.stream] * ring_rows + (round.position + j) % ring_rows]);
        Piece piece[kTapPieces];
#pragma unroll
        for (int i = 0; i < kTapPieces; i++) {
            if (begin + i * kTapThreads < pieces) piece[i] = from[begin + i * kTapThreads];
        }
#pragma unroll
        for (int i = 0; i < kTapPieces; i++) {
            if (begin + i * kTapThreads < pieces) to[begin + i * kTapThreads] = piece[i];
        }
    }
}

template <class Piece>
void keep(RowsPtr ring, RowsPtr taps, const int32_t* ring_slot, const AcceptedPtr& kept, const TreesPtr& trees,
          const View& v, int ring_rows, int pieces) {
    const dim3 grid(ceil_div(pieces, kTapThreads * kTapPieces), kTapRows, v.n_streams.most);
    launch_as<taps_kernel<Piece>>({.early = true}, grid, kTapThreads, ring, taps, ring_slot, kept, trees, cuda::raw(v),
                                  ring_rows, pieces);
}

}  // namespace

void tree_accept(const Accepted& out, const Trees& trees, const Choice& choice, const View& v) {
    launch_as<accept_kernel>({.early = true}, v.n_streams.most, kAcceptThreads, raw(out), raw(trees),
                             kd::raw(choice.token), kd::raw(v.token), number(v.n_streams));
}

// A node's depth is its final offset, and its key was rotated for that depth when it was written, so moving needs no
// rotation.
void kv_commit(std::span<const Rows> kv, const Accepted& kept, const Trees& trees, const View& v, int width) {
    for (size_t first = 0; first < kv.size(); first += kMostPools) {
        const auto some = kv.subspan(first, std::min<size_t>(kMostPools, kv.size() - first));
        Pools pools{};
        pools.stride = some[0].stride;
        bool aligned = width % 8 == 0;
        for (size_t i = 0; i < some.size(); i++) {
            KD_CHECK(some[i].stride == pools.stride);
            aligned = aligned && aligned16(some[i]);
            pools.p[i] = cuda::raw(some[i]).p;
        }
        const int layers = static_cast<int>(some.size()), pieces = aligned ? width / 8 : width;
        const dim3 grid(ceil_div(layers * pieces, kCommitThreads), v.n_streams.most);
        if (aligned)
            launch_as<commit_kernel<uint4>>({.early = true}, grid, kCommitThreads, pools, raw(kept), raw(trees),
                                            cuda::raw(v), layers, pieces);
        else
            launch_as<commit_kernel<bf16>>({.early = true}, grid, kCommitThreads, pools, raw(kept), raw(trees),
                                           cuda::raw(v), layers, pieces);
    }
}

void keep_taps(Rows ring, Rows taps, Dev<int32_t> ring_slot, const Accepted& kept, const Trees& trees, const View& v,
               int ring_rows, int width) {
    KD_CHECK(ring_rows > KD_MAX_DEPTH);
    if (aligned16(ring) && aligned16(taps) && width % 8 == 0)
        keep<uint4>(cuda::raw(ring), cuda::raw(taps), kd::raw(ring_slot), raw(kept), raw(trees), v, ring_rows,
                    width / 8);
    else
        keep<bf16>(cuda::raw(ring), cuda::raw(taps), kd::raw(ring_slot), raw(kept), raw(trees), v, ring_rows, width);
}

}  // namespace kd::ops
