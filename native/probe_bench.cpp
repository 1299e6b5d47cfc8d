// Operations at work, over and over. See probe_bench.h.

#include "probe_bench.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <random>
#include <vector>

#include "ops.h"
#include "probe_device.h"
#include "probe_rig.h"

using namespace kd;
using probe::Stopwatch;

namespace {

constexpr size_t kPatternBytes = (size_t{4} << 20) + 64;  // no power of two, so that rows differ
constexpr int kKvLora = 512, kRope = 64;

// Memory of a measurement and what it is filled with.
class Room {
  public:
    explicit Room(const kd_bench& b) : b_(b) {}
    ~Room() {
        for (void* p : owned_) device::release(p);
    }
    Room(const Room&) = delete;
    Room& operator=(const Room&) = delete;

    // How many copies of what a call reads.
    int copies(size_t bytes) const {
        const size_t wanted = (static_cast<size_t>(b_.rotate_bytes) + bytes - 1) / std::max<size_t>(bytes, 1);
        return static_cast<int>(std::clamp<size_t>(wanted, 1, static_cast<size_t>(b_.calls)));
    }

    template <class T>
    Dev<T> empty(size_t n) {
        return Dev<T>(static_cast<T*>(memory(n * sizeof(T))));
    }
    template <class T>
    Dev<T> of(const std::vector<T>& values) {
        const Dev<T> to = empty<T>(values.size());
        device::upload(to, values.data(), values.size());
        return to;
    }
    Dev<float> floats(size_t n, float spread = 1) { return random<float>(n, spread); }
    Dev<uint16_t> bf16(size_t n, float spread = 1) { return random<uint16_t>(n, spread); }
    Dev<uint32_t> nibbles(size_t n) { return random<uint32_t>(n, 1); }
    Rows rows(size_t n, int width, float spread = 1) {
        Rows r = device::alloc_rows(n, width);
        owned_.push_back(r.p);
        const size_t values = n * static_cast<size_t>(r.stride);
        if (device::act_bytes() == sizeof(float))
            fill(Dev<float>(static_cast<float*>(r.p)), values, spread);
        else
            fill(Dev<uint16_t>(static_cast<uint16_t*>(r.p)), values, spread);
        return r;
    }
    Mat mat(int n, int k) { return {bf16(static_cast<size_t>(n) * static_cast<size_t>(k), 0.02f), n, k}; }

  private:
    void* memory(size_t bytes) {
        owned_.push_back(device::alloc(bytes));
        return owned_.back();
    }
    template <class T>
    Dev<T> random(size_t n, float spread) {
        const Dev<T> to = empty<T>(n);
        fill(to, n, spread);
        return to;
    }
    // The same pattern again and again: what is in it does not matter to the time, that it is finite and various does.
    template <class T>
    void fill(Dev<T> to, size_t n, float spread) {
        const std::vector<T>& pattern = pattern_of<T>(spread);
        for (size_t at = 0; at < n; at += pattern.size()) {
            device::upload(to + at, pattern.data(), std::min(pattern.size(), n - at));
        }
    }
    template <class T>
    static const std::vector<T>& pattern_of(float spread) {
        static std::map<float, std::vector<T>> made;
        std::vector<T>& pattern = made[spread];
        if (!pattern.empty()) return pattern;
        pattern.resize(kPatternBytes / sizeof(T));
        std::mt19937 engine(7);
        std::normal_distribution<float> normal(0, spread);
        for (T& value : pattern) {
            if constexpr (std::is_same_v<T, float>) value = normal(engine);
            if constexpr (std::is_same_v<T, uint16_t>)
                value = static_cast<uint16_t>(std::bit_cast<uint32_t>(normal(engine)) >> 16);
            if constexpr (std::is_same_v<T, uint32_t>) value = static_cast<uint32_t>(engine());
        }
        return pattern;
    }

