// The DFlash drafter (Z Lab, arXiv 2602.06036): a small Qwen3-style decoder that proposes a block of tokens in one pass.
// Its context is K/V projected from hidden states of the target (taps); its block is [anchor, MASK x (block - 1)], all of
// whose rows see the whole context and one another, or those before them. Embedding and output head are the target's.
#include "ops.h"
#include "pages.h"

namespace kd {
namespace {

// The k and v rows of a layer's fused projection.
Mat kv_part(const DraftLayer& w, const DraftShape& d) {
    const int q_rows = d.heads_rank * d.head_dim;
    return {w.qkv.w + size_t(q_rows) * w.qkv.k, w.qkv.n - q_rows, w.qkv.k};
}

}  // namespace

void draft_context(Rank& r, Rows taps, const View& v) {
    const Model& m = *r.model;
    const DraftShape& d = m.draft;
    Activations& a = r.act;
    const Count n = v.n_rows;
    const int kv_width = d.kv_heads_rank * d.head_dim;

    ops::linear(a.h, taps, m.fc, n);
    ops::rms_norm(a.h, a.h, m.draft_hidden_norm, n, d.hidden, d.rms_eps);
    for (int i = 0; i < d.layers; i++) {
        const DraftLayer& w = m.draft_layers[i];
        const Rows kv = a.draft_qkv;  // [k | v]
        ops::linear(kv, a.h, kv_part(w, d), n);
        ops::head_norm_rope(kv, w.k_norm, m.draft_rope, v, d.kv_heads_rank, d.head_dim, d.rms_eps);
        ops::draft_append(r.draft_k[i], r.draft_v[i], kv, kv.from(kv_width), v, d);
    }
}

void draft_block(Rank& r, const View& v, int width) {
    const Model& m = *r.model;
    const Shape& s = m.shape;
    const DraftShape& d = m.draft;
    Activations& a = r.act;
    const Count n = v.n_rows;
    const int q_width = d.heads_rank * d.head_dim;

    ops::zero(a.x, n, d.hidden);
    ops::embed(a.y, v.token, m.embed, s.vocab_begin, n);
    ops::add_norm(a.h, a.x, a.y, m.draft_layers[0].input_norm, n, d.hidden, d.rms_eps);
    for (int i = 0; i < d.layers; i++) {
        const DraftLayer& w = m.draft_layers[i];
        ops::linear(a.draft_qkv, a.h, w.qkv, n);  // [q heads | k kv_heads | v kv_heads]
        ops::head_norm_rope(a.draft_qkv, w.q_norm, m.draft_rope, v, d.heads_rank, d.head_dim, d.rms_eps);
        ops::head_norm_rope(a.draft_qkv.from(q_width), w.k_norm, m.draft_rope, v, d.kv_heads_rank, d.head_dim,
                            d.rms_eps);
        ops::draft_attention(a.draft_o, a.draft_qkv, r.draft_k[i], r.draft_v[i], v, d.window[i], d.causal[i] != 0, d);
        ops::linear(a.y, a.draft_o, w.o, n);  // hidden, partial
        ops::add_norm(a.h, a.x, a.y, w.post_norm, n, d.hidden, d.rms_eps);
        ops::linear(a.gate_up, a.h, w.gate_up, n);
        ops::swiglu(a.act, a.gate_up, n, w.down.k);
        ops::linear(a.y, a.act, w.down, n);  // hidden, partial
        const Vec next = i + 1 < d.layers ? m.draft_layers[i + 1].input_norm : m.draft_norm;
        ops::add_norm(a.h, a.x, a.y, next, n, d.hidden, d.rms_eps);
    }
    ops::copy_rows(a.out, {}, a.h, v.out_row, v.n_out, d.hidden);
    ops::logits(a.logits, s.vocab_rank, a.out, m.lm_head, v.n_out);
    ops::top_logprobs(r.draft_token, r.draft_logprob, a.logits, v.n_out, width, s);
}

}  // namespace kd
