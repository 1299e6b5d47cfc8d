// Attention of the target over the latent cache: one key row of 576 serves all heads, as key and (its first 512) as value.
//
// Floor: the keys of a stream once, 1,152 bytes each at 4 TB/s (2.4 us at 8k, 9.4 us at 32k), or 2 * (576 + 512) operations a row,
// head and key: 64 rows of 8 heads at 8k are 9.1 Gflop.
//
// Two kernels. The first (mla_fold.h) folds keys below B(position) (whole_keys) into partial results, group by group. The
// second merges a row-head's groups in order and folds its last keys, one by one.
#include <algorithm>

#include "attend_plain.h"
#include "mla_fold.h"
#include "ops.h"

namespace kd::ops {

namespace {

using namespace cuda;

constexpr size_t kScratchBytes = size_t{256} << 20;  // of partial results; more rows take several launches

// ---- merging and the last keys ------------------------------------------------------------------------------------------

constexpr int kMergeThreads = 256;

template <class K>
struct MergeShared {
    bf16 key[kMostTail][K::kStride];
    float score[kMostTail];
    int row[kMostTail];  // of the pool
};

// A block a row-head, two columns a thread.
template <class K>
__global__ __launch_bounds__(kMergeThreads) void merge_groups(RowsPtr o_lat, FoldJob job) {
    extern __shared__ __align__(16) char bytes[];
    MergeShared<K>& s = *reinterpret_cast<MergeShared<K>*>(bytes);
    if (blockIdx.x == 0 && threadIdx.x == 0) *job.next = 0;
    const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
    const int row = static_cast<int>(blockIdx.x) / job.heads, head = static_cast<int>(blockIdx.x) % job.heads;
    const int r = job.first_row + row;
    if (r >= job.v.n_rows()) return;
    const int position = job.v.position[r], whole = whole_keys(position), tail = position + 1 - whole;

    // 32 groups at once, the first on their way while the last keys are looked up.
    const bool mine = 2 * thread < K::kKv;
    const int groups = groups_below(whole);
    const size_t part = static_cast<size_t>(row * job.heads + head) * static_cast<size_t>(job.parts.groups);
    float2 v[kWarp], top_sum{};
    const auto load_parts = [&](int first) {
        const int n = groups - first;
        top_sum = lane < n ? job.parts.top_sum[part + static_cast<size_t>(first + lane)] : float2{-INFINITY, 0.0f};
        const float* from = job.parts.o + (part + static_cast<size_t>(first)) * K::kKv + 2 * thread;
#pragma unroll
        for (int j = 0; j < kWarp; j++)
            v[j] = mine && j < n ? *reinterpret_cast<const float2*>(from + j * K::kKv) : float2{};
    };
    load_parts(0);

    if (thread < tail) {
        const int slot = key_slot(whole + thread, job.v.prefix[r], job.v.mask + static_cast<size_t>(r) * kMaskWords);
        s.row[thread] = job.v.pool_row(job.v.stream[r], slot);
    }
    __syncthreads();
    constexpr int kPieces = K::kRow / 8;
    for (int c = thread; c < tail * kPieces; c += kMergeThreads) {
        const int k = c / kPieces, piece = c % kPieces * 8;
        cp_async_16(&s.key[k][piece], job.kv[s.row[k]] + piece);
    }
    cp_async_commit();

    float o[2] = {};
    float top = -INFINITY, sum = 0;
    for (int first = 0; first < groups; first += kWarp) {
        if (first > 0) load_parts(first);
        const Fold f = fold_weights(top, top_sum.x);
#pragma unroll
        for (int j = 0; j < kWarp; j++) {
            if (first + j >= groups) break;
            const float keep = __shfl_sync(0xffffffffu, f.keep, j), take = __shfl_sync(0xffffffffu, f.take, j);
            sum = __fmaf_rn(take, __shfl_sync(0xffffffffu, top_sum.y, j), sum * keep);
            o[0] = __fmaf_rn(take, v[j].x, o[0] * keep);
            o[1] = __fmaf_rn(take, v[j].y, o[1] * keep);
        }
    }

    cp_async_wait<0>();
    __syncthreads();
    const bf16* q = job.q[r] + head * K::kRow;
    for (int k = warp; k < tail; k += kMergeThreads / kWarp) {
        float dot = 0;
        for (int c = lane; c < kPieces; c += kWarp) {
            const uint4 a = load16(q + c * 8), b = load16(&s.key[k][c * 8]);
            const uint32_t x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                dot = __fmaf_rn(low_bf16(x[i]), low_bf16(y[i]), dot);
                dot = __fmaf_rn(high_bf16(x[i]), high_bf16(y[i]), dot);
            }
        }
        dot = warp_sum(dot);
        if (lane == 0) s.score[k] = dot * job.scale;
    }
    __syncthreads();
    static_assert(kMostTail == kWarp);
    const Fold f = fold_weights(top, lane < tail ? s.score[lane] : -INFINITY);
    for (int k = 0; k < tail; k++) {
        const float keep = __shfl_sync(0xffffffffu, f.keep, k), take = __shfl_sync(0xffffffffu, f.take, k);
        sum = __fmaf_rn(sum, keep, take);
        const uint32_t value = mine ? *reinterpret_cast<const uint32_t*>(&s.key[k][2 * thread]) : 0;
        o[0] = __fmaf_rn(take, low_bf16(value), o[0] * keep);
        o[1] = __fmaf_rn(take, high_bf16(value), o[1] * keep);
    }
    if (mine) *reinterpret_cast<uint32_t*>(o_lat[r] + head * K::kKv + 2 * thread) = pack_bf16(o[0] / sum, o[1] / sum);
}

// ---- any shape and alignment ----------------------------------------------------------------------------------------------

// A block a row-head.
__global__ __launch_bounds__(kPlainThreads) void attend_rows(RowsPtr o_lat, FoldJob job, int kv_lora, int kv_row,
                                                             float scale) {
    extern __shared__ __align__(16) char bytes[];
    const int r = static_cast<int>(blockIdx.x) / job.heads, head = static_cast<int>(blockIdx.x) % job.heads;
    if (r >= job.v.n_rows()) return;
    const int stream = job.v.stream[r], prefix = job.v.prefix[r];
    const uint64_t* mask = job.v.mask + static_cast<size_t>(r) * kMaskWords;
    attend_plain(o_lat[r] + head * kv_lora, job.q[r] + head * kv_row, kv_row, kv_lora, scale, job.v.position[r] + 1,
                 reinterpret_cast<float*>(bytes), [&](int i, const bf16*& key, const bf16*& value) {
                     key = value = job.kv[job.v.pool_row(stream, key_slot(i, prefix, mask))];
                 });
}

template <class S>
void fold(int row_heads, const FoldJob& job) {
    const dim3 blocks(static_cast<unsigned>(bound().processors));
    constexpr int kBytes = static_cast<int>(sizeof(S));
    const auto with = [&]<int kM>() {
        if constexpr (kBytes + kStaticBytes > kBlockBytes)
            launch_hopper<fold_groups<S, kM>, kBytes>(blocks, kFoldThreads, job);
        else
            launch<fold_groups<S, kM>, kBytes>(blocks, kFoldThreads, job);
    };
    if (row_heads <= 16)
        with.template operator()<1>();
    else if (row_heads <= 32)
        with.template operator()<2>();
    else
        with.template operator()<4>();
}

template <class K>
void attend(Rows o_lat, FoldJob job, int most_rows, int heads) {
    const size_t row = static_cast<size_t>(heads) * static_cast<size_t>(job.parts.groups);
    const size_t fit = kScratchBytes / (row * (K::kKv + 2) * sizeof(float));
    const int tiles = ceil_div(heads, kMostRowHeads);  // of a row of its own
    KD_CHECK(tiles <= kMostTiles);
    job.most_rows = static_cast<int>(std::clamp<size_t>(fit, 1, static_cast<size_t>(kMostTiles / tiles)));
    job.most_rows = std::min(job.most_rows, most_rows);
    constexpr size_t kHead = 64;  // floats: the counter, and room that keeps the rest aligned
    const size_t parts = row * static_cast<size_t>(job.most_rows);
    float* const scratch = cuda::scratch<float>(Use::attention, kHead + parts * (K::kKv + 2));
    job.next = reinterpret_cast<int*>(scratch);
    job.parts.o = scratch + kHead;
    job.parts.top_sum = reinterpret_cast<float2*>(job.parts.o + parts * K::kKv);
    // The same bits either way: more of the same steps are on their way where a block has room for them.
    const bool hopper = bound().group.name == "sm_90";
    for (job.first_row = 0; job.first_row < most_rows; job.first_row += job.most_rows) {
        const int row_heads = std::min(job.most_rows, most_rows - job.first_row) * heads;
        if (hopper)
            fold<FoldShared<K, 8, 2>>(row_heads, job);
        else
            fold<FoldShared<K, 4, 1>>(row_heads, job);
        launch<merge_groups<K>, static_cast<int>(sizeof(MergeShared<K>))>(static_cast<unsigned>(row_heads),
                                                                          kMergeThreads, raw(o_lat), job);
    }
}

}  // namespace

