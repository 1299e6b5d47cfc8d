// The rows of a round, made from the state of its streams, and the state moved on at its end. A few hundred integers: one thread.

#include <algorithm>
#include <chrono>

#include "comm.h"
#include "device_context.h"
#include "error.h"
#include "ops.h"
#include "raw.h"

namespace kd::ops {

using cpu::bound;

namespace {

constexpr int kPath = KD_MAX_DEPTH + 1;  // rows a round can keep of one stream

uint64_t now_ns() {
    return static_cast<uint64_t>(std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count());
}

// When the run and this round began, if this is the first operation of them.
void mark(const Streams& streams) {
    uint64_t* marks = raw(streams.run.marks);
    const uint64_t now = now_ns();
    if (marks[0] == 0) marks[0] = now;
    if (marks[1] == 0) marks[1] = now;
}

bool drafts(const Streams& streams, int s) { return raw(streams.budget)[s] > 0 && raw(streams.left)[s] > 1; }

// Rows put into a view one after another.
class Writer {
  public:
    explicit Writer(const View& v) : v_(v) {}

    int rows() const { return n_; }
    int outs() const { return n_out_; }
    bool full() const { return n_ >= v_.n_rows.most; }

    int add(int stream, int position, int slot, int prefix) {
        KD_CHECK(!full());
        raw(v_.stream)[n_] = stream;
        raw(v_.position)[n_] = position;
        raw(v_.slot)[n_] = slot;
        raw(v_.prefix)[n_] = prefix;
        return n_++;
    }
    void token(int row, int token) const { raw(v_.token)[row] = token; }
    void want(int row) { raw(v_.out_row)[n_out_++] = row; }
    void count(Dev<int32_t> counts) const {
        raw(counts)[0] = n_;
        raw(counts)[1] = n_out_;
    }