    const kd_bench& b_;
    std::vector<void*> owned_;
};

using Body = std::function<void(int turn)>;

// prepare(room) makes the arrays and returns the call that is measured.
template <class F>
int32_t measure(const char* name, const kd_bench* b, double* us, F&& prepare) {
    const kd_probe_device where{1, b->threads, KD_ISA_AUTO, 1};
    return probe::run(name, &where, [&](probe::Rig&) {
        static std::atomic<uint64_t> key{1};
        Room room(*b);
        const Body body = prepare(room);
        const uint64_t own = key++;
        const auto all = [&] {
            for (int turn = 0; turn < b->calls; turn++) body(turn);
        };
        for (int i = 0; i < 2; i++) device::replay(own, all);
        Stopwatch watch;
        for (int i = 0; i < b->plays; i++) {
            watch.start();
            device::replay(own, all);
            us[i] = watch.stop_us() / b->calls;
        }
        device::forget();
    });
}

// Streams with trees of `rows` rows each whose roots are at position `context`; node i hangs below node (i - 1) / 2, so that
// half of the nodes have two children.
struct Forest {
    View view;
    Trees trees;
    std::vector<int32_t> parent, token;  // of one stream
    int pages = 0;                       // of all streams

    Forest(Room& room, int streams, int rows, int context) {
        std::vector<int32_t> position, stream, slot, prefix, table, first{0}, all_parent, all_token, out_row;
        std::vector<uint64_t> mask;
        const int each = (context + rows + KD_PAGE_TOKENS - 1) / KD_PAGE_TOKENS;
        for (int i = 0; i < rows; i++) {
            parent.push_back(i ? (i - 1) / 2 : -1);
            token.push_back(1000 + i);
        }
        for (int s = 0; s < streams; s++) {
            std::vector<std::vector<uint64_t>> seen(rows, std::vector<uint64_t>(kMaskWords));
            std::vector<int> depth(rows);
            for (int i = 0; i < rows; i++) {
                if (i) seen[i] = seen[parent[i]], depth[i] = depth[parent[i]] + 1;
                seen[i][i / 64] |= uint64_t{1} << (i % 64);
                position.push_back(context + depth[i]);
                stream.push_back(s);
                slot.push_back(context + i);
                prefix.push_back(context);
                all_parent.push_back(parent[i]);
                all_token.push_back(token[i]);
                out_row.push_back(s * rows + i);
                mask.insert(mask.end(), seen[i].begin(), seen[i].end());
            }
            for (int p = 0; p < each; p++) table.push_back(s * each + (p * 7 + 3) % each);
            first.push_back((s + 1) * rows);
        }
        pages = streams * each;
        view.n_rows = view.n_out = streams * rows;
        view.n_streams = streams;
        view.max_pages = each;
        view.token = room.of(all_token);
        view.position = room.of(position);
        view.stream = room.of(stream);
        view.slot = room.of(slot);
        view.prefix = room.of(prefix);
        view.mask = room.of(mask);
        view.page_table = room.of(table);
        view.out_row = room.of(out_row);
        trees = {room.of(first), room.of(all_parent)};
    }

    // The path to the last node that is at depth kept - 1 or less: node, from the root.
    std::vector<int32_t> path(int kept) const {
        std::vector<int32_t> nodes;
        for (int32_t at = static_cast<int32_t>(parent.size()) - 1; at >= 0; at = parent[at]) nodes.push_back(at);
        std::reverse(nodes.begin(), nodes.end());
        nodes.resize(std::min<size_t>(nodes.size(), static_cast<size_t>(kept)));
        return nodes;
    }

    Accepted kept(Room& room, int streams, int n) const {
        const std::vector<int32_t> nodes = path(n);
        std::vector<int32_t> all(static_cast<size_t>(streams) * (KD_MAX_DEPTH + 1), -1);
        for (int s = 0; s < streams; s++) std::copy(nodes.begin(), nodes.end(), &all[s * (KD_MAX_DEPTH + 1)]);
        return {room.of(std::vector<int32_t>(streams, static_cast<int32_t>(nodes.size()))), room.of(all)};
    }
};

}  // namespace

