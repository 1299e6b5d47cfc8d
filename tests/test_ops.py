"""Every operation of native/ops.h against its specification, and a row's independence of its company."""

import functools

import backend
import numpy as np
import pytest
import ref
from probes import ISAS, Device, Probes

COLLECTIVE = ("top_logprobs", "sample")  # with logits dealt out to ranks; add_norm has its ranks in the case

# What is indexed by row: arguments and outputs. `v` or `view`: the rows of the view; `out`: the rows chosen from it.
ROWS = {
    "embed": ("token",),
    "rms_norm": ("x",),
    "add_norm": ("x", "y"),
    "keep_tap": ("x",),
    "linear": ("x",),
    "logits": ("x",),
    "swiglu": ("x",),
    "mla_query": ("q", "v"),
    "mla_attention": ("q_lat", "v"),
    "mla_value": ("o_lat",),
    "route": ("h",),
    "moe": ("y", "h", "expert", "weight"),
    "head_norm_rope": ("x", "v"),
    "draft_attention": ("qkv", "v"),
    "top_logprobs": ("logits",),
    "sample": ("logits", "out"),
}
# Rows go to places of their own: any order gives the same pools. Results that are not pools are indexed by row.
SCATTERED = {"mla_latent": ("qkv_a", "v"), "draft_append": ("k", "v", "view")}
POOLS = {"mla_latent": ("kv",), "draft_append": ("k_pool", "v_pool")}
# Nothing to compute with: moved bits, checked exactly by the specification.
MOVES = {
    "zero",
    "copy_rows",
    "plan_context",
    "plan_draft",
    "plan_verify",
    "end_round",
    "tree_build",
    "tree_accept",
    "kv_commit",
    "keep_taps",
}

PARTLY = {("tree_accept", "node"), ("tree_build", "token"), ("tree_build", "parent")}

VIEW_ROWS = ("token", "position", "stream", "slot", "prefix", "mask")


@pytest.fixture(scope="module")
def probes(test_library):
    return Probes(test_library)


@pytest.fixture(scope="module", params=ISAS)
def isa(request, probes):
    if not probes.has(request.param):
        pytest.skip(f"this machine has no {request.param}")
    return request.param


def assert_close(got, want, rms, worst, rounding=0.0, name=""):
    """Both bounds are relative to the RMS of `want`, so cancellation does not trip them; beside `worst` a value may be off by
    `rounding` of itself. Integers: equal."""
    if np.issubdtype(got.dtype, np.integer):
        wrong = np.argwhere(got != want)
        assert not len(wrong), f"{name}: {len(wrong)} differ, first at {wrong[0]}: {got[tuple(wrong[0])]}"
        return
    got, want = got.astype(np.float64), np.asarray(want, np.float64)
    finite = np.isfinite(want)
    assert np.array_equal(np.isfinite(got), finite), f"{name}: NaN or inf where the specification has none"
    if not finite.any():
        return
    scale = np.sqrt(np.mean(want[finite] ** 2)) or 1.0
    error = np.where(finite, np.abs(np.where(finite, got, 0) - np.where(finite, want, 0)) / scale, 0)
    typical = np.sqrt(np.mean(error[finite] ** 2))
    error = np.maximum(0, error - rounding * np.abs(np.where(finite, want, 0)) / scale)
    at = np.unravel_index(error.argmax(), error.shape)
    assert typical <= rms and error[at] <= worst, (
        f"{name}: worst {error[at]:.2e} at {at}: got {got[at]:.6g}, specification {want[at]:.6g}; rms {typical:.2e}"
    )


def assert_same_bits(got, want, what):
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes(), (
            f"{what}: result {i} has other bits"
        )


def more_cases(name, rng):
    """What one implementation finds hard, beside the cases of the specification: long rows, many rows of one expert."""
    if name == "moe":
        for n, hidden, inter in [(31, 1056, 544), (50, 544, 32)]:
            yield dict(y=ref.base.rand(rng, n, hidden), h=ref.base.rand(rng, n, hidden),
                       expert=np.stack([rng.permutation(3)[:2] for _ in range(n)]).astype(np.int32),
                       weight=rng.uniform(0.01, 1.5, (n, 2)).astype(np.float32),
                       w=ref.Experts(ref.base.rand_w4(rng, 3 * 2 * inter, hidden), ref.base.rand_w4(rng, 3 * hidden, inter), 3),
                       s=ref.moe.shape(hidden, inter, 3, 2))  # fmt: skip
    if name in ("linear", "logits"):
        for m, n, k in [(50, 70, 2100), (50, 70, 2112), (20, 1060, 2112), (5, 12820, 136)]:
            yield dict(x=ref.base.rand(rng, m, k), w=ref.base.rand_mat(rng, n, k))


