// What a kernel gets of the plain structs: pointers, and counts that may be data. Only files of native/cuda include this.
#pragma once

#include <cuda_bf16.h>

#include "mma.h"
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

namespace cuda {

using bf16 = __nv_bfloat16;  // Act

// The number of rows of a call: `most`, or what an earlier kernel of the captured round has written.
struct Number {
    const int32_t* n;
    int most;
    __device__ int operator()() const { return n ? *n : most; }
    // Whether row r is most likely there, for who may not know yet (wait_for_kernel_before): enough to ask for it.
    __device__ bool likely(int r) const { return r == 0 || r < (n ? static_cast<int>(ask4(n)) : most); }
};
inline Number number(Count c) { return {raw(c.n), c.most}; }

// Rows at their offset: row r starts at p + r * stride.
struct RowsPtr {
    bf16* p;
    int stride;
    __device__ bf16* operator[](int r) const { return p + static_cast<size_t>(r) * static_cast<size_t>(stride); }
};
inline RowsPtr raw(Rows rows) { return {static_cast<bf16*>(rows.p) + rows.offset, rows.stride}; }

// Whether every row starts at a multiple of 16 bytes, so that eight elements can be moved at once. A model's rows are always
// the same in this, so a choice made by it is a choice by shape.
inline bool aligned16(Rows rows) { return reinterpret_cast<uintptr_t>(raw(rows).p) % 16 == 0 && rows.stride % 8 == 0; }
template <class T>
inline bool aligned16(Dev<T> p) {
    return reinterpret_cast<uintptr_t>(raw(p)) % 16 == 0;
}

struct ViewPtr {
    Number n_rows, n_streams, n_out;
    int max_pages;
    const int32_t *token, *position, *stream, *slot, *prefix, *page_table, *out_row;
    const uint64_t* mask;
    // The pool row of a slot of a row's stream.
    __device__ int pool_row(int stream, int slot) const {
        return page_table[stream * max_pages + slot / KD_PAGE_TOKENS] * KD_PAGE_TOKENS + slot % KD_PAGE_TOKENS;
    }
};
inline ViewPtr raw(const View& v) {
    return {number(v.n_rows), number(v.n_streams), number(v.n_out), v.max_pages,       raw(v.token),   raw(v.position),
            raw(v.stream),    raw(v.slot),         raw(v.prefix),   raw(v.page_table), raw(v.out_row), raw(v.mask)};
}

}  // namespace cuda
}  // namespace kd
