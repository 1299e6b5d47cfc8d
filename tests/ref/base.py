"""What every specification shares: limits, shapes, number formats. See the package docstring for the representation."""

from collections import namedtuple
from dataclasses import dataclass, field

import numpy as np

MAX_DEPTH = 16  # KD_MAX_DEPTH
MAX_NODES = 256  # KD_MAX_NODES
PAGE = 64  # KD_PAGE_TOKENS
MASK_WORDS = MAX_NODES // 64 + 1  # kMaskWords
WILD = 0x3FFFFFFF  # a page id, expert id or row index that nobody may follow

W4 = namedtuple("W4", "q s")  # q uint32 [n][k/8], s uint16 (bf16) [n][k/32]
Experts = namedtuple("Experts", "gate_up down count")  # W4, W4, int
Rope = namedtuple("Rope", "cos sin")  # float32 [max_positions][pairs]

# spec(**case) returns one array or a tuple named by `outputs`. cases(rng) yields dicts of keyword arguments.
# tolerance: dict(rms=, worst=) of floating-point outputs, relative to the RMS of the specification's; integers: equal.
Op = namedtuple("Op", "spec cases tolerance outputs")


@dataclass(frozen=True)
class Shape:
    """native/types.h Shape, field by field."""

    hidden: int = 0
    layers: int = 0
    dense_layers: int = 0
    heads: int = 0
    heads_rank: int = 0
    q_lora: int = 0
    kv_lora: int = 0
    nope: int = 0
    rope: int = 0
    v_head: int = 0
    inter: int = 0
    inter_rank: int = 0
    moe_inter: int = 0
    moe_inter_rank: int = 0
    shared_inter: int = 0
    shared_inter_rank: int = 0
    experts: int = 0
    experts_per_token: int = 0
    vocab: int = 0
    vocab_begin: int = 0
    vocab_rank: int = 0
    max_positions: int = 0
    rms_eps: float = 1e-5
    rms_eps_lora: float = 1e-6
    score_scale: float = 1.0
    routed_scale: float = 1.0
    norm_topk: bool = True
    tp: int = 1
    rank: int = 0

    @property
    def kv_row(self):
        return self.kv_lora + self.rope


@dataclass(frozen=True)
class DraftShape:
    """native/types.h DraftShape, field by field."""

    layers: int = 0
    hidden: int = 0
    heads: int = 0
    heads_rank: int = 0
    kv_heads: int = 0
    kv_heads_rank: int = 0
    head_dim: int = 0
    inter: int = 0
    inter_rank: int = 0
    block: int = 0
    mask_token: int = 0
    rms_eps: float = 1e-5
    taps: tuple = field(default=())
    window: tuple = field(default=())
    causal: tuple = field(default=())


@dataclass(frozen=True)
class Sampling:
    """native/types.h Sampling. temperature, top_p and min_p are rounded to float32 by the specification."""

    temperature: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    choice: int = 0
    want_logprob: int = 0
    want_hash: int = 0
    seed: int = 0


# ---- number formats --------------------------------------------------------------------------------------------------


def bf16(x):
    """Nearest bfloat16 (ties to even) of finite x, as uint16 bits."""
    bits = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def f64(w):
    """The values of an array: uint16 is bf16 bits, a W4 is dequantised, anything else is converted."""
    if isinstance(w, W4):
        return dequantise(w.q, w.s)
    w = np.asarray(w)
    return ((w.astype(np.uint32) << 16).view(np.float32) if w.dtype == np.uint16 else w).astype(np.float64)


def unpack4(q):
    """uint32 [n][k/8] -> int [n][k] in -8..7: nibble j of word i is element 8 i + j, stored as value + 8."""
    nibble = (np.asarray(q)[..., None] >> (4 * np.arange(8, dtype=np.uint32))) & np.uint32(15)
    return nibble.reshape(*q.shape[:-1], -1).astype(np.int64) - 8


def pack4(values):
    """The inverse of unpack4."""
    nibble = (np.asarray(values) + 8).astype(np.uint32).reshape(*np.shape(values)[:-1], -1, 8)
    return np.bitwise_or.reduce(nibble << (4 * np.arange(8, dtype=np.uint32)), axis=-1)


def dequantise(q, s):
    """w[row][e] = (nibble - 8) * s[row][e / 32], float64."""
    return unpack4(q) * np.repeat(f64(s), 32, axis=-1)


def silu(x):
    with np.errstate(over="ignore"):
        return x / (1 + np.exp(-x))


# ---- random material for the cases -----------------------------------------------------------------------------------


def rand(rng, *shape, std=1.0):
    return (rng.standard_normal(shape) * std).astype(np.float32)


def rand_mat(rng, n, k):
    """bf16 [n][k] that keeps the scale of what it is multiplied with."""
    return bf16(rand(rng, n, k, std=k**-0.5))


def rand_norm(rng, width):
    return f64(bf16(1 + 0.2 * rng.standard_normal(width))).astype(np.float32)


def rand_w4(rng, n, k):
    q = rng.integers(0, 1 << 32, (n, k // 8), dtype=np.uint32)
    return W4(q, bf16(np.exp(rng.uniform(-1, 1, (n, k // 32))) * k**-0.5 / 4.6))


def rand_rope(rng, positions, pairs):
    """cos and sin of unrelated angles: an op that looks up the wrong row or pair shows."""
    angle = rng.uniform(-np.pi, np.pi, (positions, pairs))
    return Rope((1.1 * np.cos(angle)).astype(np.float32), (1.1 * np.sin(angle)).astype(np.float32))
