"""Attention of one rank beside FlashAttention 3: the same rows over the same number of keys, theirs without a tree mask.

    python bench/peers/fa3.py --library _vllm_fa3_C.abi3.so[.xz] [--quick] [--json FILE]

Needs a Hopper GPU and torch 2.11, for which the library is compiled; it is in the wheel vllm 0.22.1 of PyPI (Apache-2.0; the
kernels themselves BSD-3-Clause) and nothing of it is kept here:

    pip download --no-deps --only-binary=:all: vllm==0.22.1
    unzip vllm-*.whl vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so

Shape: 8 heads, one latent key of 512 + 64 for all of them, bf16, pages of 64. FlashAttention 3 is called as vLLM calls it for
such models (rope part as q and k, latent part as qv and v, causal among the rows); of the numbers of splits tried the best
counts, and its answer is checked once against a plain one. Both are timed as graphs of calls that take turns with copies of the
cache larger than the GPU's own, median of the plays.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

try:
    import torch
except ImportError:
    raise SystemExit("bench/peers/fa3.py needs torch, which is not installed here: pip install torch") from None

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import kernels

PAGE, LATENT, ROPE, HEADS, SCALE = 64, 512, 64, 8, 192**-0.5
SHAPES = [(1, rows, context) for context in (1024, 8192, 32768) for rows in (1, 8, 32, 64)] + [
    (8, 8, 8192),
    (16, 1, 32768),
]
SPLITS = (0, 2, 4, 8, 16, 32, 64, 128)  # 0: it chooses


def load(library: Path) -> None:
    if library.suffix != ".xz":
        torch.ops.load_library(str(library))
        return
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / library.stem
        with lzma.open(library) as packed, plain.open("wb") as out:
            shutil.copyfileobj(packed, out, 1 << 20)
        torch.ops.load_library(str(plain))


def graph_us(calls: list[Callable[[], Any]], plays: int = 9) -> float:
    """Microseconds of one of the calls, in a graph of all of them."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    took = []
    for _ in range(plays + 2):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
        took.append(began.elapsed_time(ended) * 1e3 / len(calls))
    return statistics.median(took[2:])


def plain_attention(q: torch.Tensor, keys: torch.Tensor, rows: int) -> torch.Tensor:
    """q [rows][heads][576], keys [context][576], the last `rows` of which are the rows' own. -> [rows][heads][512]"""
    score = torch.einsum("rhd,td->rht", q.float(), keys.float()) * SCALE
    last = len(keys) - rows + torch.arange(rows, device=q.device)
    hidden = torch.arange(len(keys), device=q.device)[None, :] > last[:, None]
    return score.masked_fill(hidden[:, None, :], -math.inf).softmax(-1) @ keys[:, :LATENT].float()


class Peer:
    """One shape: caches, and calls over them."""

    def __init__(self, streams: int, rows: int, context: int):
        self.streams, self.rows, self.context = streams, rows, context
        pages = -(-context // PAGE)
        size = streams * pages * PAGE * (LATENT + ROPE) * 2
        options: dict[str, Any] = dict(device="cuda", dtype=torch.bfloat16)
        self.caches = [
            torch.randn(streams * pages, PAGE, LATENT + ROPE, **options) * 0.5
            for _ in range(max(4, min(48, math.ceil(400e6 / size))))
        ]
        self.q = torch.randn(streams * rows, HEADS, LATENT + ROPE, **options)
        self.q_rope = self.q[..., LATENT:].contiguous()
        self.q_latent = self.q[..., :LATENT].contiguous()
        self.table = torch.randperm(streams * pages, device="cuda").to(torch.int32).reshape(streams, pages)
        self.first = torch.arange(streams + 1, device="cuda", dtype=torch.int32) * rows
        self.lengths = torch.full((streams,), context, device="cuda", dtype=torch.int32)

    def call(self, cache: torch.Tensor, splits: int) -> torch.Tensor:
        key, value = cache[..., LATENT:].unsqueeze(-2), cache[..., :LATENT].unsqueeze(-2)
        nothing = (None,) * 3
        return torch.ops._vllm_fa3_C.fwd(
            self.q_rope, key, value, None, None, self.q_latent, None, self.first, *nothing, self.lengths, self.rows,
            self.context, self.table, *nothing, *nothing, None, None, SCALE, True, -1, -1, 0.0, True, None, splits, None, 0,
            None, 1, 0, None,
        )[0]  # fmt: skip

    def error(self) -> float:
        got, want = self.call(self.caches[0], 0).float(), torch.empty_like(self.q_latent, dtype=torch.float32)
        for s in range(self.streams):
            keys = self.caches[0][self.table[s].long()].reshape(-1, LATENT + ROPE)[: self.context]
            own = slice(s * self.rows, (s + 1) * self.rows)
            want[own] = plain_attention(self.q[own], keys, self.rows)
        return float((got - want).norm() / want.norm())

    def us(self, splits: int) -> float:
        return graph_us([partial(self.call, cache, splits) for cache in self.caches])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="fewer numbers of splits")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    bench = kernels.Bench("cuda", 0)
    ceiling = kernels.CEILING / min(bench.us("read", kernels.CEILING, calls=4)) / 1e3
    load(options.library)
    report: dict[str, Any] = {"machine": kernels.machine("cuda"), "read_gb_s": ceiling, "rows": []}
    print(f"{report['machine']}\nread ceiling {ceiling:.0f} GB/s\n")
    print("streams  rows  context   ours us   FA3 us  splits  ratio  of ceiling  FA3 error")
    for streams, rows, context in SHAPES:
        ours = statistics.median(bench.us("attention", streams, rows, context, HEADS, calls=24, cold=True))
        peer = Peer(streams, rows, context)
        error = peer.error()
        splits = [n for n in (SPLITS[::3] if options.quick else SPLITS) if n * PAGE <= context]
        times = {n: peer.us(n) for n in splits}
        best = min(times, key=lambda n: times[n])
        read = streams * context * (LATENT + ROPE) * 2
        report["rows"].append({"streams": streams, "rows": rows, "context": context, "us": ours, "fa3_us": times[best],
                               "fa3_splits_us": times, "fa3_error": error, "ratio": ours / times[best],
                               "of_ceiling": read / ours / 1e3 / ceiling})  # fmt: skip
        print(
            f"{streams:>7} {rows:>5} {context:>8} {ours:>9.2f} {times[best]:>8.2f} {best or 'auto':>7} {ours / times[best]:>6.2f}"
            f" {read / ours / 1e3 / ceiling:>10.0%}  {error:.1e}",
            flush=True,
        )
        del peer
        torch.cuda.empty_cache()
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
