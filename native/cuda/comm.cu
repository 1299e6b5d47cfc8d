#include "comm.h"

#include "launch.h"

namespace kd::cuda {

namespace {

// Every rank's memory of `bytes`, by a meeting on the host.
Shared tell_all(void* mine, size_t bytes) {
    device::Context& c = bound();
    device::Group& g = c.group;
    const uint32_t turn = c.told++ & 1;
    g.given[turn][c.rank] = {mine, bytes};
    if (g.tp > 1) g.meeting.arrive(c.rank, g.tp, kSpins);
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

// The region with room for `bytes`, each of them `value` when new. What was recorded with a smaller one goes on using that.
Region& grown(Region& region, size_t bytes, int value) {
    if (bytes <= region.bytes) return region;
    device::Context& c = bound();
    KD_CHECK(!c.recording);
    const size_t room = (bytes + bytes / 4 + 511) / 512 * 512;
    void* const mine = region.memory.get(room);
    check(cudaMemsetAsync(mine, value, room, c.stream), "cudaMemset");
    check(cudaStreamSynchronize(c.stream), "cudaMemset");  // before others write there
    const Shared all = tell_all(mine, room);
    for (int r = 0; r < c.group.tp; r++) region.of_rank[r] = const_cast<void*>(all.of_rank[r]);
    region.bytes = room;
    return region;
}

__global__ void meet_kernel(const __grid_constant__ Peers p) {
    const uint32_t turn = p.next_turn();
    meet(p, turn);
    if (threadIdx.x == 0) ended_here(p, turn);
}

// Work of every rank given before is done before work of any rank given after begins.
void meet_on_device() { launch<meet_kernel>(1, 32, peers(0)); }

Shared all_of(const Region& region) {
    Shared all{};
    for (int r = 0; r < tp(); r++) all.of_rank[r] = region.of_rank[r];
    return all;
}

}  // namespace

int rank() { return bound().rank; }
int tp() { return bound().group.tp; }
Transport transport() {
    const device::Context& c = bound();
    return waits_to_be_recorded() ? Transport::host : c.group.transport;
}
bool waits_to_be_recorded() {
    const device::Context& c = bound();
    return c.group.transport == Transport::peers && !c.group.asked && !c.recording;
}
int most_waiting() { return bound().group.most_waiting; }
size_t two_shots_from() { return bound().group.two_shots_from; }

void all_to_all(void* mine, const void* parts, size_t bytes) {
    device::Context& c = bound();
    c.group.nccl->all_to_all(mine, parts, bytes, c.rank, c.stream);
}
void all_gather(void* all, const void* mine, size_t bytes) {
    device::Context& c = bound();
    c.group.nccl->all_gather(all, mine, bytes, c.rank, c.stream);
}

Peers peers(size_t bytes) {
    device::Context& c = bound();
    device::Group& g = c.group;
    Peers p{c.rank, g.tp, {}, {}, 0, g.word};
    if (bytes) {
        const Region& region = grown(c.met, 2 * ((bytes + 255) / 256 * 256), 0xff);  // kNothing
        p.half = region.bytes / 2;
        for (int r = 0; r < g.tp; r++) p.memory[r] = static_cast<char*>(region.of_rank[r]);
    }
    for (int r = 0; r < g.tp; r++) p.box[r] = g.contexts[static_cast<size_t>(r)]->box;
    return p;
}

void* share_buffer(size_t bytes) {
    device::Context& c = bound();
    if (c.group.tp > 1 && waits_to_be_recorded())
        for (Region& region : c.shown) grown(region, bytes, 0);
    if (c.group.tp > 1 && transport() == Transport::peers) {
        void* const mine = grown(c.shown[c.turn & 1], bytes, 0).of_rank[c.rank];
        meet_on_device();  // everybody has read what was there, however often this is played
        return mine;
    }
    // Both, so that a step that has run once finds its memory whichever is next.
    void* const p[2] = {c.shared[0].get(bytes), c.shared[1].get(bytes)};
    return p[c.turn & 1];
}

Shared share_filled(size_t bytes) {
    device::Context& c = bound();
    device::Group& g = c.group;
    if (g.tp > 1 && transport() == Transport::peers) {
        meet_on_device();
        return all_of(c.shown[c.turn++ & 1]);
    }
    const uint32_t turn = c.turn++ & 1;
    void* const mine = c.shared[turn].get(bytes);
    if (g.tp > 1 && g.transport == Transport::nccl) {
        char* const all = static_cast<char*>(c.gathered[turn].get(bytes * static_cast<size_t>(g.tp)));
        all_gather(all, mine, bytes);
        Shared shared{};
        for (int r = 0; r < g.tp; r++) shared.of_rank[r] = all + static_cast<size_t>(r) * bytes;
        return shared;
    }
    if (g.tp > 1) check(cudaEventRecord(c.filled[turn], c.stream), "cudaEventRecord");
    const Shared all = tell_all(mine, bytes);
    for (int r = 0; r < g.tp; r++)
        if (r != c.rank)
            check(cudaStreamWaitEvent(c.stream, g.contexts[static_cast<size_t>(r)]->filled[turn]),
                  "cudaStreamWaitEvent");
    return all;
}

}  // namespace kd::cuda
