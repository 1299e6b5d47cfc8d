// Growing a tree node by node, as native/best_first.h does: the way that is right for every table. tree.cu has a faster one for
// those in which no two sums are as good as equal.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "kd.h"

namespace kd::cuda {

// `budget` steps that each wait for the one before. One warp a stream, alone with its latencies, so that what counts is the
// instructions in a row of a step:
//   the largest of the lanes' words (one reduction), whose low bits say which entry of shared memory it is;
//   that entry: what the prefix leaves behind when it is taken, its next sibling and its first child, worked out when the
//   entry was made;
//   the two as entries of their own, by two lanes side by side.
// A word is the upper bits of the sum in an integer of the same order, and the entry. When two words differ in the entry only,
// the sums and paths themselves are compared: first_of_equals(), which is rare but for tables of equal numbers.
constexpr int kMostTable = KD_MAX_TABLE_DEPTH * KD_MAX_NODES;  // a prefix of rank r follows r others

// What stands for -inf and NaN, which come last and tie with one another: far under every sum of finite numbers, and no sum
// of these is anything but finite, so that nothing needs a look at infinities. Sums under kImpossible are equal.
constexpr double kNever = -1e300, kImpossible = -1e290;
constexpr uint32_t kLeastUpper = ~static_cast<uint32_t>(std::bit_cast<uint64_t>(kImpossible) >> 32);

// The last node of a prefix: parent (0: the root), depth from 1, rank in its depth's row.
__device__ __forceinline__ uint32_t place_of(int parent, int depth, int rank) {
    return static_cast<uint32_t>(parent) << 16 | static_cast<uint32_t>(depth) << 8 | static_cast<uint32_t>(rank);
}
__device__ __forceinline__ int parent_of(uint32_t place) { return static_cast<int>(place >> 16); }
__device__ __forceinline__ int depth_of(uint32_t place) { return static_cast<int>(place >> 8 & 255); }
__device__ __forceinline__ int rank_of(uint32_t place) { return static_cast<int>(place & 255); }

// What a prefix leaves behind when it is taken: its next sibling or its first child.
struct alignas(16) Next {
    double sum;
    uint32_t link;   // its number in the table, and that of the first of the depth below it in the upper half
    uint32_t place;  // of the child without its parent, which is not known yet
};

// Of each prefix that may be taken next, by entries.
struct Growth {
    Next next[KD_MAX_NODES + 1][2];  // sibling, child
    uint2 words[KD_MAX_NODES +
                1];  // the sibling's word, for it will have this entry, and the child's without its entry; 0:
                     // there is none
    double sum[KD_MAX_NODES + 1];
    uint32_t taken[KD_MAX_NODES + 1];  // places of the nodes, from 1
    // [depths][width], and more that is read and not used. Last, so that narrow tables need less memory.
    double table[kMostTable + KD_MAX_NODES + 1];
};
constexpr size_t growth_bytes(int width) {
    return sizeof(Growth) - static_cast<size_t>(KD_MAX_NODES - width) * KD_MAX_TABLE_DEPTH * sizeof(double);
}

// The upper word of a sum as an integer of the same order. The sums are never -0, because the table has none.
__device__ __forceinline__ uint32_t upper_of(double sum) {
    const auto high = static_cast<uint32_t>(__double2hiint(sum));
    return max(high ^ (static_cast<uint32_t>(static_cast<int>(high) >> 31) | 0x80000000u), kLeastUpper);
}

// Order of ranks along the paths; a prefix comes before what it is a prefix of.
__device__ inline bool path_before(uint32_t a, uint32_t b, const uint32_t* taken) {
    uint32_t p = a, q = b;
    while (depth_of(p) > depth_of(q)) p = taken[parent_of(p)];
    while (depth_of(q) > depth_of(p)) q = taken[parent_of(q)];
    while (parent_of(p) != parent_of(q)) {
        p = taken[parent_of(p)];
        q = taken[parent_of(q)];
    }
    return rank_of(p) != rank_of(q) ? rank_of(p) < rank_of(q) : depth_of(a) < depth_of(b);
}

__device__ __forceinline__ uint32_t place_at(const Growth& w, int entry) { return w.next[entry][0].place - 1; }

__device__ inline bool before(const Growth& w, int a, int b) {
    const double x = fmax(w.sum[a], kImpossible), y = fmax(w.sum[b], kImpossible);
    return x != y ? x > y : path_before(place_at(w, a), place_at(w, b), w.taken);
}

// The best of the entries that lanes name: bit i is entry 32 i + lane.
__device__ __noinline__ int first_of_equals(const Growth& w, uint32_t named) {
    int best = -1;
    for (; named; named &= named - 1) {
        const int other = 32 * (__ffs(static_cast<int>(named)) - 1) + static_cast<int>(threadIdx.x);
        if (best < 0 || before(w, other, best)) best = other;
    }
    for (int step = 16; step; step /= 2) {
        const int other = __shfl_xor_sync(0xFFFFFFFFu, best, step);
        if (other >= 0 && other != best && (best < 0 || before(w, other, best))) best = other;
    }
    return best;
}

template <int kSlots>
__device__ __forceinline__ uint32_t largest(const uint32_t (&word)[kSlots]) {
    uint32_t most = word[0];
#pragma unroll
    for (int i = 1; i < kSlots; i++) most = max(most, word[i]);
    return most;
}

// Entry `to`: the prefix of this sum, link and place.
__device__ __forceinline__ void put(Growth& w, int to, double sum, uint32_t link, uint32_t place, uint32_t width,
                                    uint32_t end, uint32_t entry_bits) {
    const uint32_t at = link & 0xFFFF, below = link >> 16;
    const double without = sum - w.table[at];
    const double sibling = without + w.table[at + 1], child = sum + w.table[below];
    w.next[to][0] = {sibling, link + 1, place + 1};
    w.next[to][1] = {child, below | (below + width) << 16, (place & 0xFF00) + 0x100};
    w.words[to] = {at + 1 < below ? (upper_of(sibling) & ~entry_bits) | static_cast<uint32_t>(to) : 0,
                   below < end ? upper_of(child) & ~entry_bits : 0};
    w.sum[to] = sum;
}

// By one warp: taken[1 .. n] = the best n prefixes, n <= budget <= 32 kSlots. Returns n. Entry e is lane e % 32's.
template <int kSlots>
__device__ int grow(Growth& w, int depths, int width, int budget) {
    constexpr uint32_t entry_bits = 32 * kSlots - 1;
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));  // volatile: not to be read anew in every step
    const int second = lane & 1;
    const uint32_t end = depths * width;
    uint32_t word[kSlots] = {};
    if (lane == 0) {
        put(w, 0, w.table[0], static_cast<uint32_t>(width) << 16, place_of(0, 1, 0), width, end, entry_bits);
        word[0] = upper_of(w.table[0]) & ~entry_bits;
    }
    __syncwarp();
    int n = 0;
    uint32_t most = __reduce_max_sync(0xFFFFFFFFu, largest(word));
    while (n < budget) {
        int e = static_cast<int>(most & entry_bits);
        uint2 words = w.words[e];
        Next next = w.next[e][second];
        bool equal = most == 0;
#pragma unroll
        for (int i = 0; i < kSlots; i++) equal |= (word[i] ^ most) <= entry_bits && word[i] != most;
        if (__any_sync(0xFFFFFFFFu, equal)) {
            if (most <= entry_bits) break;  // no prefix is left
            uint32_t named = 0;
#pragma unroll
            for (int i = 0; i < kSlots; i++) named |= ((word[i] ^ most) <= entry_bits ? 1u : 0u) << i;
            e = first_of_equals(w, named);
            words = w.words[e];
            next = w.next[e][second];
            most = (most & ~entry_bits) | static_cast<uint32_t>(e);
        }
        n++;
        // The sibling takes the entry of what was taken, the child of node n entry n. What the last node leaves behind is not
        // needed.
#pragma unroll
        for (int i = 0; i < kSlots; i++) {
            const int own = 32 * i + lane;
            word[i] = word[i] == most ? words.x : word[i];
            word[i] = own == n && words.y ? words.y | static_cast<uint32_t>(own) : word[i];
        }
        most = __reduce_max_sync(0xFFFFFFFFu, largest(word));
        __syncwarp();  // all have read what is now written over
        if (lane < 2) {
            if (lane == 0) w.taken[n] = next.place - 1;
            put(w, second ? n : e, next.sum, next.link, next.place + (static_cast<uint32_t>(second * n) << 16), width,
                end, entry_bits);
        }
        __syncwarp();
    }
    return n;
}

