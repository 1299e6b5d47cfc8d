#include "rank.h"

#include <algorithm>
#include <bit>

namespace kd {

Rows Rank::rows(size_t n, int width) {
    Rows r = device::alloc_rows(n, width);
    owned_.push_back(r.p);
    bytes_ += n * size_t(r.stride) * device::act_bytes();
    return r;
}

template <class T>
Dev<T> Rank::array(size_t n) {
    void* p = device::alloc(n * sizeof(T));
    owned_.push_back(p);
    bytes_ += n * sizeof(T);
    return Dev<T>(static_cast<T*>(p));
}

uint64_t Rank::kv_bytes_token(const Model& m) {
    const DraftShape& d = m.draft;
    const uint64_t elements =
        uint64_t(m.shape.layers) * m.shape.kv_row() + uint64_t(d.layers) * 2 * d.kv_heads_rank * d.head_dim;
    return elements * device::act_bytes();
}

Rank::Rank(const Model& m, int index, const Limits& l) : model(&m), index(index), limits(l) {
    const Shape& s = m.shape;
    const DraftShape& d = m.draft;
    const int n_taps = int(d.taps.size());
    device::forget();
    const size_t n = l.rows;
    try {
        const int inter = std::max({s.inter_rank, s.shared_inter_rank, d.inter_rank, 1});
        act.x = array<float>(n * s.hidden);
        act.h = rows(n, s.hidden);
        act.y = rows(n, s.hidden);
        act.qkv_a = rows(n, s.q_lora + s.kv_row());
        act.q = rows(n, s.heads_rank * (s.nope + s.rope));
        act.q_lat = rows(n, s.heads_rank * s.kv_row());
        act.o_lat = rows(n, s.heads_rank * s.kv_lora);
        act.o = rows(n, s.heads_rank * s.v_head);
        act.gate_up = rows(n, 2 * inter);
        act.act = rows(n, inter);
        act.expert = array<int32_t>(n * s.experts_per_token);
        act.weight = array<float>(n * s.experts_per_token);
        act.out = rows(n, s.hidden);
        act.logits = array<float>(n * std::max(s.vocab_rank, 1));

        const size_t slots = size_t(l.kv_pages) * KD_PAGE_TOKENS;
        for (int i = 0; i < s.layers; i++) kv.push_back(rows(slots, s.kv_row()));
        if (d.layers) {
            const int kv_width = d.kv_heads_rank * d.head_dim;
            act.taps = rows(n, n_taps * s.hidden);
            act.draft_taps = rows(n, n_taps * s.hidden);
            act.draft_qkv = rows(n, d.heads_rank * d.head_dim + 2 * kv_width);
            act.draft_o = rows(n, d.heads_rank * d.head_dim);
            for (int i = 0; i < d.layers; i++) {
                draft_k.push_back(rows(slots, kv_width));
                draft_v.push_back(rows(slots, kv_width));
            }
            tap_ring = rows(size_t(l.streams) * kTapRing, n_taps * s.hidden);
            draft_token = array<int32_t>(size_t(l.streams) * d.depth() * l.tree_width);
            draft_logprob = array<float>(size_t(l.streams) * d.depth() * l.tree_width);
        }

        for (Dev<int32_t>* p : {&view.token, &view.position, &view.stream, &view.slot, &view.prefix, &view.out_row,
                                &from_row, &to_row, &trees.parent, &choice.token})
            *p = array<int32_t>(n);
        view.mask = array<uint64_t>(n * kMaskWords);
        view.page_table = array<int32_t>(size_t(l.streams) * l.pages_sequence);
        counts = array<int32_t>(2);
        round_in = array<int32_t>(RoundIn::words(l.streams));
        round_out = static_cast<char*>(device::alloc_shared(RoundOut(l.streams).bytes));
        sampling = array<Sampling>(l.streams);
        trees.first_row = array<int32_t>(l.streams + 1);
        choice.hash = array<uint64_t>(n);
        choice.logprob = array<float>(n);
        kept.n = array<int32_t>(l.streams);
        kept.node = array<int32_t>(size_t(l.streams) * kPath);
        drafts.row = array<int32_t>(l.streams);
        drafts.depths = array<int32_t>(l.streams);
        nodes.n = array<int32_t>(l.streams);
        nodes.token = array<int32_t>(size_t(l.streams) * l.tree_width);
        nodes.parent = array<int32_t>(size_t(l.streams) * l.tree_width);
        nodes.stride = l.tree_width;
        point_into_blocks();
    } catch (...) {
        free_all();
        throw;
    }
}

void Rank::point_into_blocks() {
    const int n = limits.streams;
    const auto field = [&](RoundIn::Field f) { return round_in + RoundIn::at(f, n); };
    streams.n = {n, round_in + RoundIn::n};
    streams.run.marks = std::bit_cast<Dev<uint64_t>>(round_in);
    streams.max_pages = limits.pages_sequence;
    streams.slot = field(RoundIn::slot);
    streams.start = field(RoundIn::start);
    streams.draft_start = field(RoundIn::draft_start);
    streams.root = field(RoundIn::root);
    streams.left = field(RoundIn::left);
    streams.budget = field(RoundIn::budget);
    drafts.width = field(RoundIn::width);
    streams.stops = round_in + RoundIn::stops(n);
    streams.page_table = view.page_table;
    const RoundOut out(n);
    const auto part = [&]<class T>(Dev<T>& to, size_t at) { to = std::bit_cast<Dev<T>>(round_out + at); };
    emitted.streams = n;
    part(streams.run.ended, out.ended);
    part(streams.run.allowed, out.allowed);
    part(emitted.times, out.times);
    part(emitted.draft_start, out.draft_start);
    part(emitted.hash, out.hash);
    part(emitted.token, out.token);
    part(emitted.logprob, out.logprob);
    part(emitted.n, out.n);
    part(emitted.nodes, out.nodes);
}

View ViewArrays::view() const {
    View v;
    v.token = token;
    v.position = position;
    v.stream = stream;
    v.slot = slot;
    v.prefix = prefix;
    v.mask = mask;
    v.page_table = page_table;
    v.out_row = out_row;
    return v;
}

View Rank::planned_view(int rows, int out) const {
    View v = view.view();
    v.n_rows = {rows, counts};
    v.n_out = {out, counts + 1};
    v.n_streams = streams.n;
    v.max_pages = streams.max_pages;
    return v;
}

void Rank::free_all() {
    for (void* p : owned_) device::release(p);
    device::release_shared(round_out);
}

Rank::~Rank() { free_all(); }

}  // namespace kd
