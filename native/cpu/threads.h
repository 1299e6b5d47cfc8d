// The compute threads of one rank, and the loop that uses them.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace kd::cpu {

// Chunks of a region are claimed one by one from `state_` by whoever is awake, the caller included. The caller waits
// only for chunks that others have claimed, never for a worker that has not woken, so sharing cores with other
// processes costs at most the chunks in flight. Idle workers spin for a few microseconds, then sleep in a futex.
class Pool {
  public:
    // `workers` threads besides the caller, of which at most `awake` run at a time: more than there are cores for would
    // only take them from each other. `spins` is how long an idle one polls. `start` runs first on each worker.
    Pool(int workers, int awake, int spins, void (*start)(void*), void* start_data);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int workers() const { return static_cast<int>(threads_.size()); }
    int at_once() const { return std::min(workers(), awake_) + 1; }  // threads of a region that run together

    // run(body, begin, end) over [0, n) in chunks of `grain`. One caller at a time. Rethrows what a chunk threw.
    using Run = void (*)(void* body, int begin, int end);
    void run(int n, int grain, Run run, void* body);

  private:
    void work();
    bool run_one();  // claims a chunk and runs it; false if none is left

    // epoch << 32 | chunks not yet claimed. The job below is written only while that is 0 and all claimed are done, so
    // a claim that succeeds in an epoch has read the job of that epoch.
    alignas(64) std::atomic<uint64_t> state_{0};
    std::atomic<Run> run_{nullptr};
    std::atomic<void*> body_{nullptr};
    std::atomic<int> n_{0}, grain_{0}, chunks_{0};
    alignas(64) std::atomic<uint32_t> done_{0};  // chunks finished by workers in this epoch
    std::atomic<uint32_t> caller_waits_{0};
    alignas(64) std::atomic<uint32_t> wake_{0};  // futex word of idle workers
    std::atomic<uint32_t> sleepers_{0};
    std::atomic<bool> stop_{false};
    const int awake_, spins_;
    std::mutex error_mutex_;
    std::exception_ptr error_;
    std::vector<std::thread> threads_;
};

// The pool of the bound rank; nullptr inside a region (a nested loop runs where it is) or if the rank has one thread.
Pool* pool();
int threads();  // that a loop started here would run on

// body(begin, end) over [0, n), at least `grain` indices at a time except at the end, on the bound rank's threads and
// this one; complete on return. Which indices share a call is free, so results must not depend on it. Long loops have
// kChunks chunks a thread: smaller ones balance no better, but cut the weights that a thread reads in a row.
template <class F>
void parallel_for(int n, int grain, F&& body) {
    constexpr int kChunks = 24;
    if (n <= 0) return;
    Pool* p = n > grain ? pool() : nullptr;
    if (!p) {
        body(0, n);
        return;
    }
    grain = std::max(grain, n / (kChunks * p->at_once()));
    using Body = std::remove_reference_t<F>;
    p->run(
        n, grain, [](void* b, int begin, int end) { (*static_cast<Body*>(b))(begin, end); },
        const_cast<void*>(static_cast<const void*>(&body)));
}

// A grain so that one chunk costs about 10 us, for indices that cost `ops` multiply-adds each.
int grain_for(double ops_per_index);

}  // namespace kd::cpu
