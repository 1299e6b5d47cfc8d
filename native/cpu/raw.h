// From device addresses to pointers. Only files of native/cpu include this.
#pragma once

#include "types.h"

namespace kd {

struct DevAccess {
    template <class T>
    static T* get(Dev<T> p) {
        return p.p_;
    }
};

template <class T>
inline T* raw(Dev<T> p) {
    return DevAccess::get(p);
}

// Act is float on the CPU. Row 0, at the view's offset; row r is `stride` floats further each.
inline float* raw(Rows rows) { return static_cast<float*>(rows.p) + rows.offset; }
inline float* raw(Rows rows, int r) { return raw(rows) + static_cast<size_t>(r) * static_cast<size_t>(rows.stride); }

}  // namespace kd
