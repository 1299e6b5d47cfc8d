// What a rank owns on a GPU.
#pragma once

#include <cuda_runtime.h>

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "device.h"
#include "error.h"
#include "meeting.h"
#include "nccl.h"

namespace kd::cuda {

struct Mailbox;  // peers.h
struct Watchword;

// Throws Error(KD_E_FATAL) unless `status` is cudaSuccess; `what` names the kernel or call. Errors of kernels come late: the
// sentence names where it was noticed.
void check(cudaError_t status, const char* what);

// Device memory that grows and never shrinks; a step that has run once allocates nothing, so it can be captured.
class Scratch {
  public:
    Scratch() = default;
    ~Scratch();
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    void* get(size_t bytes);  // 256-byte aligned, zero when new, valid until the next get() of more
  private:
    std::vector<void*> all_;  // earlier ones may still be read by another rank
    size_t size_ = 0;
};

// Memory of one rank that the others know the place of: every rank asks for the same sizes in the same order.
struct Region {
    Scratch memory;
    size_t bytes = 0;
    void* of_rank[KD_MAX_TP] = {};
};

enum class Transport { host, peers, nccl };  // comm.h

// One a use, so that two in one op never share. Ops follow one another on the rank's stream and may use the same.
enum class Use {
    linear,
    moe_lists,
    moe_rows,
    moe_inter,
    moe_out,
    moe_told,
    moe_results,
    attention,
    vocab,
    all_reduce,
    sums,
    count
};

}  // namespace kd::cuda

namespace kd::device {

class Context {
  public:
    Context(Group& group, int rank, int device);
    ~Context();

    Group& group;
    const int rank;
    const int device;  // of the CUDA runtime
    int processors = 0;
    int major = 0;  // of the compute capability
    cudaStream_t stream = nullptr;
    cuda::Scratch scratch[static_cast<int>(cuda::Use::count)];
    bool overlaps = false;  // kernels may start before the one before them has ended,
    bool waits = false;     // but not the next: another stream's work is before it, too
    // side_by_side()
    cudaStream_t side = nullptr;
    cudaEvent_t forked = nullptr, joined = nullptr;
    // comm.h
    cuda::Scratch shared[2];
    cudaEvent_t filled[2] = {};
    uint32_t turn = 0, told = 0;
    cuda::Scratch gathered[2];   // with nccl
    cuda::Region shown[2], met;  // with peers: of ops that fill it themselves, in turn; of kernels that meet
    cuda::Mailbox* box = nullptr;
    // replay(): a step's first run, by key, is not recorded; it brings scratch memory to its size.
    std::unordered_map<uint64_t, cudaGraphExec_t> recorded;
    bool recording = false;
    cudaGraphConditionalHandle loop = 0;  // of the loop() that is being recorded
    Body body;

    void forget();
};

class Group {
  public:
    explicit Group(const Options& options);
    ~Group();

    int tp = 1;
    std::string name;  // "sm_90"
    Meeting meeting;
    struct alignas(64) Given {
        const void* p = nullptr;
        size_t bytes = 0;
    } given[2][KD_MAX_TP];
    cuda::Transport transport = cuda::Transport::host;
    bool asked = false;         // for that one, by name
    size_t two_shots_from = 0;  // with peers: elements of an all-reduce from which two shots are taken
    int most_waiting = 1;       // with peers: blocks of one rank that may wait for other ranks at once
    cuda::Watchword* word = nullptr;
    std::unique_ptr<cuda::Nccl> nccl;
    std::vector<std::unique_ptr<Context>> contexts;

  private:
    void choose_transport(const char* wanted, int devices_used);
    void open_mailboxes();
};

}  // namespace kd::device

namespace kd::cuda {

device::Context& bound();  // throws Error(KD_E_FATAL) if the thread is not bound

template <class T>
T* scratch(Use use, size_t n) {
    return static_cast<T*>(bound().scratch[static_cast<int>(use)].get(n * sizeof(T)));
}

}  // namespace kd::cuda
