// Collectives among the rank threads of one process, through memory that every rank's GPU can read.
//
// A rank fills a buffer of its own, alternating between two, records that on its stream and meets the others on the host;
// then its stream waits for theirs and reads their buffers. The arithmetic of a collective is its op's: ranks only show
// memory to one another. A buffer is filled again only by work that waits for the meeting after the one that read it.
#pragma once

#include <cstddef>

#include "types.h"

namespace kd::cuda {

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

}  // namespace kd::cuda
