#include <algorithm>
#include <cstring>

#include "device_context.h"
#include "kernels.h"
#include "keys.h"
#include "ops.h"
#include "raw.h"
#include "rope.h"

namespace kd::ops {

namespace {

constexpr int kStep = 16;  // keys folded together below B(position)

int whole_steps(int position) { return std::max(0, position - KD_MAX_DEPTH) / kStep; }

}  // namespace

void mla_query(Rows q_lat, Rows q, Mat k_up, const Rope& rope, const View& v, const Shape& s) {
    const double ops = static_cast<double>(v.n_rows) * s.nope * s.kv_lora;
    cpu::parallel_for(s.heads_rank, cpu::grain_for(ops), [&](int begin, int end) {
        for (int head = begin; head < end; head++) {
            const Rows to = q_lat.from(head * s.kv_row()), from = q.from(head * (s.nope + s.rope));
            const uint16_t* w =
                raw(k_up.w) + static_cast<size_t>(head) * static_cast<size_t>(s.nope) * static_cast<size_t>(s.kv_lora);
            cpu::kernels().mix_bf16(raw(to), static_cast<size_t>(to.stride), raw(from),
                                    static_cast<size_t>(from.stride), v.n_rows, w, s.nope, s.kv_lora);
            for (int r = 0; r < v.n_rows; r++)
                cpu::rotate_interleaved(raw(to, r) + s.kv_lora, raw(from, r) + s.nope, rope, raw(v.position)[r]);
        }
    });
}

void mla_append(Rows kv, Rows kv_a, Vec norm, const Rope& rope, const View& v, const Shape& s) {
    cpu::parallel_for(v.n_rows, cpu::grain_for(s.kv_row()), [&](int begin, int end) {
        for (int r = begin; r < end; r++) {
            float* to = cpu::kv_row(kv, v, raw(v.stream)[r], raw(v.slot)[r]);
            cpu::kernels().rms_norm(to, raw(kv_a, r), raw(norm), s.kv_lora, s.rms_eps_lora);
            cpu::rotate_interleaved(to + s.kv_lora, raw(kv_a, r) + s.kv_lora, rope, raw(v.position)[r]);
        }
    });
}

void mla_attention(Rows o_lat, Rows q_lat, Rows kv, const View& v, const Shape& s) {
    // A work item is a row and a block of its heads; small blocks only where rows alone would leave threads idle.
    double keys = 0;
    for (int r = 0; r < v.n_rows; r++) keys += raw(v.position)[r] + 1;
    const cpu::Pool* pool = cpu::pool();
    const int threads = pool ? pool->workers() + 1 : 1;
    const int wanted = v.n_rows >= 2 * threads ? cpu::kHeadBlock : std::max(4, (s.heads_rank + threads - 1) / threads);
    const int block = std::min({wanted, cpu::kHeadBlock, s.heads_rank});
    const int blocks = (s.heads_rank + block - 1) / block;
    const double ops_per_item = keys / std::max(1, v.n_rows) * block * (s.kv_row() + s.kv_lora);

    cpu::parallel_for(v.n_rows * blocks, cpu::grain_for(ops_per_item), [&](int begin, int end) {
        const cpu::Kernels& kernels = cpu::kernels();
        for (int item = begin; item < end; item++) {
            const int r = item / blocks, head = item % blocks * block;
            cpu::Attend a;
            a.o = raw(o_lat, r) + head * s.kv_lora;
            a.o_stride = static_cast<size_t>(s.kv_lora);
            a.q = raw(q_lat, r) + head * s.kv_row();
            a.q_stride = static_cast<size_t>(s.kv_row());
            a.heads = std::min(block, s.heads_rank - head);
            a.dk = s.kv_row();
            a.dv = s.kv_lora;
            a.scale = s.score_scale;
            kernels.attend_begin(a);
            cpu::Keys next(kv, v, r);
            const float* key[cpu::kAttendEach];
            const int position = raw(v.position)[r], steps = whole_steps(position);
            for (int step = 0; step < steps; step++) {
                for (int i = 0; i < kStep; i++) key[i] = next.next();
                kernels.attend_step(a, key, key, kStep);
            }
            const int rest = position + 1 - steps * kStep;
            for (int i = 0; i < rest; i++) key[i] = next.next();
            kernels.attend_each(a, key, key, rest);
            kernels.attend_end(a);
        }
    });
}

void mla_value(Rows o, Rows o_lat, Mat v_up, int n_rows, const Shape& s) {
    const double ops = static_cast<double>(n_rows) * s.v_head * s.kv_lora;
    cpu::parallel_for(s.heads_rank, cpu::grain_for(ops), [&](int begin, int end) {
        for (int head = begin; head < end; head++) {
            const uint16_t* w = raw(v_up.w) + static_cast<size_t>(head) * static_cast<size_t>(s.v_head) *
                                                  static_cast<size_t>(s.kv_lora);
            cpu::kernels().dot_bf16(raw(o.from(head * s.v_head)), static_cast<size_t>(o.stride),
                                    {raw(o_lat.from(head * s.kv_lora)), static_cast<size_t>(o_lat.stride), nullptr},
                                    n_rows, w, s.v_head, s.kv_lora);
        }
    });
}

}  // namespace kd::ops
