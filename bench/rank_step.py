"""What a box would do: the engine's own rounds on one tensor-parallel rank's share of a model, with random weights.

    python bench/rank_step.py [--device cuda] [--config FILE] [--tp 8] [--rows 1,8,64] [--contexts 8192] [--json FILE]

The share is laid out as the loader would (any config, any degree) and filled on the device; caches too. Rounds are those of
native/round.cpp, recorded and played as the engine does. Collectives are the real operation (all-reduce, residual and norm
in one) with one rank: what several ranks add by waiting for one another is not in here.

    verify   trees of given rows through all layers, tokens chosen and accepted, cache moved: us by the device's clock
    draft    waiting taps to the drafter's K/V; then one block a stream
    round    all of a round, one after the other as the engine decodes: draft, trees on the device, verification
    stages   of each of these: us of every operation, by stamps behind each (native/stages.h). In every play they add up to
             the stamped whole to the nanosecond. Stamps cost time of their own, which is measured beside and told

The floor of an operation is what it must read from memory (weights as a checkpoint stores them, keys once a stream, experts
that somebody was sent to) at the read ceiling of the same run, or what it must compute at --tflops, whichever takes longer.

Routing: the router's weights are random, so that scores of a row are sigmoids of independent normal values; its bias is made
so that experts are chosen as often as wanted: `uniform`, `zipf0.8`, `zipf1.2` (any exponent), `nano` (as nano's own layers
choose, by --record, stretched over the experts there are; that tokens near each other choose alike is lost). Which experts
are favoured differs from layer to layer. How many distinct ones a step reached is counted, and the floor is that of these.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from kernels import CEILING, ROOT, Bench
from machine import machine
from rank_needs import RECORDED, WARM, Work, bias_of, needs, stage_table

CONFIG = ROOT / "tests" / "data" / "kimi-k2.5-config.json"
DRAFT_CONFIG = ROOT / "tests" / "data" / "kimi-k2.6-dflash-config.json"
ROWS = (1, 2, 4, 8, 16, 17, 32, 33, 45, 64, 128, 256, 640)
WHATS = ("verify", "draft", "round")
STREAM_ROWS = 257  # a root and KD_MAX_NODES nodes
TFLOPS = {"cuda": 785.0, "cpu": 0.0}  # bf16, cuBLAS on an H200; 0: not considered
CAPACITY = 64 << 20


# ---- the share ---------------------------------------------------------------------------------------------------------


class Rank:
    """native/probe_rank.h."""

    def __init__(
        self,
        bench: Bench,
        config: Path,
        draft: Path | None,
        *,
        tp: int,
        streams: int,
        rows: int,
        context: int,
        nodes: int,
    ):
        self.bench, self.ffi = bench, bench.ffi
        self._texts = [self.ffi.new("char[]", path.read_bytes()) if path else self.ffi.NULL for path in (config, draft)]
        self.options = self.ffi.new(
            "kd_share_options *", [*self._texts, tp, bench.threads, streams, rows, context, nodes]
        )
        self._rank = self.ffi.NULL

    def call(self, function: str, *arguments: Any) -> None:
        if getattr(self.bench.lib, f"kd_share_{function}")(*arguments) != 0:
            raise SystemExit(f"rank_step: {self.ffi.string(self.bench.lib.kd_probe_error()).decode()}")

    def _json(self, function: str, *arguments: Any) -> Any:
        text = self.ffi.new("char[]", CAPACITY if function == "stages" else 4096)
        self.call(function, *arguments, text, len(text))
        return json.loads(self.ffi.string(text))

    def account(self) -> dict[str, float]:
        return self._json("account", self.options)

    def open(self) -> None:
        rank = self.ffi.new("kd_share **")
        self.call("open", rank, self.options)
        self._rank = rank[0]

    def close(self) -> None:
        self.bench.lib.kd_share_close(self._rank)
        self._rank = self.ffi.NULL

    def info(self) -> dict[str, Any]:
        return self._json("info", self._rank)

    def _work(self, work: Work) -> Any:
        return self.ffi.new("kd_share_work *", list(work))

    def route(self, bias: np.ndarray) -> None:
        self.call("bias", self._rank, self.ffi.from_buffer("float[]", np.ascontiguousarray(bias, np.float32)))

    def sent(self, work: Work) -> np.ndarray:
        """[layers with experts][rows][experts per token]"""
        info = self.info()
        shape = int(info["layers"] - info["dense_layers"]), work.rows, int(info["experts_per_token"])
        expert = np.empty(shape, np.int32)
        self.call("sent", self._rank, self._work(work), self.ffi.from_buffer("int32_t[]", expert))
        return expert

    def verify(self, work: Work, plays: int) -> list[float]:
        us = self.ffi.new("double[]", plays)
        self.call("verify", self._rank, self._work(work), plays, us)
        return list(us)

    def draft(self, work: Work, plays: int) -> tuple[list[float], list[float]]:
        context, draft = self.ffi.new("double[]", plays), self.ffi.new("double[]", plays)
        self.call("draft", self._rank, self._work(work), plays, context, draft)
        return list(context), list(draft)

    def rounds(self, work: Work, rounds: int) -> tuple[list[float], list[float], list[int]]:
        us, gap, tokens = (self.ffi.new(f"{kind}[]", rounds) for kind in ("double", "double", "int32_t"))
        self.call("rounds", self._rank, self._work(work), rounds, us, gap, tokens)
        return list(us), list(gap), list(tokens)

    def stages(self, work: Work, what: str, plays: int, room: int = 1 << 14) -> list[dict[str, Any]]:
        """Parts that were played more often than to warm up; with room for so many stamps."""
        parts = self._json("stages", self._rank, self._work(work), WHATS.index(what), plays, room)
        return [part for part in parts if len(part["ns"]) > WARM]

    def stamp_ns(self, n: int = 200) -> float:
        ns = self.ffi.new("double[]", n)
        self.call("stamps", self._rank, n, ns)
        return statistics.median(ns)


# ---- measuring ----------------------------------------------------------------------------------------------------------


def works_of(rows: Iterable[int], contexts: Iterable[int], streams: Iterable[int], recorded: int = 0) -> list[Work]:
    """Every combination; of streams at least as many as the rows need, and none without a row."""
    found = {
        Work(max(s, -(-r // STREAM_ROWS)), r, c, recorded if recorded >= r else 0)
        for c in contexts for s in streams for r in rows if r >= s
    }  # fmt: skip
    return sorted(found, key=lambda w: (w.context, w.streams, w.rows))


class Report:
    """Measures and prints; `made` is what goes to the file."""

    def __init__(self, rank: Rank, gb_s: float, tflops: float, plays: int):
        self.rank, self.gb_s, self.tflops, self.plays = rank, gb_s, tflops, plays
        self.info = rank.info()
        self.stamp_us = rank.stamp_ns() / 1e3
        self.made: dict[str, Any] = {"info": self.info, "stamp_us": self.stamp_us, "works": [], "stages": []}
        self._calls: dict[str, list[dict[str, Any]]] = {}

    def distinct(self, work: Work) -> list[float]:
        return [float(len(np.unique(layer))) for layer in self.rank.sent(work)]

    def calls(self, part: str, work: Work) -> list[dict[str, Any]]:
        """The operations of a part, as it calls them; what they must do depends on the work, not which they are."""
        if part not in self._calls:
            for found in self.rank.stages(work, "verify" if part == "verify" else "draft", 1):
                self._calls[found["part"]] = found["calls"]
            if part not in self._calls:  # the work has nothing to draft for; another of as many streams would
                raise SystemExit(f"rank_step: {part} was not played for {work}")
        return self._calls[part]

    def _tell(
        self, part: str, work: Work, routing: str, plays: list[float], distinct: list[float], **more: Any
    ) -> None:
        """part: one, or those of a round: "round: context+draft+verify"."""
        all_needs = [
            need
            for name in part.removeprefix("round: ").split("+")
            for need in needs(self.calls(name, work), work, self.info, distinct)
        ]
        floor = sum(need.floor_us(self.gb_s, self.tflops) for need in all_needs)
        size, us = sum(need.bytes for need in all_needs), statistics.median(plays)
        self.made["works"].append({
            "part": part, "routing": routing, **work._asdict(), "us": us, "plays_us": plays, "bytes": size, "floor_us": floor,
            "ratio": us / floor, "of_ceiling": size / us / 1e3 / self.gb_s, "distinct": statistics.mean(distinct), **more,
        })  # fmt: skip
        print(f"{part:27} {routing:8} {work!s:38} {us:>10.1f} {size / 1e9:>8.3f} {floor:>9.1f} {us / floor:>7.2f}"
              f" {size / us / 1e3 / self.gb_s:>7.0%} {statistics.mean(distinct):>8.1f}  "
              + "  ".join(f"{k} {v:.1f}" for k, v in more.items()), flush=True)  # fmt: skip

    def head(self) -> None:
        print(f"\n{'part':27} {'routing':8} {'':38} {'us':>10} {'GB':>8} {'floor us':>9} {'x floor':>7} {'ceiling':>7} "
              f"{'experts':>8}")  # fmt: skip

    def verify(self, work: Work, routing: str) -> None:
        self._tell("verify", work, routing, self.rank.verify(work, self.plays), self.distinct(work))

    def draft(self, work: Work, routing: str) -> None:
        if work.rows == work.streams:  # nothing to draft for
            return
        context, draft = self.rank.draft(work, self.plays)
        none = [0.0] * int(self.info["layers"] - self.info["dense_layers"])
        self._tell("context", work, routing, context, none)
        self._tell("draft", work, routing, draft, none)

    def round(self, work: Work, routing: str) -> None:
        us, gap, tokens = self.rank.rounds(work, self.plays)
        gaps = [g for g in gap if g] or [0.0]
        parts = "verify" if work.rows == work.streams else "context+draft+verify"
        self._tell(f"round: {parts}", work, routing, us, self.distinct(work), gap_us=statistics.median(gaps),
                   tokens=statistics.mean(tokens))  # fmt: skip

    def stages(self, work: Work, what: str, routing: str) -> None:
        distinct = self.distinct(work)
        for part in self.rank.stages(work, what, self.plays):
            stages = stage_table(part, work, self.info, distinct, self.gb_s, self.tflops)
            whole = statistics.median(part["ns"][WARM:]) / 1e3
            made = {"part": part["part"], "routing": routing, **work._asdict(), "whole_us": whole, "calls": len(part["calls"]),
                    "stages": stages}  # fmt: skip
            self.made["stages"].append(made)
            self.tell_stages(made)

    def tell_stages(self, made: dict[str, Any]) -> None:
        work = Work(*(made[field] for field in Work._fields))
        print(f"\nstages of {made['part']}, {work}, {made['routing']}: {made['whole_us']:.1f} us with {made['calls']} stamps of "
              f"{self.stamp_us:.2f} us; net: less one stamp a call\n{'':32} {'calls':>5} {'us':>10} {'net us':>10} {'each':>8} "
              f"{'MB':>10} {'ceiling':>7} {'floor us':>9} {'x floor':>7}")  # fmt: skip
        net = {s["stage"]: max(0.0, s["us"] - s["calls"] * self.stamp_us) for s in made["stages"]}
        rows = sorted(made["stages"], key=lambda s: -s["us"])
        for stage in rows:
            self._stage_row(stage["stage"], [stage], net)
        self._stage_row("collectives of these", [s for s in rows if s["collective"]], net)
        self._stage_row("without them", [s for s in rows if not s["collective"]], net)
        self._stage_row("together", rows, net)

    def _stage_row(self, name: str, stages: list[dict[str, Any]], net: dict[str, float]) -> None:
        calls, us, size, floor = (sum(s[k] for s in stages) for k in ("calls", "us", "bytes", "floor_us"))
        less = sum(net[s["stage"]] for s in stages)
        told = f"{size / less / 1e3 / self.gb_s:>7.0%} {floor:>9.1f} {less / floor:>7.2f}" if less and floor else ""
        each = less / calls if calls else 0.0
        print(f"{name:32} {calls:>5} {us:>10.1f} {less:>10.1f} {each:>8.2f} {size / 1e6:>10.2f} {told}")


def tell_account(account: dict[str, float], tp: int, streams: int, context: int) -> None:
    gb = {name: size / 1e9 for name, size in account.items()}
    told = [f"weights {gb['shard_bytes']:.2f} GB (experts {gb['expert_bytes']:.2f}, drafter {gb['draft_bytes']:.2f})",
            f"KV cache of {streams} streams of {context} tokens {gb['kv_bytes']:.2f} GB "
            f"({account['kv_bytes_token'] / 1e3:.1f} kB a token)"]  # fmt: skip
    if "activation_bytes" in gb:
        told.append(f"activations {gb['activation_bytes']:.2f} GB")
    print(f"one rank of {tp}: {', '.join(told)}; left on the device {gb['left_bytes']:.2f} GB", flush=True)


def record(bench: Bench, folder: Path, to: Path) -> None:
    """How often each expert of the folder's model is chosen while it reads README.md."""
    from kd.tokenizer import Tokenizer

    config = json.loads((folder / "config.json").read_text())
    config = config.get("text_config", config)
    layers, experts = config["num_hidden_layers"] - config["first_k_dense_replace"], config["n_routed_experts"]
    text = (ROOT / "README.md").read_text()
    tokens = np.array(Tokenizer.load(folder).encode(text)[: config["max_position_embeddings"]], np.int32)
    counts = np.zeros((layers, experts), np.int64)
    status = bench.lib.kd_share_record(
        bench.ffi.new("char[]", str(folder).encode()), bench.ffi.from_buffer("int32_t[]", tokens), len(tokens),
        bench.ffi.from_buffer("int64_t[]", counts), layers, experts,
    )  # fmt: skip
    if status != 0:
        raise SystemExit(f"rank_step: {bench.ffi.string(bench.lib.kd_probe_error()).decode()}")
    made = {
        "model": folder.name,
        "text": "README.md",
        "tokens": len(tokens),
        "slots": config["num_experts_per_tok"],
        "counts": counts.tolist(),
    }
    to.write_text(json.dumps(made) + "\n")
    print(f"{to}: {len(tokens)} tokens, {layers} layers of {experts} experts; most and least of a layer chosen "
          + ", ".join(f"{c.max() / len(tokens):.0%}/{c.min() / len(tokens):.0%}" for c in counts))  # fmt: skip


def numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]


def options_of(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--threads", type=int, default=0, help="of the CPU twin")
    parser.add_argument("--config", type=Path, default=CONFIG, help="config.json of the target (default: Kimi K2.5's)")
    parser.add_argument("--draft-config", type=Path, default=DRAFT_CONFIG, help="of its drafter (default: K2.6's)")
    parser.add_argument("--no-draft", action="store_true", help="no drafter: verification only")
    parser.add_argument("--tp", type=int, default=8, help="ranks, of which one is made")
    parser.add_argument("--rows", type=numbers, default=list(ROWS))
    parser.add_argument("--contexts", type=numbers, default=[1024, 8192, 32768])
    parser.add_argument("--streams", type=numbers, default=[1], help="rows are dealt out to them")
    parser.add_argument("--routing", default="uniform", help="uniform,zipf0.8,zipf1.2,nano")
    parser.add_argument("--parts", default="verify,draft,round", help="of these, or none")
    parser.add_argument("--stages", type=numbers, default=[1, 8, 64], help="rows whose stages are told")
    parser.add_argument("--plays", type=int, default=20)
    parser.add_argument(
        "--recorded-rows", type=int, default=0, help="record for so many rows, not for what the engine does"
    )
    parser.add_argument(
        "--tflops", type=float, help="rate of computing for the floor (default: 785 on cuda, none on cpu)"
    )
    parser.add_argument("--account", action="store_true", help="only tell what it takes")
    parser.add_argument(
        "--record", type=Path, metavar="FOLDER", help=f"record a model's routing to {RECORDED.name}, or --json"
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args(arguments)
    unknown = set(options.parts.split(",")) - {*WHATS, ""}
    if unknown:
        parser.error(f"no part {', '.join(sorted(unknown))}: there are {', '.join(WHATS)}")
    if not 1 <= options.plays <= 60:
        parser.error(f"{options.plays} plays: give 1 .. 60")
    return options


def main(arguments: list[str]) -> dict[str, Any]:
    options = options_of(arguments)
    bench = Bench(options.device, options.threads)
    if options.record:
        record(bench, options.record, options.json or RECORDED)
        return {}
    works = works_of(options.rows, options.contexts, options.streams, options.recorded_rows)
    staged = works_of(options.stages, options.contexts, options.streams, options.recorded_rows)
    every = works + staged
    if not every:
        raise SystemExit("rank_step: no combination has a row for every stream: give more --rows or fewer --streams")
    draft = None if options.no_draft else options.draft_config
    most = {"streams": max(w.streams for w in every), "rows": max(w.rows for w in every),
            "context": max(w.context for w in every), "nodes": max((w.rows - 1) // w.streams for w in every)}  # fmt: skip
    most["rows"] = max(most["rows"], options.recorded_rows)
    rank = Rank(bench, options.config, draft, tp=options.tp, **most)
    if options.account:
        tell_account(rank.account(), options.tp, most["streams"], most["context"])
        return rank.account()
    rank.open()
    tell_account(rank.info(), options.tp, most["streams"], most["context"])
    gb_s = CEILING / min(bench.us("read", CEILING, calls=4)) / 1e3
    tflops = TFLOPS[options.device] if options.tflops is None else options.tflops
    report = Report(rank, gb_s, tflops, options.plays)
    before = report.info["left_bytes"]
    print(f"{machine(options.device)}\nread ceiling {gb_s:.0f} GB/s, {tflops:.0f} TFLOP/s")
    report.head()
    for routing in options.routing.split(","):
        info = report.info
        rank.route(
            bias_of(
                routing,
                int(info["layers"] - info["dense_layers"]),
                int(info["experts"]),
                int(info["experts_per_token"]),
            )
        )
        for what in (w for w in options.parts.split(",") if w):
            for work in works if what == "verify" else [w for w in works if draft]:
                getattr(report, what)(work, routing)
        for what in (w for w in options.parts.split(",") if w and (draft or w == "verify")):
            for work in staged:
                if what == "verify" or work.rows > work.streams:
                    report.stages(work, what, routing)
    recorded = before - rank.info()["left_bytes"]
    print(f"\nrecordings and scratch memory took {recorded / 1e9:.2f} GB")
    rank.close()
    made = {
        "schema": "kd rank_step 1", "machine": machine(options.device), "device": options.device, "tp": options.tp,
        "config": options.config.name, "draft_config": draft.name if draft else None, "read_gb_s": gb_s, "tflops": tflops,
        "recorded_bytes": recorded, **report.made,
    }  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps(made, indent=1) + "\n")
    return made


if __name__ == "__main__":
    main(sys.argv[1:])
