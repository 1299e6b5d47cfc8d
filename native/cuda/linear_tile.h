// How a matrix product with bf16 weights is computed: rows of w are the 16-row operand, rows of x the 8-wide one.
//
// The arithmetic of one result, fixed by k alone: the columns are cut into panels of 64; panel j belongs to part j % 8; a part
// is one chain of m16n8k16 products over its panels in order, 16 columns at a time, from 0; the parts are added as
// ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)) in fp32. Who computes which part is free (Tile, below), and so is how many rows of x
// share a tile: choices by speed, which change no bit. Columns past k are zeros and add nothing. Rows past the last, of w or x,
// are whatever shared memory holds: each is a row or a column of a product of its own that nobody keeps.
#pragma once

#include <algorithm>

#include "launch.h"
#include "mma.h"
#include "raw.h"

namespace kd::cuda {

constexpr int kParts = 8;
constexpr int kPanel = 64;               // columns; 128 bytes of a row, one line
constexpr int kRound = kParts * kPanel;  // columns of one panel of every part
constexpr int kPanelRow = kPanel * 2;    // bytes
constexpr int kPieceBytes = 16;          // of a panel row, at piece ^ (row % 8): eight rows of a column hit all banks
constexpr int kPieces = kPanelRow / kPieceBytes;
constexpr int kColumns = kPieceBytes / 2;  // of a piece
constexpr int kSumStride = 20;             // floats between rows of x when sums are exchanged: no bank twice
constexpr int kFlagBytes = 1024;           // more than a product declares statically: a flag
constexpr int kMostResults = 1 << 14;      // tiles of results in one launch that several blocks share

// How a block works: kDown warps down the rows of w (16 kTall each) times kAcross warps along k, for kRows rows of x. A warp
// computes kInTurn neighbouring parts one after the other; if kAcross * kInTurn < kParts, several blocks share a tile of
// results. They are a cluster and add what each has in shared memory; before sm_90, the one that comes last adds what all have
// left in memory. At most kDepth steps are in shared memory.
template <int kDown_, int kAcross_, int kInTurn_, int kRows_, int kDepth = 16, int kTall_ = 1>
struct Tile {
    static constexpr int kDown = kDown_, kAcross = kAcross_, kInTurn = kInTurn_, kRows = kRows_, kTall = kTall_;
    static constexpr int kWarps = kDown * kAcross;
    static constexpr int kThreads = kWarps * kWarp;
    static constexpr int kSixteens = kDown * kTall;
    static constexpr int kOut = 16 * kSixteens;                   // rows of w
    static constexpr int kBlocks = kParts / (kAcross * kInTurn);  // that share a tile of results, at most
    static constexpr int kWeightBytes = kOut * kAcross * kPanelRow;
    static constexpr int kStageBytes = kWeightBytes + kRows * kAcross * kPanelRow;
    static constexpr int kRoom = (kBlockBytes - kFlagBytes) / kStageBytes;
    static constexpr int kStages = kRoom < kDepth ? kRoom : kDepth;
    static constexpr int kSumBytes = kAcross * kSixteens * kRows * kSumStride * 4;
    static constexpr int kBytes = kStages * kStageBytes > kSumBytes ? kStages * kStageBytes : kSumBytes;
    static_assert(kStages >= 2 && kRows % 8 == 0 && (kRows == 8 || kRows % 16 == 0));
    static_assert(kBlocks * kAcross * kInTurn == kParts);
};

// Where the blocks that share results leave their sums, if they are no cluster.
struct Shares {
    float* sum;         // [tile][block][row of x][row of w]
    uint32_t* arrived;  // [tile], 0 between launches
};

__device__ __forceinline__ float4 operator+(float4 a, float4 b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// Sum of at(0) .. at(kN - 1) by halves.
template <int kN, class At>
__device__ __forceinline__ float4 sum_by_halves(At at, int first = 0) {
    if constexpr (kN == 1)
        return at(first);
    else
        return sum_by_halves<kN / 2>(at, first) + sum_by_halves<kN / 2>(at, first + kN / 2);
}

// Eight columns to shared memory; those from `columns` on (all, if it is not positive) are 0 and not read.
template <bool kVector>
__device__ __forceinline__ void fill_piece(void* to, const bf16* from, int columns) {
    if constexpr (kVector) {
        cp_async_16(to, from, columns > 0);
    } else {
        const uint16_t* bits = reinterpret_cast<const uint16_t*>(from);
        uint32_t word[4] = {};
#pragma unroll
        for (int j = 0; j < kColumns; j++)
            if (j < columns) word[j / 2] |= static_cast<uint32_t>(bits[j]) << (j % 2 * 16);
        store16(to, {word[0], word[1], word[2], word[3]});
    }
}

// Adds one panel of weights times one of x: sum[h][e] is the product of weights 16 h .. and rows 8 e .. of x, for e < kLive.
template <int kLive, int kTall, int kEights>
__device__ __forceinline__ void multiply_panel(float (&sum)[kTall][kEights][4], const char* weights, const char* x) {
    const int lane = threadIdx.x % kWarp;
    const auto piece_at = [](const char* panel, int row, int piece) {
        return panel + row * kPanelRow + ((piece ^ row % 8) * kPieceBytes);
    };
    if constexpr (kLive == 1) {
#pragma unroll
        for (int s = 0; s < kPanel / 32; s++) {
            uint32_t b[4];
            ldmatrix_x4(b, piece_at(x, lane % 8, 4 * s + lane / 8));
#pragma unroll
            for (int h = 0; h < kTall; h++) {
                uint32_t a[2][4];
                ldmatrix_x4(a[0], piece_at(weights, h * 16 + lane % 16, 4 * s + lane / 16));
                ldmatrix_x4(a[1], piece_at(weights, h * 16 + lane % 16, 4 * s + 2 + lane / 16));
                mma_bf16(sum[h][0], a[0], {b[0], b[1]});
                mma_bf16(sum[h][0], a[1], {b[2], b[3]});
            }
        }
    } else {
#pragma unroll
        for (int s = 0; s < kPanel / 16; s++) {
            uint32_t a[kTall][4], b[kLive / 2][4];
#pragma unroll
            for (int h = 0; h < kTall; h++) ldmatrix_x4(a[h], piece_at(weights, h * 16 + lane % 16, 2 * s + lane / 16));
#pragma unroll
            for (int e = 0; e < kLive; e += 2)
                ldmatrix_x4(b[e / 2], piece_at(x, e * 8 + lane % 8 + lane / 16 * 8, 2 * s + lane / 8 % 2));
#pragma unroll
            for (int e = 0; e < kLive; e += 2) {
#pragma unroll
                for (int h = 0; h < kTall; h++) {
                    mma_bf16(sum[h][e], a[h], {b[e / 2][0], b[e / 2][1]});
                    mma_bf16(sum[h][e + 1], a[h], {b[e / 2][2], b[e / 2][3]});
                }
            }
        }
    }
}

// The same for the smallest kLive that holds `rows`: straight code for each, so that loads run ahead of products.
template <int kLive, int kTall, int kEights>
__device__ __forceinline__ void multiply_rows(float (&sum)[kTall][kEights][4], const char* weights, const char* x,
                                              int rows) {
    if constexpr (kLive >= 4) {
        if (rows <= kLive * 4) return multiply_rows<kLive / 2>(sum, weights, x, rows);
    }
    multiply_panel<kLive>(sum, weights, x);
}

// f(h, e, i) for every element of a warp's sums.
template <int kTall, int kEights, class F>
__device__ __forceinline__ void each_sum(F f) {
#pragma unroll
    for (int h = 0; h < kTall; h++) {
#pragma unroll
        for (int e = 0; e < kEights; e++) {
#pragma unroll
            for (int i = 0; i < 4; i++) f(h, e, i);
        }
    }
}

// The sum of parts done in turn, by halves: held[l] is that of 2^l parts. `sum` holds part `turn`, or all after the last.
template <int kLevel, int kLevels, int kTall, int kEights>
__device__ __forceinline__ void end_part(float (&sum)[kTall][kEights][4], float (&held)[kLevels][kTall][kEights][4],
                                         int turn) {
    if constexpr (kLevel < kLevels) {
        if (turn >> kLevel & 1) {
            each_sum<kTall, kEights>([&](int h, int e, int i) { sum[h][e][i] = held[kLevel][h][e][i] + sum[h][e][i]; });
            end_part<kLevel + 1>(sum, held, turn);
        } else {
            each_sum<kTall, kEights>([&](int h, int e, int i) { held[kLevel][h][e][i] = sum[h][e][i]; });
        }
    }
}

// Four neighbouring results of a row, of which `outs` exist; kWhole: in one store.
__device__ __forceinline__ void put(float* y, float4 v, int outs, bool whole) {
    if (whole && outs >= 4) {
        *reinterpret_cast<float4*>(y) = v;
        return;
    }
    if (outs > 0) y[0] = v.x;
    if (outs > 1) y[1] = v.y;
    if (outs > 2) y[2] = v.z;
    if (outs > 3) y[3] = v.w;
}
__device__ __forceinline__ void put(bf16* y, float4 v, int outs, bool whole) {
    if (whole && outs >= 4) {
        *reinterpret_cast<uint2*>(y) = make_uint2(pack_bf16(v.x, v.y), pack_bf16(v.z, v.w));
        return;
    }
    if (outs > 0) y[0] = __float2bfloat16_rn(v.x);
    if (outs > 1) y[1] = __float2bfloat16_rn(v.y);
    if (outs > 2) y[2] = __float2bfloat16_rn(v.z);
    if (outs > 3) y[3] = __float2bfloat16_rn(v.w);
}

// grid: tiles of rows of x, blocks that share results, tiles of rows of w. Only the first is made for `most`.
template <class T, bool kVector, class Out, bool kCluster>
__global__ void __launch_bounds__(T::kThreads, 1)
    product_kernel(Out* y, size_t y_stride, RowsPtr x, const bf16* w, int n, int k, Number n_rows, Shares shares) {
    extern __shared__ __align__(128) char stages[];
    __shared__ bool last;
    const int row0 = blockIdx.x * T::kRows, out0 = blockIdx.z * T::kOut, outs = n - out0;
    const int thread = threadIdx.x, lane = thread % kWarp, warp = thread / kWarp;
    const int down = warp % T::kDown, across = warp / T::kDown;
    const int part0 = blockIdx.y * T::kAcross * T::kInTurn;
    const int rounds = (k + kRound - 1) / kRound, steps = rounds * T::kInTurn;

    wait_for_kernel_before();
    const int rows = min(n_rows() - row0, static_cast<int>(T::kRows));
    if (rows <= 0) return;

    // What a thread brings of each step, one panel of each of the parts that are being computed: a piece of some rows of w and x.
    const int my_row = thread / (kPieces * T::kAcross), my_across = thread / kPieces % T::kAcross;
    const int my_piece = thread % kPieces;
    constexpr int kStep = T::kThreads / (kPieces * T::kAcross);  // rows between those of one thread
    static_assert(kStep * kPieces * T::kAcross == T::kThreads && T::kOut % kStep == 0);
    const auto place = [&](int panel_rows, int row) {
        return (my_across * panel_rows + row) * kPanelRow + ((my_piece ^ row % 8) * kPieceBytes);
    };
    const int my_column = (part0 + my_across * T::kInTurn) * kPanel + my_piece * kColumns;
    const bf16* my_weights = w + static_cast<size_t>(out0 + my_row) * static_cast<size_t>(k) + my_column;
    const bf16* my_x = x[row0 + my_row] + my_column;
    const size_t weights_step = static_cast<size_t>(kStep) * static_cast<size_t>(k);
    const size_t x_step = static_cast<size_t>(kStep) * static_cast<size_t>(x.stride);
    int load_round = 0, load_turn = 0;
    const auto load_columns = [&]<bool kAll>(char* stage) {
        const int column = load_round * kRound + load_turn * kPanel;
        const int left = kAll ? kColumns : k - column - my_column;
        const bf16 *from_weights = my_weights + column, *from_x = my_x + column;
#pragma unroll
        for (int i = 0; i < T::kOut; i += kStep) {
            if (i + my_row < outs) fill_piece<kVector>(stage + place(T::kOut, i + my_row), from_weights, left);
            from_weights += weights_step;
        }
#pragma unroll
        for (int i = 0; i < T::kRows; i += kStep) {
            if (i + my_row < rows)
                fill_piece<kVector>(stage + T::kWeightBytes + place(T::kRows, i + my_row), from_x, left);
            from_x += x_step;
        }
        if (++load_round == rounds) load_round = 0, load_turn++;
    };
    const bool all_columns = k % kRound == 0;
    const auto load = [&](int slot) {
        char* stage = stages + slot * T::kStageBytes;
        all_columns ? load_columns.template operator()<true>(stage) : load_columns.template operator()<false>(stage);
    };

    constexpr int kEights = T::kRows / 8;
    constexpr int kLevels = T::kInTurn == 8 ? 3 : T::kInTurn == 4 ? 2 : 1;
    float sum[T::kTall][kEights][4] = {};
    [[maybe_unused]] float held[kLevels][T::kTall][kEights][4];

#pragma unroll
    for (int step = 0; step < T::kStages - 1; step++) {
        if (step < steps) load(step);
        cp_async_commit();
    }
    int slot = 0, ahead = T::kStages - 1, round = 0, turn = 0;
    for (int step = 0; step < steps; step++) {
        cp_async_wait<T::kStages - 2>();
        __syncthreads();
        if (step + T::kStages - 1 < steps) load(ahead);
        cp_async_commit();
        const char* weights = stages + slot * T::kStageBytes;
        multiply_rows<kEights>(sum, weights + (across * T::kOut + down * 16 * T::kTall) * kPanelRow,
                               weights + T::kWeightBytes + across * T::kRows * kPanelRow, rows);
        ahead = slot;
        slot = slot + 1 == T::kStages ? 0 : slot + 1;
        if constexpr (T::kInTurn > 1) {
            if (++round == rounds) {
                end_part<0>(sum, held, turn);
                if (++turn < T::kInTurn) each_sum<T::kTall, kEights>([&](int h, int e, int i) { sum[h][e][i] = 0; });
                round = 0;
            }
        }
    }
    cp_async_wait<0>();
    __syncthreads();

    // The sums of the block's warps: [across][sixteen of w][row of x][16], then those of the blocks. A thread adds four at once.
    float* sums = reinterpret_cast<float*>(stages);
#pragma unroll
    for (int h = 0; h < T::kTall; h++) {
        float* mine = sums + (across * T::kSixteens + down * T::kTall + h) * T::kRows * kSumStride;
#pragma unroll
        for (int e = 0; e < kEights; e++) {
#pragma unroll
            for (int i = 0; i < 4; i++)
                mine[(e * 8 + 2 * (lane % 4) + i % 2) * kSumStride + lane / 4 + i / 2 * 8] = sum[h][e][i];
        }
    }
    __syncthreads();
    constexpr int kFours = T::kOut / 4;
    const int blocks = gridDim.y, fours = rows * kFours;
    const auto four_of = [&](int i, int a) {
        const int row = i / kFours, out = i % kFours * 4;
        return sums + ((a * T::kSixteens + out / 16) * T::kRows + row) * kSumStride + out % 16;
    };
    const auto block_sum_of = [&](int i) {
        return sum_by_halves<T::kAcross>([&](int a) { return *reinterpret_cast<const float4*>(four_of(i, a)); });
    };
    const bool whole = (reinterpret_cast<uintptr_t>(y) | y_stride * sizeof(Out)) % (4 * sizeof(Out)) == 0;
    const auto finish = [&](int i, float4 v) {
        const int row = i / kFours, out = i % kFours * 4;
        // + 0: a sum is never -0, whether parts that are not there were added to it or not
        put(y + static_cast<size_t>(row0 + row) * y_stride + out0 + out, v + make_float4(0, 0, 0, 0), outs - out,
            whole);
    };
    if (T::kBlocks == 1 || blocks == 1) {
        for (int i = thread; i < fours; i += T::kThreads) finish(i, block_sum_of(i));
        return;
    }
    if constexpr (kCluster) {
        // Each block finishes a share of the results.
        if constexpr (T::kAcross > 1) {
            for (int i = thread; i < fours; i += T::kThreads)
                *reinterpret_cast<float4*>(four_of(i, 0)) = block_sum_of(i);
        }
        cluster_barrier();
        for (int i = thread + blockIdx.y * T::kThreads; i < fours; i += T::kThreads * blocks) {
            finish(i, sum_by_halves<T::kBlocks>([&](int b) {
                       return b < blocks ? load_of_block(four_of(i, 0), b) : make_float4(0, 0, 0, 0);
                   }));
        }
        cluster_barrier();  // a block's memory lasts as long as others read it
        return;
    }

    const size_t tile = static_cast<size_t>(blockIdx.z) * gridDim.x + blockIdx.x;
    constexpr int kResults = T::kRows * kFours;
    float4* all = reinterpret_cast<float4*>(shares.sum) + tile * blocks * kResults;
    for (int i = thread; i < fours; i += T::kThreads) __stcg(all + blockIdx.y * kResults + i, block_sum_of(i));
    __threadfence();
    __syncthreads();
    if (thread == 0) last = atomicAdd(shares.arrived + tile, 1u) == static_cast<uint32_t>(blocks) - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
    for (int i = thread; i < fours; i += T::kThreads) {
        finish(i, sum_by_halves<T::kBlocks>(
                      [&](int b) { return b < blocks ? __ldcg(all + b * kResults + i) : make_float4(0, 0, 0, 0); }));
    }
    if (thread == 0) shares.arrived[tile] = 0;
}

template <class Out>
struct Product {
    Out* y;
    size_t y_stride;
    Rows x;
    Mat w;
    Count n_rows;
};

// How a product is launched: choices by speed.
struct How {
    bool early = false;   // launch.h; its weights then compete with what the kernel before still reads
    bool cluster = true;  // the blocks that share results, where the GPU has clusters
};

template <class T, bool kVector, class Out>
void run(const Product<Out>& p, How how = {}) {
    const int row_tiles = ceil_div(p.n_rows.most, T::kRows), out_tiles = ceil_div(p.w.n, T::kOut);
    const int parts = std::min(kParts, ceil_div(p.w.k, kPanel));
    const int blocks = std::max(1, std::min(T::kBlocks, ceil_div(parts, T::kAcross * T::kInTurn)));
    const int cluster = how.cluster && bound().major >= 9 ? blocks : 1;
    Shares shares{};
    if (blocks > cluster) {
        const size_t tiles = static_cast<size_t>(row_tiles) * static_cast<size_t>(out_tiles);
        KD_CHECK(tiles <= kMostResults);
        shares.arrived = scratch<uint32_t>(Use::linear, kMostResults + tiles * blocks * T::kRows * T::kOut);
        shares.sum = reinterpret_cast<float*>(shares.arrived + kMostResults);
    }
    const auto go = [&]<bool kCluster>() {
        launch_as<product_kernel<T, kVector, Out, kCluster>, T::kBytes, kFlagBytes>(
            {how.early, cluster}, dim3(row_tiles, blocks, out_tiles), T::kThreads, p.y, p.y_stride, raw(p.x),
            reinterpret_cast<const bf16*>(raw(p.w.w)), p.w.n, p.w.k, number(p.n_rows), shares);
    };
    if constexpr (T::kBlocks > 1) {
        if (cluster == blocks) return go.template operator()<true>();
    }
    go.template operator()<false>();
}

}  // namespace kd::cuda
