// The drafter's config.json, for Kimi K2's own numbers: whatever is accepted fits the target and can be laid out.
#include <cmath>

#include "fuzz.h"
#include "model/config.h"
#include "model/plan.h"

namespace km = kd::model;

static const km::Config& target() {
    static const km::Config config = [] {
        km::Config c;
        kd::Shape& s = c.shape;
        s.hidden = 7168, s.layers = 61, s.dense_layers = 1, s.heads = s.heads_rank = 64,
        s.vocab = s.vocab_rank = 163840;
        s.max_positions = 262144;
        return c;
    }();
    return config;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    const std::string_view text(reinterpret_cast<const char*>(data), size);
    fuzz_guarded([&] {
        const km::DraftConfig c = km::parse_draft_config(text, "draft/config.json", target());
        const kd::DraftShape& d = c.shape;
        FUZZ_CHECK(d.hidden == 7168 && d.layers >= 1 && d.window.size() == static_cast<size_t>(d.layers));
        FUZZ_CHECK(d.causal.size() == d.window.size());
        FUZZ_CHECK(d.block >= 2 && d.depth() <= KD_MAX_DEPTH && d.mask_token >= 0 && d.mask_token < 163840);
        FUZZ_CHECK(!d.taps.empty() && d.taps.size() <= km::kMaxTaps && d.heads % d.kv_heads == 0);
        for (const int tap : d.taps) FUZZ_CHECK(tap >= 0 && tap < 61);
        for (const int window : d.window) FUZZ_CHECK(window >= 0 && window <= km::kMaxPositions);
        FUZZ_CHECK(std::isfinite(km::rope_amplitude(c.rotary)) && km::rope_amplitude(c.rotary) > 0);
        for (const double f : km::rope_frequencies(c.rotary, d.head_dim)) FUZZ_CHECK(std::isfinite(f) && f >= 0);
        for (const int tp : {1, 8}) {
            kd::Model m;
            km::Layout layout;
            km::lay_out_draft(m, layout, nullptr, km::rank_shape(d, tp), 262144);
            FUZZ_CHECK(layout.bytes() > 0 && !layout.parts().empty());
        }
    });
    return 0;
}
