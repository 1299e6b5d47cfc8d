// Test-only entry points of native/model, linked into libkd_cpu_test.so alone. Strings go out as JSON; a failing call
// returns the kd_status and leaves its sentence for kd_probe_load_error().
#include <bit>
#include <cstring>
#include <new>

#include "device.h"
#include "error.h"
#include "model/config.h"
#include "model/files.h"
#include "model/hash.h"
#include "model/json.h"
#include "model/load.h"
#include "model/packed.h"
#include "model/safetensors.h"

#define KD_PROBE extern "C" __attribute__((visibility("default")))

namespace {

using kd::json::Kind;
using kd::json::Value;

thread_local std::string last_error;

template <class F>
int guarded(F&& body) {
    try {
        body();
        return KD_OK;
    } catch (const kd::Error& e) {
        last_error = e.what();
        return e.status;
    } catch (const std::bad_alloc&) {
        last_error = "std::bad_alloc";
        return KD_E_NOMEM;
    } catch (const std::exception& e) {
        last_error = e.what();
        return KD_E_FATAL;
    }
}

void give(char* out, size_t capacity, const std::string& text) {
    if (text.size() + 1 > capacity) kd::fail(KD_E_SIZE, "the probe's buffer is too small");
    memcpy(out, text.c_str(), text.size() + 1);
}

std::string quoted(std::string_view s) {
    std::string out = "\"";
    for (const char c : s) {
        char hex[8];
        if (static_cast<unsigned char>(c) < 0x20) {
            snprintf(hex, sizeof hex, "\\u%04x", c);
            out += hex;
        } else {
            if (c == '"' || c == '\\') out += '\\';
            out += c;
        }
    }
    return out + "\"";
}

std::string number(double d) {
    char s[40];
    snprintf(s, sizeof s, "%.17g", d);
    return s;
}

std::string dump(const Value& v) {
    std::string s;
    switch (v.kind) {
        case Kind::null: return "null";
        case Kind::boolean: return v.boolean ? "true" : "false";
        case Kind::integer: return std::to_string(v.integer);
        case Kind::real: return number(v.real);
        case Kind::string: return quoted(v.string);
        case Kind::array:
            for (const Value& e : v.array) s += (s.empty() ? "" : ",") + dump(e);
            return "[" + s + "]";
        case Kind::object:
            for (const auto& [key, e] : v.object) s += (s.empty() ? "" : ",") + quoted(key) + ":" + dump(e);
            return "{" + s + "}";
    }
    return "?";
}

// {"a": 1, ...} from pairs.
class Members {
  public:
    Members& add(const char* key, const std::string& json) {
        text_ += (text_.empty() ? "" : ", ") + quoted(key) + ": " + json;
        return *this;
    }
    Members& add(const char* key, double value) { return add(key, number(value)); }
    Members& add(const char* key, int value) { return add(key, std::to_string(value)); }
    Members& add(const char* key, uint64_t value) { return add(key, std::to_string(value)); }
    Members& add(const char* key, bool value) { return add(key, std::string(value ? "true" : "false")); }
    template <class T>
    Members& add(const char* key, const std::vector<T>& values) {
        std::string s;
        for (const T& v : values) {
            if constexpr (std::is_floating_point_v<T>)
                s += (s.empty() ? "" : ", ") + number(v);
            else
                s += (s.empty() ? "" : ", ") + std::to_string(v);
        }
        return add(key, "[" + s + "]");
    }
    std::string text() const { return "{" + text_ + "}"; }

