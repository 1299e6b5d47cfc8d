// native/model/config: whatever is accepted can be laid out for every number of ranks without overflow.
//
// Input: config.json, generation_config.json and a drafter's config.json with zero bytes between them; one is enough.
#include <cmath>
#include <vector>

#include "fuzz.h"
#include "model/config.h"
#include "model/plan.h"

namespace km = kd::model;

static void check_rope(const km::Rotary& rotary, int dim) {
    for (const double f : km::rope_frequencies(rotary, dim)) FUZZ_CHECK(std::isfinite(f) && f >= 0 && f <= 1);
    FUZZ_CHECK(std::isfinite(km::rope_amplitude(rotary)) && km::rope_amplitude(rotary) > 0);
}

static void check_target(const km::Config& c) {
    check_rope(c.rotary, c.shape.rope);
    FUZZ_CHECK(std::isfinite(c.shape.score_scale) && c.shape.score_scale > 0);
    FUZZ_CHECK(c.stop_ids.size() <= KD_MAX_STOP_IDS);
    for (const int id : c.stop_ids) FUZZ_CHECK(id >= 0 && id < c.shape.vocab);
}

static void check_ranks(const km::Config& c, const km::DraftConfig* d, int tp) {
    uint64_t bytes = 0;
    int vocab = 0;
    for (int rank = 0; rank < tp; ++rank) {
        const kd::Shape s = km::rank_shape(c.shape, tp, rank);
        FUZZ_CHECK(s.vocab_begin == vocab && s.vocab_rank >= 0);
        vocab += s.vocab_rank;
        kd::Model m;
        km::Layout layout;
        uint64_t expert_bytes = 0;
        km::lay_out_target(m, expert_bytes, layout, nullptr, s);
        if (d) km::lay_out_draft(m, layout, nullptr, km::rank_shape(d->shape, tp), s.max_positions);
        FUZZ_CHECK(rank == 0 || layout.bytes() == bytes);
        FUZZ_CHECK(expert_bytes < layout.bytes());
        bytes = layout.bytes();
    }
    FUZZ_CHECK(vocab == c.shape.vocab);
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    std::string_view rest(reinterpret_cast<const char*>(data), size);
    std::vector<std::string_view> texts;
    while (texts.size() < 3) {
        const size_t end = std::min(rest.find('\0'), rest.size());
        texts.push_back(rest.substr(0, end));
        rest.remove_prefix(std::min(end + 1, rest.size()));
    }
    km::Config config;
    km::DraftConfig draft;
    bool has_draft = false;
    fuzz_guarded([&] {
        config = km::parse_config(texts[0], "config.json");
        check_target(config);
        if (!texts[1].empty()) km::add_stop_ids(config, texts[1], "generation_config.json");
        check_target(config);
        if (texts[2].empty()) return;
        draft = km::parse_draft_config(texts[2], "draft/config.json", config);
        has_draft = true;
        check_rope(draft.rotary, draft.shape.head_dim);
        FUZZ_CHECK(draft.shape.block >= 2 && draft.shape.depth() <= KD_MAX_DEPTH);
        for (const int tap : draft.shape.taps) FUZZ_CHECK(tap >= 0 && tap < config.shape.layers);
    });
    if (config.shape.layers == 0 || fuzz_outcome != "accepted") return 0;
    for (const int tp : {1, 2, 8}) fuzz_guarded([&] { check_ranks(config, has_draft ? &draft : nullptr, tp); });
    return 0;
}