void mla_attention(Rows o_lat, Rows q_lat, Rows kv, const View& v, const Shape& s) {
    if (v.n_rows.most <= 0) return;
    FoldJob job{};
    job.q = raw(q_lat);
    job.kv = raw(kv);
    job.v = raw(v);
    job.heads = s.heads_rank;
    job.scale = s.score_scale * kLog2e;
    job.parts.groups = groups_below(v.max_pages * KD_PAGE_TOKENS);
    const bool aligned = aligned16(o_lat) && aligned16(q_lat) && aligned16(kv);
    if (aligned && s.kv_lora == 512 && s.rope == 64) {
        attend<KeyShape<512, 64>>(o_lat, job, v.n_rows.most, s.heads_rank);
    } else if (aligned && s.kv_lora == 64 && s.rope == 16) {
        attend<KeyShape<64, 16>>(o_lat, job, v.n_rows.most, s.heads_rank);
    } else {
        KD_CHECK(s.kv_row() + s.kv_lora <= kPlainWidth);
        launch<attend_rows, kPlainBytes>(static_cast<unsigned>(v.n_rows.most * s.heads_rank), kPlainThreads, raw(o_lat),
                                         job, s.kv_lora, s.kv_row(), s.score_scale);
    }
}

}  // namespace kd::ops
