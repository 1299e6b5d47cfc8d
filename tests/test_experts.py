"""The layout of 4-bit experts, and experts in the sizes and distributions that real models have."""

import backend
import numpy as np
import pytest
import ref
from probes import Device, Probes
from test_ops import assert_close, assert_same_bits


@pytest.fixture(scope="module")
def probes(test_library):
    return Probes(test_library)


def experts(rng, hidden, inter, count):
    gate_up, down = (ref.base.rand_w4(rng, n, k) for n, k in [(count * 2 * inter, hidden), (count * hidden, inter)])
    return ref.Experts(gate_up, down, count)


SIZES = [(32, 32, 1), (96, 32, 5), (64, 160, 3), (256, 96, 7), (1056, 544, 2)]


@pytest.mark.parametrize("hidden, inter, count", SIZES)
def test_packed_experts_are_laid_out_to_the_bit(hidden, inter, count, probes):
    w = experts(np.random.default_rng(hidden), hidden, inter, count)
    got = probes.pack_experts(Device(), w=w, s=ref.moe.shape(hidden, inter, count, 1))
    assert_same_bits(got, ref.moe.pack_experts(w, backend.DEVICE), backend.DEVICE)


@pytest.mark.parametrize("hidden, inter, count", SIZES)
def test_tiling_moves_every_weight_and_scale_to_one_place(hidden, inter, count):
    """Read back by the rule of w4_layout.h, one element after the other."""
    w = experts(np.random.default_rng(inter), hidden, inter, count)
    for matrices, pair in (w.gate_up, inter), (w.down, 0):
        tiled = ref.moe.tile(matrices, count, pair)
        assert tiled.q.shape == matrices.q.shape and tiled.s.shape == matrices.s.shape
        k = matrices.s.shape[1] * 32
        n = len(matrices.q) // count
        q, s = tiled.q.reshape(count, n // 32, k // 32, 32, 4), tiled.s.reshape(count, n // 32, k // 32, 32)
        want = ref.unpack4(matrices.q).reshape(count, n, k)
        scale = matrices.s.reshape(count, n, k // 32)
        rng = np.random.default_rng(1)
        for e, strip, brick, lane, word, v in zip(*(rng.integers(0, most, 500) for most in (*q.shape, 8)), strict=True):
            g, t = divmod(lane, 4)
            row = 16 * (word // 2) + g + 8 * (v % 2)
            column = 32 * brick + 8 * t + 4 * (word % 2) + 2 * (v // 2 % 2) + v // 4
            place = 32 * strip + row
            if pair:
                place = (inter if row % 16 >= 8 else 0) + 16 * strip + 8 * (row // 16) + row % 8
            assert (int(q[e, strip, brick, lane, word]) >> 4 * int(v) & 15) - 8 == want[e, place, column]
            assert s[e, strip, brick, 4 * g + row // 8] == scale[e, place, brick]
        assert np.array_equal(np.sort(ref.unpack4(tiled.q).reshape(count, -1)), np.sort(want.reshape(count, -1)))
        assert np.array_equal(np.sort(tiled.s.reshape(count, -1)), np.sort(scale.reshape(count, -1)))


def rows_of(rng, n, hidden, count, k, favourite=None):
    """Every row goes to k experts; with a favourite, always to that one too."""
    expert = np.stack([rng.permutation(count)[:k] for _ in range(n)]).astype(np.int32)
    if favourite is not None:
        others = np.array([e for e in range(count) if e != favourite])
        expert = np.stack([rng.permutation([favourite, *rng.permutation(others)[: k - 1]]) for _ in range(n)])
    return {
        "y": backend.act(ref.base.rand(rng, n, hidden)),
        "h": backend.act(ref.base.rand(rng, n, hidden)),
        "expert": expert.astype(np.int32),
        "weight": rng.uniform(0.01, 1.5, (n, k)).astype(np.float32),
    }


REAL_SIZES = [
    (1, 256, 256, 16, 4),  # strips shared by one to eight warps; chunks of 1 .. 16 rows and several of them
    (70, 288, 64, 4, 2),
    (9, 7168, 64, 3, 2),
    (11, 1024, 256, 40, 9),
    (260, 3072, 256, 12, 4),  # on CUDA more rows than one launch takes; its parts are rows enough for one
    (9, 7168, 256, 3, 2),  # what a rank of eight of Kimi K2 has of an expert
    (9, 1056, 256, 3, 2),  # nearly that: not whole stages
]


@pytest.mark.parametrize("n, hidden, inter, count, k", REAL_SIZES)
def test_real_sizes(n, hidden, inter, count, k, probes):
    rng = np.random.default_rng(n)
    w, s = experts(rng, hidden, inter, count), ref.moe.shape(hidden, inter, count, k)
    for favourite in None, 2:
        case = {**rows_of(rng, n, hidden, count, k, favourite), "w": w, "s": s}
        (got,) = probes.moe(Device(), **case)
        assert_close(got, ref.moe.moe(**case), **backend.bounds("moe"))
        for some in [0], [n - 1], np.arange(n)[::-2]:
            part = {name: case[name][some] for name in ("y", "h", "expert", "weight")}
            assert_same_bits(probes.moe(Device(), **{**case, **part}), (got[some],), f"rows {some}")


@pytest.mark.parametrize("calls", [24, 400] if backend.DEVICE == "cuda" else [6])
def test_one_call_after_another(calls, probes):
    """Calls with other rows, experts and numbers of rows, again and again: what a call leaves behind is never taken for the next
    one's, and nothing depends on how its parts happen to run."""
    rng = np.random.default_rng(8)
    w, s = experts(rng, 1024, 256, 12), ref.moe.shape(1024, 256, 12, 4)
    cases = [{**rows_of(rng, n, 1024, 12, 4), "w": w, "s": s} for n in (1, 24, 9, 70, 140, 260)]
    want = [probes.moe(Device(), **case) for case in cases]
    for i in range(calls):
        assert_same_bits(probes.moe(Device(), **cases[i % len(cases)]), want[i % len(cases)], f"call {i}")


def test_wild_rows_spoil_only_themselves(probes):
    """NaN and infinity in one row: the rows that share its experts have the same bits as without it."""
    rng = np.random.default_rng(3)
    case = {**rows_of(rng, 20, 64, 3, 2, favourite=1), "w": experts(rng, 64, 32, 3), "s": ref.moe.shape(64, 32, 3, 2)}
    (want,) = probes.moe(Device(), **case)
    h = case["h"].copy()
    h[7, 5], h[12, 40] = np.nan, np.inf
    (got,) = probes.moe(Device(), **{**case, "h": h})
    same = np.setdiff1d(np.arange(20), [7, 12])
    assert_same_bits((got[same],), (want[same],), "rows beside NaN")
    assert np.isnan(got[7]).all()


@pytest.mark.parametrize("n", [1, 17, 64])
def test_route_at_the_size_of_kimi(n, probes):
    rng = np.random.default_rng(n)
    s = ref.moe.shape(7168, 32, 384, 8)
    router, bias = ref.base.rand(rng, 384, 7168, std=7168**-0.5), ref.base.rand(rng, 384, std=0.1)
    h = backend.act(ref.base.rand(rng, 2 * n + 8, 7168))
    h = h[ref.moe.route_margin(h, router, bias, s) > 1e-5][:n]
    got = probes.route(Device(), h=h, router=router, bias=bias, s=s)
    for a, b in zip(got, ref.moe.route(h, router, bias, s), strict=True):
        assert_close(a, b, **backend.bounds("route"))
    for some in [0], np.arange(n)[::-1]:
        assert_same_bits(
            probes.route(Device(), h=h[some], router=router, bias=bias, s=s), [a[some] for a in got], "rows"
        )
