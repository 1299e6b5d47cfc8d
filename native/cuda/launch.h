// How kernels are launched, and what they may use of a multiprocessor.
#pragma once

#include <atomic>
#include <utility>

#include "device_context.h"

namespace kd::cuda {

// Shared memory a block can have on every architecture we build for (sm_120, sm_89). Dynamic memory is given at the launch as
// a constant; what a kernel declares statically stays under kStaticBytes, which a test reads off the compiler's report.
constexpr int kBlockBytes = 101376;
constexpr int kStaticBytes = 4096;
constexpr int kHopperBlockBytes = 232448;

// What a launch may ask of sm_90 and later; earlier GPUs ignore it.
struct Launch {
    // The kernel may start while the one before it on the stream still runs, if that one has called let_next_kernel_start()
    // in all its blocks (mma.h). Until it has called wait_for_kernel_before() it may touch nothing but weights: all else may
    // still be read or written. It may have memory brought to the cache (mma.h: prefetch). If the kernel before let it
    // start only after it had itself waited, what was written before that one is there, too: attention builds on it.
    bool early = false;
    int cluster = 1;  // blocks with the same x and z that run together; the grid's y is a multiple of it
};

template <auto kKernel, int kDynamic, class... A>
void launch_with(Launch how, dim3 grid, dim3 block, A&&... args) {
    device::Context& c = bound();
    if constexpr (kDynamic > 48 * 1024 - kStaticBytes) {
        static std::atomic<uint64_t> allowed{0};  // one bit a device
        const uint64_t bit = uint64_t{1} << (c.device % 64);
        if (!(allowed.load(std::memory_order_relaxed) & bit)) {
            check(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kDynamic),
                  __PRETTY_FUNCTION__);
            allowed.fetch_or(bit, std::memory_order_relaxed);
        }
    }
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
    cudaLaunchAttribute more[2] = {};
    cudaLaunchConfig_t config{grid, block, kDynamic, c.stream, more, 0};
    const bool waits = std::exchange(c.waits, false);
    if (how.early && c.overlaps && !waits) {
        more[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        more[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (how.cluster > 1 && c.major >= 9) {
        more[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
        more[config.numAttrs++].val.clusterDim = {1, static_cast<unsigned>(how.cluster), 1};
    }
    check(cudaLaunchKernelEx(&config, kKernel, std::forward<A>(args)...), __PRETTY_FUNCTION__);
}

// A kernel of the base path: launch<kernel, dynamic bytes>(grid, block, arguments...). An empty grid is no launch.
template <auto kKernel, int kDynamic = 0, class... A>
void launch(dim3 grid, dim3 block, A&&... args) {
    static_assert(kDynamic + kStaticBytes <= kBlockBytes, "more shared memory than a block has on sm_120");
    launch_with<kKernel, kDynamic>({}, grid, block, std::forward<A>(args)...);
}

// The same, with more asked of the launch; kStatic: what this kernel may declare statically.
template <auto kKernel, int kDynamic = 0, int kStatic = kStaticBytes, class... A>
void launch_as(Launch how, dim3 grid, dim3 block, A&&... args) {
    static_assert(kDynamic + kStatic <= kBlockBytes, "more shared memory than a block has on sm_120");
    launch_with<kKernel, kDynamic>(how, grid, block, std::forward<A>(args)...);
}

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

}  // namespace kd::cuda
