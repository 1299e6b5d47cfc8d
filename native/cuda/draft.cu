// Attention of the drafter: a few block rows of each stream over the context and one another, grouped queries, causal
// among one another or not.
//
// Floor: the context's keys and values once, 512 bytes a token and kv head of 128: 4.2 us for 32k tokens at 4 TB/s. Block
// rows times query heads of a kv head fill the 64-row products.
//
// As for the target (mla_attention.cu) a first kernel folds groups of context slots into partial results and a second
// merges them in order and folds the block's own rows, one by one. Partial results of a group are absent where no row of the
// block may look.
#include <algorithm>
#include <cmath>

#include "attend_plain.h"
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
constexpr int kTileRows = 16 * kWarps;  // row-heads of an item
constexpr int kTileKeys = 64;           // folded together: a page
constexpr int kStages = 2;
static_assert(kTileKeys == KD_PAGE_TOKENS);

// ---- head_norm_rope ---------------------------------------------------------------------------------------------------

// A warp a row and head: a lane owns pairs (i, i + pairs), so it can write where it has read.
__global__ __launch_bounds__(kThreads) void norm_and_turn(RowsPtr x, const float* norm, RopePtr rope, ViewPtr v,
                                                          int heads, float eps) {
    const int item = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / kWarp;
    const int lane = static_cast<int>(threadIdx.x) % kWarp, r = item / heads, pairs = rope.pairs;
    for (int i = lane; i < 2 * pairs; i += kWarp) prefetch(norm + i);
    wait_for_kernel_before();
    let_next_kernel_start();
    if (r >= v.n_rows()) return;
    bf16* p = x[r] + item % heads * 2 * pairs;
    float sum = 0;
    for (int i = lane; i < pairs; i += kWarp) {
        const float a = __bfloat162float(p[i]), b = __bfloat162float(p[i + pairs]);
        sum = __fmaf_rn(b, b, __fmaf_rn(a, a, sum));
    }
    const float scale = 1.0f / sqrtf(warp_sum(sum) / static_cast<float>(2 * pairs) + eps);
    const int position = v.position[r];
    for (int i = lane; i < pairs; i += kWarp) {
        const float a = __bfloat162float(p[i]) * scale * norm[i];
        const float b = __bfloat162float(p[i + pairs]) * scale * norm[i + pairs];
        const float2 turned = rope.turn(a, b, position, i);
        p[i] = __float2bfloat16_rn(turned.x);
        p[i + pairs] = __float2bfloat16_rn(turned.y);
    }
}

// ---- draft_append -----------------------------------------------------------------------------------------------------

// A block a row, 16 bytes or an element at a time.
template <bool kVector>
__global__ __launch_bounds__(kThreads, 8) void append_rows(RowsPtr k_pool, RowsPtr v_pool, RowsPtr k, RowsPtr value,
                                                           ViewPtr v, int width) {
    wait_for_kernel_before();
    let_next_kernel_start();
    const int r = static_cast<int>(blockIdx.x);
    if (r >= v.n_rows()) return;
    const int to = v.pool_row(v.stream[r], v.slot[r]);
    bf16 *const k_to = k_pool[to], *const v_to = v_pool[to];
    const bf16 *const k_from = k[r], *const v_from = value[r];
    constexpr int kEach = kVector ? 8 : 1;
#pragma unroll 1
    for (int c = static_cast<int>(threadIdx.x) * kEach; c < width; c += kThreads * kEach) {
        if constexpr (kVector) {
            store16(k_to + c, load16(k_from + c));
            store16(v_to + c, load16(v_from + c));
        } else {
            k_to[c] = k_from[c];
            v_to[c] = v_from[c];
        }
    }
}

// ---- draft_attention --------------------------------------------------------------------------------------------------

// Partial results of the launch's rows [row][head][group].
struct Parts {
    float2* top_sum;
    float* o;
    int groups;
};

struct Job {
    RowsPtr qkv, k_pool, v_pool;
    ViewPtr v;
    Parts parts;
    int block, heads, kv_heads;
    int first_row, most_rows;
    int window;
    bool causal;
    float scale;  // of scores, to log2
    __device__ int heads_each() const { return heads / kv_heads; }
    // Of the block that begins at first_row, how many rows row r may see.
    __device__ int own_rows(int first_row, int r) const { return causal ? r - first_row + 1 : block; }
};

