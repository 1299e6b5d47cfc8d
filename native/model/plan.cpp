#include "model/plan.h"

#include <algorithm>
#include <charconv>

#include "model/load.h"
#include "model/readers.h"
#include "model/refuse.h"

namespace kd::model {

using safetensors::Type;

namespace {

constexpr uint64_t kAlign = 64;

uint64_t u(int n) { return static_cast<uint64_t>(n); }

}  // namespace

Layout::Slab Layout::slab(uint64_t rows, uint64_t cols, uint64_t element_bytes) {
    Slab s{bytes_, 0};
    uint64_t bytes = 0;
    const bool over = __builtin_mul_overflow(cols, element_bytes, &s.row_bytes) ||
                      __builtin_mul_overflow(s.row_bytes, rows, &bytes) ||
                      __builtin_add_overflow(bytes, kAlign - 1, &bytes) ||
                      __builtin_add_overflow(bytes_, bytes & ~(kAlign - 1), &bytes_);
    if (over) fail(KD_E_NOMEM, "the model's weights would take more than 2^64 bytes");
    for (const uint64_t n : {s.at, rows, cols, element_bytes}) hash_.add(&n, sizeof n);
    return s;
}

// ---- tensors --------------------------------------------------------------------------------------------------------

const Checkpoint::Found& Collector::find(const std::string& name) {
    const auto entry = files_.tensors.find(name);
    if (entry == files_.tensors.end())
        refuse(where_, "tensor '" + name +
                           "' is missing; the model folder is incomplete or its config.json belongs to "
                           "another model");
    KD_CHECK(!entry->second.used);
    entry->second.used = true;
    return entry->second;
}

void Collector::wrong(const Checkpoint::Found& found, const std::string& what) const {
    refuse(files_.files[found.file]->path, "tensor '" + printable(found.tensor->name, 200) + "' " + what);
}

void Collector::matrix(const std::string& name, Stored stored, uint64_t rows, uint64_t cols, uint64_t at,
                       uint64_t at_v) {
    const Checkpoint::Found& found = find(name);
    const safetensors::Tensor& t = *found.tensor;
    const Type type = stored == Stored::packed ? Type::i32 : Type::bf16;
    if (t.type != type && !(stored == Stored::fp32 && t.type == Type::f32))
        wrong(found, std::string("is ") + safetensors::type_name(t.type) + "; this engine reads " +
                         safetensors::type_name(type) + " there");
    if (t.rank != 2 || t.shape[0] != rows || t.shape[1] != cols)
        wrong(found, "has shape " + t.shape_text() + ", config.json asks for [" + std::to_string(rows) + ", " +
                         std::to_string(cols) + "]");
    KD_CHECK(cols * safetensors::type_bytes(t.type) <= kChunkBytes);
    plan_.places.push_back({&found, stored, split_of(name), rows, cols, at, at_v, 0, 0});
    plan_.read_bytes += t.end - t.begin;
    if (stored != Stored::scale) plan_.parameters += rows * cols * (stored == Stored::packed ? 8 : 1);
}

void Collector::vector(const std::string& name, uint64_t n, uint64_t at) {
    const Checkpoint::Found& found = find(name);
    const safetensors::Tensor& t = *found.tensor;
    if (t.type != Type::bf16 && t.type != Type::f32)
        wrong(found, std::string("is ") + safetensors::type_name(t.type) + "; this engine reads BF16 or F32 there");
    if (t.rank != 1 || t.shape[0] != n)
        wrong(found, "has shape " + t.shape_text() + ", config.json asks for [" + std::to_string(n) + "]");
    plan_.places.push_back({&found, Stored::fp32, split_of(name), 1, n, at, 0, 0, 0});
    plan_.read_bytes += t.end - t.begin;
    plan_.parameters += n;
}

void Collector::shape(const std::string& name, uint64_t out, uint64_t in) {
    const Checkpoint::Found& found = find(name);
    const safetensors::Tensor& t = *found.tensor;
    if ((t.type != Type::i32 && t.type != Type::i64) || t.rank != 1 || t.shape[0] != 2)
        wrong(found,
              std::string("is ") + safetensors::type_name(t.type) + " " + t.shape_text() + ", it should be I32 [2]");
    plan_.places.push_back({&found, Stored::shape, Split::whole, 1, 2, 0, 0, out, in});
    plan_.read_bytes += t.end - t.begin;
}

Plan Collector::finish(const std::function<bool(std::string_view)>& skip) {
    for (const safetensors::Header& header : files_.headers)
        for (const safetensors::Tensor& t : header.tensors) {
            const Checkpoint::Found& found = files_.tensors.at(t.name);
            if (found.used) continue;
            if (!skip(t.name))
                wrong(found, "is nothing this engine has a use for, so the model is not what config.json says");
            plan_.skipped.push_back(t.name);
            plan_.skipped_bytes += t.end - t.begin;
        }
    std::sort(plan_.places.begin(), plan_.places.end(), [](const Place& a, const Place& b) {
        return a.found->file != b.found->file ? a.found->file < b.found->file
                                              : a.found->tensor->begin < b.found->tensor->begin;
    });
    return std::move(plan_);
}

static bool any_starts_with(const Checkpoint& files, std::string_view prefix) {
    return std::any_of(files.tensors.begin(), files.tensors.end(),
                       [&](const auto& entry) { return entry.first.starts_with(prefix); });
}
std::string target_prefix(const Checkpoint& files) {
    return any_starts_with(files, "language_model.") ? "language_model." : "";
}
std::string draft_prefix(const Checkpoint& files) { return any_starts_with(files, "model.") ? "model." : ""; }

bool is_skipped(std::string_view name, std::string_view prefix, const Config& config) {
    if (name.starts_with("vision_tower.") || name.starts_with("mm_projector.")) return true;
    if (name.ends_with(".self_attn.rotary_emb.inv_freq")) return true;  // computed from config.json instead
    const std::string layers = std::string(prefix) + "model.layers.";
    if (!name.starts_with(layers)) return false;
    int layer = -1;
    const auto [end, error] = std::from_chars(name.data() + layers.size(), name.data() + name.size(), layer);
    return error == std::errc() && *end == '.' && layer >= config.shape.layers &&
           layer < config.shape.layers + config.nextn_layers;
}

// ---- target ---------------------------------------------------------------------------------------------------------

namespace {

// down(silu(gate) * up) in bf16; `inter` is the whole, gate_up's rows are gate's of this rank, then up's.
void lay_out_mlp(Mat& gate_up, Mat& down, Layout& l, Collector* c, const std::string& name, int hidden, int inter,
                 int inter_rank) {
    const auto gu = l.slab(2 * u(inter_rank), u(hidden), 2);
    const auto d = l.slab(u(hidden), u(inter_rank), 2);
    gate_up = l.mat(gu, 2 * inter_rank, hidden);
    down = l.mat(d, hidden, inter_rank);
    if (!c) return;
    c->matrix(name + "gate_proj.weight", Stored::bf16, u(inter), u(hidden), gu.row(0));
    c->matrix(name + "up_proj.weight", Stored::bf16, u(inter), u(hidden), gu.row(u(inter_rank)));
    c->matrix(name + "down_proj.weight", Stored::bf16, u(hidden), u(inter), d.row(0));
}

void lay_out_experts(Experts& e, uint64_t& expert_bytes, Layout& l, Collector* c, const std::string& name,
                     const Shape& s) {
    const uint64_t count = u(s.experts), hidden = u(s.hidden), inter = u(s.moe_inter), inter_rank = u(s.moe_inter_rank);
    const uint64_t before = l.bytes();
    const auto gu_q = l.slab(count * 2 * inter_rank, hidden / 8, 4);
    const auto gu_s = l.slab(count * 2 * inter_rank, hidden / 32, 2);
    const auto d_q = l.slab(count * hidden, inter_rank / 8, 4);
    const auto d_s = l.slab(count * hidden, inter_rank / 32, 2);
    expert_bytes += l.bytes() - before;
    e.count = s.experts;
    e.gate_up = {l.dev<uint32_t>(gu_q), l.dev<uint16_t>(gu_s), 2 * s.moe_inter_rank, s.hidden};
    e.down = {l.dev<uint32_t>(d_q), l.dev<uint16_t>(d_s), s.hidden, s.moe_inter_rank};
    if (!c) return;
    for (uint64_t i = 0; i < count; ++i) {
        const std::string expert = name + "experts." + std::to_string(i) + ".";
        for (const bool up : {false, true}) {
            const std::string proj = expert + (up ? "up_proj." : "gate_proj.");
            const uint64_t row = (2 * i + (up ? 1 : 0)) * inter_rank;
            c->matrix(proj + "weight_packed", Stored::packed, inter, hidden / 8, gu_q.row(row));
            c->matrix(proj + "weight_scale", Stored::scale, inter, hidden / 32, gu_s.row(row));
            c->shape(proj + "weight_shape", inter, hidden);
        }
        const std::string proj = expert + "down_proj.";
        c->matrix(proj + "weight_packed", Stored::packed, hidden, inter / 8, d_q.row(i * hidden));
        c->matrix(proj + "weight_scale", Stored::scale, hidden, inter / 32, d_s.row(i * hidden));
        c->shape(proj + "weight_shape", hidden, inter);
    }
}

Vec lay_out_norm(Layout& l, Collector* c, const std::string& name, int n) {
    const auto slab = l.slab(1, u(n), 4);
    if (c) c->vector(name, u(n), slab.row(0));
    return l.vec(slab);
}

void lay_out_attention(Layer& layer, Layout& l, Collector* c, const std::string& name, const Shape& s) {
    const uint64_t hidden = u(s.hidden), q_lora = u(s.q_lora), kv_row = u(s.kv_row()), kv_lora = u(s.kv_lora);
    const uint64_t qk = u(s.nope + s.rope), heads = u(s.heads), heads_rank = u(s.heads_rank);
    const auto qkv_a = l.slab(q_lora + kv_row, hidden, 2);
    const auto q_b = l.slab(heads_rank * qk, q_lora, 2);
    const auto k_up = l.slab(heads_rank * u(s.nope), kv_lora, 2);
    const auto v_up = l.slab(heads_rank * u(s.v_head), kv_lora, 2);
    const auto o = l.slab(hidden, heads_rank * u(s.v_head), 2);
    layer.qkv_a = l.mat(qkv_a, s.q_lora + s.kv_row(), s.hidden);
    layer.q_b = l.mat(q_b, s.heads_rank * (s.nope + s.rope), s.q_lora);
    layer.k_up = l.mat(k_up, s.heads_rank * s.nope, s.kv_lora);
    layer.v_up = l.mat(v_up, s.heads_rank * s.v_head, s.kv_lora);
    layer.o = l.mat(o, s.hidden, s.heads_rank * s.v_head);
    layer.q_a_norm = lay_out_norm(l, c, name + "q_a_layernorm.weight", s.q_lora);
    layer.kv_a_norm = lay_out_norm(l, c, name + "kv_a_layernorm.weight", s.kv_lora);
    if (!c) return;
    c->matrix(name + "q_a_proj.weight", Stored::bf16, q_lora, hidden, qkv_a.row(0));
    c->matrix(name + "kv_a_proj_with_mqa.weight", Stored::bf16, kv_row, hidden, qkv_a.row(q_lora));
    c->matrix(name + "q_b_proj.weight", Stored::bf16, heads * qk, q_lora, q_b.row(0));
    c->matrix(name + "kv_b_proj.weight", Stored::bf16, heads * u(s.nope + s.v_head), kv_lora, k_up.row(0), v_up.row(0));
    c->matrix(name + "o_proj.weight", Stored::bf16, hidden, heads * u(s.v_head), o.row(0));
}

RopeSlabs lay_out_rope(Rope& rope, Layout& l, int max_positions, int dim) {
    const uint64_t rows = u(max_positions + kRopeMargin);
    const RopeSlabs slabs{l.slab(rows, u(dim / 2), 4), l.slab(rows, u(dim / 2), 4)};
    rope = {l.dev<float>(slabs.cos), l.dev<float>(slabs.sin), dim / 2};
    return slabs;
}

}  // namespace

RopeSlabs lay_out_target(Model& m, uint64_t& expert_bytes, Layout& l, Collector* c, const Shape& s) {
    m.shape = s;
    const std::string prefix = c ? c->prefix : "";
    // as many rows on every rank, so that all layouts are the same; the last rank may not use all of them
    const uint64_t vocab_rows = (u(s.vocab) + u(s.tp) - 1) / u(s.tp);
    l.begin("vocabulary");
    const auto embed = l.slab(vocab_rows, u(s.hidden), 2);
    const auto lm_head = l.slab(vocab_rows, u(s.hidden), 2);
    m.embed = l.mat(embed, s.vocab_rank, s.hidden);
    m.lm_head = l.mat(lm_head, s.vocab_rank, s.hidden);
    m.norm = lay_out_norm(l, c, prefix + "model.norm.weight", s.hidden);
    if (c) {
        c->matrix(prefix + "model.embed_tokens.weight", Stored::bf16, u(s.vocab), u(s.hidden), embed.row(0));
        c->matrix(prefix + "lm_head.weight", Stored::bf16, u(s.vocab), u(s.hidden), lm_head.row(0));
    }

    m.layers.clear();
    for (int i = 0; i < s.layers; ++i) {
        const std::string name = c ? prefix + "model.layers." + std::to_string(i) + "." : "";
        l.begin("layers." + std::to_string(i));
        Layer& layer = m.layers.emplace_back();
        layer.dense = i < s.dense_layers;
        layer.input_norm = lay_out_norm(l, c, name + "input_layernorm.weight", s.hidden);
        layer.post_norm = lay_out_norm(l, c, name + "post_attention_layernorm.weight", s.hidden);
        lay_out_attention(layer, l, c, name + "self_attn.", s);
        if (layer.dense) {
            lay_out_mlp(layer.gate_up, layer.down, l, c, name + "mlp.", s.hidden, s.inter, s.inter_rank);
            continue;
        }
        const auto router = l.slab(u(s.experts), u(s.hidden), 4);
        layer.router = l.dev<float>(router);
        if (c) c->matrix(name + "mlp.gate.weight", Stored::fp32, u(s.experts), u(s.hidden), router.row(0));
        layer.router_bias = lay_out_norm(l, c, name + "mlp.gate.e_score_correction_bias", s.experts);
        lay_out_experts(layer.routed, expert_bytes, l, c, name + "mlp.", s);
        lay_out_mlp(layer.shared_gate_up, layer.shared_down, l, c, name + "mlp.shared_experts.", s.hidden,
                    s.shared_inter, s.shared_inter_rank);
    }
    l.begin("rope");
    return lay_out_rope(m.rope, l, s.max_positions, s.rope);
}

// ---- drafter --------------------------------------------------------------------------------------------------------

RopeSlabs lay_out_draft(Model& m, Layout& l, Collector* c, const DraftShape& d, int max_positions) {
    m.draft = d;
    const std::string prefix = c ? c->prefix : "";
    const uint64_t hidden = u(d.hidden), taps = d.taps.size();
    l.begin("draft");
    const auto fc = l.slab(hidden, taps * hidden, 2);
    m.fc = l.mat(fc, d.hidden, static_cast<int>(taps) * d.hidden);
    m.draft_hidden_norm = lay_out_norm(l, c, prefix + "hidden_norm.weight", d.hidden);
    m.draft_norm = lay_out_norm(l, c, prefix + "norm.weight", d.hidden);
    if (c) c->matrix(prefix + "fc.weight", Stored::bf16, hidden, taps * hidden, fc.row(0));

    const uint64_t q = u(d.heads) * u(d.head_dim), kv = u(d.kv_heads) * u(d.head_dim);
    const uint64_t q_rank = u(d.heads_rank) * u(d.head_dim), kv_rank = u(d.kv_heads_rank) * u(d.head_dim);
    m.draft_layers.clear();
    for (int i = 0; i < d.layers; ++i) {
        const std::string name = c ? prefix + "layers." + std::to_string(i) + "." : "";
        const std::string attention = name + "self_attn.";
        l.begin("draft.layers." + std::to_string(i));
        DraftLayer& layer = m.draft_layers.emplace_back();
        layer.input_norm = lay_out_norm(l, c, name + "input_layernorm.weight", d.hidden);
        layer.post_norm = lay_out_norm(l, c, name + "post_attention_layernorm.weight", d.hidden);
        layer.q_norm = lay_out_norm(l, c, attention + "q_norm.weight", d.head_dim);
        layer.k_norm = lay_out_norm(l, c, attention + "k_norm.weight", d.head_dim);
        const auto qkv = l.slab(q_rank + 2 * kv_rank, hidden, 2);
        const auto o = l.slab(hidden, q_rank, 2);
        layer.qkv = l.mat(qkv, static_cast<int>(q_rank + 2 * kv_rank), d.hidden);
        layer.o = l.mat(o, d.hidden, static_cast<int>(q_rank));
        if (c) {
            c->matrix(attention + "q_proj.weight", Stored::bf16, q, hidden, qkv.row(0));
            c->matrix(attention + "k_proj.weight", Stored::bf16, kv, hidden, qkv.row(q_rank));
            c->matrix(attention + "v_proj.weight", Stored::bf16, kv, hidden, qkv.row(q_rank + kv_rank));
            c->matrix(attention + "o_proj.weight", Stored::bf16, hidden, q, o.row(0));
        }
        lay_out_mlp(layer.gate_up, layer.down, l, c, name + "mlp.", d.hidden, d.inter, d.inter_rank);
    }
    l.begin("draft.rope");
    return lay_out_rope(m.draft_rope, l, max_positions, d.head_dim);
}

}  // namespace kd::model
