// How kernels of different ranks meet, through memory that every rank's GPU can read and write.
//
// A collective is one kernel on every rank, the same grid everywhere. Either (a) block b of a rank tells block b of every other
// rank that it has come, and waits until all of them have told it: meet(); or (b) it sends values, and the other takes them:
// then the values say themselves that they have come. A place that values are sent to holds a word that no value has
// (kNothing), and who has taken what was there puts it back.
//
// No rank starts its next collective before this one has ended on it, and what is sent alternates between two halves: a half is
// sent to again in the next but one collective, which no rank reaches before all have entered the next, that is, have taken all
// of this one. For that to hold block 0 takes part even where there are no rows. How many collectives there have been is
// counted in memory, so that a recorded round can be played any number of times.
//
// Blocks wait in the order in which they are started, so those of one rank need not all fit on the GPU at once.
#pragma once

#include "raw.h"
#include "system_scope.h"

namespace kd::cuda {

constexpr uint64_t kMostWaitNs = 3'000'000'000;  // of a rank for another: then that one is lost

// One a rank, in its GPU's memory, zero at first. The other ranks write `come`, each its own word.
struct Mailbox {
    uint32_t turn;              // collectives that have ended here
    uint32_t blocks_under_way;  // of the present one: that have asked for its turn
    uint32_t again;             // rank 0's: whether another round of a loop follows
    uint32_t come[KD_MAX_TP];   // by rank: the turn that it has come to
};

// Of a group, in memory that host and GPUs see.
struct Watchword {
    int32_t stop;  // 1: nobody waits any longer
    int32_t told;  // 1: `waiting` has waited in vain for `absent` in collective `turn`
    int32_t waiting, absent;
    uint32_t turn;
};

// A kernel's argument.
struct Peers {
    int rank, ranks;
    Mailbox* box[KD_MAX_TP];
    char* memory[KD_MAX_TP];  // two halves of `half` bytes, all kNothing between collectives
    size_t half;
    Watchword* word;

    __device__ uint32_t next_turn() const { return box[rank]->turn + 1; }
    __device__ char* half_of(int of_rank, uint32_t turn) const { return memory[of_rank] + (turn & 1) * half; }
};

// Of one wait for one rank.
struct Patience {
    uint32_t looks = 0;
    uint64_t began = 0;

    // After a look in vain: whether to look again. Ends the kernel when the other is lost.
    __device__ bool lasts(const Peers& p, int peer, uint32_t turn) {
        if (++looks % 1024) return true;  // the rest goes over the bus
        volatile Watchword* word = p.word;
        if (word->stop) return false;
        const uint64_t now = nanoseconds();
        if (!began) began = now;
        if (now - began < kMostWaitNs) return true;
        if (!word->told) {
            word->waiting = p.rank;
            word->absent = peer;
            word->turn = turn;
            __threadfence_system();
            word->told = 1;
            __threadfence_system();
        }
        trap();
        return false;
    }
};

// Called by all threads of a grid's one block: what it has written is seen by the block of every other rank once that has
// returned from the same call, and the other way round. False: the group has been given up, nothing may be read.
__device__ inline bool meet(const Peers& p, uint32_t turn) {
    __syncthreads();
    const int peer = threadIdx.x;
    bool alone = false;
    if (peer < p.ranks && peer != p.rank) {
        store_release_system(&p.box[peer]->come[p.rank], turn);
        const uint32_t* come = &p.box[p.rank]->come[peer];
        Patience patience;
        while (!alone && static_cast<int32_t>(load_acquire_system(come) - turn) < 0)
            alone = !patience.lasts(p, peer, turn);
    }
    return !__syncthreads_or(alone);
}

// ---- values that say themselves that they have come ----------------------------------------------------------------------

// Not a number, to fp32 and to two bf16; whatever our kernels compute, theirs are 0x7fff....
constexpr uint32_t kNothing = 0xffffffff, kOtherNan = 0x7fff7fff;

__device__ __forceinline__ bool all_there(uint4 v) {
    return v.x != kNothing && v.y != kNothing && v.z != kNothing && v.w != kNothing;
}

__device__ __forceinline__ void send(uint4* to, uint4 v) {
    const auto sendable = [](uint32_t w) { return w == kNothing ? kOtherNan : w; };
    store_words_system(to, make_uint4(sendable(v.x), sendable(v.y), sendable(v.z), sendable(v.w)));
}

// Waits for what is sent to place(0) .. place(kN - 1), those that are not null, and takes it away; peer_of(k) sends it. After the
// group has been given up there is nothing to wait for, and it returns what there is.
template <int kN, class Place, class PeerOf>
__device__ __forceinline__ void take(uint4 (&got)[kN], Place place, const Peers& p, uint32_t turn, PeerOf peer_of) {
    Patience patience;
    for (int absent = 0; absent >= 0;) {
#pragma unroll
        for (int k = 0; k < kN; k++)
            if (const uint4* from = place(k)) got[k] = load_words_system(from);
        absent = -1;
#pragma unroll
        for (int k = 0; k < kN; k++)
            if (place(k) && !all_there(got[k])) absent = k;
        if (absent >= 0 && !patience.lasts(p, peer_of(absent), turn)) break;
    }
#pragma unroll
    for (int k = 0; k < kN; k++)
        if (uint4* from = place(k)) store16(from, make_uint4(kNothing, kNothing, kNothing, kNothing));
}

// ---- the count of collectives --------------------------------------------------------------------------------------------

// By one thread of every block, after all threads of it have read next_turn(); true for the last block of the grid, which is to
// call ended_here(). Two calls, so that nobody waits for the answer of the first.
__device__ inline bool last_to_ask(const Peers& p) {
    return add_relaxed_device(&p.box[p.rank]->blocks_under_way, 1) == gridDim.x * gridDim.y - 1;
}
__device__ inline void ended_here(const Peers& p, uint32_t turn) {
    Mailbox* box = p.box[p.rank];
    box->blocks_under_way = 0;
    box->turn = turn;
}

}  // namespace kd::cuda