// The context slots that some row of a block sees.
struct Range {
    int begin, end;
};
__device__ Range context_of(const Job& job, int first_row) {
    Range range{1 << 30, 0};
    for (int r = first_row; r < first_row + job.block; r++) {
        const int position = job.v.position[r], prefix = job.v.prefix[r];
        range.begin = min(range.begin, job.window ? max(0, position - job.window + 1) : 0);
        range.end = max(range.end, job.window ? min(prefix, position + job.window) : prefix);
    }
    range.begin = min(range.begin, range.end);
    return range;
}
__device__ bool sees(int window, int position, int other) {
    return window == 0 || (other - position < window && position - other < window);
}
// Groups that hold a slot of the range: from .. to - 1.
__device__ Range groups_of(Range slots) {
    if (slots.begin == slots.end) return {0, 0};
    return {groups_below(slots.begin + 1) - 1, groups_below(slots.end)};
}

template <int kDim>
struct Shared {
    static constexpr int kStride = kDim + 8;
    bf16 key[kStages][kTileKeys][kStride];
    bf16 value[kStages][kTileKeys][kStride];
};

// Slots slot .. slot + 63 of a kv head; those out of range are 0 and not read.
template <int kDim>
__device__ void load_tile(Shared<kDim>& s, const Job& job, int stream, int kv_head, int slot, Range range) {
    constexpr int kPieces = kDim / 8;
    const int stage = slot / kTileKeys % kStages;
    const size_t page = static_cast<size_t>(job.v.page_table[stream * job.v.max_pages + slot / KD_PAGE_TOKENS]);
    for (int c = static_cast<int>(threadIdx.x); c < kTileKeys * kPieces; c += kThreads) {
        const int k = c / kPieces, piece = c % kPieces * 8;
        const bool there = slot + k >= range.begin && slot + k < range.end;
        const size_t row = page * KD_PAGE_TOKENS + static_cast<size_t>(there ? k : 0);
        const size_t column = static_cast<size_t>(kv_head * kDim + piece);
        cp_async_16(&s.key[stage][k][piece], job.k_pool.p + row * static_cast<size_t>(job.k_pool.stride) + column,
                    there);
        cp_async_16(&s.value[stage][k][piece], job.v_pool.p + row * static_cast<size_t>(job.v_pool.stride) + column,
                    there);
    }
}

// One group of context slots for 64 row-heads of a block and kv head, 16 a warp.
template <int kDim>
__device__ void attend_item(Shared<kDim>& s, const Job& job, int first_row, int kv_head, int tile, int group,
                            Range range) {
    constexpr int kSteps = kDim / 16, kN = kTileKeys / 8, kOut = kDim / 8;
    const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
    const int g = lane / 4, t = lane % 4;
    const int stream = job.v.stream[first_row], each = job.heads_each(), count = job.block * each;
    range.begin = max(range.begin, group_first(group));
    range.end = min(range.end, group_first(group + 1));
    const int first_slot = range.begin / kTileKeys * kTileKeys;

    load_tile(s, job, stream, kv_head, first_slot, range);
    cp_async_commit();

    // Row-heads g and g + 8 of this warp: row of the block, then query head of the kv head.
    uint32_t q[kSteps][4];
    int position[2], prefix[2], row[2], head[2];
    bool mine[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int at = tile * kTileRows + warp * 16 + h * 8 + g;
        mine[h] = at < count;
        row[h] = first_row + (mine[h] ? at / each : 0);
        head[h] = kv_head * each + at % each;
        position[h] = job.v.position[row[h]];
        prefix[h] = mine[h] ? job.v.prefix[row[h]] : 0;
        const bf16* from = job.qkv[row[h]] + head[h] * kDim + 2 * t;
#pragma unroll
        for (int k = 0; k < kSteps; k++) {
            q[k][h] = mine[h] ? *reinterpret_cast<const uint32_t*>(from + k * 16) : 0;
            q[k][h + 2] = mine[h] ? *reinterpret_cast<const uint32_t*>(from + k * 16 + 8) : 0;
        }
    }

    float o[kOut][4] = {};
    float top[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
    for (int slot = first_slot; slot < range.end; slot += kTileKeys) {
        const int stage = slot / kTileKeys % kStages;
        if (slot + kTileKeys < range.end) load_tile(s, job, stream, kv_head, slot + kTileKeys, range);
        cp_async_commit();
        cp_async_wait<1>();
        __syncthreads();
        float x[kN][4] = {};
#pragma unroll
        for (int k = 0; k < kSteps; k++) {
#pragma unroll
            for (int n = 0; n < kN; n += 2) {
                uint32_t b[4];
                ldmatrix_x4(b, &s.key[stage][n * 8 + lane % 8 + lane / 16 * 8][k * 16 + lane / 8 % 2 * 8]);
                mma_bf16(x[n], q[k], {b[0], b[1]});
                mma_bf16(x[n + 1], q[k], {b[2], b[3]});
            }
        }
        float best[2] = {top[0], top[1]};
#pragma unroll
        for (int n = 0; n < kN; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int h = i / 2, other = slot + n * 8 + 2 * t + i % 2;
                const bool seen = other < prefix[h] && sees(job.window, position[h], other);
                x[n][i] = seen ? x[n][i] * job.scale : -INFINITY;
                best[h] = fmaxf(best[h], x[n][i]);
            }
        }
        float keep[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            best[h] = fmaxf(best[h], __shfl_xor_sync(0xffffffffu, best[h], 1));
            best[h] = fmaxf(best[h], __shfl_xor_sync(0xffffffffu, best[h], 2));
            keep[h] = best[h] == top[h] ? 1.0f : exp2f(top[h] - best[h]);
            top[h] = best[h];
            sum[h] *= keep[h];
        }
        uint32_t p[kN][2];  // as the first operand of a product over keys
#pragma unroll
        for (int n = 0; n < kN; n++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const bool any = top[h] != -INFINITY;
                const float low = any ? exp2f(x[n][2 * h] - top[h]) : 0.0f;
                const float high = any ? exp2f(x[n][2 * h + 1] - top[h]) : 0.0f;
                p[n][h] = pack_bf16(low, high);
                sum[h] += low_bf16(p[n][h]) + high_bf16(p[n][h]);
            }
        }
#pragma unroll
        for (int n = 0; n < kOut; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) o[n][i] *= keep[i / 2];
        }
