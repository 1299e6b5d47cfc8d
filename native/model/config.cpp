#include "model/config.h"

#include <algorithm>
#include <cmath>

#include "model/config_reader.h"
#include "model/refuse.h"

namespace kd::model {

using json::Kind;
using json::Value;

namespace {

// For checkpoints in another precision, FP8 of the first Kimi K2 among them: how to make one that is read.
constexpr char kHow[] =
    "; this engine reads compressed-tensors INT4 experts (pack-quantized, symmetric, groups of 32) only: quantise the "
    "routed experts with llm-compressor (scheme W4A16, group size 32, every other layer in `ignore`), or take Kimi K2 "
    "Thinking, K2.5 or K2.6, which are published so";

// Refuses everything but compressed-tensors' pack-quantized symmetric INT4 with groups of 32 along K.
void check_quantization(const Value& object, const std::string& where, const std::string& name) {
    Reader q(object, where, name);
    if (const std::string method = q.string("quant_method"); method != "compressed-tensors")
        q.wrong("quant_method", "is \"" + printable(method, 64) + "\"" + kHow);
    q.must_be("format", "pack-quantized");
    q.must_be("quantization_status", "compressed");
    for (const char* key : {"kv_cache_scheme", "sparsity_config", "transform_config"}) {
        const Value* v = q.find(key);
        // compressed-tensors writes an empty sparsity_config as {"format": "dense", ...}
        if (v && v->find("format") && v->find("format")->string == "dense") continue;
        q.must_be_off(key);
    }
    for (const char* key : {"ignore", "version", "global_compression_ratio"}) q.find(key);

    const Value& groups = q.object("config_groups");
    if (groups.object.size() != 1)
        q.wrong("config_groups", "holds " + std::to_string(groups.object.size()) + " groups; this engine reads one");
    const auto& [group_name, group_value] = groups.object[0];
    Reader group(group_value, where, name + "config_groups." + printable(group_name, 64) + ".");
    group.find("targets");  // which tensors are packed shows in the files
    group.must_be("format", "pack-quantized");
    group.must_be_off("input_activations");
    group.must_be_off("output_activations");
    Reader w(group.object("weights"), where, group.path("weights."));
    if (w.integer("num_bits", 1, 64) != 4) w.must_be("num_bits", int64_t{4});
    if (w.integer("group_size", -1, 1 << 20) != 32) w.must_be("group_size", int64_t{32});
    if (!w.boolean("symmetric")) w.must_be("symmetric", true);
    w.must_be("type", "int");
    w.must_be("strategy", "group");
    w.must_be_off("dynamic");
    w.must_be_off("actorder");
    w.must_be_off("block_structure");
    for (const char* key : {"observer", "observer_kwargs", "scale_dtype", "zp_dtype"}) w.find(key);
    w.judge_rest(true);
    group.judge_rest(true);
    q.judge_rest(true);
}

void check_architecture(Reader& r, std::initializer_list<std::string_view> architectures,
                        std::initializer_list<std::string_view> types,
                        const std::string& unknown = "this engine does not know that kind of model") {
    const Value* v = r.find("architectures");
    const auto listed = [](auto& names, const std::string& name) {
        return std::find(names.begin(), names.end(), std::string_view(name)) != names.end();
    };
    if (v) {
        if (v->kind != Kind::array || v->array.size() != 1 || v->array[0].kind != Kind::string)
            r.wrong("architectures", "should be a list of one name");
        if (!listed(architectures, v->array[0].string))
            r.wrong("architectures", "is " + spelled(v->array[0]) + "; " + unknown);
    }
    const std::string type = r.string("model_type");
    if (!listed(types, type)) r.wrong("model_type", "is \"" + printable(type, 64) + "\"; " + unknown);
}

void sort_ids(std::vector<int32_t>& ids, const std::string& where) {
    std::sort(ids.begin(), ids.end());
    ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
    if (ids.size() > KD_MAX_STOP_IDS)
        refuse(where, "eos_token_id: " + std::to_string(ids.size()) +
                          " stop ids in config.json and generation_config.json, at "
                          "most " +
                          std::to_string(KD_MAX_STOP_IDS) + " are allowed");
}

void multiple_of_32(Reader& r, const char* key, int value) {
    if (value % 32 != 0)
        r.wrong(key, "is " + std::to_string(value) + ", no multiple of 32, the groups of the INT4 experts");
}

Config read_text_config(Reader& r) {
    Config c;
    Shape& s = c.shape;
    s.hidden = r.integer("hidden_size", 1, kMaxHidden);
    s.layers = r.integer("num_hidden_layers", 1, kMaxLayers);
    s.dense_layers = r.integer("first_k_dense_replace", 0, s.layers);
    s.heads = s.heads_rank = r.integer("num_attention_heads", 1, kMaxHeads);
    r.must_be("num_key_value_heads", int64_t{s.heads});
    s.q_lora = r.integer("q_lora_rank", 1, kMaxHidden);
    s.kv_lora = r.integer("kv_lora_rank", 1, kMaxHidden);
    s.nope = r.integer("qk_nope_head_dim", 1, kMaxHeadDim);
    s.rope = r.integer("qk_rope_head_dim", 2, kMaxHeadDim);
    if (s.rope % 2 != 0) r.wrong("qk_rope_head_dim", "is odd");
    s.v_head = r.integer("v_head_dim", 1, kMaxHeadDim);
    r.must_be("qk_head_dim", int64_t{s.nope + s.rope});
    r.must_be("head_dim", int64_t{s.rope});  // transformers 5 writes it for the rope
    s.inter = s.inter_rank = r.integer("intermediate_size", 1, kMaxHidden);
    s.moe_inter = s.moe_inter_rank = r.integer("moe_intermediate_size", 32, kMaxHidden);
    const int shared = r.integer("n_shared_experts", 1, kMaxSharedExperts);
    s.shared_inter = s.shared_inter_rank = shared * s.moe_inter;
    s.experts = r.integer("n_routed_experts", 1, kMaxExperts);
    s.experts_per_token = r.integer("num_experts_per_tok", 1, std::min(s.experts, kMaxExpertsPerToken));
    s.vocab = s.vocab_rank = r.integer("vocab_size", 1, kMaxVocab);
    s.max_positions = r.integer("max_position_embeddings", 2, kMaxPositions);  // one of the prompt, one of the answer
    s.rms_eps = static_cast<float>(r.number("rms_norm_eps", 1e-12, 1e-1));
    s.rms_eps_lora = 1e-6f;
    s.routed_scale = static_cast<float>(r.number("routed_scaling_factor", 1e-6, 1e6));
    s.norm_topk = r.boolean_or("norm_topk_prob", true);
    multiple_of_32(r, "hidden_size", s.hidden);
    multiple_of_32(r, "moe_intermediate_size", s.moe_inter);

    for (const char* key : {"n_group", "topk_group"}) {  // transformers' own defaults are 8 and 4
        r.integer(key, 0, kMaxExperts);
        r.must_be(key, int64_t{1});
    }
    r.must_be("num_local_experts", int64_t{s.experts});
    r.must_be("moe_layer_freq", int64_t{1});
    r.must_be("scoring_func", "sigmoid");
    r.must_be("topk_method", "noaux_tc");
    r.must_be("hidden_act", "silu");
    r.must_be("attention_bias", false);
    r.must_be("mlp_bias", false);
    r.must_be("tie_word_embeddings", false);
    r.must_be("rope_interleave", true);
    r.must_be_off("sliding_window");
    r.must_be_off("pruned_heads");
    c.nextn_layers = r.integer_or("num_nextn_predict_layers", 0, 0, kMaxNextnLayers);

    c.rotary = read_rotary(r, false);
    s.score_scale = static_cast<float>(softmax_mscale(c.rotary) / std::sqrt(static_cast<double>(s.nope + s.rope)));
    c.stop_ids = r.ids_or_none("eos_token_id", s.vocab);
    return c;
}

}  // namespace

Config parse_config(std::string_view text, const std::string& where) {
    const Value root = json::parse(text, where);
    Reader top(root, where, "");
    Config c;
    const Value* quantization = top.find("quantization_config");
    if (top.find("text_config")) {
        check_architecture(top, {"KimiK25ForConditionalGeneration"}, {"kimi_k25"});
        Reader inner(top.object("text_config"), where, "text_config.");
        check_architecture(inner, {"DeepseekV3ForCausalLM"}, {"kimi_k2", "deepseek_v3"});
        const Value* nested = inner.find("quantization_config");
        if (nested) check_quantization(*nested, where, "text_config.quantization_config.");
        if (!nested && !quantization) top.wrong("text_config.quantization_config", std::string("is missing") + kHow);
        c = read_text_config(inner);
        inner.judge_rest();
        top.must_be("tie_word_embeddings", false);
        top.must_be("hidden_size", int64_t{c.shape.hidden});
        top.must_be("vocab_size", int64_t{c.shape.vocab});
        const auto more = top.ids_or_none("eos_token_id", c.shape.vocab);
        c.stop_ids.insert(c.stop_ids.end(), more.begin(), more.end());
    } else {
        check_architecture(top, {"DeepseekV3ForCausalLM"}, {"kimi_k2", "deepseek_v3"});
        if (!quantization) top.wrong("quantization_config", std::string("is missing") + kHow);
        c = read_text_config(top);
    }
    if (quantization) check_quantization(*quantization, where, "quantization_config.");
    top.judge_rest();
    sort_ids(c.stop_ids, where);
    return c;
}

void add_stop_ids(Config& config, std::string_view text, const std::string& where) {
    const Value root = json::parse(text, where);
    Reader r(root, where, "");
    const auto more = r.ids_or_none("eos_token_id", config.shape.vocab);
    config.stop_ids.insert(config.stop_ids.end(), more.begin(), more.end());
    sort_ids(config.stop_ids, where);
}

// Whether the rows of a block see those after them, layer by layer: the keys that published drafters, vLLM, SGLang and
// speculators spell it with. Missing: they do, in every layer, as in the code that comes with Kimi K2.6's drafter.
static void read_causal(DraftShape& d, Reader& r, Reader& f) {
    const bool whole = r.find("is_causal") || f.find("causal");
    bool causal = r.boolean_or("is_causal", false);
    if (f.find("causal")) {
        const bool also = f.boolean("causal");
        if (r.find("is_causal") && also != causal) f.wrong("causal", "differs from is_causal");
        causal = also;
    }
    d.causal.assign(d.window.size(), causal);
    if (!r.find("sliding_window_non_causal")) return;
    if (whole)
        r.wrong("sliding_window_non_causal", "stands beside is_causal or dflash_config.causal; one of them must go");
    const bool sliding = !r.boolean("sliding_window_non_causal");
    for (size_t i = 0; i < d.window.size(); ++i) d.causal[i] = sliding && d.window[i] != 0;
}

DraftConfig parse_draft_config(std::string_view text, const std::string& where, const Config& target) {
    const Value root = json::parse(text, where);
    Reader r(root, where, "");
    check_architecture(r, {"DFlashDraftModel"}, {"qwen3"},
                       "this engine does not know that kind of drafter; give a DFlash drafter, or draft 'none'");
    DraftConfig c;
    DraftShape& d = c.shape;
    d.hidden = r.integer("hidden_size", 1, kMaxHidden);
    const auto must_match = [&](const char* key, int value, int of_target) {
        if (value != of_target)
            r.wrong(key, "is " + std::to_string(value) + ", the target's is " + std::to_string(of_target) +
                             "; this drafter belongs to another model; give this one's, or draft 'none'");
    };
    must_match("hidden_size", d.hidden, target.shape.hidden);
    must_match("vocab_size", r.integer("vocab_size", 1, kMaxVocab), target.shape.vocab);
    must_match("num_target_layers", r.integer_or("num_target_layers", target.shape.layers, 1, kMaxLayers),
               target.shape.layers);
    d.layers = r.integer("num_hidden_layers", 1, kMaxLayers);
    d.heads = d.heads_rank = r.integer("num_attention_heads", 1, kMaxHeads);
    d.kv_heads = d.kv_heads_rank = r.integer_or("num_key_value_heads", d.heads, 1, d.heads);
    if (d.heads % d.kv_heads != 0)
        r.wrong("num_key_value_heads", "is " + std::to_string(d.kv_heads) + ", which does not divide the " +
                                           std::to_string(d.heads) + " heads; give another drafter, or draft 'none'");
    d.head_dim = r.integer_or("head_dim", d.hidden / d.heads, 2, kMaxHeadDim);
    if (d.head_dim < 2 || d.head_dim > kMaxHeadDim || d.head_dim % 2 != 0)
        r.wrong("head_dim", "is " + std::to_string(d.head_dim) + "; an even number up to " +
                                std::to_string(kMaxHeadDim) + " is needed");
    d.inter = d.inter_rank = r.integer("intermediate_size", 1, kMaxHidden);
    d.rms_eps = static_cast<float>(r.number("rms_norm_eps", 1e-12, 1e-1));
    r.integer_or("max_position_embeddings", 1, 1, kMaxPositions);
    r.must_be("hidden_act", "silu");
    r.must_be("attention_bias", false);
    r.must_be("mlp_bias", false);
    r.must_be("tie_word_embeddings", false);
    r.must_be_off("quantization_config");
    r.find("eos_token_id");

    // layer kinds; use_sliding_window is a Qwen3 key that DFlash does not read
    r.find("use_sliding_window");
    const int window = r.integer_or("sliding_window", 0, 0, kMaxPositions);
    d.window.assign(static_cast<size_t>(d.layers), 0);
    if (const Value* types = r.find("layer_types")) {
        if (types->kind != Kind::array || types->array.size() != d.window.size())
            r.wrong("layer_types", "should be a list of " + std::to_string(d.layers));
        for (size_t i = 0; i < d.window.size(); ++i) {
            const std::string& type = types->array[i].string;
            if (type == "sliding_attention") {
                if (window == 0) r.wrong("sliding_window", "is missing or 0, layer_types names a sliding layer");
                d.window[i] = window;
            } else if (type != "full_attention") {
                r.wrong("layer_types", "holds " + spelled(types->array[i]) +
                                           "; this engine knows full_attention and "
                                           "sliding_attention");
            }
        }
    }

    Reader f(r.object("dflash_config"), where, "dflash_config.");
    if (r.find("block_size")) d.block = r.integer("block_size", 2, KD_MAX_DEPTH + 1);
    if (f.find("block_size")) {
        const int block = f.integer("block_size", 2, KD_MAX_DEPTH + 1);
        if (d.block != 0 && block != d.block) f.wrong("block_size", "differs from block_size");
        d.block = block;
    }
    if (d.block == 0) r.wrong("block_size", "is missing or null; this engine needs it");
    d.mask_token = f.integer("mask_token_id", 0, target.shape.vocab - 1);
    d.taps = f.ids_or_none("target_layer_ids", target.shape.layers);
    if (d.taps.empty() || d.taps.size() > kMaxTaps)
        f.wrong("target_layer_ids", "should list 1 to " + std::to_string(kMaxTaps) + " layers");
    for (size_t i = 1; i < d.taps.size(); ++i)
        if (d.taps[i] <= d.taps[i - 1]) f.wrong("target_layer_ids", "is not ascending");
    read_causal(d, r, f);
    f.judge_rest(true);

    c.rotary = read_rotary(r, true);
    r.judge_rest();
    return c;
}

// ---- ranks ----------------------------------------------------------------------------------------------------------

static int divide(int whole, int tp, const char* what, const char* else_what = "") {
    if (whole % tp != 0)
        fail(KD_E_MODEL,
             "tensor parallelism of %d does not divide the model's %d %s: open the engine with a tp that does%s", tp,
             whole, what, else_what);
    return whole / tp;
}

Shape rank_shape(const Shape& whole, int tp, int rank) {
    Shape s = whole;
    s.tp = tp;
    s.rank = rank;
    s.heads_rank = divide(whole.heads, tp, "attention heads");
    s.inter_rank = divide(whole.inter, tp, "rows of a dense layer's intermediate_size");
    s.moe_inter_rank =
        32 * divide(whole.moe_inter / 32, tp, "INT4 groups (of 32) of an expert's moe_intermediate_size");
    s.shared_inter_rank = divide(whole.shared_inter, tp, "rows of the shared experts");
    const int share = (whole.vocab + tp - 1) / tp;
    s.vocab_begin = std::min(whole.vocab, rank * share);
    s.vocab_rank = std::min(share, whole.vocab - s.vocab_begin);
    return s;
}

DraftShape rank_shape(const DraftShape& whole, int tp) {
    const char without[] = ", or leave the drafter out: draft 'none' (--draft none)";
    DraftShape d = whole;
    d.heads_rank = divide(whole.heads, tp, "attention heads of the drafter", without);
    d.kv_heads_rank = divide(whole.kv_heads, tp, "key-value heads of the drafter", without);
    d.inter_rank = divide(whole.inter, tp, "rows of the drafter's intermediate_size", without);
    return d;
}

}  // namespace kd::model
