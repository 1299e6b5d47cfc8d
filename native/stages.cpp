#include "stages.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "error.h"
#include "ops.h"

namespace kd {
namespace {

thread_local Stages* watching = nullptr;

template <class T>
const void* address(Dev<T> p) {
    return std::bit_cast<const void*>(p);
}
double bytes_of(const Mat& w) { return 2.0 * w.n * w.k; }
double bytes_of(const W4& w) { return (4 + 16 / 32.0) / 8 * w.n * w.k; }
double ops_of(const Mat& w) { return 2.0 * w.n * w.k; }

template <class F>
void stage(const char* op, const void* weights, const Cost& cost, F&& run) {
    Stages* const stages = watching;
    if (!stages) return run();
    stages->before();
    run();
    stages->after({op, weights, cost});
}

}  // namespace

// ---- stamps ---------------------------------------------------------------------------------------------------------

Stages::Stages(int stamps) : slots_(stamps), stamps_(device::alloc_array<uint64_t>(size_t(stamps) * (1 + kPlays))) {}

Stages::~Stages() {
    if (watching == this) unwatch();
    device::release(stamps_);
}

void Stages::watch() {
    device::forget();
    watching = this;
}

void Stages::unwatch() {
    device::forget();
    watching = nullptr;
}

bool Stages::stamp_next() {
    Part& part = parts_[part_];
    if (next_ == part.slot.size()) {
        part.whole = part.whole && used_ < slots_;
        if (!part.whole) return false;
        part.slot.push_back(used_++);
    }
    device::stamp(stamps(part.slot[next_++]), kPlays);
    return true;
}

void Stages::before() {
    const device::Body body = device::body();
    if (!body.under_way) {
        part_ = SIZE_MAX;
        return;
    }
    if (part_ != SIZE_MAX && body.count == count_) return;
    count_ = body.count;
    next_ = 0;
    for (part_ = 0; part_ < parts_.size() && parts_[part_].key != body.key;) part_++;
    if (part_ == parts_.size()) parts_.push_back({body.key, true, {}, {}});
    stamp_next();
}

void Stages::after(const Call& call) {
    if (part_ == SIZE_MAX) return;
    Part& part = parts_[part_];
    const size_t i = next_ - 1;
    if (!stamp_next()) return;
    if (i == part.calls.size()) part.calls.push_back(call);
    KD_CHECK(strcmp(part.calls[i].op, call.op) == 0);
}

std::vector<std::vector<uint64_t>> Stages::times(const Part& part) const {
    std::vector<uint64_t> all(size_t(used_) * (1 + kPlays));
    device::download(all.data(), stamps_, all.size());
    uint64_t most = 0, least = UINT64_MAX;
    for (const int slot : part.slot) {
        most = std::max(most, all[size_t(slot) * (1 + kPlays)]);
        least = std::min(least, all[size_t(slot) * (1 + kPlays)]);
    }
    std::vector<std::vector<uint64_t>> plays;
    if (!part.whole || most == 0 || least != most) return plays;
    for (uint64_t play = most - std::min(most, uint64_t(kPlays)); play < most; play++) {
        std::vector<uint64_t>& ns = plays.emplace_back();
        for (const int slot : part.slot) ns.push_back(all[size_t(slot) * (1 + kPlays) + 1 + play % kPlays]);
    }
    return plays;
}

std::map<const void*, std::string> weight_names(const Model& m) {
    std::map<const void*, std::string> names;
    std::string of;
    const auto name = [&](auto w, const char* what) {
        if (w) names.emplace(address(w), of + what);
    };
    name(m.embed.w, "embed");
    name(m.lm_head.w, "lm_head");
    name(m.norm, "norm");
    for (size_t i = 0; i < m.layers.size(); i++) {
        const Layer& l = m.layers[i];
        of = "layers." + std::to_string(i) + ".";
        name(l.input_norm, "input_norm"), name(l.post_norm, "post_norm");
        name(l.q_a_norm, "q_a_norm"), name(l.kv_a_norm, "kv_a_norm");
        name(l.qkv_a.w, "qkv_a"), name(l.q_b.w, "q_b"), name(l.k_up.w, "k_up"), name(l.v_up.w, "v_up"),
            name(l.o.w, "o");
        name(l.gate_up.w, "gate_up"), name(l.down.w, "down");
        name(l.router, "router"), name(l.routed.gate_up.q, "experts");
        name(l.shared_gate_up.w, "shared_gate_up"), name(l.shared_down.w, "shared_down");
    }
    of.clear();
    name(m.fc.w, "fc");
    name(m.draft_hidden_norm, "draft_hidden_norm");
    name(m.draft_norm, "draft_norm");
    for (size_t i = 0; i < m.draft_layers.size(); i++) {
        const DraftLayer& l = m.draft_layers[i];
        of = "draft_layers." + std::to_string(i) + ".";
        name(l.input_norm, "input_norm"), name(l.post_norm, "post_norm");
        name(l.q_norm, "q_norm"), name(l.k_norm, "k_norm");
        name(l.qkv.w, "qkv"), name(l.o.w, "o"), name(l.gate_up.w, "gate_up"), name(l.down.w, "down");
        name(l.qkv.w + size_t(m.draft.heads_rank) * m.draft.head_dim * l.qkv.k, "kv");
    }
    return names;
}

// ---- the operations as the pages call them ----------------------------------------------------------------------------

namespace staged {

void embed(Rows y, Dev<int32_t> token, Mat table, int vocab_begin, Count n_rows) {
    stage("embed", address(table.w), {.row_bytes = 2.0 * table.k},
          [&] { ops::embed(y, token, table, vocab_begin, n_rows); });
}
void zero(Dev<float> x, Count n_rows, int width) {
    stage("zero", nullptr, {}, [&] { ops::zero(x, n_rows, width); });
}
void copy_rows(Rows to, Dev<int32_t> to_row, Rows from, Dev<int32_t> from_row, Count n, int width) {
    stage("copy_rows", nullptr, {}, [&] { ops::copy_rows(to, to_row, from, from_row, n, width); });
}
void rms_norm(Rows y, Rows x, Vec w, Count n_rows, int width, float eps) {
    stage("rms_norm", address(w), {.weights = 4.0 * width}, [&] { ops::rms_norm(y, x, w, n_rows, width, eps); });
}
void add_norm(Rows h, Dev<float> x, Rows y, Vec w, Count n_rows, int width, float eps) {
    stage("add_norm", address(w), {.weights = 4.0 * width}, [&] { ops::add_norm(h, x, y, w, n_rows, width, eps); });
}
void keep_tap(Rows tap, Dev<float> x, Count n_rows, int width) {
    stage("keep_tap", nullptr, {}, [&] { ops::keep_tap(tap, x, n_rows, width); });
}

void linear(Rows y, Rows x, Mat w, Count n_rows) {
    stage("linear", address(w.w), {.weights = bytes_of(w), .row_ops = ops_of(w)},
          [&] { ops::linear(y, x, w, n_rows); });
}
void logits(Dev<float> y, int stride, Rows x, Mat w, Count n_rows) {
    stage("logits", address(w.w), {.weights = bytes_of(w), .row_ops = ops_of(w)},
          [&] { ops::logits(y, stride, x, w, n_rows); });
}
void swiglu(Rows y, Rows x, Count n_rows, int width) {
    stage("swiglu", nullptr, {}, [&] { ops::swiglu(y, x, n_rows, width); });
}

void mla_query(Rows q_lat, Rows q, Mat k_up, const Rope& rope, const View& v, const Shape& s) {
    stage("mla_query", address(k_up.w), {.weights = bytes_of(k_up), .row_ops = ops_of(k_up)},
          [&] { ops::mla_query(q_lat, q, k_up, rope, v, s); });
}
void mla_latent(Rows q, Rows kv, Rows qkv_a, Vec q_norm, Mat q_b, Vec kv_norm, const Rope& rope, const View& v,
                const Shape& s) {
    stage("mla_latent", address(q_b.w),
          {.weights = bytes_of(q_b) + 4.0 * (s.q_lora + s.kv_lora), .row_ops = ops_of(q_b)},
          [&] { ops::mla_latent(q, kv, qkv_a, q_norm, q_b, kv_norm, rope, v, s); });
}
void mla_attention(Rows o_lat, Rows q_lat, Rows kv, const View& v, const Shape& s) {
    const Cost cost{.key_bytes = double(s.kv_row()) * double(device::act_bytes()),
                    .row_key_ops = 2.0 * s.heads_rank * (s.kv_row() + s.kv_lora)};
    stage("mla_attention", nullptr, cost, [&] { ops::mla_attention(o_lat, q_lat, kv, v, s); });
}
void mla_value(Rows o, Rows o_lat, Mat v_up, Count n_rows, const Shape& s) {
    stage("mla_value", address(v_up.w), {.weights = bytes_of(v_up), .row_ops = ops_of(v_up)},
          [&] { ops::mla_value(o, o_lat, v_up, n_rows, s); });
}

// One after the other while stages are watched: what overlaps has no time of its own.
void side_by_side(Count n_rows, const std::function<void()>& one, const std::function<void()>& other) {
    if (!watching) return ops::side_by_side(n_rows, one, other);
    one();
    other();
}

void route(Dev<int32_t> expert, Dev<float> weight, Rows h, Dev<const float> router, Vec bias, Count n_rows,
           const Shape& s) {
    const double size = double(s.experts) * s.hidden;  // bf16 in checkpoints
    stage("route", address(router), {.weights = 2 * size + 4.0 * s.experts, .row_ops = 2 * size},
          [&] { ops::route(expert, weight, h, router, bias, n_rows, s); });
    if (!watching || !watching->routed || device::body().under_way) return;
    int32_t rows = n_rows.most;
    if (n_rows.n) device::download(&rows, std::bit_cast<const void*>(n_rows.n), sizeof rows);
    watching->routed(rows, h, expert);
}
void moe(Rows y, Rows h, Dev<int32_t> expert, Dev<float> weight, const Experts& w, Count n_rows, const Shape& s) {
    const Cost cost{
        .expert_bytes = bytes_of(w.gate_up) + bytes_of(w.down),
        .row_ops = 2.0 * s.experts_per_token * (double(w.gate_up.n) * w.gate_up.k + double(w.down.n) * w.down.k)};
    stage("moe", address(w.gate_up.q), cost, [&] { ops::moe(y, h, expert, weight, w, n_rows, s); });
}

void head_norm_rope(Rows x, Vec norm, const Rope& rope, const View& v, int heads, int head_dim, float eps) {
    stage("head_norm_rope", address(norm), {.weights = 4.0 * head_dim},
          [&] { ops::head_norm_rope(x, norm, rope, v, heads, head_dim, eps); });
}
void draft_append(Rows k_pool, Rows v_pool, Rows k, Rows v, const View& view, const DraftShape& d) {
    stage("draft_append", nullptr, {}, [&] { ops::draft_append(k_pool, v_pool, k, v, view, d); });
}
void draft_attention(Rows o, Rows qkv, Rows k_pool, Rows v_pool, const View& v, int window, bool causal,
                     const DraftShape& d) {
    const Cost cost{.key_bytes = 2.0 * d.kv_heads_rank * d.head_dim * double(device::act_bytes()),
                    .row_key_ops = 4.0 * d.heads_rank * d.head_dim,
                    .window = window};
    stage("draft_attention", nullptr, cost,
          [&] { ops::draft_attention(o, qkv, k_pool, v_pool, v, window, causal, d); });
}
void top_logprobs(Dev<int32_t> id, Dev<float> logprob, Dev<float> logits, Count n_rows, int k, const Shape& s) {
    stage("top_logprobs", nullptr, {}, [&] { ops::top_logprobs(id, logprob, logits, n_rows, k, s); });
}

void sample(const Choice& out, Dev<float> logits, Dev<const Sampling> sampling, const View& v, const Shape& s) {
    stage("sample", nullptr, {}, [&] { ops::sample(out, logits, sampling, v, s); });
}

void plan_context(const View& v, Dev<int32_t> counts, Dev<int32_t> ring_row, const Streams& streams, int ring_rows) {
    stage("plan_context", nullptr, {}, [&] { ops::plan_context(v, counts, ring_row, streams, ring_rows); });
}
void plan_draft(const View& v, Dev<int32_t> counts, const Drafts& drafts, const Streams& streams, const DraftShape& d,
                const Shape& s) {
    stage("plan_draft", nullptr, {}, [&] { ops::plan_draft(v, counts, drafts, streams, d, s); });
}
void plan_verify(const View& v, Dev<int32_t> counts, const Trees& trees, const Nodes& nodes, const Streams& streams) {
    stage("plan_verify", nullptr, {}, [&] { ops::plan_verify(v, counts, trees, nodes, streams); });
}
void end_round(const Emitted& out, const Streams& streams, const Trees& trees, const Accepted& kept,
               const Choice& choice) {
    stage("end_round", nullptr, {}, [&] { ops::end_round(out, streams, trees, kept, choice); });
}

void tree_build(const Nodes& nodes, Dev<int32_t> token, Dev<float> logprob, const Drafts& drafts, Dev<int32_t> budget,
                Count n_streams, int width) {
    stage("tree_build", nullptr, {}, [&] { ops::tree_build(nodes, token, logprob, drafts, budget, n_streams, width); });
}
void tree_accept(const Accepted& out, const Trees& trees, const Choice& choice, const View& v) {
    stage("tree_accept", nullptr, {}, [&] { ops::tree_accept(out, trees, choice, v); });
}
void kv_commit(std::span<const Rows> kv, const Accepted& kept, const Trees& trees, const View& v, int width) {
    stage("kv_commit", nullptr, {}, [&] { ops::kv_commit(kv, kept, trees, v, width); });
}
void keep_taps(Rows ring, Rows taps, Dev<int32_t> ring_slot, const Accepted& kept, const Trees& trees, const View& v,
               int ring_rows, int width) {
    stage("keep_taps", nullptr, {}, [&] { ops::keep_taps(ring, taps, ring_slot, kept, trees, v, ring_rows, width); });
}

}  // namespace staged
}  // namespace kd
