"""What vLLM does around its products of experts, in Triton: silu(gate) * up, and the weighted sum over a row's slots."""

try:
    import torch
    import triton
    import triton.language as tl
except ImportError as error:
    raise SystemExit(
        f"bench/peers/small_kernels.py needs {error.name}, which is not installed here: pip install {error.name}"
    ) from None

COLUMNS = 512  # of a row that one program sums


@triton.jit
def gate_kernel(to, of, width: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, width)
    gate = tl.load(of + row * 2 * width + column).to(tl.float32)
    up = tl.load(of + row * 2 * width + width + column).to(tl.float32)
    tl.store(to + row * width + column, (gate / (1 + tl.exp(-gate)) * up).to(tl.bfloat16))


@triton.jit
def weigh_kernel(to, of, weight, slots: tl.constexpr, width: tl.constexpr, columns: tl.constexpr):
    row, column = tl.program_id(1), tl.program_id(0) * columns + tl.arange(0, columns)
    total = tl.zeros((columns,), dtype=tl.float32)
    for slot in tl.static_range(slots):
        value = tl.load(of + (row * slots + slot) * width + column).to(tl.float32)
        total += value * tl.load(weight + row * slots + slot)
    tl.store(to + row * width + column, total.to(tl.bfloat16))


def gate(to: torch.Tensor, of: torch.Tensor) -> None:
    """to [n][width]; of [n][gate: width | up: width], a power of two"""
    gate_kernel[(len(to),)](to, of, to.shape[1])


def weigh(to: torch.Tensor, of: torch.Tensor, weight: torch.Tensor) -> None:
    """to [rows][width], of [rows * slots][width], weight fp32 [rows][slots]; width a multiple of COLUMNS"""
    rows, slots = weight.shape
    weigh_kernel[(to.shape[1] // COLUMNS, rows)](to, of, weight, slots, to.shape[1], COLUMNS)


if __name__ == "__main__":
    raise SystemExit(
        "bench/peers/small_kernels.py measures nothing by itself: it is a part of bench/peers/experts.py, run that"
    )
