#include "probe_rank_share.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "error.h"
#include "model/load.h"
#include "probe_device.h"

namespace kd::probe {

// ---- patterns -------------------------------------------------------------------------------------------------------

namespace {

constexpr size_t kValues = (size_t{1} << 21) + 32 * 37;  // no power of two, so that rows differ

uint16_t to_bf16(double value) {
    const uint32_t bits = std::bit_cast<uint32_t>(static_cast<float>(value));
    return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
float rounded(double value) { return std::bit_cast<float>(uint32_t{to_bf16(value)} << 16); }

template <class T>
void* address(Dev<T> p) {
    return const_cast<void*>(std::bit_cast<const void*>(p));
}

}  // namespace

Patterns::Patterns() : normal_(kValues) {
    std::mt19937 engine(7);
    std::normal_distribution<float> normal;
    for (float& v : normal_) v = normal(engine);
}

Patterns::~Patterns() {
    for (auto& [kind, pattern] : made_) device::release(pattern.p);
}

template <class T, class F>
void Patterns::fill(void* to, size_t n, const std::string& kind, F&& make) {
    auto found = made_.find(kind);
    if (found == made_.end()) {
        std::vector<T> values(kValues);
        for (size_t i = 0; i < kValues; i++) values[i] = make(i);
        const Pattern made{device::alloc(kValues * sizeof(T)), kValues * sizeof(T)};
        device::upload(made.p, values.data(), made.bytes);
        device::settle();
        found = made_.emplace(kind, made).first;
    }
    const Pattern& from = found->second;
    const size_t begin = turn_++ * 64 * 1021 % (from.bytes / 2) / 64 * 64;  // a stretch of its own
    tile(to, n * sizeof(T), static_cast<char*>(from.p) + begin, from.bytes - begin);
}

void Patterns::bf16(void* to, size_t n, double spread, double middle) {
    fill<uint16_t>(to, n, "bf16 " + std::to_string(spread) + " " + std::to_string(middle),
                   [&](size_t i) { return to_bf16(middle + spread * normal_[i]); });
}
void Patterns::fp32(void* to, size_t n, double spread) {
    fill<float>(to, n, "fp32 " + std::to_string(spread), [&](size_t i) { return rounded(spread * normal_[i]); });
}
void Patterns::ones(void* to, size_t n) {
    fill<float>(to, n, "ones", [](size_t) { return 1.0f; });
}
// Near the middle, as trained weights are; 8 is zero.
void Patterns::nibbles(void* to, size_t words) {
    fill<uint32_t>(to, words, "nibbles", [&](size_t i) {
        uint32_t word = 0;
        for (size_t j = 0; j < 8; j++) {
            const long value = std::lround(2.5 * static_cast<double>(normal_[(i * 8 + j) % kValues]));
            word |= static_cast<uint32_t>(std::clamp(value, -8L, 7L) + 8) << (4 * j);
        }
        return word;
    });
}
void Patterns::scales(void* to, size_t n, double size) {
    fill<uint16_t>(to, n, "scale " + std::to_string(size),
                   [&](size_t i) { return to_bf16(size * std::exp(0.1 * static_cast<double>(normal_[i]))); });
}
void Patterns::act(Rows rows, size_t n, double spread) {
    const size_t values = n * static_cast<size_t>(rows.stride);
    device::act_bytes() == sizeof(float) ? fp32(rows.p, values, spread) : bf16(rows.p, values, spread);
}

// ---- the share --------------------------------------------------------------------------------------------------------

namespace {

struct Parsed {
    model::Config config;
    model::DraftConfig draft;
    Shape shape;
    DraftShape draft_shape;
};

Parsed parse(const kd_share_options& o) {
    Parsed p;
    p.config = model::parse_config(o.config, "the config");
    p.shape = model::rank_shape(p.config.shape, o.tp, 0);
    if (!o.draft_config) return p;
    p.draft = model::parse_draft_config(o.draft_config, "the drafter's config", p.config);
    p.draft_shape = model::rank_shape(p.draft.shape, o.tp);
    return p;
}

struct Slabs {
    model::RopeSlabs target, draft;
};

Slabs lay_out(Model& m, uint64_t& expert_bytes, uint64_t& target_bytes, model::Layout& layout, const Parsed& p) {
    Slabs slabs;
    slabs.target = lay_out_target(m, expert_bytes, layout, nullptr, p.shape);
    target_bytes = layout.bytes();
    if (p.draft_shape.layers)
        slabs.draft = lay_out_draft(m, layout, nullptr, p.draft_shape, p.config.shape.max_positions);
    return slabs;
}

int pages_of_stream(const kd_share_options& o) {
    return (o.context + kDrift + o.nodes + KD_PAGE_TOKENS) / KD_PAGE_TOKENS;
}

void check(const kd_share_options& o, const Shape& s) {
    if (o.streams < 1 || o.streams > KD_MAX_STREAMS)
        fail(KD_E_INVALID, "%d streams: give 1 .. %d", o.streams, KD_MAX_STREAMS);
    if (o.nodes < 0 || o.nodes > KD_MAX_NODES)
        fail(KD_E_INVALID, "a tree of %d nodes: give 0 .. %d", o.nodes, KD_MAX_NODES);
    if (o.context < 1 || o.context + kDrift + o.nodes > s.max_positions)
        fail(KD_E_INVALID, "a context of %d tokens: give 1 .. %d, the config's %d positions less what measuring adds",
             o.context, s.max_positions - kDrift - o.nodes, s.max_positions);
}

// Rows 0 .. rows - 1 of the tables; nothing is at later positions.
void fill_rope(uint8_t* memory, const model::RopeSlabs& slabs, const model::Rotary& rotary, int dim, int rows) {
    const std::vector<double> frequencies = model::rope_frequencies(rotary, dim);
    const double amplitude = model::rope_amplitude(rotary);
    std::vector<float> values;
    for (const bool sine : {false, true}) {
        values.clear();
        for (int i = 0; i < rows; i++)
            for (const double f : frequencies)
                values.push_back(static_cast<float>(amplitude * (sine ? std::sin(i * f) : std::cos(i * f))));
        device::upload(memory + (sine ? slabs.sin : slabs.cos).at, values.data(), values.size() * sizeof(float));
        device::settle();
    }
}

}  // namespace

Account Share::account(const kd_share_options& o) {
    const Parsed p = parse(o);
    check(o, p.shape);
    Account a;
    Model m;
    model::Layout layout;
    uint64_t target = 0;
    lay_out(m, a.experts, target, layout, p);
    a.shard = layout.bytes();
    a.draft = a.shard - target;
    a.kv_token = Rank::kv_bytes_token(m);
    a.kv = a.kv_token * KD_PAGE_TOKENS * static_cast<uint64_t>(pages_of_stream(o)) * static_cast<uint64_t>(o.streams);
    a.left = memory_left();
    return a;
}

Share::Share(const kd_share_options& o) : taken(account(o)) {
    const auto mib = [](uint64_t bytes) { return static_cast<unsigned long long>(bytes >> 20); };
    if (taken.shard + taken.kv > taken.left)
        fail(KD_E_NOMEM,
             "one rank of %d takes %llu MiB of weights (experts %llu, drafter %llu) and %llu MiB of KV cache (%d "
             "streams of %d "
             "tokens), and the device has %llu MiB left: give a larger tp, fewer streams or a shorter context",
             o.tp, mib(taken.shard), mib(taken.experts), mib(taken.draft), mib(taken.kv), o.streams, o.context,
             mib(taken.left));
    const Parsed p = parse(o);
    memory_ = device::alloc(taken.shard);
    try {
        model::Layout layout(static_cast<uint8_t*>(memory_));
        uint64_t experts = 0, target = 0;
        const Slabs slabs = lay_out(model, experts, target, layout, p);
        const int rows = o.context + kDrift + o.nodes;
        fill_rope(static_cast<uint8_t*>(memory_), slabs.target, p.config.rotary, model.shape.rope, rows);
        if (model.draft.layers)
            fill_rope(static_cast<uint8_t*>(memory_), slabs.draft, p.draft.rotary, model.draft.head_dim, rows);
        Patterns patterns;
        fill_weights(patterns);
        device::settle();
    } catch (...) {
        device::release(memory_);
        throw;
    }
    whole_vocab = model.shape.vocab;
    model.shape.vocab = model.shape.vocab_rank;
    model.draft.mask_token = model.shape.vocab - 1;
    limits.rows = std::max(o.rows, o.streams * std::max(1, model.draft.block));
    limits.streams = o.streams;
    limits.tree_width = std::max(1, o.nodes);
    limits.pages_sequence = (model.shape.max_positions + o.nodes + KD_PAGE_TOKENS - 1) / KD_PAGE_TOKENS;
    limits.kv_pages = pages_of_stream(o) * o.streams;
}

Share::~Share() { device::release(memory_); }

// A product's outputs are about as large as its inputs. Experts need no packing: all of it is random.
void Share::fill_weights(Patterns& fill) {
    const auto mat = [&](const Mat& w, int k, double gain = 1) {
        fill.bf16(address(w.w), static_cast<size_t>(w.n) * static_cast<size_t>(w.k), gain / std::sqrt(k));
    };
    const auto norm = [&](Vec w, int n) { fill.ones(address(w), static_cast<size_t>(n)); };
    const auto packed = [&](const W4& w, int count) {
        const size_t n = static_cast<size_t>(count) * static_cast<size_t>(w.n) * static_cast<size_t>(w.k);
        fill.nibbles(address(w.q), n / 8);
        fill.scales(address(w.s), n / 32, 1 / (2.5 * std::sqrt(w.k)));
    };
    const Shape& s = model.shape;
    mat(model.embed, 1);
    mat(model.lm_head, s.hidden, 3);
    norm(model.norm, s.hidden);
    for (const Layer& l : model.layers) {
        norm(l.input_norm, s.hidden);
        norm(l.post_norm, s.hidden);
        norm(l.q_a_norm, s.q_lora);
        norm(l.kv_a_norm, s.kv_lora);
        for (const Mat& w : {l.qkv_a, l.q_b, l.v_up, l.o}) mat(w, w.k);
        mat(l.k_up, s.nope);
        if (l.dense) {
            mat(l.gate_up, l.gate_up.k);
            mat(l.down, l.down.k);
            continue;
        }
        // Scores of a normed row are normal, of deviation 1: bench/rank_step.py makes biases for that.
        fill.fp32(address(l.router), static_cast<size_t>(s.experts) * static_cast<size_t>(s.hidden),
                  1 / std::sqrt(s.hidden));
        packed(l.routed.gate_up, l.routed.count);
        packed(l.routed.down, l.routed.count);
        mat(l.shared_gate_up, l.shared_gate_up.k);
        mat(l.shared_down, l.shared_down.k);
    }
    if (!model.draft.layers) return;
    mat(model.fc, model.fc.k);
    norm(model.draft_hidden_norm, s.hidden);
    norm(model.draft_norm, s.hidden);
    for (const DraftLayer& l : model.draft_layers) {
        norm(l.input_norm, s.hidden);
        norm(l.post_norm, s.hidden);
        norm(l.q_norm, model.draft.head_dim);
        norm(l.k_norm, model.draft.head_dim);
        for (const Mat& w : {l.qkv, l.o, l.gate_up, l.down}) mat(w, w.k);
    }
}

void Share::fill(Rank& rank, Patterns& patterns) {
    const size_t slots = static_cast<size_t>(limits.kv_pages) * KD_PAGE_TOKENS;
    for (const auto* pools : {&rank.kv, &rank.draft_k, &rank.draft_v})
        for (const Rows& pool : *pools) patterns.act(pool, slots, 1);
    if (rank.tap_ring.p) patterns.act(rank.tap_ring, static_cast<size_t>(limits.streams) * kTapRing, 1);
    device::settle();
}

}  // namespace kd::probe
