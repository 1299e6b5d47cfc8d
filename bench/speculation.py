"""Speculation end to end on HumanEval prompts: tokens/s of each builder and budget, and of plain decoding, in turn.

    python bench/speculation.py [--model FOLDER] [--prompts 24] [--tokens 96] [--temperature 0] [--threads N] [--json FILE]

The prompts are HumanEval's (human_eval.py), every n-th of them. Each is decoded PASSES times with each candidate, the
candidates taking turns, and the lowest time counts; the prefill is not in it. Every output must be the same tokens whatever
the builder, or the run ends.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from human_eval import problems
from service import cpu_model

import kd

ROOT = Path(__file__).resolve().parent.parent
CANDIDATES = (
    ("none", 0),
    ("chain", 7),
    ("chain", 15),
    ("heap", 4),
    ("heap", 8),
    ("heap", 16),
    ("heap", 32),
    ("heap", 64),
)
PASSES = 3


class Total:
    """Of one candidate over all prompts."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.counts: dict[str, int] = {}

    def add(self, seconds: float, counts: dict[str, int]) -> None:
        self.seconds += seconds
        self.counts = {k: self.counts.get(k, 0) + v for k, v in counts.items()}

    def row(self, builder: str, budget: int, tokens: int) -> dict[str, Any]:
        c = self.counts
        return {
            "builder": builder,
            "budget": budget,
            "tokens_per_s": tokens / self.seconds,
            "tokens_a_round": 1 + c["accepted_tokens"] / max(1, c["round_streams"]),
            "rows_a_round": c["round_rows"] / max(1, c["rounds"]),
            "rounds": c["rounds"],
            "round_ms": 1e3 * self.seconds / max(1, c["rounds"]),
            "draft_ms": c["draft_us"] / 1e3 / max(1, c["rounds"]),
            "verify_ms": c["verify_us"] / 1e3 / max(1, c["rounds"]),
        }


COUNTERS = ("accepted_tokens", "round_streams", "round_rows", "rounds", "draft_us", "verify_us")


def once(engine: kd.Engine, ids: list[int], tokens: int, temperature: float, builder: str, budget: int) -> Any:
    """(tokens, seconds without the prefill, counters) of one request."""
    before, began = engine.stats(), time.perf_counter()
    done = engine.generate(
        ids, max_tokens=tokens + 1, ignore_eos=True, sampling=kd.Sampling(temperature=temperature, seed=1),
        builder=builder, budget=budget,
    )  # fmt: skip
    seconds = time.perf_counter() - began
    after = engine.stats()
    seconds -= (after["prefill_us"] - before["prefill_us"]) / 1e6
    return list(done.tokens), seconds, {k: after[k] - before[k] for k in COUNTERS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "nano")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=96, help="of each answer")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    texts = problems()
    texts = texts[:: max(1, len(texts) // options.prompts)][: options.prompts]
    totals = {candidate: Total() for candidate in CANDIDATES}
    loads = [os.getloadavg()[0]]
    with kd.Engine(str(options.model), threads=options.threads, prefix_cache=False) as engine:
        if engine.tokenizer is None:
            sys.exit("speculation.py: the folder has no tiktoken.model, so there is no prompt to give")
        begin = [id for name, id in engine.tokenizer.special.items() if name == "[BOS]"]
        for text in texts:
            ids = begin + engine.tokenizer.encode(text)
            best: dict[tuple[str, int], tuple[float, dict[str, int]]] = {}
            plain = None
            for _ in range(PASSES):
                for candidate in CANDIDATES:
                    out, seconds, counts = once(engine, ids, options.tokens, options.temperature, *candidate)
                    plain = plain or out
                    if out != plain:
                        sys.exit(f"speculation.py: {candidate} changed the answer to {text!r}")
                    if candidate not in best or seconds < best[candidate][0]:
                        best[candidate] = seconds, counts
            for candidate, result in best.items():
                totals[candidate].add(*result)
            loads.append(os.getloadavg()[0])
    rows = [totals[c].row(*c, len(texts) * options.tokens) for c in CANDIDATES]
    cores = len(os.sched_getaffinity(0))
    report = {
        "cpu": cpu_model(), "cores": cores, "model": options.model.name, "threads": options.threads or cores,
        "prompts": len(texts), "tokens": options.tokens, "temperature": options.temperature,
        "load": [min(loads), max(loads)], "rows": rows,
    }  # fmt: skip
    print(
        f"{report['cpu']}, {report['cores']} cores, {report['model']}, {len(texts)} HumanEval prompts, {options.tokens} tokens "
        f"each, temperature {options.temperature:g}, load {min(loads):.1f} .. {max(loads):.1f}\n"
    )
    heads = ("tokens/s", "against none", "tokens/round", "rows/round", "round ms", "draft", "verify")
    print(f"{'builder':>9} " + " ".join(f"{head:>{max(8, len(head))}}" for head in heads))
    for r in rows:
        label = f"{r['builder']} {r['budget']}" if r["budget"] else r["builder"]
        print(
            f"{label:>9} {r['tokens_per_s']:>8.0f} {r['tokens_per_s'] / rows[0]['tokens_per_s']:>11.2f}x"
            f" {r['tokens_a_round']:>12.2f} {r['rows_a_round']:>10.1f} {r['round_ms']:>8.2f} {r['draft_ms']:>8.2f}"
            f" {r['verify_ms']:>8.2f}"
        )
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