  private:
    std::string text_;
};

std::string dump(const kd::Shape& s) {
    Members m;
    m.add("hidden", s.hidden).add("layers", s.layers).add("dense_layers", s.dense_layers).add("heads", s.heads);
    m.add("heads_rank", s.heads_rank).add("q_lora", s.q_lora).add("kv_lora", s.kv_lora).add("nope", s.nope);
    m.add("rope", s.rope).add("v_head", s.v_head).add("inter", s.inter).add("inter_rank", s.inter_rank);
    m.add("moe_inter", s.moe_inter).add("moe_inter_rank", s.moe_inter_rank).add("shared_inter", s.shared_inter);
    m.add("shared_inter_rank", s.shared_inter_rank).add("experts", s.experts);
    m.add("experts_per_token", s.experts_per_token).add("vocab", s.vocab).add("vocab_begin", s.vocab_begin);
    m.add("vocab_rank", s.vocab_rank).add("max_positions", s.max_positions);
    m.add("rms_eps", double{s.rms_eps}).add("rms_eps_lora", double{s.rms_eps_lora});
    m.add("score_scale", double{s.score_scale}).add("routed_scale", double{s.routed_scale});
    return m.add("norm_topk", s.norm_topk).add("tp", s.tp).add("rank", s.rank).text();
}

std::string dump(const kd::DraftShape& d) {
    Members m;
    m.add("layers", d.layers).add("hidden", d.hidden).add("heads", d.heads).add("heads_rank", d.heads_rank);
    m.add("kv_heads", d.kv_heads).add("kv_heads_rank", d.kv_heads_rank).add("head_dim", d.head_dim);
    m.add("inter", d.inter).add("inter_rank", d.inter_rank).add("block", d.block).add("mask_token", d.mask_token);
    return m.add("rms_eps", double{d.rms_eps})
        .add("taps", d.taps)
        .add("window", d.window)
        .add("causal", d.causal)
        .text();
}

std::string dump(const kd::model::Rotary& r, int dim) {
    Members m;
    return m.add("theta", r.theta)
        .add("kind", static_cast<int>(r.kind))
        .add("amplitude", kd::model::rope_amplitude(r))
        .add("frequencies", kd::model::rope_frequencies(r, dim))
        .text();
}

struct Handle {  // the group outlives what is loaded on it
    std::shared_ptr<kd::device::Group> group;
    std::unique_ptr<kd::model::Loaded> loaded;
};

template <class T>
std::vector<T> fetch(kd::Dev<const T> from, size_t n) {
    std::vector<T> host(n);
    kd::device::download(host.data(), std::bit_cast<const void*>(from), n * sizeof(T));
    return host;
}

float widened(uint16_t bf16) {
    const uint32_t wide = static_cast<uint32_t>(bf16) << 16;
    float f;
    memcpy(&f, &wide, sizeof f);
    return f;
}

struct Matrix {
    uint64_t n, k;
    std::vector<float> values;
};

Matrix read(kd::Vec v, int n, int k) {
    const auto size = static_cast<size_t>(n) * static_cast<size_t>(k);
    return {static_cast<uint64_t>(n), static_cast<uint64_t>(k), fetch(v, size)};
}

Matrix read(const kd::Mat& m) {
    const auto stored = fetch(m.w, static_cast<size_t>(m.n) * static_cast<size_t>(m.k));
    Matrix out{static_cast<uint64_t>(m.n), static_cast<uint64_t>(m.k), std::vector<float>(stored.size())};
    for (size_t i = 0; i < stored.size(); ++i) out.values[i] = widened(stored[i]);
    return out;
}

Matrix read(const kd::W4& w, int count) {
    const size_t n = static_cast<size_t>(w.n) * static_cast<size_t>(count), k = static_cast<size_t>(w.k);
    const auto q = fetch(w.q, n * k / 8);
    const auto s = fetch(w.s, n * k / 32);
    Matrix out{n, k, std::vector<float>(n * k)};
    for (size_t i = 0; i < n * k; ++i)
        out.values[i] = static_cast<float>(static_cast<int>((q[i / 8] >> (4 * (i % 8))) & 15) - 8) * widened(s[i / 32]);
    return out;
}

// `name`: embed, lm_head, norm, cos, sin, fc, draft_hidden_norm, draft_norm, draft_cos, draft_sin,
// layers.<i>.<member of Layer>, layers.<i>.experts.gate_up, layers.<i>.experts.down, draft_layers.<i>.<member of
// DraftLayer>.
Matrix read(const kd::Model& m, const std::string& name) {
    const kd::Shape& s = m.shape;
    const int rows = s.max_positions + kd::model::kRopeMargin;
    if (name == "embed") return read(m.embed);
    if (name == "lm_head") return read(m.lm_head);
    if (name == "norm") return read(m.norm, 1, s.hidden);
    if (name == "cos") return read(m.rope.cos, rows, m.rope.pairs);
    if (name == "sin") return read(m.rope.sin, rows, m.rope.pairs);
    if (name == "fc") return read(m.fc);
    if (name == "draft_hidden_norm") return read(m.draft_hidden_norm, 1, s.hidden);
    if (name == "draft_norm") return read(m.draft_norm, 1, s.hidden);
    if (name == "draft_cos") return read(m.draft_rope.cos, rows, m.draft_rope.pairs);
    if (name == "draft_sin") return read(m.draft_rope.sin, rows, m.draft_rope.pairs);
    const size_t dot = name.find('.'), second = name.find('.', dot + 1);
    if (dot == std::string::npos || second == std::string::npos)
        kd::fail(KD_E_NOT_FOUND, "no weight '%s'", name.c_str());
    const auto i = static_cast<size_t>(std::stoi(name.substr(dot + 1)));
    const std::string what = name.substr(second + 1);
    if (name.starts_with("draft_layers.")) {
        const kd::DraftLayer& l = m.draft_layers.at(i);
        if (what == "input_norm") return read(l.input_norm, 1, s.hidden);
        if (what == "post_norm") return read(l.post_norm, 1, s.hidden);
        if (what == "q_norm") return read(l.q_norm, 1, m.draft.head_dim);
        if (what == "k_norm") return read(l.k_norm, 1, m.draft.head_dim);
        for (const auto& [member, mat] :
             {std::pair{"qkv", &l.qkv}, {"o", &l.o}, {"gate_up", &l.gate_up}, {"down", &l.down}})
            if (what == member) return read(*mat);
    } else {
        const kd::Layer& l = m.layers.at(i);
        if (what == "input_norm") return read(l.input_norm, 1, s.hidden);
        if (what == "post_norm") return read(l.post_norm, 1, s.hidden);
        if (what == "q_a_norm") return read(l.q_a_norm, 1, s.q_lora);
        if (what == "kv_a_norm") return read(l.kv_a_norm, 1, s.kv_lora);
        if (what == "router") return read(l.router, s.experts, s.hidden);
        if (what == "router_bias") return read(l.router_bias, 1, s.experts);
        if (what == "experts.gate_up") return read(l.routed.gate_up, l.routed.count);
        if (what == "experts.down") return read(l.routed.down, l.routed.count);
        for (const auto& [member, mat] : {std::pair{"qkv_a", &l.qkv_a},
                                          {"q_b", &l.q_b},
                                          {"k_up", &l.k_up},
                                          {"v_up", &l.v_up},
                                          {"o", &l.o},
                                          {"gate_up", &l.gate_up},
                                          {"down", &l.down},
                                          {"shared_gate_up", &l.shared_gate_up},
                                          {"shared_down", &l.shared_down}})
            if (what == member) return read(*mat);
    }
    kd::fail(KD_E_NOT_FOUND, "no weight '%s'", name.c_str());
}

}  // namespace

