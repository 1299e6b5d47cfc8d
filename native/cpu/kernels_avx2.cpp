#define KD_SIMD_AVX2
#include "kernels_impl.h"

const kd::cpu::Kernels* kd::cpu::kernels_avx2() { return &kKernels; }
