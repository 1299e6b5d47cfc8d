// The small parts of MLA attention: queries and results through the latent projections.
//
// K2's rank of eight has 8 heads: k_up and v_up are 1 MB each, 0.3 us at 4 TB/s; 2 * 128 * 512 operations a row and head.
// Up to some hundred rows a launch and its latency are all of it.
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
constexpr int kTile = 16;          // rows of one matrix product
constexpr int kPad = 8;            // elements after a row in shared memory: rows then start in different banks
constexpr int kQueryColumns = 64;  // latent columns of a block of mla_query, 16 a warp
constexpr int kMostNope = 256;     // whose tiles fit
constexpr int kFewRows =
    64;  // up to which a block of it has 16 rows and not 64, so that all multiprocessors have blocks
constexpr int kValueRows = 32;     // rows of a block of mla_value
constexpr int kValueColumns = 16;  // and columns
constexpr int kQuarters = 4;       // of the latent dimension: a warp has one of 16 rows
constexpr int kMostLatent = 512;   // whose tiles fit

constexpr int kQueryStride = kQueryColumns + kPad;
constexpr int kQueryWeights = kMostNope * kQueryStride;  // elements
constexpr int query_bytes(int rows) {
    return (kQueryWeights + rows * (kMostNope + kPad)) * static_cast<int>(sizeof(bf16));
}

struct ValueShared {
    bf16 w[kValueColumns][kMostLatent + kPad], x[kValueRows][kMostLatent + kPad];
    float part[kQuarters][kValueRows][kValueColumns];
};

// Elements k .. k + 15 of 16 rows in shared memory as the first operand.
__device__ void first_operand(uint32_t (&a)[4], const bf16* rows, int stride, int k) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    ldmatrix_x4(a, rows + lane % 16 * stride + k + lane / 16 * 8);
}

// ---- mla_query ------------------------------------------------------------------------------------------------------

// The rope part of a head, of rows begin, begin + step, ..: pairs from `first` on.
__device__ void turn_query(RowsPtr q_lat, RowsPtr q, const RopePtr& rope, const ViewPtr& v, int head, int nope,
                           int kv_lora, int rope_dim, int begin, int end, int step, int first) {
#pragma unroll 1
    for (int i = first;; i += kThreads) {
        const int r = begin + i / rope.pairs * step, pair = i % rope.pairs;
        if (r >= end) return;
        const bf16* from = q[r] + head * (nope + rope_dim) + nope + 2 * pair;
        bf16* to = q_lat[r] + head * (kv_lora + rope_dim) + kv_lora + 2 * pair;
        const float2 turned = rope.turn(__bfloat162float(from[0]), __bfloat162float(from[1]), v.position[r], pair);
        to[0] = __float2bfloat16_rn(turned.x);
        to[1] = __float2bfloat16_rn(turned.y);
    }
}

