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

constexpr int kStep = 16;     // keys folded together below B(position)
constexpr int kTogether = 8;  // rows that share the reading of a step's keys at most

int whole_steps(const View& v, int r) { return std::max(0, raw(v.position)[r] - KD_MAX_DEPTH) / kStep; }

// Rows from `first` on that see the same keys below their B: of one stream, and B not above their prefix.
int rows_together(const View& v, int first, int most) {
    const auto plain = [&](int r) { return raw(v.prefix)[r] >= whole_steps(v, r) * kStep; };
    int n = 1;
    while (n < most && first + n < v.n_rows && raw(v.stream)[first + n] == raw(v.stream)[first] && plain(first) &&
           plain(first + n))
        n++;
    return n;
}

// The heads [head, head + heads) of rows [first, first + n).
void attend_rows(Rows o_lat, Rows q_lat, Rows kv, const View& v, const Shape& s, int first, int n, int head, int heads,
                 float* packed) {
    const cpu::Kernels& kernels = cpu::kernels();
    cpu::Attend a[kTogether];
    int longest = 0;
    for (int i = 0; i < n; i++) {
        a[i].o = raw(o_lat, first + i) + head * s.kv_lora;
        a[i].o_stride = static_cast<size_t>(s.kv_lora);
        a[i].q = raw(q_lat, first + i) + head * s.kv_row();
        a[i].q_stride = static_cast<size_t>(s.kv_row());
        a[i].heads = heads;
        a[i].dk = s.kv_row();
        a[i].dv = s.kv_lora;
        a[i].scale = s.score_scale;
        kernels.attend_begin(a[i]);
        if (whole_steps(v, first + i) > whole_steps(v, first + longest)) longest = i;
    }
    const float* key[cpu::kAttendEach];
    cpu::Keys shared(kv, v, first + longest, 0);
    for (int step = 0; step < whole_steps(v, first + longest); step++) {
        for (int k = 0; k < kStep; k++) key[k] = shared.next();
        kernels.attend_pack(packed, key, kStep, s.kv_row());
        for (int i = 0; i < n; i++)
            if (step < whole_steps(v, first + i)) kernels.attend_step(a[i], packed, key, kStep);
    }
    for (int i = 0; i < n; i++) {
        const int done = whole_steps(v, first + i) * kStep, rest = raw(v.position)[first + i] + 1 - done;
        cpu::Keys own(kv, v, first + i, n > 1 ? done : 0);
        cpu::Keys& keys = n > 1 ? own : shared;
        for (int k = 0; k < rest; k++) key[k] = keys.next();
        kernels.attend_each(a[i], key, key, rest);
        kernels.attend_end(a[i]);
    }
}

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

void mla_latent(Rows q, Rows kv, Rows qkv_a, Vec q_norm, Mat q_b, Vec kv_norm, const Rope& rope, const View& v,
                const Shape& s) {
    rms_norm(qkv_a, qkv_a, q_norm, v.n_rows, s.q_lora, s.rms_eps_lora);
    linear(q, qkv_a, q_b, v.n_rows);
    const Rows kv_a = qkv_a.from(s.q_lora);
    cpu::parallel_for(v.n_rows, cpu::grain_for(s.kv_row()), [&](int begin, int end) {
        for (int r = begin; r < end; r++) {
            float* to = cpu::kv_row(kv, v, raw(v.stream)[r], raw(v.slot)[r]);
            cpu::kernels().rms_norm(to, raw(kv_a, r), raw(kv_norm), s.kv_lora, s.rms_eps_lora);
            cpu::rotate_interleaved(to + s.kv_lora, raw(kv_a, r) + s.kv_lora, rope, raw(v.position)[r]);
        }
    });
}

void mla_attention(Rows o_lat, Rows q_lat, Rows kv, const View& v, const Shape& s) {
    if (v.n_rows <= 0) return;
    // A work item is a few rows and a block of heads; small only where there would be too few for the threads. What an
    // item holds changes no bits: a row's arithmetic is its own.
    const int threads = cpu::threads();
    const int together = std::clamp(v.n_rows / (2 * threads), 1, kTogether);
    const int wanted = v.n_rows >= 2 * threads ? cpu::kHeadBlock : std::max(4, (s.heads_rank + threads - 1) / threads);
    const int block = std::min({wanted, cpu::kHeadBlock, s.heads_rank});
    const int blocks = (s.heads_rank + block - 1) / block;

    int32_t* const first = cpu::scratch<int32_t>(cpu::Use::rows, static_cast<size_t>(v.n_rows));
    int groups = 0;
    double keys = 0;
    for (int r = 0; r < v.n_rows; r += rows_together(v, r, together)) first[groups++] = r;
    for (int r = 0; r < v.n_rows; r++) keys += raw(v.position)[r] + 1;
    const double ops_per_item = keys / groups * block * (s.kv_row() + s.kv_lora);

    cpu::parallel_for(groups * blocks, cpu::grain_for(ops_per_item), [&](int begin, int end) {
        float* const packed = cpu::thread_scratch<float>(static_cast<size_t>(s.kv_row() + kStep) * kStep);
        for (int item = begin; item < end; item++) {
            const int r = first[item / blocks], head = item % blocks * block;
            attend_rows(o_lat, q_lat, kv, v, s, r, rows_together(v, r, together), head,
                        std::min(block, s.heads_rank - head), packed);
        }
    });
}

void mla_value(Rows o, Rows o_lat, Mat v_up, Count n_rows, const Shape& s) {
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
