"""How stored tensors are shared out among ranks: native/model/sharding.h, read, and what its words mean."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

_HEADER = Path(__file__).resolve().parents[2] / "native" / "model" / "sharding.h"
TABLE: dict[str, str] = dict(re.findall(r'\{"([\w.]+)", Split::(\w+)\}', _HEADER.read_text()))
AXIS = {"rows": 0, "cols": 1, "vocab": 0, "kv_b": 0}


def split_of(tensor: str) -> str:
    """The word of the table for a stored tensor: the one line with which its name ends."""
    [split] = [split for name, split in TABLE.items() if tensor.endswith(name)]
    return split


def share(tensor: str, whole: np.ndarray, tp: int, rank: int) -> np.ndarray:
    """What a rank gets of it. Rows of heads lie together, so kv_b is cut like other rows."""
    split = split_of(tensor)
    if split == "whole":
        return whole
    if split == "vocab":
        rows = -(-len(whole) // tp)
        return whole[rank * rows : (rank + 1) * rows]
    return np.split(whole, tp, AXIS[split])[rank]


def join(tensor: str, shares: list[np.ndarray]) -> np.ndarray:
    """The whole again."""
    split = split_of(tensor)
    if split == "whole":
        assert all(np.array_equal(s, shares[0]) for s in shares)
        return shares[0]
    return np.concatenate(shares, AXIS[split])
