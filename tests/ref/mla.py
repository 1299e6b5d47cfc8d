"""Multi-head latent attention in absorbed form: native/ops.h "attention of the target"."""

from dataclasses import replace

import numpy as np

from .base import Op, Shape, f64, rand, rand_mat, rand_norm, rand_rope
from .kv import HARD_STREAMS, append, pool_row, random_view, visible
from .linear import linear
from .rows import rms_norm


def rotate_pairs(x, rope, position):
    """x [n][..][2 pairs]: rotate elements (2 i, 2 i + 1) by the angle of pair i at position[n]."""
    between = (1,) * (x.ndim - 2)
    cos, sin = (f64(t)[position].reshape(len(x), *between, -1) for t in rope)
    a, b = x[..., 0::2], x[..., 1::2]
    return np.stack((a * cos - b * sin, a * sin + b * cos), axis=-1).reshape(x.shape)


def mla_query(q, k_up, rope, v, s):
    """q [n][heads_rank * (nope + rope)], k_up [heads_rank * nope][kv_lora] -> q_lat [n][heads_rank * kv_row]"""
    q = f64(q).reshape(len(q), s.heads_rank, s.nope + s.rope)
    latent = np.einsum("rhn,hnc->rhc", q[..., : s.nope], f64(k_up).reshape(s.heads_rank, s.nope, s.kv_lora))
    return np.concatenate((latent, rotate_pairs(q[..., s.nope :], rope, v["position"])), axis=-1).reshape(len(q), -1)


def mla_latent(kv, qkv_a, q_norm, q_b, kv_norm, rope, v, s):
    """kv [pool rows][kv_row], qkv_a [n][q_lora + kv_lora + rope], q_b [heads_rank * (nope + rope)][q_lora]
    -> (q [n][heads_rank * (nope + rope)], kv with the rows written)"""
    q_a, latent, key = np.split(f64(qkv_a), [s.q_lora, s.q_lora + s.kv_lora], axis=1)
    latent, key = rms_norm(latent, kv_norm, s.rms_eps_lora), rotate_pairs(key, rope, v["position"])
    q = linear(rms_norm(q_a, q_norm, s.rms_eps_lora), q_b)
    return q, append(f64(kv), v, np.concatenate((latent, key), axis=1))


