// Collectives among the ranks of a group: host threads in one process that meet in memory.
//
// A rank copies what it gives into a buffer of its own, alternating between two, and meets the others once; then
// everybody reads everybody's buffer. A buffer is written again only after one more meeting, which no rank reaches
// before it has read it, so one meeting a collective is enough and callers may reuse their memory on return.
#pragma once

#include <cstddef>
#include <cstdint>

#include "types.h"

namespace kd::cpu {

int rank();  // of the bound context
int tp();

// all[r * bytes ..] = `bytes` at `mine` of rank r, for every rank. `mine` may lie inside `all` at this rank's place.
// [collective] Throws Error(KD_E_FATAL) after device::abort.
void all_gather(void* all, const void* mine, size_t bytes);

// What every rank gave, in rank order; valid until this rank's next collective. [collective]
struct Shared {
    const void* of_rank[KD_MAX_TP];
};
Shared share(const void* mine, size_t bytes);

// The same for memory the caller fills itself: write `bytes` at share_buffer(bytes), then meet.
void* share_buffer(size_t bytes);
Shared share_filled(size_t bytes);

}  // namespace kd::cpu
