// The routed experts in one launch: a block a multiprocessor, in which one warp brings weights, one what other blocks have made of
// gate and up, and sixteen multiply.
//
// Floor: the bytes of the experts that have rows (4.5 bits a weight: 3.1 MB each of a TP-8 rank of Kimi K2) at the speed of
// memory. So the warp that brings weights waits for no other block: it copies stages of 18 KB into a ring, unit of work after
// unit of work, and only waits for room. A unit is some strips of gate and up for a chunk of at most eight pairs, or sixteen strips
// of down, or the sum over slots of some rows and columns. Blocks take units by a counter: first all of gate and up, then down,
// column range by column range, each with the sums of an earlier range behind it, or chunk by chunk where there are few rows. What a
// unit needs of others comes as words through the second-level cache, and is only ever needed of units with lower numbers, which
// blocks have that run: so nothing depends on all blocks running at once. More pairs than a block can list are listed and added by
// other kernels.
//
// What orders what in a block. A stage: copies complete a phase of `full`, which every member waits for before it reads; having read,
// each lane fences its reads against copies, its warp arrives at `empty`, and who copies has waited for that. A unit: the warp that
// brings weights writes what it is and arrives at `planned`; for down the other one waits for that, writes activations and arrives
// at `told`, else the first does. Members wait for `told`, read and arrive at `heard`, as the other one does; the first waits for all
// of these before it writes the same place again. The sums of a strip: members write and arrive at `summed`; those that add wait for
// it, read and arrive at `added`, for which all wait before they write the same place again. Only stages are written by copies, so
// only they need fences. From block to block: a word and its tag are one store and one load, so nothing else is to be ordered.
//
// Results of down are words, too, but without a tag: zeros lie where none has been told, which who adds them leaves behind.
//
// Sums: the order of moe_stream.h, a member a chain. Slots are added in their order, from 0, then y.
#include "moe_stream.h"

#include <algorithm>

#include "error.h"
#include "launch.h"
#include "moe_slots.h"
#include "moe_stream_down.h"

