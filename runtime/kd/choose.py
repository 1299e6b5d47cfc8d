"""Which tree builder is the fastest on this machine with this model: measured at warm-up where none is configured.

What a tree gains depends on the drafter, what its rows cost on the machine, so neither can be looked up. Every candidate
decodes the same prompts, greedily, in turn with the others, and the lowest time of each prompt counts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

SECONDS = 1.0  # what measuring may take, about; a slow model is measured with one prompt, whatever it takes
CANDIDATES = (("none", 0), ("chain", 7), ("heap", 4), ("heap", 8), ("heap", 16), ("heap", 32), ("heap", 64))
FEWEST, MOST = 16, 48  # tokens of one measurement
PROMPTS = (
    'def is_even(n):\n    """Return True if n is even."""\n',
    "The result is a list of the words, without those that",
    'class Queue:\n    """First in, first out."""\n\n    def __init__(self):\n',
    "import os\n\n\ndef list_files(folder, suffix):\n",
)

# prompt, max_tokens, builder, budget -> its tokens, and how many of them came in how many seconds after the first ones
Run = Callable[[list[int], int, str, int], tuple[list[int], int, float]]


class Inexact(Exception):
    """A builder changed what comes out. args: builder, budget, index of the first token that differs."""


@dataclass(frozen=True)
class Speed:
    builder: str
    budget: int
    tokens_per_s: float

    def __str__(self) -> str:
        return f"{self.builder} {self.budget or ''}".strip() + f" {self.tokens_per_s:.0f}"


@dataclass(frozen=True)
class Choice:
    builder: str
    budget: int
    reason: str
    measured: tuple[Speed, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"measured": [asdict(speed) for speed in self.measured]}


def candidates(max_nodes: int, drafts: bool, device: str = "cpu") -> tuple[tuple[str, int], ...]:
    """Those that the engine would take: no tree larger than max_nodes, and none at all without a drafter. On a GPU trees are
    built where the model runs."""
    tree = "heap" if device == "cpu" else "device"
    among = ((tree if name == "heap" else name, budget) for name, budget in CANDIDATES)
    return tuple((name, budget) for name, budget in among if budget <= (max_nodes if drafts else 0))


def prompts(encode: Callable[[str], list[int]] | None, vocabulary: int, longest: int) -> list[list[int]]:
    """As token ids, cut to `longest`; made-up ids where there is no tokenizer."""
    if encode:
        return [encode(text)[:longest] for text in PROMPTS]
    return [[(17 * i * (k + 1) + k) % vocabulary for i in range(12)][:longest] for k in range(len(PROMPTS))]


def measure(
    run: Run, texts: Sequence[list[int]], among: Sequence[tuple[str, int]], room: int, seconds: float = SECONDS
) -> list[Speed]:
    """Tokens a second of every candidate, in their order; `among` begins with plain decoding.

    room: new tokens that fit behind every prompt. Raises Inexact, and what `run` raises.
    """
    began = time.monotonic()
    _, n, took = run(texts[0], min(FEWEST, room), *among[0])  # also wakes what sleeps
    each_s = seconds / (2 * len(texts) * len(among))
    tokens = min(room, max(FEWEST, min(MOST, int(each_s * n / max(took, 1e-9)))))
    best: dict[tuple[int, int], float] = {}  # (prompt, candidate) -> lowest seconds a token
    plain: dict[int, list[int]] = {}
    over = False
    while not over:
        for i, prompt in enumerate(texts):
            for k, (builder, budget) in enumerate(among):
                out, n, took = run(prompt, tokens, builder, budget)
                want = plain.setdefault(i, out)
                if out != want:
                    at = next((j for j, (a, b) in enumerate(zip(out, want, strict=False)) if a != b), len(out))
                    raise Inexact(builder, budget, at)
                best[i, k] = min(best.get((i, k), math.inf), took / max(1, n))
            over = time.monotonic() - began >= seconds
            if over:
                break
    done = sorted({i for i, _ in best})
    return [
        Speed(builder, budget, round(len(done) / max(1e-9, sum(best[i, k] for i in done)), 1))
        for k, (builder, budget) in enumerate(among)
    ]


def choose(
    run: Run, texts: Sequence[list[int]], among: Sequence[tuple[str, int]], room: int, seconds: float = SECONDS
) -> Choice:
    """The fastest of `among`. Raises as measure() does."""
    if len(among) == 1:
        return Choice(*among[0], "the model has no drafter, so there is nothing to verify")
    if room < FEWEST:
        return Choice(*among[0], f"the context leaves no room for the {FEWEST} tokens that a measurement takes")
    speeds = measure(run, texts, among, room, seconds)
    first = max(speeds, key=lambda speed: speed.tokens_per_s)
    said = ", ".join(map(str, sorted(speeds, key=lambda speed: -speed.tokens_per_s)))
    return Choice(
        first.builder, first.budget, f"the fastest when the model was loaded, in tokens/s: {said}", tuple(speeds)
    )
