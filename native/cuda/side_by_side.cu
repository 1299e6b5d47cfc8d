// Work on two streams between two points of the rank's own: in a recorded round, two branches of the graph.
#include "launch.h"
#include "ops.h"

namespace kd::ops {

namespace {

using namespace cuda;

// A step of few rows is all latency, and two chains at once are shorter than one after the other. With more rows the two are in
// each other's way: of 64 rows of a rank of Kimi K2 a layer took 11 us longer (SPEED.md).
constexpr int kFewRows = 16;

// What is given now comes after all that `before` was given; the kernel given next does not start early, since an early start
// waits for one kernel alone.
void follow(device::Context& c, cudaStream_t stream, cudaStream_t before, cudaEvent_t reached) {
    check(cudaEventRecord(reached, before), "cudaEventRecord");
    check(cudaStreamWaitEvent(stream, reached), "cudaStreamWaitEvent");
    c.waits = true;
}

}  // namespace

void side_by_side(Count n_rows, const std::function<void()>& one, const std::function<void()>& other) {
    if (n_rows.most > kFewRows) {
        one();
        return other();
    }
    device::Context& c = bound();
    follow(c, c.side, c.stream, c.forked);
    std::swap(c.stream, c.side);
    struct Back {
        device::Context& c;
        ~Back() {
            std::swap(c.stream, c.side);
            c.waits = false;
        }
    };
    {
        const Back back{c};
        one();
    }
    other();
    follow(c, c.stream, c.side, c.joined);
}

}  // namespace kd::ops
