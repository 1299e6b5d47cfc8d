// THE OTHER PAGE: what happens in a step.
//
// A round is one forward call for all sequences, whatever their trees: a tree of no nodes is plain decoding. Accepted
// tokens are the target's own choices, made at their own positions, so what a tree holds can change how many come, never
// which (docs/design.md, "The exactness contract").
#include "round.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <initializer_list>
#include <thread>

#include "engine/clock.h"
#include "error.h"
#include "ops.h"
#include "pages.h"

namespace kd {
namespace {

int draft_depth(const Model& m) { return std::min(m.draft.depth(), int(KD_MAX_DEPTH)); }

// Nodes deeper than this could not be emitted: the root's successor is the token that uses up max_tokens.
int depth_left(const Stage& g, const Sequence& q) {
    return std::min(draft_depth(g.model()), q.max_tokens - q.generated() - 1);
}

bool drafts(const Stage& g, const Sequence& q) {
    return q.planting.budget > 0 && g.model().draft.layers > 0 && depth_left(g, q) > 0;
}

int round_up(int n, std::initializer_list<int> sizes, int most) {
    for (const int size : sizes)
        if (n <= size && size <= most) return size;
    return most;
}

// The largest budget for which all trees have at most max_rows rows together.
int budget_cap(std::span<Sequence* const> batch, int max_rows) {
    for (int cap = KD_MAX_NODES;; cap--) {
        int rows = int(batch.size());
        for (const Sequence* q : batch) rows += std::min(q->planting.budget, cap);
        if (rows <= max_rows || cap == 0) return cap;
    }
}

// ---- a rank's part ---------------------------------------------------------------------------------------------------
//
// What a round does on the device. How many rows there are is data that a plan_* has written; `most` is only room.

constexpr uint64_t kRunNs = 50'000'000;  // a run ends by itself with the first round that ends later than this

Streams round_streams(const Rank& r, const Room& room) {
    Streams streams = r.streams;
    streams.run.most_ns = kRunNs;
    streams.n.most = room.streams;
    streams.n = device::known(streams.n);
    return streams;
}

// The view as the plan has left it.
View settled(View v, const Streams& streams) {
    v.n_rows = device::known(v.n_rows);
    v.n_out = device::known(v.n_out);
    v.n_streams = streams.n;
    return v;
}

}  // namespace

void context_part(Rank& r, const Room& room) {
    const int width = int(r.model->draft.taps.size()) * r.model->shape.hidden;
    const Streams streams = round_streams(r, room);
    View v = r.planned_view(std::min(r.limits.rows, room.streams * kTapRing), 0);
    ops::plan_context(v, r.counts, r.from_row, streams, kTapRing);
    v = settled(v, streams);
    ops::copy_rows(r.act.draft_taps, {}, r.tap_ring, r.from_row, v.n_rows, width);
    draft_context(r, r.act.draft_taps, v);
}

void draft_part(Rank& r, const Room& room) {
    const DraftShape& d = r.model->draft;
    const Streams streams = round_streams(r, room);
    View v = r.planned_view(room.streams * d.block, room.streams * draft_depth(*r.model));
    ops::plan_draft(v, r.counts, r.drafts, streams, d, r.model->shape);
    draft_block(r, settled(v, streams), room.width);
}

void verify_part(Rank& r, const Room& room) {
    const Shape& s = r.model->shape;
    const Streams streams = round_streams(r, room);
    View v = r.planned_view(room.rows, room.rows);
    ops::plan_verify(v, r.counts, r.trees, r.nodes, streams);
    v = settled(v, streams);
    forward(r, v);
    ops::sample(r.choice, r.act.logits, r.sampling, v, s);
    ops::tree_accept(r.kept, r.trees, r.choice, v);
    ops::kv_commit(r.kv, r.kept, r.trees, v, s.kv_row());
    if (r.tap_ring.p)
        ops::keep_taps(r.tap_ring, r.act.taps, streams.slot, r.kept, r.trees, v, kTapRing, r.tap_ring.stride);
    ops::end_round(r.emitted, streams, r.trees, r.kept, r.choice);
}

// ---- the host's part -------------------------------------------------------------------------------------------------

int recorded_streams(const Limits& l, int n) { return round_up(n, {1, 4, 16}, l.streams); }
int recorded_rows(const Limits& l, int n) { return round_up(n, {16, 64, 256}, l.rows); }

void tell(Stage& g, std::span<Sequence* const> batch, int cap) {
    const Limits& l = g.ranks[0]->limits;
    g.round_in[RoundIn::n] = int(batch.size());
    g.sampling.clear();
    for (size_t s = 0; s < batch.size(); s++) {
        const Sequence& q = *batch[s];
        const auto put = [&](RoundIn::Field f, int value) { g.round_in[RoundIn::at(f, l.streams) + s] = value; };
        put(RoundIn::slot, q.slot);
        put(RoundIn::start, q.start);
        put(RoundIn::draft_start, q.draft_start);
        put(RoundIn::root, q.tokens[q.start]);
        put(RoundIn::left, q.max_tokens - q.generated());
        put(RoundIn::budget, g.model().draft.layers ? std::min(q.planting.budget, cap) : 0);
        put(RoundIn::width, q.planting.builder->builder().width(KD_MAX_NODES));
        KD_CHECK(q.stop_ids.size() <= kStops);
        int32_t* stops = &g.round_in[RoundIn::stops(l.streams) + s * kStops];
        std::fill(std::copy(q.stop_ids.begin(), q.stop_ids.end(), stops), stops + kStops, -1);
        std::copy(q.pages.begin(), q.pages.end(), &g.page_table[s * l.pages_sequence]);
        g.sampling.push_back(q.sampling);
    }
    g.team.run(KD_STAGE_TELL, [&](int i) {
        Rank& r = *g.ranks[i];
        device::upload(r.round_in, g.round_in.data(), g.round_in.size());
        device::upload(r.streams.page_table, g.page_table.data(), batch.size() * l.pages_sequence);
        device::upload(r.sampling, g.sampling.data(), g.sampling.size());
    });
}

namespace {

// Projects the taps of the sequences that draft now, and of those whose ring could overflow in this round.
void project_taps(Stage& g, std::span<Sequence* const> batch, const Room& room) {
    int waiting = 0;
    for (Sequence* q : batch)
        if (drafts(g, *q) || q->start - q->draft_start > kTapRing - kPath) waiting += q->start - q->draft_start;
    const int most = std::min(g.ranks[0]->limits.rows, room.streams * kTapRing);
    for (; waiting > 0; waiting -= most)
        g.team.run(KD_STAGE_CONTEXT, [&](int i) {
            Rank& r = *g.ranks[i];
            device::replay(room.key(0), [&] { context_part(r, room); });
        });
}

// Rounds of one token each before a ring could overflow, if nobody projects taps in between.
int rounds_to_overflow(std::span<Sequence* const> batch) {
    constexpr int room = kTapRing - kPath;
    int most = 0;
    for (const Sequence* q : batch) {
        const int waiting = q->start - q->draft_start;
        if (waiting <= room) most = std::max(most, waiting);
    }
    return room - most + 1;
}

// The tables of the sequences that draft: table_token, table_logprob [drafting][depth][width].
void draft(Stage& g, int drafting, const Room& room) {
    g.team.run(KD_STAGE_DRAFT, [&](int i) {
        Rank& r = *g.ranks[i];
        device::replay(room.key(1), [&] { draft_part(r, room); });
        if (i != 0) return;
        const size_t n = size_t(drafting) * draft_depth(g.model()) * room.width;
        device::download(g.table_token.data(), r.draft_token, n);
        device::download(g.table_logprob.data(), r.draft_logprob, n);
    });
}

// Trees for the whole batch: tree_in, tree_out [batch]; n = 0 where a sequence does not draft or its builder failed. Returns
// the rows of all.
int plant(Stage& g, std::span<Sequence* const> batch, int width, StepCounts& counts) {
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
    return tree::cut_trees(planted.data(), int(batch.size()), g.max_rows);
}

// The words of a run, as the host sees them.
std::atomic_ref<int32_t> run_word(const Rank& r, size_t RoundOut::* word) {
    return std::atomic_ref(*reinterpret_cast<int32_t*>(r.round_out + RoundOut(r.limits.streams).*word));
}

void allow(Stage& g, int rounds) {
    for (const auto& r : g.ranks) run_word(*r, &RoundOut::allowed).store(rounds, std::memory_order_release);
}

// Before a run of at most so many rounds is given to the ranks.
void begin_run(Stage& g, int rounds) {
    for (const auto& r : g.ranks) {
        run_word(*r, &RoundOut::ended).store(0, std::memory_order_relaxed);
        memset(r->round_out + RoundOut(r->limits.streams).times, 0, kRunRounds * 2 * sizeof(uint64_t));
    }
    allow(g, rounds);
}

// A run that never comes to the host: every tree by ops::tree_build, or none at all.
void run_through(Stage& g, std::span<Sequence* const> batch, bool drafting, const Room& room, bool again) {
    std::fill(g.nodes.begin(), g.nodes.end(), 0);
    // What all streams can be given in a round waits for the next one's draft.
    const int contexts = (room.streams * kPath + g.ranks[0]->limits.rows - 1) / g.ranks[0]->limits.rows;
    g.team.run(KD_STAGE_DECODE, [&](int i) {
        Rank& r = *g.ranks[i];
        if (!drafting) device::upload(r.nodes.n, g.nodes.data(), batch.size());
        const auto round = [&] {
            if (drafting) {
                for (int c = 0; c < contexts; c++) context_part(r, room);
                draft_part(r, room);
                const Streams streams = round_streams(r, room);
                ops::tree_build(r.nodes, r.draft_token, r.draft_logprob, r.drafts, streams.budget, streams.n,
                                room.width);
            }
            verify_part(r, room);
        };
        if (again)
            device::loop(room.key(drafting ? 5 : 4), round);
        else
            device::replay(room.key(drafting ? 3 : 2), round);
    });
}

void verify(Stage& g, std::span<Sequence* const> batch, const Room& room) {
    const size_t n = batch.size(), stride = g.ranks[0]->limits.tree_width;
    for (size_t s = 0; s < n; s++) g.nodes[s] = g.tree_out[s].n;
    g.team.run(KD_STAGE_VERIFY, [&](int i) {
        Rank& r = *g.ranks[i];
        device::upload(r.nodes.n, g.nodes.data(), n);
        device::upload(r.nodes.token, g.node_token.data(), n * stride);
        device::upload(r.nodes.parent, g.node_parent.data(), n * stride);
        device::replay(room.key(2), [&] { verify_part(r, room); });
    });
}

// The tokens that round `round` of the run gave, to their sequences.
void take(Stage& g, std::span<Sequence* const> batch, int round, StepCounts& counts) {
    const int streams = g.ranks[0]->limits.streams;
    const RoundOut out(streams);
    const auto value = [&]<class T>(T& to, size_t array, size_t i) {
        memcpy(&to, g.ranks[0]->round_out + array + i * sizeof(T), sizeof(T));
    };
    uint64_t times[2];
    for (int i : {0, 1}) {
        auto* at = reinterpret_cast<uint64_t*>(g.ranks[0]->round_out + out.times) + 2 * round + i;
        while (!(times[i] = std::atomic_ref(*at).load(std::memory_order_acquire))) std::this_thread::yield();
    }
    counts.device_ns = times[1] - times[0];
    if (g.last_ended_ns && times[0] >= g.last_ended_ns) {
        (round ? counts.gap_ns : counts.launch_gap_ns) = times[0] - g.last_ended_ns;
        (round ? counts.gaps : counts.launch_gaps) = 1;
    }
    g.last_ended_ns = times[1];
    for (size_t i = 0; i < batch.size(); i++) {
        Sequence& q = *batch[i];
        const size_t s = size_t(round) * streams + i;
        value(q.n_new, out.n, s);
        value(q.nodes, out.nodes, s);
        value(q.draft_start, out.draft_start, s);
        if (q.n_new == 0) continue;
        KD_CHECK(q.n_new >= 1 && q.n_new <= std::min(kPath, q.nodes + 1));
        for (int j = 0; j < q.n_new; j++) {
            int32_t token;
            value(token, out.token, s * kPath + j);
            value(q.hashes[j], out.hash, s * kPath + j);
            value(q.logprobs[j], out.logprob, s * kPath + j);
            q.tokens.push_back(token);
        }
        q.start += q.n_new;
    }
}

// Waits until more than `seen` rounds of the run have ended; returns how many have, with kRunOver if no more will come.
int wait_round(Stage& g, int seen, bool again, const std::atomic<bool>& wanted) {
    constexpr uint64_t kSpinUs = 100, kLookUs = 1000;
    const std::atomic_ref<int32_t> word = run_word(*g.ranks[0], &RoundOut::ended);
    const uint64_t began = now_us();
    uint64_t looked = began;
    for (;;) {
        const int ended = word.load(std::memory_order_acquire);
        if (ended > seen) return ended;
        if (wanted.load(std::memory_order_relaxed)) allow(g, 0);
        const uint64_t now = now_us();
        if (now - looked > kLookUs) {
            looked = now;
            // A failed device tells nothing: this throws. Read again: the round may have ended just now.
            KD_CHECK(!g.team.idle() || word.load(std::memory_order_acquire) > seen);
        }
        // The device goes on by itself meanwhile: a core need not be kept busy to be a little earlier.
        if (again && now - began > kSpinUs) std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
}

// Hands over round after round of the run under way.
void follow(Stage& g, std::span<Sequence* const> batch, bool again, const std::atomic<bool>& wanted, StepCounts counts,
            uint64_t began, const AfterRound& after) {
    for (int seen = 0;;) {
        const int word = wait_round(g, seen, again, wanted);
        const int ended = word & ~kRunOver;
        int more = 0;
        for (; seen < ended; seen++) {
            take(g, batch, seen, counts);
            const uint64_t now = now_us();
            counts.verify_us = now - began;
            began = now;
            more = after(counts);
            counts = {.draft_calls = counts.draft_calls};
        }
        if (word & kRunOver) return;
        allow(g, more && !wanted ? std::min(seen + more, kRunRounds) : 0);
    }
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
    : team(team),
      ranks(std::move(all)),
      max_rows(max_rows),
      view(ranks[0]->limits),
      rounds_at_once(device::rounds_at_once(team.group())) {
    const Limits& l = ranks[0]->limits;
    const size_t table = size_t(l.streams) * draft_depth(model()) * l.tree_width;
    table_token.resize(table);
    table_logprob.resize(table);
    node_token.resize(size_t(l.streams) * l.tree_width + 1);
    node_parent.resize(size_t(l.streams) * l.tree_width + 1);
    tree_in.resize(l.streams);
    tree_out.resize(l.streams);
    round_in.resize(RoundIn::words(l.streams));
    page_table.resize(size_t(l.streams) * l.pages_sequence);
    nodes.resize(l.streams);
    for (auto* v : {&from_row, &to_row}) v->reserve(l.rows + 1);
    sampling.reserve(l.streams);
    choice.resize(l.rows);
    hash.resize(l.rows);
    logprob.resize(l.rows);
}

void prefill_chunk(Stage& g, std::span<const PromptPart> parts) {
    g.team.next_step();
    prompt_view(g, parts, false);
    g.last_ended_ns = 0;
    g.team.run(KD_STAGE_PREFILL, [&](int i) {
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

void decode_rounds(Stage& g, std::span<Sequence* const> batch, int rounds, const std::atomic<bool>& wanted,
                   const AfterRound& after) {
    g.team.next_step();
    const Limits& l = g.ranks[0]->limits;
    StepCounts counts;
    const uint64_t began = now_us();
    int drafting = 0, widest = 0;
    bool through = true;
    for (const Sequence* q : batch) {
        through = through && q->planting.builder->builder().on_device();
        if (!drafts(g, *q)) continue;
        drafting++;
        widest = std::max(widest, q->planting.builder->builder().width(q->planting.budget));
    }
    // Of trees built here the least likely nodes are cut when there are too many rows; trees built there grow less.
    const int cap = through ? budget_cap(batch, g.max_rows) : KD_MAX_NODES;
    Room room{recorded_streams(l, int(batch.size())), 0, 0};
    room.width = std::min({widest, cap, g.model().shape.vocab, l.tree_width});
    rounds = through ? std::min(rounds, g.rounds_at_once) : 1;
    tell(g, batch, cap);
    counts.draft_calls = drafting > 0;
    uint64_t planted = began;
    if (through) {
        const bool trees = drafting > 0 && room.width > 0;
        int rows = int(batch.size());
        for (const Sequence* q : batch) rows += drafts(g, *q) ? std::min(q->planting.budget, cap) : 0;
        room.rows = recorded_rows(l, rows);
        if (!trees && g.model().draft.layers) {
            project_taps(g, batch, room);
            rounds = std::min(rounds, rounds_to_overflow(batch));
        }
        begin_run(g, rounds);
        run_through(g, batch, trees, room, rounds > 1);
    } else {
        project_taps(g, batch, room);
        if (drafting) draft(g, drafting, room);
        const uint64_t drafted = now_us();
        room.rows = recorded_rows(l, plant(g, batch, room.width, counts));
        room.width = 0;
        planted = now_us();
        counts.draft_us = drafted - began;
        counts.build_us = planted - drafted;
        begin_run(g, 1);
        verify(g, batch, room);
    }
    follow(g, batch, rounds > 1, wanted, counts, planted, after);
}

void score_chunk(Stage& g, const PromptPart& part, float* out) {
    g.team.next_step();
    prompt_view(g, {&part, 1}, true);
    const int vocab = g.model().shape.vocab;
    g.team.run(KD_STAGE_SCORE, [&](int i) {
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
    g.team.next_step();
    g.from_row.clear();
    g.to_row.clear();
    for (int i = 0; i < n; i++) {
        g.from_row.push_back(from * KD_PAGE_TOKENS + i);
        g.to_row.push_back(to * KD_PAGE_TOKENS + i);
    }
    g.team.run(KD_STAGE_COPY, [&](int i) {
        Rank& r = *g.ranks[i];
        device::upload(r.from_row, g.from_row.data(), g.from_row.size());
        device::upload(r.to_row, g.to_row.data(), g.to_row.size());
        for (auto* pools : {&r.kv, &r.draft_k, &r.draft_v})
            for (Rows pool : *pools) ops::copy_rows(pool, r.to_row, pool, r.from_row, n, pool.stride);
    });
}

}  // namespace kd
