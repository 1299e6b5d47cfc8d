// Which pairs (row, slot) go to which expert, found on the device. Pair p is slot p % slots of row p / slots.
#pragma once

#include "mma.h"
#include "raw.h"

namespace kd::cuda {

// Some pairs of one expert: first .. first + n - 1 of the order.
struct Chunk {
    int expert, first, n;
};

// Pairs in order of experts, then of pairs. A pair whose expert is none of 0 .. experts - 1 is left out.
struct Lists {
    int32_t* n_chunks;
    Chunk* chunk;       // [n_chunks], every expert that has pairs, in order
    int32_t* pair;      // [pairs], in this order
    int32_t* chunk_of;  // [pairs]: of each pair, or -1
};

constexpr int most_chunks(int pairs, int experts, int chunk_pairs) {
    const int all = experts + pairs / chunk_pairs;
    return pairs < all ? pairs : all;
}

// Launches what fills them, in scratch memory of Use::moe_lists; chunks are of at most chunk_pairs pairs, 8 or 16.
Lists list_pairs(const int32_t* expert, Number n_rows, int slots, int experts, int chunk_pairs);

// Shared memory to sort in.
template <int kWarps, int kExperts>
struct SortRoom {
    uint16_t count[kWarps][kExperts];
    int first_pair[kExperts], first_chunk[kExperts];
    int warp_pairs[kWarps], warp_chunks[kWarps];
};

template <int kWarps, int kExperts>
__device__ __forceinline__ void clear(SortRoom<kWarps, kExperts>& room) {
    for (int i = threadIdx.x; i < kWarps * kExperts / 8; i += kWarps * kWarp)
        reinterpret_cast<uint4*>(room.count)[i] = {};
}

// At most as many pairs as a warp has lanes, by a warp alone: the same lists.
template <int kChunkPairs, class Index>
__device__ __forceinline__ void sort_few_pairs(const Lists& to, Index* chunk_of, const int32_t* expert, int pairs,
                                               int experts) {
    constexpr unsigned kAll = 0xffffffffu;
    const int lane = threadIdx.x % kWarp;
    int e = lane < pairs ? expert[lane] : experts;
    if (e < 0 || e > experts) e = experts;
    const unsigned same = __match_any_sync(kAll, e);
    const int n = __popc(same), rank = __popc(same & ((1u << lane) - 1));
    const int n_chunks = e < experts && rank == 0 ? (n + kChunkPairs - 1) / kChunkPairs : 0;
    int first = 0, chunk = 0, all = 0;
#pragma unroll 8
    for (int i = 0; i < pairs; i++) {
        const int other = __shfl_sync(kAll, e, i), chunks = __shfl_sync(kAll, n_chunks, i);
        first += other < e;
        chunk += other < e ? chunks : 0;
        all += chunks;
    }
    if (lane == 0) *to.n_chunks = all;
    if (lane >= pairs) return;
    chunk_of[lane] = static_cast<Index>(e < experts ? chunk + rank / kChunkPairs : -1);
    if (e == experts) return;
    to.pair[first + rank] = lane;
    if (rank % kChunkPairs == 0) to.chunk[chunk + rank / kChunkPairs] = {e, first + rank, min(kChunkPairs, n - rank)};
}

// By the first kWarps warps of a block; others come along, for all meet. (A barrier of the first alone would do, but the
// sanitizer's racecheck takes who was not at it for lagging behind, and its synccheck wants all at the same place.) Every warp
// counts the experts of its own stretch of pairs; sums over warps, then over experts, say where each stretch begins in each
// expert's list; then every warp goes over its stretch again and puts the pairs there. The room has been cleared. Other threads see
// the result after one more barrier. chunk_of is where it goes instead of to.chunk_of, in integers that a caller chooses.
template <int kChunkPairs, class Index, int kWarps, int kExperts>
__device__ void sort_pairs(const Lists& to, Index* chunk_of, SortRoom<kWarps, kExperts>& room, const int32_t* expert,
                           int pairs, int experts) {
    constexpr int kThreads = kWarps * kWarp;
    constexpr unsigned kAll = 0xffffffffu;
    const int thread = threadIdx.x, warp = thread / kWarp, lane = thread % kWarp;
    const bool sorts = warp < kWarps;
    const unsigned before = (1u << lane) - 1;
    const int share = (pairs + kThreads - 1) / kThreads * kWarp, begin = sorts ? min(pairs, warp * share) : pairs;
    const int end = min(pairs, begin + share), warps = pairs > 0 ? (pairs + share - 1) / share : 0;
    uint16_t* const own = room.count[sorts ? warp : 0];

    __syncthreads();
    for (int i = begin + lane; i - lane < end; i += kWarp) {
        const int e = i < end ? expert[i] : -1;
        const unsigned same = __match_any_sync(kAll, e);
        if (e >= 0 && e < experts && !(same & before)) own[e] = static_cast<uint16_t>(own[e] + __popc(same));
        __syncwarp();
    }
    __syncthreads();

    int pairs_so_far = 0, chunks_so_far = 0;
    for (int base = 0; base < experts; base += kThreads) {
        const int e = sorts ? base + thread : experts;
        int n = 0;
        for (int w = 0; w < warps && e < experts; w++) {
            const int here = room.count[w][e];
            room.count[w][e] = static_cast<uint16_t>(n);
            n += here;
        }
        const int n_chunks = (n + kChunkPairs - 1) / kChunkPairs;
        int upto_pairs = n, upto_chunks = n_chunks;  // this expert included
#pragma unroll
        for (int step = 1; step < kWarp; step *= 2) {
            const int p = __shfl_up_sync(kAll, upto_pairs, step), c = __shfl_up_sync(kAll, upto_chunks, step);
            if (lane >= step) {
                upto_pairs += p;
                upto_chunks += c;
            }
        }
        if (sorts && lane == kWarp - 1) {
            room.warp_pairs[warp] = upto_pairs;
            room.warp_chunks[warp] = upto_chunks;
        }
        __syncthreads();
        int first = pairs_so_far + upto_pairs - n, chunk = chunks_so_far + upto_chunks - n_chunks;
        for (int w = 0; w < kWarps; w++) {
            if (w < warp) {
                first += room.warp_pairs[w];
                chunk += room.warp_chunks[w];
            }
            pairs_so_far += room.warp_pairs[w];
            chunks_so_far += room.warp_chunks[w];
        }
        if (e < experts) {
            room.first_pair[e] = first;
            room.first_chunk[e] = chunk;
        }
        for (int i = 0; i < n_chunks; i++)
            to.chunk[chunk + i] = {e, first + i * kChunkPairs, min(kChunkPairs, n - i * kChunkPairs)};
        __syncthreads();
    }
    if (thread == 0) *to.n_chunks = chunks_so_far;

    for (int i = begin + lane; i - lane < end; i += kWarp) {
        const int e = i < end ? expert[i] : -1;
        const unsigned same = __match_any_sync(kAll, e);
        const bool known = e >= 0 && e < experts;
        const int rank = known ? own[e] + __popc(same & before) : 0;
        __syncwarp();
        if (known && !(same & before)) own[e] = static_cast<uint16_t>(own[e] + __popc(same));
        __syncwarp();
        if (i < end) chunk_of[i] = static_cast<Index>(known ? room.first_chunk[e] + rank / kChunkPairs : -1);
        if (known) to.pair[room.first_pair[e] + rank] = i;
    }
}

}  // namespace kd::cuda
