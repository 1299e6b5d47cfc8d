#include "threads.h"

#include <algorithm>
#include <climits>
#include <system_error>

#include "device_context.h"
#include "error.h"
#include "meeting.h"
#include "quiet.h"

namespace kd::cpu {

namespace {

constexpr int kCallerSpins = 400;  // about 20 us: a chunk in flight usually ends sooner

thread_local bool inside_region = false;

}  // namespace

Pool::Pool(int workers, int awake, int spins, void (*start)(void*), void* start_data) : awake_(awake), spins_(spins) {
    const Quiet quiet;
    try {
        for (int i = 0; i < workers; i++) {
            threads_.emplace_back([this, start, start_data] {
                inside_region = true;
                start(start_data);
                work();
            });
        }
    } catch (const std::system_error& e) {
        stop_.store(true);
        wake_.fetch_add(1);
        futex_wake(wake_, INT_MAX);
        for (std::thread& t : threads_) t.join();
        fail(KD_E_NOMEM,
             "could not start compute thread %zu of %d (%s): ask for fewer threads or raise the process's limit",
             threads_.size() + 1, workers, e.what());
    }
}

Pool::~Pool() {
    stop_.store(true);
    wake_.fetch_add(1);
    futex_wake(wake_, INT_MAX);
    for (std::thread& t : threads_) t.join();
}

bool Pool::run_one() {
    uint64_t state = state_.load(std::memory_order_acquire);
    while (static_cast<uint32_t>(state) != 0) {
        const Run run = run_.load(std::memory_order_relaxed);
        void* const body = body_.load(std::memory_order_relaxed);
        const int n = n_.load(std::memory_order_relaxed), grain = grain_.load(std::memory_order_relaxed);
        const int chunk = chunks_.load(std::memory_order_relaxed) - static_cast<int>(static_cast<uint32_t>(state));
        if (!state_.compare_exchange_weak(state, state - 1, std::memory_order_acq_rel, std::memory_order_acquire))
            continue;
        const int begin = chunk * grain;
        try {
            run(body, begin, begin + std::min(n - begin, grain));
        } catch (...) {
            std::lock_guard lock(error_mutex_);
            if (!error_) error_ = std::current_exception();
        }
        return true;
    }
    return false;
}

void Pool::run(int n, int grain, Run run, void* body) {
    const int chunks = (n - 1) / grain + 1;
    run_.store(run, std::memory_order_relaxed);
    body_.store(body, std::memory_order_relaxed);
    n_.store(n, std::memory_order_relaxed);
    grain_.store(grain, std::memory_order_relaxed);
    chunks_.store(chunks, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    const uint64_t epoch = (state_.load(std::memory_order_relaxed) >> 32) + 1;
    state_.store(epoch << 32 | static_cast<uint32_t>(chunks), std::memory_order_seq_cst);
    const int asleep = static_cast<int>(sleepers_.load(std::memory_order_seq_cst));
    const int more = std::min(chunks - 1, awake_ - (workers() - asleep));
    if (asleep > 0 && more > 0) {
        wake_.fetch_add(1, std::memory_order_seq_cst);
        futex_wake(wake_, more);
    }

    inside_region = true;
    uint32_t mine = 0;
    while (run_one()) mine++;
    inside_region = false;

    const uint32_t others = static_cast<uint32_t>(chunks) - mine;
    for (int i = 0; done_.load(std::memory_order_acquire) != others && i < kCallerSpins; i++) pause_cpu();
    if (done_.load(std::memory_order_acquire) != others) {
        caller_waits_.store(1, std::memory_order_seq_cst);
        uint32_t done;
        while ((done = done_.load(std::memory_order_seq_cst)) != others) futex_wait(done_, done);
        caller_waits_.store(0, std::memory_order_relaxed);
    }
    if (error_) {  // written by chunks that are done
        std::exception_ptr error;
        std::swap(error, error_);
        std::rethrow_exception(error);
    }
}

void Pool::work() {
    while (!stop_.load(std::memory_order_acquire)) {
        bool ran = false;
        for (int i = 0; i < spins_ && !ran; i++) {
            ran = run_one();
            if (!ran) pause_cpu();
        }
        if (!ran) {
            const uint32_t wake = wake_.load(std::memory_order_seq_cst);
            sleepers_.fetch_add(1, std::memory_order_seq_cst);
            // Looked at again after being counted: whoever publishes either sees the sleeper or is seen here.
            if (static_cast<uint32_t>(state_.load(std::memory_order_seq_cst)) == 0 &&
                !stop_.load(std::memory_order_seq_cst))
                futex_wait(wake_, wake);
            sleepers_.fetch_sub(1, std::memory_order_seq_cst);
            ran = run_one();
        }
        if (!ran) continue;
        done_.fetch_add(1, std::memory_order_seq_cst);
        if (caller_waits_.load(std::memory_order_seq_cst)) futex_wake(done_, 1);
    }
}

Pool* pool() {
    if (inside_region) return nullptr;
    Pool* p = bound().pool.get();
    return p && p->workers() > 0 ? p : nullptr;
}

int threads() {
    const Pool* p = pool();
    return p ? p->workers() + 1 : 1;
}

int grain_for(double ops_per_index) {
    constexpr double kOpsPerChunk = 100e3;  // about 10 us of one core with AVX2; a claim costs well under 1 us
    return static_cast<int>(std::clamp(kOpsPerChunk / std::max(ops_per_index, 1.0), 1.0, 1e9));
}

}  // namespace kd::cpu
