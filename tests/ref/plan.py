"""The rows of a round and its end: native/ops.h "a round's rows".

Streams are a dict: slot, start, draft_start, root, left, budget int32 [n]; stops int32 [n][STOPS]; page_table int32
[n][max_pages].
"""

import numpy as np

from .base import MASK_WORDS, MAX_DEPTH, DraftShape, Op, Shape
from .kv import ancestor_masks, depths, random_page_table, random_tree

PATH = MAX_DEPTH + 1
STOPS = 32
RUN_OVER = 1 << 30


def drafting(streams):
    return (streams["budget"] > 0) & (streams["left"] > 1)


def columns(rows, width):
    """Lists of equally long rows -> int32 arrays, one a column."""
    return tuple(np.array(rows, np.int32).reshape(-1, width).T)


def plan_context(streams, most, ring_rows):
    """-> (draft_start, counts, position, stream, slot, prefix, ring_row)"""
    reached, rows = streams["draft_start"].copy(), []
    for s, drafts in enumerate(drafting(streams)):
        waiting = streams["start"][s] - reached[s]
        if streams["left"][s] and (drafts or waiting > ring_rows - PATH):
            for p in range(reached[s], min(streams["start"][s], reached[s] + most - len(rows))):
                rows.append((p, s, p, p, streams["slot"][s] * ring_rows + p % ring_rows))
                reached[s] = p + 1
    return reached, np.array([len(rows), 0], np.int32), *columns(rows, 5)


def plan_draft(streams, d, s):
    """-> (row, depths, counts, token, position, stream, slot, prefix, out_row)"""
    depth = min(d.block - 1, MAX_DEPTH)
    first, usable, rows, out = [], [], [], []
    for i, drafts in enumerate(drafting(streams)):
        start = streams["start"][i]
        ready = drafts and streams["draft_start"][i] == start
        first.append(len(out))
        usable.append(min(depth, streams["left"][i] - 1) if ready else 0)
        for j in range(d.block if ready else 0):
            at = min(start + j, s.max_positions - 1)
            if 1 <= j <= depth:
                out.append(len(rows))
            rows.append((streams["root"][i] if j == 0 else d.mask_token, at, i, at, start))
    counts = np.array([len(rows), len(out)], np.int32)
    return np.array(first, np.int32), np.array(usable, np.int32), counts, *columns(rows, 5), np.array(out, np.int32)


def plan_verify(streams, nodes):
    """nodes: n [streams], token, parent [streams][stride]
    -> (first_row, parent, counts, token, position, stream, slot, prefix, out_row, mask)"""
    first, parents, rows, masks = [0], [], [], [np.zeros((0, MASK_WORDS), np.uint64)]
    for s, left in enumerate(streams["left"]):
        if left:
            n, start = nodes["n"][s], streams["start"][s]
            parent = np.concatenate(([-1], nodes["parent"][s, :n])).astype(np.int32)
            token = np.concatenate(([streams["root"][s]], nodes["token"][s, :n]))
            rows += [
                (t, start + depth, s, start + i, start)
                for i, (t, depth) in enumerate(zip(token, depths(parent), strict=True))
            ]
            parents.append(parent)
            masks.append(ancestor_masks(parent))
        first.append(len(rows))
    counts = np.array([len(rows), len(rows)], np.int32)
    return (np.array(first, np.int32), np.concatenate([*parents, np.zeros(0, np.int32)]), counts, *columns(rows, 5),
            np.arange(len(rows), dtype=np.int32), np.concatenate(masks))  # fmt: skip


def end_round(streams, trees, kept, choice, round_):
    """-> (n, nodes, token, hash, logprob, draft_start, ended, start, root, left), the first six [round_ + 1][streams]; of a
    path [PATH] its first n are meant. What earlier rounds emitted is left alone: it was 0."""
    streams = {name: a.copy() for name, a in streams.items()}
    count = len(streams["start"])
    given, nodes, draft_start = (np.zeros((round_ + 1, count), np.int32) for _ in range(3))
    token = np.zeros((round_ + 1, count, PATH), np.int32)
    hashes, logprob = token.astype(np.uint64), token.astype(np.float32)
    draft_start[-1] = streams["draft_start"]
    nodes[-1] = np.maximum(0, np.diff(trees["first_row"]) - 1)
    for s, n in enumerate(kept["n"]):
        if n == 0:
            continue
        rows = trees["first_row"][s] + kept["node"][s, :n]
        stopping = np.flatnonzero(np.isin(choice["token"][rows], streams["stops"][s]))
        if len(stopping):
            n = stopping[0] + 1
            rows = rows[:n]
        given[-1, s] = n
        for a, name in ((token, "token"), (hashes, "hash"), (logprob, "logprob")):
            a[-1, s, :n] = choice[name][rows]
        streams["start"][s] += n
        streams["root"][s] = token[-1, s, n - 1]
        streams["left"][s] = 0 if len(stopping) else streams["left"][s] - n
    ended = np.array([round_ + 1 + RUN_OVER], np.int32)
    return (given, nodes, token, hashes, logprob, draft_start, ended,
            streams["start"], streams["root"], streams["left"])  # fmt: skip


