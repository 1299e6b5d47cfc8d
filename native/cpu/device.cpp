#include "device.h"

#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <string>
#include <string_view>

#include "device_context.h"
#include "error.h"
#include "kernels.h"
#include "ops.h"
#include "raw.h"

namespace kd::device {

namespace {

thread_local Context* bound_context = nullptr;

int cores() {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
    return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

bool machine_has(int isa) {
    if (isa == KD_ISA_PLAIN) return true;
#if defined(__x86_64__)
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (isa == KD_ISA_AVX2) return avx2;
    if (isa == KD_ISA_AVX512)
        return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#endif
    return false;
}

const char* name_of(int isa) {
    switch (isa) {
        case KD_ISA_PLAIN: return "plain";
        case KD_ISA_AVX2: return "avx2";
        case KD_ISA_AVX512: return "avx512";
        default: return "?";
    }
}

constexpr size_t kHugePagesFrom = 64 << 20;

// In front of every allocation: what munmap needs. A cache line, so that what follows is aligned to one.
struct alignas(64) Header {
    size_t mapped;
};

}  // namespace

Context::Context(Group& group, int rank, int threads, int awake, int spins) : group(group), rank(rank) {
    if (threads > 1)
        pool = std::make_unique<cpu::Pool>(
            threads - 1, awake, spins,
            [](void* c) {
                const auto* context = static_cast<Context*>(c);
                pthread_setname_np(pthread_self(), ("kd-compute-" + std::to_string(context->rank)).c_str());
                bind(static_cast<Context*>(c));
            },
            this);
}

Group::Group(const Options& options) : meeting(options.records) {
    if (options.tp < 1 || options.tp > KD_MAX_TP)
        fail(KD_E_INVALID, "tp is %d: give 1 .. %d ranks", options.tp, KD_MAX_TP);
    if (options.threads < 0 || options.threads > 4096)
        fail(KD_E_INVALID, "threads is %d: give 1 .. 4096, or 0 for every core this process may use", options.threads);
    if (options.transport && std::string_view(options.transport) != "memory")
        fail(KD_E_INVALID, "ranks on the CPU meet in memory and not by %s: give transport memory", options.transport);
    if (options.isa < KD_ISA_AUTO || options.isa > KD_ISA_AVX512)
        fail(KD_E_INVALID, "isa is %d: give one of KD_ISA_*", options.isa);
    tp = options.tp;
    isa = options.isa;
    if (isa == KD_ISA_AUTO)
        isa = machine_has(KD_ISA_AVX512) ? KD_ISA_AVX512 : machine_has(KD_ISA_AVX2) ? KD_ISA_AVX2 : KD_ISA_PLAIN;
    if (!machine_has(isa)) fail(KD_E_DEVICE, "this machine has no %s: open with isa auto or plain", name_of(isa));
    kernels = isa == KD_ISA_AVX512 ? cpu::kernels_avx512()
              : isa == KD_ISA_AVX2 ? cpu::kernels_avx2()
                                   : cpu::kernels_plain();

    const int available = cores();
    const int per_rank = std::max(1, (options.threads ? options.threads : available) / tp);
    threads = per_rank * tp;
    // Spinning only pays while whoever is awaited has a core to run on.
    const bool crowded = tp > available;
    spins = crowded ? 20 : 1000;
    const int idle_spins = crowded ? 20 : 400;
    const int awake = std::clamp(available / tp - 1, 1, per_rank);
    for (int r = 0; r < tp; r++) contexts.push_back(std::make_unique<Context>(*this, r, per_rank, awake, idle_spins));
}

std::shared_ptr<Group> open_group(const Options& options) { return std::make_shared<Group>(options); }

Context* context(Group& group, int rank) {
    KD_CHECK(rank >= 0 && rank < group.tp);
    return group.contexts[static_cast<size_t>(rank)].get();
}

void bind(Context* context) { bound_context = context; }

void abort(Group& group) { group.meeting.abort(); }

const char* backend() { return "cpu"; }
const char* weight_layout() { return "cpu plain 1"; }
const char* built_isas() { return "plain avx2 avx512"; }
const char* isa_name(const Group& group) { return name_of(group.isa); }
int thread_count(const Group& group) { return group.threads; }
size_t act_bytes() { return sizeof(float); }
uint64_t memory_used(const Group&) {
    unsigned long pages = 0, resident = 0;
    if (FILE* f = fopen("/proc/self/statm", "re")) {
        if (fscanf(f, "%lu %lu", &pages, &resident) != 2) resident = 0;
        fclose(f);
    }
    return uint64_t{resident} * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

uint64_t memory_free() {
    unsigned long long kib = 0;
    bool found = false;
    if (FILE* f = fopen("/proc/meminfo", "re")) {
        char line[128];
        while (!found && fgets(line, sizeof line, f)) found = sscanf(line, "MemAvailable: %llu kB", &kib) == 1;
        fclose(f);
    }
    return found ? uint64_t{kib} * 1024 : UINT64_MAX;
}

int most_rows() { return 1024; }
const char* default_builder() { return "heap"; }

void* alloc(size_t bytes) {
    const size_t mapped = bytes + sizeof(Header);
    void* p =
        mapped < bytes ? MAP_FAILED : mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        fail(KD_E_NOMEM, "the machine has no %zu MiB of memory to give: use a smaller model, kv_bytes or max_rows",
             bytes >> 20);
    // Large weights are read from end to end for each token; small allocations may never be touched in full.
    if (bytes >= kHugePagesFrom) madvise(p, mapped, MADV_HUGEPAGE);
    return new (p) Header{mapped} + 1;
}

void release(void* p) {
    if (!p) return;
    Header* header = static_cast<Header*>(p) - 1;
    munmap(header, header->mapped);
}

Count known(Count count) { return raw(count.n) ? Count(*raw(count.n)) : count; }

namespace {

void run_body(Context& c, uint64_t key, const std::function<void()>& body) {
    struct Under {
        Context& c;
        Under(Context& c, uint64_t key) : c(c) { c.body = {true, key, c.body.count + 1}; }
        ~Under() { c.body.under_way = false; }
    } const under(c, key);
    body();
}

}  // namespace

void replay(uint64_t key, const std::function<void()>& body) { run_body(cpu::bound(), key, body); }

void measure_transport() {}  // there is one

void forget() {}

void* alloc_shared(size_t bytes) { return alloc(bytes); }
void release_shared(void* p) { release(p); }

int rounds_at_once(const Group&) { return 1; }

void loop(uint64_t key, const std::function<void()>& body) {
    Context& c = cpu::bound();
    c.looping = true;
    do run_body(c, key, body);
    while (c.looping);
}

bool idle() { return true; }

Body body() { return cpu::bound().body; }

void stamp(Dev<uint64_t> at, int kept) {
    using namespace std::chrono;
    uint64_t* const to = raw(at);
    to[1 + to[0]++ % static_cast<uint64_t>(kept)] =
        static_cast<uint64_t>(duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count());
}

void upload(void* device, const void* host, size_t bytes) {
    if (bytes) memcpy(device, host, bytes);
}

void download(void* host, const void* device, size_t bytes) {
    if (bytes) memcpy(host, device, bytes);
}

void* alloc_host(size_t bytes) { return alloc(bytes); }
void release_host(void* p) { release(p); }
void settle() {}
void* landing(void* device, void*) { return device; }

Rows alloc_rows(size_t n_rows, int width) {
    return {alloc(n_rows * static_cast<size_t>(width) * sizeof(float)), width, 0};
}

void release_rows(Rows rows) { release(rows.p); }

}  // namespace kd::device

namespace kd::cpu {

Scratch::~Scratch() { device::release(p_); }

void* Scratch::get(size_t bytes) {
    if (bytes > size_ || !p_) {
        device::release(p_);
        p_ = nullptr;
        size_ = 0;
        p_ = device::alloc(bytes + bytes / 4);  // a quarter more: growing row by row stays rare
        size_ = bytes + bytes / 4;
    }
    return p_;
}

Scratch& thread_scratch() {
    thread_local Scratch own;
    return own;
}

device::Context& bound() {
    if (!device::bound_context)
        fail(KD_E_FATAL, "this thread works for no rank: device::bind a context before ops, copies and collectives");
    return *device::bound_context;
}

}  // namespace kd::cpu

void kd::ops::side_by_side(Count, const std::function<void()>& one, const std::function<void()>& other) {
    one();
    other();
}
