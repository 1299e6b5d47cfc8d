#include "device.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>

#include "comm.h"
#include "device_context.h"
#include "error.h"
#include "launch.h"
#include "mma.h"
#include "raw.h"

#ifndef KD_CUDA_ARCHS
#error "build/make.sh says which architectures this is compiled for"
#endif

namespace kd::device {

namespace {

thread_local Context* bound_context = nullptr;

// What alloc() has given, by address: the GPU's own account includes other processes.
class Allocations {
  public:
    void add(void* p, size_t bytes) {
        std::lock_guard lock(mutex_);
        bytes_[p] = bytes;
        total_ += bytes;
    }
    void remove(void* p) {
        std::lock_guard lock(mutex_);
        const auto found = bytes_.find(p);
        if (found == bytes_.end()) return;
        total_ -= found->second;
        bytes_.erase(found);
    }
    uint64_t total() {
        std::lock_guard lock(mutex_);
        return total_;
    }

  private:
    std::mutex mutex_;
    std::unordered_map<void*, size_t> bytes_;
    uint64_t total_ = 0;
} allocations;

// What the library has code for is asked by looking for this.
__global__ void any_kernel() {}

// What a kernel's fault makes every later call of the process report.
bool is_fault(cudaError_t status) { return status >= cudaErrorIllegalAddress && status <= cudaErrorLaunchFailure; }

int count_devices() {
    int n = 0;
    const cudaError_t status = cudaGetDeviceCount(&n);
    if (is_fault(status)) cuda::check(status, "cudaGetDeviceCount");
    int driver = 0;
    cudaDriverGetVersion(&driver);
    if (status == cudaErrorInsufficientDriver && driver > 0)
        fail(KD_E_DEVICE, "the NVIDIA driver here knows CUDA %d.%d: this library needs %d.%d, install a newer driver",
             driver / 1000, driver % 1000 / 10, CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
    if (status != cudaSuccess || n == 0)
        fail(KD_E_DEVICE, "no NVIDIA GPU can be used here (%s): install a GPU and its driver, or use device cpu",
             driver == 0             ? "no driver is loaded"
             : status != cudaSuccess ? cudaGetErrorString(status)
                                     : "none visible");
    return n;
}

// Refuses a device this library has no machine code for.
std::string open_device(int device) {
    cudaDeviceProp prop;
    cuda::check(cudaGetDeviceProperties(&prop, device), "cudaGetDeviceProperties");
    cuda::check(cudaSetDevice(device), "cudaSetDevice");
    const std::string name = "sm_" + std::to_string(prop.major) + std::to_string(prop.minor);
    cudaFuncAttributes found;
    if (const cudaError_t status = cudaFuncGetAttributes(&found, any_kernel); status != cudaSuccess) {
        if (is_fault(status)) cuda::check(status, "cudaFuncGetAttributes");
        cudaGetLastError();
        fail(KD_E_DEVICE,
             "GPU %d (%s, %s) is not among those this library has code for (%s): build it with "
             "`make cuda ARCHS=...` for this GPU",
             device, prop.name, name.c_str(), KD_CUDA_ARCHS);
    }
    return name;
}

}  // namespace

Context::Context(Group& group, int rank, int device) : group(group), rank(rank), device(device) {
    cuda::check(cudaSetDevice(device), "cudaSetDevice");
    cuda::check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
    cuda::check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
    overlaps = major >= 9;
    cuda::check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    cuda::check(cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking), "cudaStreamCreate");
    for (cudaEvent_t* e : {&filled[0], &filled[1], &forked, &joined})
        cuda::check(cudaEventCreateWithFlags(e, cudaEventDisableTiming), "cudaEventCreate");
}

Context::~Context() {
    cudaSetDevice(device);
    cudaStreamSynchronize(stream);
    forget();
    for (cudaEvent_t e : {filled[0], filled[1], forked, joined}) cudaEventDestroy(e);
    cudaFree(box);
    cudaStreamDestroy(side);
    cudaStreamDestroy(stream);
}

void Context::forget() {
    for (auto& [key, graph] : recorded)
        if (graph) cudaGraphExecDestroy(graph);
    recorded.clear();
}

Group::Group(const Options& options) : tp(options.tp), meeting(options.records) {
    if (tp < 1 || tp > KD_MAX_TP) fail(KD_E_INVALID, "tp is %d: give 1 .. %d ranks", tp, KD_MAX_TP);
    if (options.isa != KD_ISA_AUTO)
        fail(KD_E_INVALID, "isa is %d: instruction sets are chosen on device cpu only, give KD_ISA_AUTO", options.isa);
    const int devices = count_devices();
    if (tp > devices && !options.share_devices)
        fail(KD_E_DEVICE,
             "tp is %d and this machine shows %d GPU%s: give tp at most %d, or share_devices to put several "
             "ranks on one GPU",
             tp, devices, devices == 1 ? "" : "s", devices);
    const int used = std::min(tp, devices);
    for (int d = 0; d < used; d++) {
        const std::string found = open_device(d);
        if (d > 0 && found != name)
            fail(KD_E_DEVICE,
                 "GPU 0 is %s and GPU %d is %s: the ranks of one model need GPUs of one kind, choose them "
                 "with CUDA_VISIBLE_DEVICES",
                 name.c_str(), d, found.c_str());
        name = found;
    }
    for (int r = 0; r < tp; r++) contexts.push_back(std::make_unique<Context>(*this, r, r % devices));
    choose_transport(options.transport, used);
}

Group::~Group() {
    contexts.clear();  // their streams may still read what follows
    if (word) cudaFreeHost(word);
}

namespace {

// Whether each of the first `used` GPUs can read the memory of every other one, which they are then told to allow.
bool open_peers(int used) {
    for (int d = 0; d < used; d++)
        for (int peer = 0; peer < used; peer++) {
            int can = 1;
            if (peer != d) cuda::check(cudaDeviceCanAccessPeer(&can, d, peer), "cudaDeviceCanAccessPeer");
            if (!can) return false;
        }
    for (int d = 0; d < used; d++)
        for (int peer = 0; peer < used; peer++) {
            if (peer == d) continue;
            cuda::check(cudaSetDevice(d), "cudaSetDevice");
            const cudaError_t status = cudaDeviceEnablePeerAccess(peer, 0);
            if (status == cudaErrorPeerAccessAlreadyEnabled)
                cudaGetLastError();
            else
                cuda::check(status, "cudaDeviceEnablePeerAccess");
        }
    return true;
}

}  // namespace

void Group::choose_transport(const char* wanted, int used) {
    using cuda::Transport;
    if (tp == 1) return;
    const std::string_view name = wanted ? wanted : "";
    const bool peers = name != "nccl" && open_peers(used), shared = used < tp;
    asked = wanted != nullptr;
    if (name == "host" || name == "one_shot" || name == "two_shots") {
        if (!peers)
            fail(KD_E_DEVICE, "transport %s needs GPUs that can read each other's memory: give nccl, or none", wanted);
        transport = name == "host" ? Transport::host : Transport::peers;
    } else if (name == "nccl") {
        transport = Transport::nccl;
    } else if (wanted) {
        fail(KD_E_INVALID, "there is no transport %s: give host, one_shot, two_shots or nccl", wanted);
    } else {
        // Ranks that share a GPU are for tests: a kernel of one that waits could keep the other's from being loaded.
        transport = !peers ? Transport::nccl : shared ? Transport::host : Transport::peers;
    }
    if (transport == Transport::nccl) {
        if (shared) fail(KD_E_DEVICE, "transport nccl needs a GPU for each of the %d ranks", tp);
        std::vector<int> devices;
        for (const auto& c : contexts) devices.push_back(c->device);
        nccl = std::make_unique<cuda::Nccl>(devices);
    }
    if (transport != Transport::peers) return;
    two_shots_from = name == "two_shots" ? 0 : SIZE_MAX;  // measure_transport() may change it
    const int ranks_a_device = (tp + used - 1) / used;
    most_waiting = contexts.front()->processors / ranks_a_device;
    for (const auto& c : contexts) {
        most_waiting = std::min(most_waiting, c->processors / ranks_a_device);
        if (shared) c->overlaps = false;  // kernels that are early may hold the places another rank's kernel needs
    }
    most_waiting = std::max(most_waiting, 1);
    open_mailboxes();
}

void Group::open_mailboxes() {
    void* p = nullptr;
    cuda::check(cudaHostAlloc(&p, sizeof *word, cudaHostAllocPortable | cudaHostAllocMapped), "cudaHostAlloc");
    word = new (p) cuda::Watchword{};
    for (const auto& c : contexts) {
        cuda::check(cudaSetDevice(c->device), "cudaSetDevice");
        cuda::check(cudaMalloc(&p, sizeof(cuda::Mailbox)), "cudaMalloc");
        c->box = static_cast<cuda::Mailbox*>(p);
        cuda::check(cudaMemsetAsync(p, 0, sizeof(cuda::Mailbox), c->stream), "cudaMemset");
        cuda::check(cudaStreamSynchronize(c->stream), "cudaMemset");
    }
}

std::shared_ptr<Group> open_group(const Options& options) { return std::make_shared<Group>(options); }

Context* context(Group& group, int rank) {
    KD_CHECK(rank >= 0 && rank < group.tp);
    return group.contexts[static_cast<size_t>(rank)].get();
}

void bind(Context* context) {
    bound_context = context;
    if (context) cuda::check(cudaSetDevice(context->device), "cudaSetDevice");
}

void abort(Group& group) {
    group.meeting.abort();
    if (group.word) std::atomic_ref(group.word->stop).store(1, std::memory_order_release);
    if (group.nccl) group.nccl->abort();
}

const char* backend() { return "cuda"; }
const char* weight_layout() { return "cuda tiles 1"; }
const char* built_isas() { return KD_CUDA_ARCHS; }
const char* isa_name(const Group& group) { return group.name.c_str(); }
int thread_count(const Group& group) { return group.tp; }
size_t act_bytes() { return sizeof(cuda::bf16); }
uint64_t memory_used(const Group&) { return allocations.total(); }

uint64_t memory_free() { return UINT64_MAX; }

int most_rows() { return 640; }
const char* default_builder() { return "device"; }

void* alloc(size_t bytes) {
    Context& c = cuda::bound();
    void* p = nullptr;
    const cudaError_t status = cudaMalloc(&p, std::max<size_t>(bytes, 1));
    if (status == cudaErrorMemoryAllocation) {
        cudaGetLastError();
        size_t free = 0, total = 0;
        cudaMemGetInfo(&free, &total);
        fail(KD_E_NOMEM,
             "GPU %d has %zu MiB free of %zu MiB and %zu MiB are needed: use a smaller model, kv_bytes or "
             "max_rows, or more GPUs",
             c.device, free >> 20, total >> 20, (bytes >> 20) + 1);
    }
    cuda::check(status, "cudaMalloc");
    allocations.add(p, bytes);
    cuda::check(cudaMemsetAsync(p, 0, std::max<size_t>(bytes, 1), c.stream), "cudaMemset");
    return p;
}

void release(void* p) {
    if (!p) return;
    allocations.remove(p);
    cudaFree(p);  // waits for work that may use it; an error of that work shows at the next call
}

void* alloc_shared(size_t bytes) {
    void* p = nullptr;
    // One address for both: every GPU we have code for shares the host's addresses.
    cuda::check(cudaHostAlloc(&p, std::max<size_t>(bytes, 1), cudaHostAllocPortable | cudaHostAllocMapped),
                "cudaHostAlloc");
    memset(p, 0, bytes);
    return p;
}

void release_shared(void* p) {
    if (p) cudaFreeHost(p);
}

Count known(Count count) { return count; }

namespace {

// The work that is given to the context's stream meanwhile, as a graph; with `loop`, as the body of a loop in it, which goes
// round for as long as a kernel sets c.loop.
class Recording {
  public:
    Recording(Context& c, bool loop) : c_(c) {
        cuda::check(cudaGraphCreate(&graph_, 0), "cudaGraphCreate");
        cudaGraph_t into = graph_;
        if (loop) {
            cuda::check(cudaGraphConditionalHandleCreate(&c.loop, graph_, 1, cudaGraphCondAssignDefault), "a loop");
            cudaGraphNodeParams node{};
            node.type = cudaGraphNodeTypeConditional;
            node.conditional.handle = c.loop;
            node.conditional.type = cudaGraphCondTypeWhile;
            node.conditional.size = 1;
            cudaGraphNode_t made;
            cuda::check(cudaGraphAddNode(&made, graph_, nullptr, nullptr, 0, &node), "cudaGraphAddNode");
            into = node.conditional.phGraph_out[0];
        }
        cuda::check(
            cudaStreamBeginCaptureToGraph(c.stream, into, nullptr, nullptr, 0, cudaStreamCaptureModeThreadLocal),
            "cudaStreamBeginCapture");
        c.recording = true;
    }
    ~Recording() {
        end();
        if (graph_) cudaGraphDestroy(graph_);
    }
    Recording(const Recording&) = delete;

