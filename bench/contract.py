"""What the exactness contract costs at most: each operation beside the best kernel at hand that ignores it.

    python bench/contract.py [--only REGEX] [--attention FILE] [--json FILE]

kd's operations fix the order of every sum by shape, so that a row has the same bits whatever its company. Libraries choose
tile, split and order by the number of rows. Here both run on the same shapes in one process, in recorded graphs, weights
cold: the ratio is an upper bound of what the contract costs, since it also holds whatever else the other kernel does better.
Products stand beside cuBLAS, what has a counterpart in PyTorch beside that (all through torch, which must be installed),
experts beside the time that reading their weights takes: no kernel is faster than that. --attention: what
bench/peers/fa3.py --json wrote on the same machine; FlashAttention-3 chooses its splits freely and has no tree mask.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from kernels import CEILING, COLD, EXPERTS, HIDDEN, RANK_INTER, RANK_VOCAB, SLOTS, VOCAB, Bench
from machine import machine

ROWS = (1, 8, 32, 64, 128, 640)
MATRICES = {
    "qkv_a": (2112, HIDDEN), "q_b": (1536, 1536), "o": (HIDDEN, 1024), "shared gate_up": (512, HIDDEN),
    "shared down": (HIDDEN, 256), "dense gate_up": (4608, HIDDEN), "dense down": (HIDDEN, 2304),
    "lm_head": (RANK_VOCAB, HIDDEN),
}  # fmt: skip
PLAYS = 7


class Pair(NamedTuple):
    name: str
    shape: str
    rows: int
    peer: str
    own: Callable[[], float]
    other: Callable[[], float]


class Torch:
    """Median microseconds of a call in a recorded graph, as Bench.us() times ours."""

    def __init__(self) -> None:
        try:
            import torch
        except ImportError:
            raise SystemExit("bench/contract.py needs torch, which is not installed here: pip install torch") from None
        torch.backends.cuda.matmul.allow_tf32 = False
        self.torch = torch

    def random(self, *shape: int, dtype: str = "bfloat16") -> Any:
        return self.torch.randn(*shape, device="cuda", dtype=getattr(self.torch, dtype))

    def us(self, make: Callable[[], Any], run: Callable[[Any], Any], size: int, calls: int) -> float:
        """`make` gives what a call reads, of `size` bytes; successive calls take turns with COLD bytes of it."""
        torch = self.torch
        copies = [make() for _ in range(max(1, min(calls, -(-COLD // size))))]
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for copy in copies[:2]:
                run(copy)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            kept = [run(copies[i % len(copies)]) for i in range(calls)]
        times = []
        with torch.cuda.stream(stream):
            for play in range(PLAYS + 2):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                graph.replay()
                end.record()
                end.synchronize()
                if play >= 2:
                    times.append(begin.elapsed_time(end) * 1e3 / calls)
        del kept, graph, copies
        return statistics.median(times)


def pairs(bench: Bench, torch: Torch, ceiling: float) -> list[Pair]:
    def own(function: str, *arguments: Any, calls: int) -> Callable[[], float]:
        return lambda: statistics.median(bench.us(function, *arguments, calls=calls, cold=True))

    functional = torch.torch.nn.functional
    found = []
    for name, (n, k) in MATRICES.items():
        for rows in ROWS:
            x, calls = torch.random(rows, k), 20 if n == RANK_VOCAB else 60
            found.append(
                Pair("logits" if name == "lm_head" else "linear", f"{name} {n} x {k}", rows, "cuBLAS",
                     own("linear", rows, n, k, int(name == "lm_head"), calls=calls),
                     lambda n=n, k=k, x=x, calls=calls: torch.us(lambda: torch.random(n, k), lambda w: x @ w.T, 2 * n * k, calls))
            )  # fmt: skip
    for rows in ROWS:
        x, bias = torch.random(rows, HIDDEN, dtype="float32"), torch.random(EXPERTS, dtype="float32")

        def choose(w: Any, x: Any = x, bias: Any = bias) -> Any:
            score = (x @ w.T).sigmoid()
            best = (score + bias).topk(SLOTS, dim=1).indices
            weight = score.gather(1, best)
            return best, weight / weight.sum(dim=1, keepdim=True)

        found.append(
            Pair("route", f"{EXPERTS} x {HIDDEN}", rows, "torch, 6 kernels",
                 own("route", rows, HIDDEN, EXPERTS, SLOTS, 0, calls=30),
                 lambda choose=choose: torch.us(lambda: torch.random(EXPERTS, HIDDEN, dtype="float32"), choose,
                                                4 * EXPERTS * HIDDEN, 30))
        )  # fmt: skip
    greedy = bench.ffi.new("kd_probe_sampling *", {"top_p": 1.0})
    for rows in 1, 64:
        make = lambda rows=rows: torch.random(rows, VOCAB, dtype="float32")  # noqa: E731
        size = 4 * rows * VOCAB
        found.append(
            Pair("sample", f"greedy, {VOCAB}", rows, "torch argmax", own("sample", greedy, rows, VOCAB, calls=12),
                 lambda make=make, size=size: torch.us(make, lambda x: x.argmax(dim=1), size, 12))
        )  # fmt: skip
    for rows in 7, 60:
        make = lambda rows=rows: torch.random(rows, RANK_VOCAB, dtype="float32")  # noqa: E731
        found.append(
            Pair("top_logprobs", f"{RANK_VOCAB}, k 64", rows, "torch topk, logsumexp",
                 own("top_logprobs", rows, RANK_VOCAB, 64, calls=12),
                 lambda make=make, rows=rows: torch.us(make, lambda x: (x.topk(64, dim=1), x.logsumexp(dim=1)),
                                                       4 * rows * RANK_VOCAB, 12))
        )  # fmt: skip
    for rows in 8, 640:
        w = torch.random(1536)
        found.append(
            Pair("rms_norm", "1536", rows, "torch", own("rms_norm", rows, 1536, calls=100),
                 lambda rows=rows, w=w: torch.us(lambda: torch.random(rows, 1536), lambda x: functional.rms_norm(x, (1536,), w),
                                                 2 * rows * 1536, 100))
        )  # fmt: skip
    rng = np.random.default_rng(0)
    for rows in 8, 32, 64, 128:
        calls = 12
        sent = np.stack([[rng.permutation(EXPERTS)[:SLOTS] for _ in range(rows)] for _ in range(calls)]).astype(
            np.int32
        )
        active = statistics.mean(len(np.unique(call)) for call in sent)
        floor = active * 3 * RANK_INTER * HIDDEN * 4.5 / 8 / ceiling / 1e3
        found.append(
            Pair("moe", f"{EXPERTS} experts of {RANK_INTER}", rows, "reading the weights",
                 own("moe", bench.array("int32_t", sent), rows, HIDDEN, RANK_INTER, EXPERTS, SLOTS, calls=calls),
                 lambda floor=floor: floor)
        )  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose name and shape match this expression")
    parser.add_argument("--attention", type=Path, help="FlashAttention-3's figures of the same machine")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    machine("cuda")
    torch, bench = Torch(), Bench("cuda", 0)  # what is missing is told before anything is built
    ceiling = CEILING / min(bench.us("read", CEILING, calls=4)) / 1e3
    report: dict[str, Any] = {
        "machine": machine("cuda"),
        "torch": torch.torch.__version__,
        "read_gb_s": ceiling,
        "rows": [],
    }
    work = pairs(bench, torch, ceiling)
    if options.attention:
        for row in json.loads(options.attention.read_text())["rows"]:
            shape = f"{row['streams']} streams, context {row['context']}"
            own, other = (lambda us=row[key]: us for key in ("us", "fa3_us"))
            work.append(Pair("attention", shape, row["rows"], "FlashAttention-3", own, other))
    print(f"{'':13} {'':36} {'rows':>5} {'us':>9} {'peer us':>9} {'at most':>8}  beside")
    for pair in work:
        if not re.search(options.only, f"{pair.name} {pair.shape}"):
            continue
        us, peer = pair.own(), pair.other()
        report["rows"].append({"name": pair.name, "shape": pair.shape, "rows": pair.rows, "us": us, "peer": pair.peer,
                               "peer_us": peer, "ratio": us / peer})  # fmt: skip
        print(
            f"{pair.name:13} {pair.shape:36} {pair.rows:>5} {us:>9.2f} {peer:>9.2f} {us / peer:>8.2f}  {pair.peer}",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
