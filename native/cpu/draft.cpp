#include <algorithm>
#include <cmath>
#include <cstring>

#include "device_context.h"
#include "error.h"
#include "kernels.h"
#include "keys.h"
#include "ops.h"
#include "raw.h"
#include "rope.h"

namespace kd::ops {

namespace {

constexpr int kStep = 16;  // keys folded together

}  // namespace

void head_norm_rope(Rows x, Vec norm, const Rope& rope, const View& v, int heads, int head_dim, float eps) {
    KD_CHECK(rope.pairs * 2 == head_dim);
    cpu::parallel_for(v.n_rows, cpu::grain_for(2.0 * heads * head_dim), [&](int begin, int end) {
        for (int r = begin; r < end; r++) {
            for (int head = 0; head < heads; head++) {
                float* p = raw(x, r) + head * head_dim;
                cpu::kernels().rms_norm(p, p, raw(norm), head_dim, eps);
                cpu::rotate_halves(p, rope, raw(v.position)[r]);
            }
        }
    });
}

void draft_append(Rows k_pool, Rows v_pool, Rows k, Rows v, const View& view, const DraftShape& d) {
    const size_t bytes = static_cast<size_t>(d.kv_heads_rank) * static_cast<size_t>(d.head_dim) * sizeof(float);
    for (int r = 0; r < view.n_rows; r++) {
        const int stream = raw(view.stream)[r], slot = raw(view.slot)[r];
        memcpy(cpu::kv_row(k_pool, view, stream, slot), raw(k, r), bytes);
        memcpy(cpu::kv_row(v_pool, view, stream, slot), raw(v, r), bytes);
    }
}

void draft_attention(Rows o, Rows qkv, Rows k_pool, Rows v_pool, const View& v, int window, bool causal,
                     const DraftShape& d) {
    if (v.n_rows <= 0) return;
    KD_CHECK(d.block > 0 && v.n_rows % d.block == 0 && d.heads_rank % d.kv_heads_rank == 0);
    const int dim = d.head_dim, heads_per_kv = d.heads_rank / d.kv_heads_rank;
    const int k_column = d.heads_rank * dim, v_column = k_column + d.kv_heads_rank * dim;
    const float scale = 1.0f / std::sqrt(static_cast<float>(dim));

    // Rows [first, first + n) of a block, which see the same keys, stand where Attend has heads: one key serves all.
    const auto attend = [&](int head, int first, int n) {
        const cpu::Kernels& kernels = cpu::kernels();
        const int kv_head = head / heads_per_kv, block = first - first % d.block;
        const int stream = raw(v.stream)[first], prefix = raw(v.prefix)[first], position = raw(v.position)[first];
        cpu::Attend a;
        a.o = raw(o, first) + head * dim;
        a.o_stride = static_cast<size_t>(o.stride);
        a.q = raw(qkv, first) + head * dim;
        a.q_stride = static_cast<size_t>(qkv.stride);
        a.heads = n;
        a.dk = a.dv = dim;
        a.scale = scale;
        kernels.attend_begin(a);
        const float *key[kStep], *value[kStep];
        float* const packed = cpu::thread_scratch<float>(static_cast<size_t>(dim + kStep) * kStep);
        int waiting = 0;
        const auto fold = [&](const float* k, const float* val) {
            key[waiting] = k;
            value[waiting] = val;
            if (++waiting < kStep) return;
            kernels.attend_pack(packed, key, kStep, dim);
            kernels.attend_step(a, packed, value, kStep);
            waiting = 0;
        };
        // The context's token at position p is in slot p.
        const int oldest = window > 0 ? std::max(0, position - window + 1) : 0;
        const int end =
            window > 0 ? static_cast<int>(std::min<int64_t>(prefix, static_cast<int64_t>(position) + window)) : prefix;
        for (int slot = oldest; slot < end; slot++)
            fold(cpu::kv_row(k_pool, v, stream, slot) + kv_head * dim,
                 cpu::kv_row(v_pool, v, stream, slot) + kv_head * dim);
        const int block_end = causal ? first + 1 : block + d.block;
        for (int r = block; r < block_end; r++)
            if (window == 0 || std::abs(raw(v.position)[r] - position) < window)
                fold(raw(qkv, r) + k_column + kv_head * dim, raw(qkv, r) + v_column + kv_head * dim);
        if (waiting > 0) {
            kernels.attend_pack(packed, key, waiting, dim);
            kernels.attend_step(a, packed, value, waiting);
        }
        kernels.attend_end(a);
    };

    double keys = 0;
    for (int r = 0; r < v.n_rows; r++) keys += raw(v.prefix)[r] + d.block;
    const int blocks = v.n_rows / d.block;
    const double ops_per_item = keys / blocks * 2 * dim;
    cpu::parallel_for(blocks * d.heads_rank, cpu::grain_for(ops_per_item), [&](int begin, int end) {
        for (int item = begin; item < end; item++) {
            const int first = item / d.heads_rank * d.block, head = item % d.heads_rank;
            // A causal row sees one key more than the one before; a window that leaves a key out leaves out others for the
            // next row.
            bool alike = !causal;
            for (int r = first; r < first + d.block; r++) {
                alike &= raw(v.prefix)[r] == raw(v.prefix)[first] && raw(v.stream)[r] == raw(v.stream)[first];
                alike &= window == 0 || std::max(raw(v.position)[r], raw(v.prefix)[r]) < window;
            }
            const int together = alike ? cpu::kHeadBlock : 1;
            for (int r = first; r < first + d.block; r += together)
                attend(head, r, std::min(together, first + d.block - r));
        }
    });
}

}  // namespace kd::ops
