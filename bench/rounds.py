"""What lies between decode rounds: microseconds of a round on the device and of the gap to the next, by the device's clock, for
rounds that follow one another there (a run) and for rounds the host launches one by one.

    python bench/rounds.py [--device cuda] [--model FOLDER] [--tp 1] [--streams 1,8,64] [--tokens 256]
                            [--json FILE]

Uses the test library, which can be told how many rounds may follow one another; on the CPU, which is host and device at once,
that is 1. A run also ends when a stream has 17 events that nobody has polled: with many streams this program is slower than a
GPU, and most rounds are launched.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import time
from pathlib import Path
from typing import Any

import kd
from kd.native import ffi

ROOT = Path(__file__).resolve().parent.parent
BUILDERS = (("none", 0), ("device", 8), ("device", 32), ("heap", 8))
AT_ONCE = (1, 64)
PASSES = 3
PROMPT = "def fibonacci(n):\n    if n < 2:\n        return n\n"


def decode(engine: kd.Engine, streams: int, builder: str, budget: int, tokens: int) -> dict[str, Any]:
    """All streams at once, from the same prompt with other seeds."""
    prompt = engine.tokenizer.encode(PROMPT)
    before, began = engine.stats(), time.perf_counter()
    waiting = {
        engine.submit(prompt, max_tokens=tokens, ignore_eos=True, credit=1 << 20, builder=builder, budget=budget,
                      sampling=kd.Sampling(temperature=0.0 if i == 0 else 0.6, seed=i))
        for i in range(streams)
    }  # fmt: skip
    while waiting:
        waiting -= {e.id for e in engine.poll(60_000) if e.type == "end"}
    seconds, after = time.perf_counter() - began, engine.stats()
    moved = {k: after[k] - before[k] for k in after if isinstance(after[k], int)}
    return {
        "tokens_per_second": moved["tokens"] / seconds,
        "rounds": moved["rounds"],
        "round_us": moved["device_ns"] / moved["rounds"] / 1e3,
        "gap_us": moved["gap_ns"] / max(1, moved["gaps"]) / 1e3,
        "gaps": moved["gaps"],
        "launch_gap_us": moved["launch_gap_ns"] / max(1, moved["launch_gaps"]) / 1e3,
        "launch_gaps": moved["launch_gaps"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "nano")
    parser.add_argument("--tp", type=int, default=1, help="ranks; on CUDA each on a GPU of its own")
    parser.add_argument("--streams", default="1,8,64")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    subprocess.run([ROOT / "build" / "make.sh", {"cpu": "test", "cuda": "cuda-test"}[args.device]], check=True)
    library = ROOT / "build" / "out" / f"libkd_{args.device}_test.so"
    probe, rows = ctypes.CDLL(str(library)), []
    with kd.Engine(args.model, device=args.device, library=library, tp=args.tp, max_nodes=32) as engine:
        handle = ctypes.c_void_p(int(ffi.cast("uintptr_t", engine._handle)))
        print(f"{'streams':>8} {'builder':>10} {'at once':>8} {'tokens/s':>9} {'rounds':>7} {'round us':>9} {'gap us':>7} "
              f"{'after launch':>13} {'gap us':>7}")  # fmt: skip
        for streams in map(int, args.streams.split(",")):
            for builder, budget in BUILDERS:
                for at_once in AT_ONCE if args.device == "cuda" and builder != "heap" else (1,):
                    probe.kd_probe_rounds_at_once(handle, at_once)
                    passes = [decode(engine, streams, builder, budget, args.tokens) for _ in range(PASSES)]
                    best = max(passes, key=lambda p: p["tokens_per_second"])
                    rows.append({"streams": streams, "builder": builder, "budget": budget, "at_once": at_once, **best})
                    print(f"{streams:8} {f'{builder} {budget}':>10} {at_once:8} {best['tokens_per_second']:9.0f} "
                          f"{best['rounds']:7} {best['round_us']:9.1f} {best['gap_us']:7.1f} "
                          f"{best['launch_gaps']:13} {best['launch_gap_us']:7.1f}", flush=True)  # fmt: skip
    if args.json:
        args.json.write_text(
            json.dumps({"model": args.model.name, "tp": args.tp, "tokens": args.tokens, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
