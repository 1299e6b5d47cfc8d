#include "engine/team.h"

#include "engine/threads.h"

namespace kd {

Team::Team(const device::Options& options) : group_(device::open_group(options)) {
    for (int rank = 1; rank < options.tp; rank++)
        threads_.push_back(quiet_thread("kd-rank", [this, rank] { serve(rank); }));
}

Team::~Team() {
    {
        std::lock_guard lock(mutex_);
        stop_ = true;
    }
    wake_.notify_all();
    for (std::thread& t : threads_) t.join();
}

void Team::call(int rank) {
    try {
        device::bind(device::context(*group_, rank));
        (*body_)(rank);
    } catch (...) {
        {
            std::lock_guard lock(mutex_);
            if (!error_) error_ = std::current_exception();
        }
        device::abort(*group_);
    }
}

void Team::serve(int rank) {
    uint64_t seen = 0;
    std::unique_lock lock(mutex_);
    for (;;) {
        wake_.wait(lock, [&] { return stop_ || generation_ != seen; });
        if (stop_) return;
        seen = generation_;
        lock.unlock();
        call(rank);
        lock.lock();
        if (--running_ == 0) done_.notify_one();
    }
}

void Team::run(const std::function<void(int)>& body) {
    body_ = &body;
    if (!threads_.empty()) {
        std::lock_guard lock(mutex_);
        running_ = int(threads_.size());
        generation_++;
    }
    wake_.notify_all();
    call(0);
    std::unique_lock lock(mutex_);
    done_.wait(lock, [&] { return running_ == 0; });
    if (error_) std::rethrow_exception(error_);
}

}  // namespace kd