  private:
    const View& v_;
    int n_ = 0, n_out_ = 0;
};

}  // namespace

void plan_context(const View& v, Dev<int32_t> counts, Dev<int32_t> ring_row, const Streams& streams, int ring_rows) {
    mark(streams);
    Writer rows(v);
    for (int s = 0; s < streams.n && !rows.full(); s++) {
        int32_t& waits = raw(streams.draft_start)[s];
        const int start = raw(streams.start)[s];
        if (raw(streams.left)[s] == 0) continue;
        if (!drafts(streams, s) && start - waits <= ring_rows - kPath) continue;
        for (; waits < start && !rows.full(); waits++) {
            const int row = rows.add(s, waits, waits, waits);
            raw(ring_row)[row] = raw(streams.slot)[s] * ring_rows + waits % ring_rows;
        }
    }
    rows.count(counts);
}

void plan_draft(const View& v, Dev<int32_t> counts, const Drafts& drafted, const Streams& streams, const DraftShape& d,
                const Shape& shape) {
    mark(streams);
    Writer rows(v);
    const int depth = std::min(d.depth(), int{KD_MAX_DEPTH});
    for (int s = 0; s < streams.n; s++) {
        const int start = raw(streams.start)[s];
        const bool ready = drafts(streams, s) && raw(streams.draft_start)[s] == start;
        raw(drafted.row)[s] = rows.outs();
        raw(drafted.depths)[s] = ready ? std::min(depth, raw(streams.left)[s] - 1) : 0;
        for (int j = 0; ready && j < d.block; j++) {
            const int position = std::min(start + j, shape.max_positions - 1);
            const int row = rows.add(s, position, position, start);
            rows.token(row, j == 0 ? raw(streams.root)[s] : d.mask_token);
            if (j >= 1 && j <= depth) rows.want(row);
        }
    }
    rows.count(counts);
}

void plan_verify(const View& v, Dev<int32_t> counts, const Trees& trees, const Nodes& nodes, const Streams& streams) {
    mark(streams);
    Writer rows(v);
    for (int s = 0; s < streams.n; s++) {
        const int first = rows.rows(), start = raw(streams.start)[s];
        raw(trees.first_row)[s] = first;
        if (raw(streams.left)[s] == 0) continue;
        const size_t at = static_cast<size_t>(s) * static_cast<size_t>(nodes.stride);
        for (int i = 0; i <= raw(nodes.n)[s]; i++) {
            const int up = i ? raw(nodes.parent)[at + static_cast<size_t>(i) - 1] : -1;
            const int position = i ? raw(v.position)[first + up] + 1 : start;
            const int row = rows.add(s, position, start + i, start);
            rows.token(row, i ? raw(nodes.token)[at + static_cast<size_t>(i) - 1] : raw(streams.root)[s]);
            rows.want(row);
            raw(trees.parent)[row] = up;
            uint64_t* mask = raw(v.mask) + static_cast<size_t>(row) * kMaskWords;
            const uint64_t* above = raw(v.mask) + static_cast<size_t>(first + up) * kMaskWords;
            for (int w = 0; w < kMaskWords; w++) mask[w] = i ? above[w] : 0;
            mask[i / 64] |= uint64_t{1} << (i % 64);
        }
    }
    raw(trees.first_row)[streams.n] = rows.rows();
    rows.count(counts);
}

namespace {

// What stream s is given of its kept rows.
int give(const Emitted& out, size_t slot, int s, const Streams& streams, int first, const Accepted& kept,
         const Choice& choice) {
    const int32_t* stops = raw(streams.stops) + s * kStops;
    const size_t path = slot * kPath;
    const int most = raw(kept.n)[s];
    int n = 0;
    bool stopped = false;
    while (n < most && !stopped) {
        const int row = first + raw(kept.node)[static_cast<size_t>(s) * kPath + static_cast<size_t>(n)];
        const size_t at = path + static_cast<size_t>(n++);
        raw(out.token)[at] = raw(choice.token)[row];
        raw(out.hash)[at] = raw(choice.hash)[row];
        raw(out.logprob)[at] = raw(choice.logprob)[row];
        stopped = std::find(stops, stops + kStops, raw(choice.token)[row]) != stops + kStops;
    }
    if (n == 0) return 0;
    raw(streams.start)[s] += n;
    raw(streams.root)[s] = raw(out.token)[path + static_cast<size_t>(n) - 1];
    raw(streams.left)[s] = stopped ? 0 : raw(streams.left)[s] - n;
    return n;
}

}  // namespace

void end_round(const Emitted& out, const Streams& streams, const Trees& trees, const Accepted& kept,
               const Choice& choice) {
    const Run& run = streams.run;
    uint64_t* marks = raw(run.marks);
    const uint64_t round = marks[2]++;
    bool more = false;
    for (int s = 0; s < streams.n; s++) {
        const size_t slot = static_cast<size_t>(round) * static_cast<size_t>(out.streams) + static_cast<size_t>(s);
        const int first = raw(trees.first_row)[s];
        raw(out.n)[slot] = give(out, slot, s, streams, first, kept, choice);
        raw(out.nodes)[slot] = std::max(0, raw(trees.first_row)[s + 1] - first - 1);
        raw(out.draft_start)[slot] = raw(streams.draft_start)[s];
        more = more || raw(streams.left)[s] > 0;
    }
    const uint64_t now = now_ns();
    raw(out.times)[2 * round] = marks[1];
    raw(out.times)[2 * round + 1] = now;
    marks[1] = 0;
    const int ended = static_cast<int>(round) + 1;
    bool& looping = bound().looping;
    const bool in_loop = looping;
    looping = looping && more && ended < kRunRounds && ended < *raw(run.allowed) &&
              (run.most_ns == 0 || now - marks[0] < run.most_ns);
    // `allowed` and the time may look otherwise to another rank: rank 0's view is everybody's.
    if (in_loop && cpu::tp() > 1) looping = *static_cast<const bool*>(cpu::share(&looping, sizeof looping).of_rank[0]);
    *raw(run.ended) = ended + (looping ? 0 : kRunOver);
}

}  // namespace kd::ops
