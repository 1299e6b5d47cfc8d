#include "comm.h"

#include <cstring>

#include "device_context.h"
#include "error.h"

namespace kd::cpu {

int rank() { return bound().rank; }
int tp() { return bound().group.tp; }

void* share_buffer(size_t bytes) {
    device::Context& c = bound();
    return c.shared[c.turn & 1].get(bytes);
}

Shared share_filled(size_t bytes) {
    device::Context& c = bound();
    device::Group& g = c.group;
    const uint32_t turn = c.turn++ & 1;
    g.given[turn][c.rank].p = c.shared[turn].get(bytes);
    g.given[turn][c.rank].bytes = bytes;
    g.meeting.arrive(c.rank, g.tp, g.spins);
    Shared all{};
    for (int r = 0; r < g.tp; r++) {
        if (g.given[turn][r].bytes != bytes) {
            g.meeting.abort();
            fail(KD_E_FATAL, "ranks %d and %d gave %zu and %zu bytes to one collective: they are not at the same step",
                 c.rank, r, bytes, g.given[turn][r].bytes);
        }
        all.of_rank[r] = g.given[turn][r].p;
    }
    return all;
}

Shared share(const void* mine, size_t bytes) {
    void* to = share_buffer(bytes);
    if (bytes) memcpy(to, mine, bytes);
    return share_filled(bytes);
}

void all_gather(void* all, const void* mine, size_t bytes) {
    if (bytes == 0 && tp() == 1) return;
    char* to = static_cast<char*>(all);
    if (tp() == 1) {
        if (to != mine) memmove(to, mine, bytes);
        return;
    }
    const Shared given = share(mine, bytes);
    for (int r = 0; r < tp(); r++) memcpy(to + static_cast<size_t>(r) * bytes, given.of_rank[r], bytes);
}

}  // namespace kd::cpu
