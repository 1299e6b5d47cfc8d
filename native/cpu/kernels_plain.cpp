#define KD_SIMD_PLAIN
#include "kernels_impl.h"

const kd::cpu::Kernels* kd::cpu::kernels_plain() { return &kKernels; }
