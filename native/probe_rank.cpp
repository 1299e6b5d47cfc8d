// The engine's rounds on a rank's share. See probe_rank.h.
#include "probe_rank.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>

#include "error.h"
#include "model/load.h"
#include "probe_device.h"
#include "probe_rank_share.h"
#include "probe_rig.h"
#include "probe_stages.h"
#include "round.h"
#include "stages.h"

using namespace kd;
using namespace kd::probe;

struct kd_share {
    Team team;
    probe::Share share;
    std::unique_ptr<Stage> stage;
    tree::Builder builder;
    tree::Instance planter;
    std::vector<std::unique_ptr<Sequence>> sequences;
    std::vector<Sequence*> batch;

    explicit kd_share(const kd_share_options& o)
        : team({1, o.threads}),
          share(bound(o)),
          builder(share.model.draft.layers ? tree::device : tree::none),
          planter(builder, std::max(1, o.nodes)) {
        std::vector<std::unique_ptr<Rank>> ranks;
        ranks.push_back(std::make_unique<Rank>(share.model, 0, share.limits));
        probe::Patterns patterns;
        share.fill(*ranks[0], patterns);
        stage = std::make_unique<Stage>(team, std::move(ranks), share.limits.rows);
    }
    ~kd_share() { bind(); }

    void bind() { device::bind(device::context(team.group(), 0)); }
    const kd_share_options& bound(const kd_share_options& o) {
        bind();
        return o;
    }
    Rank& rank() { return *stage->ranks[0]; }
    const Limits& limits() const { return share.limits; }
    int moe_layers() const { return share.model.shape.layers - share.model.shape.dense_layers; }

    // The streams of a round, before it: each with `context` tokens in the cache, some of whose taps wait.
    void seat(const kd_share_work& w) {
        constexpr int kWaiting = 5;
        bind();
        const Shape& s = share.model.shape;
        const int each = limits().kv_pages / limits().streams;
        if (w.streams < 1 || w.streams > limits().streams || w.rows < w.streams || w.rows > limits().rows)
            fail(KD_E_INVALID, "%d rows of %d streams: opened for %d rows and %d streams, each of which has a row",
                 w.rows, w.streams, limits().rows, limits().streams);
        if ((w.rows - 1) / w.streams > limits().tree_width)
            fail(KD_E_INVALID, "%d rows of %d streams: a tree has %d nodes at most, give more streams", w.rows,
                 w.streams, limits().tree_width);
        if (w.context < 1 || w.context + probe::kDrift + (w.rows - 1) / w.streams > each * KD_PAGE_TOKENS)
            fail(KD_E_INVALID, "a context of %d tokens: opened for less", w.context);
        if (w.recorded_rows && (w.recorded_rows < w.rows || w.recorded_rows > limits().rows))
            fail(KD_E_INVALID, "recorded for %d rows: give %d .. %d", w.recorded_rows, w.rows, limits().rows);
        std::mt19937 engine(11);
        std::uniform_int_distribution<int32_t> id(0, s.vocab - 2);
        sequences.clear();
        batch.clear();
        for (int i = 0; i < w.streams; i++) {
            Sequence& q = *sequences.emplace_back(std::make_unique<Sequence>());
            batch.push_back(&q);
            q.slot = i;
            q.prompt = q.start = w.context;
            q.draft_start = std::max(0, w.context - kWaiting);
            q.max_tokens = 1 << 20;
            for (int t = 0; t <= w.context; t++) q.tokens.push_back(id(engine));
            for (int p = 0; p < each; p++) q.pages.push_back(i * each + (p * 7 + 3) % each);  // 7: each is no multiple
            if (each % 7 == 0)
                for (int p = 0; p < each; p++) q.pages[size_t(p)] = i * each + p;
            q.planting = {&planter, w.rows / w.streams + (i < w.rows % w.streams) - 1, 1};
        }
        // Trees for a verification without a draft.
        Stage& g = *stage;
        const auto stride = size_t(limits().tree_width);
        for (int i = 0; i < w.streams; i++) {
            g.nodes[size_t(i)] = batch[size_t(i)]->planting.budget;
            for (int node = 1; node <= g.nodes[size_t(i)]; node++) {
                g.node_token[size_t(i) * stride + size_t(node) - 1] = id(engine);
                g.node_parent[size_t(i) * stride + size_t(node) - 1] = (node - 1) / 2;
            }
        }
        device::upload(rank().nodes.n, g.nodes.data(), size_t(w.streams));
        device::upload(rank().nodes.token, g.node_token.data(), size_t(w.streams) * stride);
        device::upload(rank().nodes.parent, g.node_parent.data(), size_t(w.streams) * stride);
        device::settle();
    }

    Room room(const kd_share_work& w) const {
        const int rows = w.recorded_rows ? w.recorded_rows : recorded_rows(limits(), w.rows);
        return {recorded_streams(limits(), w.streams), rows, 0};
    }

    // A play of the engine's recording, from the same state as the one before.
    double verify(const Room& room) {
        tell(*stage, batch, KD_MAX_NODES);
        probe::Stopwatch watch;
        watch.start();
        device::replay(room.key(2), [&] { verify_part(rank(), room); });
        return watch.stop_us();
    }

