// How moe() wants an expert's 4-bit matrices: the words and scales of the checkpoint's packing (types.h, W4) in another
// order, in the same memory. pack_experts makes it, tests/ref/moe.py specifies it.
//
// Strips. A matrix [n][k] is cut into strips of 32 rows, and a strip into bricks of 32 columns, so that any multiples
// of 32 will do and nothing is padded. Strip i of `down` is its rows 32 i .. 32 i + 31. A strip of `gate_up` [2 *
// inter][k] is four times eight rows: gate rows 16 i .. 16 i + 7, up rows 16 i .. 16 i + 7, gate rows 16 i + 8 .., up
// rows 16 i + 8 .., so that the thread that has an element of gate h has the same one of up h.
//
// Words. Of an expert, q is [n / 32 strips][k / 32 bricks][32 lanes][4 words]. A brick is two tiles of 16 rows, a tile
// the A operand of two mma.m16n8k16. Lane 4 g + t (g 0 .. 7, t 0 .. 3) has what it needs for them: word 2 * tile + step
// is a[0..3] of one product, nibble i of it the low half and nibble i + 4 the high half of a[i] (mma.h). Which of the
// brick's columns a product calls its k-th is free as long as both operands agree: here lane t has columns 8 t .. 8 t +
// 7, which are 16 bytes of an activation row. So nibble v of word 2 * tile + step is the element at
//     row    16 * tile + g + 8 * (v % 2)      of the strip
//     column 8 t + 4 * step + 2 * (v / 2 % 2) + v / 4      of the brick
// and its value is nibble - 8, as in the checkpoint.
//
// Scales. Of an expert, s is [n / 32 strips][k / 32 bricks][8 g][4]: those of strip rows g, g + 8, g + 16, g + 24.
#pragma once

#include <cstdint>

namespace kd::cuda::w4 {

constexpr int kStrip = 32;  // rows
constexpr int kBrick = 32;  // columns: a group, one scale a row
constexpr int kTile = 16;   // rows of a product
constexpr int kLanes = 32;
constexpr int kWordsLane = 4;
constexpr int kWords = kLanes * kWordsLane;  // of a brick
constexpr int kScales = kStrip;              // of a brick

// Row of the matrix that is row `row` of a strip. inter: rows of gate, then as many of up; 0: no such pair.
__host__ __device__ constexpr int matrix_row(int strip, int row, int inter) {
    if (inter == 0) return kStrip * strip + row;
    return (row % kTile < 8 ? 0 : inter) + kTile * strip + row / kTile * 8 + row % 8;
}

// Nibble v of a lane's word.
struct Place {
    int row, column;  // of the strip, of the brick
};
__host__ __device__ constexpr Place place(int lane, int word, int v) {
    const int g = lane / 4, t = lane % 4, tile = word / 2, step = word % 2;
    return {kTile * tile + g + 8 * (v % 2), 8 * t + 4 * step + 2 * (v / 2 % 2) + v / 4};
}

// The strip's row whose scale is number `i` of a brick.
__host__ __device__ constexpr int scale_row(int i) { return i / 4 + 8 * (i % 4); }

}  // namespace kd::cuda::w4