// Block x: a head and 64 of its latent columns, and of every few rows the rope part; block y: kRows rows.
template <int kRows>
__global__ __launch_bounds__(kThreads) void query_tiles(RowsPtr q_lat, RowsPtr q, const bf16* k_up, RopePtr rope,
                                                        ViewPtr v, int nope, int kv_lora, int rope_dim) {
    extern __shared__ __align__(16) bf16 tile[];  // [nope][kQueryStride]
    bf16* const rows = tile + kQueryWeights;      // [kRows][nope + kPad]
    const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
    const int tiles = kv_lora / kQueryColumns, head = static_cast<int>(blockIdx.x) / tiles;
    const int column = static_cast<int>(blockIdx.x) % tiles * kQueryColumns;
    const bf16* w =
        k_up + static_cast<size_t>(head) * static_cast<size_t>(nope) * static_cast<size_t>(kv_lora) + column;
    for (int c = thread; c < nope * (kQueryColumns / 8); c += kThreads) {
        const int k = c / (kQueryColumns / 8), piece = c % (kQueryColumns / 8) * 8;
        cp_async_16(tile + k * kQueryStride + piece, w + static_cast<size_t>(k) * static_cast<size_t>(kv_lora) + piece);
    }
    // A thread's first pair to turn: position, then angle, come while the product is made. A row that is not there has memory.
    const int begin = static_cast<int>(blockIdx.y) * kRows, first_turned = begin + column / kQueryColumns;
    const int row = first_turned + thread / rope.pairs * tiles, pair = thread % rope.pairs;
    wait_for_kernel_before();
    let_next_kernel_start();  // and not before it has waited: attention looks at the cache before it waits itself
    const int position = row < v.n_rows.most ? static_cast<int>(ask4(v.position + row)) : 0;
    const int end = min(v.n_rows(), begin + kRows);
    const int stride = nope + kPad, pieces = nope / 8, used = (max(end - begin, 0) + kTile - 1) / kTile;
    for (int c = thread; c < used * kTile * pieces; c += kThreads) {
        const int r = c / pieces, piece = c % pieces * 8;
        const bool there = begin + r < end;
        cp_async_16(rows + r * stride + piece, q[there ? begin + r : begin] + head * (nope + rope_dim) + piece, there);
    }
    cp_async_commit();
    const bool turns = row < end;
    const bf16* const both = q[turns ? row : begin] + head * (nope + rope_dim) + nope + 2 * pair;
    float2 angle{}, x{};
    if (turns) {
        x = {__bfloat162float(both[0]), __bfloat162float(both[1])};
        angle = rope.angle(position, pair);
    }
    cp_async_wait<0>();
    __syncthreads();

    constexpr int kTiles = kRows / kTile;
    const bf16* mine = tile + (lane % 16) * kQueryStride + warp * 16 + lane / 16 * 8;
    float d[kTiles][2][4] = {};
#pragma unroll 4
    for (int k = 0; k < nope; k += 16) {
        uint32_t b[4];
        ldmatrix_x4_trans(b, mine + k * kQueryStride);
#pragma unroll
        for (int m = 0; m < kTiles; m++) {
            if (m >= used) break;
            uint32_t a[4];
            first_operand(a, rows + m * kTile * stride, stride, k);
            mma_bf16(d[m][0], a, {b[0], b[1]});
            mma_bf16(d[m][1], a, {b[2], b[3]});
        }
    }
    if (turns) {
        const float2 turned = RopePtr::turn(x.x, x.y, angle);
        bf16* const to = q_lat[row] + head * (kv_lora + rope_dim) + kv_lora + 2 * pair;
        to[0] = __float2bfloat16_rn(turned.x);
        to[1] = __float2bfloat16_rn(turned.y);
        turn_query(q_lat, q, rope, v, head, nope, kv_lora, rope_dim, first_turned, end, tiles, thread + kThreads);
    }
    // Neighbours exchange a word each, so that a row's four lanes write 32 bytes at once.
    const bool odd = lane % 2;
    q_lat.p += head * (kv_lora + rope_dim) + column + warp * 16 + (odd ? 8 : 0) + lane % 4 / 2 * 4;
#pragma unroll
    for (int m = 0; m < kTiles; m++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const uint32_t word[2] = {pack_bf16(d[m][0][2 * h], d[m][0][2 * h + 1]),
                                      pack_bf16(d[m][1][2 * h], d[m][1][2 * h + 1])};
            const uint32_t other = __shfl_xor_sync(0xffffffffu, odd ? word[0] : word[1], 1);
            const int r = begin + m * kTile + h * 8 + lane / 4;
            if (r < end) *reinterpret_cast<uint2*>(q_lat[r]) = odd ? uint2{other, word[1]} : uint2{word[0], other};
        }
    }
}

