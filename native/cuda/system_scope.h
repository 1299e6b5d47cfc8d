// What ranks on different GPUs say to one another by, word by word.
#pragma once

#include <cstdint>

namespace kd::cuda {

// A store that whoever acquires it sees with all that came before, of this thread and of those it has met at a barrier.
__device__ __forceinline__ void store_release_system(uint32_t* p, uint32_t v) {
    asm volatile("st.release.sys.global.u32 [%0], %1;\n" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ uint32_t load_acquire_system(const uint32_t* p) {
    uint32_t v;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];\n" : "=r"(v) : "l"(p) : "memory");
    return v;
}
// Of one rank's blocks: adds, and returns what was there.
__device__ __forceinline__ uint32_t add_acq_rel_device(uint32_t* p, uint32_t v) {
    uint32_t old;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;\n" : "=r"(old) : "l"(p), "r"(v) : "memory");
    return old;
}
__device__ __forceinline__ uint64_t nanoseconds() {
    uint64_t ns;
    asm volatile("mov.u64 %0, %%globaltimer;\n" : "=l"(ns));
    return ns;
}
// Ends the kernel; every later call on this GPU reports it.
__device__ __forceinline__ void trap() { asm volatile("trap;\n"); }

}  // namespace kd::cuda