@functools.cache
def worked(name):
    """The cases of an operation, each with what its specification says."""
    op = ref.OPS[name]
    cases = [*op.cases(np.random.default_rng(0)), *more_cases(name, np.random.default_rng(1))]
    cases = [backend.acted(name, case) for case in cases]
    wanted = [op.spec(**case) for case in cases]
    return [(case, want if isinstance(want, tuple) else (want,)) for case, want in zip(cases, wanted, strict=True)]


def assert_matches(name, got, want):
    op = ref.OPS[name]
    for output, a, b in zip(op.outputs, got, want, strict=True):
        if (name, output) in PARTLY:  # of each stream only the first n mean anything
            for path, wanted, n in zip(a, b, want[0], strict=True):
                assert path[:n].tolist() == wanted[:n].tolist()
        else:
            assert_close(a, b, **backend.bounds(name), name=output)


@pytest.mark.parametrize("name", ref.OPS)
@pytest.mark.parametrize("threads", [1, 2])
def test_op_matches_its_spec(name, threads, isa, probes):
    for case, want in worked(name):
        assert_matches(name, getattr(probes, name)(Device(isa, threads), **case), want)


@pytest.mark.parametrize("name", COLLECTIVE)
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_ranks_agree_and_give_what_one_rank_gives(name, tp, probes):
    for case, want in worked(name):
        got = getattr(probes, name)(Device(tp=tp), **case)
        assert_matches(name, got, want)
        assert_same_bits(got, getattr(probes, name)(Device(), **case), f"{tp} ranks")


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_add_norm_adds_in_rank_order(tp, probes, isa):
    """Partial sums whose float32 sum depends on the order: 1 + tiny + tiny .. is 1, tiny + tiny + .. + 1 is not."""
    rng = np.random.default_rng(tp)
    x = rng.standard_normal((5, 48)).astype(np.float32)
    y = backend.act((rng.standard_normal((tp, 5, 48)) * 10.0 ** rng.integers(-6, 6, (tp, 5, 48))).astype(np.float32))
    total = y[0]
    for part in y[1:]:
        total = total + part
    _, got = probes.add_norm(Device(isa, threads=2), x=x, y=y, w=np.ones(48, np.float32), eps=1e-5)
    assert got.tobytes() in ((x + total).tobytes(), functools.reduce(np.add, y, x).tobytes())


@pytest.mark.parametrize(
    "n, k", [(3300, 320), (70, 2112), (70, 2368), (1060, 640), (1060, 2112), (1700, 640), (300, 136)]
)
def test_products_of_few_and_of_many_rows_have_the_same_bits(n, k, probes):
    """How a product is dealt out depends on how many rows there are, and on the GPU by which instructions; its bits do not."""
    rng = np.random.default_rng(n)
    x, w = ref.base.rand(rng, 200, k), ref.base.rand_mat(rng, n, k)
    few = np.concatenate([probes.logits(Device(), x=x[i : i + 8], w=w)[0] for i in range(0, 200, 8)])
    for rows in 12, 16, 27, 32, 50, 64, 100, 128, 130, 200:
        assert_same_bits(probes.logits(Device(), x=x[:rows], w=w), (few[:rows],), f"{rows} rows")


@pytest.mark.parametrize("shape", [1, 3])
def test_latent_products_have_the_bits_of_norm_and_product(shape, isa, probes):
    """Whether the norm is a launch of its own, or each block of the product makes it, depends on how many rows there are."""
    rng, s = np.random.default_rng(shape), ref.mla.SHAPES[shape]
    case = next(
        case for case in ref.mla.mla_latent_cases(rng) if case["s"].q_lora == s.q_lora and len(case["qkv_a"]) > 16
    )
    case = backend.acted("mla_latent", case)
    (normed,) = probes.rms_norm(Device(isa), x=case["qkv_a"][:, : s.q_lora], w=case["q_norm"], eps=s.rms_eps_lora)
    want = probes.linear(Device(isa), x=normed, w=case["q_b"])
    for rows in 1, 2, 7, 8, 9, 16, 17, len(normed):
        some = take("mla_latent", case, np.arange(rows), SCATTERED["mla_latent"])
        assert_same_bits(probes.mla_latent(Device(isa), **some)[:1], (want[0][:rows],), f"{rows} rows")


@pytest.mark.parametrize("name", sorted(ref.OPS))
def test_threads_change_no_bit(name, isa, probes):
    for case, _ in worked(name):
        run = getattr(probes, name)
        want = run(Device(isa, 1), **case)
        assert_same_bits(run(Device(isa, 1), **case), want, "the same call again")
        for threads in 2, 3:
            assert_same_bits(run(Device(isa, threads), **case), want, f"{threads} threads")