KD_PROBE const char* kd_probe_load_error(void) { return last_error.c_str(); }

KD_PROBE uint64_t kd_probe_hash(const void* bytes, size_t n, size_t piece) {
    kd::model::Hash hash;
    for (size_t at = 0; at < n; at += piece)
        hash.add(static_cast<const char*>(bytes) + at, n - at < piece ? n - at : piece);
    return hash.value();
}

KD_PROBE int kd_probe_json(const char* bytes, size_t n, char* out, size_t capacity) {
    return guarded([&] { give(out, capacity, dump(kd::json::parse({bytes, n}, "text"))); });
}

// `bytes`: at least prefix and header of a file of `file_bytes`.
KD_PROBE int kd_probe_safetensors(const uint8_t* bytes, size_t n, uint64_t file_bytes, char* out, size_t capacity) {
    return guarded([&] {
        if (n < 8) kd::fail(KD_E_INVALID, "the probe needs 8 bytes");
        const uint64_t header = kd::safetensors::header_bytes(bytes, file_bytes, "file");
        if (header > n) kd::fail(KD_E_INVALID, "the probe needs the whole header");
        const auto h = kd::safetensors::parse({reinterpret_cast<const char*>(bytes), header}, file_bytes, "file");
        std::string s;
        for (const auto& t : h.tensors) {
            Members m;
            m.add("name", quoted(t.name)).add("dtype", quoted(kd::safetensors::type_name(t.type)));
            m.add("shape", t.shape_text()).add("begin", t.begin).add("end", t.end);
            s += (s.empty() ? "" : ", ") + m.text();
        }
        give(out, capacity, "[" + s + "]");
    });
}

