"""Draft trees: the builders none, chain and heap, what a tree is compiled to, and the verification walk.

A table is one distribution a depth: topid, logprob [depths][K], best first, fp32 natural log-probabilities over the
whole vocabulary. A tree lists its nodes in order; the root, node 0, is the token that is already decided.
"""

import heapq
from dataclasses import dataclass

import numpy as np

from .base import MAX_NODES, Op
from .kv import ancestor_masks, depths


@dataclass
class Tree:
    token: list  # of each node but the root
    parent: list  # of every node: parent[0] = -1, parent[i] < i

    @property
    def depth(self):
        return depths(self.parent)

    @property
    def mask(self):
        """uint64 [n][5]: bit j of row i says that node i sees node j"""
        return ancestor_masks(self.parent)


def none(topid, logprob, budget):
    """No node: plain decoding."""
    return Tree([], [-1])


def chain(topid, logprob, budget):
    """The best token of every depth."""
    n = min(budget, len(topid))
    return Tree([int(topid[d][0]) for d in range(n)], list(range(-1, n)))


def heap(topid, logprob, budget):
    """The `budget` most probable prefixes under the product of the depths' distributions, best first.

    Equal sums go by their tuples of ranks. Sums are float64 of fp32 log-probabilities; a sibling's is its elder's,
    minus the elder's own term, plus its own. What is not a number (the difference of two infinities) counts as -inf.
    """
    lp = np.asarray(logprob, np.float32).astype(np.float64)
    token, parent = [], [-1]
    width = min(budget, lp.shape[1]) if lp.size else 0
    frontier = []  # (-sum, ranks, parent)

    def push(total, ranks, parent):
        heapq.heappush(frontier, (-total if total == total else np.inf, ranks, parent))

    if budget > 0 and width:
        push(lp[0, 0], (0,), 0)
    while frontier and len(token) < budget:
        minus_sum, ranks, above = heapq.heappop(frontier)
        d, r = len(ranks) - 1, ranks[-1]
        token.append(int(topid[d][r]))
        parent.append(above)
        if r + 1 < width:
            with np.errstate(invalid="ignore"):
                push(-minus_sum - lp[d, r] + lp[d, r + 1], (*ranks[:-1], r + 1), above)
        if d + 1 < len(lp):
            push(-minus_sum + lp[d + 1, 0], (*ranks, 0), len(token))
    return Tree(token, parent)


BUILDERS = {"none": none, "chain": chain, "heap": heap}


def links(parent):
    """-> (next_token, next_sibling): the first child of every node and the next child of its parent; -1: none"""
    next_token, next_sibling = [-1] * len(parent), [-1] * len(parent)
    youngest = {}
    for i, p in enumerate(parent):
        if p in youngest:
            next_sibling[youngest[p]] = i
        elif p >= 0:
            next_token[p] = i
        youngest[p] = i
    return next_token, next_sibling


def walk(tree, posterior):
    """posterior: the target's token after each node -> (accepted node indices, bonus token)"""
    accepted = [0]
    while True:
        want = posterior[accepted[-1]]
        child = [i for i in range(1, len(tree.parent)) if tree.parent[i] == accepted[-1] and tree.token[i - 1] == want]
        if not child:
            return accepted, int(want)
        accepted.append(child[0])


def tree_build(token, logprob, drafts, budget, stride):
    """token, logprob [rows][width]; drafts: row, depths, perhaps width; budget [n_streams]
    -> n [n_streams], token, parent [n_streams][stride]

    Entries past n[s] are -1 here and mean nothing.
    """
    n = np.zeros(len(budget), np.int32)
    nodes = np.full((2, len(budget), stride), -1, np.int32)
    for s, (row, depth) in enumerate(zip(drafts["row"], drafts["depths"], strict=True)):
        columns = drafts["width"][s] if "width" in drafts else None
        table = slice(row, row + depth), slice(columns)
        grown = heap(token[table], logprob[table], min(budget[s], stride)) if depth > 0 else none(None, None, 0)
        n[s] = len(grown.token)
        nodes[0, s, : n[s]] = grown.token
        nodes[1, s, : n[s]] = grown.parent[1:]
    return n, *nodes


# ---- cases -----------------------------------------------------------------------------------------------------------


def random_table(rng, depth, width, kind):
    """Log-probabilities [depth][width], best first."""
    if kind == "ties":  # few different values: equal sums are the rule
        return -np.sort(rng.integers(0, 3, (depth, width)), axis=1).astype(np.float32) / 2
    if kind == "equal":
        return np.full((depth, width), -1.25, np.float32)
    if kind == "rounded":  # every depth has the same row, and its best token is all but certain: ties but for rounding
        row = -np.sort(rng.exponential(2, width)).astype(np.float32)
        row[0] = -1e-12
        return np.tile(row, (depth, 1))
    table = -np.sort(rng.exponential(2, (depth, width)) ** 2, axis=1).astype(np.float32)
    if kind == "impossible":
        table[:, width // 2 :] = -np.inf
    if kind == "nan":
        table[rng.random(table.shape) < 0.3] = np.nan
    if kind == "certain":
        table[:, 0] = rng.choice(np.array([0.0, -0.0], np.float32), depth)
    return table


def tree_build_cases(rng):
    kinds = ("plain", "ties", "equal", "rounded", "impossible", "nan", "certain")
    for width, depth, stride in [(1, 1, 1), (1, 16, 64), (64, 7, 64), (64, 15, 64), (16, 7, 33), (256, 31, 256), (7, 32, 256),
                                 (3, 2, 256), (300, 3, 100)]:  # fmt: skip
        depths = np.array([depth] * len(kinds) + [0, (depth + 1) // 2], np.int32)
        order = rng.permutation(len(depths))  # whose rows come first in the table
        row = np.zeros(len(depths), np.int32)
        row[order] = np.concatenate(([0], np.cumsum(depths[order])[:-1]))
        rows = sum(depths) + 2
        table = np.full((rows, width), np.nan, np.float32)
        for s, d in enumerate(depths):
            table[row[s] : row[s] + d] = random_table(rng, d, width, kinds[s % len(kinds)])
        row[depths == 0] = 2**30  # nobody follows it
        budget = rng.permutation([0, 1, stride // 2, stride, stride + 5, 300, stride, stride - 1, MAX_NODES])
        own = rng.permutation([1, 1, 2, width, width + 1, 1, 256, (width + 1) // 2, 3])
        yield {
            "token": np.stack([rng.permutation(width) for _ in range(rows)]).astype(np.int32),
            "logprob": table,
            "drafts": {"row": row, "depths": depths} | ({"width": own.astype(np.int32)} if width % 2 == 0 else {}),
            "budget": budget.astype(np.int32),
            "stride": stride,
        }


OPS = {"tree_build": Op(tree_build, tree_build_cases, {"rms": 0.0, "worst": 0.0}, ("n", "token", "parent"))}
