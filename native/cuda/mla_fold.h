// Attention over the latent cache, first part: keys below whole_keys(position) to partial results (mla_attention.cu).
//
// Inside an item (mla_plan.h), a step is 16 keys. Scores: a key's 576 elements are cut into four slices; warps w and w + 4
// multiply slice w, whose queries stay in registers, and the slices are added in order through shared memory. Values: each
// warp accumulates an eighth of the columns in registers. So a step is read from shared memory once or twice, however many
// rows.
#pragma once

#include "launch.h"
#include "mla_plan.h"
#include "mma.h"

namespace kd::cuda {

// The mask tells the compiler that it is not negative: no rounding towards zero in what is divided.
__device__ inline int thread_of_fold() { return static_cast<int>(threadIdx.x & (kFoldThreads - 1)); }

// The first of a step's keys.
template <class S>
__device__ const bf16* step_keys(const S& s, const FoldJob& job, int step) {
    constexpr int kStepsPage = KD_PAGE_TOKENS / kStep;
    const size_t row = static_cast<size_t>(s.page[step / kStepsPage]) * KD_PAGE_TOKENS +
                       static_cast<size_t>(step % kStepsPage * kStep);
    return job.kv.p + row * static_cast<size_t>(job.kv.stride);
}

// Half a warp a key.
template <class S>
__device__ void load_step(S& s, const FoldJob& job, int step, int stage) {
    constexpr int kHalf = kWarp / 2, kPieces = S::K::kRow / 8;
    static_assert(kFoldThreads == kStep * kHalf);
    const int key = thread_of_fold() / kHalf, piece = thread_of_fold() % kHalf;
    const bf16* from =
        step_keys(s, job, step) + static_cast<size_t>(key) * static_cast<size_t>(job.kv.stride) + piece * 8;
    bf16* to = &s.key[stage][key][piece * 8];
#pragma unroll
    for (int i = 0; i < kPieces; i += kHalf) {
        if (i + kHalf <= kPieces || i + piece < kPieces) cp_async_16(to + i * 8, from + i * 8);
    }
}

// Where scores and probabilities lie: halves of a row of 16 change places in some rows, for the banks' sake.
__device__ inline int score_column(int row, int column) { return column ^ (row >> 1 & 1) << 3; }
__device__ inline int prob_column(int row, int column) { return column ^ (row >> 2 & 1) << 3; }

// A warp's part in an item of kM times 16 row-heads, kM 1, 2 or 4.
template <class S, int kM>
struct Attender {
    using K = typename S::K;
    static constexpr int kMine = kM == 4 ? 2 : 1;  // 16-row tiles whose scores a warp works on
    static constexpr int kN = kM == 1 ? 1 : 2;     // and tiles of 8 keys

    __device__ Attender(S& s, const FoldJob& job, unsigned loaded) : s(s), job(job), loaded(loaded) {}

    S& s;
    const FoldJob& job;
    const int thread = thread_of_fold(), lane = thread % kWarp, warp = thread / kWarp;
    const int g = lane / 4, t = lane % 4, slice = warp % kSlices, half = warp / kSlices;
    const int my_tile = kM == 4 ? 2 * half : kM == 2 ? half : 0;
    const unsigned loaded;  // steps of items before: where the ring of stages is

    // The last product's queries wait in shared memory where registers would not do.
    static constexpr int kHeld = K::kStepsOfSlice - (kM == 4 && S::kBuffers == 2 ? 1 : 0);
    uint32_t q[kMine][kHeld][4];
    float o[kM][K::kTiles][4] = {};
    float top = -INFINITY, sum = 0;  // of row-head thread / 4, in four threads

    // Queries of the warp's slice; row-heads past the tile's `count` are 0. `row_head`: the tile's first, of the launch.
    __device__ void load_queries(int row_head, int count) {
#pragma unroll
        for (int m = 0; m < kMine; m++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int at = (my_tile + m) * 16 + h * 8 + g, r = (row_head + at) / job.heads;
                const bf16* from = job.q[job.first_row + r] + (row_head + at - r * job.heads) * K::kRow +
                                   slice * K::kStepsOfSlice * 16 + 2 * t;
#pragma unroll
                for (int k = 0; k < K::kStepsOfSlice; k++) {
                    const bool there = at < count && has_product(k);
                    const uint32_t low = there ? *reinterpret_cast<const uint32_t*>(from + k * 16) : 0;
                    const uint32_t high = there ? *reinterpret_cast<const uint32_t*>(from + k * 16 + 8) : 0;
                    uint32_t* const to = k < kHeld ? q[m][k < kHeld ? k : 0] : s.query[warp][m][lane];
                    to[h] = low;
                    to[h + 2] = high;
                }
            }
        }
    }