    std::pair<double, double> draft(const kd_share_work& w) {
        if (!share.model.draft.layers) fail(KD_E_STATE, "there is no drafter: give its config");
        if (w.rows == w.streams)
            fail(KD_E_STATE, "%d rows of %d streams: there is nothing to draft for, give more rows", w.rows, w.streams);
        const Room room{recorded_streams(limits(), w.streams), 0, std::max(1, (w.rows - 1) / w.streams)};
        tell(*stage, batch, KD_MAX_NODES);
        probe::Stopwatch watch;
        watch.start();
        device::replay(room.key(0), [&] { context_part(rank(), room); });
        const double context = watch.stop_us();
        watch.start();
        device::replay(room.key(1), [&] { draft_part(rank(), room); });
        return {context, watch.stop_us()};
    }

    // after(counts, tokens) of each round
    template <class F>
    void rounds(const kd_share_work& w, int n, F&& after) {
        if (w.rows > w.streams && !share.model.draft.layers)
            fail(KD_E_STATE, "%d rows of %d streams, and there is no drafter to make trees: give its config", w.rows,
                 w.streams);
        const std::atomic<bool> wanted{false};
        for (int done = 0; done < n;) {
            const int before = done;
            decode_rounds(*stage, batch, std::min(n - done, kRunRounds), wanted, [&](const StepCounts& counts) {
                int tokens = 0;
                for (const Sequence* q : batch) tokens += q->n_new;
                if (done < n) after(done, counts, tokens);
                return n - ++done;
            });
            KD_CHECK(done > before);
        }
    }
};

namespace {

constexpr int kWarm = 2;  // the first play brings memory, the second is recorded

Json account(const probe::Account& a) {
    return Json()
        .put("shard_bytes", double(a.shard))
        .put("expert_bytes", double(a.experts))
        .put("draft_bytes", double(a.draft))
        .put("kv_bytes", double(a.kv))
        .put("kv_bytes_token", double(a.kv_token));
}

// Whom each call of route() sends its rows to, call after call.
void keep_sent(Stages& stages, std::vector<std::vector<int32_t>>& sent, int slots) {
    stages.routed = [&sent, slots](int rows, Rows, Dev<int32_t> expert) {
        auto& ids = sent.emplace_back(size_t(rows) * size_t(slots));
        device::download(ids.data(), expert, ids.size());
    };
}

}  // namespace