namespace kd::cuda {

namespace {

using namespace moe_stream;

// Activations of some pairs to shared memory, each when it has been told, and zeros where there is no pair. By a warp; lane i has
// pair i.
__device__ __forceinline__ void take_acts(char (&to)[kPairs][kActsRow], const uint64_t* acts, int pair, int n,
                                          uint32_t tag) {
    constexpr int kAtOnce = 4;
    const int lane = threadIdx.x % kWarp;
    for (int first = 0; first < kPairs; first += kAtOnce) {
        uint64_t v[kAtOnce][2][2] = {};
        const auto missing = [&](int i, int half) {
            return first + i < n && (tag_of(v[i][half][0]) != tag || tag_of(v[i][half][1]) != tag);
        };
        bool again = true;
        while (again) {
            again = false;
#pragma unroll
            for (int i = 0; i < kAtOnce; i++) {
                const int from = __shfl_sync(0xffffffffu, pair, min(first + i, kPairs - 1));
#pragma unroll
                for (int half = 0; half < 2; half++)
                    if (missing(i, half))
                        look(v[i][half],
                             acts + static_cast<size_t>(from) * (kInter / 2) + half * (kInter / 4) + 2 * lane);
            }
#pragma unroll
            for (int i = 0; i < kAtOnce; i++) again = again || missing(i, 0) || missing(i, 1);
            again = __any_sync(0xffffffffu, again);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; i++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                *reinterpret_cast<uint2*>(to[first + i] + half * kInter + lane * 8) = {
                    w4::lift(static_cast<uint32_t>(v[i][half][0])), w4::lift(static_cast<uint32_t>(v[i][half][1]))};
    }
}

// The warp that brings weights. A unit of gate and up has its rows of activations first, each a stage.
__device__ __forceinline__ void bring(const Work& p, Room& room, const Lists& lists, const Plan& plan, int ticket) {
    const int lane = threadIdx.x % kWarp;
    Place<kStages> at;
    Place<kUnits> to;
    // One more stage, when there is room, of two copies at most.
    const auto stage = [&](const char* a, int a_bytes, const char* b, int b_bytes) {
        if (lane == 0) {
            Barrier* const full = room.full + at.slot();
            char* const stage = room.stage[at.slot()];
            wait(room.empty + at.slot(), at.parity() ^ 1);
            arrive_and_expect(full, a_bytes + b_bytes);
            bulk_copy(stage, a, a_bytes, full);
            if (b_bytes) bulk_copy(stage + a_bytes, b, b_bytes, full);
        }
        at.advance(1);
    };
    const auto weights = [&](const uint32_t* q, const uint16_t* s, size_t brick, int stages) {
        constexpr int kStageS = kStageBytes - kStageQ;
        const char* from_q = reinterpret_cast<const char*>(q) + brick * kBrickQ;
        const char* from_s = reinterpret_cast<const char*>(s) + brick * kBrickS;
        for (int i = 0; i < stages; i++) stage(from_q + i * kStageQ, kStageQ, from_s + i * kStageS, kStageS);
    };
    int downs = 0;
    while (true) {
        Unit unit = plan(__shfl_sync(0xffffffffu, ticket, 0));
        // A block that begins with down has found nothing else: it waits for others, and takes no more until they are through. So does
        // one that has its share of down, where that is less than it could take ahead: the rest is for those that come later.
        const bool late = unit.kind == kDown && (to.n == 0 || (++downs >= plan.patience && plan.patience > 1));
        const auto take = [&] {
            if (lane == 0) ticket = static_cast<int>(atomicAdd(&p.turn->ticket, 1u));
        };
        if (unit.kind != kEnd && !late) take();
        Chunk chunk{};
        if (unit.kind == kGate || unit.kind == kDown) chunk = lists.chunk[unit.chunk];
        const int pair = lane < chunk.n ? lists.pair[chunk.first + lane] : -1;
        unit.n = chunk.n;
        wait(room.heard + to.slot(), to.parity() ^ 1);
        if (lane < kPairs) room.unit_pair[to.slot()][lane] = pair;
        if (lane == 0) room.unit[to.slot()] = unit;
        arrive_together(room.planned + to.slot());
        if (unit.kind != kDown) arrive_together(room.told + to.slot());
        if (unit.kind == kEnd) break;
        if (unit.kind == kGate) {
            for (int i = 0; i < chunk.n; i++)
                stage(reinterpret_cast<const char*>(p.x[__shfl_sync(0xffffffffu, pair, i) / p.slots]), p.steps * kXStep,
                      nullptr, 0);
            weights(p.gate_q, p.gate_s,
                    (static_cast<size_t>(chunk.expert) * kGateStrips + unit.strip) * p.steps * kStageBricks,
                    unit.strips * p.steps);
        } else if (unit.kind == kDown) {
            weights(p.down_q, p.down_s, (static_cast<size_t>(chunk.expert) * p.down_strips + unit.strip) * kDownBricks,
                    kDownStages);
        }
        if (late) {
            wait(room.told + to.slot(), to.parity());
            take();
        }
        to.advance(1);
    }
    if (lane == 0 && count_in(&p.turn->ended) == gridDim.x - 1) {
        p.turn->ticket = 0;
        p.turn->ended = 0;
        p.turn->epoch = room.tag;
    }
}

// The warp that brings activations, for units of down, of which it tells: it waits for other blocks while weights are under way.
__device__ __forceinline__ void bring_acts(const Work& p, Room& room) {
    const int lane = threadIdx.x % kWarp;
    Place<kUnits> at;
    int kind;
    do {
        wait(room.planned + at.slot(), at.parity());
        kind = room.unit[at.slot()].kind;
        if (kind == kDown) {
            take_acts(room.acts[at.slot()], p.acts, lane < kPairs ? room.unit_pair[at.slot()][lane] : -1,
                      room.unit[at.slot()].n, room.tag);
            arrive_together(room.told + at.slot());
        }
        arrive_together(room.heard + at.slot());
        at.advance(1);
    } while (kind != kEnd);
}

// The strip that has `left` - 1 behind it in the unit. Four members add what all have left of it, others each time; nobody else waits
// for them, until the same place is wanted again.
__device__ __forceinline__ void end_strip(const Work& p, Room& room, int left, const float (&d)[2][4]) {
    const int thread = this_thread(), warp = thread / kWarp, lane = thread % kWarp;
    const unsigned had = room.had_strips[warp];
    const Place<kSums> at{had};
    auto& sum = room.sum[at.slot()];
    wait(room.added + at.slot(), at.parity() ^ 1);
#pragma unroll
    for (int i = 0; i < kAdders; i++) sum[i][warp][lane] = make_float2(d[i / 2][i % 2], d[i / 2][i % 2 + 2]);
    arrive_together(room.summed + at.slot());
    if (lane == 0) room.had_strips[warp] = had + 1;
    __syncwarp();
    if (warp / kAdders != had % (kMembers / kAdders)) return;
    wait(room.summed + at.slot(), at.parity());
    const int part = warp % kAdders, g = lane / 4, t = lane % 4;
    const float2(*of)[kWarp] = sum[part];
    float gate = 0, up = 0;
#pragma unroll 1
    for (int w = 0; w < kMembers; w += 4) {
        const float2 s0 = of[w][lane], s1 = of[w + 1][lane], s2 = of[w + 2][lane], s3 = of[w + 3][lane];
        gate += (s0.x + s1.x) + (s2.x + s3.x);
        up += (s0.y + s1.y) + (s2.y + s3.y);
    }
    gate *= w4::kLower;
    up *= w4::kLowerUpper;
    arrive_together(room.added + at.slot());
    // The lane has one column of a pair; its neighbour's is the other half of a word.
    const float own = gate / (1 + expf(-gate)) * up, other = __shfl_xor_sync(0xffffffffu, own, 4);
    const int slot = room.had_units[warp] % kUnits, strip = room.unit[slot].strip + room.unit[slot].strips - left;
    const int pair = room.unit_pair[slot][2 * t + part % 2];
    if (pair >= 0 && g % 2 == 0)
        tell(p.acts + static_cast<size_t>(pair) * (kInter / 2) + strip * (w4::kTile / 2) + part / 2 * 4 + g / 2,
             pack_bf16(own, other), room.tag);
}

// Stages of a strip of gate and up, if the compiler is to know how many.
template <int kSteps>
__device__ __forceinline__ int steps_of(const Work& p) {
    return kSteps > 0 ? kSteps : p.steps;
}

// The activations of a member's bricks of a strip, of the unit's pairs: lanes of column g have pair g's, or zeros.
template <int kSteps>
__device__ __forceinline__ void take_rows(const Work& p, Room& room, int slot, Place<kStages>& at, uint4 (&v)[kHeld]) {
    const int thread = this_thread(), warp = thread / kWarp, lane = thread % kWarp, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int j = 0; j < kHeld; j++) v[j] = {};
#pragma unroll
    for (int j = kHeld; j < kGateBricks; j++) room.unheld[warp][j - kHeld][lane] = {};
    // All rows at once: one after the other would be a wait for memory each, in which nothing is multiplied.
    const int n = room.unit[slot].n;
#pragma unroll 1
    for (int i = 0; i < n; i++) {
        Place<kStages> of = at;
        of.advance(i);
        wait(room.full + of.slot(), of.parity());
    }
    if (g < n) {
        Place<kStages> own = at;
        own.advance(g);
        const char* const from = room.stage[own.slot()] + warp * kChainRun * (w4::kBrick * 2) + t * 16;
#pragma unroll
        for (int j = 0; j < kGateBricks; j++) {
            if (j / kChainRun >= steps_of<kSteps>(p)) break;
            const uint4 acts = load16(from + j / kChainRun * kXStep + j % kChainRun * (w4::kBrick * 2));
            if (j < kHeld)
                v[j] = acts;
            else
                room.unheld[warp][j - kHeld][lane] = w4::lift(acts);
        }
    }
    leave_shared_memory_to_copies();  // as leave_stage(), of all these stages
#pragma unroll 1
    for (int i = 0; i < n; i++) {
        arrive_together(room.empty + at.slot());
        at.advance(1);
    }
#pragma unroll
    for (int j = 0; j < kHeld; j++) v[j] = w4::lift(v[j]);
}

// Some strips of gate and up for the unit's pairs.
template <int kSteps>
__device__ __forceinline__ void gate(const Work& p, Room& room, int slot, Place<kStages>& at) {
    uint4 v[kHeld];
    take_rows<kSteps>(p, room, slot, at, v);
    int left = room.unit[slot].strips;
#pragma unroll 1
    do {
        const int thread = this_thread(), warp = thread / kWarp, lane = thread % kWarp, g = lane / 4;
        const char* const first_q = room.stage[0] + warp * 2 * kBrickQ + lane * 16;
        const char* const first_s = room.stage[0] + kStageQ + warp * 2 * kBrickS + g * 8;
        float d[2][4] = {};
#pragma unroll
        for (int j = 0; j < kMostSteps; j++) {
            if (j >= steps_of<kSteps>(p)) break;
            wait(room.full + at.slot(), at.parity());
            const char* const q = first_q + at.slot() * kStageBytes;
            const char* const s = first_s + at.slot() * kStageBytes;
#pragma unroll
            for (int b = 0; b < 2; b++) {
                const int brick = 2 * j + b;
                const uint4 words = load16(q + b * kBrickQ);
                const uint2 scales = *reinterpret_cast<const uint2*>(s + b * kBrickS);
                w4::multiply_brick(d, words, scales,
                                   brick < kHeld ? v[brick % kHeld] : room.unheld[warp][brick % kHeld][lane]);
            }
            leave_stage(room, at.slot());
            at.advance(1);
        }
        end_strip(p, room, left, d);
    } while (--left > 0);
}

// kAdd: here, else by a kernel after this. kListed: pairs have been listed. kSteps: see steps_of.
template <bool kAdd, bool kListed, int kSteps>
__global__ void __launch_bounds__(kThreads, 1) stream_kernel(const __grid_constant__ Work p) {
#if __CUDA_ARCH__ >= 1200
    if constexpr (sizeof(Room) > kBlockBytes) return;  // never launched there
#endif
    extern __shared__ __align__(128) char memory[];
    auto& room = *reinterpret_cast<Room*>(memory);
    const int thread = threadIdx.x, warp = thread / kWarp;
    if (thread == 0) {
        for (int i = 0; i < kStages; i++) {
            init_barrier(room.full + i, 1);
            init_barrier(room.empty + i, kMembers * kWarpArrivals);
        }
        for (int i = 0; i < kUnits; i++) {
            init_barrier(room.planned + i, kWarpArrivals);
            init_barrier(room.told + i, kWarpArrivals);
            init_barrier(room.heard + i, (kMembers + 1) * kWarpArrivals);
        }
        for (int i = 0; i < kSums; i++) {
            init_barrier(room.summed + i, kMembers * kWarpArrivals);
            init_barrier(room.added + i, kAdders * kWarpArrivals);
        }
        for (int i = 0; i < kMembers; i++) room.had_units[i] = room.had_strips[i] = 0;
        show_barriers_to_copies();
    }
    if (!kListed && warp < kMembers) clear(room.sort);
    leave_shared_memory_to_copies();
    __syncthreads();
    wait_for_kernel_before();
    let_next_kernel_start();
    const int n_rows = p.n_rows(), pairs = n_rows * p.slots;
    const bool first = thread == kMembers * kWarp;
    const int ticket = first ? static_cast<int>(atomicAdd(&p.turn->ticket, 1u)) : 0;
    const uint32_t epoch = warp == kMembers ? p.turn->epoch : 0;
    Lists lists = p.lists;
    if constexpr (!kListed) {
        lists = {&room.n_chunks, room.chunk, room.pair, nullptr};
        // Nobody but the warp that brings weights needs the lists before it has told of a unit, so few pairs it sorts alone.
        if (pairs <= kWarp) {
            if (warp == kMembers) sort_few_pairs<kPairs>(lists, room.chunk_of, p.expert, pairs, p.experts);
        } else {
            sort_pairs<kPairs>(lists, room.chunk_of, room.sort, p.expert, pairs, p.experts);
            leave_shared_memory_to_copies();
            __syncthreads();
        }
    }
    if (warp == kMembers) {
        // Only now, so that nobody who sorts waits for what memory answers.
        if (first) {
            room.tag = epoch + 1 ? epoch + 1 : 1;  // 0 is what words hold at first
            see_global_memory_in_copies();
        }
        __syncwarp();
        return bring(p, room, lists, Plan(p, *lists.n_chunks, kAdd ? n_rows : 0), ticket);
    }
    if (warp > kMembers) return bring_acts(p, room);

    Place<kStages> at;
    while (true) {
        const Place<kUnits> from{room.had_units[this_thread() / kWarp]};
        wait(room.told + from.slot(), from.parity());
        const int kind = room.unit[from.slot()].kind;
        if (kind == kEnd) return;
        if (kind == kGate)
            gate<kSteps>(p, room, from.slot(), at);
        else if (kind == kDown)
            down<kAdd>(p, room, from.slot(), at);
        else if constexpr (kAdd)
            add_slots(p, room, from.slot());
        const int me = this_thread();
        const unsigned had = room.had_units[me / kWarp];
        arrive_together(room.heard + had % kUnits);
        if (me % kWarp == 0) room.had_units[me / kWarp] = had + 1;
        __syncwarp();
    }
}

}  // namespace

bool can_stream_experts(Rows h, const Experts& w) {
    // 227 KB of shared memory a block: sm_90 to sm_103. With a ring of two stages, which 99 KB would hold, nothing was gained.
    return (bound().major == 9 || bound().major == 10) && aligned16(h) && w.down.k == kInter &&
           w.gate_up.k % (kStageBricks * w4::kBrick) == 0 && w.gate_up.k <= kMostSteps * kStageBricks * w4::kBrick;
}

void stream_experts(Rows y, Rows h, const int32_t* expert, const float* weight, const Experts& w, Count n_rows,
                    int slots) {
    const int hidden = w.gate_up.k;
    const size_t pairs = static_cast<size_t>(n_rows.most) * static_cast<size_t>(slots);
    const bool few = pairs <= kMostPairs && w.count <= kMostExperts;
    Work p{};
    p.gate_q = raw(w.gate_up.q);
    p.gate_s = raw(w.gate_up.s);
    p.down_q = raw(w.down.q);
    p.down_s = raw(w.down.s);
    p.y = raw(y);
    p.x = raw(h);
    p.expert = expert;
    p.weight = weight;
    p.n_rows = number(n_rows);
    p.slots = slots;
    p.experts = w.count;
    p.steps = hidden / (kStageBricks * w4::kBrick);
    p.down_strips = hidden / w4::kStrip;
    if (!few) p.lists = list_pairs(expert, p.n_rows, slots, w.count, kPairs);
    // Words that were told in earlier launches hold earlier epochs, wherever they were. Nothing else is ever written here, and
    // all of them lie beside the epoch: when the memory is replaced by more, both begin anew, as zeros. An epoch comes again after
    // four billion launches; only words that none of these wrote would then pass for new.
    constexpr size_t turn_words = 2;
    static_assert(sizeof(Turn) <= turn_words * 8);
    const size_t acts = pairs * (kInter / 2), results = pairs * static_cast<size_t>(hidden);
    uint64_t* const words = scratch<uint64_t>(Use::moe_told, turn_words + acts);
    p.turn = reinterpret_cast<Turn*>(words);
    p.acts = words + turn_words;
    // Every launch leaves zeros in moe_results, whatever its size: so nothing else may be written there.
    p.outs = scratch<float>(few ? Use::moe_results : Use::moe_out, results);
    const auto go = [&]<bool kAdd, bool kListed>() {
        const auto with = [&]<int kSteps>() {
            launch_with<stream_kernel<kAdd, kListed, kSteps>, sizeof(Room)>({.early = true}, bound().processors,
                                                                            kThreads, p);
        };
        p.steps == kMostSteps ? with.template operator()<kMostSteps>() : with.template operator()<0>();
    };
    if (few) return go.template operator()<true, false>();
    go.template operator()<false, true>();
    // Blocks go over several rows where there are many: rows that are not there cost nothing.
    const dim3 grid(static_cast<unsigned>(ceil_div(hidden, 4 * kSlotsThreads)),
                    static_cast<unsigned>(std::min(n_rows.most, 64)));
    launch_as<kd::cuda::add_slots<false>>({.early = true}, grid, kSlotsThreads, p.y, static_cast<const float*>(p.outs),
                                          p.lists.chunk_of, weight, p.n_rows, slots, hidden);
}

}  // namespace kd::cuda
