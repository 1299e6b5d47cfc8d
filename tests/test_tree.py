"""Tree builders by kd_builder_build, and what the engine does with trees before it verifies them."""

import itertools
import math

import numpy as np
import pytest
import ref
from probes import ROOT, Probes

VECTORS = np.load(ROOT / "tests" / "data" / "ddtree_vectors.npz")  # made with the paper's reference implementation
CASES = sorted({name.split("/")[0] for name in VECTORS.files})
MAX_NODES = 256
VOCAB = 1 << 30


@pytest.fixture(scope="module")
def native(test_library):
    return Trees(Probes(test_library))


class Trees:
    def __init__(self, probes):
        self.ffi, self.lib = probes.ffi, probes.lib

    def table(self, token, logprob, budget):
        """A kd_tree_in and what it points to."""
        token, logprob = np.ascontiguousarray(token, np.int32), np.ascontiguousarray(logprob, np.float32)
        depths, width = token.shape if token.size else (0, 0)
        arrays = self.ffi.from_buffer("int32_t[]", token), self.ffi.from_buffer("float[]", logprob)
        size = self.ffi.sizeof("kd_tree_in")
        return self.ffi.new("kd_tree_in *", [size, depths, width, budget, 5, 100, *arrays]), arrays

    def tree(self, token=(), parent=(), room=0):
        """A kd_tree_out that holds a tree, and its arrays."""
        assert len(token) == len(parent)
        arrays = []
        for values in token, parent:
            a = np.full(max(room, len(token)) + 1, -0x55555556, np.int32)
            a[: len(values)] = values
            arrays.append(self.ffi.from_buffer("int32_t[]", a))
        return self.ffi.new("kd_tree_out *", [self.ffi.sizeof("kd_tree_out"), len(token), *arrays]), arrays

    def build(self, name, token, logprob, budget):
        """(token of each node, parent of each node), lists of equal length."""
        table, keep = self.table(token, logprob, budget)
        out, arrays = self.tree(room=budget)
        status = self.lib.kd_builder_build(name.encode(), table, out)
        assert status == 0, f"{status}: {self.error()}"
        assert all(list(a)[out.n :] == [-0x55555556] * (budget + 1 - out.n) for a in arrays), "wrote past its nodes"
        return tuple(list(a)[: out.n] for a in arrays)

    def error(self):
        return self.ffi.string(self.lib.kd_last_error()).decode()

    def check(self, token, parent, *, depths=16, budget=MAX_NODES, vocab=VOCAB, n=None, max_depth=16):
        """What is wrong with a tree, or None."""
        table, keep = self.table(np.zeros((depths, 1)), np.zeros((depths, 1)), budget)
        out, arrays = self.tree(token, parent)
        if n is not None:
            out.n = n
        problem = self.lib.kd_probe_check_tree(table, out, vocab, max_depth)
        return None if problem == self.ffi.NULL else self.ffi.string(problem).decode()

    def gains(self, table, tree):
        """The gain of each node of a (token, parent) tree by a (token, logprob) table."""
        given, keep = self.table(*table, MAX_NODES)
        out, arrays = self.tree(*tree)
        gain = np.full(len(tree[0]) + 1, np.nan)
        self.lib.kd_probe_node_gains(self.ffi.from_buffer("double[]", gain), given, out)
        return gain[:-1]

    def cut(self, tables, trees, max_rows):
        """Nodes left in each tree."""
        given = [self.table(*table, MAX_NODES) for table in tables]
        out = [self.tree(*tree) for tree in trees]
        ins, outs = [t for t, _ in given], [t for t, _ in out]
        rows = self.lib.kd_probe_cut_trees(ins, outs, len(ins), max_rows)
        assert rows == sum(t.n + 1 for t in outs)
        return [t.n for t in outs]


def random_table(rng, depths, width, vocab=None, spread=2.0):
    """(token, logprob) [depths][width] of random distributions over `vocab` tokens."""
    vocab = vocab or max(width, 2) * 3
    logits = rng.standard_normal((depths, vocab)) * spread
    logprob = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    token = np.argsort(-logprob, axis=1, kind="stable")[:, :width].astype(np.int32)
    return token, np.take_along_axis(logprob, token, axis=1).astype(np.float32)


# ---- builders --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_heap_builds_the_papers_trees(case, native):
    of = {
        name: VECTORS[f"{case}/{name}"] for name in ("top_ids", "top_logprobs", "budget", "tokens", "parents", "depths")
    }
    token, parent = native.build("heap", of["top_ids"], of["top_logprobs"], int(of["budget"]))
    assert token == of["tokens"].tolist()
    assert [-1, *parent] == of["parents"].tolist()


