"""The exactness contract on the embedded model: builder, budget, streams, chunk, prefix, sampling and TP, pairwise."""

import itertools
import random

import backend
import pytest
from exact import SAMPLINGS, Ask, Job, Reference, check

import kd

FACTORS = dict(
    builder=[("none", 0), ("chain", 3), ("chain", 15), ("heap", 1), ("heap", 8), ("heap", 64), ("heap", 200)],
    streams=[1, 2, 5, 16],
    chunk=[1, 17, 64, 300],
    cold=[True, False],
    sampling=list(range(len(SAMPLINGS))),
    prompt=list(range(4)),
)
PROMPTS = (
    "def fibonacci(n):\n",
    'def is_prime(n: int) -> bool:\n    """Return True if n is a prime number."""\n',
    "import os\n\n\nclass Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "# Read a CSV file and return its rows as dictionaries.\n" * 6
    + "def read_rows(path):\n    with open(path) as f:\n",
)


def pairwise(factors: dict, rng: random.Random) -> list[dict]:
    """Rows that together hold every pair of values of every two factors (greedy)."""
    names = list(factors)
    missing = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
    }
    rows = []

    def pairs(row):
        return {((a, row[a]), (b, row[b])) for a, b in itertools.combinations(names, 2)}

    while missing:
        (a, i), (b, j) = next(iter(sorted(missing)))
        tries = []
        for _ in range(40):
            row = {n: rng.randrange(len(factors[n])) for n in names} | {a: i, b: j}
            tries.append((len(pairs(row) & missing), sorted(row.items())))
        row = dict(max(tries)[1])
        missing -= pairs(row)
        rows.append({n: factors[n][row[n]] for n in names})
    return rows


def test_pairwise_holds_every_pair():
    rows = pairwise(FACTORS, random.Random(1))
    for a, b in itertools.combinations(FACTORS, 2):
        assert {(repr(r[a]), repr(r[b])) for r in rows} == {(repr(x), repr(y)) for x in FACTORS[a] for y in FACTORS[b]}


@pytest.mark.parametrize("tp", [1, 2, 4] if backend.DEVICE == "cuda" else [1, 4])
def test_pairwise(library, nano, tp):
    rng = random.Random(tp)
    tokenizer = kd.Tokenizer.load(nano)
    asks = [[Ask(tuple(tokenizer.encode(p)), s, 12) for s in SAMPLINGS] for p in PROMPTS]
    rows = pairwise(FACTORS, random.Random(1))
    if tp > 1:
        rows = rows[::4]
    open_ = dict(library=library, tp=tp, max_nodes=200, kv_bytes=192 << 20)
    with kd.Engine(nano, max_streams=1, prefix_cache=False, **open_) as plain:
        reference = Reference(plain)
        for chunk, group in itertools.groupby(sorted(rows, key=lambda r: r["chunk"]), key=lambda r: r["chunk"]):
            with kd.Engine(nano, prefill_chunk=chunk, **open_) as engine:
                for row in group:
                    name, budget = row["builder"]
                    jobs = [Job(asks[row["prompt"]][row["sampling"]], name, budget, row["cold"])]
                    while len(jobs) < row["streams"]:
                        other = rng.choice(FACTORS["builder"][:5])
                        jobs.append(Job(rng.choice(rng.choice(asks)), *other, rng.random() < 0.5))
                    rng.shuffle(jobs)
                    check(engine, reference, jobs)
