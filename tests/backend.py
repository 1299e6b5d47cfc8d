"""Which twin the tests run on (`pytest --device cuda`; the CPU without it), and what that changes for them.

On CUDA an activation is bf16: what an operation is given is rounded to that before the specification sees it, and what it
gives back is rounded once, so its bounds are wider. Everything about bits is as on the CPU."""

import ctypes

import numpy as np
import ref
from ref import base

DEVICE = "cpu"  # set by conftest.py before any test module is imported

# Arguments of an operation that are rows of activations (Act).
ACTS = {
    "copy_rows": ("to", "from_"),
    "rms_norm": ("x",),
    "add_norm": ("y",),
    "linear": ("x",),
    "logits": ("x",),
    "swiglu": ("x",),
    "mla_query": ("q",),
    "mla_latent": ("kv", "qkv_a"),
    "mla_attention": ("q_lat", "kv"),
    "mla_value": ("o_lat",),
    "route": ("h",),
    "moe": ("y", "h"),
    "head_norm_rope": ("x",),
    "draft_append": ("k_pool", "v_pool", "k", "v"),
    "draft_attention": ("qkv", "k_pool", "v_pool"),
    "kv_commit": ("kv",),
    "keep_taps": ("ring", "taps"),
}
# Results that are not Act keep the bounds of the specification; so does what only moves bits.
SAME_BOUNDS = {
    "zero",
    "copy_rows",
    "route",
    "pack_experts",
    "top_logprobs",
    "sample",
    "kv_commit",
    "keep_taps",
    "embed",
}
# A value is rounded once to bf16, which is at most 2^-9 of it; what was summed before that may err a little as well.
BOUNDS = dict(rms=3e-3, worst=3e-3, rounding=2**-8)
# Operations that round between their parts as well, and others.
OTHER = {
    "logits": dict(rms=5e-6, worst=5e-5),  # fp32, but matrix units cut sums short where they would be rounded
    "mla_latent": dict(rms=6e-3, worst=1e-2, rounding=2**-8),  # what is multiplied has been rounded
    "moe": dict(rms=6e-3, worst=5e-2),
    "mla_attention": dict(rms=6e-3, worst=5e-2),
    "draft_attention": dict(rms=6e-3, worst=5e-2),
}


def isas() -> dict[str, tuple[int, int]]:
    """What an operation is tried with: name -> (KD_ISA_*, rows aligned). A GPU has no instruction sets to choose from, but
    kernels that want their rows aligned."""
    if DEVICE == "cuda":
        return {"aligned": (0, 1), "odd": (0, 0)}
    return {"plain": (1, 0), "avx2": (2, 0), "avx512": (3, 0)}


DEFAULT_BUILDER = {"cpu": "heap", "cuda": "device"}  # of a model with a drafter


def assert_logits(got: np.ndarray, want: np.ndarray) -> None:
    """A model's logits [rows][vocab] against the specification's. With activations in bf16 another expert may win here and
    there, which moves its row by more than rounding does: nine rows of ten are close."""
    error = np.abs(got - want).max(axis=1) / want.std()
    if DEVICE == "cpu":
        assert error.max() <= 5e-5
    else:
        assert np.median(error) <= 0.05 and (error <= 0.1).mean() >= 0.9, np.sort(error)[:: len(error) // 10]


def engine_isas() -> list[str]:
    """What kd.Engine(isa=...) may be given."""
    return ["auto"] if DEVICE == "cuda" else ["plain", "avx2", "avx512"]


def act(a: np.ndarray) -> np.ndarray:
    """Values an activation can have."""
    if DEVICE == "cpu":
        return a
    return base.f64(base.bf16(a)).astype(np.float32)


def acted(name: str, case: dict) -> dict:
    return {**case, **{argument: act(case[argument]) for argument in ACTS.get(name, ())}}


def bounds(name: str) -> dict:
    if DEVICE == "cpu" or name in SAME_BOUNDS:
        return ref.OPS[name].tolerance
    return OTHER.get(name, BOUNDS)


def gpus() -> int:
    """GPUs of this machine."""
    count = ctypes.c_int()
    cuda = ctypes.CDLL("libcuda.so.1")
    assert cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0
    return count.value


def share_devices() -> None:
    """Tests of tensor parallelism put as many ranks on a GPU as they want."""
    from kd import structs

    options = structs.options
    structs.options = lambda **values: options(**{**values, "share_devices": 1})
