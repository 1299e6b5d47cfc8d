// The small parts of MLA attention: queries and results through the latent projections, and the cache's rows.
//
// K2's rank of eight has 8 heads: k_up and v_up are 1 MB each, 0.3 us at 4 TB/s; 2 * 128 * 512 operations a row and head.
// Up to some hundred rows a launch and its latency are all of it.
#include "keys.h"
#include "launch.h"
#include "mma.h"
#include "ops.h"
#include "raw.h"
#include "rope.h"

namespace kd::ops {

namespace {

using namespace cuda;

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;
constexpr int kTileRows = 16;      // rows of one matrix product
constexpr int kBlockRows = 64;     // rows that share a block's weights
constexpr int kPad = 8;            // elements after a row in shared memory: rows then start in different banks
constexpr int kQueryColumns = 64;  // latent columns of a block of mla_query, 16 a warp
constexpr int kMostNope = 256;     // whose k_up tile fits
constexpr int kValueColumns = 16;  // columns of a block of mla_value; its warps share the latent dimension
constexpr int kMostLatent = 1024;  // whose v_up tile fits
constexpr int kQueryStride = kQueryColumns + kPad;
constexpr int kQueryBytes = kMostNope * kQueryStride * static_cast<int>(sizeof(bf16));
constexpr int kValueTile = kValueColumns * (kMostLatent + kPad);  // elements
constexpr int kValueBytes =
    kValueTile * static_cast<int>(sizeof(bf16)) + kWarps * kTileRows * kValueColumns * static_cast<int>(sizeof(float));

__device__ uint32_t word(const bf16* p) { return *reinterpret_cast<const uint32_t*>(p); }

// Elements k .. k + 15 of rows r .. r + 15 as the first operand; rows from `end` on are 0 and not read.
__device__ void load_rows(uint32_t (&a)[4], RowsPtr x, int r, int end, int k) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp, g = lane / 4, t = lane % 4;
    const bool low = r + g < end, high = r + g + 8 < end;
    const bf16 *p = x[r + g] + k + 2 * t, *p8 = x[r + g + 8] + k + 2 * t;
    a[0] = low ? word(p) : 0;
    a[1] = high ? word(p8) : 0;
    a[2] = low ? word(p + 8) : 0;
    a[3] = high ? word(p8 + 8) : 0;
}

// ---- mla_query ------------------------------------------------------------------------------------------------------

__device__ void turn_query(RowsPtr q_lat, RowsPtr q, const RopePtr& rope, const ViewPtr& v, int head, int nope,
                           int kv_lora, int rope_dim, int begin, int end) {
    for (int i = static_cast<int>(threadIdx.x); i < (end - begin) * rope.pairs; i += kThreads) {
        const int r = begin + i / rope.pairs, pair = i % rope.pairs;
        const bf16* from = q[r] + head * (nope + rope_dim) + nope + 2 * pair;
        bf16* to = q_lat[r] + head * (kv_lora + rope_dim) + kv_lora + 2 * pair;
        const float2 turned = rope.turn(__bfloat162float(from[0]), __bfloat162float(from[1]), v.position[r], pair);
        to[0] = __float2bfloat16_rn(turned.x);
        to[1] = __float2bfloat16_rn(turned.y);
    }
}

// Block x: a head and 64 of its latent columns, or the head's rope part. Block y: 64 rows.
__global__ __launch_bounds__(kThreads) void query_tiles(RowsPtr q_lat, RowsPtr q, const bf16* k_up, RopePtr rope,
                                                        ViewPtr v, int nope, int kv_lora, int rope_dim) {
    extern __shared__ __align__(16) bf16 tile[];  // [nope][kQueryStride]
    const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
    const int tiles = kv_lora / kQueryColumns + 1, head = static_cast<int>(blockIdx.x) / tiles;
    const int column = static_cast<int>(blockIdx.x) % tiles * kQueryColumns;
    const int begin = static_cast<int>(blockIdx.y) * kBlockRows, end = min(v.n_rows(), begin + kBlockRows);
    if (begin >= end) return;
    if (column == kv_lora) {
        turn_query(q_lat, q, rope, v, head, nope, kv_lora, rope_dim, begin, end);
        return;
    }
    const bf16* w =
        k_up + static_cast<size_t>(head) * static_cast<size_t>(nope) * static_cast<size_t>(kv_lora) + column;
    for (int c = thread; c < nope * (kQueryColumns / 8); c += kThreads) {
        const int k = c / (kQueryColumns / 8), piece = c % (kQueryColumns / 8) * 8;
        cp_async_16(tile + k * kQueryStride + piece, w + static_cast<size_t>(k) * static_cast<size_t>(kv_lora) + piece);
    }
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();

    q.p += head * (nope + rope_dim);
    q_lat.p += head * (kv_lora + rope_dim) + column + warp * 16;
    const bf16* mine = tile + (lane % 16) * kQueryStride + warp * 16 + lane / 16 * 8;
    const int g = lane / 4, t = lane % 4;
    for (int r = begin; r < end; r += kTileRows) {
        float d[2][4] = {};
#pragma unroll 4
        for (int k = 0; k < nope; k += 16) {
            uint32_t a[4], b[4];
            load_rows(a, q, r, end, k);
            ldmatrix_x4_trans(b, mine + k * kQueryStride);
            mma_bf16(d[0], a, {b[0], b[1]});
            mma_bf16(d[1], a, {b[2], b[3]});
        }
#pragma unroll
        for (int j = 0; j < 2; j++) {
            if (r + g < end) *reinterpret_cast<uint32_t*>(q_lat[r + g] + 8 * j + 2 * t) = pack_bf16(d[j][0], d[j][1]);
            if (r + g + 8 < end)
                *reinterpret_cast<uint32_t*>(q_lat[r + g + 8] + 8 * j + 2 * t) = pack_bf16(d[j][2], d[j][3]);
        }
    }
}

// Any size and alignment. Block x: a head and 128 of its columns, rope part last; block y: a row.
__global__ __launch_bounds__(kThreads) void query_plain(RowsPtr q_lat, RowsPtr q, const bf16* k_up, RopePtr rope,
                                                        ViewPtr v, int nope, int kv_lora, int rope_dim) {
    const int r = static_cast<int>(blockIdx.y), tiles = (kv_lora + kThreads - 1) / kThreads + 1;
    const int head = static_cast<int>(blockIdx.x) / tiles, tile = static_cast<int>(blockIdx.x) % tiles;
    if (r >= v.n_rows()) return;
    if (tile == tiles - 1) {
        turn_query(q_lat, q, rope, v, head, nope, kv_lora, rope_dim, r, r + 1);
        return;
    }
    const int c = tile * kThreads + static_cast<int>(threadIdx.x);
    if (c >= kv_lora) return;
    const bf16* from = q[r] + head * (nope + rope_dim);
    const bf16* w = k_up + static_cast<size_t>(head) * static_cast<size_t>(nope) * static_cast<size_t>(kv_lora) + c;
    float sum = 0;
    for (int k = 0; k < nope; k++) {
        sum = __fmaf_rn(__bfloat162float(from[k]), __bfloat162float(*w), sum);
        w += kv_lora;
    }
    q_lat[r][head * (kv_lora + rope_dim) + c] = __float2bfloat16_rn(sum);
}

// ---- mla_append -----------------------------------------------------------------------------------------------------

// A block a row.
__global__ __launch_bounds__(kThreads) void append_rows(RowsPtr kv, RowsPtr kv_a, const float* norm, RopePtr rope,
                                                        ViewPtr v, int kv_lora, float eps) {
    const int r = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
    if (r >= v.n_rows()) return;
    const bf16* from = kv_a[r];
    bf16* to = kv[v.pool_row(v.stream[r], v.slot[r])];
    float sum = 0;
    for (int c = thread; c < kv_lora; c += kThreads) {
        const float x = __bfloat162float(from[c]);
        sum = __fmaf_rn(x, x, sum);
    }
    const float scale = 1.0f / sqrtf(block_sum<kThreads>(sum) / static_cast<float>(kv_lora) + eps);
    for (int c = thread; c < kv_lora; c += kThreads)
        to[c] = __float2bfloat16_rn(__bfloat162float(from[c]) * scale * norm[c]);
    for (int i = thread; i < rope.pairs; i += kThreads) {
        const bf16* pair = from + kv_lora + 2 * i;
        const float2 turned = rope.turn(__bfloat162float(pair[0]), __bfloat162float(pair[1]), v.position[r], i);
        to[kv_lora + 2 * i] = __float2bfloat16_rn(turned.x);
        to[kv_lora + 2 * i + 1] = __float2bfloat16_rn(turned.y);
    }
}

// ---- mla_value ------------------------------------------------------------------------------------------------------

// Block x: 16 columns of a head; block y: 64 rows. Each warp takes a quarter of the latent dimension, the quarters are added in
// order.
__global__ __launch_bounds__(kThreads) void value_tiles(RowsPtr o, RowsPtr o_lat, const bf16* v_up, Number n_rows,
                                                        int kv_lora, int v_head) {
    extern __shared__ __align__(16) bf16 tile[];  // [kValueColumns][kv_lora + kPad]
    const auto part = reinterpret_cast<float (*)[kTileRows][kValueColumns]>(tile + kValueTile);  // [kWarps]
    const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
    const int first = static_cast<int>(blockIdx.x) * kValueColumns, head = first / v_head;  // rows of v_up
    const int begin = static_cast<int>(blockIdx.y) * kBlockRows, end = min(n_rows(), begin + kBlockRows);
    if (begin >= end) return;
    const int stride = kv_lora + kPad, pieces = kv_lora / 8;
    const bf16* w = v_up + static_cast<size_t>(first) * static_cast<size_t>(kv_lora);
    for (int c = thread; c < kValueColumns * pieces; c += kThreads)
        cp_async_16(tile + c / pieces * stride + c % pieces * 8, w + static_cast<size_t>(c) * 8);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();

    o_lat.p += head * kv_lora;
    const int steps = kv_lora / 16, each = (steps + kWarps - 1) / kWarps;
    const int k_begin = min(warp * each, steps) * 16, k_end = min((warp + 1) * each, steps) * 16;
    const bf16* mine = tile + (lane % 8 + lane / 16 * 8) * stride + lane / 8 % 2 * 8;
    const int g = lane / 4, t = lane % 4;
    for (int r = begin; r < end; r += kTileRows) {
        float d[2][4] = {};
#pragma unroll 4
        for (int k = k_begin; k < k_end; k += 16) {
            uint32_t a[4], b[4];
            load_rows(a, o_lat, r, end, k);
            ldmatrix_x4(b, mine + k);
            mma_bf16(d[0], a, {b[0], b[1]});
            mma_bf16(d[1], a, {b[2], b[3]});
        }
#pragma unroll
        for (int j = 0; j < 2; j++) {
            *reinterpret_cast<float2*>(&part[warp][g][8 * j + 2 * t]) = {d[j][0], d[j][1]};
            *reinterpret_cast<float2*>(&part[warp][g + 8][8 * j + 2 * t]) = {d[j][2], d[j][3]};
        }
        __syncthreads();
        const int row = thread / (kValueColumns / 2), column = thread % (kValueColumns / 2) * 2;
        if (r + row < end) {
            float low = part[0][row][column], high = part[0][row][column + 1];
#pragma unroll
            for (int i = 1; i < kWarps; i++) {
                low += part[i][row][column];
                high += part[i][row][column + 1];
            }
            *reinterpret_cast<uint32_t*>(o[r + row] + first + column) = pack_bf16(low, high);
        }
        __syncthreads();
    }
}
static_assert(kThreads * 2 == kTileRows * kValueColumns);

// Any size and alignment: a warp an element. Block x: four columns; block y: a row.
__global__ __launch_bounds__(kThreads) void value_plain(RowsPtr o, RowsPtr o_lat, const bf16* v_up, Number n_rows,
                                                        int columns, int kv_lora, int v_head) {
    const int r = static_cast<int>(blockIdx.y), lane = static_cast<int>(threadIdx.x) % kWarp;
    const int column = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / kWarp;
    if (r >= n_rows() || column >= columns) return;
    const bf16* x = o_lat[r] + column / v_head * kv_lora;
    const bf16* w = v_up + static_cast<size_t>(column) * static_cast<size_t>(kv_lora);
    float sum = 0;
    for (int c = lane; c < kv_lora; c += kWarp) sum = __fmaf_rn(__bfloat162float(x[c]), __bfloat162float(w[c]), sum);
    sum = warp_sum(sum);
    if (lane == 0) o[r][column] = __float2bfloat16_rn(sum);
}

const bf16* weights(Mat w) { return reinterpret_cast<const bf16*>(raw(w.w)); }
unsigned grid_of(int n) { return static_cast<unsigned>(n); }

}  // namespace

