// Collectives among the rank threads of one process. Ranks only show memory to one another: the arithmetic of a collective is
// its op's and the same whatever the transport, which is chosen once a group:
//
//   host    a rank fills a buffer, records that on its stream and meets the others on the host; then its stream waits for
//           theirs. Right anywhere where one GPU can read the other's memory, but a step cannot be recorded.
//   peers   kernels write into one another's memory (peers.h): each rank sends all it has to every other (one shot), or to each
//           the part that this one adds up, and then its sums to all (two shots). Only in what is played from a record, unless it was asked for by name:
//           a rank that allocates may wait for the GPUs, where another rank's kernel may wait for it already. Nothing is
//           allocated for a record, so the first run of a step, like a prompt's, goes by way of the host.
//   nccl    where GPUs cannot read one another's memory: NCCL moves the bytes. Not recorded.
#pragma once

#include <cstddef>

#include "device_context.h"
#include "peers.h"
#include "types.h"

namespace kd::cuda {

constexpr int kSpins = 1000;  // of a rank's thread waiting for the others

int rank();  // of the bound context
int tp();

// Device memory to fill by work on the rank's stream.
void* share_buffer(size_t bytes);

// What every rank filled, in rank order, for kernels launched from now on; valid until this rank's next but one collective.
// [collective] Throws Error(KD_E_FATAL) after device::abort.
struct Shared {
    const void* of_rank[KD_MAX_TP];
};
Shared share_filled(size_t bytes);

// The argument of kernels that meet as peers, each showing at most `bytes`. [collective when it grows]
Peers peers(size_t bytes);
// Blocks of such a kernel that may wait at once.
int most_waiting();
// Elements from which an all-reduce takes two shots.
size_t two_shots_from();

Transport transport();
// Whether that is host for now only: memory that a record will need is to be asked for.
bool waits_to_be_recorded();
// With nccl; as in nccl.h. [collective]
void all_to_all(void* mine, const void* parts, size_t bytes);
void all_gather(void* all, const void* mine, size_t bytes);

}  // namespace kd::cuda
