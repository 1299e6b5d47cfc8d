"""The INT4 grid of compressed-tensors' pack-quantized format: symmetric, one bf16 scale per group of 32 inputs."""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32


def _rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Grid points [..., in/32, 32] as floats in -8..7, and scales [..., in/32, 1] that bf16 holds exactly."""
    groups = weight.reshape(*weight.shape[:-1], -1, GROUP).float()
    scale = (groups.abs().amax(-1, keepdim=True) / 7.5).to(torch.bfloat16).float().clamp_min(1e-8)
    return (groups / scale).round().clamp(-8, 7), scale


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [..., out, in] -> values int8 [..., out, in] in -8..7, scales bf16 [..., out, in/32].

    Not idempotent: the scale of an already rounded matrix may differ. Quantise the master once, then keep the pair.
    """
    values, scale = _rounded(weight)
    return values.reshape(weight.shape).to(torch.int8), scale.squeeze(-1).to(torch.bfloat16)


def dequantise(values: Tensor, scales: Tensor) -> Tensor:
    groups = values.reshape(*values.shape[:-1], -1, GROUP).float()
    return (groups * scales.float().unsqueeze(-1)).reshape(values.shape)


def fake_quantised(weight: Tensor, amount: Tensor) -> Tensor:
    """weight rounded to the grid (amount 1) or as it is (amount 0); gradients pass straight through.

    `amount` is a tensor so that switching the rounding on does not compile the model again.
    """
    values, scale = _rounded(weight.detach())
    return weight + ((values * scale).reshape(weight.shape) - weight.detach()) * amount


def pack(values: Tensor) -> Tensor:
    """int8 [..., in] in -8..7 -> int32 [..., in/8]: offset by 8, the first value in the lowest four bits."""
    nibbles = (values.to(torch.int64) + 8).reshape(*values.shape[:-1], -1, 8)
    words = (nibbles << (torch.arange(8, device=values.device) * 4)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def unpack(words: Tensor) -> Tensor:
    nibbles = (words.to(torch.int64).unsqueeze(-1) >> (torch.arange(8, device=words.device) * 4)) & 15
    return (nibbles - 8).flatten(-2).to(torch.int8)
