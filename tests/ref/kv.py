"""The paged cache: where a slot lives, which keys a row sees, and views to go with it."""

import numpy as np

from .base import MASK_WORDS, PAGE, WILD


def pool_row(view, stream, slot):
    """Row of a pool that holds `slot` of `stream` (arrays broadcast)."""
    slot = np.asarray(slot)
    return view["page_table"][stream, slot // PAGE].astype(np.int64) * PAGE + slot % PAGE


def visible(view, row, slots):
    """bool [slots]: which KV slots of its stream the row sees, itself included."""
    prefix = int(view["prefix"][row])
    seen = np.zeros(max(slots, prefix + 64 * MASK_WORDS), bool)
    seen[:prefix] = True
    words = view["mask"][row].astype("<u8")
    seen[prefix : prefix + 64 * MASK_WORDS] = np.unpackbits(words.view(np.uint8), bitorder="little")
    assert not seen[slots:].any(), "a row sees a slot beyond those asked for"
    return seen[:slots]


def keys_of(view, row):
    """The KV slots the row sees in position order: the prefix, then its ancestors, itself last."""
    last = int(view["prefix"][row]) + 64 * MASK_WORDS
    return np.flatnonzero(visible(view, row, last))


def append(pool, view, rows):
    """The pool with rows[r] written to slot[r] of row r's stream."""
    pool = np.array(pool)
    pool[pool_row(view, view["stream"], view["slot"])] = rows
    return pool


def ancestor_masks(parent):
    """uint64 [n][MASK_WORDS] of a tree's rows; parent[0] = -1, parent[i] < i."""
    mask = np.zeros((len(parent), MASK_WORDS), np.uint64)
    for i, p in enumerate(parent):
        if p >= 0:
            mask[i] = mask[p]
        mask[i, i // 64] |= np.uint64(1 << (i % 64))
    return mask


def depths(parent):
    depth = []
    for p in parent:
        depth.append(0 if p < 0 else depth[p] + 1)
    return np.array(depth, np.int32)


def make_view(streams, page_table, out_row=None):
    """A view of several streams, one after the other.

    streams: list of (stream index, start, tokens, parent). parent None: prompt rows at start, start + 1, ..; else the
    rows of a tree whose root is at position `start`. out_row None: every row.
    """
    parts = []
    for stream, start, tokens, parent in streams:
        n = len(tokens)
        here = np.arange(start, start + n)
        if parent is None:
            mask = np.zeros((n, MASK_WORDS), np.uint64)
            mask[:, 0] = 1
            parts.append((tokens, here, np.full(n, stream), here, here, mask))
        else:
            parts.append(
                (tokens, start + depths(parent), np.full(n, stream), here, np.full(n, start), ancestor_masks(parent))
            )
    names = ("token", "position", "stream", "slot", "prefix", "mask")
    view = {name: np.concatenate(column) for name, column in zip(names, zip(*parts, strict=True), strict=True)}
    view = {name: a if name == "mask" else a.astype(np.int32) for name, a in view.items()}
    n = len(view["token"])
    view["page_table"] = np.asarray(page_table, np.int32)
    view["out_row"] = np.asarray(np.arange(n) if out_row is None else out_row, np.int32)
    return view


def random_page_table(rng, slots, spare_pages=2):
    """Pages in no order for streams of so many slots each; entries past a stream's pages are wild.

    Returns (page_table [streams][max], number of pages in the pool).
    """
    counts = [-(-n // PAGE) for n in slots]
    pages = rng.permutation(sum(counts) + spare_pages)
    table = np.full((len(slots), max(counts) + 1), WILD, np.int32)
    at = 0
    for s, count in enumerate(counts):
        table[s, :count] = pages[at : at + count]
        at += count
    return table, len(pages)


def random_tree(rng, n):
    """parent of n rows, branching, no path deeper than 16."""
    parent, depth = [-1], [0]
    while len(parent) < n:
        late = int(rng.integers(max(0, len(parent) - 5), len(parent)))  # often deep, seldom at the root
        p = late if depth[late] < 16 else int(rng.choice(np.flatnonzero(np.array(depth) < 16)))
        parent.append(p)
        depth.append(depth[p] + 1)
    return np.array(parent, np.int32)


def random_view(rng, streams, vocab=1000, extra_slots=0):
    """streams: list of (start, n rows, "prompt" | "tree"). Returns (view, pool rows, spoil).

    spoil(pool) puts NaN in every pool row that no row of the view sees.
    """
    table, pages = random_page_table(rng, [start + n + extra_slots for start, n, _ in streams])
    order = rng.permutation(len(streams))  # the rows of stream 1 may come before those of stream 0
    view = make_view(
        [
            (
                s,
                streams[s][0],
                rng.integers(0, vocab, streams[s][1]),
                random_tree(rng, streams[s][1]) if streams[s][2] == "tree" else None,
            )
            for s in order
        ],
        table,
    )
    seen = np.zeros(pages * PAGE, bool)
    for r in range(len(view["token"])):
        seen[pool_row(view, view["stream"][r], keys_of(view, r))] = True

    def spoil(pool):
        pool = np.array(pool)
        pool[~seen] = np.nan
        return pool

    return view, pages * PAGE, spoil


# Starts at every alignment that matters to the 16-key steps, to pages and to the empty prefix; several streams at once.
HARD_STREAMS = [
    [(0, 1, "prompt")],
    [(0, 17, "prompt")],
    [(0, 9, "tree")],
    [(15, 2, "tree"), (16, 3, "tree"), (17, 5, "tree"), (31, 4, "tree"), (32, 17, "tree"), (33, 1, "tree")],
    [(63, 17, "tree"), (0, 3, "prompt"), (64, 1, "prompt"), (130, 30, "tree")],
    [(100, 140, "tree"), (61, 5, "prompt")],
]