#pragma unroll
        for (int k = 0; k < kN / 2; k++) {
            const uint32_t a[4] = {p[2 * k][0], p[2 * k][1], p[2 * k + 1][0], p[2 * k + 1][1]};
#pragma unroll
            for (int n = 0; n < kOut; n += 2) {
                uint32_t b[4];
                ldmatrix_x4_trans(b, &s.value[stage][k * 16 + lane % 16][n * 8 + lane / 16 * 8]);
                mma_bf16(o[n], a, {b[0], b[1]});
                mma_bf16(o[n + 1], a, {b[2], b[3]});
            }
        }
        __syncthreads();  // the stage may be filled again
    }
    cp_async_wait<0>();

#pragma unroll
    for (int h = 0; h < 2; h++) {
        sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 1);
        sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 2);
        if (!mine[h]) continue;
        const size_t part = static_cast<size_t>((row[h] - job.first_row) * job.heads + head[h]) *
                                static_cast<size_t>(job.parts.groups) +
                            static_cast<size_t>(group);
        if (t == 0) job.parts.top_sum[part] = {top[h], sum[h]};
        float* to = job.parts.o + part * kDim + 2 * t;
#pragma unroll
        for (int n = 0; n < kOut; n++) *reinterpret_cast<float2*>(to + n * 8) = {o[n][2 * h], o[n][2 * h + 1]};
    }
}

// Items are dealt to the blocks in turn: which block has which changes no bits.
template <int kDim>
__global__ __launch_bounds__(kThreads) void fold_groups(Job job) {
    extern __shared__ __align__(16) char bytes[];
    Shared<kDim>& s = *reinterpret_cast<Shared<kDim>*>(bytes);
    wait_for_kernel_before();
    let_next_kernel_start();
    const int rows = min(job.v.n_rows() - job.first_row, job.most_rows);
    if (rows <= 0) return;
    const int tiles = (job.block * job.heads_each() + kTileRows - 1) / kTileRows;
    const int items = rows / job.block * job.kv_heads * tiles * job.parts.groups;
    for (int item = static_cast<int>(blockIdx.x); item < items; item += static_cast<int>(gridDim.x)) {
        int rest = item;
        const int group = rest % job.parts.groups;
        rest /= job.parts.groups;
        const int tile = rest % tiles;
        rest /= tiles;
        const int kv_head = rest % job.kv_heads, first_row = job.first_row + rest / job.kv_heads * job.block;
        const Range range = context_of(job, first_row), groups = groups_of(range);
        if (group < groups.begin || group >= groups.end) continue;
        attend_item<kDim>(s, job, first_row, kv_head, tile, group, range);
        __syncthreads();
    }
}

