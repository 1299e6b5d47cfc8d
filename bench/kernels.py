"""Operations alone, beside the floor that reading what they need sets: microseconds, share of the read ceiling, ratio.

    python bench/kernels.py [--device cuda] [--only REGEX] [--json FILE]

Runs the test library (`build/make.sh cuda-test`, or `test` for the CPU), built if it is stale. Each figure is the median of
several plays of one recording of many calls, as the device sees them; rows marked "cold" take turns with copies of what
they read that are together larger than any cache, the others find it where the call before left it. The ceiling is read in
the same run. The floor of a row is its bytes at that ceiling. Shapes are those of one rank of eight of Kimi K2.
"""

from __future__ import annotations

import argparse
import heapq
import json
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import cffi
import numpy as np
from machine import machine

ROOT = Path(__file__).resolve().parent.parent
COLD = 512 << 20  # bytes of the copies that cold rows take turns with
CEILING = 2 << 30  # bytes that are read to find the ceiling
VOCAB, HIDDEN, EXPERTS, SLOTS = 163840, 7168, 384, 8
RANK_VOCAB, RANK_INTER = VOCAB // 8, 2048 // 8
KV_ROW, LAYERS = 512 + 64, 61


class Case(NamedTuple):
    name: str
    shape: str
    bytes: float  # that must be read or written
    cold: bool
    calls: int
    function: str
    arguments: tuple[Any, ...]


class Bench:
    """The functions of native/probe_bench.h."""

    def __init__(self, device: str, threads: int):
        machine(device)  # without a GPU that ends here, and not after minutes of building
        target = {"cpu": "test", "cuda": "cuda-test"}[device]
        subprocess.run([ROOT / "build" / "make.sh", target], check=True)
        self.ffi = cffi.FFI()
        for header in ("include/kd.h", "native/probe.h", "native/probe_bench.h", "native/probe_rank.h"):
            text = (ROOT / header).read_text()
            found = re.search(r"/\* cdef: begin \*/(.*)/\* cdef: end \*/", text, re.S)
            assert found
            self.ffi.cdef(found[1])
        self.lib = self.ffi.dlopen(str(ROOT / "build" / "out" / f"libkd_{device}_test.so"))
        self.threads = threads

    def array(self, ctype: str, values: np.ndarray) -> Any:
        return self.ffi.from_buffer(f"{ctype}[]", np.ascontiguousarray(values))

    def us(self, function: str, *arguments: Any, calls: int, plays: int = 7, cold: bool = False) -> list[float]:
        """Microseconds of one call, of each play."""
        how = self.ffi.new("kd_bench *", [calls, plays, self.threads, COLD if cold else 0])
        us = self.ffi.new("double[]", plays)
        if getattr(self.lib, f"kd_bench_{function}")(how, us, *arguments) != 0:
            raise SystemExit(f"bench: {function}: {self.ffi.string(self.lib.kd_probe_error()).decode()}")
        return list(us)


# ---- what is measured ------------------------------------------------------------------------------------------------


def rows_cases() -> Iterator[Case]:
    for rows in 1, 8, 64, 640:
        yield Case("rms_norm", f"{rows} x 1536", rows * 1536 * 4, False, 200, "rms_norm", (rows, 1536))
        yield Case("add_norm", f"{rows} x {HIDDEN}", rows * HIDDEN * 12, False, 200, "add_norm", (rows, HIDDEN))
        yield Case("swiglu", f"{rows} x 256", rows * 256 * 6, False, 200, "swiglu", (rows, 256))


def linear_cases() -> Iterator[Case]:
    matrices = {
        "qkv_a": (2112, HIDDEN), "q_b": (1536, 1536), "o": (HIDDEN, 1024), "shared gate_up": (512, HIDDEN),
        "shared down": (HIDDEN, 256), "dense gate_up": (4608, HIDDEN), "dense down": (HIDDEN, 2304),
    }  # fmt: skip
    for rows in 1, 8, 32, 64, 128, 640:
        for name, (n, k) in matrices.items():
            yield Case("linear", f"{name} {n} x {k}, {rows} rows", 2 * n * k, True, 60, "linear", (rows, n, k, 0))
        yield Case("logits", f"lm_head {RANK_VOCAB} x {HIDDEN}, {rows} rows", 2 * RANK_VOCAB * HIDDEN, True, 20, "linear",
                   (rows, RANK_VOCAB, HIDDEN, 1))  # fmt: skip