def prefixes(logprob):
    """Every path through a table: (log-probability, ranks)."""
    depths, width = logprob.shape
    for depth in range(1, depths + 1):
        for ranks in itertools.product(range(width), repeat=depth):
            yield sum(float(logprob[d, r]) for d, r in enumerate(ranks)), ranks


def paths(token, parent):
    """The tokens from the root to each node."""
    found = [()]
    for t, p in zip(token, parent, strict=True):
        found.append((*found[p], t))
    return found[1:]


@pytest.mark.parametrize("seed", range(12))
def test_heap_takes_the_most_probable_prefixes(seed, native):
    rng = np.random.default_rng(seed)
    depths, width = [(1, 9), (2, 6), (3, 4), (4, 3), (5, 3), (7, 2)][seed % 6]
    token, logprob = random_table(rng, depths, width)
    best = sorted((p for p, _ in prefixes(logprob)), reverse=True)
    for budget in 1, 2, 5, 17, 40, MAX_NODES:
        built = paths(*native.build("heap", token, logprob, budget))
        assert len(set(built)) == len(built) == min(budget, len(best)), "a table with too few prefixes runs dry"
        place = [dict(zip(row.tolist(), lp.tolist(), strict=True)) for row, lp in zip(token, logprob, strict=True)]
        got = [sum(place[d][t] for d, t in enumerate(path)) for path in built]
        np.testing.assert_allclose(got, best[: len(got)], rtol=0, atol=1e-12)


@pytest.mark.parametrize("seed", range(30))
def test_ties_go_by_the_ranks_along_the_path(seed, native):
    """Log-probabilities of few different values, so that equal sums are the rule."""
    rng = np.random.default_rng(seed)
    depths, width = int(rng.integers(1, 9)), int(rng.integers(1, 9))
    token = np.stack([rng.permutation(width) for _ in range(depths)])
    logprob = -np.sort(rng.integers(0, 3, (depths, width)), axis=1).astype(np.float32) / 2
    for budget in 3, 30, MAX_NODES:
        want = ref.tree.heap(token, logprob, budget)
        assert native.build("heap", token, logprob, budget) == (want.token, want.parent[1:])


@pytest.mark.parametrize("seed", range(10))
def test_sums_are_rounded_as_in_the_papers_reference(seed, native):
    """Every depth has the same row, so paths of the same ranks in another order tie but for rounding. And a best token that
    is all but certain makes sums longer than a double."""
    row = random_table(np.random.default_rng(seed), 1, 6)
    row[1][0, 0] = np.float32(-1e-12) * (1 + row[0][0, 0])
    token, logprob = (np.repeat(a, 6, axis=0) for a in row)
    want = ref.tree.heap(token, logprob, MAX_NODES)
    assert native.build("heap", token, logprob, MAX_NODES) == (want.token, want.parent[1:])


@pytest.mark.parametrize("name", ["none", "chain", "heap"])
def test_builders_equal_their_specification(name, native):
    rng = np.random.default_rng(0)
    for depths, width, budget in [(0, 0, 0), (0, 0, 8), (1, 1, 0), (1, 1, 1), (15, 16, 8), (15, 3, 60), (32, 40, 256),
                                  (16, 300, 256), (7, 5, 7)]:  # fmt: skip
        token, logprob = random_table(rng, depths, width) if depths else (np.zeros((0, 0)), np.zeros((0, 0)))
        want = ref.tree.BUILDERS[name](token, logprob, budget)
        assert native.build(name, token, logprob, budget) == (want.token, want.parent[1:])


def test_heap_takes_impossible_tokens_last(native):
    """And among them goes by ranks, though the difference of two infinities is no number."""
    logprob = np.array([[-0.5, -1, -np.inf, -np.inf, -np.inf]] * 4, np.float32)
    token = np.arange(20).reshape(4, 5)
    frontier, want = [(0,)], []
    while frontier and len(want) < MAX_NODES:
        ranks = min(frontier, key=lambda ranks: (-sum(float(logprob[d, r]) for d, r in enumerate(ranks)), ranks))
        frontier.remove(ranks)
        want.append(tuple(int(token[d, r]) for d, r in enumerate(ranks)))
        frontier += [(*ranks[:-1], ranks[-1] + 1)] * (ranks[-1] < 4) + [(*ranks, 0)] * (len(ranks) < 4)
    assert paths(*native.build("heap", token, logprob, MAX_NODES)) == want
    assert not any(np.isinf(logprob[0, t % 5]) for path in want[:30] for t in path)


