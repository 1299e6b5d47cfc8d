// The instructions kernels are made of: matrix products, tiles to and from shared memory, sums in a fixed order.
//
// Fragments of mma_bf16 (D = A B + D, A 16 x 16, B 16 x 8, D 16 x 8), lane = 4 * g + t, g 0 .. 7, t 0 .. 3:
//   a[0] A[g    ][2 t, 2 t + 1]   a[1] A[g + 8][2 t, ..]   a[2] A[g][2 t + 8, ..]   a[3] A[g + 8][2 t + 8, ..]
//   b[0] B[2 t, 2 t + 1][g]       b[1] B[2 t + 8, ..][g]
//   d[0], d[1] D[g][2 t, 2 t + 1]    d[2], d[3] D[g + 8][2 t, 2 t + 1]
// A word holds the element of the lower index in its low half. ldmatrix gives a lane, of each 8 x 8 matrix stored by rows, the
// word [g][2 t, 2 t + 1]; with `trans` the elements [2 t][g], [2 t + 1][g]. So of A stored [row][k] in shared memory the four
// matrices of ldmatrix_x4 are a[0..3] in the order (row 0, k 0), (row 8, k 0), (row 0, k 8), (row 8, k 8); of B stored [n][k] the
// two of ldmatrix_x2 are b[0], b[1] at k 0 and k 8; of B stored [k][n] the same with trans, at k rows 0 and 8.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace kd::cuda {

constexpr int kWarp = 32;

__device__ __forceinline__ uint32_t shared_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// ---- matrix products ------------------------------------------------------------------------------------------------

__device__ __forceinline__ void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Lane i gives the address of row i % 8 of matrix i / 8: 16 bytes, aligned. All 32 lanes take part.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}
// Lanes 0 .. 15 give the addresses; those of the others are not used but must be shared memory.
__device__ __forceinline__ void ldmatrix_x2(uint32_t (&r)[2], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];\n"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(shared_address(row))
                 : "memory");
}
__device__ __forceinline__ void ldmatrix_x2_trans(uint32_t (&r)[2], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];\n"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(shared_address(row))
                 : "memory");
}

// ---- bf16 -----------------------------------------------------------------------------------------------------------

// Two rounded to nearest even, `low` in the low half.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
    uint32_t word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(word) : "f"(high), "f"(low));
    return word;
}
__device__ __forceinline__ float low_bf16(uint32_t word) { return __uint_as_float(word << 16); }
__device__ __forceinline__ float high_bf16(uint32_t word) { return __uint_as_float(word & 0xffff0000u); }

// ---- global and shared memory ---------------------------------------------------------------------------------------

// Sixteen bytes to shared memory, or zeros without reading `global` if not `valid`. Complete after cp_async_wait and a barrier.
__device__ __forceinline__ void cp_async_16(void* shared, const void* global, bool valid = true) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(shared_address(shared)), "l"(global),
                 "r"(valid ? 16 : 0)
                 : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
// Until at most kPending of this thread's newest groups are under way.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

// Sixteen bytes, aligned.
__device__ __forceinline__ uint4 load16(const void* p) { return *static_cast<const uint4*>(p); }
__device__ __forceinline__ void store16(void* p, uint4 v) { *static_cast<uint4*>(p) = v; }
// The same of memory nobody writes while the kernel runs and that is read once: weights.
__device__ __forceinline__ uint4 stream16(const void* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

// What is read here, and not behind a branch after which alone it is used: the assembler moves loads that are not relaxed. Of
// memory that is written meanwhile the value may be any.
__device__ __forceinline__ uint32_t ask4(const void* p) {
    uint32_t v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];\n" : "=r"(v) : "l"(p));
    return v;
}
__device__ __forceinline__ uint2 ask8(const void* p) {
    uint2 v;
    asm volatile("ld.relaxed.gpu.global.v2.u32 {%0,%1}, [%2];\n" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}
__device__ __forceinline__ uint4 ask16(const void* p) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}
// Brings the line at `p` to the second-level cache, which all multiprocessors share: it gives no value, so memory that is still
// written is no harm.
__device__ __forceinline__ void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];\n" ::"l"(p)); }

// ---- kernels that overlap (launch_early of launch.h); nothing before sm_90 -----------------------------------------------

__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
}
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
#endif
}

// ---- blocks of a cluster; nothing before sm_90 --------------------------------------------------------------------------

// All threads of all blocks meet, which orders what they wrote to shared memory: in two steps, what comes between them waits for
// nobody, or in one.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;\n" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;\n" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_barrier() {
    cluster_arrive();
    cluster_wait();
}
// To where block `rank` of the cluster, which has started, holds what this one holds at `shared`.
__device__ __forceinline__ void store_to_block(float* shared, int rank, float v) {
#if __CUDA_ARCH__ >= 900
    asm volatile("{\n.reg .u32 p;\nmapa.shared::cluster.u32 p, %0, %1;\nst.shared::cluster.f32 [p], %2;\n}\n" ::"r"(
                     shared_address(shared)),
                 "r"(rank), "f"(v)
                 : "memory");
#endif
}
// What block `rank` of the cluster holds at the place where this one holds `shared`.
__device__ __forceinline__ float4 load_of_block(const float* shared, int rank) {
    float4 v{};
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n.reg .u32 p;\nmapa.shared::cluster.u32 p, %4, %5;\n"
        "ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [p];\n}\n"
        : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
        : "r"(shared_address(shared)), "r"(rank)
        : "memory");
#endif
    return v;
}

// ---- sums in a fixed order ------------------------------------------------------------------------------------------

// Every lane gets the same bits: at each step both partners form the same sum.
__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int step = kWarp / 2; step > 0; step /= 2) v += __shfl_xor_sync(0xffffffffu, v, step);
    return v;
}
__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
    for (int step = kWarp / 2; step > 0; step /= 2) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, step));
    return v;
}

// Sum over a block of kThreads, the warps' sums added in their order; every thread gets it. All threads call it.
template <int kThreads>
__device__ __forceinline__ float block_sum(float v) {
    static_assert(kThreads % kWarp == 0 && kThreads <= 1024);
    __shared__ float part[kThreads / kWarp];
    v = warp_sum(v);
    if constexpr (kThreads > kWarp) {
        __syncthreads();  // an earlier call's sums have been read
        if (threadIdx.x % kWarp == 0) part[threadIdx.x / kWarp] = v;
        __syncthreads();
        v = part[0];
#pragma unroll
        for (int w = 1; w < kThreads / kWarp; w++) v += part[w];
    }
    return v;
}

}  // namespace kd::cuda
