// Several threads that read: each takes the next job until none is left.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "device.h"

namespace kd::model {

// Memory of a load beside the weights: what each reader holds (a read chunk, and its share of a rank widened to fp32), and about
// kTensorBytes for each tensor in the folder.
constexpr size_t kChunkBytes =
    size_t{4} << 20;  // the largest read; a cancellation is noticed after at most one a reader
constexpr size_t kReaderBytes = 3 * kChunkBytes;
constexpr int kMaxReaders = 8;
constexpr size_t kLoadBytes = kMaxReaders * (kReaderBytes + (size_t{1} << 20)) + (size_t{4} << 20);
constexpr size_t kTensorBytes = 1024;
constexpr uint64_t kBytesAReader = uint64_t{32} << 20;  // for less, another thread is not worth starting

// What one reader reads into, in memory that devices take from while the reader goes on.
class Buffers {
  public:
    Buffers();
    ~Buffers();
    Buffers(const Buffers&) = delete;
    Buffers& operator=(const Buffers&) = delete;
    uint8_t* chunk() const { return memory_; }                // kChunkBytes
    uint8_t* share() const { return memory_ + kChunkBytes; }  // 2 * kChunkBytes

  private:
    uint8_t* memory_;
};

// What a reader reads at once, at most kChunkBytes: where the host writes into the device's memory itself as much as stays in a core's
// cache until it has been looked at, else what a copy to the device is worth starting for.
size_t read_bytes();

// For so many bytes on this machine: 1 .. kMaxReaders.
int reader_count(uint64_t bytes);

// Runs body(job, buffers, stop) for jobs 0 .. jobs - 1, on the calling thread if `readers` is 1. After a failure no job is begun,
// `stop()` is true, and the failure of the lowest job is thrown here. The threads bind themselves; the caller stays bound.
using Stop = std::function<bool()>;
void read_parallel(size_t jobs, int readers, device::Context* bound,
                   const std::function<void(size_t job, Buffers& buffers, const Stop& stop)>& body);

}  // namespace kd::model
