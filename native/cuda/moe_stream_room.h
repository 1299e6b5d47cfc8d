// What the kernel of moe_stream.cu works on: units, and what a block has in shared memory.
#pragma once

#include <algorithm>
#include <climits>

#include "bulk.h"
#include "launch.h"
#include "moe_lists.h"
#include "moe_stream.h"
#include "w4_layout.h"

namespace kd::cuda::moe_stream {

constexpr int kMembers = kChains;                                   // warps that multiply
constexpr int kThreads = (kMembers + 2) * kWarp;                    // one brings weights, the last activations of down
constexpr int kPairs = 8;                                           // of a chunk
constexpr int kBrickQ = w4::kWords * 4, kBrickS = w4::kScales * 2;  // bytes
constexpr int kStageBricks = kLapBricks;
constexpr int kStageQ = kStageBricks * kBrickQ, kStageBytes = kStageQ + kStageBricks * kBrickS;
constexpr int kMostSteps = 7;                          // stages of a strip of gate and up: hidden up to 7,168
constexpr int kGateBricks = kChainRun * kMostSteps;    // a member's, of a strip
constexpr int kXStep = kStageBricks * w4::kBrick * 2;  // bytes of a row of activations that meet a stage
constexpr int kInter = kDownBricks * w4::kBrick, kGateStrips = kInter / w4::kTile;
constexpr int kStageStrips = kStageBricks / kDownBricks, kDownStages = kMembers / kStageStrips;
constexpr int kActsRow = kInter * 2 + 16;  // bytes in shared memory: eight rows of a column hit all banks
constexpr int kSumRows = 4;
constexpr int kAdders = 4;  // members that add a strip: each of a tile of it, and of even or odd pairs
constexpr int kMostExperts = 512, kMostPairs = 1024;  // sorted in every block; more by a kernel before

enum Kind { kGate, kDown, kSum, kEnd };

// chunk: of n pairs; of kSum, kSumRows rows. strip: the first.
struct Unit {
    int kind, chunk, strip, strips, n;
};

// Zero at first. All blocks of a launch find the same epoch; the last to end makes it one more and the rest zero. A launch that
// does not end, as it was aborted, has ended the CUDA context and this memory with it.
struct Turn {
    uint32_t ticket, ended, epoch;
};

struct Work {
    const uint32_t *gate_q, *down_q;
    const uint16_t *gate_s, *down_s;
    RowsPtr y, x;
    const int32_t* expert;
    const float* weight;
    Number n_rows;
    int slots, experts, steps, down_strips;
    Lists lists;     // in global memory, if not made here
    uint64_t* acts;  // [pair][inter / 2] tagged, two bf16 each
    void* outs;      // [pair][hidden] fp32; if added here, as down() puts them
    Turn* turn;
};

constexpr int kStages = 8;  // of the ring
constexpr int kUnits = 4;   // told to the members ahead, at most
constexpr int kSums = 2;    // strips of gate and up that are being added
// Of a member's bricks of a strip of gate and up, the activations of so many stay in registers from strip to strip, those of the
// others in shared memory: 96 registers are all that 17 warps have.
constexpr int kHeld = 12;

// What a block has in shared memory.
struct Room {
    union {
        char stage[kStages][kStageBytes];
        SortRoom<kMembers, kMostExperts> sort;
    };
    float2 sum[kSums][kAdders][kMembers][kWarp];  // of a strip of gate and up: gate, up
    uint4 unheld[kMembers][kGateBricks - kHeld][kWarp];
    char acts[kUnits][kPairs][kActsRow];
    Chunk chunk[most_chunks(kMostPairs, kMostExperts, kPairs)];
    int32_t pair[kMostPairs];
    int16_t chunk_of[kMostPairs];
    int32_t n_chunks;
    uint32_t tag;
    // Of each member, how many units and strips of gate and up it has had: here, as registers are full of activations.
    unsigned had_units[kMembers], had_strips[kMembers];
    Unit unit[kUnits];
    int unit_pair[kUnits][kPairs];  // -1: none
    Barrier full[kStages], empty[kStages], planned[kUnits], told[kUnits], heard[kUnits], summed[kSums], added[kSums];
};
constexpr int kOwnBytes = 1024;  // what a launch takes of a block's memory, as nothing is declared statically
static_assert(sizeof(Room) + kOwnBytes <= kHopperBlockBytes);
static_assert(sizeof(SortRoom<kMembers, kMostExperts>) <= sizeof(Room::stage));
static_assert(kMostSteps * kXStep <= kStageBytes, "a row of activations is a stage");
static_assert(kStages % kDownStages == 0, "else down() could be a round of the ring behind");

// A place in a ring of kN, and the parity of its turn.
template <int kN>
struct Place {
    static_assert((kN & (kN - 1)) == 0, "n overflows");
    unsigned n = 0;
    __device__ int slot() const { return n % kN; }
    __device__ uint32_t parity() const { return n / kN % 2; }
    __device__ void advance(unsigned by) { n += by; }
};

// threadIdx.x, read anew: what follows from it is not kept in registers, of which activations need most.
__device__ __forceinline__ int this_thread() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;\n" : "=r"(thread));
    return thread;
}