def expert_cases(bench: Bench) -> Iterator[Case]:
    for rows in 1, 8, 64, 640:
        for kind in "bf16", "fp32":
            yield Case("route", f"{EXPERTS} x {HIDDEN} {kind}, {rows} rows", 4 * EXPERTS * HIDDEN, True, 60, "route",
                       (rows, HIDDEN, EXPERTS, SLOTS, kind == "bf16"))  # fmt: skip
    rng = np.random.default_rng(0)
    for rows in 1, 8, 16, 32, 45, 64, 128, 640:
        calls = 12
        sent = np.stack([[rng.permutation(EXPERTS)[:SLOTS] for _ in range(rows)] for _ in range(calls)]).astype(
            np.int32
        )
        active = statistics.mean(len(np.unique(call)) for call in sent)
        yield Case("moe", f"{rows} rows, {active:.0f} experts", active * 3 * RANK_INTER * HIDDEN * 4.5 / 8, True, calls, "moe",
                   (bench.array("int32_t", sent), rows, HIDDEN, RANK_INTER, EXPERTS, SLOTS))  # fmt: skip


def attention_cases() -> Iterator[Case]:
    for context in 8192, 32768:
        for rows in 1, 8, 32, 64:
            yield Case("attention", f"1 stream, {rows} rows, context {context}", context * KV_ROW * 2, True, 60,
                       "attention", (1, rows, context, 8))  # fmt: skip
    yield Case("attention", "8 streams, 8 rows, context 8192", 8 * 8192 * KV_ROW * 2, True, 20, "attention",
               (8, 8, 8192, 8))  # fmt: skip
    yield Case("attention", "16 streams, 1 row, context 32768", 16 * 32768 * KV_ROW * 2, True, 20, "attention",
               (16, 1, 32768, 8))  # fmt: skip
    heads, nope, weights = 8, 128, 2 * 8 * 128 * 512
    for rows in 1, 8, 64, 640:
        yield Case("mla_query", f"{rows} rows, {heads} heads", weights + 2 * rows * heads * (nope + 64 + KV_ROW), True, 60,
                   "mla_query", (rows, heads))  # fmt: skip
        yield Case("mla_latent", f"{rows} rows, {heads} heads", 2 * heads * (nope + 64) * 1536 + 4 * rows * (1536 + KV_ROW), True,
                   60, "mla_latent", (rows, heads))  # fmt: skip
        yield Case("mla_value", f"{rows} rows, {heads} heads", weights + 2 * rows * heads * (512 + nope), True, 60, "mla_value",
                   (rows, heads))  # fmt: skip


def draft_cases() -> Iterator[Case]:
    """A rank of eight of the drafter of Kimi K2.6: 8 query heads, one for keys and values, blocks of 8, window 2,048 or none."""
    heads, dim, block = 8, 128, 8
    for rows in 8, 64, 512:
        yield Case("head_norm_rope", f"{rows} rows, {heads} heads of {dim}", 4 * rows * heads * dim, False, 200, "head_norm_rope",
                   (rows, heads, dim))  # fmt: skip
        yield Case(
            "draft_append", f"{rows} rows of 2 x {dim}", 8 * rows * dim, False, 200, "draft_append", (rows, 1, dim)
        )
    for streams, context, window in (1, 8192, 0), (1, 8192, 2048), (1, 32768, 0), (16, 8192, 0), (64, 4096, 2048):
        seen = streams * min(context, window or context)
        yield Case("draft_attention", f"{streams} streams, context {context}, window {window or 'none'}", 4 * seen * dim, True,
                   30, "draft_attention", (streams, block, context, window, heads, 1, dim))  # fmt: skip