KD_PROBE int kd_probe_index(const char* bytes, size_t n, char* out, size_t capacity) {
    return guarded([&] {
        const auto index = kd::safetensors::parse_index({bytes, n}, "index");
        Members m;
        for (const auto& [name, file] : index.file_of) m.add(name.c_str(), quoted(index.files[file]));
        give(out, capacity, m.text());
    });
}

// `generation` and `draft` may be NULL.
KD_PROBE int kd_probe_config(const char* config, const char* generation, const char* draft, char* out,
                             size_t capacity) {
    return guarded([&] {
        kd::model::Config c = kd::model::parse_config(config, "config.json");
        if (generation) kd::model::add_stop_ids(c, generation, "generation_config.json");
        Members m;
        m.add("shape", dump(c.shape)).add("rope", dump(c.rotary, c.shape.rope)).add("stop_ids", c.stop_ids);
        m.add("nextn_layers", c.nextn_layers);
        if (draft) {
            const kd::model::DraftConfig d = kd::model::parse_draft_config(draft, "draft/config.json", c);
            m.add("draft", dump(d.shape)).add("draft_rope", dump(d.rotary, d.shape.head_dim));
        }
        give(out, capacity, m.text());
    });
}

// Read `n` bytes from `offset` of a file that may have shrunk since its header was read.
KD_PROBE int kd_probe_read(const char* folder, const char* name, uint64_t offset, size_t n) {
    return guarded([&] {
        std::vector<uint8_t> bytes(n);
        kd::model::Folder(folder).open(name)->read(bytes.data(), n, offset, "tensor 'x'");
    });
}

// The load is cancelled once `stop_at` tensor bytes are read (UINT64_MAX: never). `read`: tensor bytes read; `total`:
// to read.
KD_PROBE int kd_probe_load(void** handle, const char* path, int draft_mode, const char* draft_path, int tp,
                           uint64_t stop_at, uint64_t* read, uint64_t* total) {
    kd::model::Progress progress;
    progress.stop_at = stop_at;
    const int status = guarded([&] {
        auto h = std::make_unique<Handle>();
        kd::device::Options options;
        options.tp = tp;
        options.threads = tp;
        h->group = kd::device::open_group(options);
        const kd::model::DraftChoice choice{static_cast<kd::model::DraftChoice::Mode>(draft_mode),
                                            draft_path ? draft_path : ""};
        h->loaded = kd::model::load(path, choice, *h->group, tp, progress);
        *handle = h.release();
    });
    *read = progress.bytes_done;
    *total = progress.bytes_total;
    return status;
}

// Write the loaded model into a folder as packed files, given up once `stop_at` bytes are written.
KD_PROBE int kd_probe_save(void* handle, const char* path, uint64_t stop_at) {
    return guarded([&] {
        kd::model::Progress progress;
        progress.stop_at = stop_at;
        kd::model::save(*static_cast<Handle*>(handle)->loaded, path, progress);
    });
}

KD_PROBE void kd_probe_unload(void* handle) {
    auto* h = static_cast<Handle*>(handle);
    h->loaded.reset();
    delete h;
}

KD_PROBE int kd_probe_loaded_info(void* handle, int rank, char* out, size_t capacity) {
    return guarded([&] {
        const kd::model::Loaded& l = *static_cast<Handle*>(handle)->loaded;
        const kd::Model& model = l.ranks.at(static_cast<size_t>(rank));
        Members m;
        m.add("shape", dump(model.shape)).add("draft", dump(model.draft)).add("parameters", l.info.parameters);
        m.add("draft_parameters", l.info.draft_parameters).add("weight_bytes", l.info.weight_bytes);
        m.add("expert_bytes", l.info.expert_bytes)
            .add("content_hash", l.info.content_hash)
            .add("target_hash", l.info.target_hash);
        give(out, capacity, m.add("stop_ids", l.info.stop_ids).text());
    });
}

// One weight as float32 [n][k], INT4 dequantised. `out` NULL: only n and k.
KD_PROBE int kd_probe_weight(void* handle, int rank, const char* name, float* out, uint64_t* n, uint64_t* k) {
    return guarded([&] {
        const Handle& h = *static_cast<Handle*>(handle);
        kd::device::bind(kd::device::context(*h.group, rank));
        const Matrix m = read(h.loaded->ranks.at(static_cast<size_t>(rank)), name);
        *n = m.n;
        *k = m.k;
        if (out) memcpy(out, m.values.data(), m.values.size() * sizeof(float));
    });
}
