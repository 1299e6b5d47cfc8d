// The end of a round: which rows the target itself would have walked, and moving what they left behind to the front.

#include <algorithm>

#include "ops.h"
#include "raw.h"
#include "threads.h"

namespace kd::ops {
namespace {

using namespace kd::cpu;

// Stream s of a round: its tree's rows and where its KV rows are.
struct Round {
    int first, end;  // rows; the root first
    const int32_t* pages;
    int prefix, position;  // of the root
    int stream;

    Round(const Trees& trees, const View& v, int s) : first(raw(trees.first_row)[s]), end(raw(trees.first_row)[s + 1]) {
        stream = raw(v.stream)[first];
        pages = raw(v.page_table) + static_cast<size_t>(stream) * v.max_pages;
        prefix = raw(v.prefix)[first];
        position = raw(v.position)[first];
    }

    int pool_row(int slot) const { return pages[slot / KD_PAGE_TOKENS] * KD_PAGE_TOKENS + slot % KD_PAGE_TOKENS; }
};

const int32_t* kept_nodes(const Accepted& kept, int s) {
    return raw(kept.node) + static_cast<size_t>(s) * (KD_MAX_DEPTH + 1);
}

}  // namespace

void tree_accept(const Accepted& out, const Trees& trees, const Choice& choice, const View& v) {
    for (int s = 0; s < v.n_streams; s++) {
        const int first = raw(trees.first_row)[s], n = raw(trees.first_row)[s + 1] - first;
        const int32_t* parent = raw(trees.parent) + first;
        const int32_t* token = raw(v.token) + first;
        const int32_t* chosen = raw(choice.token) + first;
        int32_t* node = raw(out.node) + static_cast<size_t>(s) * (KD_MAX_DEPTH + 1);
        std::fill(node, node + KD_MAX_DEPTH + 1, -1);
        int at = 0, kept = 0;
        if (n > 0) node[kept++] = 0;
        // Children come after their parents, so one pass finds the whole path.
        for (int i = 1; i < n && kept <= KD_MAX_DEPTH; i++) {
            if (parent[i] != at || token[i] != chosen[at]) continue;
            at = i;
            node[kept++] = i;
        }
        raw(out.n)[s] = kept;
    }
}

// A node's depth is its final offset, and its key was rotated for that depth when it was written, so moving needs no
// rotation. Kept nodes ascend and node[j] >= j, so a row is read before anything is moved over it.
void kv_commit(std::span<const Rows> kv, const Accepted& kept, const Trees& trees, const View& v, int width) {
    parallel_for(v.n_streams, 4, [&](int begin, int end) {
        for (int s = begin; s < end; s++) {
            if (raw(kept.n)[s] == 0) continue;
            const Round round(trees, v, s);
            const int32_t* node = kept_nodes(kept, s);
            for (int j = 0; j < raw(kept.n)[s]; j++) {
                if (node[j] == j) continue;
                const int from = round.pool_row(round.prefix + node[j]), to = round.pool_row(round.prefix + j);
                for (const Rows& layer : kv) std::copy(raw(layer, from), raw(layer, from) + width, raw(layer, to));
            }
        }
    });
}

void keep_taps(Rows ring, Rows taps, Dev<int32_t> ring_slot, const Accepted& kept, const Trees& trees, const View& v,
               int ring_rows, int width) {
    parallel_for(v.n_streams, 2, [&](int begin, int end) {
        for (int s = begin; s < end; s++) {
            if (raw(kept.n)[s] == 0) continue;
            const Round round(trees, v, s);
            const int32_t* node = kept_nodes(kept, s);
            for (int j = 0; j < raw(kept.n)[s]; j++) {
                const float* from = raw(taps, round.first + node[j]);
                const int row = raw(ring_slot)[round.stream] * ring_rows + (round.position + j) % ring_rows;
                std::copy(from, from + width, raw(ring, row));
            }
        }
    });
}

}  // namespace kd::ops
