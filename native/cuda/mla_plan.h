// Attention over the latent cache, first part (mla_fold.h): what it works on, and how that is dealt out.
//
// A work item is a group of keys (keys.h) and a tile: up to 64 row-heads of one stream, so that the group is read once for all of
// them. Blocks take items until none is left, big ones first. Where there would be too few items for the GPU, tiles are
// smaller: a row-head's arithmetic is its own.
#pragma once

#include "keys.h"
#include "mma.h"
#include "raw.h"

namespace kd::cuda {

constexpr int kFoldThreads = 256;
constexpr int kFoldWarps = kFoldThreads / kWarp;
constexpr int kMostRowHeads = 64;  // of a tile
constexpr int kFewRowHeads = 16;   // of the smallest
constexpr int kSlices = 4;         // of a key, for the scores
constexpr int kMostTiles = kFoldThreads;
constexpr int kMostRows = kFoldThreads;  // of a launch: one a thread
constexpr int kMostPages = kLarge / KD_PAGE_TOKENS;

// A cached key: [latent kKv | rope key].
template <int kKv_, int kRope_>
struct KeyShape {
    static constexpr int kKv = kKv_, kRow = kKv_ + kRope_;
    static constexpr int kStepsOfRow = kRow / 16;                                // matrix products over a key
    static constexpr int kStepsOfSlice = (kStepsOfRow + kSlices - 1) / kSlices;  // the last slice may have fewer
    static constexpr int kStride = kRow + 8;                                     // elements, in shared memory
    static constexpr int kTiles = kKv / 8 / kFoldWarps;                          // of 8 value columns a warp
    static_assert(kRow % 16 == 0 && kKv % (8 * kFoldWarps) == 0);
    static_assert(kStride / 8 % 2 == 1, "rows must start in different banks");
};

// A piece of rows of one stream that follow one another.
struct Tile {
    uint8_t first, last;  // rows of the stream, within the launch
    uint16_t piece;
    uint16_t groups;  // of keys that some row of the piece has
};

// kStages: steps in shared memory. kBuffers: 2 to work on the next step's scores while this one's are folded, else 1.
template <class K_, int kStages_, int kBuffers_>
struct FoldShared {
    using K = K_;
    static constexpr int kStages = kStages_, kBuffers = kBuffers_;
    bf16 key[kStages][kStep][K::kStride];
    float score[kBuffers][kSlices][kMostRowHeads][kStep];
    bf16 prob[kBuffers][kMostRowHeads][kStep];
    float keep[kBuffers][kMostRowHeads];  // what a step multiplies a row-head's sum by
    int steps[kMostRowHeads];             // of the group that the row-head has
    int page[kMostPages];                 // of the group
    Tile tile[kMostTiles];
    uint16_t whole[kMostRows];  // steps below whole_keys of each row
    int tiles, row_heads;       // how many tiles, and of how many row-heads they are at most
    int tile_now, group_now;
    alignas(16) uint32_t query[kBuffers == 2 ? kFoldWarps : 1][2][kWarp][4];  // what a thread does not hold itself
};

// Partial results of the launch's rows [row][head][group].
struct FoldParts {
    float2* top_sum;
    float* o;
    int groups;
};

struct FoldJob {
    RowsPtr q, kv;
    ViewPtr v;
    FoldParts parts;
    int heads, first_row, most_rows;
    float scale;  // of scores, to log2
};

// How many of a tile's groups are of a size: 0 large, 1 middle, 2 small.
template <int kSize>
__device__ int groups_of_size(int groups) {
    constexpr int from = kSize == 0 ? kSmallGroups + kMiddleGroups : kSize == 1 ? kSmallGroups : 0;
    constexpr int to = kSize == 0 ? 1 << 16 : kSize == 1 ? kSmallGroups + kMiddleGroups : kSmallGroups;
    return max(0, min(groups, to) - from);
}

// Of the row that starts a stream's rows: how many there are. `starts` has the start bits of each warp's rows.
__device__ inline int rows_from(int row, int rows, const uint32_t* starts) {
    uint32_t later = row % kWarp == kWarp - 1 ? 0 : ~0u << (row % kWarp + 1);
    for (int w = row / kWarp; w < kFoldWarps; w++) {
        later &= starts[w];
        if (later) return w * kWarp + __ffs(static_cast<int>(later)) - 1 - row;
        later = ~0u;
    }
    return rows - row;
}

// The tiles of the launch's rows, of fewer row-heads where there are few items of the largest size.
template <class S>
__device__ void plan_tiles(S& s, const FoldJob& job, int rows) {
    // free until the first item
    uint32_t* const starts = reinterpret_cast<uint32_t*>(s.score);
    int* const before = reinterpret_cast<int*>(starts + kFoldWarps);
    int* const items = before + kFoldWarps;  // [3], by size
    const int i = static_cast<int>(threadIdx.x), lane = i % kWarp, warp = i / kWarp;
    bool start = false;
    if (i < rows) {
        const int r = job.first_row + i;
        s.whole[i] = static_cast<uint16_t>(whole_keys(job.v.position[r]) / kStep);
        start = i == 0 || job.v.stream[r] != job.v.stream[r - 1];
    }
    const uint32_t ballot = __ballot_sync(0xffffffffu, start);
    if (lane == 0) starts[warp] = ballot;
    __syncthreads();
    const int length = start ? rows_from(i, rows, starts) : 0;
    for (int row_heads = kMostRowHeads;; row_heads /= 2) {
        const int pieces = (length * job.heads + row_heads - 1) / row_heads, sum = warp_sum_before(pieces);
        if (lane == kWarp - 1) before[warp] = sum;
        if (i < 3) items[i] = 0;
        __syncthreads();
        int at = sum - pieces;
        for (int w = 0; w < warp; w++) at += before[w];
        if (i == kFoldThreads - 1) {
            s.tiles = at + pieces;
            s.row_heads = row_heads;
        }
        for (int piece = 0; piece < pieces; piece++)
            s.tile[at + piece] = {static_cast<uint8_t>(i), static_cast<uint8_t>(i + length - 1),
                                  static_cast<uint16_t>(piece), 0};
        __syncthreads();
        if (i < s.tiles) {
            Tile& t = s.tile[i];
            const int begin = t.piece * row_heads, end = min(begin + row_heads, (t.last - t.first + 1) * job.heads);
            int whole = 0;
            for (int r = begin / job.heads; r <= (end - 1) / job.heads; r++)
                whole = max(whole, static_cast<int>(s.whole[t.first + r]));
            const int groups = groups_below(whole * kStep);
            t.groups = static_cast<uint16_t>(groups);
            atomicAdd(&items[0], groups_of_size<0>(groups));
            atomicAdd(&items[1], groups_of_size<1>(groups));
            atomicAdd(&items[2], groups_of_size<2>(groups));
        }
        __syncthreads();
        const int largest = items[0] ? items[0] : items[1] ? items[1] : items[2];
        if (row_heads == kFewRowHeads || 2 * s.tiles > kMostTiles || 2 * largest > static_cast<int>(gridDim.x)) break;
        __syncthreads();
    }
}

// Looks for an item among the groups of a size; returns its number among those of the next size, or -1 if it is found.
template <int kSize, class S>
__device__ int find_item_of_size(S& s, int item) {
    constexpr int kEach = kMostTiles / kWarp;
    constexpr int kFirst = kSize == 0 ? kSmallGroups + kMiddleGroups : kSize == 1 ? kSmallGroups : 0;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const auto of = [&](int t) { return t < s.tiles ? groups_of_size<kSize>(s.tile[t].groups) : 0; };
    int mine = 0;
    for (int j = 0; j < kEach; j++) mine += of(lane * kEach + j);
    const int sum = warp_sum_before(mine), total = __shfl_sync(0xffffffffu, sum, kWarp - 1);
    if (item >= total) return item - total;
    int rest = item - (sum - mine);
    if (rest >= 0 && rest < mine) {
        int t = lane * kEach;
        while (rest >= of(t)) rest -= of(t++);
        s.tile_now = t;
        s.group_now = kFirst + rest;
    }
    return -1;
}

// The item of a number: large groups of every tile, then middle ones, then small ones. Warp 0 calls it; no item: tile -1.
template <class S>
__device__ void find_item(S& s, int item) {
    if (threadIdx.x == 0) s.tile_now = -1;
    __syncwarp();
    item = find_item_of_size<0>(s, item);
    if (item >= 0) item = find_item_of_size<1>(s, item);
    if (item >= 0) find_item_of_size<2>(s, item);
}

}  // namespace kd::cuda