// Any size and alignment. Block x: a head and 128 of its columns, rope part last; block y: a row.
__global__ __launch_bounds__(kThreads) void query_plain(RowsPtr q_lat, RowsPtr q, const bf16* k_up, RopePtr rope,
                                                        ViewPtr v, int nope, int kv_lora, int rope_dim) {
    const int r = static_cast<int>(blockIdx.y), tiles = (kv_lora + kThreads - 1) / kThreads + 1;
    const int head = static_cast<int>(blockIdx.x) / tiles, tile = static_cast<int>(blockIdx.x) % tiles;
    wait_for_kernel_before();
    let_next_kernel_start();  // as above
    if (r >= v.n_rows()) return;
    if (tile == tiles - 1) {
        turn_query(q_lat, q, rope, v, head, nope, kv_lora, rope_dim, r, r + 1, 1, static_cast<int>(threadIdx.x));
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

// ---- mla_value ------------------------------------------------------------------------------------------------------

constexpr int kValueThreads = kValueRows / kTile * kQuarters * kWarp;

// Block x: 16 columns of a head; block y: 32 rows. A warp takes 16 rows and a quarter of the latent dimension; the quarters are
// added in order.
__global__ __launch_bounds__(kValueThreads) void value_tiles(RowsPtr o, RowsPtr o_lat, const bf16* v_up, Number n_rows,
                                                             int kv_lora, int v_head) {
    extern __shared__ __align__(16) char bytes[];
    ValueShared& s = *reinterpret_cast<ValueShared*>(bytes);
    let_next_kernel_start();  // the product behind it asks for weights first
    const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
    const int first = static_cast<int>(blockIdx.x) * kValueColumns, head = first / v_head;  // rows of v_up
    const int pieces = kv_lora / 8;
    const bf16* w = v_up + static_cast<size_t>(first) * static_cast<size_t>(kv_lora);
    for (int c = thread; c < kValueColumns * pieces; c += kValueThreads)
        cp_async_16(&s.w[c / pieces][c % pieces * 8], w + static_cast<size_t>(c) * 8);
    wait_for_kernel_before();
    const int begin = static_cast<int>(blockIdx.y) * kValueRows, end = min(n_rows(), begin + kValueRows);
    const int used = (max(end - begin, 0) + kTile - 1) / kTile;
    for (int c = thread; c < used * kTile * pieces; c += kValueThreads) {
        const int r = c / pieces, piece = c % pieces * 8;
        const bool there = begin + r < end;
        cp_async_16(&s.x[r][piece], o_lat[there ? begin + r : begin] + head * kv_lora + piece, there);
    }
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();

    const int quarter = warp % kQuarters, row0 = warp / kQuarters * kTile;
    if (begin + row0 < end) {
        const int steps = kv_lora / 16, each = (steps + kQuarters - 1) / kQuarters;
        const int k_begin = min(quarter * each, steps) * 16, k_end = min((quarter + 1) * each, steps) * 16;
        const bf16* mine = &s.w[lane % 8 + lane / 16 * 8][lane / 8 % 2 * 8];
        float d[2][4] = {};
#pragma unroll 4
        for (int k = k_begin; k < k_end; k += 16) {
            uint32_t a[4], b[4];
            ldmatrix_x4(b, mine + k);
            first_operand(a, s.x[row0], kMostLatent + kPad, k);
            mma_bf16(d[0], a, {b[0], b[1]});
            mma_bf16(d[1], a, {b[2], b[3]});
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float* to = &s.part[quarter][row0 + h * 8 + lane / 4][lane % 4 * 2];
#pragma unroll
            for (int j = 0; j < 2; j++) *reinterpret_cast<float2*>(to + 8 * j) = {d[j][2 * h], d[j][2 * h + 1]};
        }
    }
    __syncthreads();
    constexpr int kEach = 4;  // results of a thread, as many as there are
    const int row = thread / (kValueColumns / kEach), column = thread % (kValueColumns / kEach) * kEach;
    if (begin + row >= end || row >= kValueRows) return;
    float4 sum = *reinterpret_cast<const float4*>(&s.part[0][row][column]);
#pragma unroll
    for (int i = 1; i < kQuarters; i++) {
        const float4 more = *reinterpret_cast<const float4*>(&s.part[i][row][column]);
        sum.x += more.x;
        sum.y += more.y;
        sum.z += more.z;
        sum.w += more.w;
    }
    *reinterpret_cast<uint2*>(o[begin + row] + first + column) = {pack_bf16(sum.x, sum.y), pack_bf16(sum.z, sum.w)};
}

// Any size and alignment: a warp an element. Block x: four columns; block y: a row.
__global__ __launch_bounds__(kThreads) void value_plain(RowsPtr o, RowsPtr o_lat, const bf16* v_up, Number n_rows,
                                                        int columns, int kv_lora, int v_head) {
    const int r = static_cast<int>(blockIdx.y), lane = static_cast<int>(threadIdx.x) % kWarp;
    const int column = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / kWarp;
    wait_for_kernel_before();
    let_next_kernel_start();
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
    const bool tiled = s.nope % 16 == 0 && s.nope <= kMostNope && s.kv_lora % kQueryColumns == 0 && s.rope % 4 == 0 &&
                       aligned16(q) && aligned16(q_lat) && aligned16(k_up.w);
    if (tiled) {
        const auto go = [&]<int kRows>() {
            const dim3 grid(grid_of(s.heads_rank * (s.kv_lora / kQueryColumns)),
                            grid_of(ceil_div(v.n_rows.most, kRows)));
            launch_as<query_tiles<kRows>, query_bytes(kRows)>({.early = true}, grid, kThreads, raw(q_lat), raw(q),
                                                              weights(k_up), raw(rope), raw(v), s.nope, s.kv_lora,
                                                              s.rope);
        };
        if (v.n_rows.most <= kFewRows)
            go.template operator()<16>();
        else
            go.template operator()<64>();
    } else {
        const dim3 grid(grid_of(s.heads_rank * (ceil_div(s.kv_lora, kThreads) + 1)), grid_of(v.n_rows.most));
        launch_as<query_plain>({.early = true}, grid, kThreads, raw(q_lat), raw(q), weights(k_up), raw(rope), raw(v),
                               s.nope, s.kv_lora, s.rope);
    }
}

void mla_value(Rows o, Rows o_lat, Mat v_up, Count n_rows, const Shape& s) {
    const int columns = s.heads_rank * s.v_head;
    const bool tiled = s.kv_lora % 16 == 0 && s.kv_lora <= kMostLatent && s.v_head % kValueColumns == 0 &&
                       aligned16(o) && aligned16(o_lat) && aligned16(v_up.w);
    if (tiled) {
        const dim3 grid(grid_of(columns / kValueColumns), grid_of(ceil_div(n_rows.most, kValueRows)));
        launch_as<value_tiles, static_cast<int>(sizeof(ValueShared))>({.early = true}, grid, kValueThreads, raw(o),
                                                                      raw(o_lat), weights(v_up), number(n_rows),
                                                                      s.kv_lora, s.v_head);
    } else {
        const dim3 grid(grid_of(ceil_div(columns, kWarps)), grid_of(n_rows.most));
        launch_as<value_plain>({.early = true}, grid, kThreads, raw(o), raw(o_lat), weights(v_up), number(n_rows),
                               columns, s.kv_lora, s.v_head);
    }
}

}  // namespace kd::ops
