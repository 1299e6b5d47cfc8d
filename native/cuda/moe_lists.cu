#include "moe_lists.h"

#include "error.h"
#include "launch.h"
#include "mma.h"

namespace kd::cuda {

namespace {

// One block. Every warp counts the experts of its own stretch of pairs; sums over warps, then over experts, say where
// each stretch begins in each expert's list; then every warp goes over its stretch again and puts the pairs there.
// Floor: a launch and two passes over 4 bytes a pair; four barriers.
template <int kWarps, int kExperts>
__global__ void __launch_bounds__(kWarps* kWarp)
    sort_pairs(Lists to, const int32_t* expert, Number n_rows, int slots, int experts) {
    extern __shared__ __align__(16) int32_t first_pair[];                    // [kExperts]
    auto* const count = reinterpret_cast<uint16_t*>(first_pair + kExperts);  // [kWarps][kExperts]
    __shared__ int warp_pairs[kWarps], warp_chunks[kWarps];
    constexpr int kThreads = kWarps * kWarp;
    constexpr unsigned kAll = 0xffffffffu;
    const int thread = threadIdx.x, warp = thread / kWarp, lane = thread % kWarp;
    const unsigned before = (1u << lane) - 1;
    for (int i = thread; i < kWarps * kExperts / 8; i += kThreads) reinterpret_cast<uint4*>(count)[i] = {};
    wait_for_kernel_before();
    let_next_kernel_start();
    const int pairs = n_rows() * slots, share = (pairs + kThreads - 1) / kThreads * kWarp;
    const int begin = min(pairs, warp * share), end = min(pairs, begin + share);
    uint16_t* const own = count + warp * kExperts;

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
        const int e = base + thread;
        int n = 0;
        for (int w = 0; w < kWarps && e < experts; w++) {
            const int here = count[w * kExperts + e];
            count[w * kExperts + e] = static_cast<uint16_t>(n);
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
        if (lane == kWarp - 1) {
            warp_pairs[warp] = upto_pairs;
            warp_chunks[warp] = upto_chunks;
        }
        __syncthreads();
        int first = pairs_so_far + upto_pairs - n, chunk = chunks_so_far + upto_chunks - n_chunks;
        for (int w = 0; w < kWarps; w++) {
            if (w < warp) {
                first += warp_pairs[w];
                chunk += warp_chunks[w];
            }
            pairs_so_far += warp_pairs[w];
            chunks_so_far += warp_chunks[w];
        }
        if (e < experts) first_pair[e] = first;
        for (int i = 0; i < n_chunks; i++)
            to.chunk[chunk + i] = {e, first + i * kChunkPairs, min(kChunkPairs, n - i * kChunkPairs)};
        __syncthreads();
    }
    if (thread == 0) *to.n_chunks = chunks_so_far;

    for (int i = begin + lane; i - lane < end; i += kWarp) {
        const int e = i < end ? expert[i] : -1;
        const unsigned same = __match_any_sync(kAll, e);
        const bool known = e >= 0 && e < experts;
        const int at = known ? first_pair[e] + own[e] + __popc(same & before) : -1;
        __syncwarp();
        if (known && !(same & before)) own[e] = static_cast<uint16_t>(own[e] + __popc(same));
        __syncwarp();
        if (i < end) to.place[i] = at;
        if (known) to.row[at] = i / slots;
    }
}

template <int kWarps, int kExperts>
void sort(const Lists& to, const int32_t* expert, Number n_rows, int slots, int experts) {
    constexpr int bytes = kExperts * (sizeof(int32_t) + kWarps * sizeof(uint16_t));
    launch_as<sort_pairs<kWarps, kExperts>, bytes>({.early = true}, 1, kWarps * kWarp, to, expert, n_rows, slots,
                                                   experts);
}

}  // namespace

Lists list_pairs(const int32_t* expert, Number n_rows, int slots, int experts, int most_chunks) {
    constexpr int few = 512, many = 4096;  // experts; the loader takes no more
    KD_CHECK(experts <= many);
    const size_t pairs = static_cast<size_t>(n_rows.most) * static_cast<size_t>(slots);
    KD_CHECK(pairs <= 65536);  // counts are 16 bits
    const size_t chunk_words = static_cast<size_t>(most_chunks) * (sizeof(Chunk) / sizeof(int32_t));
    int32_t* const p = scratch<int32_t>(Use::moe_lists, 1 + chunk_words + 2 * pairs);
    const Lists lists{p, reinterpret_cast<Chunk*>(p + 1), p + 1 + chunk_words, p + 1 + chunk_words + pairs};
    if (experts <= few)
        sort<16, few>(lists, expert, n_rows, slots, experts);
    else
        sort<4, many>(lists, expert, n_rows, slots, experts);
    return lists;
}

}  // namespace kd::cuda
