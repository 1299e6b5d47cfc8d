#include "probe_device.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>

#include "device.h"
#include "error.h"
#include "threads.h"

namespace kd::probe {

using Clock = std::chrono::steady_clock;

struct Stopwatch::Marks {
    Clock::time_point start;
};

Stopwatch::Stopwatch() : marks_(std::make_unique<Marks>()) {}
Stopwatch::~Stopwatch() = default;
void Stopwatch::start() { marks_->start = Clock::now(); }
double Stopwatch::stop_us() { return std::chrono::duration<double, std::micro>(Clock::now() - marks_->start).count(); }

void read_all(const void* p, size_t bytes) {
    constexpr size_t kPiece = size_t{1} << 20;
    cpu::parallel_for(static_cast<int>((bytes + kPiece - 1) / kPiece), 1, [&](int begin, int end) {
        const auto* at = static_cast<const char*>(p) + static_cast<size_t>(begin) * kPiece;
        const char* last = static_cast<const char*>(p) + std::min(bytes, static_cast<size_t>(end) * kPiece);
        typedef uint64_t Words __attribute__((vector_size(64)));
        Words sum{};
        for (; at + sizeof sum <= last; at += sizeof sum) {
            Words words;
            std::memcpy(&words, at, sizeof words);
            sum ^= words;
        }
        asm volatile("" : : "m"(sum));  // keeps the reads alive
    });
}

void break_device() { fail(KD_E_FATAL, "a planted failure of the device"); }

void tile(void* to, size_t bytes, const void* pattern, size_t pattern_bytes) {
    for (size_t at = 0; at < bytes; at += pattern_bytes)
        std::memcpy(static_cast<char*>(to) + at, pattern, std::min(pattern_bytes, bytes - at));
}

uint64_t memory_left() { return device::memory_free(); }

void vendor_add_norm(Rows, Dev<float>, Rows, Vec, int, int, float) {
    fail(KD_E_DEVICE, "nobody sells an all-reduce for threads: measure this on device cuda");
}

void add_norm_as_of_eight(Rows, Dev<float>, Rows, Vec, int, int, float, bool) {
    fail(KD_E_DEVICE,
         "ranks on the CPU share one memory, so there is no traffic to imitate: measure this on device cuda");
}

size_t two_shots_from() { return 0; }

}  // namespace kd::probe
