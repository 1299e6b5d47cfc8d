"""The CUDA twin against the CPU twin, teacher-forced on the CPU's own greedy continuations.

    python bench/twins.py [--model FOLDER] [--tokens 64] [--prompts 164] [--json FILE]

The prompts are HumanEval's (human_eval.py). Prints how often both prefer the same token, how far the log-probability of the CPU's
token moves, and every disagreement with the CPU's top-2 gap and the smallest router margin of the specification at that
position. Exit status 1 if a bound is missed: argmax equal in 97 %, |dlogprob| 0.02 on average and 0.3 at the 99th percentile,
no disagreement where the gap is above 1.0.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
from human_eval import problems
from machine import told

import kd

ROOT = Path(__file__).resolve().parent.parent


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    most = logits.max(axis=-1, keepdims=True)
    return logits - most - np.log(np.exp(logits - most).sum(axis=-1, keepdims=True))


def router_margin(spec, ids: list[int], at: int) -> float:
    """The smallest distance between the last expert taken and the next, over the layers, at one position."""
    from ref import model as ref

    pages = -(-len(ids) // ref.PAGE)
    view = ref.kv.make_view([(0, 0, np.asarray(ids), None)], [np.arange(pages)])
    margins: list = []
    ref.forward(spec, view, ref.new_kv(spec, pages * ref.PAGE), margins=margins)
    return float(np.array(margins)[:, at].min())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "nano")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=164, help="so many of them")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests"))
    from ref import model as ref

    spec = ref.load(options.model, with_draft=False)
    same, moved, rows = [], [], []
    with kd.Engine(options.model) as cpu, kd.Engine(options.model, device="cuda") as cuda:
        for number, prompt in enumerate(problems()[: options.prompts]):
            given = cpu.tokenizer.encode(prompt)
            tokens = list(cpu.generate(given, max_tokens=options.tokens, ignore_eos=True).tokens)
            ids = (list(given) + tokens)[:-1]
            first = len(given) - 1
            want, got = (log_softmax(engine.score(ids)[first:]) for engine in (cpu, cuda))
            at = np.arange(len(tokens))
            same += (got.argmax(axis=1) == want.argmax(axis=1)).tolist()
            moved += np.abs(got[at, tokens] - want[at, tokens]).tolist()
            for i in np.flatnonzero(got.argmax(axis=1) != want.argmax(axis=1)):
                top = np.sort(want[i])[::-1]
                row = {"prompt": number, "position": first + int(i), "gap": float(top[0] - top[1])}
                row |= {"cpu": int(want[i].argmax()), "cuda": int(got[i].argmax())}
                row["router_margin"] = router_margin(spec, ids, first + int(i))
                rows.append(row)
    result = {
        "positions": len(same),
        "argmax_equal": float(np.mean(same)),
        "dlogprob_mean": float(np.mean(moved)),
        "dlogprob_p99": float(np.quantile(moved, 0.99)),
        "dlogprob_max": float(np.max(moved)),
        "largest_gap": max((row["gap"] for row in rows), default=0.0),
        "disagreements": rows,
    }
    for row in rows:
        print(" ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
    print(
        f"{result['positions']} positions: argmax equal {result['argmax_equal']:.2%}, |dlogprob| mean "
        f"{result['dlogprob_mean']:.4f}, p99 {result['dlogprob_p99']:.3f}, max {result['dlogprob_max']:.2f}; "
        f"{len(rows)} disagreements, largest top-2 gap {result['largest_gap']:.2f}"
    )
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    fine = result["argmax_equal"] >= 0.97 and result["dlogprob_mean"] <= 0.02 and result["dlogprob_p99"] <= 0.3
    return 0 if fine and result["largest_gap"] <= 1.0 else 1


if __name__ == "__main__":
    sys.exit(told(main))
