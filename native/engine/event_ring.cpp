#include "engine/event_ring.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "engine/clock.h"
#include "error.h"

namespace kd {

EventRing::EventRing(int capacity, int places) : capacity_(capacity), unpolled_(places) {
    void* p = mmap(nullptr, capacity_ * sizeof(Slot), PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) fail(KD_E_NOMEM, "no memory for %d events (%zu bytes)", capacity, capacity_ * sizeof(Slot));
    slots_ = static_cast<Slot*>(p);
    fd_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (fd_ < 0) {
        munmap(slots_, capacity_ * sizeof(Slot));
        fail(KD_E_NOMEM, "no event file descriptor: %s; raise the limit of open files", strerror(errno));
    }
}

EventRing::~EventRing() {
    close(fd_);
    munmap(slots_, capacity_ * sizeof(Slot));
}

void EventRing::push(const kd_event& event, std::string_view text, int place) {
    KD_CHECK(pushed_ - tail_.load(std::memory_order_acquire) < capacity_ && text.size() <= sizeof Slot::text);
    Slot& slot = slots_[pushed_ % capacity_];
    slot.event = event;
    slot.place = place;
    text.copy(slot.text, text.size());
    slot.event.text = slot.text;
    slot.event.text_length = uint32_t(text.size());
    if (place >= 0) unpolled_[place].fetch_add(1, std::memory_order_relaxed);
    pushed_++;
}

void EventRing::publish() {
    if (head_.load(std::memory_order_relaxed) == pushed_) return;
    head_.store(pushed_, std::memory_order_release);
    const uint64_t one = 1;
    while (write(fd_, &one, sizeof one) < 0 && errno == EINTR) {}
}

int EventRing::poll(char* events, uint32_t stride, uint32_t capacity, uint32_t timeout_ms) {
    tail_.store(given_, std::memory_order_release);
    const uint64_t until = now_us() + uint64_t{timeout_ms} * 1000;
    for (uint64_t now = 0; head_.load(std::memory_order_acquire) == given_ && capacity > 0; now = now_us()) {
        if (timeout_ms == 0 || now >= until) break;
        pollfd p = {fd_, POLLIN, 0};
        const uint64_t left_ms = now ? (until - now + 999) / 1000 : timeout_ms;
        if (::poll(&p, 1, int(std::min<uint64_t>(left_ms, 0x7FFFFFFF))) <= 0) break;  // EINTR: as if nothing came
        // Readable for events that an earlier call has taken: it looked between their being told of and this.
        if (head_.load(std::memory_order_acquire) == given_) drain();
    }
    uint32_t n = 0;
    const uint64_t head = head_.load(std::memory_order_acquire);
    for (; n < capacity && given_ != head; n++, given_++) {
        const Slot& slot = slots_[given_ % capacity_];
        const kd_event& from = slot.event;
        const uint32_t size = std::min<uint32_t>(stride, sizeof from);
        memcpy(events + size_t(n) * stride, &from, size);
        memcpy(events + size_t(n) * stride, &stride, sizeof stride);
        if (slot.place >= 0) unpolled_[slot.place].fetch_sub(1, std::memory_order_release);
    }
    if (given_ == head) drain();
    return int(n);
}

// All events have been given: the descriptor is not readable any more, unless another has come between that look and this.
void EventRing::drain() {
    uint64_t count;
    while (read(fd_, &count, sizeof count) < 0 && errno == EINTR) {}
    if (head_.load(std::memory_order_acquire) == given_) return;
    const uint64_t one = 1;
    while (write(fd_, &one, sizeof one) < 0 && errno == EINTR) {}
}

}  // namespace kd