// A warp a row-head, kDim / 32 columns a lane.
template <int kDim>
__global__ __launch_bounds__(kThreads, 8) void merge_groups(RowsPtr out, Job job) {
    constexpr int kEach = kDim / kWarp;
    wait_for_kernel_before();
    let_next_kernel_start();
    const int item = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / kWarp;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int row = item / job.heads, head = item % job.heads, r = job.first_row + row;
    if (row >= job.most_rows || r >= job.v.n_rows()) return;
    const int first_row = r - r % job.block, kv_head = head / job.heads_each();
    const int position = job.v.position[r];
    const Range groups = groups_of(context_of(job, first_row));

    float o[kEach] = {};
    float top = -INFINITY, sum = 0;
    const size_t part = static_cast<size_t>(item) * static_cast<size_t>(job.parts.groups);
    for (int first = groups.begin; first < groups.end; first += kWarp) {
        const int n = min(kWarp, groups.end - first);
        const float2 part_top_sum =
            lane < n ? job.parts.top_sum[part + static_cast<size_t>(first + lane)] : float2{-INFINITY, 0.0f};
        const Fold f = fold_weights(top, part_top_sum.x);
        const float* from = job.parts.o + (part + static_cast<size_t>(first)) * kDim + lane * kEach;
#pragma unroll 4
        for (int j = 0; j < n; j++) {
            const float keep = __shfl_sync(0xffffffffu, f.keep, j), take = __shfl_sync(0xffffffffu, f.take, j);
            sum = __fmaf_rn(take, __shfl_sync(0xffffffffu, part_top_sum.y, j), sum * keep);
#pragma unroll
            for (int i = 0; i < kEach; i++) o[i] = __fmaf_rn(take, from[j * kDim + i], o[i] * keep);
        }
    }

    // The block's own rows.
    const bf16* q = job.qkv[r] + head * kDim + lane * kEach;
    const int k_column = (job.heads + kv_head) * kDim + lane * kEach, v_column = k_column + job.kv_heads * kDim;
    const int own_rows = job.own_rows(first_row, r);  // alike in a warp
    for (int first = 0; first < own_rows; first += kWarp) {
        const int n = min(kWarp, own_rows - first);
        float score = -INFINITY;  // lane j: of the j-th row from `first`
        for (int j = 0; j < n; j++) {
            const int other = first_row + first + j;
            if (!sees(job.window, position, job.v.position[other])) continue;
            float dot = 0;
#pragma unroll
            for (int i = 0; i < kEach; i++)
                dot = __fmaf_rn(__bfloat162float(q[i]), __bfloat162float(job.qkv[other][k_column + i]), dot);
            dot = warp_sum(dot);
            if (lane == j) score = dot * job.scale;
        }
        const Fold f = fold_weights(top, score);
        for (int j = 0; j < n; j++) {
            const int other = first_row + first + j;
            if (!sees(job.window, position, job.v.position[other])) continue;
            const float keep = __shfl_sync(0xffffffffu, f.keep, j), take = __shfl_sync(0xffffffffu, f.take, j);
            sum = __fmaf_rn(sum, keep, take);
#pragma unroll
            for (int i = 0; i < kEach; i++)
                o[i] = __fmaf_rn(take, __bfloat162float(job.qkv[other][v_column + i]), o[i] * keep);
        }
    }
    bf16* to = out[r] + head * kDim + lane * kEach;
#pragma unroll
    for (int i = 0; i < kEach; i++) to[i] = __float2bfloat16_rn(o[i] / sum);
}

// Any shape and alignment: a block a row-head. Keys: the context in order, then the block's rows that it sees.
__global__ __launch_bounds__(kPlainThreads) void attend_rows(RowsPtr out, Job job, int dim, float scale) {
    extern __shared__ __align__(16) char bytes[];
    wait_for_kernel_before();
    let_next_kernel_start();
    const int r = static_cast<int>(blockIdx.x) / job.heads, head = static_cast<int>(blockIdx.x) % job.heads;
    if (r >= job.v.n_rows()) return;
    const int kv_head = head / job.heads_each(), first_row = r - r % job.block;
    const int position = job.v.position[r], prefix = job.v.prefix[r], stream = job.v.stream[r];
    const int begin = job.window ? min(prefix, max(0, position - job.window + 1)) : 0;
    const int context = (job.window ? min(prefix, position + job.window) : prefix) - begin;
    int own = 0;
    for (int i = 0; i < job.own_rows(first_row, r); i++)
        own += sees(job.window, position, job.v.position[first_row + i]);
    attend_plain(out[r] + head * dim, job.qkv[r] + head * dim, dim, dim, scale, context + own,
                 reinterpret_cast<float*>(bytes), [&](int i, const bf16*& key, const bf16*& value) {
                     if (i < context) {
                         const int row = job.v.pool_row(stream, begin + i);
                         key = job.k_pool[row] + kv_head * dim;
                         value = job.v_pool[row] + kv_head * dim;
                         return;
                     }
                     int other = first_row;
                     for (int left = i - context;; other++) {
                         if (sees(job.window, position, job.v.position[other]) && left-- == 0) break;
                     }
                     key = job.qkv[other] + (job.heads + kv_head) * dim;
                     value = key + job.kv_heads * dim;
                 });
}