// w.table = logprob [depths][table_width], its first `width` columns. By all threads of a block; ends with a barrier.
template <int kThreads>
__device__ void fetch(Growth& w, const float* logprob, int depths, int width, int table_width) {
    bool never = false;
    for (int i = threadIdx.x; i < depths * width; i += kThreads) {
        const float value = logprob[static_cast<size_t>(i / width * table_width + i % width)];
        const bool possible = value > -__builtin_huge_valf();
        never |= !possible;
        w.table[i] = possible ? static_cast<double>(value) + 0.0 : kNever;  // no -0
    }
    if (!__syncthreads_or(never)) return;
    // What comes after an impossible sibling is impossible, whatever its number.
    for (int i = 1; static_cast<int>(threadIdx.x) < depths && i < width; i++) {
        double* row = w.table + threadIdx.x * width;
        if (row[i - 1] == kNever) row[i] = kNever;
    }
    __syncthreads();
}

// The best `budget` prefixes of the table by one warp. Returns how many there are.
__device__ inline int grow(Growth& w, int depths, int width, int budget) {
    return budget <= 32    ? grow<1>(w, depths, width, budget)
           : budget <= 64  ? grow<2>(w, depths, width, budget)
           : budget <= 128 ? grow<4>(w, depths, width, budget)
                           : grow<8>(w, depths, width, budget);
}

}  // namespace kd::cuda
