// Events on their way from the engine thread to the one that polls: a ring of fixed slots, one producer, one consumer.
//
// It cannot overflow: the engine starts no work whose event would not fit, and counts what has not been polled a place at a
// time. Texts live in the slots; a slot is reused only after the poll that follows the one that gave it out, so the ring
// holds twice what may be unpolled.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "kd.h"

namespace kd {

class EventRing {
  public:
    // `places`: who events are counted for, 0 .. places - 1; -1 is not counted. Throws Error(KD_E_NOMEM).
    EventRing(int capacity, int places);
    ~EventRing();
    EventRing(const EventRing&) = delete;

    static constexpr int kTextBytes = KD_MAX_TOKENS_EVENT * KD_MAX_TOKEN_BYTES + KD_MAX_STOP_BYTES + 8;

    // Producer. The event is copied; `text` is at most kTextBytes. The consumer sees it after publish().
    void push(const kd_event& event, std::string_view text, int place);
    void publish();
    // Events of a place that have been pushed and not polled. [any]
    int unpolled(int place) const { return unpolled_[place].load(std::memory_order_acquire); }

    // Consumer: up to `capacity` events into an array whose stride is `stride`; waits for the first up to timeout_ms.
    int poll(char* events, uint32_t stride, uint32_t capacity, uint32_t timeout_ms);
    int fd() const { return fd_; }

  private:
    void drain();  // [consumer]

    struct Slot {
        kd_event event;
        int place;
        char text[kTextBytes];
    };

    const uint64_t capacity_;
    Slot* slots_ = nullptr;          // mapped: touched only where used
    uint64_t pushed_ = 0;            // producer's
    std::atomic<uint64_t> head_{0};  // published
    std::atomic<uint64_t> tail_{0};  // given back
    uint64_t given_ = 0;             // handed to the consumer; tail_ follows at its next poll
    std::vector<std::atomic<int>> unpolled_;
    int fd_ = -1;
};

}  // namespace kd
