// Where the rank threads of a group wait for one another, and the futex under it. Shared by the backends.
#pragma once

#include <atomic>
#include <cstdint>

#include "kd.h"

namespace kd {

void pause_cpu();
void futex_wait(std::atomic<uint32_t>& word, uint32_t while_value);
void futex_wake(std::atomic<uint32_t>& word, int count);

class Meeting {
  public:
    // `records` [tp], or none: each rank's arrivals are noted there.
    explicit Meeting(kd_rank_record* records) : records_(records) {}

    // Returns once `tp` ranks have arrived; polls `spins` times, then sleeps. Throws Error(KD_E_FATAL) if aborted.
    void arrive(int rank, int tp, int spins);
    void abort();

  private:
    void check() const;
    kd_rank_record* const records_;
    alignas(64) std::atomic<uint32_t> arrived_{0};
    alignas(64) std::atomic<uint32_t> generation_{0};  // futex word
    std::atomic<uint32_t> sleepers_{0};
    std::atomic<bool> aborted_{false};
};

}  // namespace kd
