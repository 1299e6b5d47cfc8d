"""Draft trees: the builders none, chain and heap, what a tree is compiled to, and the verification walk.

A table is one distribution a depth: topid, logprob [depths][K], best first, fp32 natural log-probabilities over the
whole vocabulary. A tree lists its nodes in order; the root, node 0, is the token that is already decided.
"""

import heapq
from dataclasses import dataclass

import numpy as np

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
    minus the elder's own term, plus its own.
    """
    lp = np.asarray(logprob, np.float32).astype(np.float64)
    token, parent = [], [-1]
    width = min(budget, lp.shape[1]) if lp.size else 0
    frontier = [(-lp[0, 0], (0,), 0)] if budget > 0 and width else []  # (-sum, ranks, parent)
    while frontier and len(token) < budget:
        minus_sum, ranks, above = heapq.heappop(frontier)
        d, r = len(ranks) - 1, ranks[-1]
        token.append(int(topid[d][r]))
        parent.append(above)
        if r + 1 < width:
            heapq.heappush(frontier, (-(-minus_sum - lp[d, r] + lp[d, r + 1]), (*ranks[:-1], r + 1), above))
        if d + 1 < len(lp):
            heapq.heappush(frontier, (-(-minus_sum + lp[d + 1, 0]), (*ranks, 0), len(token)))
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
