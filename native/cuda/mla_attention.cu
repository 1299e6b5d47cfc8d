// Attention of the target over the latent cache: one key row of 576 serves all heads, as key and (its first 512) as value.
//
// Floor: the keys of a stream once, 1,152 bytes each at 4 TB/s (2.4 us at 8k, 9.4 us at 32k), or 2 * (576 + 512) operations a row,
// head and key: 64 rows of 8 heads at 8k are 9.1 Gflop.
//
// Two kernels. The first (mla_fold.h; mla_wide.h on sm_90) folds keys below B(position) (whole_keys) into partial results, group by
// group. The second (mla_merge.h) merges a row-head's groups in order and folds its last keys, one by one.
#include <algorithm>
#include <utility>

#include "attend_plain.h"
#include "mla_fold.h"
#include "mla_merge.h"
#include "mla_wide.h"
#include "ops.h"

namespace kd::ops {

namespace {

using namespace cuda;

constexpr size_t kScratchBytes = size_t{256} << 20;  // of partial results; more rows take several launches

// ---- any shape and alignment ----------------------------------------------------------------------------------------------

// A block a row-head.
__global__ __launch_bounds__(kPlainThreads) void attend_rows(RowsPtr o_lat, MergeJob job, int kv_lora, int kv_row,
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
void fold(const FoldJob& job) {
    const dim3 blocks(static_cast<unsigned>(bound().processors));
    constexpr int kBytes = static_cast<int>(sizeof(S));
    const int row_heads = job.most_rows * job.heads;
    if (row_heads <= 16)
        launch_as<fold_groups<S, 1>, kBytes>({.early = true}, blocks, kFoldThreads, job);
    else if (row_heads <= 32)
        launch_as<fold_groups<S, 2>, kBytes>({.early = true}, blocks, kFoldThreads, job);
    else
        launch_as<fold_groups<S, 4>, kBytes>({.early = true}, blocks, kFoldThreads, job);
}

constexpr size_t bytes_of_part(int columns, size_t each) {
    return static_cast<size_t>(columns) * each + sizeof(float2);
}

// How many rows' partial results have room at once.
template <class Part>
int fitting_rows(const MergeJob& job, int columns) {
    const size_t row = static_cast<size_t>(job.heads) * static_cast<size_t>(job.groups);
    return static_cast<int>(
        std::clamp<size_t>(kScratchBytes / (row * bytes_of_part(columns, sizeof(Part))), 1, 1 << 20));
}
// That room: (sums of scores, sums of values).
template <class Part>
std::pair<float2*, Part*> room(const MergeJob& job, int columns, int rows) {
    const size_t parts = static_cast<size_t>(rows) * static_cast<size_t>(job.heads) * static_cast<size_t>(job.groups);
    char* const from = cuda::scratch<char>(Use::attention, parts * bytes_of_part(columns, sizeof(Part)));
    return {reinterpret_cast<float2*>(from + parts * static_cast<size_t>(columns) * sizeof(Part)),
            reinterpret_cast<Part*>(from)};
}

template <class K, class Part, auto groups_of>
void merge(Rows o_lat, const MergeJob& job, int rows) {
    launch_as<merge_groups<K, Part, groups_of>, static_cast<int>(sizeof(MergeShared<K>))>(
        {.early = true}, static_cast<unsigned>(rows * job.heads), kMergeThreads, raw(o_lat), job);
}

template <class S>
void attend(Rows o_lat, MergeJob job, int most_rows) {
    using K = typename S::K;
    job.groups = groups_below(job.v.max_pages * KD_PAGE_TOKENS);
    const int tiles = ceil_div(job.heads, kMostRowHeads);  // of a row of its own
    KD_CHECK(tiles <= kMostTiles);
    const int each = std::min({fitting_rows<float>(job, K::kKv), kMostTiles / tiles, most_rows});
    const auto [top_sum, o] = room<float>(job, K::kKv, each);
    job.top_sum = top_sum;
    job.o = o;
    for (; job.first_row < most_rows; job.first_row += each) {
        const int rows = std::min(each, most_rows - job.first_row);
        fold<S>({job.q, job.kv, job.v, {top_sum, o, job.groups}, job.heads, job.first_row, rows, job.scale});
        merge<K, float, groups_below>(o_lat, job, rows);
    }
}

// A page of keys as boxes of 64 columns, some at a time: [box][row][column].
CUtensorMap boxes_of(const Rows& kv) {
    using Encode = CUresult(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
    static Encode* const encode = [] {
        void* found = nullptr;
        cudaDriverEntryPointQueryResult result{};
        check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result),
              "cuTensorMapEncodeTiled");
        KD_CHECK(found && result == cudaDriverEntryPointSuccess);
        return reinterpret_cast<Encode*>(found);
    }();
    CUtensorMap map;
    constexpr cuuint32_t kColumns = 64;
    const cuuint64_t sizes[3] = {kColumns, cuuint64_t{1} << 31, kBoxes};  // rows: so many that no page is out of bounds
    const cuuint64_t strides[2] = {static_cast<cuuint64_t>(kv.stride) * sizeof(bf16), kColumns * sizeof(bf16)};
    const cuuint32_t box[3] = {kColumns, KD_PAGE_TOKENS, kBoxesCopied}, steps[3] = {1, 1, 1};
    KD_CHECK(encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, raw(kv).p, sizes, strides, box, steps,
                    CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                    CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS);
    return map;
}

using WideKey = KeyShape<kWideKv, kWideRow - kWideKv>;

void attend_wide(Rows o_lat, const Rows& kv, MergeJob job, int most_rows) {
    job.groups = most_wide_groups(job.v.max_pages * KD_PAGE_TOKENS);
    const int tiles = ceil_div(job.heads, kTileRows);
    KD_CHECK(tiles <= kWideTiles);
    const int each =
        std::min({fitting_rows<bf16>(job, kWideKv), wide_rows(job.heads, job.v.n_streams.most), most_rows});
    const auto [top_sum, o] = room<bf16>(job, kWideKv, each);
    job.top_sum = top_sum;
    job.o = o;
    const CUtensorMap keys = boxes_of(kv);
    for (; job.first_row < most_rows; job.first_row += each) {
        const int rows = std::min(each, most_rows - job.first_row);
        launch_wide(static_cast<unsigned>(bound().processors), keys,
                    {job.q, job.kv, job.v, top_sum, o, job.groups, job.heads, job.first_row, rows, to_divide(job.heads),
                     job.scale});
        merge<WideKey, bf16, wide_groups>(o_lat, job, rows);
    }
}

}  // namespace

void mla_attention(Rows o_lat, Rows q_lat, Rows kv, const View& v, const Shape& s) {
    if (v.n_rows.most <= 0) return;
    MergeJob job{};
    job.q = raw(q_lat);
    job.kv = raw(kv);
    job.v = raw(v);
    job.heads = s.heads_rank;
    job.scale = s.score_scale * kLog2e;
    const bool aligned = aligned16(o_lat) && aligned16(q_lat) && aligned16(kv);
    if (aligned && s.kv_lora == kWideKv && s.kv_row() == kWideRow && bound().group.name == "sm_90") {
        attend_wide(o_lat, kv, job, v.n_rows.most);
    } else if (aligned && s.kv_lora == kWideKv && s.kv_row() == kWideRow) {
        attend<FoldShared<WideKey, 4, 1>>(o_lat, job, v.n_rows.most);
    } else if (aligned && s.kv_lora == 64 && s.rope == 16) {
        attend<FoldShared<KeyShape<64, 16>, 8, 2>>(o_lat, job, v.n_rows.most);
    } else {
        KD_CHECK(s.kv_row() + s.kv_lora <= kPlainWidth);
        launch<attend_rows, kPlainBytes>(static_cast<unsigned>(v.n_rows.most * s.heads_rank), kPlainThreads, raw(o_lat),
                                         job, s.kv_lora, s.kv_row(), s.score_scale);
    }
}

}  // namespace kd::ops
