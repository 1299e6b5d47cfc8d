"""Routed experts of one rank of eight of Kimi K2 beside Humming's and vLLM's Marlin: from (ids, weights) to the weighted sum.

    python bench/peers/experts.py --vllm _moe_C.abi3.so[.xz] --humming DIR [--rounds 2] [--json FILE]
    python bench/peers/experts.py --vllm _moe_C.abi3.so[.xz] --humming DIR --prepare humming|marlin

Needs a Hopper GPU, torch 2.11 and Triton. The peers are in the wheels vllm 0.22.1 and humming-kernels 0.1.20 of PyPI (both
Apache-2.0); nothing of them is kept here:

    pip download --no-deps --only-binary=:all: vllm==0.22.1 humming-kernels==0.1.20
    unzip vllm-*.whl vllm/_moe_C.abi3.so
    unzip -d DIR humming_kernels-*.whl

The first use of either takes minutes, Marlin's in the driver, which has its code as PTX only, Humming's in NVRTC: --prepare
does that and proves the results, timing nothing. CUDA_CACHE_PATH and HUMMING_CACHE_DIR keep what it compiled for the run.

INT4 in groups of 32 with bf16 scales, hidden 7168, 256 of each expert on the rank, 384 experts, 8 for a row. Marlin: as vLLM
calls it, with its choice of block size and launch. Humming: indexed, with its heuristics, among vLLM's kernels as vLLM calls
it. Both: vLLM's lists of rows; small_kernels.py has silu(gate) * up of both and the weighted sum of Humming. All three get the
same rows for the same experts, uniform and distinct in a row, and the same weight for every slot.

A play is a graph of CALLS calls that take turns with LAYERS sets of weights of all experts, each call with its own routing, so
that what a call reads comes from memory. Ours, Humming, Marlin, ours, Humming, Marlin: the figure is the median of the plays.
Peers have the same 16 experts again and again, in places of their own: the answer at the full size is checked against a
plain one with 16, ours with the 16 alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

try:
    import torch
except ImportError:
    raise SystemExit("bench/peers/experts.py needs torch, which is not installed here: pip install torch") from None
from fa3 import load
from int4 import (
    EXPERTS,
    GROUP,
    HIDDEN,
    INTER,
    KINDS,
    SLOTS,
    W4,
    WEIGHT,
    distance,
    plain_experts,
    random_w4,
    routing,
    values,
    words,
)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import kernels

ROWS = (1, 2, 4, 8, 16, 32, 45, 64, 128)
LAYERS, CALLS, PLAYS = 4, 24, 7
EXPERT_BYTES = 3 * INTER * HIDDEN * 9 // 16
WORST = 0.02  # of an answer: its distance from the plain one, as a part of that
PAUSE_S = 0.02  # before the plays of each, so that none finds the clock that another left
Layer = tuple[torch.Tensor, ...]  # gate_up and down, words and scales, as whoever it is wants them


# ---- peers -----------------------------------------------------------------------------------------------------------


class Lists:
    """Rows by expert in blocks, as vLLM makes them for either peer."""

    def __init__(self, rows: int, block: int):
        pairs = rows * SLOTS
        most = min(pairs * block, pairs + EXPERTS * (block - 1)) if pairs < EXPERTS else pairs + EXPERTS * (block - 1)
        options: dict[str, Any] = dict(dtype=torch.int32, device="cuda")
        self.block = block
        self.pair = torch.empty(most, **options)
        self.expert = torch.empty(-(-most // block), **options)
        self.count = torch.empty(1, **options)

    def fill(self, ids: torch.Tensor) -> None:
        torch.ops._moe_C.moe_align_block_size(ids, EXPERTS, self.block, self.pair, self.expert, self.count, None)


class Room:
    """What calls of `rows` rows work in."""

    def __init__(self, rows: int):
        options: dict[str, Any] = dict(dtype=torch.bfloat16, device="cuda")
        pairs = rows * SLOTS
        self.both = torch.empty(pairs, 2 * INTER, **options)
        self.inner = torch.empty(pairs, INTER, **options)
        self.each = torch.empty(pairs, HIDDEN, **options)
        self.y = torch.empty(rows, HIDDEN, **options)
        self.weight = torch.full((rows, SLOTS), WEIGHT, device="cuda")


class Peer(ABC):
    """Whose experts they are. Weights in its own layout, and calls over them."""

    name = ""

    def __init__(self) -> None:
        import small_kernels  # Triton is where a GPU is, and only there

        self.small = small_kernels

    def compile(self) -> None:  # noqa: B027 - not every peer has something
        """What is not compiled by the first call."""

    @abstractmethod
    def place(self, gate_up: W4, down: W4) -> Layer: ...

    @abstractmethod
    def about(self, rows: int) -> str: ...

    @abstractmethod
    def caller(self, rows: int) -> Callable[[Layer, torch.Tensor, torch.Tensor], torch.Tensor]:
        """(layer, x [rows][HIDDEN], ids [rows][SLOTS]) -> y [rows][HIDDEN], overwritten by the next"""


class Marlin(Peer):
    name = "Marlin"
    UINT4_8 = 1125899907892224  # vLLM's number of the type: 4 bits, 8 is zero

    def __init__(self) -> None:
        super().__init__()
        blocks = 4 * torch.cuda.get_device_properties(0).multi_processor_count
        self.locks = torch.zeros(blocks, dtype=torch.int32, device="cuda")

    @staticmethod
    def place_one(w: W4) -> tuple[torch.Tensor, torch.Tensor]:
        """Words of tiles of 16 of k by 64 of n, the nibbles of a word from two rows of n, in the order an mma's lane takes."""
        lane, quarter, nibble = (torch.arange(n).reshape(s) for n, s in ((32, (-1, 1, 1)), (4, (-1, 1)), (8, (-1,))))
        taken = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])[nibble]
        k = 2 * (lane % 4) + taken % 2 + 8 * (taken % 4 // 2)
        n = 16 * quarter + lane // 4 + 8 * (taken // 4)
        place = (n * 16 + k).flatten().to(w.q.device)
        count, rows, _ = w.q.shape
        q = values(w.q).reshape(count, rows // 64, 64, -1, 16).permute(0, 3, 1, 2, 4)  # [count][k / 16][n / 64][64][16]
        q = words(q.flatten(-2)[..., place].unflatten(-1, (-1, 8)))
        s = w.s.transpose(1, 2).reshape(count, -1, rows // 64, 8, 8).transpose(-1, -2)
        return q.flatten(2).contiguous(), s.reshape(count, -1, rows).contiguous()

    def place(self, gate_up: W4, down: W4) -> Layer:
        return *self.place_one(gate_up), *self.place_one(down)

    def block(self, rows: int) -> int:
        return next((b for b in (8, 16, 32, 48) if rows * SLOTS / EXPERTS / b < 0.9), 64)

    def about(self, rows: int) -> str:
        return f"block {self.block(rows)}"

    def product(self, y: torch.Tensor, x: torch.Tensor, q: torch.Tensor, s: torch.Tensor, lists: Lists,
                weight: torch.Tensor, down: bool) -> None:  # fmt: skip
        nothing = (None,) * 5
        torch.ops._moe_C.moe_wna16_marlin_gemm(
            x, y, q, None, s, *nothing, self.locks, lists.pair, lists.expert, lists.count, weight, lists.block,
            1 if down else SLOTS, down, self.UINT4_8, len(x), y.shape[1], x.shape[1], True, False, True, False, -1, -1, -1,
        )  # fmt: skip

    def caller(self, rows: int) -> Callable[[Layer, torch.Tensor, torch.Tensor], torch.Tensor]:
        room, lists = Room(rows), Lists(rows, self.block(rows))

        def call(layer: Layer, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            lists.fill(ids)
            self.product(room.both, x, *layer[:2], lists, room.weight, down=False)
            self.small.gate(room.inner, room.both)
            self.product(room.each, room.inner, *layer[2:], lists, room.weight, down=True)
            torch.ops._moe_C.moe_sum(room.each.view(rows, SLOTS, HIDDEN), room.y)
            return room.y

        return call


class Humming(Peer):
    name = "Humming"
    SIZES = ((2 * INTER, HIDDEN), (HIDDEN, INTER))

    def __init__(self, folder: Path):
        super().__init__()
        sys.path.insert(0, str(folder))
        from humming import dtypes, forward, schema, transform, tune
        from humming.kernel.humming import HummingKernel

        self.kernel, self.forward, self.transform = HummingKernel, forward.humming_forward, transform
        self.how = json.dumps({"gemm_type": "indexed"})
        self.locks = torch.zeros(1 << 16, dtype=torch.int32, device="cuda")
        weights = schema.HummingWeightSchema(b_dtype="uint4", weight_scale_group_size=GROUP, bs_dtype="bfloat16")
        inputs = schema.HummingInputSchema(a_dtype=dtypes.bfloat16)
        self.shapes, self.few = (
            [transform.prepare_layer_config(shape_n=n, shape_k=k, weight_schema=weights, input_schema=inputs,
                                            num_experts=count, torch_dtype=torch.bfloat16) for n, k in self.SIZES]
            for count in (EXPERTS, KINDS)
        )  # fmt: skip
        self.tuned = {
            rows: [tune.get_heuristics_config(s, shape_m=rows * SLOTS, gemm_type="indexed") for s in self.shapes]
            for rows in ROWS
        }

    def compile(self) -> None:  # noqa: B027 - not every peer has something
        wanted = {
            (s.to_str(), json.dumps(t))
            for tuned in self.tuned.values()
            for s, t in zip(self.shapes, tuned, strict=True)
        }
        with ThreadPoolExecutor(min(12, os.cpu_count() or 1)) as pool:
            list(pool.map(lambda w: self.kernel.prepare_kernels(w[0], self.how, w[1], 0), wanted))

    def place(self, gate_up: W4, down: W4) -> Layer:
        placed: list[torch.Tensor] = []
        for shape, w in zip(self.few, (gate_up, down), strict=True):
            own = self.transform.transform_humming_tensors(shape, {"weight": w.q.clone(), "weight_scale": w.s.clone()})
            placed += own["weight"], own["weight_scale"]
        return tuple(placed)

    def about(self, rows: int) -> str:
        return " and ".join("x".join(map(str, t["block_shape"])) for t in self.tuned[rows])

    def caller(self, rows: int) -> Callable[[Layer, torch.Tensor, torch.Tensor], torch.Tensor]:
        room = Room(rows)
        blocks = [t["block_shape"][0] for t in self.tuned[rows]]
        lists = {block: Lists(rows, block) for block in blocks}
        tuned = [json.dumps(t) for t in self.tuned[rows]]

        def product(which: int, y: torch.Tensor, x: torch.Tensor, q: torch.Tensor, s: torch.Tensor) -> None:
            of = lists[blocks[which]]
            self.forward(
                self.shapes[which], inputs=x, weight=q, weight_scale=s, outputs=y, sorted_ids=of.pair, expert_ids=of.expert,
                num_tokens_padded=of.count, locks=self.locks, top_k=1 if which else SLOTS, valid_shape_m=rows * SLOTS,
                compute_config=self.how, tuning_config=tuned[which],
            )  # fmt: skip

        def call(layer: Layer, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            for of in lists.values():
                of.fill(ids)
            product(0, room.both, x, *layer[:2])
            self.small.gate(room.inner, room.both)
            product(1, room.each, room.inner, *layer[2:])
            self.small.weigh(room.y, room.each, room.weight)
            return room.y

        return call


class Placed:
    """A peer with weights, proven: layers of all experts, KINDS of them again and again."""

    def __init__(self, peer: Peer, layers: int):
        began = time.perf_counter()
        self.peer = peer
        peer.compile()
        gate_up, down = random_w4(KINDS, 2 * INTER, HIDDEN), random_w4(KINDS, HIDDEN, INTER)
        few = peer.place(gate_up, down)
        if any(len(t) != KINDS for t in few):
            raise RuntimeError(f"{peer.name} does not keep experts apart: {[tuple(t.shape) for t in few]}")
        self.layers = [tuple(t.repeat(EXPERTS // KINDS, *[1] * (t.dim() - 1)) for t in few) for _ in range(layers)]
        self.errors: dict[int, float] = {}
        for rows in ROWS:
            x = torch.randn(rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
            ids = torch.from_numpy(routing(1, rows, EXPERTS)[0]).cuda()
            got = peer.caller(rows)(self.layers[-1], x, ids)
            self.errors[rows] = distance(got, plain_experts(x, ids % KINDS, gate_up, down))
            if not self.errors[rows] < WORST:
                raise RuntimeError(f"{peer.name}, {rows} rows: {self.errors[rows]:.1e} off the plain answer")
        print(
            f"{peer.name}: at most {max(self.errors.values()):.1e} off, {time.perf_counter() - began:.1f} s", flush=True
        )

    def record(self, sent: np.ndarray) -> Callable[[], list[float]]:
        """sent [CALLS][rows][SLOTS] -> what plays it and gives the microseconds of one call, of each play"""
        return Recording(self.peer.caller(sent.shape[1]), self.layers, sent).play


class Recording:
    """A graph of CALLS calls, with all that it works in."""

    def __init__(self, call: Callable[[Layer, torch.Tensor, torch.Tensor], torch.Tensor], layers: list[Layer],
                 sent: np.ndarray):  # fmt: skip
        self.call, self.ids = call, torch.from_numpy(sent).cuda()
        self.x = torch.randn(sent.shape[1], HIDDEN, device="cuda", dtype=torch.bfloat16)
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            call(layers[0], self.x, self.ids[0])
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for turn in range(CALLS):
                call(layers[turn % len(layers)], self.x, self.ids[turn])

    def play(self) -> list[float]:
        took = []
        for _ in range(PLAYS + 2):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            self.graph.replay()
            ended.record()
            torch.cuda.synchronize()
            took.append(began.elapsed_time(ended) * 1e3 / CALLS)
        return took[2:]


# ---- ours ------------------------------------------------------------------------------------------------------------


class Ours:
    name = "ours"

    def __init__(self, bench: kernels.Bench):
        self.bench = bench

    def raise_if(self, status: int) -> None:
        if status != 0:
            raise SystemExit(f"bench: experts: {self.bench.ffi.string(self.bench.lib.kd_probe_error()).decode()}")

    def error(self, rows: int) -> float:
        """Of kd_probe_moe, which runs the same operation, of the KINDS."""
        ffi = self.bench.ffi
        gate_up, down = random_w4(KINDS, 2 * INTER, HIDDEN), random_w4(KINDS, HIDDEN, INTER)
        x = torch.randn(rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
        ids = routing(1, rows, KINDS)[0]
        y, weight = np.zeros((rows, HIDDEN), np.float32), np.full((rows, SLOTS), WEIGHT, np.float32)
        host = [
            t.view(torch.int16).cpu().numpy() if t.dtype == torch.bfloat16 else t.cpu().numpy()
            for t in (*gate_up, *down)
        ]
        where = ffi.new("kd_probe_device *", {"tp": 1, "aligned": 1})
        shape = ffi.new("kd_probe_shape *", {"hidden": HIDDEN, "moe_inter": INTER, "moe_inter_rank": INTER,
                                             "experts": KINDS, "experts_per_token": SLOTS, "tp": 1})  # fmt: skip
        self.raise_if(
            self.bench.lib.kd_probe_moe(
                where, self.bench.array("float", y), self.bench.array("float", x.float().cpu().numpy()),
                self.bench.array("int32_t", ids), self.bench.array("float", weight),
                *(self.bench.array(c, a) for c, a in zip(("uint32_t", "uint16_t") * 2, host, strict=True)),
                KINDS, rows, shape,
            )
        )  # fmt: skip
        return distance(torch.from_numpy(y).cuda(), plain_experts(x, torch.from_numpy(ids).cuda(), gate_up, down))

    def record(self, sent: np.ndarray) -> Callable[[], list[float]]:
        ffi, rows = self.bench.ffi, sent.shape[1]

        def play() -> list[float]:
            how = ffi.new("kd_bench *", [CALLS, PLAYS, 0, LAYERS * EXPERTS * EXPERT_BYTES])
            us = ffi.new("double[]", PLAYS)
            self.raise_if(self.bench.lib.kd_bench_moe(how, us, self.bench.array("int32_t", sent), rows, HIDDEN, INTER,
                                                      EXPERTS, SLOTS))  # fmt: skip
            return list(us)

        return play


# ---- the table -------------------------------------------------------------------------------------------------------


def tried(name: str, what: Callable[[], Any]) -> Any:
    """None, and why, where a peer fails: the others go on."""
    try:
        return what()
    except Exception:
        traceback.print_exc(file=sys.stdout)
        print(f"{name} is left out: see above", flush=True)
        return None


def heading(names: list[str]) -> str:
    each = "".join(f"  {name + ' us':>10} {'ceiling':>7} {'spread':>6}" for name in names)
    return "rows  experts      MB  floor us" + each + "".join(f"  {'ours/' + name:>12}" for name in names[1:])


def line(row: dict[str, Any], names: list[str]) -> str:
    text = f"{row['rows']:>4} {row['experts']:>8.1f} {row['bytes'] / 1e6:>7.1f} {row['floor_us']:>9.1f}"
    for name in names:
        if (of := row.get(name)) is None:
            text += f"  {'-':>10} {'-':>7} {'-':>6}"
        else:
            text += f"  {of['us']:>10.2f} {of['of_ceiling']:>7.0%} {of['spread']:>6.0%}"
    return text + "".join(
        f"  {row['ours']['us'] / row[n]['us'] if n in row else float('nan'):>12.3f}" for n in names[1:]
    )


def figures(plays: list[float], floor_us: float) -> dict[str, Any]:
    us = statistics.median(plays)
    return {"us": us, "of_ceiling": floor_us / us, "spread": (max(plays) - min(plays)) / us, "plays_us": plays}


def measure(rows: int, contenders: dict[str, Any], rounds: int, ceiling: float) -> dict[str, Any]:
    sent = routing(CALLS, rows, EXPERTS)
    experts = statistics.mean(len(np.unique(call)) for call in sent)
    floor = experts * EXPERT_BYTES / ceiling / 1e3
    players = {n: p for n, c in contenders.items() if (p := tried(n, lambda c=c: c.record(sent))) is not None}
    plays: dict[str, list[float]] = {name: [] for name in players}
    for _ in range(rounds):
        for name, play in list(players.items()):
            time.sleep(PAUSE_S)
            if (took := tried(name, play)) is None:
                del players[name], plays[name]
            else:
                plays[name] += took
    row: dict[str, Any] = {"rows": rows, "experts": experts, "bytes": experts * EXPERT_BYTES, "floor_us": floor}
    for name, took in plays.items():
        row[name] = figures(took, floor)
        if isinstance(contenders[name], Placed):
            row[name] |= {"error": contenders[name].errors[rows], "how": contenders[name].peer.about(rows)}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--vllm", type=Path, help="vLLM's library of experts: Marlin, and the lists that both peers need"
    )
    parser.add_argument("--humming", type=Path, help="folder that Humming's wheel was unpacked to")
    parser.add_argument("--prepare", choices=("humming", "marlin"), help="only compile and prove this one")
    parser.add_argument("--leave-out", choices=("humming", "marlin"), action="append", default=[])
    parser.add_argument("--rows", type=int, nargs="+", choices=ROWS, default=ROWS)
    parser.add_argument("--rounds", type=int, default=2, help="how often the three take turns")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    makers: dict[str, Callable[[], Peer]] = {}
    if options.vllm is None:
        print("no --vllm: neither peer is timed")
    elif tried("vLLM's library, and with it both peers,", lambda: load(options.vllm) is None):
        makers["marlin"] = Marlin
        if options.humming is None:
            print("no --humming: it is not timed")
        else:
            makers = {"humming": lambda: Humming(options.humming), **makers}
    if options.prepare:
        if options.prepare not in makers:
            raise SystemExit(f"bench: --prepare {options.prepare} needs --vllm, and --humming for Humming: name them")
        Placed(makers[options.prepare](), 1)
        return
    bench = kernels.Bench("cuda", 0)
    ceiling = kernels.CEILING / min(bench.us("read", kernels.CEILING, calls=4)) / 1e3
    ours = Ours(bench)
    error = ours.error(8)
    if not error < WORST:
        raise SystemExit(f"bench: experts: ours is {error:.1e} off the plain answer: run the tests")
    contenders: dict[str, Any] = {"ours": ours}
    for name, make in makers.items():
        if name not in options.leave_out:
            placed = tried(name, lambda make=make: Placed(make(), LAYERS))
            if placed is not None:
                contenders[name] = placed
    report: dict[str, Any] = {"machine": kernels.machine("cuda"), "read_gb_s": ceiling, "error": error, "layers": LAYERS,
                              "calls": CALLS, "rounds": options.rounds, "rows": []}  # fmt: skip
    print(f"{report['machine']}\nread ceiling {ceiling:.0f} GB/s; ours {error:.1e} off\n")
    print(heading(list(contenders)), flush=True)
    for rows in options.rows:
        row = measure(rows, contenders, options.rounds, ceiling)
        report["rows"].append(row)
        print(line(row, list(contenders)), flush=True)
        if options.json:
            options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
