// Copies to shared memory that one thread starts and a barrier counts, and words that blocks of a launch tell one another.
// sm_90 and later; before, empty: nothing that uses them is launched there.
//
// A barrier is in a phase until as many have arrived as it was made for and as many bytes as were expected; then the next
// begins. wait() is told the parity of the phase that must be over: of a new barrier, 0 is the first and 1 counts as over.
// What a thread did before it arrived, and bytes that have come, are seen by who has waited.
#pragma once

#include "mma.h"

namespace kd::cuda {

using Barrier = uint64_t;

// How often a warp arrives that has done something together: once, by a lane that saw what the others did when they met. The
// sanitizer's racecheck takes that for the one lane's doing and reports the others as racing, so for it every lane arrives for
// itself (-DKD_EVERY_LANE_ARRIVES; tests/sanitize/cuda.sh). That is no way to ship: 512 arrivals at one address for 16.
#ifdef KD_EVERY_LANE_ARRIVES
constexpr int kWarpArrivals = kWarp;
#else
constexpr int kWarpArrivals = 1;
#endif
// Whether a thread, or a lane, is one that arrives.
__device__ constexpr bool arrives(int thread) { return thread % (kWarp / kWarpArrivals) == 0; }

__device__ __forceinline__ void init_barrier([[maybe_unused]] Barrier* b, [[maybe_unused]] int arrivals) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(shared_address(b)), "r"(arrivals) : "memory");
#endif
}
// By the thread that made barriers, before others use them.
__device__ __forceinline__ void show_barriers_to_copies() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
#endif
}
__device__ __forceinline__ void arrive([[maybe_unused]] Barrier* b, [[maybe_unused]] int times = 1) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0], %1;\n" ::"r"(shared_address(b)), "r"(times)
                 : "memory");
#endif
}
__device__ __forceinline__ void arrive_and_expect([[maybe_unused]] Barrier* b, [[maybe_unused]] int bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;\n" ::"r"(shared_address(b)),
                 "r"(bytes)
                 : "memory");
#endif
}
__device__ __forceinline__ void wait([[maybe_unused]] Barrier* b, [[maybe_unused]] uint32_t parity) {
#if __CUDA_ARCH__ >= 900
    uint32_t over;
    do {
        asm volatile(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n}\n"
            : "=r"(over)
            : "r"(shared_address(b)), "r"(parity)
            : "memory");
    } while (!over);
#endif
}
// Addresses and size are multiples of 16. The bytes are the first to leave the second-level cache: weights, read once.
__device__ __forceinline__ void bulk_copy([[maybe_unused]] void* shared, [[maybe_unused]] const void* global,
                                          [[maybe_unused]] int bytes, [[maybe_unused]] Barrier* b) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n.reg .b64 first;\ncreatepolicy.fractional.L2::evict_first.b64 first, 1.0;\n"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], "
        "first;\n}\n" ::"r"(shared_address(shared)),
        "l"(global), "r"(bytes), "r"(shared_address(b))
        : "memory");
#endif
}
// By each thread that has read or written shared memory, before the barrier after which a copy goes there: nothing else orders
// what a thread did there before what a copy does, no barrier of any kind.
__device__ __forceinline__ void leave_shared_memory_to_copies() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
#endif
}
// The same of global memory, by the thread that copies from it what kernels before have written.
__device__ __forceinline__ void see_global_memory_in_copies() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.global;\n" ::: "memory");
#endif
}

// Words that one block tells another while both run: 32 bits and a tag that says they are there, written and read at once, so
// that nothing else is to be ordered.
__device__ __forceinline__ void tell(uint64_t* to, uint32_t word, uint32_t tag) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;\n" ::"l"(to), "l"(static_cast<uint64_t>(tag) << 32 | word)
                 : "memory");
}
__device__ __forceinline__ uint64_t look(const uint64_t* p) {
    uint64_t v;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];\n" : "=l"(v) : "l"(p) : "memory");
    return v;
}
// Two neighbours, aligned to 16 bytes.
__device__ __forceinline__ void look(uint64_t (&v)[2], const uint64_t* p) {
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0,%1}, [%2];\n" : "=l"(v[0]), "=l"(v[1]) : "l"(p) : "memory");
}
// Four words without a tag, each there as soon as it is not what was there before. No more is said of the four together.
__device__ __forceinline__ void tell(uint4* to, uint4 v) {
    asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1,%2,%3,%4};\n" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}
__device__ __forceinline__ void look(uint4& v, const uint4* p) {
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
}
__device__ __forceinline__ uint32_t tag_of(uint64_t v) { return static_cast<uint32_t>(v >> 32); }

// Counts a thread in and gives how many were before: it sees all that they did before they were counted.
__device__ __forceinline__ uint32_t count_in(uint32_t* counter) {
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;\n" : "=r"(before) : "l"(counter) : "memory");
    return before;
}

// Some warps of a block meet, by the number of a barrier that no others use meanwhile; 0 is that of __syncthreads().
template <int kNumber, int kThreads>
__device__ __forceinline__ void meet() {
    asm volatile("bar.sync %0, %1;\n" ::"n"(kNumber), "n"(kThreads) : "memory");
}

}  // namespace kd::cuda
