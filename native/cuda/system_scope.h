// What ranks on different GPUs say to one another by, word by word.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace kd::cuda {

// Four words, each whole, in no order: neither among themselves nor towards anything else.
__device__ __forceinline__ void store_words_system(uint4* p, uint4 v) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1,%2,%3,%4};\n" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}
__device__ __forceinline__ uint4 load_words_system(const uint4* p) {
    uint4 v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}

// A store that whoever acquires it sees with all that came before, of this thread and of those it has met at a barrier.
__device__ __forceinline__ void store_release_system(uint32_t* p, uint32_t v) {
    asm volatile("st.release.sys.global.u32 [%0], %1;\n" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ uint32_t load_acquire_system(const uint32_t* p) {
    uint32_t v;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];\n" : "=r"(v) : "l"(p) : "memory");
    return v;
}
// Of one rank's blocks: adds, and returns what was there. Orders nothing.
__device__ __forceinline__ uint32_t add_relaxed_device(uint32_t* p, uint32_t v) {
    uint32_t old;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;\n" : "=r"(old) : "l"(p), "r"(v) : "memory");
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
