#!/usr/bin/env bash
# One plain line: what of CUDA was built and run here. The CPU twin never needs any of it.
cd "$(dirname "$0")/.." || exit 1
if [ -z "$(find native/cuda -name '*.cu' -print -quit 2>/dev/null)" ]; then
    echo "CUDA: this tree has no CUDA sources yet (native/cuda), so no CUDA code was built or tested; all of the above ran on the CPU twin."
elif ! command -v nvcc >/dev/null; then
    echo "CUDA: no CUDA toolchain (nvcc) found, so the CUDA parts were not built or tested; all of the above ran on the CPU twin. `make cuda` fetches one."
elif [ ! -e /dev/nvidiactl ]; then
    echo "CUDA: nvcc found but no CUDA device, so the CUDA parts were compiled at most, not run."
else
    echo "CUDA: nvcc and a CUDA device found."
fi