    // Only where the slices differ in length is this more than a constant.
    __device__ bool has_product(int k) const {
        return K::kStepsOfRow % kSlices == 0 || slice * K::kStepsOfSlice + k < K::kStepsOfRow;
    }

    // ---- scores of a step: q times keys. Reading the keys comes apart from the rest where registers allow.

    using KeyWords = uint32_t[2 * kN];
    __device__ const bf16* slice_of_keys(int step) const {
        // rows: keys; with two tiles of keys the four matrices are (keys 0-7, k 0), (0-7, k 8), (8-15, k 0), (8-15, k 8)
        const int row = kN == 2 ? lane % 8 + lane / 16 * 8 : lane % 8 + half * 8;
        return &s.key[stage_of(step)][row][lane / 8 % 2 * 8 + slice * K::kStepsOfSlice * 16];
    }
    __device__ void read_keys(KeyWords& b, const bf16* from, int k) const {
        if (!has_product(k)) return;
        if constexpr (kN == 2)
            ldmatrix_x4(b, from + k * 16);
        else
            ldmatrix_x2(b, from + k * 16);
    }
    __device__ void multiply(float (&d)[kMine][kN][4], const KeyWords& b, int k) const {
        if (!has_product(k)) return;
#pragma unroll
        for (int m = 0; m < kMine; m++) {
#pragma unroll
            for (int n = 0; n < kN; n++) {
                if (k < kHeld) {
                    mma_bf16(d[m][n], q[m][k < kHeld ? k : 0], {b[2 * n], b[2 * n + 1]});
                } else {
                    const uint4 a = load16(s.query[warp][m][lane]);
                    mma_bf16(d[m][n], {a.x, a.y, a.z, a.w}, {b[2 * n], b[2 * n + 1]});
                }
            }
        }
    }
    __device__ void store_scores(const float (&d)[kMine][kN][4], int step) {
        float (*to)[kStep] = s.score[step & (S::kBuffers - 1)][slice];
#pragma unroll
        for (int m = 0; m < kMine; m++) {
            const int row = (my_tile + m) * 16 + g;
#pragma unroll
            for (int n = 0; n < kN; n++) {
                const int column = score_column(row, (kN == 2 ? n : half) * 8 + 2 * t);
                *reinterpret_cast<float2*>(&to[row][column]) = {d[m][n][0], d[m][n][1]};
                *reinterpret_cast<float2*>(&to[row + 8][column]) = {d[m][n][2], d[m][n][3]};
            }
        }
    }
    __device__ void scores(int step) {
        const bf16* from = slice_of_keys(step);
        float d[kMine][kN][4] = {};
#pragma unroll
        for (int k = 0; k < K::kStepsOfSlice; k++) {
            KeyWords b;
            read_keys(b, from, k);
            multiply(d, b, k);
        }
        store_scores(d, step);
    }

    // ---- scores to probabilities: four threads a row-head, four keys each. Where row-heads are few, further threads do the same.