extern "C" {

// ---- the device -------------------------------------------------------------------------------------------------------

int32_t kd_bench_read(const kd_bench* b, double* us, int64_t bytes) {
    return measure("read", b, us, [&](Room& room) -> Body {
        const int copies = room.copies(static_cast<size_t>(bytes));
        const Dev<char> p = room.empty<char>(static_cast<size_t>(bytes) * copies);
        return [=](int turn) {
            probe::read_all(std::bit_cast<void*>(p + static_cast<size_t>(bytes) * (turn % copies)),
                            static_cast<size_t>(bytes));
        };
    });
}

int32_t kd_bench_download(const kd_bench* b, double* us, int64_t bytes) {
    const kd_probe_device where{1, b->threads, KD_ISA_AUTO, 1};
    return probe::run("download", &where, [&](probe::Rig&) {
        Room room(*b);
        const Dev<char> p = room.empty<char>(static_cast<size_t>(bytes));
        std::vector<char> host(static_cast<size_t>(bytes));
        for (int i = -1; i < b->plays; i++) {
            const auto began = std::chrono::steady_clock::now();
            for (int turn = 0; turn < b->calls; turn++) device::download(host.data(), p, host.size());
            const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - began;
            if (i >= 0) us[i] = took.count() / b->calls;
        }
    });
}

// ---- rows and products --------------------------------------------------------------------------------------------------

int32_t kd_bench_linear(const kd_bench* b, double* us, int32_t rows, int32_t n, int32_t k, int32_t logits) {
    return measure("linear", b, us, [&](Room& room) -> Body {
        std::vector<Mat> w(room.copies(static_cast<size_t>(n) * k * sizeof(uint16_t)));
        for (Mat& m : w) m = room.mat(n, k);
        const Rows x = room.rows(rows, k);
        if (logits) {
            const Dev<float> y = room.empty<float>(static_cast<size_t>(rows) * n);
            return [=](int turn) { ops::logits(y, n, x, w[turn % w.size()], rows); };
        }
        const Rows y = room.rows(rows, n);
        return [=](int turn) { ops::linear(y, x, w[turn % w.size()], rows); };
    });
}

int32_t kd_bench_rms_norm(const kd_bench* b, double* us, int32_t rows, int32_t width) {
    return measure("rms_norm", b, us, [&](Room& room) -> Body {
        const Rows y = room.rows(rows, width), x = room.rows(rows, width);
        const Vec w = room.floats(width);
        return [=](int) { ops::rms_norm(y, x, w, rows, width, 1e-5f); };
    });
}

int32_t kd_bench_add_norm(const kd_bench* b, double* us, int32_t rows, int32_t width) {
    return measure("add_norm", b, us, [&](Room& room) -> Body {
        const Rows h = room.rows(rows, width), y = room.rows(rows, width, 1e-3f);
        const Dev<float> x = room.floats(static_cast<size_t>(rows) * width);
        const Vec w = room.floats(width);
        return [=](int) { ops::add_norm(h, x, y, w, rows, width, 1e-5f); };
    });
}

int32_t kd_bench_swiglu(const kd_bench* b, double* us, int32_t rows, int32_t width) {
    return measure("swiglu", b, us, [&](Room& room) -> Body {
        const Rows y = room.rows(rows, width), x = room.rows(rows, 2 * width);
        return [=](int) { ops::swiglu(y, x, rows, width); };
    });
}

// ---- experts --------------------------------------------------------------------------------------------------------------

int32_t kd_bench_route(const kd_bench* b, double* us, int32_t rows, int32_t hidden, int32_t experts, int32_t slots) {
    return measure("route", b, us, [&](Room& room) -> Body {
        Shape s;
        s.hidden = hidden;
        s.experts = experts;
        s.experts_per_token = slots;
        s.routed_scale = 1;
        const size_t size = static_cast<size_t>(experts) * hidden;
        std::vector<Dev<const float>> router(room.copies(size * sizeof(float)));
        for (auto& w : router) w = room.floats(size, 0.02f);
        const Rows h = room.rows(rows, hidden);
        const Vec bias = room.floats(experts, 0.1f);
        const Dev<int32_t> expert = room.empty<int32_t>(static_cast<size_t>(rows) * slots);
        const Dev<float> weight = room.empty<float>(static_cast<size_t>(rows) * slots);
        return [=](int turn) { ops::route(expert, weight, h, router[turn % router.size()], bias, rows, s); };
    });
}

int32_t kd_bench_moe(const kd_bench* b, double* us, const int32_t* expert, int32_t rows, int32_t hidden, int32_t inter,
                     int32_t experts, int32_t slots) {
    return measure("moe", b, us, [&](Room& room) -> Body {
        Shape s;
        s.hidden = hidden;
        s.moe_inter = s.moe_inter_rank = inter;
        s.experts = experts;
        s.experts_per_token = slots;
        const size_t size = static_cast<size_t>(experts) * inter * hidden;  // weights of one of the three
        std::vector<Experts> layer(room.copies(3 * size * 9 / 16));
        for (Experts& e : layer) {
            e.gate_up = {room.nibbles(2 * size / 8), room.bf16(2 * size / 32, 0.003f), 2 * inter, hidden};
            e.down = {room.nibbles(size / 8), room.bf16(size / 32, 0.003f), hidden, inter};
            e.count = experts;
            ops::pack_experts(e);
        }
        const size_t pairs = static_cast<size_t>(rows) * slots;
        const Dev<int32_t> sent = room.of(std::vector<int32_t>(expert, expert + pairs * b->calls));
        const Dev<float> weight = room.of(std::vector<float>(pairs, 0.125f));
        const Rows y = room.rows(rows, hidden, 0), h = room.rows(rows, hidden);
        return [=](int turn) {
            ops::moe(y, h, sent + pairs * static_cast<size_t>(turn), weight, layer[turn % layer.size()], rows, s);
        };
    });
}

// ---- attention --------------------------------------------------------------------------------------------------------------

int32_t kd_bench_attention(const kd_bench* b, double* us, int32_t streams, int32_t rows, int32_t context,
                           int32_t heads) {
    return measure("attention", b, us, [&](Room& room) -> Body {
        Shape s;
        s.heads = s.heads_rank = heads;
        s.kv_lora = kKvLora;
        s.rope = kRope;
        s.score_scale = 0.07f;
        const Forest forest(room, streams, rows, context);
        const size_t pool = static_cast<size_t>(forest.pages) * KD_PAGE_TOKENS;
        std::vector<Rows> kv(room.copies(pool * (kKvLora + kRope) * device::act_bytes()));
        for (Rows& r : kv) r = room.rows(pool, s.kv_row());
        const size_t n = static_cast<size_t>(streams) * rows;
        const Rows q = room.rows(n, heads * s.kv_row()), o = room.rows(n, heads * kKvLora);
        return [=, v = forest.view](int turn) { ops::mla_attention(o, q, kv[turn % kv.size()], v, s); };
    });
}

// ---- vocabulary -------------------------------------------------------------------------------------------------------------

int32_t kd_bench_top_logprobs(const kd_bench* b, double* us, int32_t rows, int32_t vocab, int32_t k) {
    return measure("top_logprobs", b, us, [&](Room& room) -> Body {
        Shape s;
        s.vocab = s.vocab_rank = vocab;
        const size_t size = static_cast<size_t>(rows) * vocab;
        std::vector<Dev<float>> logits(room.copies(size * sizeof(float)));
        for (auto& l : logits) l = room.floats(size, 3);
        const Dev<int32_t> id = room.empty<int32_t>(static_cast<size_t>(rows) * k);
        const Dev<float> logprob = room.empty<float>(static_cast<size_t>(rows) * k);
        return [=](int turn) { ops::top_logprobs(id, logprob, logits[turn % logits.size()], rows, k, s); };
    });
}

int32_t kd_bench_sample(const kd_bench* b, double* us, const kd_probe_sampling* way, int32_t rows, int32_t vocab) {
    return measure("sample", b, us, [&](Room& room) -> Body {
        Shape s;
        s.vocab = s.vocab_rank = vocab;
        const Forest forest(room, 1, rows, 1000);
        const size_t size = static_cast<size_t>(rows) * vocab;
        std::vector<Dev<float>> logits(room.copies(size * sizeof(float)));
        for (auto& l : logits) l = room.floats(size, 3);
        const Dev<Sampling> sampling = room.of(std::vector<Sampling>(1, std::bit_cast<Sampling>(*way)));
        const Choice out{room.empty<int32_t>(rows), room.empty<uint64_t>(rows), room.empty<float>(rows)};
        return [=, v = forest.view](int turn) { ops::sample(out, logits[turn % logits.size()], sampling, v, s); };
    });
}

// ---- trees ------------------------------------------------------------------------------------------------------------------

int32_t kd_bench_tree_build(const kd_bench* b, double* us, const int32_t* token, const float* logprob, int32_t streams,
                            int32_t depth, int32_t width, int32_t budget) {
    return measure("tree_build", b, us, [&](Room& room) -> Body {
        const size_t table = static_cast<size_t>(streams) * depth * width,
                     nodes = static_cast<size_t>(streams) * budget;
        std::vector<int32_t> row(streams);
        for (int s = 0; s < streams; s++) row[s] = s * depth;
        const Dev<int32_t> ids = room.of(std::vector<int32_t>(token, token + table));
        const Dev<float> values = room.of(std::vector<float>(logprob, logprob + table));
        const Drafts drafts{room.of(row), room.of(std::vector<int32_t>(streams, depth))};
        const Dev<int32_t> budgets = room.of(std::vector<int32_t>(streams, budget));
        const Nodes out{room.empty<int32_t>(streams), room.empty<int32_t>(nodes), room.empty<int32_t>(nodes), budget};
        return [=](int) { ops::tree_build(out, ids, values, drafts, budgets, streams, width); };
    });
}

int32_t kd_bench_tree_accept(const kd_bench* b, double* us, int32_t streams, int32_t rows, int32_t kept) {
    return measure("tree_accept", b, us, [&](Room& room) -> Body {
        const Forest forest(room, streams, rows, 1000);
        const std::vector<int32_t> path = forest.path(kept);
        std::vector<int32_t> chosen(static_cast<size_t>(streams) * rows, 0);
        for (int s = 0; s < streams; s++) {
            for (size_t j = 0; j + 1 < path.size(); j++) chosen[s * rows + path[j]] = forest.token[path[j + 1]];
        }
        Choice choice;
        choice.token = room.of(chosen);
        const Accepted out = forest.kept(room, streams, kept);
        return [=, v = forest.view, t = forest.trees](int) { ops::tree_accept(out, t, choice, v); };
    });
}

int32_t kd_bench_kv_commit(const kd_bench* b, double* us, int32_t streams, int32_t rows, int32_t kept, int32_t width) {
    return measure("kv_commit", b, us, [&](Room& room) -> Body {
        const Forest forest(room, streams, rows, 1000);
        const Accepted nodes = forest.kept(room, streams, kept);
        const size_t pool = static_cast<size_t>(forest.pages) * KD_PAGE_TOKENS;
        std::vector<Rows> kv(room.copies(pool * width * device::act_bytes()));
        for (Rows& r : kv) r = room.rows(pool, width);
        return [=, v = forest.view, t = forest.trees](int turn) {
            ops::kv_commit(kv[turn % kv.size()], nodes, t, v, width);
        };
    });
}

int32_t kd_bench_keep_taps(const kd_bench* b, double* us, int32_t streams, int32_t rows, int32_t kept, int32_t width) {
    return measure("keep_taps", b, us, [&](Room& room) -> Body {
        constexpr int ring_rows = 64;
        const Forest forest(room, streams, rows, 1000);
        const Accepted nodes = forest.kept(room, streams, kept);
        const Rows ring = room.rows(static_cast<size_t>(streams) * ring_rows, width);
        const Rows taps = room.rows(static_cast<size_t>(streams) * rows, width);
        std::vector<int32_t> slot(streams);
        for (int s = 0; s < streams; s++) slot[s] = s;
        const Dev<int32_t> ring_slot = room.of(slot);
        return [=, v = forest.view, t = forest.trees](int) {
            ops::keep_taps(ring, taps, ring_slot, nodes, t, v, ring_rows, width);
        };
    });
}

}  // extern "C"
