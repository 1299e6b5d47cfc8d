"""What lies between decode rounds: microseconds of a round on the device and of the gap to the next, by the device's clock, for
rounds that follow one another there (a run) and for rounds the host launches one by one.

    python bench/rounds.py [--device cuda] [--model FOLDER] [--tp 1] [--streams 1,8,64] [--tokens 256] [--stages]
                            [--json FILE]

Uses the test library, which can be told how many rounds may follow one another; on the CPU, which is host and device at once,
that is 1. A run also ends when a stream has 17 events that nobody has polled: with many streams this program is slower than a
GPU, and most rounds are launched.

--stages: also where the time of a round goes, by builders `none` and `device 8`: us of every operation, layers summed, on each
rank, by stamps behind each (native/stages.h), which cost time of their own. An add_norm is an all-reduce, the residual and
the norm in one; with several ranks what they wait for one another is in it.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from machine import machine, told
from rank_needs import WARM, parts_of, stage_names

import kd
from kd.native import ffi

ROOT = Path(__file__).resolve().parent.parent
BUILDERS = (("none", 0), ("device", 8), ("device", 32), ("heap", 8))
STAGED = (("none", 0), ("device", 8))
STAMPS = 1 << 14
CAPACITY = 64 << 20
AT_ONCE = (1, 64)
PASSES = 3
PROMPT = "def fibonacci(n):\n    if n < 2:\n        return n\n"


class Probe:
    """The test library's ways into an open engine."""

    def __init__(self, library: Path, engine: kd.Engine) -> None:
        self.lib, self.engine = ctypes.CDLL(str(library)), engine
        self.lib.kd_probe_watch.restype = ctypes.c_void_p
        self.lib.kd_probe_error.restype = ctypes.c_char_p
        self.handle = ctypes.c_void_p(int(ffi.cast("uintptr_t", engine._handle)))

    def rounds_at_once(self, rounds: int) -> None:
        self.lib.kd_probe_rounds_at_once(self.handle, rounds)

    def stages(self, tp: int, work: Callable[[], Any]) -> list[list[dict[str, Any]]]:
        """Of each rank, what it recorded for rounds while work() went on: as Rank.stages() of rank_step.py."""
        watch = ctypes.c_void_p(self.check(self.lib.kd_probe_watch(self.handle, STAMPS)))
        try:
            work()
            text, made = ctypes.create_string_buffer(CAPACITY), []
            for rank in range(tp):
                self.check(not self.lib.kd_probe_watched(watch, rank, text, ctypes.c_uint64(CAPACITY)))
                made.append(json.loads(text.value))
            return made
        finally:
            self.lib.kd_probe_unwatch(watch)

    def check(self, fine: Any) -> Any:
        if not fine:
            raise SystemExit(f"rounds: {self.lib.kd_probe_error().decode()}")
        return fine


def prompt_of(engine: kd.Engine) -> list[int]:
    """Of a folder without a tokenizer, tokens that mean nothing."""
    return engine.tokenizer.encode(PROMPT) if engine.tokenizer else list(range(1, 20))


def decode(engine: kd.Engine, streams: int, builder: str, budget: int, tokens: int) -> dict[str, Any]:
    """All streams at once, from the same prompt with other seeds."""
    prompt = prompt_of(engine)
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


