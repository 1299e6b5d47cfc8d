"""Several GPUs of one host: the same step in one process each (torchrun), every rank with its own data, gradients
averaged. Rank 0's clock decides and rank 0 writes. Without torchrun there is one rank and nothing is exchanged."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor

AGREE_STEPS = 20  # ranks ask for rank 0's clock, and the queue of an accelerator is waited for, every so many steps


def start(device: str) -> None:
    """Joins the group that torchrun made, if it did."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if device == "cuda" else "gloo")


def wait() -> None:
    """Until every rank is here."""
    if dist.is_initialized():
        dist.barrier()


def stop() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def average(tensors: list[Tensor]) -> None:
    """Replaces every tensor by its mean over the ranks, the same bits everywhere."""
    if dist.is_initialized():
        flat = torch.cat([t.flatten() for t in tensors])
        dist.all_reduce(flat)
        flat /= size()
        parts = flat.split([t.numel() for t in tensors])
        torch._foreach_copy_(tensors, [p.view_as(t) for p, t in zip(parts, tensors, strict=True)])


def agreed(value: float, device: str) -> float:
    """Rank 0's value."""
    if not dist.is_initialized():
        return value
    shared = torch.tensor(value, dtype=torch.float64, device=device)
    dist.broadcast(shared, 0)
    return shared.item()
