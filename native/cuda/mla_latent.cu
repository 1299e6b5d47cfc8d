// What follows the product with qkv_a: the norm of q_a and the product of that with q_b, and the row of the cache. Neither needs the
// other, and but for q_b both are all latency: of Kimi K2 3 KB and 1.1 KB a row. So they are blocks of one launch, and what a block
// needs first is on its way when the product ends: weights, and at which position, in which page its row is, with the angles of
// that position.
#include <algorithm>

#include "launch.h"
#include "linear_tile.h"
#include "mma.h"
#include "ops.h"
#include "raw.h"
#include "rope.h"
#include "row.h"

namespace kd::ops {

namespace {

using namespace cuda;

constexpr int kAppendThreads = 128;
constexpr int kEach = 4;  // latent elements of a thread

struct Latent {
    RowsPtr kv, qkv_a;
    const float *q_norm, *kv_norm;
    RopePtr rope;
    ViewPtr v;
    int q_lora, kv_lora, positions;
    float eps;
};

// ---- the row of the cache ----------------------------------------------------------------------------------------------

__device__ __forceinline__ int within(int i, int n) { return max(min(i, n - 1), 0); }

// Brings to the cache what the row's place leads to. What is read to find it may still be written: any value is good enough.
__device__ __forceinline__ void prefetch_place(const Latent& a, int r, int pair) {
    const int position = static_cast<int>(ask4(a.v.position + r)), stream = static_cast<int>(ask4(a.v.stream + r)),
              slot = static_cast<int>(ask4(a.v.slot + r));
    const size_t angle = static_cast<size_t>(within(position, a.positions)) * static_cast<size_t>(a.rope.pairs) +
                         static_cast<size_t>(pair);
    prefetch(a.rope.cos + angle);
    prefetch(a.rope.sin + angle);
    if (pair == 0)
        prefetch(a.v.page_table + within(stream, a.v.n_streams.most) * a.v.max_pages +
                 within(slot / KD_PAGE_TOKENS, a.v.max_pages));
}

// Four elements a thread. The pairs to turn are those of the last threads: the first have the latent part.
__device__ __forceinline__ void append_vectors(const Latent& a, int r) {
    const int thread = static_cast<int>(threadIdx.x), c = thread * kEach, pair = kAppendThreads - 1 - thread;
    const bool mine = c < a.kv_lora, turns = pair < a.rope.pairs, likely = a.v.n_rows.likely(r);
    const float4 norm = mine ? *reinterpret_cast<const float4*>(a.kv_norm + c) : float4{};
    if (likely && turns) prefetch_place(a, r, pair);
    wait_for_kernel_before();
    if (!likely && r >= a.v.n_rows()) return;
    const int n = a.v.n_rows();
    const bf16* const from = a.qkv_a[r] + a.q_lora;
    const uint2 x = mine ? ask8(from + c) : uint2{};
    const uint32_t both = turns ? ask4(from + a.kv_lora + 2 * pair) : 0;
    const int position = static_cast<int>(ask4(a.v.position + r)), stream = static_cast<int>(ask4(a.v.stream + r)),
              slot = static_cast<int>(ask4(a.v.slot + r));
    if (r >= n) return;
    bf16* const to = a.kv[a.v.pool_row(stream, slot)];
    const float2 angle = turns ? a.rope.angle(position, pair) : float2{};
    const float f[kEach] = {low_bf16(x.x), high_bf16(x.x), low_bf16(x.y), high_bf16(x.y)};
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kEach; i++) sum = __fmaf_rn(f[i], f[i], sum);
    const float scale = 1.0f / sqrtf(block_sum<kAppendThreads>(sum) / static_cast<float>(a.kv_lora) + a.eps);
    if (mine)
        *reinterpret_cast<uint2*>(to + c) = {pack_bf16(f[0] * scale * norm.x, f[1] * scale * norm.y),
                                             pack_bf16(f[2] * scale * norm.z, f[3] * scale * norm.w)};
    const float2 turned = RopePtr::turn(low_bf16(both), high_bf16(both), angle);
    if (turns) *reinterpret_cast<uint32_t*>(to + a.kv_lora + 2 * pair) = pack_bf16(turned.x, turned.y);
}

// The same of any size and alignment.
__device__ __forceinline__ void append_plain(const Latent& a, int r) {
    const int thread = static_cast<int>(threadIdx.x);
    wait_for_kernel_before();
    if (r >= a.v.n_rows()) return;
    const bf16* from = a.qkv_a[r] + a.q_lora;
    bf16* to = a.kv[a.v.pool_row(a.v.stream[r], a.v.slot[r])];
    float sum = 0;
    for (int c = thread; c < a.kv_lora; c += kAppendThreads) {
        const float x = __bfloat162float(from[c]);
        sum = __fmaf_rn(x, x, sum);
    }
    const float scale = 1.0f / sqrtf(block_sum<kAppendThreads>(sum) / static_cast<float>(a.kv_lora) + a.eps);
    for (int c = thread; c < a.kv_lora; c += kAppendThreads)
        to[c] = __float2bfloat16_rn(__bfloat162float(from[c]) * scale * a.kv_norm[c]);
    for (int i = thread; i < a.rope.pairs; i += kAppendThreads) {
        const bf16* pair = from + a.kv_lora + 2 * i;
        const float2 turned = a.rope.turn(__bfloat162float(pair[0]), __bfloat162float(pair[1]), a.v.position[r], i);
        to[a.kv_lora + 2 * i] = __float2bfloat16_rn(turned.x);
        to[a.kv_lora + 2 * i + 1] = __float2bfloat16_rn(turned.y);
    }
}

// ---- few rows: all in one launch -----------------------------------------------------------------------------------------

// A launch takes longer than to norm some rows: each block of the product norms all of them for itself. All of its weights and
// rows are in shared memory at once, where linear_tile.h would have them.
using Few = Tile<1, kParts, 1, 16, 3>;
constexpr int kFewColumns = 3 * kRound;  // of q_a; Kimi K2, DeepSeek-V3
constexpr int kGroups = kFewColumns / (kWarp * kPiece);
static_assert(kFewColumns > kNarrow && kFewColumns <= kWideThreads * kPiece, "norm_row sums otherwise");

// Where a tile of `tall` rows holds piece p of a row.
__device__ __forceinline__ int place(int tall, int row, int p) {
    return p / (kParts * kPieces) * Few::kStageBytes + (p / kPieces % kParts * tall + row) * kPanelRow +
           ((p % kPieces ^ row % 8) * kPieceBytes);
}

// Block z: 16 rows of q_b. A warp norms every eighth row and multiplies the panels of one part. The sum of squares is norm_row's: a
// group is what one warp has there, a lane's piece that of one thread.
__device__ __forceinline__ void normed_product(char* stages, const Latent& a, RowsPtr q, const bf16* q_b, int n) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
    const int out0 = static_cast<int>(blockIdx.z) * Few::kOut, outs = n - out0;
    const auto piece_of_group = [&](int g) { return g * kWarp + lane; };
    const bf16* const w = q_b + static_cast<size_t>(out0) * kFewColumns;
#pragma unroll
    for (int row = warp; row < Few::kOut; row += Few::kWarps) {
        if (row >= outs) break;
#pragma unroll
        for (int g = 0; g < kGroups; g++)
            cp_async_16(stages + place(Few::kOut, row, piece_of_group(g)),
                        w + row * kFewColumns + piece_of_group(g) * kPiece);
    }
    cp_async_commit();
    Piece norm[kGroups];
#pragma unroll
    for (int g = 0; g < kGroups; g++) norm[g] = read_piece<true>(a.q_norm, piece_of_group(g) * kPiece, kFewColumns);
    wait_for_kernel_before();
    const int rows = min(a.v.n_rows(), Few::kRows);
    constexpr int kMine = Few::kRows / Few::kWarps;
    uint4 bits[kMine][kGroups];
#pragma unroll
    for (int i = 0; i < kMine; i++) {
        const bf16* const from = a.qkv_a[min(warp + i * Few::kWarps, a.v.n_rows.most - 1)];
#pragma unroll
        for (int g = 0; g < kGroups; g++) bits[i][g] = ask16(from + piece_of_group(g) * kPiece);
    }
    let_next_kernel_start();
#pragma unroll
    for (int i = 0; i < kMine; i++) {
        const int row = warp + i * Few::kWarps;
        if (row >= rows) break;
        float sum = 0;
#pragma unroll
        for (int g = 0; g < kGroups; g++) {
            const Piece p = piece_of(bits[i][g]);
            float squares = 0;
#pragma unroll
            for (int j = 0; j < kPiece; j++) squares = __fmaf_rn(p.v[j], p.v[j], squares);
            sum += warp_sum(squares);
        }
        const float scale = 1.0f / sqrtf(sum / static_cast<float>(kFewColumns) + a.eps);
#pragma unroll
        for (int g = 0; g < kGroups; g++) {
            Piece p = piece_of(bits[i][g]);
#pragma unroll
            for (int j = 0; j < kPiece; j++) p.v[j] = p.v[j] * scale * norm[g].v[j];
            char* const to = stages + Few::kWeightBytes + place(Few::kRows, row, piece_of_group(g));
            write_piece<true>(reinterpret_cast<bf16*>(to), 0, kPiece, p);
        }
    }
    cp_async_wait<0>();
    __syncthreads();
    float sum[1][Few::kRows / 8][4] = {};
#pragma unroll
    for (int s = 0; s < Few::kStages; s++) {
        const char* const stage = stages + s * Few::kStageBytes;
        multiply_rows<Few::kRows / 8>(sum, stage + warp * Few::kOut * kPanelRow,
                                      stage + Few::kWeightBytes + warp * Few::kRows * kPanelRow, rows);
    }
    __syncthreads();
    add_up<Few, false>(q.p, static_cast<size_t>(q.stride), sum, stages, rows, outs, {});
}

