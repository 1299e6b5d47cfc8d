// One probe for each operation: host arrays in, the operation on every rank, results out. See probe.h.

#include "probe.h"

#include "ops.h"
#include "probe_rig.h"
#include "tree/registry.h"

using namespace kd;
using probe::Rig;
using probe::run;

namespace {

Shape shape(const kd_probe_shape* p) {
    Shape s;
    s.hidden = p->hidden;
    s.layers = p->layers;
    s.dense_layers = p->dense_layers;
    s.heads = p->heads;
    s.heads_rank = p->heads_rank;
    s.q_lora = p->q_lora;
    s.kv_lora = p->kv_lora;
    s.nope = p->nope;
    s.rope = p->rope;
    s.v_head = p->v_head;
    s.inter = p->inter;
    s.inter_rank = p->inter_rank;
    s.moe_inter = p->moe_inter;
    s.moe_inter_rank = p->moe_inter_rank;
    s.shared_inter = p->shared_inter;
    s.shared_inter_rank = p->shared_inter_rank;
    s.experts = p->experts;
    s.experts_per_token = p->experts_per_token;
    s.vocab = p->vocab;
    s.vocab_begin = p->vocab_begin;
    s.vocab_rank = p->vocab_rank;
    s.max_positions = p->max_positions;
    s.rms_eps = p->rms_eps;
    s.rms_eps_lora = p->rms_eps_lora;
    s.score_scale = p->score_scale;
    s.routed_scale = p->routed_scale;
    s.norm_topk = p->norm_topk != 0;
    s.tp = p->tp;
    s.rank = p->rank;
    return s;
}

DraftShape draft_shape(const kd_probe_draft_shape* p) {
    DraftShape d;
    d.heads = d.heads_rank = p->heads_rank;
    d.kv_heads = d.kv_heads_rank = p->kv_heads_rank;
    d.head_dim = p->head_dim;
    d.block = p->block;
    return d;
}

// What a rank holds of a vocabulary: nearly equal parts.
Shape vocab_shape(int vocab, int tp, int rank) {
    Shape s;
    s.vocab = vocab;
    s.tp = tp;
    s.rank = rank;
    s.vocab_begin = vocab * rank / tp;
    s.vocab_rank = vocab * (rank + 1) / tp - s.vocab_begin;
    return s;
}

Dev<float> own_logits(Rig& rig, const float* logits, int n_rows, const Shape& s) {
    std::vector<float> own(static_cast<size_t>(n_rows) * s.vocab_rank + 1);
    for (int r = 0; r < n_rows; r++) {
        const float* from = logits + static_cast<size_t>(r) * s.vocab + s.vocab_begin;
        std::copy(from, from + s.vocab_rank, &own[static_cast<size_t>(r) * s.vocab_rank]);
    }
    return rig.in(own.data(), own.size() - 1);
}

Experts experts(Dev<const uint32_t> gate_up_q, Dev<const uint16_t> gate_up_s, Dev<const uint32_t> down_q,
                Dev<const uint16_t> down_s, int count, const Shape& s) {
    const int hidden = s.hidden, inter = s.moe_inter_rank;
    return {{gate_up_q, gate_up_s, 2 * inter, hidden}, {down_q, down_s, hidden, inter}, count};
}

Trees trees(Rig& rig, const kd_probe_trees* t, const kd_probe_view* v) {
    return {rig.in(t->first_row, v->n_streams + 1), rig.in(t->parent, v->n_rows)};
}

Accepted kept(Rig& rig, const kd_probe_kept* k, const kd_probe_view* v) {
    return {rig.in(k->n, v->n_streams), rig.in(k->node, static_cast<size_t>(v->n_streams) * (KD_MAX_DEPTH + 1))};
}

}  // namespace