// By all lanes of a warp, for it.
__device__ __forceinline__ void arrive_together(Barrier* b, int times = 1) {
    __syncwarp();
    if (arrives(this_thread())) arrive(b, times);
}

// By all lanes of a member that has read what it needs of a stage. Each has to say itself that its reads come before the next copy to
// the stage: the barrier orders them before other reads and writes only.
__device__ __forceinline__ void leave_stage(Room& room, int stage, int times = 1) {
    leave_shared_memory_to_copies();
    arrive_together(room.empty + stage, times);
}

// Which unit a number is.
struct Plan {
    // Strips of gate and up in a row share activations, so units are of so many; but where these would be few a block, the last of each
    // are single strips, so that all blocks end at about the same time.
    static constexpr int kRun = 4, kEnoughRuns = 8, kSingles = 3, kFewSums = 66;
    int n_chunks, runs, gate_units, groups, ranges, lag, all;
    int patience;  // units of down, a block's share, after which it takes no more before it has been told
    bool by_chunk;

    __device__ Plan(const Work& p, int chunks, int summed_rows) : n_chunks(chunks) {
        constexpr int chunk_runs = kGateStrips / kRun;
        const int blocks = static_cast<int>(gridDim.x);
        const int single = n_chunks * chunk_runs >= kEnoughRuns * blocks
                               ? 0
                               : min(n_chunks, (kSingles * blocks + kGateStrips - 1) / kGateStrips);
        runs = (n_chunks - single) * chunk_runs;
        gate_units = runs + single * kGateStrips;
        groups = (summed_rows + kSumRows - 1) / kSumRows;
        ranges = p.down_strips / kMembers;
        // Sums that are few come last. Then down goes chunk by chunk, and those whose gate and up came last come last.
        by_chunk = groups * ranges <= kFewSums;
        // Else a sum comes four units a block after what it needs, or at the end.
        lag = by_chunk ? ranges : min(ranges, (4 * blocks + n_chunks - 1) / max(n_chunks, 1));
        patience = (n_chunks * ranges + blocks - 1) / blocks;
        if (patience > kUnits) patience = INT_MAX;
        all = gate_units + (n_chunks + groups) * ranges;
    }
    __device__ Unit operator()(int i) const {
        if (i >= all) return {kEnd, 0, 0, 0, 0};
        if (i < gate_units) {
            const bool run = i < runs;
            const int strip = run ? i * kRun : i + runs * (kRun - 1);
            return {kGate, strip / kGateStrips, strip % kGateStrips, run ? kRun : 1, 0};
        }
        i -= gate_units;
        if (i < lag * n_chunks) {
            const int chunk = by_chunk ? i / ranges : i % n_chunks, range = by_chunk ? i % ranges : i / n_chunks;
            return {kDown, chunk, range * kMembers, kMembers, 0};
        }
        i -= lag * n_chunks;
        const int both = n_chunks + groups;
        if (i >= (ranges - lag) * both) {
            i -= (ranges - lag) * both;
            return {kSum, i % groups, (ranges - lag + i / groups) * kMembers, kMembers, 0};
        }
        const int range = i / both, c = i % both;
        if (c < n_chunks) return {kDown, c, (lag + range) * kMembers, kMembers, 0};
        return {kSum, c - n_chunks, range * kMembers, kMembers, 0};
    }
};

}  // namespace kd::cuda::moe_stream
