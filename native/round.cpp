// THE OTHER PAGE: what happens in a step.
//
// A round is one forward call for all sequences, whatever their trees: a tree of no nodes is plain decoding. Accepted
// tokens are the target's own choices, made at their own positions, so what a tree holds can change how many come, never
// which (docs/design.md, "The exactness contract").
#include "round.h"

#include <algorithm>

#include "engine/clock.h"
#include "error.h"
#include "ops.h"
#include "pages.h"

namespace kd {
namespace {

constexpr int kPath = KD_MAX_DEPTH + 1;  // rows a round can keep of one sequence

int draft_depth(const Model& m) { return std::min(m.draft.depth(), int(KD_MAX_DEPTH)); }

// Nodes deeper than this could not be emitted: the root's successor is the token that uses up max_tokens.
int depth_left(const Stage& g, const Sequence& q) {
    return std::min(draft_depth(g.model()), q.max_tokens - q.generated() - 1);
}

bool drafts(const Stage& g, const Sequence& q) {
    return q.planting.budget > 0 && g.model().draft.layers > 0 && depth_left(g, q) > 0;
}

// Projects taps that wait in the rings into drafter K/V: all of the sequences that draft now, and of those whose ring could
// overflow in this round. At most as many rows at once as a step may have.
void project_taps(Stage& g, std::span<Sequence* const> batch) {
    const int width = int(g.model().draft.taps.size()) * g.model().shape.hidden;
    const int most = g.ranks[0]->limits.rows;
    auto flush = [&] {
        if (g.view.n_rows() == 0) return;
        g.team.run([&](int i) {
            Rank& r = *g.ranks[i];
            const View v = g.view.upload(r);
            device::upload(r.from_row, g.from_row.data(), g.from_row.size());
            ops::copy_rows(r.act.draft_taps, {}, r.tap_ring, r.from_row, v.n_rows, width);
            draft_context(r, r.act.draft_taps, v);
        });
        g.view.clear();
        g.from_row.clear();
    };
    g.view.clear();
    g.from_row.clear();
    for (Sequence* q : batch) {
        if (!drafts(g, *q) && q->start - q->draft_start <= kTapRing - kPath) continue;
        if (q->draft_start == q->start) continue;
        if (g.view.n_rows() + q->start - q->draft_start > most) flush();
        const int stream = g.view.add_stream(q->pages);
        for (int p = q->draft_start; p < q->start; p++) {
            g.view.add_causal_row(q->tokens[p], p, stream);
            g.from_row.push_back(q->slot * kTapRing + p % kTapRing);
        }
        q->draft_start = q->start;
    }
    flush();
}

// draft_block for the sequences that draft: table_token, table_logprob [drafting][depth][width]. Returns the width.
int draft(Stage& g, std::span<Sequence* const> batch, StepCounts& counts) {
    const Model& m = g.model();
    if (m.draft.layers == 0) return 0;
    project_taps(g, batch);

    const int depth = draft_depth(m);
    int width = 0;
    static constexpr uint64_t unused[kMaskWords] = {};
    g.view.clear();
    for (Sequence* q : batch) {
        if (!drafts(g, *q)) continue;
        width = std::max(width, q->planting.budget);
        const int stream = g.view.add_stream(q->pages);
        for (int j = 0; j < m.draft.block; j++) {
            const int token = j == 0 ? q->tokens[q->start] : m.draft.mask_token;
            const int position = std::min(q->start + j, m.shape.max_positions - 1);
            const int row = g.view.add_row(token, position, stream, position, q->start, unused);
            if (j >= 1 && j <= depth) g.view.want_logits(row);
        }
    }
    if (g.view.n_rows() == 0) return 0;
    width = std::min({width, m.shape.vocab, g.ranks[0]->limits.tree_width});
    g.team.run([&](int i) {
        Rank& r = *g.ranks[i];
        draft_block(r, g.view.upload(r), width);
        if (i != 0) return;
        device::download(g.table_token.data(), r.draft_token, size_t(g.view.n_out()) * width);
        device::download(g.table_logprob.data(), r.draft_logprob, size_t(g.view.n_out()) * width);
    });
    counts.draft_calls++;
    return width;
}

// Trees for the whole batch: tree_in, tree_out [batch]; n = 0 where a sequence does not draft or its builder failed.
void plant(Stage& g, std::span<Sequence* const> batch, int width, StepCounts& counts) {
    const Model& m = g.model();
    const int most = g.ranks[0]->limits.tree_width;
    const int depth = draft_depth(m);
    std::array<tree::Planted, KD_MAX_STREAMS> planted;
    size_t table = 0;
    for (size_t s = 0; s < batch.size(); s++) {
        const Sequence& q = *batch[s];
        kd_tree_in& in = g.tree_in[s];
        kd_tree_out& out = g.tree_out[s];
        in = {sizeof in, 0, width, 0, q.tokens[q.start], q.start, nullptr, nullptr};
        out = {sizeof out, 0, &g.node_token[s * most], &g.node_parent[s * most]};
        planted[s] = {&in, &out};
        if (!drafts(g, q)) continue;
        in.depths = depth_left(g, q);
        in.budget = std::min(q.planting.budget, most);
        in.token = &g.table_token[table * depth * width];
        in.logprob = &g.table_logprob[table * depth * width];
        table++;
        const kd_tree_out given = out;
        const int32_t status = q.planting.builder->build(in, out);
        const bool ours = out.token == given.token && out.parent == given.parent;
        if (status != KD_OK || !ours || tree::check_tree(in, out, m.shape.vocab)) {
            out = given;
            counts.builder_failures++;
        }
    }
    tree::cut_trees(planted.data(), int(batch.size()), g.max_rows);
}

// The rows of every tree: first_row [batch + 1], parent [rows], the view, sampling and ring_slot [batch].
void verify_view(Stage& g, std::span<Sequence* const> batch) {
    g.view.clear();
    g.first_row.clear();
    g.parent.clear();
    g.sampling.clear();
    g.ring_slot.clear();
    std::array<std::array<uint64_t, kMaskWords>, KD_MAX_NODES + 1> mask;
    std::array<int, KD_MAX_NODES + 1> depth;
    for (size_t s = 0; s < batch.size(); s++) {
        Sequence& q = *batch[s];
        const kd_tree_out& tree = g.tree_out[s];
        const int stream = g.view.add_stream(q.pages);
        g.first_row.push_back(g.view.n_rows());
        g.sampling.push_back(q.sampling);
        g.ring_slot.push_back(q.slot);
        for (int i = 0; i <= tree.n; i++) {
            const int up = i ? tree.parent[i - 1] : -1;
            mask[i] = i ? mask[up] : std::array<uint64_t, kMaskWords>{};
            mask[i][i / 64] |= uint64_t(1) << (i % 64);
            depth[i] = i ? depth[up] + 1 : 0;
            const int token = i ? tree.token[i - 1] : q.tokens[q.start];
            const int row = g.view.add_row(token, q.start + depth[i], stream, q.start + i, q.start, mask[i].data());
            g.view.want_logits(row);
            g.parent.push_back(up);
        }
        q.nodes = tree.n;
    }
    g.first_row.push_back(g.view.n_rows());
}

// One forward call for all rows, the target's choice after each, the path it takes, and the cache moved along it.
void verify(Stage& g) {
    g.team.run([&](int i) {
        Rank& r = *g.ranks[i];
        const Shape& s = r.model->shape;
        const View v = g.view.upload(r);
        device::upload(r.sampling, g.sampling.data(), g.sampling.size());
        device::upload(r.trees.first_row, g.first_row.data(), g.first_row.size());
        device::upload(r.trees.parent, g.parent.data(), g.parent.size());
        forward(r, v);
        ops::sample(r.choice, r.act.logits, r.sampling, v, s);
        ops::tree_accept(r.kept, r.trees, r.choice, v);
        for (Rows kv : r.kv) ops::kv_commit(kv, r.kept, r.trees, v, s.kv_row());
        if (r.tap_ring.p) {
            device::upload(r.ring_slot, g.ring_slot.data(), g.ring_slot.size());
            ops::keep_taps(r.tap_ring, r.act.taps, r.ring_slot, r.kept, r.trees, v, kTapRing, r.tap_ring.stride);
        }
        if (i != 0) return;
        device::download(g.choice.data(), r.choice.token, v.n_out);
        device::download(g.hash.data(), r.choice.hash, v.n_out);
        device::download(g.logprob.data(), r.choice.logprob, v.n_out);
        device::download(g.kept_n.data(), r.kept.n, v.n_streams);
        device::download(g.kept_node.data(), r.kept.node, size_t(v.n_streams) * kPath);
    });
}

// The tokens of the kept path: the target's choice at each of its nodes, the last one being the bonus.
void accept(Stage& g, std::span<Sequence* const> batch, StepCounts& counts) {
    for (size_t s = 0; s < batch.size(); s++) {
        Sequence& q = *batch[s];
        q.n_new = g.kept_n[s];
        KD_CHECK(q.n_new >= 1 && q.n_new <= std::min(kPath, q.nodes + 1));
        for (int j = 0; j < q.n_new; j++) {
            const int row = g.first_row[s] + g.kept_node[s * kPath + j];
            q.tokens.push_back(g.choice[row]);
            q.hashes[j] = g.hash[row];
            q.logprobs[j] = g.logprob[row];
        }
        q.start += q.n_new;
        counts.nodes += q.nodes;
        counts.accepted += q.n_new - 1;
    }
    counts.rows += g.view.n_rows();
}

void prompt_view(Stage& g, std::span<const PromptPart> parts, bool all_logits) {
    g.view.clear();
    g.sampling.clear();
    for (const PromptPart& part : parts) {
        const Sequence& q = *part.sequence;
        const int stream = g.view.add_stream(q.pages);
        g.sampling.push_back(q.sampling);
        for (int p = part.begin; p < part.begin + part.n; p++) {
            const int row = g.view.add_causal_row(q.tokens[p], p, stream);
            if (all_logits || p == q.prompt - 1) g.view.want_logits(row);
        }
    }
}

}  // namespace

Stage::Stage(Team& team, std::vector<std::unique_ptr<Rank>> all, int max_rows)
    : team(team), ranks(std::move(all)), max_rows(max_rows), view(ranks[0]->limits) {
    const Limits& l = ranks[0]->limits;
    const size_t table = size_t(l.streams) * draft_depth(model()) * l.tree_width;
    table_token.resize(table);
    table_logprob.resize(table);
    node_token.resize(size_t(l.streams) * l.tree_width + 1);
    node_parent.resize(size_t(l.streams) * l.tree_width + 1);
    tree_in.resize(l.streams);
    tree_out.resize(l.streams);
    kept_n.resize(l.streams);
    kept_node.resize(size_t(l.streams) * kPath);
    for (auto* v : {&first_row, &parent, &ring_slot, &from_row, &to_row}) v->reserve(l.rows + 1);
    sampling.reserve(l.streams);
    choice.resize(l.rows);
    hash.resize(l.rows);
    logprob.resize(l.rows);
}

void prefill_chunk(Stage& g, std::span<const PromptPart> parts) {
    prompt_view(g, parts, false);
    g.team.run([&](int i) {
        Rank& r = *g.ranks[i];
        const View v = g.view.upload(r);
        device::upload(r.sampling, g.sampling.data(), g.sampling.size());
        forward(r, v);
        if (v.n_out) ops::sample(r.choice, r.act.logits, r.sampling, v, r.model->shape);
        if (r.model->draft.layers) draft_context(r, r.act.taps, v);
        if (i != 0) return;
        device::download(g.choice.data(), r.choice.token, v.n_out);
        device::download(g.hash.data(), r.choice.hash, v.n_out);
        device::download(g.logprob.data(), r.choice.logprob, v.n_out);
    });
    int out = 0;
    for (const PromptPart& part : parts) {
        Sequence& q = *part.sequence;
        q.start = q.draft_start = part.begin + part.n;
        q.n_new = q.nodes = 0;
        if (q.start < q.prompt) continue;
        q.tokens.push_back(g.choice[out]);
        q.hashes[0] = g.hash[out];
        q.logprobs[0] = g.logprob[out];
        q.n_new = 1;
        out++;
    }
}

StepCounts decode_round(Stage& g, std::span<Sequence* const> batch) {
    StepCounts counts;
    const uint64_t began = now_us();
    const int width = draft(g, batch, counts);
    const uint64_t drafted = now_us();
    plant(g, batch, width, counts);
    const uint64_t planted = now_us();
    verify_view(g, batch);
    verify(g);
    accept(g, batch, counts);
    counts.draft_us = drafted - began;
    counts.build_us = planted - drafted;
    counts.verify_us = now_us() - planted;
    return counts;
}

void score_chunk(Stage& g, const PromptPart& part, float* out) {
    prompt_view(g, {&part, 1}, true);
    const int vocab = g.model().shape.vocab;
    g.team.run([&](int i) {
        Rank& r = *g.ranks[i];
        const View v = g.view.upload(r);
        forward(r, v);
        const Shape& s = r.model->shape;
        for (int row = 0; row < v.n_out; row++)
            device::download(out + size_t(row) * vocab + s.vocab_begin, r.act.logits + size_t(row) * s.vocab_rank,
                             s.vocab_rank);
    });
}

void copy_page(Stage& g, int32_t to, int32_t from, int n) {
    g.from_row.clear();
    g.to_row.clear();
    for (int i = 0; i < n; i++) {
        g.from_row.push_back(from * KD_PAGE_TOKENS + i);
        g.to_row.push_back(to * KD_PAGE_TOKENS + i);
    }
    g.team.run([&](int i) {
        Rank& r = *g.ranks[i];
        device::upload(r.from_row, g.from_row.data(), g.from_row.size());
        device::upload(r.to_row, g.to_row.data(), g.to_row.size());
        for (auto* pools : {&r.kv, &r.draft_k, &r.draft_v})
            for (Rows pool : *pools) ops::copy_rows(pool, r.to_row, pool, r.from_row, n, pool.stride);
    });
}

}  // namespace kd
