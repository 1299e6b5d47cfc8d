// From how much on an all-reduce among peers takes two shots: measured on the GPUs and links that are there. Two shots move fewer
// bytes where there are more than two ranks, and take longer to begin; the bits are the same.
#include <algorithm>
#include <cstdint>
#include <iterator>
#include <memory>

#include "add_norm.h"
#include "comm.h"
#include "device.h"

namespace kd::cuda {
namespace {

constexpr size_t kNever = SIZE_MAX;
constexpr int kRows[] = {1, 2, 4, 8, 16, 32, 64, 128}, kMostRows = 128;
constexpr int kWidth = 7168;
constexpr int kCalls = 16, kPlays = 5;

struct Event {
    cudaEvent_t e = nullptr;
    Event() { check(cudaEventCreate(&e), "cudaEventCreate"); }
    ~Event() { cudaEventDestroy(e); }
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;
    void record() { check(cudaEventRecord(e, bound().stream), "cudaEventRecord"); }
};

// What is summed, all zero.
struct Operands {
    Rows h = device::alloc_rows(kMostRows, kWidth), y = device::alloc_rows(kMostRows, kWidth);
    Dev<float> x = device::alloc_array<float>(size_t{kMostRows} * kWidth), w = device::alloc_array<float>(kWidth);
    ~Operands() {
        device::release_rows(h);
        device::release_rows(y);
        device::release(raw(x));
        device::release(raw(w));
    }
};

// Milliseconds of the fastest play of kCalls, as this rank's GPU sees it. [collective]
float time_of(const Operands& on, int rows, bool two_shots) {
    const uint64_t key = (uint64_t{1} << 63) + static_cast<uint64_t>(2 * rows + two_shots);
    const auto calls = [&] {
        if (!bound().recording) return;  // peers meet in what is recorded: a first run has nothing to bring to its size
        for (int i = 0; i < kCalls; i++)
            add_norm_among(peers(sent_bytes(rows, kWidth, tp(), two_shots)),
                           {on.h, on.x, on.y, on.w, rows, kWidth, 1e-5f}, two_shots);
    };
    for (int i = 0; i < 3; i++) device::replay(key, calls);
    Event began, ended;
    float best = 1e30f;
    for (int i = 0; i < kPlays; i++) {
        began.record();
        device::replay(key, calls);
        ended.record();
        check(cudaEventSynchronize(ended.e), "cudaEventSynchronize");
        float took = 0;
        check(cudaEventElapsedTime(&took, began.e, ended.e), "cudaEventElapsedTime");
        best = std::min(best, took);
    }
    return best;
}

}  // namespace
}  // namespace kd::cuda

namespace kd::device {

void measure_transport() {
    using namespace cuda;
    Context& c = bound();
    Group& g = c.group;
    if (g.transport != Transport::peers || g.asked) return;
    const size_t most = std::max(sent_bytes(kMostRows, kWidth, g.tp, false), sent_bytes(kMostRows, kWidth, g.tp, true));
    peers(most);
    const auto on = std::make_unique<Operands>();
    check(cudaStreamSynchronize(c.stream), "cudaStreamSynchronize");
    size_t from = kNever;
    bool pays = true;  // from here on
    for (int i = static_cast<int>(std::size(kRows)) - 1; i >= 0; i--) {
        const float one = time_of(*on, kRows[i], false), two = time_of(*on, kRows[i], true);
        pays = pays && two < one;
        if (pays) from = static_cast<size_t>(kRows[i]) * kWidth;
    }
    if (c.rank == 0) g.two_shots_from = from;
    g.meeting.arrive(c.rank, g.tp, kSpins);
    forget();
}

}  // namespace kd::device
