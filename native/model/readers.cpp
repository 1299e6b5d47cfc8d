#include "model/readers.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "quiet.h"

namespace kd::model {

Buffers::Buffers() : memory_(static_cast<uint8_t*>(device::alloc_host(kReaderBytes))) {}
Buffers::~Buffers() { device::release_host(memory_); }

size_t read_bytes() {
    char here, there;
    return device::landing(&here, &there) == &here ? size_t{256} << 10 : kChunkBytes;
}

int reader_count(uint64_t bytes) {
    cpu_set_t set;
    const int cores = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
    const uint64_t worth = std::max<uint64_t>(1, bytes / kBytesAReader);
    return static_cast<int>(std::min<uint64_t>(worth, static_cast<uint64_t>(std::clamp(cores, 1, kMaxReaders))));
}

namespace {

class Readers {
  public:
    using Body = std::function<void(size_t, Buffers&, const Stop&)>;
    Readers(size_t jobs, const Body& body) : jobs_(jobs), body_(body) {}

    void run() {
        size_t job = 0;
        try {
            Buffers buffers;
            const Stop stop = [this] { return failed_.load(); };
            while (!failed_ && (job = next_++) < jobs_) body_(job, buffers, stop);
        } catch (...) {
            std::lock_guard lock(mutex_);
            failed_ = true;
            if (!error_ || job < job_) error_ = std::current_exception(), job_ = job;
        }
    }
    void fail_if_failed() const {
        if (error_) std::rethrow_exception(error_);
    }

  private:
    const size_t jobs_;
    const Body& body_;
    std::atomic<size_t> next_{0};
    std::atomic<bool> failed_{false};
    std::mutex mutex_;
    std::exception_ptr error_;
    size_t job_ = 0;
};

}  // namespace

void read_parallel(size_t jobs, int readers, device::Context* bound, const Readers::Body& body) {
    Readers all(jobs, body);
    std::vector<std::thread> threads;
    try {
        const Quiet quiet;
        for (int i = 1; i < readers; ++i)
            threads.emplace_back([&all, bound] {
                pthread_setname_np(pthread_self(), "kd-reader");
                device::bind(bound);
                all.run();
            });
    } catch (const std::system_error&) {  // fewer, then
    }
    all.run();
    for (std::thread& thread : threads) thread.join();
    device::bind(bound);
    all.fail_if_failed();
}

}  // namespace kd::model
