#include "meeting.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>

#include "error.h"

namespace kd {

void pause_cpu() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

void futex_wait(std::atomic<uint32_t>& word, uint32_t while_value) {
    static_assert(sizeof word == sizeof(uint32_t));
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, while_value, nullptr, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t>& word, int count) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
}

void Meeting::check() const {
    if (aborted_.load(std::memory_order_acquire))
        fail(KD_E_FATAL,
             "another rank failed, so this rank left the collective it was in: close the engine and open it again");
}

namespace {

// That a rank waits, for as long as it does.
class Waiting {
  public:
    explicit Waiting(kd_rank_record* record) : record_(record) {
        if (!record_) return;
        std::atomic_ref(record_->meetings).fetch_add(1, std::memory_order_relaxed);
        set(1);
    }
    ~Waiting() {
        if (record_) set(0);
    }
    Waiting(const Waiting&) = delete;

  private:
    void set(int32_t on) { std::atomic_ref(record_->waiting).store(on, std::memory_order_relaxed); }
    kd_rank_record* const record_;
};

}  // namespace

void Meeting::arrive(int rank, int tp, int spins) {
    check();
    const Waiting waiting(records_ ? records_ + rank : nullptr);
    const uint32_t generation = generation_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<uint32_t>(tp)) {
        arrived_.store(0, std::memory_order_relaxed);
        generation_.fetch_add(1, std::memory_order_seq_cst);
        if (sleepers_.load(std::memory_order_seq_cst) > 0) futex_wake(generation_, INT_MAX);
    } else {
        for (int i = 0; i < spins && generation_.load(std::memory_order_acquire) == generation; i++) pause_cpu();
        if (generation_.load(std::memory_order_acquire) == generation) {
            sleepers_.fetch_add(1, std::memory_order_seq_cst);
            while (generation_.load(std::memory_order_seq_cst) == generation) futex_wait(generation_, generation);
            sleepers_.fetch_sub(1, std::memory_order_seq_cst);
        }
    }
    check();
}

void Meeting::abort() {
    aborted_.store(true, std::memory_order_release);
    generation_.fetch_add(1, std::memory_order_seq_cst);
    futex_wake(generation_, INT_MAX);
}

}  // namespace kd