def bytes_of(case):
    """How much a case gives an operation, about."""
    nested = (a for value in case.values() for a in (value.values() if isinstance(value, dict) else [value]))
    return sum(a.nbytes for a in nested if isinstance(a, np.ndarray))


@pytest.mark.parametrize("name", sorted(ref.OPS))
def test_repeats_give_the_same_bits(name, probes):
    """A hundred on a GPU, of the largest case, where most is under way at once."""
    case = max((case for case, _ in worked(name)), key=bytes_of)
    run = getattr(probes, name)
    want = run(Device(threads=2), **case)
    for _ in range({"cuda": 99, "cpu": 9}[backend.DEVICE]):
        assert_same_bits(run(Device(threads=2), **case), want, "the same call again")


def take(name, case, pick, arguments):
    """The case with only the rows `pick`, in that order."""
    case = dict(case)
    for argument in arguments:
        if argument == "out":
            case["v"] = {**case["v"], "out_row": case["v"]["out_row"][pick]}
        elif isinstance(case[argument], dict):
            view = case[argument]
            case[argument] = {**view, **{field: view[field][pick] for field in VIEW_ROWS},
                              "out_row": np.arange(len(pick), dtype=np.int32)}  # fmt: skip
        elif name == "add_norm" and argument == "y":
            case["y"] = case["y"][:, pick]
        else:
            case[argument] = case[argument][pick]
    return case


