// Attention over the latent cache on sm_90, first part (mla_wide.h): what it works on, and how that is dealt out.
//
// Keys below whole_keys(position) are cut into groups whose size is a matter of the row's position alone: long contexts have larger
// ones, so that partial results stay few. A work item is a group of keys and a tile, up to 64 row-heads of one stream, so that the
// group is read once for all of them. Where rows of a tile have groups of two sizes, there are items of both.
#pragma once

#include <initializer_list>

#include "keys.h"
#include "mma.h"
#include "raw.h"
#include "wgmma.h"

namespace kd::cuda {

constexpr int kWideThreads = 384;
constexpr int kTileRows = 64;                 // row-heads of a tile
constexpr int kWideTiles = 128;               // of a launch, at most
constexpr int kWideEntries = 2 * kWideTiles;  // groups of a tile's rows may have two sizes
constexpr int kWideRows = 256;                // of a launch: a byte counts them

// Sizes of groups, by the whole keys of a row.
constexpr int kSizes = 5;
__host__ __device__ constexpr int size_of_groups(int whole) {
    return (whole > 2048) + (whole > 12288) + (whole > 49152) + (whole > 131072);
}
__host__ __device__ constexpr int keys_of_size(int size) { return 128 << size; }
__host__ __device__ constexpr int wide_groups(int whole) {
    const int keys = keys_of_size(size_of_groups(whole));
    return (whole + keys - 1) / keys;
}
// The most groups of a row whose whole keys are no more than `keys`.
constexpr int most_wide_groups(int keys) {
    int most = wide_groups(keys);
    for (const int end : {2048, 12288, 49152, 131072})
        if (end <= keys && most < wide_groups(end)) most = wide_groups(end);
    return most;
}

// A piece of rows of one stream that follow one another, and those of them whose groups have a size.
struct WideTile {
    uint8_t first, last;  // rows of the stream, within the launch
    uint8_t piece, size;
    uint16_t whole;  // the most steps of 16 keys below whole_keys of a row
    uint16_t end;    // items up to here, this tile's included
};

struct WidePlan {
    WideTile tile[kWideEntries];
    uint16_t whole[kWideRows];  // of each row
    int tiles, items;
};

// Memory that planning needs and nothing after it.
struct WidePlanning {
    WideTile tile[kWideTiles];  // without regard to sizes
    uint32_t starts[kWideRows / kWarp];
    int before[kWideRows / kWarp], after[kWideTiles / kWarp], tiles;
};

// How many rows a launch can have: each stream may leave a tile unfilled.
constexpr int wide_rows(int heads, int most_streams) {
    const int tiles = kWideTiles, each = (heads + kTileRows - 1) / kTileRows;
    const int few = tiles / each;  // rows that have nothing in common
    const int more = (tiles - (most_streams < tiles ? most_streams : tiles)) * kTileRows / heads;
    const int most = few < more ? more : few;
    return most < kWideRows ? most : kWideRows;
}

struct WideJob {
    RowsPtr q, kv;
    ViewPtr v;
    float2* top_sum;  // partial results of the launch's rows [row][head][group]
    bf16* o;
    int groups;  // room for as many a row-head
    int heads, first_row, most_rows;
    uint32_t per_head;  // 2^32 / heads, rounded up: to divide by
    float scale;        // of scores, to log2
    // The row of a row-head.
    __device__ int row_of(int row_head) const {
        return per_head == 0 ? row_head : static_cast<int>(__umulhi(static_cast<uint32_t>(row_head), per_head));
    }
};
// Exact below 2^16 row-heads; one head is no division.
constexpr uint32_t to_divide(int heads) {
    return heads == 1 ? 0
                      : static_cast<uint32_t>(((uint64_t{1} << 32) + static_cast<uint64_t>(heads) - 1) /
                                              static_cast<uint64_t>(heads));
}

// Of the row that starts a stream's rows: how many there are. `starts` has the start bits of each warp's rows.
__device__ inline int rows_of_start(int row, int rows, const uint32_t* starts) {
    uint32_t later = row % kWarp == kWarp - 1 ? 0 : ~0u << (row % kWarp + 1);
    for (int w = row / kWarp; w * kWarp < rows; w++) {
        later &= starts[w];
        if (later) return w * kWarp + __ffs(static_cast<int>(later)) - 1 - row;
        later = ~0u;
    }
    return rows - row;
}

// A tile's entry for each size of its rows' groups. Entries and items are counted in one number: kEntry + items. All threads call
// it, with a tile or without.
constexpr int kEntry = 1 << 20;
__device__ inline void add_tile(WidePlan& s, int* before, const WideJob& job, WideTile tile, bool there) {
    const int i = static_cast<int>(threadIdx.x), lane = i % kWarp, warp = i / kWarp;
    // Of the smallest size and of the largest: no more occur, rows of a tile are near each other.
    int whole[2] = {}, size[2] = {kSizes, -1};
    if (there) {
        const int begin = tile.piece * kTileRows;
        const int end = min(begin + kTileRows, (tile.last - tile.first + 1) * job.heads);
        const int last = tile.first + job.row_of(end - 1);
#pragma unroll 1
        for (int r = tile.first + job.row_of(begin); r <= last; r++) {
            const int mine = s.whole[r], of = mine == 0 ? -1 : size_of_groups(mine * kStep);
            if (of < 0) continue;
            if (of < size[0]) size[0] = of, whole[0] = 0;
            if (of > size[1]) size[1] = of, whole[1] = 0;
            if (of == size[0]) whole[0] = max(whole[0], mine);
            if (of == size[1]) whole[1] = max(whole[1], mine);
        }
    }
    if (size[0] == size[1]) whole[0] = 0;
    const int groups[2] = {wide_groups(whole[0] * kStep), wide_groups(whole[1] * kStep)};
    const int mine = (groups[0] > 0 ? kEntry : 0) + (groups[1] > 0 ? kEntry : 0) + groups[0] + groups[1];
    const int sum = warp_sum_before(mine);
    if (lane == kWarp - 1 && i < kWideTiles) before[warp] = sum;
    __syncthreads();
    if (i >= kWideTiles) return;
    int at = sum - mine;
    for (int w = 0; w < warp; w++) at += before[w];
    if (i == kWideTiles - 1) {
        s.tiles = (at + mine) / kEntry;
        s.items = (at + mine) % kEntry;
    }
#pragma unroll
    for (int k = 0; k < 2; k++) {
        if (groups[k] == 0) continue;
        tile.size = static_cast<uint8_t>(size[k]);
        tile.whole = static_cast<uint16_t>(whole[k]);
        tile.end = static_cast<uint16_t>(at % kEntry + groups[k]);
        s.tile[at / kEntry] = tile;
        at += kEntry + groups[k];
    }
}

// All threads call it. What is done once takes its time from memory and from code that is not in a cache: so few ways to memory
// and little code, above all for one stream.
__device__ inline void plan_wide(WidePlan& s, WidePlanning& free, const WideJob& job) {
    const int i = static_cast<int>(threadIdx.x), lane = i % kWarp, warp = i / kWarp;
    // The arrays have room for most_rows: one way to memory, not two.
    int position = 0, stream = 0, before = 0;
    const int some = job.v.stream[job.first_row];
    if (i < job.most_rows) {
        const int r = job.first_row + i;
        position = job.v.position[r];
        stream = job.v.stream[r];
        before = i == 0 ? -1 : job.v.stream[r - 1];
    }
    const int rows = min(job.v.n_rows() - job.first_row, job.most_rows);
    if (i < rows) s.whole[i] = static_cast<uint16_t>(whole_keys(position) / kStep);
    WideTile tile{0, static_cast<uint8_t>(rows - 1), static_cast<uint8_t>(i), 0, 0, 0};
    bool there = i * kTileRows < rows * job.heads;
    if (!__syncthreads_and(i >= rows || stream == some)) {
        const bool start = i < rows && stream != before;
        const uint32_t ballot = __ballot_sync(0xffffffffu, start);
        if (lane == 0 && i < kWideRows) free.starts[warp] = ballot;
        __syncthreads();
        const int length = start ? rows_of_start(i, rows, free.starts) : 0;
        const int pieces = (length * job.heads + kTileRows - 1) / kTileRows, sum = warp_sum_before(pieces);
        if (lane == kWarp - 1 && i < kWideRows) free.before[warp] = sum;
        __syncthreads();
        if (i < kWideRows) {
            int at = sum - pieces;
            for (int w = 0; w < warp; w++) at += free.before[w];
            if (i == kWideRows - 1) free.tiles = at + pieces;
#pragma unroll 1
            for (int piece = 0; piece < pieces; piece++)
                free.tile[at + piece] = {static_cast<uint8_t>(i),
                                         static_cast<uint8_t>(i + length - 1),
                                         static_cast<uint8_t>(piece),
                                         0,
                                         0,
                                         0};
        }
        __syncthreads();
        there = i < free.tiles;
        if (there) tile = free.tile[i];
    }
    add_tile(s, free.after, job, tile, there);
    __syncthreads();
}

// One item as a warp sees it.
struct WideItem {
    WideTile tile;
    int group, first, keys;  // the group's first key, and how many of its keys some row has
    int row_head, count;     // of the launch: the tile's first; how many it has
};
__device__ inline WideItem wide_item(const WidePlan& s, const WideJob& job, int item) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    int t = 0;
    for (;; t += kWarp) {
        const bool here = t + lane < s.tiles && s.tile[t + lane].end > item;
        const uint32_t found = __ballot_sync(0xffffffffu, here);
        if (found) {
            t += __ffs(static_cast<int>(found)) - 1;
            break;
        }
    }
    WideItem w;
    w.tile = s.tile[t];
    w.group = item - (t > 0 ? s.tile[t - 1].end : 0);
    w.first = w.group * keys_of_size(w.tile.size);
    // From a lane, so that the compiler sees that a warp agrees.
    w.keys = __shfl_sync(0xffffffffu, min(w.tile.whole * kStep - w.first, keys_of_size(w.tile.size)), 0);
    w.row_head = w.tile.first * job.heads + w.tile.piece * kTileRows;
    w.count = min(kTileRows, (w.tile.last + 1) * job.heads - w.row_head);
    return w;
}
// How many keys of the item's group row-head `at` of its tile has.
__device__ inline int wide_keys(const WidePlan& s, const WideJob& job, const WideItem& w, int at) {
    if (at >= w.count) return 0;
    const int whole = s.whole[job.row_of(w.row_head + at)] * kStep;
    if (size_of_groups(whole) != w.tile.size) return 0;
    return min(max(whole - w.first, 0), keys_of_size(w.tile.size));
}

}  // namespace kd::cuda
