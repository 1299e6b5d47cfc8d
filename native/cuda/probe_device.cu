#include "probe_device.h"

#include <algorithm>

#include "launch.h"

namespace kd::probe {

struct Stopwatch::Marks {
    cudaEvent_t start = nullptr, stop = nullptr;
};

Stopwatch::Stopwatch() : marks_(std::make_unique<Marks>()) {
    cuda::check(cudaEventCreate(&marks_->start), "cudaEventCreate");
    cuda::check(cudaEventCreate(&marks_->stop), "cudaEventCreate");
}

Stopwatch::~Stopwatch() {
    cudaEventDestroy(marks_->start);
    cudaEventDestroy(marks_->stop);
}

void Stopwatch::start() { cuda::check(cudaEventRecord(marks_->start, cuda::bound().stream), "cudaEventRecord"); }

double Stopwatch::stop_us() {
    cuda::check(cudaEventRecord(marks_->stop, cuda::bound().stream), "cudaEventRecord");
    cuda::check(cudaEventSynchronize(marks_->stop), "cudaEventSynchronize");
    float ms = 0;
    cuda::check(cudaEventElapsedTime(&ms, marks_->start, marks_->stop), "cudaEventElapsedTime");
    return 1e3 * static_cast<double>(ms);
}

namespace {

constexpr int kThreads = 1024;
constexpr int kAtOnce = 4;

__global__ void __launch_bounds__(kThreads) read_kernel(const uint4* p, size_t n, uint4* never) {
    const size_t stride = static_cast<size_t>(gridDim.x) * kThreads;
    uint4 sum{};
    for (size_t i = static_cast<size_t>(blockIdx.x) * kThreads + threadIdx.x; i < n; i += stride * kAtOnce) {
        uint4 piece[kAtOnce];
#pragma unroll
        for (int j = 0; j < kAtOnce; j++) piece[j] = i + j * stride < n ? __ldg(p + i + j * stride) : uint4{};
#pragma unroll
        for (int j = 0; j < kAtOnce; j++) {
            sum.x ^= piece[j].x;
            sum.y ^= piece[j].y;
            sum.z ^= piece[j].z;
            sum.w ^= piece[j].w;
        }
    }
    if (never) *never = sum;  // keeps the reads alive
}

__global__ void trap_kernel() { __trap(); }

}  // namespace

void break_device() {
    cuda::launch<trap_kernel>(1, 1);
    device::settle();
}

void read_all(const void* p, size_t bytes) {
    cuda::launch<read_kernel>(2 * cuda::bound().processors, kThreads, static_cast<const uint4*>(p), bytes / 16,
                              nullptr);
}

// What is there is doubled: some 20 copies fill any memory at the speed of copying.
void tile(void* to, size_t bytes, const void* pattern, size_t pattern_bytes) {
    const auto copy = [](void* to, const void* from, size_t n) {
        cuda::check(cudaMemcpyAsync(to, from, n, cudaMemcpyDeviceToDevice, cuda::bound().stream), "cudaMemcpy");
    };
    size_t there = std::min(bytes, pattern_bytes);
    copy(to, pattern, there);
    for (; there < bytes; there += std::min(there, bytes - there))
        copy(static_cast<char*>(to) + there, to, std::min(there, bytes - there));
}

uint64_t memory_left() {
    size_t left = 0, total = 0;
    cuda::check(cudaMemGetInfo(&left, &total), "cudaMemGetInfo");
    return left;
}

}  // namespace kd::probe