constexpr size_t kScratchBytes = size_t{256} << 20;  // of partial results; more rows take several launches

template <int kDim>
void attend(Rows o, Job job, int most_rows) {
    const size_t row = static_cast<size_t>(job.heads) * static_cast<size_t>(job.parts.groups);
    const int blocks = static_cast<int>(kScratchBytes / (row * (kDim + 2) * sizeof(float))) / job.block;
    job.most_rows = std::min(std::max(blocks, 1) * job.block, most_rows);
    const size_t parts = row * static_cast<size_t>(job.most_rows);
    job.parts.o = scratch<float>(Use::attention, parts * (kDim + 2));
    job.parts.top_sum = reinterpret_cast<float2*>(job.parts.o + parts * kDim);
    const int tiles = ceil_div(job.block * (job.heads / job.kv_heads), kTileRows);
    for (job.first_row = 0; job.first_row < most_rows; job.first_row += job.most_rows) {
        const int rows = std::min(job.most_rows, most_rows - job.first_row);
        const int items = rows / job.block * job.kv_heads * tiles * job.parts.groups;
        launch_as<fold_groups<kDim>, static_cast<int>(sizeof(Shared<kDim>))>(
            {.early = true}, static_cast<unsigned>(std::min(items, 2 * bound().processors)), kThreads, job);
        launch_as<merge_groups<kDim>>({.early = true}, static_cast<unsigned>(ceil_div(rows * job.heads, kWarps)),
                                      kThreads, raw(o), job);
    }
}

}  // namespace

void head_norm_rope(Rows x, Vec norm, const Rope& rope, const View& v, int heads, int head_dim, float eps) {
    KD_CHECK(rope.pairs * 2 == head_dim);
    launch_as<norm_and_turn>({.early = true}, static_cast<unsigned>(ceil_div(v.n_rows.most * heads, kWarps)), kThreads,
                             raw(x), raw(norm), raw(rope), raw(v), heads, eps);
}

void draft_append(Rows k_pool, Rows v_pool, Rows k, Rows v, const View& view, const DraftShape& d) {
    const int width = d.kv_heads_rank * d.head_dim;
    const unsigned rows = static_cast<unsigned>(view.n_rows.most);
    if (width % 8 == 0 && aligned16(k_pool) && aligned16(v_pool) && aligned16(k) && aligned16(v))
        launch_as<append_rows<true>>({.early = true}, rows, kThreads, raw(k_pool), raw(v_pool), raw(k), raw(v),
                                     raw(view), width);
    else
        launch_as<append_rows<false>>({.early = true}, rows, kThreads, raw(k_pool), raw(v_pool), raw(k), raw(v),
                                      raw(view), width);
}

void draft_attention(Rows o, Rows qkv, Rows k_pool, Rows v_pool, const View& v, int window, bool causal,
                     const DraftShape& d) {
    if (v.n_rows.most <= 0) return;
    KD_CHECK(d.block > 0 && v.n_rows.most % d.block == 0 && d.heads_rank % d.kv_heads_rank == 0);
    const float scale = 1.0f / std::sqrt(static_cast<float>(d.head_dim));
    Job job{};
    job.qkv = raw(qkv);
    job.k_pool = raw(k_pool);
    job.v_pool = raw(v_pool);
    job.v = raw(v);
    job.parts.groups = groups_below(v.max_pages * KD_PAGE_TOKENS);
    job.block = d.block;
    job.heads = d.heads_rank;
    job.kv_heads = d.kv_heads_rank;
    job.window = window;
    job.causal = causal;
    job.scale = scale * kLog2e;
    const bool aligned = aligned16(qkv) && aligned16(k_pool) && aligned16(v_pool);
    if (aligned && d.head_dim == 128) {
        attend<128>(o, job, v.n_rows.most);
    } else if (aligned && d.head_dim == 64) {
        attend<64>(o, job, v.n_rows.most);
    } else if (aligned && d.head_dim == 32) {
        attend<32>(o, job, v.n_rows.most);
    } else {
        KD_CHECK(2 * d.head_dim <= kPlainWidth);
        launch_as<attend_rows, kPlainBytes>({.early = true}, static_cast<unsigned>(v.n_rows.most * d.heads_rank),
                                            kPlainThreads, raw(o), job, d.head_dim, scale);
    }
}

}  // namespace kd::ops