BAD_TABLES = {
    "a depth too many": dict(depths=33),
    "negative depths": dict(depths=-1),
    "no width": dict(width=0),
    "a budget too large": dict(budget=257),
    "a negative budget": dict(budget=-1),
    "no tokens": dict(token=None),
    "no log-probabilities": dict(logprob=None),
}


@pytest.mark.parametrize("what", BAD_TABLES)
def test_bad_tables_are_refused(what, native):
    table, keep = native.table(*random_table(np.random.default_rng(0), 3, 4), 8)
    for field, value in BAD_TABLES[what].items():
        setattr(table, field, native.ffi.NULL if value is None else value)
    out, arrays = native.tree(room=8)
    assert native.lib.kd_builder_build(b"heap", table, out) == native.lib.KD_E_INVALID
    assert native.error().startswith("kd_builder_build: ")


def test_bad_calls_are_refused(native):
    ffi, lib, build = native.ffi, native.lib, native.lib.kd_builder_build
    table, keep = native.table(*random_table(np.random.default_rng(0), 3, 4), 8)
    out, arrays = native.tree(room=8)
    assert (
        build(ffi.NULL, table, out)
        == build(b"heap", ffi.NULL, out)
        == build(b"heap", table, ffi.NULL)
        == lib.KD_E_INVALID
    )
    assert build(b"bush", table, out) == lib.KD_E_NOT_FOUND and "bush" in native.error()
    for struct in table, out:
        struct.size -= 1
        assert build(b"heap", table, out) == lib.KD_E_SIZE
        struct.size += 1
    out.token = ffi.NULL
    assert build(b"heap", table, out) == lib.KD_E_INVALID

    for spoil, value in [((1, 2), np.nan), ((0, 1), 3.0)]:
        token, logprob = random_table(np.random.default_rng(0), 3, 4)
        logprob[spoil] = value
        table, keep = native.table(token, logprob, 8)
        out, arrays = native.tree(room=8)
        assert (
            build(b"heap", table, out) == lib.KD_E_INVALID
            and f"depth {spoil[0] + 1}, place {spoil[1]}" in native.error()
        )

    token, logprob = random_table(np.random.default_rng(0), 1, 4)
    table, keep = native.table(token * 0, logprob, 8)
    assert build(b"heap", table, native.tree(room=8)[0]) == lib.KD_E_INVALID and "same token" in native.error()


def test_a_newer_callers_struct_is_refused_only_if_it_says_something_new(native):
    ffi = native.ffi
    table, keep = native.table(*random_table(np.random.default_rng(0), 3, 4), 4)
    size = ffi.sizeof("kd_tree_in")
    longer = ffi.new("char[]", size + 16)
    ffi.memmove(longer, table, size)
    newer = ffi.cast("kd_tree_in *", longer)
    newer.size = size + 16
    out, arrays = native.tree(room=4)
    assert native.lib.kd_builder_build(b"heap", newer, out) == 0 and out.n == 4
    longer[size + 15] = b"\x01"
    assert native.lib.kd_builder_build(b"heap", newer, out) == native.lib.KD_E_TOO_NEW


# ---- check_tree ------------------------------------------------------------------------------------------------------


def test_built_trees_pass(native):
    rng = np.random.default_rng(0)
    for _ in range(30):
        table = random_table(rng, int(rng.integers(1, 17)), int(rng.integers(1, 40)))
        tree = native.build("heap", *table, int(rng.integers(0, 257)))
        assert native.check(*tree, depths=len(table[0])) is None


@pytest.mark.parametrize(
    "token, parent, more, says",
    [
        ([], [], dict(n=-1), "number of nodes"),
        ([1, 2], [0, 1], dict(budget=1), "number of nodes"),
        ([1], [0], dict(n=2**31 - 1), "number of nodes"),
        ([1], [0], dict(n=257, budget=300), "number of nodes"),
        ([1], [-1], {}, "parent"),
        ([1], [1], {}, "parent"),
        ([1, 2, 3], [0, 2, 1], {}, "parent"),
        ([1, 2], [0, 2**31 - 1], {}, "parent"),
        ([1, 2], [0, -(2**31)], {}, "parent"),
        ([1] * 17, range(17), {}, "deeper"),
        ([1, 2], [0, 1], dict(depths=1), "deeper"),
        ([1], [0], dict(depths=0), "deeper"),
        ([1, 2], [0, 1], dict(max_depth=1), "deeper"),
        ([-1], [0], {}, "vocabulary"),
        ([7], [0], dict(vocab=7), "vocabulary"),
        ([2**31 - 1], [0], {}, "vocabulary"),
        ([5, 5], [0, 0], {}, "same token"),
        ([5, 6, 7, 8, 6], [0, 1, 0, 1, 1], {}, "same token"),
    ],
)
def test_what_is_no_tree_is_told(token, parent, more, says, native):
    assert says in native.check(token, list(parent), **more)


