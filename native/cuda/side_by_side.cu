// Work on two streams between two points of the rank's own: in a recorded round, two branches of the graph.
#include "launch.h"
#include "ops.h"

namespace kd::ops {

namespace {

using namespace cuda;

// What is given now comes after all that `before` was given; the kernel given next does not start early, since an early start
// waits for one kernel alone.
void follow(device::Context& c, cudaStream_t stream, cudaStream_t before, cudaEvent_t reached) {
    check(cudaEventRecord(reached, before), "cudaEventRecord");
    check(cudaStreamWaitEvent(stream, reached), "cudaStreamWaitEvent");
    c.waits = true;
}

}  // namespace

void side_by_side(const std::function<void()>& one, const std::function<void()>& other) {
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
