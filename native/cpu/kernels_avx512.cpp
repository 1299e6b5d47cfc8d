#define KD_SIMD_AVX512
#include "kernels_impl.h"

const kd::cpu::Kernels* kd::cpu::kernels_avx512() { return &kKernels; }
