// The rank threads. Rank 0 is the engine thread itself; ranks 1 .. tp - 1 have a thread each, which sleeps between calls.
#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "device.h"
#include "engine/record.h"

namespace kd {

class Team {
  public:
    // record_path: see kd_options.
    explicit Team(device::Options options, const std::string& record_path = "");
    ~Team();

    // What run() does from here on belongs to the next step.
    void next_step() { step_++; }

    // Run body(rank) on every rank, the calling thread being rank 0, and wait for all. If one throws, the others are woken
    // out of their collectives and the first error is thrown here, as an Error that names rank, step and stage; the group is
    // unusable from then on.
    void run(kd_stage stage, const std::function<void(int rank)>& body);

    // Between two calls of run(): whether the devices of all ranks have done what they were given. Throws as run() does.
    bool idle();

    device::Group& group() { return *group_; }
    int size() const { return int(threads_.size()) + 1; }

  private:
    void serve(int rank);
    void call(int rank);
    [[noreturn]] void tell(int rank, kd_stage stage) const;

    StepRecord record_;
    std::shared_ptr<device::Group> group_;
    std::mutex mutex_;
    std::condition_variable wake_, done_;
    const std::function<void(int)>* body_ = nullptr;
    kd_stage stage_ = KD_STAGE_IDLE;
    uint64_t step_ = 0, generation_ = 0;
    int running_ = 0;
    bool stop_ = false;
    std::exception_ptr error_;
    std::vector<std::thread> threads_;
};

}  // namespace kd