def attend(score, value, seen):
    """score [n][heads][keys], value [keys][..] or [keys][heads][..], seen bool [n][keys] -> [n][heads][..]"""
    score = np.where(seen[:, None, :], score, -np.inf)
    p = np.exp(score - score.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    return np.einsum("rhk,kc->rhc", p, value) if value.ndim == 2 else np.einsum("rhk,khc->rhc", p, value)


def by_stream(v, slots, at_once=256):
    """Rows of one stream, a few at a time: (rows, stream, seen bool [rows][slots])."""
    for stream in np.unique(v["stream"]):
        rows = np.flatnonzero(v["stream"] == stream)
        for i in range(0, len(rows), at_once):
            part = rows[i : i + at_once]
            last = int(v["slot"][part].max()) + 1 if slots is None else slots
            yield part, stream, np.stack([visible(v, r, last) for r in part])


def seen_rows(pool, v, stream, seen):
    """The pool's rows of a stream's slots; those no row sees may hold anything and become 0."""
    any_row = seen.any(axis=0)
    rows = np.zeros((len(any_row), pool.shape[1]))
    rows[any_row] = f64(pool)[pool_row(v, stream, np.flatnonzero(any_row))]
    return rows


def mla_attention(q_lat, kv, v, s):
    """q_lat [n][heads_rank * kv_row], kv [pool rows][kv_row] -> o_lat [n][heads_rank * kv_lora]"""
    q = f64(q_lat).reshape(len(q_lat), s.heads_rank, s.kv_row)
    o = np.empty((len(q), s.heads_rank, s.kv_lora))
    for rows, stream, seen in by_stream(v, None):
        key = seen_rows(kv, v, stream, seen)
        score = (q[rows].reshape(-1, s.kv_row) @ key.T).reshape(len(rows), s.heads_rank, -1) * s.score_scale
        o[rows] = attend(score, key[:, : s.kv_lora], seen)
    return o.reshape(len(q), -1)


def mla_value(o_lat, v_up, s):
    """o_lat [n][heads_rank * kv_lora], v_up [heads_rank * v_head][kv_lora] -> o [n][heads_rank * v_head]"""
    o_lat = f64(o_lat).reshape(len(o_lat), s.heads_rank, s.kv_lora)
    return np.einsum("rhc,hic->rhi", o_lat, f64(v_up).reshape(s.heads_rank, s.v_head, s.kv_lora)).reshape(
        len(o_lat), -1
    )


def expanded_attention(q, kv, k_up, v_up, rope, v, s):
    """The textbook form, for comparison: keys and values of every head are formed from the latents. -> o"""
    q = f64(q).reshape(len(q), s.heads_rank, s.nope + s.rope)
    q_nope, q_rope = q[..., : s.nope], rotate_pairs(q[..., s.nope :], rope, v["position"])
    o = np.empty((len(q), s.heads_rank, s.v_head))
    for rows, stream, seen in by_stream(v, None):
        latent, key_rope = np.split(seen_rows(kv, v, stream, seen), [s.kv_lora], axis=1)
        key_nope = (latent @ f64(k_up).T).reshape(-1, s.heads_rank, s.nope)
        value = (latent @ f64(v_up).T).reshape(-1, s.heads_rank, s.v_head)
        score = np.einsum("rhn,khn->rhk", q_nope[rows], key_nope) + np.einsum("rhn,kn->rhk", q_rope[rows], key_rope)
        o[rows] = attend(score * s.score_scale, value, seen)
    return o.reshape(len(q), -1)


# ---- cases -----------------------------------------------------------------------------------------------------------

SHAPES = [
    Shape(heads=3, heads_rank=3, q_lora=3, kv_lora=5, nope=3, rope=2, v_head=7, score_scale=0.7, rms_eps_lora=1e-6),
    Shape(
        heads=8, heads_rank=8, q_lora=96, kv_lora=64, nope=32, rope=16, v_head=32, score_scale=0.2, rms_eps_lora=1e-6
    ),
    Shape(
        heads=8,
        heads_rank=1,
        q_lora=40,
        kv_lora=33,
        nope=17,
        rope=6,
        v_head=9,
        score_scale=0.3,
        rms_eps_lora=1e-6,
        tp=8,
        rank=3,
    ),
    Shape(
        heads=16,
        heads_rank=2,
        q_lora=1536,
        kv_lora=512,
        nope=128,
        rope=64,
        v_head=128,
        score_scale=0.14,
        rms_eps_lora=1e-6,
        tp=8,
    ),
]


def mla_query_cases(rng):
    for s, streams in zip(SHAPES * 2, HARD_STREAMS, strict=False):
        v, _, _ = random_view(rng, streams)
        v["position"][:] = rng.permutation(3000)[: len(v["position"])]
        v["position"][0] = 2999
        yield {
            "q": rand(rng, len(v["token"]), s.heads_rank * (s.nope + s.rope)),
            "k_up": rand_mat(rng, s.heads_rank * s.nope, s.kv_lora),
            "rope": rand_rope(rng, 3000, s.rope // 2),
            "v": v,
            "s": s,
        }


def mla_latent_cases(rng):
    for s, streams in zip(SHAPES * 2, HARD_STREAMS, strict=False):
        v, rows, _ = random_view(rng, streams)
        yield {
            "kv": rand(rng, rows, s.kv_row),
            "qkv_a": rand(rng, len(v["token"]), s.q_lora + s.kv_row),
            "q_norm": rand_norm(rng, s.q_lora),
            "q_b": rand_mat(rng, s.heads_rank * (s.nope + s.rope), s.q_lora),
            "kv_norm": rand_norm(rng, s.kv_lora),
            "rope": rand_rope(rng, 300, s.rope // 2),
            "v": v,
            "s": replace(s, max_positions=300),
        }


def mla_attention_cases(rng):
    # where the grouping of keys changes on a device; the trees have rows on both sides
    far = [[(8170, 17, "tree"), (8191, 3, "prompt")]]
    wide = [[(2056, 30, "tree"), (700, 40, "prompt"), (2070, 1, "prompt")], [(12297, 14, "tree")]]
    shapes = SHAPES + SHAPES[:3] + [SHAPES[3]] * 2
    for s, streams in zip(shapes, HARD_STREAMS + far + wide, strict=True):
        v, rows, spoil = random_view(rng, streams)
        yield {
            "q_lat": rand(rng, len(v["token"]), s.heads_rank * s.kv_row),
            "kv": spoil(rand(rng, rows, s.kv_row)),
            "v": v,
            "s": s,
        }
    s = SHAPES[1]
    v, rows, spoil = random_view(
        rng, HARD_STREAMS[4]
    )  # scores so large that one key takes all, and so small that all share
    for std in 30.0, 1e-4:
        yield {
            "q_lat": rand(rng, len(v["token"]), s.heads_rank * s.kv_row, std=std),
            "kv": spoil(rand(rng, rows, s.kv_row)),
            "v": v,
            "s": s,
        }


def mla_value_cases(rng):
    for s, n in zip(SHAPES, [1, 17, 3, 2], strict=True):
        yield {
            "o_lat": rand(rng, n, s.heads_rank * s.kv_lora),
            "v_up": rand_mat(rng, s.heads_rank * s.v_head, s.kv_lora),
            "s": s,
        }


OPS = {
    "mla_query": Op(mla_query, mla_query_cases, {"rms": 1e-6, "worst": 1e-5}, ("q_lat",)),
    "mla_latent": Op(mla_latent, mla_latent_cases, {"rms": 3e-7, "worst": 3e-6}, ("q", "kv")),
    "mla_attention": Op(mla_attention, mla_attention_cases, {"rms": 3e-6, "worst": 6e-5}, ("o_lat",)),
    "mla_value": Op(mla_value, mla_value_cases, {"rms": 1e-6, "worst": 1e-5}, ("o",)),
}
