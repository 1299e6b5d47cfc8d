// What only sm_90 has: matrix products of a warpgroup out of shared memory, copies of whole boxes.
// Without effect elsewhere: kernels that use it are launched on sm_90 alone.
//
// Rows of 64 bf16 (128 bytes) lie in shared memory 8 a kilobyte, aligned to it, with 16-byte pieces permuted: piece p of row r is
// at place p ^ (r % 8). A box copied with SWIZZLE_128B comes to lie so, and the products' descriptors say so.
#pragma once

#include <cuda.h>

#include "bulk.h"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define KD_HOPPER 1
#else
#define KD_HOPPER 0
#endif

namespace kd::cuda {

constexpr int kWarpgroup = 128;  // threads

// ---- barriers; those that count bytes are bulk.h's -------------------------------------------------------------------

// wait(), its loop inside one statement: other machine code, and what attention has been proven and timed with.
__device__ __forceinline__ void wait_in_place(Barrier* barrier, unsigned parity) {
#if KD_HOPPER
    asm volatile(
        "{\n.reg .pred done;\nAGAIN:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra AGAIN;\n}\n" ::"r"(
            shared_address(barrier)),
        "r"(parity)
        : "memory");
#endif
}
// meet() for warps that need not wait for the others.
template <int kId, int kThreads>
__device__ __forceinline__ void announce() {
    asm volatile("bar.arrive %0, %1;\n" ::"n"(kId), "n"(kThreads) : "memory");
}
// What this thread wrote to shared memory is there for products and copies started after the next barrier.
__device__ __forceinline__ void fence_for_products() { leave_shared_memory_to_copies(); }

// ---- copies ------------------------------------------------------------------------------------------------------------

// Boxes of 64 columns of rows y .. y + 63, from box `first` on, as many as the map copies at once; the bytes count at `barrier`.
__device__ __forceinline__ void copy_boxes(void* shared, const CUtensorMap& map, int y, int first, Barrier* barrier) {
#if KD_HOPPER
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
        "[%5];\n" ::"r"(shared_address(shared)),
        "l"(&map), "r"(0), "r"(y), "r"(first), "r"(shared_address(barrier))
        : "memory");
#endif
}
__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
#if KD_HOPPER
    asm volatile("prefetch.tensormap [%0];\n" ::"l"(&map) : "memory");
#endif
}

// ---- products ----------------------------------------------------------------------------------------------------------

// A matrix of 128-byte rows as above. kNext: bytes from 64 columns to the next 64, used only where columns are the dimension
// that is not summed over.
template <int kNext = 16>
__device__ __forceinline__ uint64_t matrix_at(const void* shared) {
    constexpr uint64_t kForm = uint64_t{1} << 62 | uint64_t{1024 / 16} << 32 | uint64_t{kNext / 16} << 16;
    return kForm | (shared_address(shared) & 0x3ffff) >> 4;
}
__device__ __forceinline__ void products_begin() {
#if KD_HOPPER
    asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
#endif
}
__device__ __forceinline__ void products_commit() {
#if KD_HOPPER
    asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
#endif
}
template <int kPending>
__device__ __forceinline__ void products_wait() {
#if KD_HOPPER
    asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
#endif
}

// After products_wait<0>: d holds the products, and is not read before.
template <int kN>
__device__ __forceinline__ void products_in(float (&d)[kN]) {
#pragma unroll
    for (int i = 0; i < kN; i++) asm volatile("" : "+f"(d[i])::"memory");
}

// Bytes (a multiple of 16) of shared memory to global memory, and until those that this thread started have been read.
__device__ __forceinline__ void copy_out(void* global, const void* shared, int bytes) {
#if KD_HOPPER
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n" ::"l"(global),
                 "r"(shared_address(shared)), "r"(bytes)
                 : "memory");
#endif
}
__device__ __forceinline__ void copied_out() {
#if KD_HOPPER
    asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;\n" ::: "memory");
#endif
}
// Four 8 x 8 matrices to shared memory: lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void store_matrices(void* row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
#if KD_HOPPER
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};\n" ::"r"(shared_address(row)), "r"(a),
                 "r"(b), "r"(c), "r"(d)
                 : "memory");
#endif
}

#define KD_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define KD_D16(i) KD_D4(i), KD_D4(i + 4), KD_D4(i + 8), KD_D4(i + 12)
#define KD_D64(i) KD_D16(i), KD_D16(i + 16), KD_D16(i + 32), KD_D16(i + 48)
#define KD_R8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define KD_R16 KD_R8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define KD_R64                                                                                                 \
    KD_R16                                                                                                     \
    ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41" \
    ",%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"

// d (+)= a b^T over 16 columns: a 64 rows, b 64 rows. Thread 32 w + 4 g + t holds at d[4 n + 2 h + i] row 16 w + 8 h + g, column
// 8 n + 2 t + i.
__device__ __forceinline__ void product_rows(float (&d)[32], uint64_t a, uint64_t b, bool add) {
#if KD_HOPPER
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%"
        "29,%30,"
        "%31}, %32, %33, add, 1, 1, 0, 0;\n}\n"
        : KD_D16(0), KD_D16(16)
        : "l"(a), "l"(b), "r"(static_cast<int>(add)));
#endif
}
// The same with 16, 32 and 128 rows of b.
__device__ __forceinline__ void product_rows(float (&d)[8], uint64_t a, uint64_t b, bool add) {
#if KD_HOPPER
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %10, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {" KD_R8 "}, %8, %9, add, 1, 1, 0, 0;\n}\n"
        : KD_D4(0), KD_D4(4)
        : "l"(a), "l"(b), "r"(static_cast<int>(add)));
#endif
}
__device__ __forceinline__ void product_rows(float (&d)[16], uint64_t a, uint64_t b, bool add) {
#if KD_HOPPER
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %18, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {" KD_R16 "}, %16, %17, add, 1, 1, 0, 0;\n}\n"
        : KD_D16(0)
        : "l"(a), "l"(b), "r"(static_cast<int>(add)));
#endif
}
__device__ __forceinline__ void product_rows(float (&d)[64], uint64_t a, uint64_t b, bool add) {
#if KD_HOPPER
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" KD_R64 "}, %64, %65, add, 1, 1, 0, 0;\n}\n"
        : KD_D64(0)
        : "l"(a), "l"(b), "r"(static_cast<int>(add)));
#endif
}
// The same with a in registers, as the first operand of mma_bf16 for the warp's 16 rows.
__device__ __forceinline__ void product_rows(float (&d)[32], const uint32_t (&a)[4], uint64_t b, bool add) {
#if KD_HOPPER
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%"
        "29,%30,"
        "%31}, {%32,%33,%34,%35}, %36, add, 1, 1, 0;\n}\n"
        : KD_D16(0), KD_D16(16)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
#endif
}
// d (+)= a b: a 64 rows, of which 16 columns; b 16 rows of 256 columns.
__device__ __forceinline__ void product_columns(float (&d)[128], uint64_t a, uint64_t b, bool add) {
#if KD_HOPPER
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%"
        "29,%30,"
        "%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%"
        "58,"
        "%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%"
        "86,"
        "%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%"
        "111,"
        "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127}, %128, %129, add, 1, 1, 0, "
        "1;\n}\n"
        : KD_D64(0), KD_D64(64)
        : "l"(a), "l"(b), "r"(static_cast<int>(add)));
#endif
}

#undef KD_R64
#undef KD_R16
#undef KD_R8
#undef KD_D4
#undef KD_D16
#undef KD_D64

}  // namespace kd::cuda
