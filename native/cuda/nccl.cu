#include "nccl.h"

#include <dlfcn.h>

#include <type_traits>

#include "device_context.h"
#include "error.h"

namespace kd::cuda {

namespace {

// What of nccl.h is used; stable since NCCL 2.7.
using Comm = void*;
constexpr int kSuccess = 0, kInProgress = 7, kUint8 = 1;

struct Library {
    int (*CommInitAll)(Comm*, int, const int*);
    int (*CommAbort)(Comm);
    int (*GroupStart)();
    int (*GroupEnd)();
    int (*Send)(const void*, size_t, int, int, Comm, cudaStream_t);
    int (*Recv)(void*, size_t, int, int, Comm, cudaStream_t);
    int (*AllGather)(const void*, void*, size_t, int, Comm, cudaStream_t);
    const char* (*GetErrorString)(int);

    Library() {
        void* const found = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
        if (!found)
            fail(KD_E_DEVICE,
                 "these GPUs cannot read each other's memory, and libnccl.so.2 is not there (%s): install NCCL, from "
                 "the system or as nvidia-nccl-cu13 from PyPI, or use tp 1",
                 dlerror());
        const auto get = [&](auto& function, const char* name) {
            function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(found, name));
            if (!function) fail(KD_E_DEVICE, "libnccl.so.2 has no %s: install NCCL 2.7 or newer", name);
        };
        get(CommInitAll, "ncclCommInitAll");
        get(CommAbort, "ncclCommAbort");
        get(GroupStart, "ncclGroupStart");
        get(GroupEnd, "ncclGroupEnd");
        get(Send, "ncclSend");
        get(Recv, "ncclRecv");
        get(AllGather, "ncclAllGather");
        get(GetErrorString, "ncclGetErrorString");
    }
};

const Library& library() {
    static const Library loaded;
    return loaded;
}

}  // namespace

void Nccl::check(int status, const char* what) const {
    if (status == kSuccess || status == kInProgress) return;
    fail(KD_E_FATAL, "NCCL reported %s at %s: close the engine and open it again", library().GetErrorString(status),
         what);
}

void* Nccl::comm(int rank) const {
    void* const found = ranks_[static_cast<size_t>(rank)].load(std::memory_order_acquire);
    if (!found) fail(KD_E_FATAL, "another rank failed, so this rank left NCCL: close the engine and open it again");
    return found;
}

Nccl::Nccl(const std::vector<int>& devices) : n_(static_cast<int>(devices.size())) {
    std::array<Comm, KD_MAX_TP> made{};
    check(library().CommInitAll(made.data(), n_, devices.data()), "ncclCommInitAll");
    for (size_t r = 0; r < devices.size(); r++) ranks_[r].store(made[r], std::memory_order_release);
}

// Not ncclCommDestroy, which waits for the other ranks.
Nccl::~Nccl() { abort(); }

void Nccl::abort() {
    for (auto& comm : ranks_)
        if (void* const mine = comm.exchange(nullptr)) library().CommAbort(mine);
}

void Nccl::all_gather(void* all, const void* mine, size_t bytes, int rank, cudaStream_t stream) {
    check(library().AllGather(mine, all, bytes, kUint8, comm(rank), stream), "ncclAllGather");
}

void Nccl::all_to_all(void* mine, const void* parts, size_t bytes, int rank, cudaStream_t stream) {
    Comm const to = comm(rank);
    check(library().GroupStart(), "ncclGroupStart");
    for (int peer = 0; peer < n_; peer++) {
        const size_t at = static_cast<size_t>(peer) * bytes;
        check(library().Send(static_cast<const char*>(parts) + at, bytes, kUint8, peer, to, stream), "ncclSend");
        check(library().Recv(static_cast<char*>(mine) + at, bytes, kUint8, peer, to, stream), "ncclRecv");
    }
    check(library().GroupEnd(), "ncclGroupEnd");
}

}  // namespace kd::cuda
