// What an all-reduce is measured against, and the traffic of more ranks than there are GPUs.
#include <dlfcn.h>

#include <map>
#include <mutex>
#include <vector>

#include "add_norm.h"
#include "comm.h"
#include "error.h"
#include "ops.h"
#include "probe_device.h"

namespace kd::probe {
namespace {

using namespace cuda;

constexpr int kBfloat16 = 9, kSum = 0;  // of nccl.h

template <class F>
F* nccl(const char* name) {
    static void* const library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    void* const found = library ? dlsym(library, name) : nullptr;
    if (!found) fail(KD_E_DEVICE, "there is no %s of NCCL to measure against: install nvidia-nccl-cu13", name);
    return reinterpret_cast<F*>(found);
}

void check_nccl(int status, const char* what) {
    if (status) fail(KD_E_FATAL, "%s: NCCL reported %d", what, status);
}

// A communicator of the bound rank; the first rank to ask makes those of all.
void* communicator() {
    static std::mutex mutex;
    static std::map<device::Group*, std::vector<void*>> made;
    device::Context& c = bound();
    std::lock_guard lock(mutex);
    std::vector<void*>& all = made[&c.group];
    if (all.empty()) {
        std::vector<int> devices;
        for (const auto& of : c.group.contexts) devices.push_back(of->device);
        all.resize(devices.size());
        check_nccl(nccl<int(void**, int, const int*)>("ncclCommInitAll")(all.data(), static_cast<int>(all.size()),
                                                                         devices.data()),
                   "ncclCommInitAll");
        check(cudaSetDevice(c.device), "cudaSetDevice");
    }
    return all[static_cast<size_t>(c.rank)];
}

}  // namespace

void vendor_add_norm(Rows h, Dev<float> x, Rows y, Vec w, int rows, int width, float eps) {
    KD_CHECK(y.stride == width);
    bf16* const p = raw(y).p;
    check_nccl(nccl<int(const void*, void*, size_t, int, int, void*, cudaStream_t)>("ncclAllReduce")(
                   p, p, static_cast<size_t>(rows) * static_cast<size_t>(width), kBfloat16, kSum, communicator(),
                   bound().stream),
               "ncclAllReduce");
    add_norm_alone({h, x, y, w, rows, width, eps});
}

// Seven peers are one GPU: what is sent to the k-th of them lands where that GPU expects what its own k-th one sends.
void add_norm_as_of_eight(Rows h, Dev<float> x, Rows y, Vec w, int rows, int width, float eps, bool two_shots) {
    constexpr int kRanks = 8;
    const device::Context& c = bound();
    if (c.group.tp != 2) fail(KD_E_INVALID, "the traffic of eight ranks is that of two GPUs: give tp 2");
    const size_t bytes = sent_bytes(rows, width, kRanks, two_shots);
    const Peers two = peers(bytes);
    Peers eight = two;
    eight.ranks = kRanks;
    eight.rank = 0;
    const int me = two.rank, other = 1 - two.rank;
    eight.box[0] = two.box[me];
    eight.memory[0] = two.memory[me];
    for (size_t k = 1; k < kRanks; k++) {
        eight.box[k] = two.box[other];
        eight.memory[k] = two.memory[other] + k * (bytes / kRanks);
    }
    add_norm_among(eight, {h, x, y, w, rows, width, eps}, two_shots);
}

size_t two_shots_from() { return cuda::two_shots_from() == SIZE_MAX ? 0 : cuda::two_shots_from(); }

}  // namespace kd::probe