extern "C" {

int32_t kd_share_account(const kd_share_options* o, char* json, uint64_t capacity) {
    return guarded([&] {
        Team team({1, o->threads});
        device::bind(device::context(team.group(), 0));
        const probe::Account a = probe::Share::account(*o);
        give(json, capacity, account(a).put("left_bytes", double(a.left)).text());
    });
}

int32_t kd_share_open(kd_share** rank, const kd_share_options* o) {
    return guarded([&] { *rank = new kd_share(*o); });
}

void kd_share_close(kd_share* rank) { delete rank; }

int32_t kd_share_info(kd_share* r, char* json, uint64_t capacity) {
    return guarded([&] {
        r->bind();
        const Shape& s = r->share.model.shape;
        const DraftShape& d = r->share.model.draft;
        give(json, capacity,
             account(r->share.taken)
                 .put("activation_bytes", double(r->rank().bytes() - r->share.taken.kv))
                 .put("left_bytes", double(probe::memory_left()))
                 .put("layers", s.layers)
                 .put("dense_layers", s.dense_layers)
                 .put("hidden", s.hidden)
                 .put("heads_rank", s.heads_rank)
                 .put("experts", s.experts)
                 .put("experts_per_token", s.experts_per_token)
                 .put("vocab", r->share.whole_vocab)
                 .put("vocab_rank", s.vocab_rank)
                 .put("draft_layers", d.layers)
                 .put("block", d.block)
                 .put("act_bytes", double(device::act_bytes()))
                 .text());
    });
}

int32_t kd_share_bias(kd_share* r, const float* bias) {
    return guarded([&] {
        r->bind();
        const auto experts = size_t(r->share.model.shape.experts);
        for (const Layer& l : r->share.model.layers) {
            if (l.dense) continue;
            device::upload(const_cast<void*>(std::bit_cast<const void*>(l.router_bias)), bias, experts * sizeof(float));
            bias += experts;
        }
        device::settle();
    });
}

int32_t kd_share_sent(kd_share* r, const kd_share_work* w, int32_t* expert) {
    return guarded([&] {
        r->seat(*w);
        std::vector<std::vector<int32_t>> sent;
        Stages stages(1);
        keep_sent(stages, sent, r->share.model.shape.experts_per_token);
        stages.watch();
        tell(*r->stage, r->batch, KD_MAX_NODES);
        verify_part(r->rank(), r->room(*w));
        Stages::unwatch();
        KD_CHECK(int(sent.size()) == r->moe_layers());
        const size_t each = size_t(w->rows) * size_t(r->share.model.shape.experts_per_token);
        for (const auto& ids : sent) {
            KD_CHECK(ids.size() == each);
            expert = std::copy(ids.begin(), ids.end(), expert);
        }
    });
}

int32_t kd_share_verify(kd_share* r, const kd_share_work* w, int32_t plays, double* us) {
    return guarded([&] {
        r->seat(*w);
        for (int i = -kWarm; i < plays; i++) {
            const double took = r->verify(r->room(*w));
            if (i >= 0) us[i] = took;
        }
    });
}

int32_t kd_share_draft(kd_share* r, const kd_share_work* w, int32_t plays, double* context_us, double* draft_us) {
    return guarded([&] {
        r->seat(*w);
        for (int i = -kWarm; i < plays; i++) {
            const auto [context, draft] = r->draft(*w);
            if (i < 0) continue;
            context_us[i] = context;
            draft_us[i] = draft;
        }
    });
}

int32_t kd_share_rounds(kd_share* r, const kd_share_work* w, int32_t rounds, double* us, double* gap_us,
                        int32_t* tokens) {
    return guarded([&] {
        // Twice, so that what is measured has been recorded: a run of one round is another recording than a longer one's.
        for (int i = 0; i < kWarm; i++) {
            r->seat(*w);
            r->rounds(*w, std::min(rounds, 2), [](int, const StepCounts&, int) {});
        }
        r->seat(*w);
        r->rounds(*w, rounds, [&](int i, const StepCounts& counts, int given) {
            us[i] = double(counts.device_ns) / 1e3;
            gap_us[i] = double(counts.gap_ns) / 1e3;
            tokens[i] = given;
        });
    });
}

int32_t kd_share_stages(kd_share* r, const kd_share_work* w, int32_t what, int32_t plays, int32_t room, char* json,
                        uint64_t capacity) {
    return guarded([&] {
        r->seat(*w);
        Stages stages(room);
        stages.watch();
        if (what == KD_SHARE_ROUND) {
            for (int i = 0; i < kWarm; i++) r->rounds(*w, 2, [](int, const StepCounts&, int) {});
            r->seat(*w);
            r->rounds(*w, plays, [](int, const StepCounts&, int) {});
        }
        for (int i = -kWarm; what != KD_SHARE_ROUND && i < plays; i++) {
            if (what == KD_SHARE_VERIFY)
                r->verify(r->room(*w));
            else
                r->draft(*w);
        }
        give(json, capacity, stages_of(stages, room, r->share.model));
    });
}

int32_t kd_share_stamps(kd_share* r, int32_t n, double* ns) {
    return guarded([&] {
        r->bind();
        const Dev<uint64_t> stamps = device::alloc_array<uint64_t>(size_t(n) + 2);
        for (int i = 0; i < 3; i++)
            device::replay(~uint64_t{0}, [&] {
                for (int stamp = 0; stamp <= n; stamp++) device::stamp(stamps, n + 1);
            });
        std::vector<uint64_t> at(size_t(n) + 2);
        device::download(at.data(), stamps, at.size());
        for (size_t i = 0; i < size_t(n); i++) ns[i] = double(at[i + 2] - at[i + 1]);
        device::forget();
        device::release(stamps);
    });
}

int32_t kd_share_record(const char* folder, const int32_t* token, int32_t n, int64_t* counts, int32_t layers,
                        int32_t experts) {
    return guarded([&] {
        constexpr int kChunk = 256;
        Team team({1, 0});
        model::Progress progress;
        const auto loaded = model::load(folder, {model::DraftChoice::kNone, ""}, team.group(), 1, progress);
        const Model& m = loaded->ranks[0];
        if (m.shape.layers - m.shape.dense_layers != layers || m.shape.experts != experts)
            fail(KD_E_INVALID, "%s has %d layers with %d experts, not %d with %d", folder,
                 m.shape.layers - m.shape.dense_layers, m.shape.experts, layers, experts);
        if (n < 1 || n > m.shape.max_positions)
            fail(KD_E_INVALID, "a prompt of %d tokens: give 1 .. %d, what %s takes", n, m.shape.max_positions, folder);
        device::bind(device::context(team.group(), 0));
        Sequence q;
        q.slot = 0;
        q.tokens.assign(token, token + n);
        q.prompt = n;
        for (int p = 0; p <= n / KD_PAGE_TOKENS; p++) q.pages.push_back(p);
        const Limits limits{kChunk, 1, 1, int(q.pages.size()), int(q.pages.size())};
        std::vector<std::unique_ptr<Rank>> ranks;
        ranks.push_back(std::make_unique<Rank>(m, 0, limits));
        Stage stage(team, std::move(ranks), kChunk);
        std::vector<std::vector<int32_t>> sent;
        Stages stages(1);
        keep_sent(stages, sent, m.shape.experts_per_token);
        stages.watch();
        for (int begin = 0; begin < n; begin += kChunk) {
            const PromptPart part{&q, begin, std::min(kChunk, n - begin)};
            prefill_chunk(stage, {&part, 1});
        }
        Stages::unwatch();
        for (size_t call = 0; call < sent.size(); call++)
            for (const int32_t e : sent[call]) counts[call % size_t(layers) * size_t(experts) + size_t(e)]++;
    });
}

}  // extern "C"
