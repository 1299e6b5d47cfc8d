// The rank threads. Rank 0 is the engine thread itself; ranks 1 .. tp - 1 have a thread each, which sleeps between calls.
#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "device.h"

namespace kd {

class Team {
  public:
    explicit Team(const device::Options& options);
    ~Team();

    // Run body(rank) on every rank, the calling thread being rank 0, and wait for all. If one throws, the others are woken
    // out of their collectives and the first error is thrown here; the group is unusable from then on.
    void run(const std::function<void(int rank)>& body);

    device::Group& group() { return *group_; }
    int size() const { return int(threads_.size()) + 1; }

  private:
    void serve(int rank);
    void call(int rank);

    std::shared_ptr<device::Group> group_;
    std::mutex mutex_;
    std::condition_variable wake_, done_;
    const std::function<void(int)>* body_ = nullptr;
    uint64_t generation_ = 0;
    int running_ = 0;
    bool stop_ = false;
    std::exception_ptr error_;
    std::vector<std::thread> threads_;
};

}  // namespace kd
