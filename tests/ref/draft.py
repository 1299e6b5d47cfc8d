"""The DFlash drafter: native/ops.h "drafter", and the whole network built of its ops.

One pass over [anchor, mask, mask, ..] gives a distribution per depth. Its keys and values are those of the block itself
and of the context: one vector a committed token, made of the target's taps.
"""

import itertools
from dataclasses import dataclass

import numpy as np

from .base import DraftShape, Op, Rope, Shape, f64, rand, rand_norm, rand_rope
from .kv import append, make_view, pool_row, random_page_table, random_view
from .linear import linear, swiglu
from .rows import rms_norm


def rotate_halves(x, rope, position):
    """x [n][heads][2 pairs]: rotate elements (i, i + pairs) by the angle of pair i at position[n]."""
    cos, sin = (f64(t)[position][:, None, :] for t in rope)
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)


def head_norm_rope(x, norm, rope, v, heads, head_dim, eps):
    """x [n][heads * head_dim] -> x, each head normed and rotated"""
    normed = rms_norm(np.reshape(x, (-1, head_dim)), norm, eps).reshape(len(x), heads, head_dim)
    return rotate_halves(normed, rope, v["position"]).reshape(len(x), -1)


def draft_append(k_pool, v_pool, k, v, view, d):
    """pools [pool rows][kv_heads_rank * head_dim], k and v [n][the same] -> (k_pool, v_pool)"""
    return append(k_pool, view, k), append(v_pool, view, v)


def draft_attention(qkv, k_pool, v_pool, v, window, causal, d):
    """qkv [n][(heads_rank + 2 kv_heads_rank) * head_dim] -> o [n][heads_rank * head_dim]; n a multiple of d.block"""
    qkv = f64(qkv).reshape(len(qkv), -1, d.head_dim)
    q, key, value = np.split(qkv, [d.heads_rank, d.heads_rank + d.kv_heads_rank], axis=1)
    o = np.empty_like(q)
    for r in range(len(q)):
        block = np.arange(r - r % d.block, r + 1 if causal else r - r % d.block + d.block)
        context = np.arange(v["prefix"][r])
        position = np.concatenate((context, v["position"][block]))
        near = np.abs(position - v["position"][r]) < window if window else np.ones(len(position), bool)
        context, block = context[near[: len(context)]], block[near[len(context) :]]
        rows = pool_row(v, v["stream"][r], context)
        k_all, v_all = (
            np.concatenate((f64(pool)[rows].reshape(-1, d.kv_heads_rank, d.head_dim), own[block]))
            for pool, own in ((k_pool, key), (v_pool, value))
        )
        for head in range(d.heads_rank):
            kv_head = head // (d.heads_rank // d.kv_heads_rank)
            score = k_all[:, kv_head] @ q[r, head] * d.head_dim**-0.5
            p = np.exp(score - score.max())
            o[r, head] = p / p.sum() @ v_all[:, kv_head]
    return o.reshape(len(q), -1)


def log_softmax(logits):
    logits = f64(logits)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def top_logprobs(logits, k, s):
    """logits [n][vocab] -> (id, logprob) [n][k], best first; ties: lowest id"""
    best = np.argsort(-f64(logits), axis=1, kind="stable")[:, :k]
    return best.astype(np.int32), np.take_along_axis(log_softmax(logits), best, axis=1)


# ---- the network -----------------------------------------------------------------------------------------------------


@dataclass
class DraftLayer:
    """Weights of one layer, float64. qkv [(heads + 2 kv_heads) * head_dim][hidden]."""

    input_norm: np.ndarray
    post_norm: np.ndarray
    q_norm: np.ndarray
    k_norm: np.ndarray
    qkv: np.ndarray
    o: np.ndarray
    gate_up: np.ndarray
    down: np.ndarray


@dataclass
class Drafter:
    """A loaded drafter. Embedding and head are the target's."""

    shape: DraftShape
    fc: np.ndarray  # [hidden][taps * hidden]
    hidden_norm: np.ndarray
    norm: np.ndarray
    rope: Rope
    layers: list


def new_pools(d, pool_rows):
    """Empty context of every layer: [(k_pool, v_pool)]; what was never written is NaN."""
    width = d.kv_heads * d.head_dim
    return [(np.full((pool_rows, width), np.nan), np.full((pool_rows, width), np.nan)) for _ in range(d.layers)]


def append_context(m, pools, taps, view):
    """Project the taps [n][taps * hidden] of the view's rows into every layer's context. Returns the new pools."""
    d = m.shape
    context = rms_norm(linear(taps, m.fc), m.hidden_norm, d.rms_eps)
    out = []
    for layer, (k_pool, v_pool) in zip(m.layers, pools, strict=True):
        k, value = np.split(linear(context, layer.qkv[d.heads * d.head_dim :]), 2, axis=1)
        k = head_norm_rope(k, layer.k_norm, m.rope, view, d.kv_heads, d.head_dim, d.rms_eps)
        out.append(draft_append(k_pool, v_pool, k, value, view, d))
    return out


def block_view(d, anchors, starts, page_table):
    """One block a stream: [anchor, mask x (block - 1)] at start .. ; the context is the slots below start."""
    streams = [
        (s, start, [anchor] + [d.mask_token] * (d.block - 1), None)
        for s, (anchor, start) in enumerate(zip(anchors, starts, strict=True))
    ]
    view = make_view(streams, page_table)
    view["prefix"] = np.repeat(np.asarray(starts, np.int32), d.block)
    return view


