// Rotation of pairs of elements.
#pragma once

#include "raw.h"

namespace kd::cuda {

struct RopePtr {
    const float *cos, *sin;
    int pairs;
    // The pair (a, b) turned by the angle of pair i at a position.
    __device__ float2 turn(float a, float b, int position, int i) const {
        const size_t at = static_cast<size_t>(position) * static_cast<size_t>(pairs) + static_cast<size_t>(i);
        const float c = cos[at], s = sin[at];
        return {a * c - b * s, b * c + a * s};
    }
};
inline RopePtr raw(const Rope& rope) { return {raw(rope.cos), raw(rope.sin), rope.pairs}; }

}  // namespace kd::cuda