# ---- cases -----------------------------------------------------------------------------------------------------------


def random_streams(rng, n, lag=70):
    """Some are at their end, some do not draft, some have taps that wait."""
    start = rng.integers(0, 300, n)
    table, _ = random_page_table(rng, start + 300)
    return {
        "slot": rng.permutation(n + 3)[:n].astype(np.int32),
        "start": start.astype(np.int32),
        "draft_start": np.maximum(0, start - rng.integers(0, lag, n) * (rng.random(n) < 0.7)).astype(np.int32),
        "root": rng.integers(0, 1000, n).astype(np.int32),
        "left": np.where(rng.random(n) < 0.25, 0, rng.integers(1, 40, n)).astype(np.int32),
        "budget": np.where(rng.random(n) < 0.3, 0, rng.integers(1, 257, n)).astype(np.int32),
        "stops": np.where(rng.random((n, STOPS)) < 0.5, -1, rng.integers(0, 1000, (n, STOPS))).astype(np.int32),
        "page_table": table,
    }


def plan_context_cases(rng):
    for n, most in [(1, 64), (5, 640), (17, 64), (64, 640), (64, 1024), (9, 1)]:
        yield {"streams": random_streams(rng, n), "most": most, "ring_rows": 64}
    idle = random_streams(rng, 3)
    yield {"streams": {**idle, "left": np.zeros(3, np.int32)}, "most": 64, "ring_rows": 64}


def plan_draft_cases(rng):
    for n, block, positions in [(1, 8, 4096), (7, 16, 4096), (64, 8, 250), (33, 17, 4096), (5, 20, 300)]:
        d = DraftShape(block=block, mask_token=999)
        yield {"streams": random_streams(rng, n, lag=2), "d": d, "s": Shape(max_positions=positions)}


def random_nodes(rng, n, most):
    stride = max(1, most)
    nodes = {"n": rng.integers(0, most + 1, n).astype(np.int32), "token": rng.integers(0, 1000, (n, stride)),
             "parent": np.full((n, stride), 1 << 30)}  # fmt: skip
    for s, count in enumerate(nodes["n"]):
        nodes["parent"][s, :count] = random_tree(rng, count + 1)[1:]
    return {name: a.astype(np.int32) for name, a in nodes.items()}


def plan_verify_cases(rng):
    for n, most in [(1, 256), (1, 0), (6, 64), (64, 15), (3, 256), (17, 1)]:
        yield {"streams": random_streams(rng, n), "nodes": random_nodes(rng, n, most)}


def end_round_cases(rng):
    for round_, n, most in [(0, 1, 8), (1, 6, 64), (63, 64, 20), (2, 1, 40)]:
        streams = random_streams(rng, n)
        nodes = random_nodes(rng, n, most)
        first, parent = plan_verify(streams, nodes)[:2]
        kept = {"n": np.zeros(n, np.int32), "node": np.full((n, PATH), -1, np.int32)}
        for s in range(n):
            size = first[s + 1] - first[s]
            if size:
                kept["n"][s] = count = rng.integers(1, min(size, PATH, streams["left"][s]) + 1)
                kept["node"][s, :count] = np.sort(np.concatenate(([0], 1 + rng.permutation(size - 1)[: count - 1])))
        rows = int(first[-1])
        choice = {"token": rng.integers(0, 1000, rows).astype(np.int32),
                  "hash": rng.integers(0, 1 << 63, rows, dtype=np.uint64),
                  "logprob": rng.standard_normal(rows).astype(np.float32)}  # fmt: skip
        yield {
            "streams": streams,
            "trees": {"first_row": first, "parent": parent},
            "kept": kept,
            "choice": choice,
            "round_": round_,
        }


EXACT = {"rms": 0.0, "worst": 0.0}
ROWS = ("token", "position", "stream", "slot", "prefix")

OPS = {
    "plan_context": Op(plan_context, plan_context_cases, EXACT, ("draft_start", "counts", *ROWS[1:], "ring_row")),
    "plan_draft": Op(plan_draft, plan_draft_cases, EXACT, ("row", "depths", "counts", *ROWS, "out_row")),
    "plan_verify": Op(
        plan_verify, plan_verify_cases, EXACT, ("first_row", "parent", "counts", *ROWS, "out_row", "mask")
    ),
    "end_round": Op(
        end_round,
        end_round_cases,
        EXACT,
        ("n", "nodes", "token", "hash", "logprob", "draft_start", "ended", "start", "root", "left"),
    ),
}
