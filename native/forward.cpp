// The target model: DeepSeek-V3 / Kimi-K2 (MLA attention in absorbed form, INT4 mixture of experts), as transformers'
// modeling_deepseek_v3 defines it. Shapes are this rank's; every block ends in a partial sum that add_norm reduces over
// the ranks, adds to the residual stream and norms for the next block.
#include "ops.h"
#include "pages.h"

namespace kd {
namespace {

void attention(Rank& r, const Layer& w, Rows kv, const View& v) {
    const Model& m = *r.model;
    const Shape& s = m.shape;
    Activations& a = r.act;
    const Count n = v.n_rows;
    ops::linear(a.qkv_a, a.h, w.qkv_a, n);  // [q_lora | kv_lora | rope]
    // heads x [nope | rope]; cache: [latent | rope key]
    ops::mla_latent(a.q, kv, a.qkv_a, w.q_a_norm, w.q_b, w.kv_a_norm, m.rope, v, s);
    ops::mla_query(a.q_lat, a.q, w.k_up, m.rope, v, s);  // heads x [kv_lora | rope]
    ops::mla_attention(a.o_lat, a.q_lat, kv, v, s);      // heads x kv_lora
    ops::mla_value(a.o, a.o_lat, w.v_up, n, s);          // heads x v_head
    ops::linear(a.y, a.o, w.o, n);                       // hidden, partial
}

void mlp(Rank& r, Mat gate_up, Mat down, Count n) {
    Activations& a = r.act;
    ops::linear(a.gate_up, a.h, gate_up, n);  // [gate | up]
    ops::swiglu(a.act, a.gate_up, n, down.k);
    ops::linear(a.y, a.act, down, n);  // hidden, partial
}

void experts(Rank& r, const Layer& w, Count n) {
    const Shape& s = r.model->shape;
    Activations& a = r.act;
    ops::side_by_side(
        n, [&] { ops::route(a.expert, a.weight, a.h, w.router, w.router_bias, n, s); },
        [&] { mlp(r, w.shared_gate_up, w.shared_down, n); });  // the shared experts, one wide MLP
    ops::moe(a.y, a.h, a.expert, a.weight, w.routed, n, s);    // adds
}

}  // namespace

void forward(Rank& r, const View& v) {
    const Model& m = *r.model;
    const Shape& s = m.shape;
    Activations& a = r.act;
    const Count n = v.n_rows;
    size_t tap = 0;

    ops::zero(a.x, n, s.hidden);
    ops::embed(a.y, v.token, m.embed, s.vocab_begin, n);
    ops::add_norm(a.h, a.x, a.y, m.layers[0].input_norm, n, s.hidden, s.rms_eps);
    for (int i = 0; i < s.layers; i++) {
        const Layer& w = m.layers[i];
        attention(r, w, r.kv[i], v);
        ops::add_norm(a.h, a.x, a.y, w.post_norm, n, s.hidden, s.rms_eps);
        if (w.dense)
            mlp(r, w.gate_up, w.down, n);
        else
            experts(r, w, n);
        const Vec next = i + 1 < s.layers ? m.layers[i + 1].input_norm : m.norm;
        ops::add_norm(a.h, a.x, a.y, next, n, s.hidden, s.rms_eps);
        if (tap < m.draft.taps.size() && m.draft.taps[tap] == i) {
            ops::keep_tap(a.taps.from(int(tap) * s.hidden), a.x, n, s.hidden);
            tap++;
        }
    }
    if (v.n_out == 0) return;
    ops::copy_rows(a.out, {}, a.h, v.out_row, v.n_out, s.hidden);
    ops::logits(a.logits, s.vocab_rank, a.out, m.lm_head, v.n_out);
}

}  // namespace kd
