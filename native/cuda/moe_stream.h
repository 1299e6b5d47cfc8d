// The routed experts in one launch (moe_stream.cu), for the shapes it is made for.
#pragma once

#include "raw.h"

namespace kd::cuda {

// Whether stream_experts() can: decided by shape, alignment and GPU alone, as its sums have an order of their own.
bool can_stream_experts(Rows h, const Experts& w);

// As ops::moe().
void stream_experts(Rows y, Rows h, const int32_t* expert, const float* weight, const Experts& w, Count n_rows,
                    int slots);

}  // namespace kd::cuda