void mla_query(Rows q_lat, Rows q, Mat k_up, const Rope& rope, const View& v, const Shape& s) {
    const bool tiled = s.nope % 16 == 0 && s.nope <= kMostNope && s.kv_lora % kQueryColumns == 0 && s.rope % 2 == 0 &&
                       aligned16(q) && aligned16(q_lat) && aligned16(k_up.w);
    if (tiled) {
        const dim3 grid(grid_of(s.heads_rank * (s.kv_lora / kQueryColumns + 1)),
                        grid_of(ceil_div(v.n_rows.most, kBlockRows)));
        launch<query_tiles, kQueryBytes>(grid, kThreads, raw(q_lat), raw(q), weights(k_up), raw(rope), raw(v), s.nope,
                                         s.kv_lora, s.rope);
    } else {
        const dim3 grid(grid_of(s.heads_rank * (ceil_div(s.kv_lora, kThreads) + 1)), grid_of(v.n_rows.most));
        launch<query_plain>(grid, kThreads, raw(q_lat), raw(q), weights(k_up), raw(rope), raw(v), s.nope, s.kv_lora,
                            s.rope);
    }
}

void mla_append(Rows kv, Rows kv_a, Vec norm, const Rope& rope, const View& v, const Shape& s) {
    launch<append_rows>(grid_of(v.n_rows.most), kThreads, raw(kv), raw(kv_a), raw(norm), raw(rope), raw(v), s.kv_lora,
                        s.rms_eps_lora);
}

void mla_value(Rows o, Rows o_lat, Mat v_up, Count n_rows, const Shape& s) {
    const int columns = s.heads_rank * s.v_head;
    const bool tiled = s.kv_lora % 16 == 0 && s.kv_lora <= kMostLatent && s.v_head % kValueColumns == 0 &&
                       aligned16(o) && aligned16(o_lat) && aligned16(v_up.w);
    if (tiled) {
        const dim3 grid(grid_of(columns / kValueColumns), grid_of(ceil_div(n_rows.most, kBlockRows)));
        launch<value_tiles, kValueBytes>(grid, kThreads, raw(o), raw(o_lat), weights(v_up), number(n_rows), s.kv_lora,
                                         s.v_head);
    } else {
        const dim3 grid(grid_of(ceil_div(columns, kWarps)), grid_of(n_rows.most));
        launch<value_plain>(grid, kThreads, raw(o), raw(o_lat), weights(v_up), number(n_rows), columns, s.kv_lora,
                            s.v_head);
    }
}

}  // namespace kd::ops
