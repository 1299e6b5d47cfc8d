// NCCL, found when it is needed: a library that serves one GPU, or GPUs that read one another's memory, does without.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <vector>

#include "kd.h"

namespace kd::cuda {

class Nccl {
  public:
    // A communicator for every device, which must all be different. Throws Error(KD_E_DEVICE) if there is no library.
    explicit Nccl(const std::vector<int>& devices);
    ~Nccl();
    Nccl(const Nccl&) = delete;

    // Every rank calls these in the same order, on its own thread and stream.
    void all_gather(void* all, const void* mine, size_t bytes, int rank, cudaStream_t stream);
    // part [r * bytes ..) of `parts` goes to rank r; what rank r sends comes to part r of `mine`.
    void all_to_all(void* mine, const void* parts, size_t bytes, int rank, cudaStream_t stream);
    void abort();  // [any thread] nobody waits any longer; other calls throw Error(KD_E_FATAL)

  private:
    void check(int status, const char* what) const;
    void* comm(int rank) const;

    const int n_;
    std::array<std::atomic<void*>, KD_MAX_TP> ranks_{};
};

}  // namespace kd::cuda
