#!/usr/bin/env bash
# One plain line: what of CUDA was built and run here. The CPU twin never needs any of it.
cd "$(dirname "$0")/.." || exit 1
# As build/make.sh looks for it.
nvcc=${NVCC:-$(command -v nvcc || ls .venv/lib/python3*/site-packages/nvidia/cu13/bin/nvcc 2>/dev/null)}
if [ -z "$nvcc" ]; then
    echo 'CUDA: no CUDA compiler (nvcc) found, so the CUDA parts were not built or tested; all of the above ran on the CPU twin. "make cuda" fetches one.'
elif [ ! -e /dev/nvidiactl ]; then
    echo "CUDA: nvcc found but no CUDA device, so the CUDA parts were compiled at most, not run."
else
    echo "CUDA: nvcc and a CUDA device found."
fi
