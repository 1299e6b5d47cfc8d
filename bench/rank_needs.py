"""What rank_step.py computes: biases that route rows as wanted, what operations must read and compute, stages from stamps."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

RECORDED = Path(__file__).resolve().parent / "results" / "routing_nano.json"
WARM = 2  # plays at the beginning that are not counted: the first brings memory, the second is recorded
WAITING = 5  # taps of a stream that wait for a draft


# ---- whom rows are sent to -------------------------------------------------------------------------------------------


def chances(shares: np.ndarray, slots: int) -> np.ndarray:
    """How often a row is sent to each expert, if `slots` different ones are drawn one after the other, by their shares."""
    if not 0 < slots <= len(shares):
        raise ValueError(f"{slots} of {len(shares)} experts cannot be chosen")
    low, high = 0.0, 1.0
    while (1 - np.exp(-shares * high)).sum() < slots * (1 - 1e-12):
        high *= 2
        if high > 1e12:
            return np.ones(len(shares))
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if (1 - np.exp(-shares * middle)).sum() < slots else (low, middle)
    return 1 - np.exp(-shares * high)


def chances_of(routing: str, layers: int, experts: int, slots: int) -> np.ndarray:
    """[layers][experts]: how often a row is to be sent to each, the most favoured first."""
    if routing == "uniform":
        return np.full((layers, experts), slots / experts)
    if routing.startswith("zipf"):
        shares = np.arange(1, experts + 1) ** -float(routing.removeprefix("zipf"))
        return np.tile(chances(shares / shares.sum(), slots), (layers, 1))
    if routing == "nano":
        counts = np.sort(np.array(json.loads(RECORDED.read_text())["counts"], float), axis=1)[:, ::-1]
        at = (np.arange(experts) + 0.5) / experts * counts.shape[1] - 0.5
        curves = np.stack([np.interp(at, np.arange(counts.shape[1]), layer) for layer in counts])
        return (curves * slots / curves.sum(axis=1, keepdims=True))[np.arange(layers) % len(curves)].clip(max=1)
    raise SystemExit(f"rank_step: no routing {routing!r}: give uniform, nano or zipf with an exponent, as in zipf0.8")


def bias_of(routing: str, layers: int, experts: int, slots: int) -> np.ndarray:
    """[layers][experts]. A score is sigmoid(z), z normal; an expert is chosen if score + bias is above a bar that the others set,
    nearly the same for every row: so its bias is the bar less the score that it exceeds as often as it is to be chosen."""
    wanted = np.clip(chances_of(routing, layers, experts, slots), 1e-9, 1 - 1e-9)
    normal, rng = statistics.NormalDist(), np.random.default_rng(5)
    exceeded = np.vectorize(lambda p: 1 / (1 + math.exp(-normal.inv_cdf(1 - p))))(wanted)
    return np.stack([-layer[rng.permutation(experts)] for layer in exceeded]).astype(np.float32)


# ---- what an operation must do ---------------------------------------------------------------------------------------


class Work(NamedTuple):
    streams: int
    rows: int
    context: int
    recorded_rows: int = 0

    def __str__(self) -> str:
        return f"{self.rows} rows, {self.streams} stream{'s' * (self.streams > 1)}, context {self.context}"


class Need(NamedTuple):
    """Bytes from memory and operations."""

    bytes: float
    ops: float

    def floor_us(self, gb_s: float, tflops: float) -> float:
        return max(self.bytes / gb_s / 1e3, self.ops / tflops / 1e6 if tflops else 0.0)


def parts_of(calls: Sequence[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each call with the part of the round that it belongs to: a plan_* begins one."""
    part = ""
    for call in calls:
        part = call["op"].removeprefix("plan_") if call["op"].startswith("plan_") else part
        yield part, call


def need_of(part: str, call: dict[str, Any], work: Work, block: int, distinct: float) -> Need:
    """distinct: experts of the call's layer that somebody is sent to."""
    drafting = min(work.streams, work.rows - work.streams)  # those that have more than a root to verify
    rows = {"context": drafting * WAITING, "draft": drafting * block, "verify": work.rows}[part]
    if part == "draft" and call["op"] == "logits":
        rows = drafting * (block - 1)
    streams = work.streams if part == "verify" else drafting
    seen = min(work.context, call["window"] or work.context)
    read = (
        call["weights"]
        + call["row_bytes"] * rows
        + call["key_bytes"] * streams * seen
        + call["expert_bytes"] * distinct
    )
    return Need(read, (call["row_ops"] + call["row_key_ops"] * seen) * rows)


def layer_of(call: dict[str, Any]) -> int:
    return int(call["of"].split(".")[1]) if call["of"].startswith("layers.") else -1


def needs(calls: Sequence[dict[str, Any]], work: Work, info: dict[str, Any], distinct: Sequence[float]) -> list[Need]:
    found = []
    for part, call in parts_of(calls):
        experts = distinct[layer_of(call) - int(info["dense_layers"])] if call["op"] == "moe" else 0.0
        found.append(need_of(part, call, work, int(info["block"]), experts))
    return found


def stage_names(calls: Sequence[dict[str, Any]]) -> list[str]:
    """An operation and what it is of: the weights it reads, without the layer, or those of the product before it."""
    names, last = [], ""
    for call in calls:
        of = call["of"]
        if of.startswith(("layers.", "draft_layers.")):
            of = ("draft " if of.startswith("draft") else "") + of.split(".", 2)[2]
        if call["op"] == "linear":
            last = of
        names.append(f"{call['op']} {of or (last if call['op'] == 'swiglu' else '')}".strip())
    return names


def stage_table(
    part: dict[str, Any], work: Work, info: dict[str, Any], distinct: Sequence[float], gb_s: float, tflops: float
) -> list[dict[str, Any]]:
    """Stages of a stamped part, layers summed. Every play's stages add up to its whole, or this raises."""
    calls = part["calls"]
    plays = np.array([call["ns"] for call in calls])[:, WARM:]
    whole = np.array(part["ns"])[WARM:]
    if plays.shape[1] == 0 or not np.array_equal(plays.sum(axis=0), whole):
        raise ValueError(f"the stages of {part['part']} do not add up to it")
    stages: dict[str, dict[str, Any]] = {}
    for call_plays, name, (_, call), need in zip(
        plays, stage_names(calls), parts_of(calls), needs(calls, work, info, distinct), strict=True
    ):
        stage = stages.setdefault(
            name, {"stage": name, "collective": call["op"] == "add_norm", "calls": 0, "plays_us": 0.0, "bytes": 0.0,
                   "ops": 0.0, "floor_us": 0.0},
        )  # fmt: skip
        stage["calls"] += 1
        stage["plays_us"] = stage["plays_us"] + call_plays / 1e3
        stage["bytes"] += need.bytes
        stage["ops"] += need.ops
        stage["floor_us"] += need.floor_us(gb_s, tflops)
    for stage in stages.values():
        stage["us"] = float(np.median(stage["plays_us"]))
        stage["plays_us"] = stage["plays_us"].tolist()
    return list(stages.values())
