"""What the daemon does with the embedded model on this machine: tokens/s by streams and builder, memory, idle cost.

    python bench/service.py [--model FOLDER] [--seconds 4] [--json FILE]

Starts a daemon of its own. Each stream is one client with one request after the other. Prints a table; --json keeps the
figures with the machine they were measured on.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from machine import cpu_model

import kd
from kd.config import paths

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("is_prime", "fibonacci", "parse_header", "merge_sorted", "word_count", "flatten", "to_roman", "read_config")
PROMPTS = [f'def {name}(value):\n    """Return the result for value."""\n' for name in NAMES]
STREAMS = {"cpu": (1, 4, 8, 16), "cuda": (1, 4, 8, 10, 64)}
BUILDERS = {
    "cpu": (("none", 0), ("chain", 0), ("heap", 8), ("heap", 32)),
    "cuda": (("none", 0), ("chain", 7), ("heap", 8), ("device", 8), ("device", 32)),
}
MAX_TOKENS = 128


@contextmanager
def daemon(model: Path, device: str, folder: str) -> Iterator[tuple[psutil.Process, str]]:
    """A daemon with sockets in `folder`; yields its process and the serve endpoint."""
    where = paths("bench", runtime_dir=folder)
    process = subprocess.Popen(
        [sys.executable, "-m", "kd", "--instance", "bench", "--model", str(model), "--log-level", "warning"]
        + ["--device", device, "--set", f"server.runtime_dir={folder}"]
    )
    os.environ["KD_SERVER_RUNTIME_DIR"] = folder
    try:
        for _ in range(600):
            if process.poll() is not None:
                sys.exit(f"bench: the daemon ended with status {process.returncode}")
            try:
                with kd.Client(instance="bench") as client:
                    if client.status()["state"] == "ready":
                        break
            except Exception:
                pass
            time.sleep(0.1)
        yield psutil.Process(process.pid), str(where.serve)
    finally:
        process.terminate()
        process.wait(30)


def decode(streams: int, builder: str, budget: int, seconds: float) -> dict[str, Any]:
    """Closed loop of `streams` clients for `seconds` after one unmeasured request each."""
    warm = threading.Barrier(streams + 1)
    end = [0.0]
    tokens = [0] * streams
    first_ms: list[float] = []

    def one(index: int) -> None:
        with kd.Client(instance="bench") as client:
            for turn in itertools.count():
                if turn == 1:
                    warm.wait()
                    warm.wait()
                started = time.monotonic()
                seen = 0
                prompt = PROMPTS[(index + turn) % len(PROMPTS)]
                stream = client.stream(
                    prompt, max_tokens=MAX_TOKENS, ignore_eos=True, cold=True, builder=builder, budget=budget
                )
                for chunk in stream:
                    if not seen and turn:
                        first_ms.append((time.monotonic() - started) * 1000)
                    seen += len(chunk.tokens)
                    if turn and time.monotonic() < end[0]:
                        tokens[index] += len(chunk.tokens)
                if turn and time.monotonic() >= end[0]:
                    return

    threads = [threading.Thread(target=one, args=(i,)) for i in range(streams)]
    for thread in threads:
        thread.start()
    warm.wait()
    with kd.Client(instance="bench") as client:
        before = client.status()["stats"]
        end[0] = time.monotonic() + seconds
        warm.wait()
        time.sleep(seconds)
        after = client.status()["stats"]
    for thread in threads:
        thread.join()
    rounds = after["round_streams"] - before["round_streams"]
    return {
        "streams": streams,
        "builder": builder,
        "budget": budget,
        "tokens_s": sum(tokens) / seconds,
        "tokens_round": 1 + (after["accepted_tokens"] - before["accepted_tokens"]) / max(1, rounds),
        "rows_forward": (after["round_rows"] - before["round_rows"]) / max(1, after["rounds"] - before["rounds"]),
        "first_token_ms": statistics.median(first_ms) if first_ms else None,
    }


def cpu_percent(process: psutil.Process, seconds: float) -> float:
    before = process.cpu_times()
    time.sleep(seconds)
    after = process.cpu_times()
    return 100 * (after.user + after.system - before.user - before.system) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "nano")
    parser.add_argument("--device", choices=STREAMS, default="cpu")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()

    with (
        tempfile.TemporaryDirectory(prefix="kd-bench-") as folder,
        daemon(args.model, args.device, folder) as (process, _),
    ):
        result: dict[str, Any] = {
            "device": args.device,
            "cpu": cpu_model(),
            "cores": len(os.sched_getaffinity(0)),
            "python": platform.python_version(),
            "kd": kd.__version__,
            "model": args.model.name,
            "seconds": args.seconds,
            "rss_loaded_mib": process.memory_info().rss / 2**20,
            "idle_cpu_percent": cpu_percent(process, 5.0),
            "rows": [],
        }
        print(f"{result['cpu']}, {result['cores']} cores, {args.model.name}, {MAX_TOKENS} tokens a request\n")
        print(
            f"{'builder':>9} {'streams':>7} {'tokens/s':>9} {'tokens/round':>12} {'rows/forward':>12} {'first ms':>8}"
        )
        for (builder, budget), streams in itertools.product(BUILDERS[args.device], STREAMS[args.device]):
            row = decode(streams, builder, budget, args.seconds)
            result["rows"].append(row)
            label = f"{builder} {budget}" if budget else builder
            print(
                f"{label:>9} {streams:>7} {row['tokens_s']:>9.0f} {row['tokens_round']:>12.2f}"
                f" {row['rows_forward']:>12.1f} {row['first_token_ms'] or 0:>8.1f}",
                flush=True,
            )
        result["rss_after_mib"] = process.memory_info().rss / 2**20
        print(f"\nresident memory: {result['rss_loaded_mib']:.0f} MiB loaded, {result['rss_after_mib']:.0f} MiB after")
        print(f"idle, model loaded: {result['idle_cpu_percent']:.2f} % of one core")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
