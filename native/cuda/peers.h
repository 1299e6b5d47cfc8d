// How kernels of different ranks meet, through memory that every rank's GPU can read and write.
//
// A collective is one kernel on every rank, the same grid everywhere. Block b of a rank shows something in its own memory, tells
// block b of every other rank, waits until all of them have told it, and reads what they show. No rank starts its next
// collective before this one has ended on it, and what is shown alternates between two halves: a half is written again
// only in the next but one collective, which no rank reaches before all have entered the next, that is, have left this one. For
// that to hold block 0 takes part even where there are no rows. How many collectives there have been is counted in memory, so
// that a recorded round can be played any number of times.
//
// Blocks wait in the order in which they are started, so those of one rank need not all fit on the GPU at once.
#pragma once

#include "raw.h"
#include "system_scope.h"

namespace kd::cuda {

constexpr int kMostBlocks = 256;
constexpr uint64_t kMostWaitNs = 3'000'000'000;  // of a rank for another: then that one is lost

// One a rank, in its GPU's memory, zero at first. The other ranks write `come`, each its own words.
struct Mailbox {
    uint32_t turn;                             // collectives that have ended here
    uint32_t blocks_done;                      // of the one under way
    uint32_t again;                            // rank 0's: whether another round of a loop follows
    uint32_t come[2][KD_MAX_TP][kMostBlocks];  // by shot, rank, block: the turn that it has come to
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
    char* memory[KD_MAX_TP];  // two halves of `half` bytes
    size_t half;
    Watchword* word;

    __device__ uint32_t next_turn() const { return box[rank]->turn + 1; }
    template <class T>
    __device__ T* shown(int of_rank, uint32_t turn) const {
        return reinterpret_cast<T*>(memory[of_rank] + (turn & 1) * half);
    }
};

// Waits for one rank's block; false if nobody is to wait any longer.
__device__ inline bool wait_for(const Peers& p, int shot, int peer, uint32_t turn) {
    const uint32_t* come = &p.box[p.rank]->come[shot][peer][blockIdx.x];
    uint64_t began = 0;
    for (uint32_t looks = 1; static_cast<int32_t>(load_acquire_system(come) - turn) < 0; looks++) {
        if (looks % 1024) continue;  // the rest goes over the bus
        volatile Watchword* word = p.word;
        if (word->stop) return false;
        const uint64_t now = nanoseconds();
        if (!began) began = now;
        if (now - began < kMostWaitNs) continue;
        if (!word->told) {
            word->waiting = p.rank;
            word->absent = peer;
            word->turn = turn;
            __threadfence_system();
            word->told = 1;
            __threadfence_system();
        }
        trap();
    }
    return true;
}

// Called by all threads of a block: what the block has written is seen by the same block of every other rank once that has
// returned from the same call, and the other way round. False: the group has been given up, nothing may be read.
__device__ inline bool meet(const Peers& p, int shot, uint32_t turn) {
    __syncthreads();
    const int peer = threadIdx.x;
    const bool other = peer < p.ranks && peer != p.rank;
    if (other) store_release_system(&p.box[peer]->come[shot][p.rank][blockIdx.x], turn);
    const bool alone = other && !wait_for(p, shot, peer, turn);
    return !__syncthreads_or(alone);
}

// The last thing every block of a collective does.
__device__ inline void leave(const Peers& p, uint32_t turn) {
    __syncthreads();
    if (threadIdx.x != 0) return;
    Mailbox* box = p.box[p.rank];
    if (add_acq_rel_device(&box->blocks_done, 1) != gridDim.x - 1) return;
    box->blocks_done = 0;
    box->turn = turn;
}

}  // namespace kd::cuda
