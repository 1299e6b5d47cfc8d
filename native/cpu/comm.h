// Collectives among the ranks of a group: host threads in one process that meet in memory.
//
// A rank copies what it gives into a buffer of its own, alternating between two, and meets the others once; then
// everybody reads everybody's buffer. A buffer is written again only after one more meeting, which no rank reaches
// before it has read it, so one meeting a collective is enough and callers may reuse their memory on return.
#pragma once

#include <atomic>
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

// Where ranks wait for one another.
class Meeting {
  public:
    void arrive(int tp, int spins);  // throws Error(KD_E_FATAL) if aborted
    void abort();

  private:
    void check() const;
    alignas(64) std::atomic<uint32_t> arrived_{0};
    alignas(64) std::atomic<uint32_t> generation_{0};  // futex word
    std::atomic<uint32_t> sleepers_{0};
    std::atomic<bool> aborted_{false};
};

}  // namespace kd::cpu