def stages_of(ranks: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Of the recording that was played most: its whole, and each part's operations, layers summed; medians, a figure a rank."""
    most = max(range(len(ranks[0])), key=lambda i: len(ranks[0][i]["ns"]))
    if len(ranks[0][most]["ns"]) <= WARM:
        raise SystemExit("rounds: too few rounds to tell where their time goes: give more --tokens")
    stages: dict[tuple[str, str], dict[str, Any]] = {}
    whole = []
    for parts in ranks:
        calls, ns = parts[most]["calls"], np.array(parts[most]["ns"])[WARM:]
        plays = np.array([call["ns"] for call in calls])[:, WARM:] / 1e3
        of = list(zip((part for part, _ in parts_of(calls)), stage_names(calls), strict=True))
        whole.append(float(np.median(ns)) / 1e3)
        for key in dict.fromkeys(of):
            here = [i for i, other in enumerate(of) if other == key]
            made = stages.setdefault(key, {"part": key[0], "stage": key[1], "calls": len(here), "us": []})
            made["us"].append(float(np.median(plays[here].sum(axis=0))))
    return {"plays": len(ranks[0][most]["ns"]) - WARM, "whole_us": whole, "stages": list(stages.values())}


def tell_stages(told: dict[str, Any], round_us: float) -> None:
    def row(name: str, calls: int | str, us: Iterable[float]) -> None:
        print(f"{name:40} {calls:>5} " + " ".join(f"{each:>10.1f}" for each in us))

    def sum_row(name: str, stages: list[dict[str, Any]]) -> None:
        row(name, sum(stage["calls"] for stage in stages), np.sum([stage["us"] for stage in stages], axis=0))

    stages = sorted(told["stages"], key=lambda stage: -max(stage["us"]))
    print(f"\n{'stages, us':40} {'calls':>5} " + " ".join(f"{f'rank {i}':>10}" for i in range(len(told["whole_us"]))))
    for stage in stages:
        sum_row(f"{stage['part']:8} {stage['stage']}", [stage])
    for part in dict.fromkeys(stage["part"] for stage in told["stages"]):
        sum_row(f"{part}, together", [stage for stage in stages if stage["part"] == part])
    sum_row("all-reduces of these", [stage for stage in stages if stage["stage"].startswith("add_norm")])
    row("a round with stamps", sum(stage["calls"] for stage in stages), told["whole_us"])
    row("a round without", "", [round_us])
    print(flush=True)


def main(arguments: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "nano")
    parser.add_argument("--tp", type=int, default=1, help="ranks; on CUDA each on a GPU of its own")
    parser.add_argument("--streams", default="1,8,64")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--stages", action="store_true", help="also tell where the time of a round goes")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    rows, about = [], machine(args.device)
    print(about)
    subprocess.run([ROOT / "build" / "make.sh", {"cpu": "test", "cuda": "cuda-test"}[args.device]], check=True)
    library = ROOT / "build" / "out" / f"libkd_{args.device}_test.so"
    with kd.Engine(args.model, device=args.device, library=library, tp=args.tp, max_nodes=32) as engine:
        probe = Probe(library, engine)
        head = (f"{'streams':>8} {'builder':>10} {'at once':>8} {'tokens/s':>9} {'rounds':>7} {'round us':>9} {'gap us':>7} "
                f"{'after launch':>13} {'gap us':>7}")  # fmt: skip
        print(head)
        for streams in map(int, args.streams.split(",")):
            for builder, budget in BUILDERS:
                how = (engine, streams, builder, budget, args.tokens)
                for at_once in AT_ONCE if args.device == "cuda" and builder != "heap" else (1,):
                    probe.rounds_at_once(at_once)
                    best = max((decode(*how) for _ in range(PASSES)), key=lambda p: p["tokens_per_second"])
                    rows.append({"streams": streams, "builder": builder, "budget": budget, "at_once": at_once, **best})
                    print(f"{streams:8} {f'{builder} {budget}':>10} {at_once:8} {best['tokens_per_second']:9.0f} "
                          f"{best['rounds']:7} {best['round_us']:9.1f} {best['gap_us']:7.1f} "
                          f"{best['launch_gaps']:13} {best['launch_gap_us']:7.1f}", flush=True)  # fmt: skip
                if args.stages and (builder, budget) in STAGED:
                    rows[-1]["stages"] = stages_of(probe.stages(args.tp, partial(decode, *how)))
                    tell_stages(rows[-1]["stages"], rows[-1]["round_us"])
                    print(head)
    made = {"machine": about, "model": args.model.name, "tp": args.tp, "tokens": args.tokens, "rows": rows}
    if args.json:
        args.json.write_text(json.dumps(made, indent=1) + "\n")
    return made


if __name__ == "__main__":
    told(lambda: main(sys.argv[1:]))
