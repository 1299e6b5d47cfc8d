"""Row movement and norms: native/ops.h "rows"."""

import numpy as np

from .base import WILD, Op, bf16, f64, rand, rand_mat, rand_norm


def embed(token, table, vocab_begin):
    """token [n], table bf16 [vocab_rank][hidden] -> y [n][hidden]; tokens of other ranks or outside give 0."""
    at = np.asarray(token, np.int64) - vocab_begin
    mine = (at >= 0) & (at < len(table))
    return np.where(mine[:, None], f64(table)[np.where(mine, at, 0)], 0.0)


def zero(x):
    """x [n][width] -> x"""
    return np.zeros(np.shape(x), np.float32)


def copy_rows(to, to_row, from_, from_row, n):
    """to[to_row[i]] = from_[from_row[i]] for i < n, in order; an index that is None means i."""
    to = np.array(to)
    for i in range(n):
        to[i if to_row is None else to_row[i]] = from_[i if from_row is None else from_row[i]]
    return to


def rms_norm(x, w, eps):
    """x [n][width], w [width] -> y"""
    x = f64(x)
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * f64(w)


def add_norm(x, y, w, eps):
    """x [n][width], y [ranks][n][width] -> (h, x + sum over ranks of y)"""
    x = f64(x) + f64(y).sum(axis=0)
    return rms_norm(x, w, eps), x


def keep_tap(x):
    """x [n][width] -> tap; float on the CPU, so a copy."""
    return f64(x)


# ---- cases -----------------------------------------------------------------------------------------------------------


def embed_cases(rng):
    for n, hidden, vocab, begin in [(1, 5, 7, 0), (17, 33, 65, 0), (9, 64, 37, 37), (3, 7, 11, 5)]:
        token = rng.integers(0, vocab, n) + begin
        token[::4] = [begin, begin + vocab - 1, begin - 1, begin + vocab, -1][: len(token[::4])]
        yield {"token": token.astype(np.int32), "table": rand_mat(rng, vocab, hidden), "vocab_begin": begin}
    yield {
        "token": np.array([-1, WILD, -(2**31), 2**31 - 1, 4], np.int32),
        "table": rand_mat(rng, 5, 16),
        "vocab_begin": 0,
    }


def zero_cases(rng):
    for n, width in [(1, 1), (1, 33), (17, 100)]:
        yield {"x": np.full((n, width), np.nan, np.float32)}


def copy_rows_cases(rng):
    for n, width, rows in [(1, 1, 3), (17, 33, 40), (16, 64, 16)]:
        to, from_ = np.full((rows, width), np.nan, np.float32), rand(rng, rows, width)
        pick = rng.permutation(rows)[:n].astype(np.int32)
        put = rng.permutation(rows)[:n].astype(np.int32)
        yield {"to": to, "to_row": None, "from_": from_, "from_row": None, "n": n}
        yield {"to": to, "to_row": put, "from_": from_, "from_row": None, "n": n}
        yield {"to": to, "to_row": None, "from_": from_, "from_row": pick, "n": n}
        yield {"to": to, "to_row": put, "from_": from_, "from_row": np.repeat(pick[:1], n), "n": n}
        yield {"to": to, "to_row": put[: n // 2], "from_": from_, "from_row": pick[: n // 2], "n": n // 2}


def rms_norm_cases(rng):
    for n, width, std, eps in [
        (1, 1, 1, 1e-5),
        (1, 7, 1, 1e-6),
        (17, 33, 100, 1e-5),
        (3, 256, 1e-3, 1e-5),
        (2, 1536, 1, 1e-6),
    ]:
        yield {"x": rand(rng, n, width, std=std), "w": rand_norm(rng, width), "eps": eps}
    yield {"x": np.zeros((2, 16), np.float32), "w": rand_norm(rng, 16), "eps": 1e-6}


def add_norm_cases(rng):
    for ranks, n, width in [(1, 1, 7), (1, 17, 256), (2, 3, 33), (4, 1, 64), (8, 17, 100)]:
        yield {
            "x": rand(rng, n, width, std=3),
            "y": rand(rng, ranks, n, width),
            "w": rand_norm(rng, width),
            "eps": 1e-5,
        }


def keep_tap_cases(rng):
    for n, width in [(1, 1), (17, 33)]:
        yield {"x": f64(bf16(rand(rng, n, width))).astype(np.float32)}


EXACT = {"rms": 0.0, "worst": 0.0}
CLOSE = {"rms": 3e-7, "worst": 3e-6}

OPS = {
    "embed": Op(embed, embed_cases, EXACT, ("y",)),
    "zero": Op(zero, zero_cases, EXACT, ("x",)),
    "copy_rows": Op(copy_rows, copy_rows_cases, EXACT, ("to",)),
    "rms_norm": Op(rms_norm, rms_norm_cases, CLOSE, ("y",)),
    "add_norm": Op(add_norm, add_norm_cases, CLOSE, ("h", "x")),
    "keep_tap": Op(keep_tap, keep_tap_cases, EXACT, ("tap",)),
}