// Block z: a part of the product; behind those, a row of the cache.
__global__ __launch_bounds__(Few::kThreads, 1) void few_rows(const __grid_constant__ Latent a, RowsPtr q,
                                                             const bf16* q_b, int n) {
    extern __shared__ __align__(1024) char stages[];
    const int append = static_cast<int>(blockIdx.z) - (n + Few::kOut - 1) / Few::kOut;
    if (append < 0) return normed_product(stages, a, q, q_b, n);
    let_next_kernel_start();
    if (threadIdx.x < kAppendThreads) append_vectors(a, append);
}

// ---- any number of rows ----------------------------------------------------------------------------------------------------

// Block x: a row; block y: its row of the cache, or its q_a, which is normed in place as rms_norm does it (rows.cu). Threads that
// one of the two has no use for are gone before it begins.
template <bool kVector, int kNormThreads>
__global__ __launch_bounds__(std::max(kNormThreads,
                                      kAppendThreads)) void latent_rows(const __grid_constant__ Latent a) {
    let_next_kernel_start();  // the product behind it asks for weights first
    const int r = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
    if (blockIdx.y == 0) {
        if (thread >= kAppendThreads) return;
        if constexpr (kVector)
            append_vectors(a, r);
        else
            append_plain(a, r);
    } else if (thread < kNormThreads) {
        norm_row<kVector, kNormThreads>(a.qkv_a, a.qkv_a, a.q_norm, a.q_lora, a.eps, a.v.n_rows, r);
    }
}

}  // namespace

