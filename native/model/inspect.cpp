#include "model/inspect.h"

#include <array>

#include "model/opening.h"
#include "model/refuse.h"

namespace kd::model {

namespace {

// One JSON object, member by member.
class Object {
  public:
    static std::string quoted(const std::string& value) {
        std::string s = "\"";
        for (const char c : printable(value, 2000)) {
            if (c == '"' || c == '\\') s += '\\';
            s += c;
        }
        return s + "\"";
    }
    Object& raw(const char* key, const std::string& json) {
        text_ += (text_.empty() ? "\"" : ",\"") + std::string(key) + "\":" + json;
        return *this;
    }
    Object& number(const char* key, uint64_t value) { return raw(key, std::to_string(value)); }
    Object& number(const char* key, int value) { return raw(key, std::to_string(value)); }
    Object& real(const char* key, double value) {
        char s[40];
        snprintf(s, sizeof s, "%.9g", value);
        return raw(key, s);
    }
    Object& text(const char* key, const std::string& value) { return raw(key, quoted(value)); }
    Object& list(const char* key, const std::vector<int32_t>& values) {
        std::string s;
        for (const int32_t v : values) s += (s.empty() ? "" : ",") + std::to_string(v);
        return raw(key, "[" + s + "]");
    }
    Object& texts(const char* key, const std::vector<std::string>& values) {
        std::string s;
        for (const std::string& v : values) s += (s.empty() ? "" : ",") + quoted(v);
        return raw(key, "[" + s + "]");
    }
    std::string json() const { return "{" + text_ + "}"; }

  private:
    std::string text_;
};

enum Kind { experts, shared_experts, router, attention, dense, vocabulary, norms, kinds };
constexpr std::array<const char*, kinds> kKindNames = {"experts", "shared_experts", "router", "attention",
                                                       "dense",   "vocabulary",     "norms"};

Kind kind_of(std::string_view name) {
    const auto has = [&](std::string_view part) { return name.find(part) != std::string_view::npos; };
    if (has("norm.weight")) return norms;
    if (has(".mlp.experts.")) return experts;
    if (has(".mlp.shared_experts.")) return shared_experts;
    if (has(".mlp.gate.")) return router;
    if (has(".self_attn.")) return attention;
    if (has("embed_tokens") || has("lm_head")) return vocabulary;
    return dense;
}

std::string by_kind(const Plan& plan) {
    std::array<uint64_t, kinds> bytes{};
    for (const Place& p : plan.places)
        bytes[kind_of(p.found->tensor->name)] += p.found->tensor->end - p.found->tensor->begin;
    Object o;
    for (size_t i = 0; i < kinds; ++i) o.number(kKindNames[i], bytes[i]);
    return o.json();
}

std::string rope(const Rotary& r) {
    Object o;
    o.text("type", r.kind == Rotary::kPlain ? "default" : r.kind == Rotary::kYarn ? "yarn" : "deepseek_yarn");
    o.real("theta", r.theta).real("factor", r.factor).real("amplitude", rope_amplitude(r));
    return o.json();
}

std::string shape(const Config& c) {
    const Shape& s = c.shape;
    Object o;
    o.number("layers", s.layers).number("dense_layers", s.dense_layers).number("hidden", s.hidden);
    o.number("heads", s.heads).number("q_lora", s.q_lora).number("kv_lora", s.kv_lora).number("nope", s.nope);
    o.number("rope", s.rope).number("v_head", s.v_head).number("dense_inter", s.inter);
    o.number("expert_inter", s.moe_inter).number("experts", s.experts);
    o.number("experts_per_token", s.experts_per_token).number("shared_inter", s.shared_inter);
    o.number("vocab", s.vocab).number("max_positions", s.max_positions).real("score_scale", double{s.score_scale});
    return o.raw("rotary", rope(c.rotary)).json();
}

std::string draft(const Opening& o) {
    if (!o.draft) return "null";
    const DraftShape& d = o.draft->config.shape;
    Object j;
    j.text("path", o.draft->folder->path()).number("parameters", o.info.draft_parameters).number("layers", d.layers);
    j.number("heads", d.heads).number("kv_heads", d.kv_heads).number("head_dim", d.head_dim).number("inter", d.inter);
    j.number("block", d.block).number("mask_token", d.mask_token).list("taps", d.taps).list("windows", d.window);
    j.list("causal", d.causal);
    return j.raw("rotary", rope(o.draft->config.rotary)).json();
}

// Of one rank: its weights, and what a token costs in its KV cache; or why there are no such ranks.
std::string rank(const Opening& o, int tp) {
    Object j;
    j.number("tp", tp);
    try {
        const Shape s = rank_shape(o.config.shape, tp, 0);
        Model model;
        Layout layout;
        uint64_t expert_bytes = 0, kv = static_cast<uint64_t>(s.layers) * static_cast<uint64_t>(s.kv_row());
        lay_out_target(model, expert_bytes, layout, nullptr, s);
        if (o.draft) {
            const DraftShape d = rank_shape(o.draft->config.shape, tp);
            lay_out_draft(model, layout, nullptr, d, s.max_positions);
            kv += 2 * static_cast<uint64_t>(d.layers) * static_cast<uint64_t>(d.kv_heads_rank) *
                  static_cast<uint64_t>(d.head_dim);
        }
        j.number("weight_bytes", layout.bytes()).number("expert_bytes", expert_bytes).number("kv_elements_token", kv);
    } catch (const Error& e) {
        if (e.status != KD_E_MODEL) throw;
        j.text("refused", e.what());
    }
    return j.json();
}

}  // namespace

std::string inspect(const std::string& path, const DraftChoice& choice, Links links) {
    const Folder folder(path, links);
    const auto o = open_model(folder, choice, kLookOnly, [] {});
    Object j;
    j.text("path", path).text("kind", o->about ? "packed" : "published").raw("target", shape(o->config));
    j.number("parameters", o->info.parameters).list("stop_ids", o->info.stop_ids);
    uint64_t files = o->files.files.size(), file_bytes = 0, tensors = 0;
    if (o->about) files = o->about->files, file_bytes = o->about->file_bytes, tensors = o->about->tensors;
    for (const auto& file : o->files.files) file_bytes += file->bytes;
    for (const auto& header : o->files.headers) tensors += header.tensors.size();
    j.number("files", files).number("file_bytes", file_bytes);
    j.number("tensors", tensors).raw("bytes", by_kind(o->plan));
    j.number("skipped_tensors", static_cast<uint64_t>(o->plan.skipped.size()));
    j.number("skipped_bytes", o->plan.skipped_bytes);
    j.texts("skipped", o->plan.skipped).texts("draft_skipped", o->draft_plan.skipped);
    j.raw("draft", draft(*o));
    if (o->about) {
        char hash[17];
        snprintf(hash, sizeof hash, "%016llx", static_cast<unsigned long long>(o->info.content_hash));
        j.number("packed_tp", o->about->tp).text("packed_layout", o->about->layout).text("content_hash", hash);
    }
    std::string ranks;
    for (const int tp : {1, 2, 4, 8}) ranks += (ranks.empty() ? "" : ",") + rank(*o, tp);
    return j.raw("ranks", "[" + ranks + "]").json();
}

}  // namespace kd::model
