// The same for the vocabulary, trees and the drafter.

#include <bit>
#include <vector>

#include "probe_bench_rig.h"

using namespace kd;
using namespace kd::probe;

extern "C" {

// ---- drafter ----------------------------------------------------------------------------------------------------------------

int32_t kd_bench_head_norm_rope(const kd_bench* b, double* us, int32_t rows, int32_t heads, int32_t dim) {
    return measure("head_norm_rope", b, us, [&](Room& room) -> Body {
        const Forest forest = small_forest(room, rows);
        const Rows x = room.rows(rows, heads * dim);
        const Vec norm = room.floats(dim);
        const Rope rope = room.rope(kSmallContext + rows, dim / 2);
        return [=, v = forest.view](int) { ops::head_norm_rope(x, norm, rope, v, heads, dim, 1e-5f); };
    });
}

int32_t kd_bench_draft_append(const kd_bench* b, double* us, int32_t rows, int32_t kv_heads, int32_t dim) {
    return measure("draft_append", b, us, [&](Room& room) -> Body {
        DraftShape d;
        d.kv_heads_rank = kv_heads;
        d.head_dim = dim;
        const Forest forest = small_forest(room, rows);
        const size_t pool = static_cast<size_t>(forest.pages) * KD_PAGE_TOKENS;
        const int width = kv_heads * dim;
        const Rows k_pool = room.rows(pool, width), v_pool = room.rows(pool, width), kv = room.rows(rows, 2 * width);
        return [=, v = forest.view](int) { ops::draft_append(k_pool, v_pool, kv, kv.from(width), v, d); };
    });
}

int32_t kd_bench_draft_attention(const kd_bench* b, double* us, int32_t streams, int32_t block, int32_t context,
                                 int32_t window, int32_t heads, int32_t kv_heads, int32_t dim) {
    return measure("draft_attention", b, us, [&](Room& room) -> Body {
        DraftShape d;
        d.heads_rank = heads;
        d.kv_heads_rank = kv_heads;
        d.head_dim = dim;
        d.block = block;
        const Forest forest(room, streams, block, context);
        const size_t pool = static_cast<size_t>(forest.pages) * KD_PAGE_TOKENS;
        const int width = kv_heads * dim, rows = streams * block;
        std::vector<Rows> k(room.copies(2 * pool * width * device::act_bytes())), value(k.size());
        for (size_t i = 0; i < k.size(); i++) k[i] = room.rows(pool, width), value[i] = room.rows(pool, width);
        const Rows qkv = room.rows(rows, heads * dim + 2 * width), o = room.rows(rows, heads * dim);
        return [=, v = forest.view](int turn) {
            ops::draft_attention(o, qkv, k[turn % k.size()], value[turn % k.size()], v, window, false, d);
        };
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
        const Drafts drafts{room.of(row), room.of(std::vector<int32_t>(streams, depth)), {}};
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

int32_t kd_bench_kv_commit(const kd_bench* b, double* us, int32_t layers, int32_t streams, int32_t rows, int32_t kept,
                           int32_t width) {
    return measure("kv_commit", b, us, [&](Room& room) -> Body {
        const Forest forest(room, streams, rows, 100);
        const Accepted nodes = forest.kept(room, streams, kept);
        const size_t pool = static_cast<size_t>(forest.pages) * KD_PAGE_TOKENS;
        std::vector<std::vector<Rows>> kv(room.copies(pool * width * device::act_bytes() * layers));
        for (auto& model : kv)
            for (int i = 0; i < layers; i++) model.push_back(room.rows(pool, width));
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