void mla_latent(Rows q, Rows kv, Rows qkv_a, Vec q_norm, Mat q_b, Vec kv_norm, const Rope& rope, const View& v,
                const Shape& s) {
    const Latent a{raw(kv), raw(qkv_a), raw(q_norm), raw(kv_norm),    raw(rope),
                   raw(v),  s.q_lora,   s.kv_lora,   s.max_positions, s.rms_eps_lora};
    const int most = v.n_rows.most;
    const bool fits = vectors(s.q_lora) && s.kv_lora % kEach == 0 && s.kv_lora <= kAppendThreads * kEach &&
                      rope.pairs <= kAppendThreads && aligned16(kv) && aligned16(qkv_a) && aligned16(q_norm) &&
                      aligned16(kv_norm);
    const auto many = [&]<bool kVector, int kNormThreads>() {
        launch_as<latent_rows<kVector, kNormThreads>>({.early = true}, dim3(static_cast<unsigned>(most), 2),
                                                      std::max(kNormThreads, kAppendThreads), a);
        linear(q, qkv_a, q_b, v.n_rows);
    };
    if (most <= 0) return;
    if (fits && s.q_lora == kFewColumns && aligned16(q_b.w) && most <= Few::kRows)
        launch_as<few_rows, Few::kBytes, kFlagBytes>(
            {.early = true}, dim3(1, 1, static_cast<unsigned>(ceil_div(q_b.n, Few::kOut) + most)), Few::kThreads, a,
            raw(q), reinterpret_cast<const bf16*>(raw(q_b.w)), q_b.n);
    else if (!fits)
        many.template operator()<false, kWideThreads>();
    else if (s.q_lora <= kNarrow)
        many.template operator()<true, kNarrowThreads>();
    else
        many.template operator()<true, kWideThreads>();
}

}  // namespace kd::ops
