"""The end of a round: native/ops.h "tree"."""

import numpy as np

from .base import MAX_DEPTH, Op, rand
from .kv import PAGE, make_view, pool_row, random_page_table, random_tree


def tree_accept(trees, choice, v):
    """-> (n [n_streams], node [n_streams][MAX_DEPTH + 1]): the path the target itself takes through each tree"""
    streams = len(trees["first_row"]) - 1
    n = np.ones(streams, np.int32)
    node = np.full((streams, MAX_DEPTH + 1), -1, np.int32)
    for s in range(streams):
        first, end = trees["first_row"][s : s + 2]
        if first == end:  # takes no part
            n[s] = 0
            continue
        parent, token, chosen = (a[first:end] for a in (trees["parent"], v["token"], choice["token"]))
        at = node[s, 0] = 0
        while n[s] <= MAX_DEPTH:
            child = np.flatnonzero((parent == at) & (token == chosen[at]))
            if not len(child):
                break
            at = node[s, n[s]] = child[0]
            n[s] += 1
    return n, node


def kv_commit(kv, kept, trees, v):
    """kv [layers][pool rows][width] -> kv with slot prefix + node[j] moved to prefix + j; the rest stays as it was"""
    kv = np.array(kv)
    for s, n in enumerate(kept["n"]):
        if n == 0:
            continue
        root = trees["first_row"][s]
        stream, prefix = v["stream"][root], v["prefix"][root]
        node = kept["node"][s, :n]
        kv[:, pool_row(v, stream, prefix + np.arange(n))] = kv[:, pool_row(v, stream, prefix + node)]
    return kv


def keep_taps(ring, taps, ring_slot, kept, trees, v, ring_rows):
    """ring [slots * ring_rows][width]: row ring_slot[stream] * ring_rows + position % ring_rows gets the tap -> ring"""
    ring = np.array(ring)
    for s, n in enumerate(kept["n"]):
        if n == 0:
            continue
        root = trees["first_row"][s]
        for j in range(n):
            at = ring_slot[v["stream"][root]] * ring_rows + (v["position"][root] + j) % ring_rows
            ring[at] = taps[root + kept["node"][s, j]]
    return ring


# ---- cases -----------------------------------------------------------------------------------------------------------


def rounds(rng):
    """(view, pool rows, trees, choice): several streams, one tree each; some paths end at once, some at a leaf."""
    for sizes, starts in [
        ([1], [0]),
        ([17], [0]),
        ([1, 5, 33, 257, 2], [64, 0, 63, 100, 200]),
        ([40, 3], [127, 1]),
        ([17, 21], [33, 60]),
        ([0, 4, 0, 9, 0], [10, 3, 50, 64, 7]),  # three take no part
    ]:
        trees = [random_tree(rng, n) if n else np.zeros(0, np.int32) for n in sizes]
        if sizes == [17, 21]:  # a chain to the very end, and one with a sibling at every step
            trees = [
                np.arange(-1, 16, dtype=np.int32),
                np.array([-1] + [p for i in range(10) for p in (max(0, 2 * i), max(0, 2 * i))], np.int32),
            ]
        table, pages = random_page_table(rng, [start + n for start, n in zip(starts, sizes, strict=True)])
        tokens, chosen = [], []
        for parent in trees:
            token, follow = np.zeros(len(parent), np.int64), np.zeros(len(parent), np.int64)
            for p in range(len(parent)):
                child = np.flatnonzero(parent == p)
                token[child] = rng.permutation(1000)[: len(child)]
                lucky = len(child) and (rng.random() < 0.8 or sizes == [17, 21])
                follow[p] = token[child[rng.integers(len(child))]] if lucky else 1000
            tokens.append(token)
            chosen.append(follow)
        v = make_view(
            [
                (s, start, token, parent)
                for s, (start, token, parent) in enumerate(zip(starts, tokens, trees, strict=True))
            ],
            table,
        )
        first = np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)
        yield (
            v,
            pages * PAGE,
            {"first_row": first, "parent": np.concatenate(trees).astype(np.int32)},
            {"token": np.concatenate(chosen).astype(np.int32)},
        )


def kept_rounds(rng):
    for v, rows, trees, choice in rounds(rng):
        n, node = tree_accept(trees, choice, v)
        yield v, rows, trees, {"n": n, "node": node}


def tree_accept_cases(rng):
    for v, _, trees, choice in rounds(rng):
        yield {"trees": trees, "choice": choice, "v": v}


def kv_commit_cases(rng):
    sizes = [(1, 1), (140, 7), (3, 80), (2, 33), (61, 24), (4, 40)]
    for (v, rows, trees, kept), (layers, width) in zip(kept_rounds(rng), sizes, strict=True):
        yield {"kv": rand(rng, layers, rows, width), "kept": kept, "trees": trees, "v": v}


def keep_taps_cases(rng):
    for (v, _, trees, kept), width in zip(kept_rounds(rng), [1, 7, 96, 33, 24, 40], strict=True):
        streams = len(kept["n"])
        ring_slot = rng.permutation(streams + 2)[:streams].astype(np.int32)
        yield {
            "ring": rand(rng, (streams + 2) * 64, width),
            "taps": rand(rng, len(v["token"]), width),
            "ring_slot": ring_slot,
            "kept": kept,
            "trees": trees,
            "v": v,
            "ring_rows": 64,
        }


EXACT = {"rms": 0.0, "worst": 0.0}

OPS = {
    "tree_accept": Op(tree_accept, tree_accept_cases, EXACT, ("n", "node")),
    "kv_commit": Op(kv_commit, kv_commit_cases, EXACT, ("kv",)),
    "keep_taps": Op(keep_taps, keep_taps_cases, EXACT, ("ring",)),
}
