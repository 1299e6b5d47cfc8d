#include "model/config_reader.h"

#include <algorithm>
#include <cmath>

#include "model/refuse.h"

namespace kd::model {

using json::Kind;
using json::Value;

namespace {

// Known, and without meaning for what this engine computes: labels, training, generation defaults (a request brings its
// own), other token ids, bookkeeping. Sorted.
constexpr std::string_view kHarmless[] = {
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_pre_quantization_dtype",
    "add_cross_attention",
    "architectures",
    "attention_dropout",
    "attn_implementation",
    "auto_map",
    "aux_loss_alpha",
    "bad_words_ids",
    "begin_suppress_tokens",
    "bos_token_id",
    "chunk_size_feed_forward",
    "cross_attention_hidden_size",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "dtype",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "ep_size",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "id2label",
    "ignore_index",
    "image_token_index",
    "initializer_range",
    "is_decoder",
    "is_encoder_decoder",
    "label2id",
    "length_penalty",
    "max_length",
    "max_window_layers",
    "media_placeholder_token_id",
    "min_length",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "num_target_layers",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "output_scores",
    "pad_token_id",
    "prefix",
    "pretraining_tp",
    "problem_type",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict",
    "return_dict_in_generate",
    "router_aux_loss_coef",
    "sep_token_id",
    "seq_aux",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tie_encoder_decoder",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "torchscript",
    "transformers_version",
    "typical_p",
    "use_bfloat16",
    "use_cache",
    "use_unified_vision_chunk",
    "video_placeholder",
    "video_token_index",
    "vision_config",
    "vision_feature_layer",
    "vision_feature_select_strategy",
};

static_assert(std::is_sorted(std::begin(kHarmless), std::end(kHarmless)));

// Parts of names that change the arithmetic.
constexpr std::string_view kTelling[] = {
    "act",      "anchor", "attention", "attn",    "bias",    "block",  "cap",    "causal", "clip",    "codebook",
    "conv",     "decay",  "embed",     "expert",  "factor",  "gate",   "group",  "head",   "hash",    "index",
    "kda",      "layer",  "lora",      "mixer",   "mlp",     "moe",    "mscale", "mult",   "nope",    "norm",
    "quant",    "rank",   "residual",  "rope",    "rotary",  "router", "routed", "scale",  "scaling", "scoring",
    "selector", "shared", "sink",      "sliding", "softmax", "sparse", "swiglu", "topk",   "window",
};

bool telling(std::string_view key) {
    return std::any_of(std::begin(kTelling), std::end(kTelling),
                       [&](std::string_view part) { return key.find(part) != std::string_view::npos; });
}

bool off(const Value& v) {
    switch (v.kind) {
        case Kind::null: return true;
        case Kind::boolean: return !v.boolean;
        case Kind::integer:
        case Kind::real: return v.real == 0;
        case Kind::string: return v.string.empty();
        case Kind::array: return v.array.empty();
        case Kind::object: return v.object.empty();
    }
    return false;
}

std::string text(double d) {
    char s[32];
    snprintf(s, sizeof s, "%.6g", d);
    return s;
}

}  // namespace

std::string spelled(const Value& v) {
    switch (v.kind) {
        case Kind::null: return "null";
        case Kind::boolean: return v.boolean ? "true" : "false";
        case Kind::integer: return std::to_string(v.integer);
        case Kind::real: return text(v.real);
        case Kind::string: return "\"" + printable(v.string, 64) + "\"";
        case Kind::array: return "a list of " + std::to_string(v.array.size());
        case Kind::object: return "an object";
    }
    return "?";
}

Reader::Reader(const Value& object, std::string where, std::string name)
    : object_(object), where_(std::move(where)), name_(std::move(name)) {
    if (object.kind != Kind::object)
        refuse(where_, (name_.empty() ? "the file" : name_) + " is " + json::kind_name(object.kind) +
                           " where an object should stand");
}

void Reader::wrong(const char* key, const std::string& what) const { refuse(where_, path(key) + " " + what); }

const Value* Reader::find(const char* key) {
    read_.insert(key);
    const Value* v = object_.find(key);
    return v && !v->is_null() ? v : nullptr;
}

const Value& Reader::need(const char* key) {
    const Value* v = find(key);
    if (!v) wrong(key, "is missing or null; this engine needs it");
    return *v;
}

int Reader::checked_integer(const char* key, const Value& v, int64_t least, int64_t most) const {
    // transformers writes some integers as 1.0
    const bool whole =
        v.kind == Kind::integer || (v.kind == Kind::real && std::fabs(v.real) < 1e15 && std::trunc(v.real) == v.real);
    if (!whole) wrong(key, "is " + spelled(v) + ", an integer should stand there");
    const int64_t n = v.kind == Kind::integer ? v.integer : static_cast<int64_t>(v.real);
    if (n < least || n > most)
        wrong(key, "is " + spelled(v) + "; this engine takes " + std::to_string(least) + " to " + std::to_string(most));
    return static_cast<int>(n);
}

double Reader::checked_number(const char* key, const Value& v, double least, double most) const {
    if (!v.is_number()) wrong(key, "is " + spelled(v) + ", a number should stand there");
    if (!(v.real >= least && v.real <= most))
        wrong(key, "is " + spelled(v) + "; this engine takes " + text(least) + " to " + text(most));
    return v.real;
}

int Reader::integer(const char* key, int64_t least, int64_t most) {
    return checked_integer(key, need(key), least, most);
}
int Reader::integer_or(const char* key, int64_t missing, int64_t least, int64_t most) {
    const Value* v = find(key);
    return v ? checked_integer(key, *v, least, most) : static_cast<int>(missing);
}
double Reader::number(const char* key, double least, double most) {
    return checked_number(key, need(key), least, most);
}
double Reader::number_or(const char* key, double missing, double least, double most) {
    const Value* v = find(key);
    return v ? checked_number(key, *v, least, most) : missing;
}

bool Reader::boolean(const char* key) {
    const Value& v = need(key);
    if (v.kind != Kind::boolean) wrong(key, "is " + spelled(v) + ", true or false should stand there");
    return v.boolean;
}
bool Reader::boolean_or(const char* key, bool missing) { return find(key) ? boolean(key) : missing; }

std::string Reader::string(const char* key) {
    const Value& v = need(key);
    if (v.kind != Kind::string) wrong(key, "is " + spelled(v) + ", a string should stand there");
    return v.string;
}
std::string Reader::string_or(const char* key, const char* missing) { return find(key) ? string(key) : missing; }

std::vector<int32_t> Reader::ids_or_none(const char* key, int64_t vocab) {
    const Value* v = find(key);
    std::vector<int32_t> ids;
    if (!v) return ids;
    if (v->kind != Kind::array) {
        ids.push_back(checked_integer(key, *v, 0, vocab - 1));
        return ids;
    }
    for (size_t i = 0; i < v->array.size(); ++i) {
        const std::string at = key + ("[" + std::to_string(i) + "]");
        ids.push_back(checked_integer(at.c_str(), v->array[i], 0, vocab - 1));
    }
    return ids;
}

void Reader::must_be(const char* key, const char* value) {
    const Value* v = find(key);
    if (v && (v->kind != Kind::string || v->string != value))
        wrong(key, "is " + spelled(*v) + "; this engine computes \"" + value + "\" only");
}
void Reader::must_be(const char* key, int64_t value) {
    const Value* v = find(key);
    if (v && (!v->is_number() || v->real != static_cast<double>(value)))
        wrong(key, "is " + spelled(*v) + "; this engine computes " + std::to_string(value) + " only");
}
void Reader::must_be(const char* key, bool value) {
    const Value* v = find(key);
    if (v && (v->kind != Kind::boolean || v->boolean != value))
        wrong(key, "is " + spelled(*v) + "; this engine computes " + (value ? "true" : "false") + " only");
}
void Reader::must_be_off(const char* key) {
    const Value* v = find(key);
    if (v && !off(*v)) wrong(key, "is " + spelled(*v) + "; this engine does not compute it");
}

const Value& Reader::object(const char* key) {
    const Value& v = need(key);
    if (v.kind != Kind::object) wrong(key, "is " + spelled(v) + ", an object should stand there");
    return v;
}

void Reader::judge_rest(bool refuse_all) const {
    for (const auto& [key, value] : object_.object) {
        if (read_.contains(key) || off(value)) continue;
        if (!refuse_all && (std::binary_search(std::begin(kHarmless), std::end(kHarmless), key) || !telling(key)))
            continue;
        wrong(printable(key, 64).c_str(), "is " + spelled(value) +
                                              "; this engine does not know that key, and it may change "
                                              "what the model computes");
    }
}

// ---- rope -----------------------------------------------------------------------------------------------------------

Rotary read_rotary(Reader& config, bool deepseek_yarn_allowed) {
    Rotary r;
    constexpr double kMaxTheta = 1e12;
    const bool nested = config.find("rope_parameters") != nullptr;
    if (nested && config.find("rope_scaling"))
        config.wrong("rope_parameters", "stands beside rope_scaling; one of them must go");
    if (config.find("rope_theta")) r.theta = config.number("rope_theta", 1, kMaxTheta);
    const char* key = nested ? "rope_parameters" : "rope_scaling";
    config.must_be("partial_rotary_factor", int64_t{1});
    config.must_be_off("rope_type");
    if (config.find(key)) {
        Reader rope(config.object(key), config.where(), config.path(key) + ".");
        if (nested) r.theta = rope.number_or("rope_theta", r.theta, 1, kMaxTheta);
        const char* spelling = rope.find("rope_type") ? "rope_type" : "type";
        const std::string type = rope.string_or(spelling, "default");
        if (rope.find("rope_type") && rope.find("type") && rope.string("type") != type)
            rope.wrong("type", "and rope_type differ");
        rope.must_be("partial_rotary_factor", int64_t{1});
        if (type == "yarn" || (type == "deepseek_yarn" && deepseek_yarn_allowed)) {
            r.kind = type == "yarn" ? Rotary::kYarn : Rotary::kDeepseekYarn;
            r.factor = rope.number("factor", 1, 1e6);
            r.original_positions = rope.number("original_max_position_embeddings", 1, kMaxPositions);
            r.beta_fast = rope.number_or("beta_fast", 32, 0, 1e6);
            r.beta_slow = rope.number_or("beta_slow", 1, 0, 1e6);
            if (r.beta_fast == 0) r.beta_fast = 32;  // as transformers: 0 is "not given"
            if (r.beta_slow == 0) r.beta_slow = 1;
            r.mscale = rope.number_or("mscale", 0, 0, 100);
            r.mscale_all_dim = rope.number_or("mscale_all_dim", 0, 0, 100);
            r.attention_factor = rope.number_or("attention_factor", 0, 0, 100);
            r.truncate = rope.boolean_or("truncate", true);
        } else if (type != "default") {
            rope.wrong(spelling, "is \"" + printable(type, 64) + "\"; this engine computes default and yarn" +
                                     (deepseek_yarn_allowed ? " and deepseek_yarn" : ""));
        }
        rope.judge_rest(r.kind != Rotary::kPlain);
    }
    if (r.theta == 0) config.wrong("rope_theta", "is missing; this engine needs it");
    if (r.kind != Rotary::kPlain && r.theta < 1.001) config.wrong("rope_theta", "is too small for yarn");
    return r;
}

static double get_mscale(double factor, double mscale) { return factor <= 1 ? 1 : 0.1 * mscale * std::log(factor) + 1; }

double rope_amplitude(const Rotary& r) {
    if (r.kind == Rotary::kPlain) return 1;
    if (r.attention_factor != 0) return r.attention_factor;
    if (r.kind == Rotary::kDeepseekYarn)
        return get_mscale(r.factor, r.mscale != 0 ? r.mscale : 1) / get_mscale(r.factor, r.mscale_all_dim);
    if (r.mscale != 0 && r.mscale_all_dim != 0)
        return get_mscale(r.factor, r.mscale) / get_mscale(r.factor, r.mscale_all_dim);
    return get_mscale(r.factor, 1);
}

std::vector<double> rope_frequencies(const Rotary& r, int dim) {
    std::vector<double> frequencies(static_cast<size_t>(dim / 2));
    const auto correction = [&](double rotations) {
        return dim * std::log(r.original_positions / (rotations * 2 * M_PI)) / (2 * std::log(r.theta));
    };
    double low = 0, high = 0;
    if (r.kind != Rotary::kPlain) {
        low = correction(r.beta_fast);
        high = correction(r.beta_slow);
        if (r.truncate) {
            low = std::floor(low);
            high = std::ceil(high);
        }
        low = std::max(low, 0.0);
        high = std::min(high, dim - 1.0);
        if (low == high) high += 0.001;
    }
    for (size_t i = 0; i < frequencies.size(); ++i) {
        const double plain = std::pow(r.theta, -2.0 * static_cast<double>(i) / dim);
        double stretched = 0;  // share of the interpolated frequency
        if (r.kind != Rotary::kPlain) stretched = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
        frequencies[i] = plain / r.factor * stretched + plain * (1 - stretched);
    }
    return frequencies;
}

double softmax_mscale(const Rotary& r) {
    const double m = r.kind == Rotary::kPlain ? 1 : get_mscale(r.factor, r.mscale_all_dim);
    return m * m;
}

}  // namespace kd::model
