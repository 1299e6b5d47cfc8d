// Rotation of pairs of elements, the same for every instruction set.
#pragma once

#include "raw.h"

namespace kd::cpu {

// to[2 i], to[2 i + 1] = the pair of `from` rotated by the angles of `position`.
inline void rotate_interleaved(float* to, const float* from, const Rope& rope, int position) {
    const float* cos = raw(rope.cos) + static_cast<size_t>(position) * static_cast<size_t>(rope.pairs);
    const float* sin = raw(rope.sin) + static_cast<size_t>(position) * static_cast<size_t>(rope.pairs);
    for (int i = 0; i < rope.pairs; i++) {
        const float a = from[2 * i], b = from[2 * i + 1];
        to[2 * i] = a * cos[i] - b * sin[i];
        to[2 * i + 1] = b * cos[i] + a * sin[i];
    }
}

// x[i], x[i + pairs] rotated in place.
inline void rotate_halves(float* x, const Rope& rope, int position) {
    const float* cos = raw(rope.cos) + static_cast<size_t>(position) * static_cast<size_t>(rope.pairs);
    const float* sin = raw(rope.sin) + static_cast<size_t>(position) * static_cast<size_t>(rope.pairs);
    for (int i = 0; i < rope.pairs; i++) {
        const float a = x[i], b = x[i + rope.pairs];
        x[i] = a * cos[i] - b * sin[i];
        x[i + rope.pairs] = b * cos[i] + a * sin[i];
    }
}

}  // namespace kd::cpu
