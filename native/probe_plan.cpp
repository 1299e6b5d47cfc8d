// The probes of a round's rows (ops.h, plan.cpp).
#include <algorithm>

#include "ops.h"
#include "probe_rig.h"
#include "self_check.h"

using namespace kd;
using probe::Rig;
using probe::run;

namespace {

Streams streams(Rig& rig, const kd_probe_streams* p, int round = 0) {
    const size_t n = static_cast<size_t>(p->n);
    Streams s;
    s.n = rig.count(p->n);
    s.max_pages = p->max_pages;
    s.slot = rig.in(p->slot, n);
    s.start = rig.in(p->start, n);
    s.draft_start = rig.in(p->draft_start, n);
    s.root = rig.in(p->root, n);
    s.left = rig.in(p->left, n);
    s.budget = rig.in(p->budget, n);
    s.stops = rig.in(p->stops, n * kStops);
    thread_local uint64_t marks[3];  // times: nobody compares them
    marks[0] = marks[1] = 0;
    marks[2] = static_cast<uint64_t>(round);
    s.run.marks = rig.inout(marks, 3);
    s.page_table = rig.in(p->page_table, n * static_cast<size_t>(p->max_pages));
    return s;
}

// An array that starts as the probe's caller filled it and is brought back.
Dev<int32_t> moved(Rig& rig, int32_t* to, const int32_t* from, size_t n) {
    std::copy(from, from + n, to);
    return rig.inout(to, n);
}

View written(Rig& rig, const kd_probe_rows* p) {
    const size_t n = static_cast<size_t>(p->most);
    View v;
    v.n_rows = p->most;
    v.n_out = p->most_out;
    v.token = rig.out(p->token, n);
    v.position = rig.out(p->position, n);
    v.stream = rig.out(p->stream, n);
    v.slot = rig.out(p->slot, n);
    v.prefix = rig.out(p->prefix, n);
    v.out_row = rig.out(p->out_row, static_cast<size_t>(p->most_out));
    v.mask = rig.out(p->mask, n * kMaskWords);
    return v;
}

}  // namespace

extern "C" {

int32_t kd_probe_self_check(const kd_probe_device* d, const char* spoil) {
    return run("self_check", d, [&](Rig&) { self_check("this device", spoil); });
}

int32_t kd_probe_plan_context(const kd_probe_device* d, const kd_probe_rows* rows, int32_t* draft_start,
                              int32_t* ring_row, const kd_probe_streams* p, int32_t ring_rows) {
    return run("plan_context", d, [&](Rig& rig) {
        Streams s = streams(rig, p);
        s.draft_start = moved(rig, draft_start, p->draft_start, static_cast<size_t>(p->n));
        ops::plan_context(written(rig, rows), rig.out(rows->counts, 2),
                          rig.out(ring_row, static_cast<size_t>(rows->most)), s, ring_rows);
    });
}

int32_t kd_probe_plan_draft(const kd_probe_device* d, const kd_probe_rows* rows, int32_t* row, int32_t* depths,
                            const kd_probe_streams* p, int32_t block, int32_t mask_token, int32_t max_positions) {
    return run("plan_draft", d, [&](Rig& rig) {
        DraftShape shape;
        shape.block = block;
        shape.mask_token = mask_token;
        Shape s;
        s.max_positions = max_positions;
        const size_t n = static_cast<size_t>(p->n);
        ops::plan_draft(written(rig, rows), rig.out(rows->counts, 2), {rig.out(row, n), rig.out(depths, n), {}},
                        streams(rig, p), shape, s);
    });
}

int32_t kd_probe_plan_verify(const kd_probe_device* d, const kd_probe_rows* rows, int32_t* first_row, int32_t* parent,
                             const kd_probe_streams* p, const int32_t* nodes, const int32_t* token,
                             const int32_t* node_parent, int32_t stride) {
    return run("plan_verify", d, [&](Rig& rig) {
        const size_t n = static_cast<size_t>(p->n), all = n * static_cast<size_t>(stride);
        ops::plan_verify(written(rig, rows), rig.out(rows->counts, 2),
                         {rig.out(first_row, n + 1), rig.out(parent, static_cast<size_t>(rows->most))},
                         {rig.in(nodes, n), rig.in(token, all), rig.in(node_parent, all), stride}, streams(rig, p));
    });
}

int32_t kd_probe_end_round(const kd_probe_device* d, int32_t* n, int32_t* nodes, int32_t* token, uint64_t* hash,
                           float* logprob, int32_t* draft_start, int32_t* ended, int32_t* start, int32_t* root,
                           int32_t* left, int32_t round, const kd_probe_streams* p, const kd_probe_trees* t,
                           const kd_probe_kept* k, const int32_t* choice_token, const uint64_t* choice_hash,
                           const float* choice_logprob, int32_t n_rows) {
    return run("end_round", d, [&](Rig& rig) {
        const size_t count = static_cast<size_t>(p->n), path = count * (KD_MAX_DEPTH + 1);
        const size_t rows = static_cast<size_t>(n_rows), rounds = static_cast<size_t>(round) + 1;
        Streams s = streams(rig, p, round);
        s.start = moved(rig, start, p->start, count);
        s.root = moved(rig, root, p->root, count);
        s.left = moved(rig, left, p->left, count);
        const int32_t allowed = kRunRounds;
        s.run.ended = rig.out(ended, 1);
        s.run.allowed = rig.in(&allowed, 1);
        thread_local uint64_t times[2 * kRunRounds];
        const Emitted out{p->n,
                          rig.inout(n, rounds * count),
                          rig.inout(token, rounds * path),
                          rig.inout(hash, rounds * path),
                          rig.inout(logprob, rounds * path),
                          rig.inout(nodes, rounds * count),
                          rig.inout(draft_start, rounds * count),
                          rig.inout(times, 2 * rounds)};
        const Choice choice{rig.in(choice_token, rows), rig.in(choice_hash, rows), rig.in(choice_logprob, rows)};
        ops::end_round(out, s, {rig.in(t->first_row, count + 1), rig.in(t->parent, rows)},
                       {rig.in(k->n, count), rig.in(k->node, path)}, choice);
    });
}

}  // extern "C"