def vocabulary_cases(bench: Bench) -> Iterator[Case]:
    for vocab in RANK_VOCAB, VOCAB:
        for rows, k in (7, 16), (7, 64), (15, 64), (60, 64), (15, 256):
            yield Case("top_logprobs", f"{rows} x {vocab}, k {k}", 4 * rows * vocab, True, 30, "top_logprobs",
                       (rows, vocab, k))  # fmt: skip
    ways: dict[str, dict[str, float]] = {
        "greedy": {},
        "greedy, hash, logprob": {"want_hash": 1, "want_logprob": 1},
        "T 1": {"temperature": 1.0, "seed": 5},
        "T 0.6, top-p 0.95": {"temperature": 0.6, "top_p": 0.95, "seed": 5},
        "T 1, top-k 50, top-p 0.9": {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "seed": 5},
    }
    for name, way in ways.items():
        sampling = bench.ffi.new("kd_probe_sampling *", {"top_p": 1.0, **way})
        for rows in 1, 17, 64:
            yield Case("sample", f"{name}, {rows} x {VOCAB}", 4 * rows * VOCAB, True, 30, "sample",
                       (sampling, rows, VOCAB))  # fmt: skip


def tables(streams: int, depth: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """token, logprob [streams][depth][width] as a drafter gives them: sharper at the first depths."""
    rng = np.random.default_rng(depth)
    logits = np.sort(rng.standard_normal((streams, depth, 512)) * np.linspace(4, 2, depth)[:, None], axis=2)[:, :, ::-1]
    logprob = logits - np.log(np.exp(logits).sum(axis=2, keepdims=True))
    token = np.stack([rng.permutation(VOCAB)[:width] for _ in range(streams * depth)]).astype(np.int32)
    return token.reshape(streams, depth, width), logprob[:, :, :width].astype(np.float32)


TREES = [(block - 1, budget, streams) for block in (8, 16) for budget in (16, 64, 256) for streams in (1, 4, 16, 64)]


def tree_cases(bench: Bench) -> Iterator[Case]:
    for depth, budget, streams in TREES:
        token, logprob = tables(streams, depth, budget)
        yield Case("tree_build", f"block {depth + 1}, budget {budget}, {streams} streams", token.nbytes + logprob.nbytes, False,
                   200, "tree_build", (bench.array("int32_t", token), bench.array("float", logprob), streams, depth, budget,
                                       budget))  # fmt: skip
    for streams in 1, 16, 64:
        rows = 65 if streams < 64 else 10
        yield Case("tree_accept", f"{streams} streams, {rows} rows", 12 * streams * rows, False, 200, "tree_accept",
                   (streams, rows, 5))  # fmt: skip
        yield Case("kv_commit", f"{LAYERS} layers, {streams} streams, 4 of 5 rows moved", LAYERS * streams * 4 * KV_ROW * 4, True,
                   20, "kv_commit", (LAYERS, streams, rows, 5, KV_ROW))  # fmt: skip
        yield Case("keep_taps", f"{streams} streams, 5 rows of 6 x {HIDDEN}", streams * 5 * 6 * HIDDEN * 4, False, 50,
                   "keep_taps", (streams, rows, 5, 6 * HIDDEN))  # fmt: skip


# ---- trees on the host, as servers in Python build them --------------------------------------------------------------


def python_tree(tokens: list[list[int]], logprobs: list[list[float]], budget: int) -> tuple[list[int], list[int]]:
    """Best-first expansion of one request with the standard library's heap."""
    token: list[int] = []
    parent: list[int] = []
    heap: list[tuple[float, tuple[int, ...], int]] = [(-logprobs[0][0], (0,), 0)]
    while heap and len(token) < budget:
        cost, ranks, above = heapq.heappop(heap)
        depth, rank = len(ranks) - 1, ranks[-1]
        token.append(tokens[depth][rank])
        parent.append(above)
        row = logprobs[depth]
        if rank + 1 < len(row):
            heapq.heappush(heap, (cost + row[rank] - row[rank + 1], (*ranks[:-1], rank + 1), above))
        if depth + 1 < len(logprobs):
            heapq.heappush(heap, (cost - logprobs[depth + 1][0], (*ranks, 0), len(token)))
    return token, parent


def host_trees(bench: Bench) -> dict[tuple[int, int, int], tuple[float, float]]:
    """Microseconds for all streams, one after the other: (building alone, with copies). A server's worker copies the tables of
    all requests from the device at once, and tokens and parents of the trees back, which it does not wait for."""
    found = {}
    for depth, budget, streams in TREES:
        token, logprob = tables(streams, depth, budget)
        copies = statistics.median(bench.us("download", token.nbytes + logprob.nbytes, calls=20))
        copies += statistics.median(bench.us("upload", 8 * streams * budget, calls=20))
        took = []
        for _ in range(3 if streams * budget > 1000 else 7):
            began = time.perf_counter()
            for s in range(streams):
                python_tree(token[s].tolist(), logprob[s].tolist(), budget)
            took.append((time.perf_counter() - began) * 1e6)
        alone = statistics.median(took)
        found[depth, budget, streams] = alone, alone + copies
    return found


# ---- the table -------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--threads", type=int, default=0, help="of the CPU twin")
    parser.add_argument("--only", default="", help="rows whose name and shape match this expression")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    bench = Bench(options.device, options.threads)
    ceiling = CEILING / min(bench.us("read", CEILING, calls=4)) / 1e3  # GB/s
    report: dict[str, Any] = {
        "machine": machine(options.device),
        "device": options.device,
        "read_gb_s": ceiling,
        "rows": [],
    }
    print(f"{report['machine']}\nread ceiling {ceiling:.0f} GB/s, 2 GiB a call\n")
    print(f"{'':13} {'':44} {'us':>9} {'MB':>8} {'GB/s':>6} {'of ceiling':>10} {'x floor':>8} {'spread':>7}")
    groups: list[Callable[[], Iterator[Case]]] = [
        lambda: tree_cases(bench), attention_cases, linear_cases, lambda: expert_cases(bench),
        draft_cases, lambda: vocabulary_cases(bench), rows_cases,
    ]  # fmt: skip
    for group in groups:
        for case in group():
            if not re.search(options.only, f"{case.name} {case.shape}"):
                continue
            plays = bench.us(case.function, *case.arguments, calls=case.calls, cold=case.cold)
            us = statistics.median(plays)
            floor = case.bytes / ceiling / 1e3
            row = {"name": case.name, "shape": case.shape, "us": us, "plays_us": plays, "bytes": case.bytes, "cold": case.cold,
                   "floor_us": floor, "ratio": us / floor}  # fmt: skip
            report["rows"].append(row)
            spread = (max(plays) - min(plays)) / us
            print(
                f"{case.name:13} {case.shape + (' (cold)' if case.cold else ''):44} {us:>9.2f} {case.bytes / 1e6:>8.2f}"
                f" {case.bytes / us / 1e3:>6.0f} {floor / us:>10.0%} {us / floor:>8.2f} {spread:>7.0%}",
                flush=True,
            )
    if re.search(options.only, "tree_build"):
        print("\ntree_build beside a heap in Python, request after request; copies: tables to the host, trees back")
        for (depth, budget, streams), (alone, host) in host_trees(bench).items():
            shape = f"block {depth + 1}, budget {budget}, {streams} streams"
            own = next((r for r in report["rows"] if (r["name"], r["shape"]) == ("tree_build", shape)), None)
            if own is None:
                continue
            own["python_alone_us"], own["python_us"] = alone, host
            print(f"{'':13} {shape:44} {own['us']:>9.2f} us, in Python {alone:>7.0f} us, {alone / own['us']:>5.0f}x,"
                  f" with copies {host:>7.0f} us, {host / own['us']:>5.0f}x")  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
