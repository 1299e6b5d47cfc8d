// What measuring needs of a device beside device.h. One implementation a backend, linked into the test libraries only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "types.h"

namespace kd::probe {

// Time that work of the bound rank takes, as its device sees it.
class Stopwatch {
  public:
    Stopwatch();
    ~Stopwatch();
    void start();
    double stop_us();  // waits for what was called since start()

  private:
    struct Marks;
    std::unique_ptr<Marks> marks_;
};

// Read `bytes` (a multiple of 16) of device memory once, as fast as can be: what other reading is measured against.
void read_all(const void* p, size_t bytes);

// The bound rank's device fails, as it would with work that touches memory that is not there: throws Error(KD_E_FATAL).
void break_device();

// Fill device memory with a pattern that lies in device memory, again and again.
void tile(void* to, size_t bytes, const void* pattern, size_t pattern_bytes);

// Bytes that the bound rank's device could still give.
uint64_t memory_left();

// What ops::add_norm does among ranks, by the all-reduce that the device's vendor has, in y's own precision, and a kernel for the
// rest. Rows are dense. Throws Error(KD_E_DEVICE) where there is none.
void vendor_add_norm(Rows h, Dev<float> x, Rows y, Vec w, int rows, int width, float eps);

// The bytes and flags that each of eight ranks exchanges with seven others, between two; the sums mean nothing. Throws
// Error(KD_E_DEVICE) where ranks have no memory of their own.
void add_norm_as_of_eight(Rows h, Dev<float> x, Rows y, Vec w, int rows, int width, float eps, bool two_shots);

// Elements of an all-reduce from which the bound rank's group takes two shots, or 0: never.
size_t two_shots_from();

}  // namespace kd::probe