    cudaGraphExec_t finish() {
        cuda::check(end(), "cudaStreamEndCapture");
        cudaGraphExec_t exec = nullptr;
        cuda::check(cudaGraphInstantiate(&exec, graph_, 0), "cudaGraphInstantiate");
        return exec;
    }

  private:
    cudaError_t end() {
        c_.loop = 0;
        if (!c_.recording) return cudaSuccess;
        c_.recording = false;
        cudaGraph_t captured = nullptr;
        return cudaStreamEndCapture(c_.stream, &captured);
    }

    Context& c_;
    cudaGraph_t graph_ = nullptr;
};

void run_body(Context& c, uint64_t key, const std::function<void()>& body) {
    struct Under {
        Context& c;
        Under(Context& c, uint64_t key) : c(c) { c.body = {true, key, c.body.count + 1}; }
        ~Under() { c.body.under_way = false; }
    } const under(c, key);
    body();
}

// What has run once under a key is recorded the next time: the first run brings scratch memory to its size.
void replay_or_loop(uint64_t key, const std::function<void()>& body, bool loop) {
    Context& c = cuda::bound();
    // Ranks that meet on the host cannot be recorded, and NCCL is not.
    if (c.group.tp > 1 && c.group.transport != cuda::Transport::peers) return run_body(c, key, body);
    const auto found = c.recorded.find(key);
    if (found == c.recorded.end()) {
        run_body(c, key, body);
        c.recorded.emplace(key, nullptr);
        return;
    }
    if (!found->second) {
        Recording recording(c, loop);
        run_body(c, key, body);
        found->second = recording.finish();
        // Making a record allocates, too: no rank plays its own before all have theirs.
        if (c.group.tp > 1) c.group.meeting.arrive(c.rank, c.group.tp, cuda::kSpins);
    }
    cuda::check(cudaGraphLaunch(found->second, c.stream), "cudaGraphLaunch");
}

}  // namespace

void replay(uint64_t key, const std::function<void()>& body) { replay_or_loop(key, body, false); }

void loop(uint64_t key, const std::function<void()>& body) { replay_or_loop(key, body, true); }

int rounds_at_once(const Group& group) {
    return group.tp == 1 || group.transport == cuda::Transport::peers ? kRunRounds : 1;
}

bool idle() {
    const cudaError_t status = cudaStreamQuery(cuda::bound().stream);
    if (status == cudaErrorNotReady) return false;
    cuda::check(status, "a round");
    return true;
}

void forget() { cuda::bound().forget(); }

Body body() { return cuda::bound().body; }

namespace {

// Launched early, and lets the next one start: neighbours overlap as they do without it, and it waits for all that was before.
// Floor: a launch.
__global__ void stamp_kernel(uint64_t* at, uint64_t kept) {
    cuda::let_next_kernel_start();
    cuda::wait_for_kernel_before();
    uint64_t ns;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
    const uint64_t n = at[0];
    at[1 + n % kept] = ns;
    at[0] = n + 1;
}

}  // namespace

void stamp(Dev<uint64_t> at, int kept) {
    cuda::launch_as<stamp_kernel>({.early = true}, 1, 1, raw(at), static_cast<uint64_t>(kept));
}

void* alloc_host(size_t bytes) {
    void* p = nullptr;
    if (cudaMallocHost(&p, bytes) != cudaSuccess) {
        cudaGetLastError();
        fail(KD_E_NOMEM, "the machine has no %zu MiB of memory to lock for the GPU: raise the limit of locked memory",
             (bytes >> 20) + 1);
    }
    return p;
}
void release_host(void* p) { cudaFreeHost(p); }
void settle() { cuda::check(cudaStreamSynchronize(cuda::bound().stream), "upload"); }
void* landing(void*, void* buffer) { return buffer; }

void upload(void* device, const void* host, size_t bytes) {
    if (bytes)
        cuda::check(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, cuda::bound().stream), "upload");
}