def block_forward(m, x, pools, view):
    """x [n][hidden], embedded blocks -> final hidden states [n][hidden]"""
    d = m.shape
    for layer, (k_pool, v_pool), window, causal in zip(m.layers, pools, d.window, d.causal, strict=True):
        qkv = linear(rms_norm(x, layer.input_norm, d.rms_eps), layer.qkv)
        q, k, value = np.split(qkv, [d.heads * d.head_dim, (d.heads + d.kv_heads) * d.head_dim], axis=1)
        q = head_norm_rope(q, layer.q_norm, m.rope, view, d.heads, d.head_dim, d.rms_eps)
        k = head_norm_rope(k, layer.k_norm, m.rope, view, d.kv_heads, d.head_dim, d.rms_eps)
        qkv = np.concatenate((q, k, value), axis=1)
        x = x + linear(draft_attention(qkv, k_pool, v_pool, view, window, causal, d), layer.o)
        x = x + linear(swiglu(linear(rms_norm(x, layer.post_norm, d.rms_eps), layer.gate_up)), layer.down)
    return rms_norm(x, m.norm, d.rms_eps)


# ---- cases -----------------------------------------------------------------------------------------------------------


def draft_shape(heads, kv_heads, head_dim, block):
    return DraftShape(
        heads=heads, heads_rank=heads, kv_heads=kv_heads, kv_heads_rank=kv_heads, head_dim=head_dim, block=block
    )


SHAPES = [draft_shape(1, 1, 2, 3), draft_shape(3, 1, 10, 8), draft_shape(8, 8, 32, 16), draft_shape(6, 2, 18, 5)]


def head_norm_rope_cases(rng):
    for n, heads, head_dim, eps in [(1, 1, 2, 1e-5), (17, 3, 10, 1e-6), (16, 8, 32, 1e-5), (3, 1, 128, 1e-5)]:
        v, _, _ = random_view(rng, [(7, n, "prompt")])
        v["position"][:] = rng.permutation(2000)[:n]
        yield {
            "x": rand(rng, n, heads * head_dim, std=4),
            "norm": rand_norm(rng, head_dim),
            "rope": rand_rope(rng, 2000, head_dim // 2),
            "v": v,
            "heads": heads,
            "head_dim": head_dim,
            "eps": eps,
        }


def draft_append_cases(rng):
    for d, streams in zip(
        SHAPES,
        [
            [(0, 1, "prompt")],
            [(63, 2, "prompt"), (0, 17, "prompt")],
            [(60, 70, "prompt")],
            [(5, 1, "prompt"), (0, 1, "prompt"), (64, 3, "prompt")],
        ],
        strict=True,
    ):
        view, rows, _ = random_view(rng, streams)
        width = d.kv_heads_rank * d.head_dim
        k_pool, v_pool = rand(rng, 2, rows, width)
        k, v = rand(rng, 2, len(view["token"]), width)
        yield {"k_pool": k_pool, "v_pool": v_pool, "k": k, "v": v, "view": view, "d": d}


def draft_attention_cases(rng):
    for d, starts, windows in [
        (SHAPES[0], [0], [0, 1]),
        (SHAPES[1], [1, 0, 70], [0, 3]),
        (SHAPES[2], [130, 64], [0, 40]),
        (SHAPES[3], [63, 200], [0, 2, 64]),
        (SHAPES[2], [1000], [0]),
    ]:
        for window, causal in itertools.product(windows, (False, True)):
            table, pages = random_page_table(rng, [start + d.block for start in starts])
            v = block_view(d, [5] * len(starts), starts, table)
            seen = np.zeros(pages * 64, bool)
            for s, start in enumerate(starts):
                oldest = max(0, start - window + 1) if window else 0
                seen[pool_row(v, s, np.arange(oldest, start))] = True
            pools = rand(rng, 2, pages * 64, d.kv_heads_rank * d.head_dim)
            pools[:, ~seen] = np.nan
            qkv = rand(rng, len(v["token"]), (d.heads_rank + 2 * d.kv_heads_rank) * d.head_dim)
            yield {
                "qkv": qkv,
                "k_pool": pools[0],
                "v_pool": pools[1],
                "v": v,
                "window": window,
                "causal": causal,
                "d": d,
            }


def top_logprobs_cases(rng):
    for n, vocab, k in [(1, 1, 1), (1, 7, 7), (17, 259, 16), (15, 4096, 32), (3, 1001, 1), (2, 333, 256)]:
        yield {"logits": rand(rng, n, vocab, std=4), "k": k, "s": Shape(vocab=vocab, vocab_rank=vocab)}
    s = Shape(vocab=400, vocab_rank=400)
    yield {"logits": np.round(rand(rng, 17, 400, std=2)), "k": 20, "s": s}  # ties everywhere, as bf16 logits have them
    yield {"logits": np.zeros((2, 400), np.float32), "k": 9, "s": s}
    peak = np.full((2, 400), -60, np.float32)
    peak[0, 399] = peak[1, 0] = 60
    yield {"logits": peak, "k": 3, "s": s}


OPS = {
    "head_norm_rope": Op(head_norm_rope, head_norm_rope_cases, {"rms": 3e-7, "worst": 3e-6}, ("x",)),
    "draft_append": Op(draft_append, draft_append_cases, {"rms": 0.0, "worst": 0.0}, ("k_pool", "v_pool")),
    "draft_attention": Op(draft_attention, draft_attention_cases, {"rms": 2e-6, "worst": 3e-5}, ("o",)),
    "top_logprobs": Op(top_logprobs, top_logprobs_cases, {"rms": 1e-6, "worst": 1e-5}, ("id", "logprob")),
}
