// Rotation of pairs of elements.
#pragma once

#include "raw.h"

namespace kd::cuda {

struct RopePtr {
    const float *cos, *sin;
    int pairs;
    // Cosine and sine of the angle of pair i at a position.
    __device__ float2 angle(int position, int i) const {
        const size_t at = static_cast<size_t>(position) * static_cast<size_t>(pairs) + static_cast<size_t>(i);
        return {cos[at], sin[at]};
    }
    // The pair (a, b) turned by it.
    __device__ static float2 turn(float a, float b, float2 angle) {
        return {a * angle.x - b * angle.y, b * angle.x + a * angle.y};
    }
    __device__ float2 turn(float a, float b, int position, int i) const { return turn(a, b, angle(position, i)); }
};
inline RopePtr raw(const Rope& rope) { return {raw(rope.cos), raw(rope.sin), rope.pairs}; }

}  // namespace kd::cuda