    struct Folded {
        uint32_t p[2];
        float keep;
    };
    __device__ int my_row() const { return thread / 4 & (kM * 16 - 1); }
    __device__ Folded fold(int step) {
        const int row = my_row(), column = t * 4;
        const bool mine = step < s.steps[row];
        float x[4];
#pragma unroll
        for (int i = 0; i < kSlices; i++) {
            const float4 part =
                *reinterpret_cast<const float4*>(&s.score[step & (S::kBuffers - 1)][i][row][score_column(row, column)]);
            x[0] = i == 0 ? part.x : x[0] + part.x;
            x[1] = i == 0 ? part.y : x[1] + part.y;
            x[2] = i == 0 ? part.z : x[2] + part.z;
            x[3] = i == 0 ? part.w : x[3] + part.w;
        }
        float best = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3])) * job.scale;
        best = fmaxf(best, __shfl_xor_sync(0xffffffffu, best, 1));
        best = fmaxf(best, __shfl_xor_sync(0xffffffffu, best, 2));
        best = fmaxf(best, top);
        if (!mine) return {{0, 0}, 1};
        const float keep = exp2_fast(top - best);
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = exp2_fast(x[i] * job.scale - best);
        const uint32_t p0 = pack_bf16(x[0], x[1]), p1 = pack_bf16(x[2], x[3]);
        sum = __fmaf_rn(sum, keep, (low_bf16(p0) + high_bf16(p0)) + (low_bf16(p1) + high_bf16(p1)));
        top = best;
        return {{p0, p1}, keep};
    }
    __device__ void store_probs(const Folded& f, int step) {
        const int row = my_row(), buffer = step & (S::kBuffers - 1);
        if (thread / 4 != row) return;
        *reinterpret_cast<uint2*>(&s.prob[buffer][row][prob_column(row, t * 4)]) = {f.p[0], f.p[1]};
        if (t == 0) s.keep[buffer][row] = f.keep;
    }

    // Both at once, scores of the step after: the products of one wait for each other, and so do the sums of the other.
    __device__ void fold_and_score(int step) {
        const bf16* from = slice_of_keys(step + 1);
        KeyWords b[K::kStepsOfSlice];
#pragma unroll
        for (int k = 0; k < K::kStepsOfSlice; k++) read_keys(b[k], from, k);
        const Folded f = fold(step);
        float d[kMine][kN][4] = {};
#pragma unroll
        for (int k = 0; k < K::kStepsOfSlice; k++) multiply(d, b[k], k);
        store_probs(f, step);
        store_scores(d, step + 1);
    }

    // ---- values

    __device__ void values(int step) {
        const bf16(*key)[K::kStride] = s.key[stage_of(step)];
        const int buffer = step & (S::kBuffers - 1);
        const bf16* from = &key[lane % 16][warp * K::kTiles * 8];
        uint32_t p[kM][4], b[2][4];  // b: two tiles of columns, and the next two
        if constexpr (K::kTiles == 1) {
            uint32_t two[2];
            ldmatrix_x2_trans(two, from);
            b[0][0] = two[0];
            b[0][1] = two[1];
        } else {
            ldmatrix_x4_trans(b[0], from + lane / 16 * 8);
        }
#pragma unroll
        for (int m = 0; m < kM; m++) {
            const int row = m * 16 + lane % 16;
            ldmatrix_x4(p[m], &s.prob[buffer][row][prob_column(row, lane / 16 * 8)]);
            const float low = s.keep[buffer][m * 16 + g], high = s.keep[buffer][m * 16 + g + 8];
            if (__any_sync(0xffffffffu, low != 1.0f || high != 1.0f)) {  // times 1 changes nothing
#pragma unroll
                for (int n = 0; n < K::kTiles; n++) {
                    o[m][n][0] *= low;
                    o[m][n][1] *= low;
                    o[m][n][2] *= high;
                    o[m][n][3] *= high;
                }
            }
        }
        if constexpr (K::kTiles == 1) {
#pragma unroll
            for (int m = 0; m < kM; m++) mma_bf16(o[m][0], p[m], {b[0][0], b[0][1]});
        } else {
#pragma unroll
            for (int n = 0; n < K::kTiles; n += 2) {
                if (n + 2 < K::kTiles) ldmatrix_x4_trans(b[(n / 2 + 1) % 2], from + (n + 2) * 8 + lane / 16 * 8);
                const uint32_t (&v)[4] = b[n / 2 % 2];
#pragma unroll
                for (int m = 0; m < kM; m++) {
                    mma_bf16(o[m][n], p[m], {v[0], v[1]});
                    mma_bf16(o[m][n + 1], p[m], {v[2], v[3]});
                }
            }
        }
    }

    __device__ int stage_of(int step) const {
        return static_cast<int>((loaded + static_cast<unsigned>(step)) % S::kStages);
    }
    // Starts the copy of a step's keys, if there is such a step.
    __device__ void load(int step, int steps) {
        if (step < steps) load_step(s, job, step, stage_of(step));
        cp_async_commit();
    }

    // With the ring empty. The threads of a row-head have each summed their own keys.
    __device__ void run(int steps) {
        constexpr int kStages = S::kStages;
        for (int i = 0; i < kStages - 1; i++) load(i, steps);
        if constexpr (S::kBuffers == 1) {
            cp_async_wait<kStages - 2>();
            __syncthreads();
            scores(0);
            for (int step = 0; step < steps; step++) {
                __syncthreads();  // scores are there; the step before is done with, so its stage can be filled
                load(step + kStages - 1, steps);
                store_probs(fold(step), step);
                cp_async_wait<kStages - 2>();
                __syncthreads();
                values(step);
                if (step + 1 < steps) scores(step + 1);
            }
        } else {
            cp_async_wait<kStages - 3>();  // the first two steps' keys
            __syncthreads();
            scores(0);
            __syncthreads();
            for (int step = 0; step < steps; step++) {
                if constexpr (kM < 4) {
                    fold_and_score(step);  // after the last step, scores of nothing, which nobody reads
                } else {
                    store_probs(fold(step), step);
                    if (step + 1 < steps) scores(step + 1);
                }
                cp_async_wait<kStages - 4>();
                __syncthreads();  // probabilities and scores are there; the step before is done with
                values(step);
                load(step + kStages - 1, steps);
            }
        }
        cp_async_wait<0>();
    }

    // What the item leaves. It is looked up again rather than kept: registers are short before.
    __device__ void write_parts() {
        const Tile tile = s.tile[s.tile_now];
        const size_t first = static_cast<size_t>(tile.first * job.heads + tile.piece * s.row_heads);
        const size_t group = static_cast<size_t>(s.group_now);
        const auto part_of = [&](int at) {
            return (first + static_cast<size_t>(at)) * static_cast<size_t>(job.parts.groups) + group;
        };
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        if (t == 0 && thread / 4 < kM * 16 && s.steps[thread / 4] > 0)
            job.parts.top_sum[part_of(thread / 4)] = {top, sum};
#pragma unroll
        for (int m = 0; m < kM; m++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int at = m * 16 + h * 8 + g;
                if (s.steps[at] == 0) continue;
                float* to = job.parts.o + part_of(at) * K::kKv + warp * K::kTiles * 8 + 2 * t;
#pragma unroll
                for (int n = 0; n < K::kTiles; n++)
                    *reinterpret_cast<float2*>(to + n * 8) = {o[m][n][2 * h], o[m][n][2 * h + 1]};
            }
        }
    }
};

