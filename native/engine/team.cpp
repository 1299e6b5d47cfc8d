#include "engine/team.h"

#include <new>

#include "engine/threads.h"
#include "error.h"

namespace kd {
namespace {

std::shared_ptr<device::Group> open(device::Options& options, StepRecord& record) {
    options.records = record.ranks();
    return device::open_group(options);
}

}  // namespace

Team::Team(device::Options options, const std::string& record_path)
    : record_(record_path, options.tp), group_(open(options, record_)) {
    for (int rank = 1; rank < options.tp; rank++)
        threads_.push_back(quiet_thread("kd-rank-" + std::to_string(rank), [this, rank] { serve(rank); }));
}

Team::~Team() {
    {
        std::lock_guard lock(mutex_);
        stop_ = true;
    }
    wake_.notify_all();
    for (std::thread& t : threads_) t.join();
}

// The exception being handled, once more, as an Error that names the place.
void Team::tell(int rank, kd_stage stage) const {
    const auto told = [&](int status, const char* what) {
        throw Error(status, "rank " + std::to_string(rank) + " failed in step " + std::to_string(step_) + " (" +
                                stage_name(stage) + "): " + what);
    };
    try {
        throw;
    } catch (const Error& e) {
        told(e.status, e.what());
    } catch (const std::bad_alloc&) {
        told(KD_E_NOMEM, "out of memory");
    } catch (const std::exception& e) {
        told(KD_E_FATAL, e.what());
    } catch (...) {
        told(KD_E_FATAL, "unknown failure");
    }
    __builtin_unreachable();
}

void Team::call(int rank) {
    record_.enter(rank, step_, stage_);
    try {
        try {
            device::bind(device::context(*group_, rank));
            (*body_)(rank);
        } catch (...) {
            tell(rank, stage_);
        }
    } catch (...) {
        {
            std::lock_guard lock(mutex_);
            if (!error_) error_ = std::current_exception();
        }
        device::abort(*group_);
    }
    record_.enter(rank, step_, KD_STAGE_IDLE);
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

void Team::run(kd_stage stage, const std::function<void(int)>& body) {
    body_ = &body;
    stage_ = stage;
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

bool Team::idle() {
    bool all = true;
    for (int rank = size() - 1; rank >= 0; rank--) {  // rank 0 last: it stays bound
        try {
            device::bind(device::context(*group_, rank));
            all = device::idle() && all;
        } catch (...) {
            tell(rank, stage_);
        }
    }
    return all;
}

}  // namespace kd
