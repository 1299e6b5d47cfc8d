// The pages: the model as a list of operations. Each is called by every rank of the group for the same step.
#pragma once

#include "rank.h"

namespace kd {

// The target: rows of `v` through every layer. Appends their KV rows, keeps their taps (act.taps) and writes the logits of
// v.out_row (act.logits [n_out][vocab_rank]). (forward.cpp)
void forward(Rank& r, const View& v);

// The drafter's context: taps of v.n_rows tokens -> K/V at v.slot, v.position. (drafter.cpp)
void draft_context(Rank& r, Rows taps, const View& v);

// One draft for every stream of `v`: block rows [anchor, MASK ...] at v.position. Writes the `width` best tokens of each
// row in v.out_row with their log-probabilities: draft_token, draft_logprob [n_out][width]. (drafter.cpp)
void draft_block(Rank& r, const View& v, int width);

}  // namespace kd
