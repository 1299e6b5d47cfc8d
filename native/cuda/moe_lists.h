// Which pairs (row, slot) go to which expert, found on the device.
#pragma once

#include "raw.h"

namespace kd::cuda {

constexpr int kChunkPairs = 16;

// Some pairs of one expert: first .. first + n - 1 of the order, n <= kChunkPairs.
struct Chunk {
    int expert, first, n;
};

// Pairs in order of experts, then rows, then slots. A pair whose expert is none of 0 .. experts - 1 is left out.
struct Lists {
    int32_t* n_chunks;
    Chunk* chunk;    // [n_chunks], every expert that has pairs, in order
    int32_t* row;    // [pairs] of the rows, in this order
    int32_t* place;  // [n_rows * slots]: where a pair is in it, or -1
};

// Launches what fills them, in scratch memory of Use::moe_lists. most_chunks: min(pairs, experts + pairs / kChunkPairs)
// of the most rows there can be.
Lists list_pairs(const int32_t* expert, Number n_rows, int slots, int experts, int most_chunks);

}  // namespace kd::cuda