void download(void* host, const void* device, size_t bytes) {
    if (!bytes) return;
    cudaStream_t stream = cuda::bound().stream;
    cuda::check(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, stream), "download");
    cuda::check(cudaStreamSynchronize(stream), "download");
}

Rows alloc_rows(size_t n_rows, int width) {
    const int stride = (width + 7) / 8 * 8;  // rows of 16-byte pieces
    return {alloc(n_rows * static_cast<size_t>(stride) * sizeof(cuda::bf16)), stride, 0};
}

void release_rows(Rows rows) { release(rows.p); }

}  // namespace kd::device

namespace kd::cuda {

void check(cudaError_t status, const char* what) {
    if (status == cudaSuccess) return;
    const Watchword* word = device::bound_context ? device::bound_context->group.word : nullptr;
    if (word && word->told)
        fail(KD_E_FATAL,
             "rank %d has waited %d s in collective %u for rank %d, which did not come: close the engine and open it "
             "again",
             word->waiting, static_cast<int>(kMostWaitNs / 1'000'000'000), word->turn, word->absent);
    fail(KD_E_FATAL,
         "the GPU reported %s (%s) at %s: end this process and start another, it gets nothing more of the GPU",
         cudaGetErrorName(status), cudaGetErrorString(status), what);
}

Scratch::~Scratch() {
    for (void* p : all_) device::release(p);
}

void* Scratch::get(size_t bytes) {
    if (bytes > size_ || all_.empty()) {
        all_.push_back(device::alloc(bytes + bytes / 4));  // a quarter more: growing row by row stays rare
        size_ = bytes + bytes / 4;
    }
    return all_.back();
}

device::Context& bound() {
    if (!device::bound_context)
        fail(KD_E_FATAL, "this thread works for no rank: device::bind a context before ops, copies and collectives");
    return *device::bound_context;
}

}  // namespace kd::cuda
