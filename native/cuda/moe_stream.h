// The routed experts in one launch (moe_stream.cu), for the shapes it is made for.
#pragma once

#include "raw.h"

namespace kd::cuda {

namespace moe_stream {

// The order of sums in those shapes, whoever adds: of a strip of gate and up, chain c of 16 has bricks 32 j + 2 c and the next,
// j = 0, 1, .., added in this order. Chains are added in fours, from 0: (0 + 1) + (2 + 3), then (4 + 5) + (6 + 7), and so on. A strip
// of down is one chain.
constexpr int kChains = 16, kChainRun = 2, kLapBricks = kChains * kChainRun;
constexpr int kDownBricks = 8;

}  // namespace moe_stream

// Whether stream_experts() can: decided by shape, alignment and GPU alone, as these shapes have an order of sums of their own, which
// ops::moe() keeps for all numbers of rows.
bool can_stream_experts(Rows h, const Experts& w);

// As ops::moe(). Made for rows of which few share an expert.
void stream_experts(Rows y, Rows h, const int32_t* expert, const float* weight, const Experts& w, Count n_rows,
                    int slots);

}  // namespace kd::cuda
