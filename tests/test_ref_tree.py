"""The specification's trees: the authors' vectors, two by hand, and every possible tree of small tables."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from ref import accept, kv, tree

DATA = Path(__file__).parent / "data" / "ddtree_vectors.npz"
N_VECTORS = 120

# P(depth 1) = {.6, .3, .1} of ids {7, 3, 5}, and so on; worked out by hand.
IDS = np.array([[7, 3, 5], [2, 9, 4], [1, 6, 8]])
LOGPROB = np.log(np.array([[0.6, 0.3, 0.1], [0.55, 0.35, 0.1], [0.8, 0.15, 0.05]], np.float32))


@pytest.fixture(scope="module")
def vectors():
    with np.load(DATA) as file:
        return dict(file)


@pytest.mark.parametrize("i", range(N_VECTORS))
def test_heap_equals_the_authors_vectors(vectors, i):
    case = {name.split("/")[1]: a for name, a in vectors.items() if name.startswith(f"{i:03}/")}
    grown = tree.heap(case["top_ids"], case["top_logprobs"], int(case["budget"]))
    assert grown.token == case["tokens"].tolist()
    assert grown.parent == case["parents"].tolist()
    assert grown.depth[1:].tolist() == case["depths"].tolist()
    bits = np.unpackbits(case["visibility"], axis=1, bitorder="little")
    ours = np.unpackbits(grown.mask.astype("<u8").view(np.uint8), axis=1, bitorder="little")
    width = min(bits.shape[1], ours.shape[1])
    assert np.array_equal(bits[:, :width], ours[:, :width]) and not bits[:, width:].any() and not ours[:, width:].any()
    accepted, bonus = tree.walk(grown, case["posterior"])
    assert accepted == case["accepted"].tolist() and bonus == case["bonus"]


def test_the_vector_file_is_whole(vectors):
    assert len(vectors) == 10 * N_VECTORS


def test_hand_vector_of_budget_4():
    grown = tree.heap(IDS, LOGPROB, 4)
    assert (grown.token, grown.depth.tolist(), grown.parent) == ([7, 2, 3, 1], [0, 1, 2, 1, 3], [-1, 0, 1, 0, 2])
    assert tree.links(grown.parent) == ([1, 2, 4, -1, -1], [-1, 3, -1, -1, -1])
    assert grown.mask[:, 0].tolist() == [1, 3, 7, 9, 23]
    assert not grown.mask[:, 1:].any()


def test_hand_vector_of_budget_7():
    grown = tree.heap(IDS, LOGPROB, 7)
    assert grown.token == [7, 2, 3, 1, 9, 1, 2]
    assert grown.parent == [-1, 0, 1, 0, 2, 1, 5, 3]
    assert tree.links(grown.parent) == ([1, 2, 4, 7, -1, 6, -1, -1], [-1, 3, 5, -1, -1, -1, -1, -1])
    assert grown.mask[:, 0].tolist() == [1, 3, 7, 9, 23, 35, 99, 137]


def weight_of(grown, ids, logprob):
    """Sum over nodes of the probability of its path."""
    weight = [1.0]
    for i, parent in enumerate(grown.parent[1:]):
        d = int(grown.depth[i + 1]) - 1
        weight.append(weight[parent] * np.exp(float(logprob[d][list(ids[d]).index(grown.token[i])])))
    return sum(weight[1:])


@pytest.mark.parametrize("seed", range(8))
def test_no_tree_is_better_than_the_heaps(seed):
    rng = np.random.default_rng(seed)
    n_depths, width = [(3, 2), (2, 3), (1, 5), (3, 3)][seed % 4]
    logprob = -np.sort(-np.log(rng.dirichlet(np.ones(width), n_depths)).astype(np.float32), axis=1)
    ids = np.stack([rng.permutation(50)[:width] for _ in range(n_depths)])
    prefixes = [p for d in range(1, n_depths + 1) for p in itertools.product(range(width), repeat=d)]
    value = {p: np.exp(sum(float(logprob[d, r]) for d, r in enumerate(p))) for p in prefixes}
    for budget in range(1, 5):
        best = max(
            sum(value[p] for p in nodes)
            for nodes in itertools.combinations(prefixes, min(budget, len(prefixes)))
            if all(len(p) == 1 or p[:-1] in nodes for p in nodes)
        )
        assert weight_of(tree.heap(ids, logprob, budget), ids, logprob) == pytest.approx(best, rel=1e-9)


def test_equal_sums_go_by_ranks():
    grown = tree.heap(np.array([[4, 5, 6], [7, 8, 9]]), np.full((2, 3), -1, np.float32), 6)
    assert (grown.token, grown.parent) == ([4, 5, 6, 7, 8, 9], [-1, 0, 0, 0, 1, 1, 1])  # (0) (1) (2) (0,0) (0,1) (0,2)
    grown = tree.heap(np.array([[4, 5], [7, 8]]), np.array([[0, 0], [0, 0]], np.float32), 6)
    assert (grown.token, grown.parent) == ([4, 7, 8, 5, 7, 8], [-1, 0, 1, 1, 0, 4, 4])


def test_sums_are_taken_in_the_stated_order():
    """Almost certain depths: the same product reached two ways differs in the last bit, and that decides."""
    row = np.array([float.fromhex(x) for x in ("-0x1.bacab4p-31", "-0x1.16680ap+4", "-0x1.312154p+4")], np.float32)
    grown = tree.heap(np.arange(12).reshape(4, 3), np.tile(row, (4, 1)), 12)
    assert grown.token == [0, 3, 6, 9, 1, 4, 3, 6, 6, 7, 9, 9]
    assert grown.parent == [-1, 0, 1, 2, 3, 0, 1, 5, 6, 7, 2, 8, 9]


def test_edges():
    empty = np.zeros((0, 4))
    for builder in tree.BUILDERS.values():
        assert builder(IDS, LOGPROB, 0).parent == [-1]
        assert builder(empty, empty, 5).parent == [-1]
    assert tree.none(IDS, LOGPROB, 9).token == []
    assert tree.chain(IDS, LOGPROB, 2).token == [7, 2] and tree.chain(IDS, LOGPROB, 99).parent == [-1, 0, 1, 2]
    assert len(tree.heap(IDS, LOGPROB, 999).token) == 3 + 9 + 27  # fewer prefixes than the budget: all of them


def test_a_chain_is_the_heap_of_a_certain_drafter():
    certain = np.log(np.array([[0.98, 0.01, 0.01]] * 3, np.float32))
    a, b = tree.chain(IDS, certain, 3), tree.heap(IDS, certain, 3)
    assert (a.token, a.parent) == (b.token, b.parent)


@pytest.mark.parametrize("seed", range(5))
def test_walk_and_tree_accept_agree(seed):
    rng = np.random.default_rng(seed)
    logprob = -np.sort(rng.exponential(size=(15, 8)).astype(np.float32), axis=1)
    ids = np.stack([rng.permutation(9)[:8] for _ in range(15)])
    grown = tree.heap(ids, logprob, 60)
    view = kv.make_view([(0, 5, [1, *grown.token], grown.parent)], [[0, 1]])
    chosen = rng.integers(0, 9, 61)
    trees = {"first_row": np.array([0, 61]), "parent": np.array(grown.parent)}
    n, node = accept.tree_accept(trees, {"token": chosen}, view)
    accepted, bonus = tree.walk(grown, chosen)
    assert node[0, : n[0]].tolist() == accepted and chosen[accepted[-1]] == bonus


def test_masks_positions_and_keys_of_a_branching_tree():
    view = kv.make_view([(0, 10, [1, 2, 3, 4, 5], [-1, 0, 0, 1, 2])], [[0]])
    assert view["position"].tolist() == [10, 11, 11, 12, 12] and view["slot"].tolist() == [10, 11, 12, 13, 14]
    assert kv.keys_of(view, 3).tolist() == [*range(10), 10, 11, 13]
    assert kv.keys_of(view, 4).tolist() == [*range(10), 10, 12, 14]
    for r in range(5):
        assert len(kv.keys_of(view, r)) == view["position"][r] + 1
