"""Router and 4-bit experts: native/ops.h "experts"."""

import numpy as np

from .base import W4, Experts, Op, Shape, dequantise, f64, pack4, rand, rand_w4, silu, unpack4


def router_scores(h, router):
    """sigmoid(router . h): h [n][hidden], router [experts][hidden] -> [n][experts]"""
    return 1 / (1 + np.exp(-(f64(h) @ f64(router).T)))


def route(h, router, bias, s):
    """h [n][hidden], router fp32 [experts][hidden], bias fp32 [experts] -> (expert, weight) [n][experts_per_token]"""
    score = router_scores(h, router)
    expert = np.argsort(-(score + f64(bias)), axis=1, kind="stable")[:, : s.experts_per_token].astype(np.int32)
    weight = np.take_along_axis(score, expert, axis=1)
    if s.norm_topk:
        weight = weight / (weight.sum(axis=1, keepdims=True) + 1e-20)
    return expert, weight * s.routed_scale


def route_margin(h, router, bias, s):
    """By how much the last expert taken beats the first one left out, per row; inf if all are taken."""
    choice = -np.sort(-(router_scores(h, router) + f64(bias)), axis=1)
    k = s.experts_per_token
    return choice[:, k - 1] - choice[:, k] if k < choice.shape[1] else np.full(len(choice), np.inf)


# The lanes of a product: row g and its eighth below, four neighbours of k (native/cuda/w4_layout.h).
LANE, WORD, NIBBLE = np.ogrid[:32, :4, :8]
TILE_ROW = 16 * (WORD // 2) + LANE // 4 + 8 * (NIBBLE % 2)
TILE_COLUMN = 8 * (LANE % 4) + 4 * (WORD % 2) + 2 * (NIBBLE // 2 % 2) + NIBBLE // 4


def tile_rows(n, inter=0):
    """[n / 32 strips][32]: which row of a matrix of n rows is which of a strip; inter: it is `inter` rows of gate, then of up"""
    strip, row = np.ogrid[: n // 32, :32]
    if not inter:
        return 32 * strip + row
    return np.where(row % 16 < 8, 0, inter) + 16 * strip + 8 * (row // 16) + row % 8


def tile(w, count, inter=0):
    """W4 of `count` matrices back to back, n rows each -> the same words and scales as moe() of CUDA has them.

    q: uint32 [count][n / 32 strips][k / 32 bricks][32 lanes][4], s: uint16 [count][strips][bricks][8][4], in the shapes of w.
    """
    n = len(w.q) // count
    rows = tile_rows(n, inter)
    value = unpack4(w.q).reshape(count, n, -1, 32)[:, rows]  # [count][strip][row][brick][column]
    q = pack4(value.swapaxes(2, 3)[..., TILE_ROW, TILE_COLUMN])  # [count][strip][brick][lane][word]
    scale = w.s.reshape(count, n, -1)[:, rows].swapaxes(2, 3)  # [count][strip][brick][row]
    s = scale.reshape(*scale.shape[:3], 4, 8).swapaxes(3, 4)  # rows g, g + 8, g + 16, g + 24 side by side
    return W4(q.reshape(w.q.shape), np.ascontiguousarray(s).reshape(w.s.shape))


def pack_experts(w, device):
    """Experts as a checkpoint has them -> (gate_up.q, gate_up.s, down.q, down.s) as moe() of `device` has them"""
    if device == "cpu":
        return (*w.gate_up, *w.down)
    return (*tile(w.gate_up, w.count, len(w.gate_up.q) // w.count // 2), *tile(w.down, w.count))


def run_experts(h, expert, weight, gate_up, down):
    """h [n][hidden], gate_up [count][2 inter][hidden], down [count][hidden][inter], all float64 -> [n][hidden]"""
    y = np.zeros_like(h)
    inter = down.shape[2]
    for e in np.unique(expert):
        row, slot = np.nonzero(expert == e)
        both = h[row] @ gate_up[e].T
        np.add.at(y, row, weight[row, slot][:, None] * ((silu(both[:, :inter]) * both[:, inter:]) @ down[e].T))
    return y


def moe(y, h, expert, weight, w, s):
    """y, h [n][hidden]; expert, weight [n][experts_per_token]; w Experts -> y + sum over slots of weight * expert(h)"""
    inter = w.down.q.shape[1] * 8
    gate_up = dequantise(*w.gate_up).reshape(w.count, 2 * inter, -1)
    down = dequantise(*w.down).reshape(w.count, -1, inter)
    return f64(y) + run_experts(f64(h), expert, f64(weight), gate_up, down)


# ---- cases -----------------------------------------------------------------------------------------------------------


def shape(hidden, inter, experts, k, **more):
    return Shape(
        hidden=hidden,
        moe_inter=inter,
        moe_inter_rank=inter,
        experts=experts,
        experts_per_token=k,
        routed_scale=2.827,
        **more,
    )


def route_cases(rng):
    for n, s in [
        (1, shape(33, 32, 5, 2)),
        (17, shape(64, 32, 16, 4)),
        (9, shape(100, 32, 7, 7)),
        (17, shape(256, 32, 384, 8)),
        (4, shape(32, 32, 8, 1)),
        (5, shape(65, 32, 12, 3, norm_topk=False)),
    ]:
        router, bias = rand(rng, s.experts, s.hidden, std=s.hidden**-0.5), rand(rng, s.experts, std=0.1)
        h = rand(rng, 4 * n + 40, s.hidden)
        h = h[route_margin(h, router, bias, s) > 1e-4][:n]  # decisions that float32 must get right
        assert len(h) == n
        yield {"h": h, "router": router, "bias": bias, "s": s}
    s = shape(48, 32, 10, 3)  # equal experts: the lowest id wins; the bias selects but does not weigh
    router = np.repeat(rand(rng, 2, 48, std=0.1), 5, axis=0)
    yield {"h": rand(rng, 17, 48), "router": router, "bias": np.zeros(10, np.float32), "s": s}
    yield {
        "h": rand(rng, 3, 48),
        "router": router,
        "bias": np.array([0, 0, 0, 0, 9, 0, 9, 0, 0, 9], np.float32),
        "s": s,
    }
    yield {"h": np.zeros((2, 48), np.float32), "router": router, "bias": np.zeros(10, np.float32), "s": s}


def moe_cases(rng):
    for n, hidden, inter, count, k in [
        (1, 32, 32, 1, 1),
        (1, 96, 32, 5, 2),
        (17, 64, 96, 7, 3),
        (40, 256, 64, 16, 4),
        (33, 32, 160, 3, 3),
    ]:
        s = shape(hidden, inter, count, k)
        expert = np.stack([rng.permutation(count)[:k] for _ in range(n)]).astype(np.int32)
        if n > 16:
            expert[: n // 2] = expert[0]  # many rows of one expert, none of others
        w = Experts(rand_w4(rng, count * 2 * inter, hidden), rand_w4(rng, count * hidden, inter), count)
        yield {
            "y": rand(rng, n, hidden),
            "h": rand(rng, n, hidden),
            "expert": expert,
            "weight": rng.uniform(0.01, 1.5, (n, k)).astype(np.float32),
            "w": w,
            "s": s,
        }


OPS = {
    "route": Op(route, route_cases, {"rms": 1e-6, "worst": 1e-5}, ("expert", "weight")),
    "moe": Op(moe, moe_cases, {"rms": 2e-6, "worst": 2e-5}, ("y",)),
}
