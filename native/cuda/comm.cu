#include "comm.h"

#include "device_context.h"

namespace kd::cuda {

namespace {
constexpr int kSpins = 1000;  // of a rank's thread waiting for the others
}

int rank() { return bound().rank; }
int tp() { return bound().group.tp; }

void* share_buffer(size_t bytes) {
    device::Context& c = bound();
    // Both, so that a step that has run once finds its memory whichever is next.
    void* const p[2] = {c.shared[0].get(bytes), c.shared[1].get(bytes)};
    return p[c.turn & 1];
}

Shared share_filled(size_t bytes) {
    device::Context& c = bound();
    device::Group& g = c.group;
    const uint32_t turn = c.turn++ & 1;
    g.given[turn][c.rank] = {c.shared[turn].get(bytes), bytes};
    Shared all{};
    if (g.tp > 1) {
        check(cudaEventRecord(c.filled[turn], c.stream), "cudaEventRecord");
        g.meeting.arrive(c.rank, g.tp, kSpins);
    }
    for (int r = 0; r < g.tp; r++) {
        if (g.given[turn][r].bytes != bytes) {
            g.meeting.abort();
            fail(KD_E_FATAL, "ranks %d and %d gave %zu and %zu bytes to one collective: they are not at the same step",
                 c.rank, r, bytes, g.given[turn][r].bytes);
        }
        all.of_rank[r] = g.given[turn][r].p;
        if (r != c.rank) check(cudaStreamWaitEvent(c.stream, g.contexts[r]->filled[turn]), "cudaStreamWaitEvent");
    }
    return all;
}

}  // namespace kd::cuda
