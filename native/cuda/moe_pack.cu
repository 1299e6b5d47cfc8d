#include <algorithm>

#include "error.h"
#include "launch.h"
#include "ops.h"
#include "raw.h"
#include "w4_layout.h"

namespace kd::ops {

namespace {

using namespace kd::cuda;

constexpr int kThreads = 256;
constexpr size_t kPackBytes =
    size_t{16} << 20;  // of the copy that experts are permuted from, unless one alone is larger

// Sizes of one kind of matrix: n rows of `words` words and `groups` scales; `inter` as in w4::matrix_row.
struct Matrix {
    int n, words, groups, inter;
};

// A thread makes one word, gathering nibbles. Read once and written once, at load: no floor to speak of.
__global__ void __launch_bounds__(kThreads) pack_words(uint32_t* to, const uint32_t* from, size_t all, Matrix m) {
    const size_t i = blockIdx.x * static_cast<size_t>(kThreads) + threadIdx.x;
    if (i >= all) return;
    const int word = static_cast<int>(i % w4::kWordsLane), lane = static_cast<int>(i / w4::kWordsLane % w4::kLanes);
    const size_t brick = i / w4::kWords;
    const int group = static_cast<int>(brick % static_cast<size_t>(m.groups));
    const size_t strips = brick / static_cast<size_t>(m.groups);
    const int strips_expert = m.n / w4::kStrip;
    const size_t expert = strips / static_cast<size_t>(strips_expert);
    const int strip = static_cast<int>(strips % static_cast<size_t>(strips_expert));
    uint32_t packed = 0;
#pragma unroll
    for (int v = 0; v < 8; v++) {
        const w4::Place at = w4::place(lane, word, v);
        const int row = w4::matrix_row(strip, at.row, m.inter), column = group * w4::kBrick + at.column;
        const size_t source =
            (expert * static_cast<size_t>(m.n) + static_cast<size_t>(row)) * static_cast<size_t>(m.words);
        packed |= (from[source + static_cast<size_t>(column / 8)] >> column % 8 * 4 & 15u) << v * 4;
    }
    to[i] = packed;
}

__global__ void __launch_bounds__(kThreads) pack_scales(uint16_t* to, const uint16_t* from, size_t all, Matrix m) {
    const size_t i = blockIdx.x * static_cast<size_t>(kThreads) + threadIdx.x;
    if (i >= all) return;
    const size_t brick = i / w4::kScales;
    const size_t group = brick % static_cast<size_t>(m.groups), strips = brick / static_cast<size_t>(m.groups);
    const size_t strips_expert = static_cast<size_t>(m.n / w4::kStrip), expert = strips / strips_expert;
    const int row = w4::matrix_row(static_cast<int>(strips % strips_expert), w4::scale_row(i % w4::kScales), m.inter);
    to[i] =
        from[(expert * static_cast<size_t>(m.n) + static_cast<size_t>(row)) * static_cast<size_t>(m.groups) + group];
}

// The same bytes in another order: some experts at a time are copied aside and put back from there.
template <auto kKernel, class T>
void pack(T* all, size_t elements, int count, const Matrix& m) {
    const size_t bytes = elements * sizeof(T);
    const int at_once =
        static_cast<int>(std::min<size_t>(std::max<size_t>(kPackBytes / bytes, 1), static_cast<size_t>(count)));
    T* const aside = scratch<T>(Use::moe_out, static_cast<size_t>(at_once) * elements);
    for (int e = 0; e < count; e += at_once) {
        const size_t n = static_cast<size_t>(std::min(at_once, count - e)) * elements;
        T* const place = all + static_cast<size_t>(e) * elements;
        check(cudaMemcpyAsync(aside, place, n * sizeof(T), cudaMemcpyDeviceToDevice, bound().stream), "pack_experts");
        launch<kKernel>(static_cast<unsigned>((n + kThreads - 1) / kThreads), kThreads, place, aside, n, m);
    }
}

void pack(const W4& w, int count, int inter) {
    KD_CHECK(w.n % w4::kStrip == 0 && w.k % w4::kBrick == 0 && inter % w4::kTile == 0);
    const Matrix m{w.n, w.k / 8, w.k / 32, inter};
    const size_t rows = static_cast<size_t>(w.n);
    // What is read by every other operation is written here, once, before any of them.
    pack<pack_words>(const_cast<uint32_t*>(raw(w.q)), rows * static_cast<size_t>(m.words), count, m);
    pack<pack_scales>(const_cast<uint16_t*>(raw(w.s)), rows * static_cast<size_t>(m.groups), count, m);
}

}  // namespace

void pack_experts(const Experts& w) {
    pack(w.gate_up, w.count, w.gate_up.n / 2);
    pack(w.down, w.count, 0);
}

}  // namespace kd::ops
