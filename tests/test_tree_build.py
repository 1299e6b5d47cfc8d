"""The operation tree_build against the paper's vectors and against builder `heap`, many streams at once."""

from itertools import groupby

import numpy as np
import pytest
import ref
from probes import ROOT, Device, Probes

VECTORS = np.load(ROOT / "tests" / "data" / "ddtree_vectors.npz")  # made with the paper's reference implementation
STRIDE = 256


@pytest.fixture(scope="module")
def probes(test_library):
    return Probes(test_library)


def build(probes, tables, budgets, device=Device()):  # noqa: B008 (a tuple)
    """Trees (token, parent) of tables (token, logprob) [depth][width], all of one width, in one call."""
    depths = np.array([len(token) for token, _ in tables], np.int32)
    row = np.concatenate(([0], np.cumsum(depths)[:-1])).astype(np.int32)
    token, logprob = (np.concatenate([table[i] for table in tables]) for i in (0, 1))
    n, *nodes = probes.tree_build(device, token=token, logprob=logprob, drafts={"row": row, "depths": depths},
                                  budget=np.array(budgets, np.int32), stride=STRIDE)  # fmt: skip
    return [tuple(a[s, : n[s]].tolist() for a in nodes) for s in range(len(n))]


def test_the_papers_trees(probes):
    cases = [
        {name: VECTORS[f"{i:03}/{name}"] for name in ("top_ids", "top_logprobs", "budget", "tokens", "parents")}
        for i in range(len(VECTORS.files) // 10)
    ]
    cases = [case for case in cases if case["top_ids"].size]

    def width(case):
        return case["top_ids"].shape[1]

    compared = 0
    for _, group in groupby(sorted(cases, key=width), width):
        group = list(group)
        built = build(probes, [(c["top_ids"], c["top_logprobs"]) for c in group], [int(c["budget"]) for c in group])
        for case, (token, parent) in zip(group, built, strict=True):
            assert token == case["tokens"].tolist() and [-1, *parent] == case["parents"].tolist()
            compared += 1
    assert compared > 100


@pytest.mark.parametrize("seed", range(6))
def test_many_streams_at_once(seed, probes):
    rng = np.random.default_rng(seed)
    width = int(rng.choice([1, 2, 5, 16, 64, 256]))
    kinds = ("plain", "ties", "equal", "rounded", "impossible", "nan", "certain")
    tables = []
    for _ in range(64):
        depth = int(rng.integers(1, 17))
        tokens = np.stack([rng.permutation(width) for _ in range(depth)])
        tables.append((tokens, ref.tree.random_table(rng, depth, width, str(rng.choice(kinds)))))
    budgets = rng.choice([0, 1, 2, 15, 16, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256], 64)
    want = [ref.tree.heap(*table, budget) for table, budget in zip(tables, budgets, strict=True)]
    got = build(probes, tables, budgets, Device(threads=2))
    assert got == [(tree.token, tree.parent[1:]) for tree in want]
    assert got[:1] == build(probes, tables[:1], budgets[:1]), "alone as among others"


def drafted(rng, depth, width, kind):
    """Log-probabilities [depth][width] as a drafter's."""
    vocab = 2000
    spread = {"sure": 12, "unsure": 3, "flat": 0.05}.get(kind, 4)
    logits = rng.standard_normal((depth, vocab)) * np.linspace(rng.uniform(0.3, 1), rng.uniform(0.3, 1), depth)[:, None]
    logits = (logits * spread).astype(np.float32)
    if kind == "bf16":  # equal logits are common
        logits = ref.base.f64(ref.base.bf16(logits))
    if kind == "even":  # many sums are nearly equal
        logits = -np.arange(vocab) * rng.uniform(0.05, 0.3) + rng.uniform(0, 1e-6, (depth, vocab))
    if kind == "one":  # one token has nearly all
        logits[:, 0] += rng.uniform(0, 40, depth).astype(np.float32) + logits.max()
    logits = -np.sort(-logits.astype(np.float64), axis=1)
    logits -= logits[:, :1]
    return (logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))[:, :width].astype(np.float32)


@pytest.mark.parametrize("kind", ["sure", "unsure", "flat", "bf16", "even", "one"])
@pytest.mark.parametrize("width", [16, 64, 256])
def test_tables_of_drafters(width, kind, probes):
    rng = np.random.default_rng(width)
    tables = []
    for _ in range(40):
        depth = int(rng.integers(1, 17))
        tables.append((np.stack([rng.permutation(width) for _ in range(depth)]), drafted(rng, depth, width, kind)))
    budgets = rng.integers(1, width + 1, len(tables))
    budgets[::2] = width
    want = [ref.tree.heap(*table, budget) for table, budget in zip(tables, budgets, strict=True)]
    assert build(probes, tables, budgets) == [(tree.token, tree.parent[1:]) for tree in want]


@pytest.mark.parametrize("width", [16, 64, 256])
def test_tables_whose_best_tokens_are_certain_and_more(width, probes):
    """A log-probability is a difference of two rounded numbers: that of a certain token can be a little above 0."""
    rng = np.random.default_rng(width)
    tables, budgets = [], []
    for depth in range(1, 17):
        tokens = np.stack([rng.permutation(width) for _ in range(depth)])
        table = drafted(rng, depth, width, "sure")
        above = rng.choice(np.array([0, 2**-24, 2**-23, 2**-21, 3], np.float32), (2, depth, 1))
        certain = np.where(np.arange(width) == 0, above[0], table - 20)
        for n in (1, 2, depth, depth + 1, width):
            tables += [(tokens, certain), (tokens, table + above[1])]
            budgets += [n, n]
    want = [ref.tree.heap(*table, budget) for table, budget in zip(tables, budgets, strict=True)]
    assert build(probes, tables, budgets) == [(tree.token, tree.parent[1:]) for tree in want]


@pytest.mark.parametrize("width", [16, 64, 256])
def test_tables_with_more_under_a_bound_than_there_is_room_for(width, probes):
    """No deviation costs anything; or all cost nearly the same, so that a bucket holds the table."""
    depth = 16
    rng = np.random.default_rng(width)
    tokens = np.stack([rng.permutation(width) for _ in range(depth)])
    nothing = np.zeros((depth, width), np.float32)
    same = np.where(np.arange(width) == 0, 0, -1 - 2**-17 * np.arange(width) * np.ones((depth, 1))).astype(np.float32)
    shared = (same - np.arange(depth)[:, None] * np.float32(2**-12)) * (np.arange(width) > 0)
    tables, budgets = [], []
    for n in (1, depth, width // 2, width):
        for table in nothing, same, shared.astype(np.float32):
            tables.append((tokens, table))
            budgets.append(n)
    want = [ref.tree.heap(*table, budget) for table, budget in zip(tables, budgets, strict=True)]
    assert build(probes, tables, budgets) == [(tree.token, tree.parent[1:]) for tree in want]