def test_what_is_a_tree_passes(native):
    assert native.check([], []) is None
    assert native.check([0], [0], vocab=1) is None
    assert native.check([3] * 16, list(range(16))) is None
    assert native.check([5, 5, 5], [0, 1, 2]) is None, "the same token below different parents"
    assert native.check(list(range(256)), [0] * 256) is None


def test_the_same_token_below_other_parents_is_no_mistake(native):
    rng = np.random.default_rng(4)
    for _ in range(100):
        parent = [int(rng.integers(max(0, i - 12) // 2, i // 2 + 1)) for i in range(256)]
        token = [100 * int(rng.integers(0, 3)) + parent[:i].count(parent[i]) for i in range(256)]
        assert native.check(token, parent, depths=32, max_depth=32) is None


def test_a_repeated_sibling_is_found_wherever_it_is(native):
    rng = np.random.default_rng(3)
    for _ in range(300):
        n = int(rng.integers(2, 257))
        parent = [int(rng.integers(max(0, i - 12) // 2, i // 2 + 1)) for i in range(n)]
        token = [int(t) for t in rng.choice(40000, n, replace=False)]
        assert native.check(token, parent, depths=32, max_depth=32) is None
        last = int(rng.integers(1, n))
        brothers = [i for i in range(last) if parent[i] == parent[last]]
        if brothers:
            token[last] = token[int(rng.choice(brothers))]
            assert "same token" in native.check(token, parent, depths=32, max_depth=32)


# ---- gains and cutting -----------------------------------------------------------------------------------------------


def test_gains_are_path_probabilities(native):
    rng = np.random.default_rng(0)
    table = token, logprob = random_table(rng, 6, 9)
    built = native.build("heap", *table, 100)
    place = [dict(zip(row.tolist(), lp.tolist(), strict=True)) for row, lp in zip(token, logprob, strict=True)]
    want = [math.exp(sum(place[d][t] for d, t in enumerate(path))) for path in paths(*built)]
    np.testing.assert_allclose(native.gains(table, built), want, rtol=1e-12)
    assert (np.diff(want) <= 1e-15).all()


def test_tokens_the_table_does_not_know_gain_nothing(native):
    table = np.array([[1, 2], [3, 4]]), np.log(np.array([[0.5, 0.25], [0.5, 0.125]], np.float32))
    tree = [1, 9, 3, 3, 4, 3], [0, 0, 1, 2, 1, 3]  # 9 is unknown, so is what hangs below it; a third depth has no row
    np.testing.assert_allclose(native.gains(table, tree), [0.5, 0, 0.25, 0, 0.0625, 0], rtol=1e-6)


def cut_by_definition(gains, max_rows):
    nodes = [len(g) for g in gains]
    while sum(nodes) + len(nodes) > max_rows and any(nodes):
        stream = min((s for s in range(len(nodes)) if nodes[s]), key=lambda s: (gains[s][nodes[s] - 1], -s))
        nodes[stream] -= 1
    return nodes


@pytest.mark.parametrize("seed", range(20))
def test_trees_are_cut_where_least_is_lost(seed, native):
    rng = np.random.default_rng(seed)
    streams = int(rng.integers(1, 65))
    tables = [random_table(rng, int(rng.integers(1, 17)), int(rng.integers(1, 20)), spread=float(rng.uniform(0.1, 6)))
              for _ in range(streams)]  # fmt: skip
    if seed % 2:
        tables = [tables[0]] * streams  # equal gains everywhere
    trees = [native.build("heap", *table, int(rng.integers(0, 65))) for table in tables]
    gains = [native.gains(*pair) for pair in zip(tables, trees, strict=True)]
    rows = sum(len(t[0]) + 1 for t in trees)
    for max_rows in sorted({1, streams, streams + 1, (rows + streams) // 2, rows - 1, rows, rows + 1}):
        assert native.cut(tables, trees, max_rows) == cut_by_definition(gains, max_rows)


def test_of_equal_gains_the_highest_stream_loses_first(native):
    table = np.array([[1, 2]]), np.log(np.array([[0.5, 0.5]], np.float32))
    tree = [1, 2], [0, 0]
    assert [native.cut([table] * 3, [tree] * 3, rows) for rows in (9, 8, 7, 6, 5, 4, 3, 0)] == [
        [2, 2, 2], [2, 2, 1], [2, 2, 0], [2, 1, 0], [2, 0, 0], [1, 0, 0], [0, 0, 0], [0, 0, 0]]  # fmt: skip
