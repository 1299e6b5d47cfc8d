// What a rank owns on the CPU.
#pragma once

#include <memory>
#include <vector>

#include "comm.h"
#include "device.h"
#include "meeting.h"
#include "threads.h"

namespace kd::cpu {

struct Kernels;  // kernels.h: the inner loops of one instruction set

// Memory that grows and never shrinks; a step that has run once allocates nothing.
class Scratch {
  public:
    Scratch() = default;
    ~Scratch();
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    void* get(size_t bytes);  // 64-byte aligned, contents undefined, valid until the next get()
  private:
    void* p_ = nullptr;
    size_t size_ = 0;
};

// One a use, so that two in one op never share.
enum class Use { rows, moe_lists, moe_rows, moe_inter, moe_out, count };

}  // namespace kd::cpu

namespace kd::device {

class Context {
  public:
    Context(Group& group, int rank, int threads, int awake, int spins);

    Group& group;
    const int rank;
    cpu::Scratch scratch[static_cast<int>(cpu::Use::count)];
    cpu::Scratch shared[2];  // comm.h's two buffers
    uint32_t turn = 0;       // which of them is next
    bool looping = false;    // a loop() runs, and ops::end_round wants another round
    Body body;
    std::unique_ptr<cpu::Pool> pool;  // last: its threads stop before the rest goes
};

class Group {
  public:
    explicit Group(const Options& options);

    int tp = 1;
    int threads = 1;
    int isa = KD_ISA_PLAIN;
    const cpu::Kernels* kernels = nullptr;
    int spins = 0;  // of a rank waiting for the others
    Meeting meeting;
    struct alignas(64) Given {
        const void* p = nullptr;
        size_t bytes = 0;
    } given[2][KD_MAX_TP];
    std::vector<std::unique_ptr<Context>> contexts;
};

}  // namespace kd::device

namespace kd::cpu {

device::Context& bound();  // throws Error(KD_E_FATAL) if the thread is not bound

inline const Kernels& kernels() { return *bound().group.kernels; }

// The bound rank's, for use by the thread that calls the op and by regions it starts.
template <class T>
T* scratch(Use use, size_t n) {
    return static_cast<T*>(bound().scratch[static_cast<int>(use)].get(n * sizeof(T)));
}

// The calling thread's own, for use inside a region.
Scratch& thread_scratch();
template <class T>
T* thread_scratch(size_t n) {
    return static_cast<T*>(thread_scratch().get(n * sizeof(T)));
}

}  // namespace kd::cpu