def picks(name, case, n, rng):
    """Selections of rows: alone, in other orders, in larger batches. Blocks of a draft stay together."""
    block = case["d"].block if name == "draft_attention" else 1
    units = n // block
    chosen = [[0], [units // 2], [units - 1], np.arange(units)[::-1], rng.permutation(units),
              np.concatenate((rng.integers(0, units, units), np.arange(units), rng.integers(0, units, 5))),
              rng.integers(0, units, 3 * units + 1)]  # fmt: skip
    return [(np.asarray(c)[:, None] * block + np.arange(block)).ravel() for c in chosen]


@pytest.mark.parametrize("name", ROWS)
def test_a_row_does_not_depend_on_its_company(name, isa, probes):
    rng = np.random.default_rng(1)
    run = getattr(probes, name)
    for case, _ in worked(name):
        whole = run(Device(isa, 2), **case)
        for pick in picks(name, case, len(whole[0]), rng):
            part = run(Device(isa, 1 + len(pick) % 2), **take(name, case, pick, ROWS[name]))
            assert_same_bits(part, [a[pick] for a in whole], f"rows {pick[:8]} of {len(whole[0])}")


def planted(rng, starts, keys):
    """A chain of 17 rows in a tree of each stream, each row but the root beside a sibling that is not among the rows.

    Returns (view, pool) where stream i's root is at starts[i] and the key of position p, wherever it lies, is keys[p]; pool
    rows that no row sees are NaN.
    """
    table, pages = ref.kv.random_page_table(rng, [start + 33 for start in starts])
    pool = np.full((pages * ref.PAGE, keys.shape[1]), np.nan, np.float32)
    node = np.concatenate(([0], np.arange(2, 33, 2)))  # nodes 1, 3, 5 .. are the siblings
    mask = ref.kv.ancestor_masks([-1, *np.repeat(node[:-1], 2)])[node]
    for i, start in enumerate(starts):
        pool[ref.kv.pool_row({"page_table": table}, i, np.arange(start))] = keys[:start]
        pool[ref.kv.pool_row({"page_table": table}, i, start + node)] = keys[start : start + 17]
    rows = {"token": 0, "position": np.add.outer(starts, np.arange(17)), "stream": np.arange(len(starts))[:, None],
            "slot": np.add.outer(starts, node), "prefix": np.array(starts)[:, None]}  # fmt: skip
    view = {k: np.broadcast_to(a, (len(starts), 17)).astype(np.int32).ravel() for k, a in rows.items()}
    view |= {
        "mask": np.tile(mask, (len(starts), 1)),
        "page_table": table,
        "out_row": np.arange(17 * len(starts), dtype=np.int32),
    }
    return view, pool


@pytest.mark.parametrize("shape", [0, 1, 3])
def test_attention_does_not_depend_on_the_tree(shape, isa, probes):
    """The row of a position has the same bits as a prompt row, and at any depth below a root at any place."""
    rng = np.random.default_rng(shape)
    s = ref.mla.SHAPES[shape]
    starts = [*range(52), *range(60, 70), *range(110, 132), 255, 256, 257]
    if shape == 3:  # large rows
        starts = starts[::5]
    length = max(starts) + 17
    keys = backend.act(ref.base.rand(rng, length, s.kv_row))
    q = backend.act(ref.base.rand(rng, length, s.heads_rank * s.kv_row, std=2))
    table, pages = ref.kv.random_page_table(rng, [length])
    pool = np.full((pages * ref.PAGE, s.kv_row), np.nan, np.float32)
    pool[ref.kv.pool_row({"page_table": table}, 0, np.arange(length))] = keys
    prompt = ref.kv.make_view([(0, 0, np.zeros(length, np.int64), None)], table)
    want = probes.mla_attention(Device(isa, 2), q_lat=q, kv=pool, v=prompt, s=s)[0]
    assert_close(want, ref.mla.mla_attention(q, pool, prompt, s), **backend.bounds("mla_attention"))

    view, pool = planted(rng, starts, keys)
    got = probes.mla_attention(Device(isa, 2), q_lat=q[view["position"]], kv=pool, v=view, s=s)[0]
    other = np.flatnonzero((got != want[view["position"]]).any(axis=1))
    assert not len(other), (
        f"root {view['prefix'][other[0]]}, position {view['position'][other[0]]}: other bits than a prompt row"
    )


@pytest.mark.parametrize("name", SCATTERED)
def test_an_appended_row_does_not_depend_on_its_company(name, isa, probes):
    """In any order, and without others: then their places are as they were."""
    rng = np.random.default_rng(1)
    run = getattr(probes, name)
    for case, _ in worked(name):
        whole = run(Device(isa, 1), **case)
        *_, view = (case[argument] for argument in SCATTERED[name])
        place = ref.kv.pool_row(view, view["stream"], view["slot"])
        n = len(place)
        for pick in np.arange(n)[::-1], rng.permutation(n), [0], [n - 1], rng.permutation(n)[: n // 2 + 1]:
            want = []
            for output, a in zip(ref.OPS[name].outputs, whole, strict=True):
                if output in POOLS[name]:
                    pool = case[output].copy()
                    pool[place[pick]] = a[place[pick]]
                    want.append(pool)
                else:
                    want.append(a[pick])
            part = run(Device(isa, 2), **take(name, case, pick, SCATTERED[name]))
            assert_same_bits(part, want, f"rows {pick[:8]} of {n}")


@pytest.mark.parametrize("name", [name for name in ref.OPS if name != "pack_experts"])  # which knows no rows
def test_rows_that_are_not_there_change_nothing(name, isa, probes):
    """How many rows and streams there are is data in a round, which has room for more. What lies where those would be is poison,
    and it is found out if it is written to. The most there could be chooses other tiles."""
    run = getattr(probes, name)
    for case, want in worked(name):
        block = case["d"].block if name == "draft_attention" else 1
        alone = run(Device(isa, 2), **case)
        assert_matches(name, alone, want)
        for more in 3, 61:
            got = run(Device(isa, 2, more=more * block), **case)
            if name in MOVES:
                assert_matches(name, got, want)
            else:
                assert_same_bits(got, alone, f"room for {more * block} more")


def test_every_op_is_in_one_of_the_tables():
    assert set(ref.OPS) == {*ROWS, *SCATTERED, *MOVES} & set(ref.OPS)


def test_nan_logits_are_never_chosen(probes):
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((4, 300)).astype(np.float32)
    logits[0, ::2] = np.nan
    logits[1, logits[1].argmax()] = np.nan
    logits[2] = np.nan
    logits[3] = -np.inf
    clean = np.where(np.isnan(logits), np.float32(-np.inf), logits)
    v, _, _ = ref.kv.random_view(rng, [(10, 4, "prompt")])
    for way in [ref.Sampling(want_logprob=1)] + [
        ref.Sampling(temperature=1, seed=s, want_logprob=1, **more)
        for s in range(20)
        for more in ({}, dict(top_k=7), dict(top_p=0.9), dict(min_p=0.01), dict(top_k=100, top_p=0.5, min_p=0.01))
    ]:
        for tp in 1, 4:
            got = probes.sample(Device(tp=tp), logits=logits, sampling=[way], v=v)
            assert_same_bits(got, probes.sample(Device(tp=tp), logits=clean, sampling=[way], v=v), "NaN is -inf")
            assert np.isfinite(logits[np.arange(2), got[0][:2]]).all()
            assert got[0][2] == got[0][3] == 0
    got = probes.top_logprobs(Device(), logits=logits, k=5)
    assert_same_bits(got, probes.top_logprobs(Device(tp=4), logits=clean, k=5), "NaN is -inf")
    assert got[0][2].tolist() == [0, 1, 2, 3, 4]
