"""INT4 experts of one rank of eight of Kimi K2 as checkpoints have them, who is sent to whom, and the plain answer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

try:
    import torch
except ImportError:
    raise SystemExit("bench/peers/int4.py needs torch, which is not installed here: pip install torch") from None

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import kernels

EXPERTS, SLOTS, HIDDEN, INTER, GROUP = kernels.EXPERTS, kernels.SLOTS, kernels.HIDDEN, kernels.RANK_INTER, 32
KINDS = 16  # different experts there are
WEIGHT = 1 / SLOTS  # of every slot, as kd_bench_moe has it


class W4(NamedTuple):
    """Matrices of n rows as checkpoints have them: q int32 [count][n][k / 8], lowest nibble first; s bf16 [count][n][k / 32]."""

    q: torch.Tensor
    s: torch.Tensor


def random_w4(count: int, n: int, k: int) -> W4:
    q = torch.empty(count, n, k // 8, dtype=torch.int32, device="cuda").random_(-(2**31), 2**31 - 1)
    s = torch.rand(count, n, k // GROUP, device="cuda") * 0.004 + 0.002
    return W4(q, s.to(torch.bfloat16))


def values(q: torch.Tensor) -> torch.Tensor:
    """int32 [..][k / 8] -> int32 [..][k], 0..15"""
    shift = torch.arange(0, 32, 4, device=q.device, dtype=torch.int32)
    return (q[..., None] >> shift & 15).flatten(-2)


def words(value: torch.Tensor) -> torch.Tensor:
    """int32 [..][8], 0..15 -> int32 [..]"""
    shift = torch.arange(0, 32, 4, device=value.device)
    total = (value.long() << shift).sum(-1)
    return torch.where(total < 2**31, total, total - 2**32).int()


def plain(w: W4) -> torch.Tensor:
    return (values(w.q) - 8).float() * w.s.float().repeat_interleave(GROUP, -1)


def plain_experts(x: torch.Tensor, ids: torch.Tensor, gate_up: W4, down: W4) -> torch.Tensor:
    """x [rows][HIDDEN], ids [rows][SLOTS] of the KINDS -> fp32 [rows][HIDDEN]"""
    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    both, back = plain(gate_up), plain(down)
    for e in range(KINDS):
        row = (ids == e).nonzero()[:, 0]
        gate, up = (x[row].float() @ both[e].T).chunk(2, dim=-1)
        y.index_add_(0, row, WEIGHT * ((torch.nn.functional.silu(gate) * up) @ back[e].T))
    return y


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want).norm() / want.norm())


def routing(calls: int, rows: int, experts: int) -> np.ndarray:
    """[calls][rows][SLOTS]"""
    rng = np.random.default_rng(rows)
    return np.stack([[rng.permutation(experts)[:SLOTS] for _ in range(rows)] for _ in range(calls)]).astype(np.int32)


if __name__ == "__main__":
    raise SystemExit("bench/peers/int4.py measures nothing by itself: it is a part of bench/peers/experts.py, run that")