extern "C" {

// ---- rows -----------------------------------------------------------------------------------------------------------

int32_t kd_probe_embed(const kd_probe_device* d, float* y, const int32_t* token, const uint16_t* table,
                       int32_t vocab_rank, int32_t hidden, int32_t vocab_begin, int32_t n_rows) {
    return run("embed", d, [&](Rig& rig) {
        ops::embed(rig.out(y, n_rows, hidden), rig.in(token, n_rows), rig.mat(table, vocab_rank, hidden), vocab_begin,
                   rig.count(n_rows));
    });
}

int32_t kd_probe_zero(const kd_probe_device* d, float* x, int32_t n_rows, int32_t width) {
    return run("zero", d, [&](Rig& rig) {
        ops::zero(rig.inout(x, static_cast<size_t>(n_rows) * width), rig.count(n_rows), width);
    });
}

int32_t kd_probe_copy_rows(const kd_probe_device* d, float* to, const int32_t* to_row, const float* from,
                           const int32_t* from_row, int32_t n, int32_t to_rows, int32_t from_rows, int32_t width) {
    return run("copy_rows", d, [&](Rig& rig) {
        ops::copy_rows(rig.inout(to, to_rows, width), rig.in(to_row, n), rig.in(from, from_rows, width),
                       rig.in(from_row, n), rig.count(n), width);
    });
}

int32_t kd_probe_rms_norm(const kd_probe_device* d, float* y, const float* x, const float* w, int32_t n_rows,
                          int32_t width, float eps) {
    return run("rms_norm", d, [&](Rig& rig) {
        ops::rms_norm(rig.out(y, n_rows, width), rig.in(x, n_rows, width), rig.in_const(w, width), rig.count(n_rows),
                      width, eps);
    });
}

int32_t kd_probe_add_norm(const kd_probe_device* d, float* h, float* x, const float* y, const float* w, int32_t n_rows,
                          int32_t width, float eps) {
    return run("add_norm", d, [&](Rig& rig) {
        const size_t n = static_cast<size_t>(n_rows) * width;
        const Rows to = rig.out(h, n_rows, width), part = rig.in(y + rig.rank * n, n_rows, width);
        const Dev<float> sum = rig.inout(x, n);
        const Vec norm = rig.in_const(w, width);
        const Count rows = rig.count(n_rows);
        rig.all_ready();
        ops::add_norm(to, sum, part, norm, rows, width, eps);
    });
}

int32_t kd_probe_add_norms(const kd_probe_device* d, float* h, float* x, const float* y, const float* w,
                           const int32_t* counts, int32_t times, int32_t n_rows, int32_t width, float eps) {
    return run("add_norms", d, [&](Rig& rig) {
        const size_t n = static_cast<size_t>(n_rows) * width;
        const Rows to = rig.out(h, n_rows, width);
        const Dev<float> sum = rig.inout(x, n);
        const Vec norm = rig.in_const(w, width);
        const Dev<int32_t> rows = rig.in(counts, times);
        std::vector<Rows> parts;
        for (int t = 0; t < times; t++)
            parts.push_back(rig.in(y + (static_cast<size_t>(rig.rank) * times + t) * n, n_rows, width));
        rig.all_ready();
        for (int t = 0; t < times; t++)
            ops::add_norm(to, sum, parts[t], norm, device::known({n_rows, rows + t}), width, eps);
    });
}

int32_t kd_probe_keep_tap(const kd_probe_device* d, float* tap, const float* x, int32_t n_rows, int32_t width) {
    return run("keep_tap", d, [&](Rig& rig) {
        ops::keep_tap(rig.out(tap, n_rows, width), rig.in(x, static_cast<size_t>(n_rows) * width), rig.count(n_rows),
                      width);
    });
}

// ---- linear ---------------------------------------------------------------------------------------------------------

int32_t kd_probe_linear(const kd_probe_device* d, float* y, const float* x, const uint16_t* w, int32_t n_rows,
                        int32_t n, int32_t k) {
    return run("linear", d, [&](Rig& rig) {
        ops::linear(rig.out(y, n_rows, n), rig.in(x, n_rows, k), rig.mat(w, n, k), rig.count(n_rows));
    });
}

int32_t kd_probe_logits(const kd_probe_device* d, float* y, const float* x, const uint16_t* w, int32_t n_rows,
                        int32_t n, int32_t k) {
    return run("logits", d, [&](Rig& rig) {
        const Rig::Floats to = rig.out_floats(y, n_rows, n);
        ops::logits(to.p, to.stride, rig.in(x, n_rows, k), rig.mat(w, n, k), rig.count(n_rows));
    });
}

int32_t kd_probe_swiglu(const kd_probe_device* d, float* y, const float* x, int32_t n_rows, int32_t width) {
    return run("swiglu", d, [&](Rig& rig) {
        ops::swiglu(rig.out(y, n_rows, width), rig.in(x, n_rows, 2 * width), rig.count(n_rows), width);
    });
}

// ---- attention of the target ----------------------------------------------------------------------------------------

int32_t kd_probe_mla_query(const kd_probe_device* d, float* q_lat, const float* q, const uint16_t* k_up,
                           const kd_probe_rope* rope, const kd_probe_view* v, const kd_probe_shape* p) {
    return run("mla_query", d, [&](Rig& rig) {
        const Shape s = shape(p);
        ops::mla_query(rig.out(q_lat, v->n_rows, s.heads_rank * s.kv_row()),
                       rig.in(q, v->n_rows, s.heads_rank * (s.nope + s.rope)),
                       rig.mat(k_up, s.heads_rank * s.nope, s.kv_lora), rig.rope(rope), rig.view(v), s);
    });
}

int32_t kd_probe_mla_latent(const kd_probe_device* d, float* q, float* kv, float* qkv_a, const float* q_norm,
                            const uint16_t* q_b, const float* kv_norm, const kd_probe_rope* rope,
                            const kd_probe_view* v, int32_t pool_rows, const kd_probe_shape* p) {
    return run("mla_latent", d, [&](Rig& rig) {
        const Shape s = shape(p);
        const int wide = s.heads_rank * (s.nope + s.rope);
        ops::mla_latent(rig.out(q, v->n_rows, wide), rig.inout(kv, pool_rows, s.kv_row()),
                        rig.inout(qkv_a, v->n_rows, s.q_lora + s.kv_row()), rig.in_const(q_norm, s.q_lora),
                        rig.mat(q_b, wide, s.q_lora), rig.in_const(kv_norm, s.kv_lora), rig.rope(rope), rig.view(v), s);
    });
}

int32_t kd_probe_mla_attention(const kd_probe_device* d, float* o_lat, const float* q_lat, const float* kv,
                               const kd_probe_view* v, int32_t pool_rows, const kd_probe_shape* p) {
    return run("mla_attention", d, [&](Rig& rig) {
        const Shape s = shape(p);
        ops::mla_attention(rig.out(o_lat, v->n_rows, s.heads_rank * s.kv_lora),
                           rig.in(q_lat, v->n_rows, s.heads_rank * s.kv_row()), rig.in(kv, pool_rows, s.kv_row()),
                           rig.view(v), s);
    });
}

int32_t kd_probe_mla_value(const kd_probe_device* d, float* o, const float* o_lat, const uint16_t* v_up, int32_t n_rows,
                           const kd_probe_shape* p) {
    return run("mla_value", d, [&](Rig& rig) {
        const Shape s = shape(p);
        ops::mla_value(rig.out(o, n_rows, s.heads_rank * s.v_head), rig.in(o_lat, n_rows, s.heads_rank * s.kv_lora),
                       rig.mat(v_up, s.heads_rank * s.v_head, s.kv_lora), rig.count(n_rows), s);
    });
}

// ---- experts --------------------------------------------------------------------------------------------------------

int32_t kd_probe_route(const kd_probe_device* d, int32_t* expert, float* weight, const float* h, const float* router,
                       const float* bias, int32_t n_rows, const kd_probe_shape* p) {
    return run("route", d, [&](Rig& rig) {
        const Shape s = shape(p);
        const size_t n = static_cast<size_t>(n_rows) * s.experts_per_token;
        ops::route(rig.out(expert, n), rig.out(weight, n), rig.in(h, n_rows, s.hidden),
                   rig.in_const(router, static_cast<size_t>(s.experts) * s.hidden), rig.in_const(bias, s.experts),
                   rig.count(n_rows), s);
    });
}

int32_t kd_probe_pack_experts(const kd_probe_device* d, uint32_t* gate_up_q, uint16_t* gate_up_s, uint32_t* down_q,
                              uint16_t* down_s, int32_t count, const kd_probe_shape* p) {
    return run("pack_experts", d, [&](Rig& rig) {
        const Shape s = shape(p);
        const size_t weights = static_cast<size_t>(count) * s.hidden * s.moe_inter_rank;
        ops::pack_experts(experts(rig.inout(gate_up_q, 2 * weights / 8), rig.inout(gate_up_s, 2 * weights / 32),
                                  rig.inout(down_q, weights / 8), rig.inout(down_s, weights / 32), count, s));
    });
}

int32_t kd_probe_moe(const kd_probe_device* d, float* y, const float* h, const int32_t* expert, const float* weight,
                     const uint32_t* gate_up_q, const uint16_t* gate_up_s, const uint32_t* down_q,
                     const uint16_t* down_s, int32_t count, int32_t n_rows, const kd_probe_shape* p) {
    return run("moe", d, [&](Rig& rig) {
        const Shape s = shape(p);
        const size_t n = static_cast<size_t>(n_rows) * s.experts_per_token;
        const size_t weights = static_cast<size_t>(count) * s.hidden * s.moe_inter_rank;
        const Experts w = experts(rig.in_const(gate_up_q, 2 * weights / 8), rig.in_const(gate_up_s, 2 * weights / 32),
                                  rig.in_const(down_q, weights / 8), rig.in_const(down_s, weights / 32), count, s);
        ops::pack_experts(w);
        rig.settle();
        ops::moe(rig.inout(y, n_rows, s.hidden), rig.in(h, n_rows, s.hidden), rig.in(expert, n), rig.in(weight, n), w,
                 rig.count(n_rows), s);
    });
}

// ---- drafter --------------------------------------------------------------------------------------------------------

int32_t kd_probe_head_norm_rope(const kd_probe_device* d, float* x, const float* norm, const kd_probe_rope* rope,
                                const kd_probe_view* v, int32_t heads, int32_t head_dim, float eps) {
    return run("head_norm_rope", d, [&](Rig& rig) {
        ops::head_norm_rope(rig.inout(x, v->n_rows, heads * head_dim), rig.in_const(norm, head_dim), rig.rope(rope),
                            rig.view(v), heads, head_dim, eps);
    });
}

int32_t kd_probe_draft_append(const kd_probe_device* d, float* k_pool, float* v_pool, const float* k, const float* v,
                              const kd_probe_view* view, int32_t pool_rows, const kd_probe_draft_shape* p) {
    return run("draft_append", d, [&](Rig& rig) {
        const DraftShape s = draft_shape(p);
        const int width = s.kv_heads_rank * s.head_dim;
        ops::draft_append(rig.inout(k_pool, pool_rows, width), rig.inout(v_pool, pool_rows, width),
                          rig.in(k, view->n_rows, width), rig.in(v, view->n_rows, width), rig.view(view), s);
    });
}

int32_t kd_probe_draft_attention(const kd_probe_device* d, float* o, const float* qkv, const float* k_pool,
                                 const float* v_pool, const kd_probe_view* v, int32_t window, int32_t causal,
                                 int32_t pool_rows, const kd_probe_draft_shape* p) {
    return run("draft_attention", d, [&](Rig& rig) {
        const DraftShape s = draft_shape(p);
        const int width = s.kv_heads_rank * s.head_dim;
        ops::draft_attention(rig.out(o, v->n_rows, s.heads_rank * s.head_dim),
                             rig.in(qkv, v->n_rows, s.heads_rank * s.head_dim + 2 * width),
                             rig.in(k_pool, pool_rows, width), rig.in(v_pool, pool_rows, width), rig.view(v), window,
                             causal != 0, s);
    });
}

int32_t kd_probe_top_logprobs(const kd_probe_device* d, int32_t* id, float* logprob, const float* logits,
                              int32_t n_rows, int32_t k, int32_t vocab) {
    return run("top_logprobs", d, [&](Rig& rig) {
        const Shape s = vocab_shape(vocab, d->tp, rig.rank);
        const size_t n = static_cast<size_t>(n_rows) * k;
        ops::top_logprobs(rig.out(id, n), rig.out(logprob, n), own_logits(rig, logits, n_rows, s), rig.count(n_rows), k,
                          s);
    });
}

// ---- sampling and acceptance ----------------------------------------------------------------------------------------

static_assert(sizeof(kd_probe_sampling) == sizeof(Sampling));

int32_t kd_probe_sample(const kd_probe_device* d, int32_t* token, uint64_t* hash, float* logprob, const float* logits,
                        const kd_probe_sampling* sampling, const kd_probe_view* v, int32_t vocab) {
    return run("sample", d, [&](Rig& rig) {
        const Shape s = vocab_shape(vocab, d->tp, rig.rank);
        const Choice out{rig.out(token, v->n_out), rig.out(hash, v->n_out), rig.out(logprob, v->n_out)};
        ops::sample(out, own_logits(rig, logits, v->n_out, s),
                    rig.in_const(reinterpret_cast<const Sampling*>(sampling), v->n_streams), rig.view(v), s);
    });
}

int32_t kd_probe_tree_build(const kd_probe_device* d, int32_t* n, int32_t* node_token, int32_t* node_parent,
                            const int32_t* token, const float* logprob, const int32_t* row, const int32_t* depths,
                            const int32_t* width_of, const int32_t* budget, int32_t n_streams, int32_t rows,
                            int32_t width, int32_t stride) {
    return run("tree_build", d, [&](Rig& rig) {
        const size_t streams = static_cast<size_t>(n_streams), nodes = streams * stride,
                     table = static_cast<size_t>(rows) * width;
        ops::tree_build({rig.out(n, streams), rig.out(node_token, nodes), rig.out(node_parent, nodes), stride},
                        rig.in(token, table), rig.in(logprob, table),
                        {rig.in(row, streams), rig.in(depths, streams), rig.in(width_of, streams)},
                        rig.in(budget, streams), rig.count(n_streams), width);
    });
}

int32_t kd_probe_tree_accept(const kd_probe_device* d, int32_t* n, int32_t* node, const kd_probe_trees* t,
                             const int32_t* choice_token, const kd_probe_view* view) {
    return run("tree_accept", d, [&](Rig& rig) {
        const Accepted out{rig.out(n, view->n_streams),
                           rig.out(node, static_cast<size_t>(view->n_streams) * (KD_MAX_DEPTH + 1))};
        Choice choice;
        choice.token = rig.in(choice_token, view->n_rows);
        ops::tree_accept(out, trees(rig, t, view), choice, rig.view(view));
    });
}

int32_t kd_probe_kv_commit(const kd_probe_device* d, float* kv, const kd_probe_kept* k, const kd_probe_trees* t,
                           const kd_probe_view* view, int32_t layers, int32_t pool_rows, int32_t width) {
    return run("kv_commit", d, [&](Rig& rig) {
        std::vector<Rows> pools;
        for (int i = 0; i < layers; i++)
            pools.push_back(rig.inout(kv + static_cast<size_t>(i) * pool_rows * width, pool_rows, width));
        ops::kv_commit(pools, kept(rig, k, view), trees(rig, t, view), rig.view(view), width);
    });
}

int32_t kd_probe_keep_taps(const kd_probe_device* d, float* ring, const float* taps, const int32_t* ring_slot,
                           const kd_probe_kept* k, const kd_probe_trees* t, const kd_probe_view* view,
                           int32_t ring_rows, int32_t ring_slots, int32_t width) {
    return run("keep_taps", d, [&](Rig& rig) {
        ops::keep_taps(rig.inout(ring, ring_rows * ring_slots, width), rig.in(taps, view->n_rows, width),
                       rig.in(ring_slot, view->n_streams), kept(rig, k, view), trees(rig, t, view), rig.view(view),
                       ring_rows, width);
    });
}

// ---- trees ----------------------------------------------------------------------------------------------------------

const char* kd_probe_check_tree(const void* in, const void* out, int32_t vocab, int32_t max_depth) {
    return tree::check_tree(*static_cast<const kd_tree_in*>(in), *static_cast<const kd_tree_out*>(out), vocab,
                            max_depth);
}

void kd_probe_node_gains(double* gain, const void* in, const void* out) {
    tree::node_gains(gain, *static_cast<const kd_tree_in*>(in), *static_cast<const kd_tree_out*>(out));
}

int32_t kd_probe_cut_trees(const void* const* ins, void* const* outs, int32_t n_streams, int32_t max_rows) {
    std::vector<tree::Planted> planted;
    for (int s = 0; s < n_streams; s++) {
        planted.push_back({static_cast<const kd_tree_in*>(ins[s]), static_cast<kd_tree_out*>(outs[s])});
    }
    return tree::cut_trees(planted.data(), n_streams, max_rows);
}

}  // extern "C"
