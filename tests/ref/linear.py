"""Matrix products with bf16 weights: native/ops.h "linear"."""

import numpy as np

from .base import Op, f64, rand, rand_mat, silu


def linear(x, w):
    """x [m][k], w bf16 [n][k] -> y [m][n]"""
    return f64(x) @ f64(w).T


def logits(x, w):
    """The same; the op writes fp32 with a stride of its own."""
    return linear(x, w)


def swiglu(x):
    """x [m][2 width]: gate, then up -> silu(gate) * up [m][width]"""
    gate, up = np.split(f64(x), 2, axis=1)
    return silu(gate) * up


# ---- cases -----------------------------------------------------------------------------------------------------------


def linear_cases(rng):
    for m, n, k in [
        (1, 1, 1),
        (1, 7, 17),
        (17, 5, 33),
        (3, 33, 100),
        (2, 80, 256),
        (33, 130, 64),
        (1, 257, 768),
        (5, 3, 1536),
    ]:
        yield {"x": rand(rng, m, k), "w": rand_mat(rng, n, k)}


def swiglu_cases(rng):
    for m, width, std in [(1, 1, 1), (17, 33, 5), (3, 256, 1)]:
        yield {"x": rand(rng, m, 2 * width, std=std)}
    yield {"x": np.array([[-1000, 1000, -88, 0, 88, 3, 3, 3, 3, 3]], np.float32)}


TOLERANCE = {"rms": 1e-6, "worst": 1e-5}

OPS = {
    "linear": Op(linear, linear_cases, TOLERANCE, ("y",)),
    "logits": Op(logits, linear_cases, TOLERANCE, ("y",)),
    "swiglu": Op(swiglu, swiglu_cases, TOLERANCE, ("y",)),
}
