"""Plain decoding beside the floor of this machine: the bytes of the weights a token needs, over the measured bandwidth.

    python bench/bandwidth.py [MODEL ...] [--threads 1,2] [--json FILE]

Without MODEL: the embedded model, whose weights stay in a cache, and a wide one (tests/wide_model.py: 3 layers of Kimi
K2's widths, 48 experts, 3.8 GB), written to a temporary folder, whose weights come from memory. Reading is measured in
turn with decoding, by read_bandwidth.c, over a buffer as large as the weights and in the way a token does: all of what every
token needs, and of the experts each time others. Then nano with four times as many threads as cores.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from service import cpu_model

import kd

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PASSES = 5  # of decoding and of reading, in turn
WIDE = "wide"
SECONDS = 2.0  # of one decoding pass, about
PROMPT = 16


def sizes(folder: Path) -> Iterator[tuple[str, int]]:
    """(name, bytes) of each tensor of the target."""
    for path in sorted(folder.glob("*.safetensors")):
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                yield name, end - begin


def active_bytes(folder: Path) -> dict[str, int]:
    """Weights that one token reads once: every tensor but the embedding table, and of the routed experts as many as a
    token is sent to. The router counts as fp32, which is how it is kept."""
    config = json.loads((folder / "config.json").read_text())
    config = config.get("text_config", config)
    total = {"bf16": 0, "int4": 0}
    for name, size in sizes(folder):
        if name.endswith(("embed_tokens.weight", "weight_shape")):
            continue
        if ".experts." in name:
            total["int4"] += size * config["num_experts_per_tok"] // config["n_routed_experts"]
        else:
            total["bf16"] += size * (2 if name.endswith("mlp.gate.weight") else 1)
    return total


def reader(folder: Path) -> Any:
    """read_bandwidth() of read_bandwidth.c, compiled for this machine."""
    library = folder / "read_bandwidth.so"
    command = ["gcc", "-O3", "-march=native", "-shared", "-fPIC", "-pthread", HERE / "read_bandwidth.c", "-o", library]
    subprocess.run(command, check=True)
    function = ctypes.CDLL(str(library)).read_bandwidth
    function.restype = ctypes.c_double
    function.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int)
    return function


def experts(folder: Path) -> tuple[int, int, int]:
    """(bytes of one routed expert, how many there are in all layers, how many of them a token is sent to)"""
    config = json.loads((folder / "config.json").read_text())
    config = config.get("text_config", config)
    each = [size for name, size in sizes(folder) if ".experts." in name and not name.endswith("weight_shape")]
    layers = config["num_hidden_layers"] - config["first_k_dense_replace"]
    count = layers * config["n_routed_experts"]
    return sum(each) // count, count, layers * config["num_experts_per_tok"]


def decode_seconds(engine: kd.Engine, ids: list[int], tokens: int) -> float:
    """Seconds a token: everything but the prefill, that is rounds, events, this loop."""
    before, began = engine.stats()["prefill_us"], time.perf_counter()
    engine.generate(ids, max_tokens=tokens + 1, ignore_eos=True, builder="none")
    wall = time.perf_counter() - began - (engine.stats()["prefill_us"] - before) / 1e6
    return wall / tokens


def measure(folder: Path, threads: int, read: Any) -> dict[str, Any]:
    parts = active_bytes(folder)
    size = sum(parts.values())
    piece, pieces, chosen = experts(folder)
    with kd.Engine(str(folder), threads=threads, draft="none", prefix_cache=False) as engine:
        ids = [7 * i % engine.info.vocab_size for i in range(1, PROMPT + 1)]
        once = decode_seconds(engine, ids, 4)
        tokens = max(4, min(256, int(SECONDS / once)))
        best, bandwidth = float("inf"), 0.0
        loads = [os.getloadavg()[0]]
        for _ in range(PASSES):
            best = min(best, decode_seconds(engine, ids, tokens))
            passes = max(1, int(SECONDS * 10e9 / size))
            bandwidth = max(bandwidth, read(parts["bf16"], piece, pieces, chosen, threads, passes))
            loads.append(os.getloadavg()[0])
    return {
        "model": folder.name,
        "threads": threads,
        "active_bytes": parts,
        "context": [PROMPT, PROMPT + tokens],
        "tokens_per_s": 1 / best,
        "read_bytes_per_s": bandwidth,
        "floor_ms": 1e3 * size / bandwidth,
        "token_ms": 1e3 * best,
        "share_of_bandwidth": size / bandwidth / best,
        "load": [min(loads), max(loads)],
    }


def crowded(folder: Path) -> dict[str, Any]:
    """Plain decoding with as many threads as cores and with four times as many, in turn: the best of each, ms a token."""
    cores = len(os.sched_getaffinity(0))
    counts = (cores, 4 * cores)
    engines = {n: kd.Engine(str(folder), threads=n, draft="none", prefix_cache=False) for n in counts}
    best = dict.fromkeys(counts, float("inf"))
    ids = [7 * i % engines[cores].info.vocab_size for i in range(1, PROMPT + 1)]
    loads = [os.getloadavg()[0]]
    for _ in range(4 * PASSES):
        for n, engine in engines.items():
            best[n] = min(best[n], decode_seconds(engine, ids, 128))
        loads.append(os.getloadavg()[0])
    for engine in engines.values():
        engine.close()
    few, many = (1e3 * best[n] for n in counts)
    return {"threads": counts, "token_ms": [few, many], "costs": many / few - 1, "load": [min(loads), max(loads)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="*")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    report: dict[str, Any] = {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "kd": kd.__version__,
        "rows": [],
    }
    with tempfile.TemporaryDirectory(prefix="kd-bench-") as temporary:
        models = options.model
        if not models:
            models = [ROOT / "models" / "nano", Path(temporary) / WIDE]
            subprocess.run([sys.executable, ROOT / "tests" / "wide_model.py", models[1]], check=True)
        read = reader(Path(temporary))
        print(f"{report['cpu']}, {report['cores']} cores\n")
        print(
            f"{'model':>6} {'threads':>7} {'MB/token':>8} {'of them INT4':>12} {'read GB/s':>9} {'floor ms':>8} {'token ms':>8}"
            f" {'tokens/s':>8} {'of the floor':>12}  load"
        )
        for folder in models:
            for threads in [int(t) for t in options.threads.split(",")]:
                r = measure(folder, threads, read)
                report["rows"].append(r)
                size = sum(r["active_bytes"].values())
                print(
                    f"{r['model']:>6} {threads:>7} {size / 1e6:>8.1f} {r['active_bytes']['int4'] / size:>12.0%}"
                    f" {r['read_bytes_per_s'] / 1e9:>9.1f} {r['floor_ms']:>8.3f} {r['token_ms']:>8.3f}"
                    f" {r['tokens_per_s']:>8.1f} {r['share_of_bandwidth']:>12.0%}  {r['load'][0]:.1f} .. {r['load'][1]:.1f}",
                    flush=True,
                )
    if not options.model:
        r = report["crowded"] = crowded(ROOT / "models" / "nano")
        (few, many), (few_ms, many_ms) = r["threads"], r["token_ms"]
        print(
            f"\nnano with {few} and {many} threads: {few_ms:.3f} and {many_ms:.3f} ms a token, {r['costs']:+.0%}",
            end="",
        )
        print(f"; load {r['load'][0]:.1f} .. {r['load'][1]:.1f}")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
