// What the members of moe_stream.cu do of down: products, and the sums over slots.
#pragma once

#include "moe_stream_room.h"
#include "w4_math.h"

namespace kd::cuda::moe_stream {

// Results that are added in the same launch are where the lane that has them can write four at once, and who adds reads four:
// [pair][strip][8 g][4], number i of g being row 8 i + g of the strip. They are inverted, so that none is 0, which says that there is
// none yet: a product's NaN is 0x7fffffff.
constexpr int kQuads = w4::kStrip / 4;

// One strip of down a member.
template <bool kTold>
__device__ __forceinline__ void down(const Work& p, Room& room, int slot, Place<kStages>& at) {
    const int thread = this_thread(), warp = thread / kWarp, lane = thread % kWarp, g = lane / 4, t = lane % 4;
    // A member sees one stage of a unit's and leaves it for the members that have nothing in it. Its stages of all units are in the same
    // places of the ring, so it sees these every time round, and has seen the last time when it waits for the next.
    Place<kStages> own = at;
    own.advance(warp / kStageStrips);
    wait(room.full + own.slot(), own.parity());
    const char* const q = room.stage[own.slot()] + warp % kStageStrips * kDownBricks * kBrickQ + lane * 16;
    const char* const s = room.stage[own.slot()] + kStageQ + warp % kStageStrips * kDownBricks * kBrickS + g * 8;
    const char* const v = room.acts[slot][g] + t * 16;
    float d[2][4] = {};
    constexpr int kAtOnce = 4;
#pragma unroll 1
    for (int first = 0; first < kDownBricks; first += kAtOnce) {
        uint4 words[kAtOnce];
        uint2 scales[kAtOnce];
#pragma unroll
        for (int b = 0; b < kAtOnce; b++) {
            words[b] = load16(q + (first + b) * kBrickQ);
            scales[b] = *reinterpret_cast<const uint2*>(s + (first + b) * kBrickS);
        }
#pragma unroll
        for (int b = 0; b < kAtOnce; b++)
            w4::multiply_brick(d, words[b], scales[b], load16(v + (first + b) * w4::kBrick * 2));
    }
    leave_stage(room, own.slot(), kMembers / kStageStrips);
    at.advance(kDownStages);
    const size_t hidden = static_cast<size_t>(p.down_strips) * w4::kStrip;
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const int pair = room.unit_pair[slot][2 * t + j];
        if (pair < 0) continue;
        const int strip = room.unit[slot].strip + warp;
        float value[4];
#pragma unroll
        for (int i = 0; i < 4; i++) value[i] = d[i / 2][j + i % 2 * 2] * w4::lowered(i % 2 * 2);
        if constexpr (kTold) {
            tell(static_cast<uint4*>(p.outs) + static_cast<size_t>(pair) * (hidden / 4) + strip * kQuads + g,
                 {~__float_as_uint(value[0]), ~__float_as_uint(value[1]), ~__float_as_uint(value[2]),
                  ~__float_as_uint(value[3])});
        } else {
            float* const to = static_cast<float*>(p.outs) + static_cast<size_t>(pair) * hidden + strip * w4::kStrip + g;
#pragma unroll
            for (int i = 0; i < 4; i++) to[i * 8] = value[i];
        }
    }
}

// y[r] += sum over slots of weight * outs, four rows of one strip a member: eight lanes a row, four columns a lane. Leaves zeros.
__device__ __forceinline__ void add_slots(const Work& p, Room& room, int slot_of_unit) {
    constexpr int kAtOnce = 8;
    const int thread = this_thread(), warp = thread / kWarp, lane = thread % kWarp, g = lane % kQuads;
    const int strip = room.unit[slot_of_unit].strip + warp;
    const int r = room.unit[slot_of_unit].chunk * kSumRows + lane / kQuads;
    if (r >= p.n_rows()) return;
    const size_t stride = static_cast<size_t>(p.down_strips) * kQuads;
    bf16* const y = p.y[r] + strip * w4::kStrip + g;
    float old[4], sum[4] = {};
#pragma unroll
    for (int j = 0; j < 4; j++) old[j] = __bfloat162float(y[j * 8]);
#pragma unroll 1
    for (int slot = 0; slot < p.slots; slot += kAtOnce) {
        const int pair = r * p.slots + slot;
        const uint4* const from =
            static_cast<const uint4*>(p.outs) + static_cast<size_t>(pair) * stride + strip * kQuads + g;
        uint4 v[kAtOnce] = {};  // as in take_rows()
        float weight[kAtOnce] = {};
        unsigned known = 0;
#pragma unroll
        for (int i = 0; i < kAtOnce; i++) {
            if (slot + i >= p.slots || room.chunk_of[pair + i] < 0) continue;
            known |= 1u << i;
            weight[i] = p.weight[pair + i];
        }
        for (unsigned missing = known; missing;) {
#pragma unroll
            for (int i = 0; i < kAtOnce; i++)
                if (missing >> i & 1) look(v[i], from + i * stride);
#pragma unroll
            for (int i = 0; i < kAtOnce; i++)
                if (v[i].x && v[i].y && v[i].z && v[i].w) missing &= ~(1u << i);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; i++) {
            if (!(known >> i & 1)) continue;
            sum[0] = __fmaf_rn(weight[i], __uint_as_float(~v[i].x), sum[0]);
            sum[1] = __fmaf_rn(weight[i], __uint_as_float(~v[i].y), sum[1]);
            sum[2] = __fmaf_rn(weight[i], __uint_as_float(~v[i].z), sum[2]);
            sum[3] = __fmaf_rn(weight[i], __uint_as_float(~v[i].w), sum[3]);
        }
    }
#pragma unroll
    for (int j = 0; j < 4; j++) y[j * 8] = __float2bfloat16_rn(old[j] + sum[j]);
#pragma unroll 1
    for (int slot = 0; slot < p.slots; slot++) {
        const int pair = r * p.slots + slot;
        if (room.chunk_of[pair] >= 0)
            tell(static_cast<uint4*>(p.outs) + static_cast<size_t>(pair) * stride + strip * kQuads + g, {});
    }
}

}  // namespace kd::cuda::moe_stream