// The item s.tile_now, s.group_now.
template <int kM, class S>
__device__ void attend_item(S& s, const FoldJob& job, unsigned& loaded) {
    const Tile tile = s.tile[s.tile_now];
    const int thread = thread_of_fold(), lane = thread % kWarp;
    const int first = tile.piece * s.row_heads;  // row-head of the stream's rows
    const int count = min(s.row_heads, (tile.last - tile.first + 1) * job.heads - first);
    const int group = s.group_now, keys = group_first(group);
    Attender<S, kM> a(s, job, loaded);
    a.load_queries(tile.first * job.heads + first, count);

    int steps = 0;
    for (int at = lane; at < kMostRowHeads; at += kWarp) {
        int mine = 0;
        if (at < count) {
            const int whole = s.whole[tile.first + (first + at) / job.heads];
            mine = min(max(whole - keys / kStep, 0), group_keys(group) / kStep);
        }
        if (thread < kWarp) s.steps[at] = mine;
        steps = max(steps, mine);
    }
#pragma unroll
    for (int d = kWarp / 2; d > 0; d /= 2) steps = max(steps, __shfl_xor_sync(0xffffffffu, steps, d));
    if (thread < (steps * kStep + KD_PAGE_TOKENS - 1) / KD_PAGE_TOKENS) {
        const int stream = job.v.stream[job.first_row + tile.first];
        s.page[thread] = job.v.page_table[stream * job.v.max_pages + keys / KD_PAGE_TOKENS + thread];
    }
    __syncthreads();
    a.run(steps);
    a.write_parts();
    loaded += static_cast<unsigned>(steps);
}

// kM: the most a tile of this launch can need.
template <class S, int kM>
__global__ __launch_bounds__(kFoldThreads, 1) void fold_groups(FoldJob job) {
    extern __shared__ __align__(16) char bytes[];
    S& s = *reinterpret_cast<S*>(bytes);
    wait_for_kernel_before();
    let_next_kernel_start();
    const int rows = min(job.v.n_rows() - job.first_row, job.most_rows);
    if (rows <= 0) return;
    plan_tiles(s, job, rows);
    unsigned loaded = 0;
    int item = static_cast<int>(blockIdx.x);
    for (;;) {
        if (threadIdx.x < kWarp) find_item(s, item);
        __syncthreads();
        if (s.tile_now < 0) return;
        const Tile tile = s.tile[s.tile_now];
        const int count = min(s.row_heads, (tile.last - tile.first + 1) * job.heads - tile.piece * s.row_heads);
        if (kM == 1 || count <= 16)
            attend_item<1>(s, job, loaded);
        else if (kM == 2 || count <= 32)
            attend_item<kM == 1 ? 1 : 2>(s, job, loaded);
        else
            attend_item<kM>(s, job, loaded);
        __syncthreads();
        item += static_cast<int>(gridDim.x);  // which block does what is never seen in a result
    }
}

}  // namespace kd::cuda
