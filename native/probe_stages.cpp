// Watching the ranks of an open engine: what the operations of its rounds take, and what its routers see.
#include "probe_stages.h"

#include <bit>
#include <cstring>
#include <memory>

#include "probe_engine.h"

namespace kd::probe {

std::string stages_of(const Stages& stages, int room, const Model& model) {
    static const char* const names[] = {"context", "draft", "verify", "round", "round", "round"};
    const auto weights = weight_names(model);
    std::vector<std::string> parts;
    for (const Stages::Part& part : stages.parts()) {
        if (!part.whole)
            fail(KD_E_SIZE, "the stages of %s take more room than %d stamps: give more", names[part.key & 0xFF], room);
        const auto times = stages.times(part);
        std::vector<std::string> calls;
        for (size_t i = 0; i < part.calls.size(); i++) {
            const Call& call = part.calls[i];
            std::vector<uint64_t> ns;
            for (const auto& play : times) ns.push_back(play[i + 1] - play[i]);
            const auto name = weights.find(call.weights);
            calls.push_back(Json()
                                .put("op", std::string(call.op))
                                .put("of", name == weights.end() ? std::string() : name->second)
                                .put("weights", call.cost.weights)
                                .put("row_bytes", call.cost.row_bytes)
                                .put("key_bytes", call.cost.key_bytes)
                                .put("expert_bytes", call.cost.expert_bytes)
                                .put("row_ops", call.cost.row_ops)
                                .put("row_key_ops", call.cost.row_key_ops)
                                .put("window", call.cost.window)
                                .raw("ns", list(ns))
                                .text());
        }
        std::vector<uint64_t> whole;
        for (const auto& play : times) whole.push_back(play.back() - play.front());
        parts.push_back(Json()
                            .put("part", std::string(names[part.key & 0xFF]))
                            .put("recorded", std::to_string(part.key))
                            .raw("ns", list(whole))
                            .raw("calls", list(calls))
                            .text());
    }
    return list(parts);
}

}  // namespace kd::probe

using namespace kd;

namespace {

// Every rank of an engine is watched while there is one of these. All at once: ranks that meet have to play the same recordings.
class Watch {
  public:
    Watch(Engine& e, int stamps) : engine_(e), stamps_(stamps), of_(size_t(EngineProbe::ranks(e))) {
        try {
            EngineProbe::on_ranks(engine_, [&](Rank& r) {
                of_[size_t(r.index)] = std::make_unique<Stages>(stamps_);
                of_[size_t(r.index)]->watch();
            });
        } catch (...) {
            stop();
            throw;
        }
    }
    ~Watch() { stop(); }
    Watch(const Watch&) = delete;
    Watch& operator=(const Watch&) = delete;

    Stages& of(int rank) { return *of_[size_t(rank)]; }
    std::string told(int rank) {
        std::string text;
        EngineProbe::on_ranks(engine_, [&](Rank& r) {
            if (r.index == rank) text = probe::stages_of(of(rank), stamps_, *r.model);
        });
        return text;
    }

  private:
    void stop() {
        EngineProbe::on_ranks(engine_, [&](Rank& r) { of_[size_t(r.index)].reset(); });
    }

    Engine& engine_;
    const int stamps_;
    std::vector<std::unique_ptr<Stages>> of_;
};

// The first `n` rows, each `width` values.
void read_rows(float* to, Rows rows, int n, int width) {
    const size_t size = device::act_bytes();
    std::vector<char> all(size_t(n) * size_t(rows.stride) * size);
    device::download(all.data(), rows.p, all.size());
    for (int i = 0; i < n; i++, to += width) {
        const char* from = all.data() + (size_t(i) * size_t(rows.stride) + size_t(rows.offset)) * size;
        if (size == sizeof(float)) {
            memcpy(to, from, size_t(width) * sizeof(float));
            continue;
        }
        for (int c = 0; c < width; c++) {
            uint16_t bf16;
            memcpy(&bf16, from + size_t(c) * sizeof bf16, sizeof bf16);
            to[c] = std::bit_cast<float>(uint32_t(bf16) << 16);
        }
    }
}

}  // namespace

#define KD_PROBE extern "C" __attribute__((visibility("default")))

// From here to kd_probe_unwatch() the rounds of the engine have stamps, at most so many. nullptr: see kd_probe_error().
KD_PROBE void* kd_probe_watch(kd_engine* e, int32_t stamps) {
    Watch* watch = nullptr;
    probe::guarded([&] { watch = new Watch(e->engine, stamps); });
    return watch;
}
KD_PROBE void kd_probe_unwatch(void* watch) { delete static_cast<Watch*>(watch); }

// What a rank's rounds took, as kd_share_stages() tells it.
KD_PROBE int32_t kd_probe_watched(void* watch, int32_t rank, char* json, uint64_t capacity) {
    return probe::guarded([&] { probe::give(json, capacity, static_cast<Watch*>(watch)->told(rank)); });
}

// Engine::score(), and what the router of each layer with experts is given of every token: rows [such layers][n][hidden]. Nothing else
// may be asked of the engine meanwhile.
KD_PROBE int32_t kd_probe_routed(kd_engine* e, const int32_t* tokens, uint32_t n, float* logits, float* rows) {
    return probe::guarded([&] {
        Watch watch(e->engine, 1);
        const Shape s = EngineProbe::shape(e->engine);
        const int layers = s.layers - s.dense_layers;
        size_t begin = 0;
        int layer = 0;
        watch.of(0).routed = [&](int n_rows, Rows h, Dev<int32_t>) {
            read_rows(rows + (size_t(layer) * n + begin) * size_t(s.hidden), h, n_rows, s.hidden);
            if (++layer < layers) return;
            layer = 0;
            begin += size_t(n_rows);
        };
        e->engine.score(tokens, n, logits);
        KD_CHECK(begin == n);
    });
}
