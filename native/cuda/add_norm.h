// The parts of ops::add_norm (add_norm.cu), for those who measure them.
#pragma once

#include <cstddef>

#include "peers.h"
#include "types.h"

namespace kd::cuda {

// What add_norm works on, as in ops.h.
struct AddNorm {
    Rows h;
    Dev<float> x;
    Rows y;
    Vec w;
    Count n_rows;
    int width;
    float eps;
};

// y is the sum already.
void add_norm_alone(const AddNorm& a);

// Among peers, in one shot or two; a half of their memory has at least sent_bytes(). [collective]
size_t sent_bytes(int rows, int width, int ranks, bool two_shots);
void add_norm_among(const Peers& peers, const AddNorm& a, bool two_shots);

}  // namespace kd::cuda
