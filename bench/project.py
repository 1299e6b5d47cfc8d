"""What a verification would take on another GPU: a model, not a measurement.

    python bench/project.py [bench/results/rank_h200.json] [--bandwidth 1.79] [--link 55] [--link-us 10]

Takes the stages that bench/rank_step.py measured (--stages), of each bytes at the read ceiling of that machine, operations at its
matrix units' rate, and the rest, which is latency. On the other GPU bytes and operations take what its figures say, as large a
share of the published bandwidth as was read there, and the rest stays. Collectives come from the link: each all-reduce the faster
of one shot and two. Everything printed is projected. The defaults are those of an RTX PRO 6000 Blackwell (sm_120, 96 GB, PCIe 5);
its smallest all-reduce among eight, 12 us with what goes over the link, is what others reported of such a machine.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).resolve().parent / "results"
PUBLISHED_GB_S = 4800.0  # of an H200


class Gpu(NamedTuple):
    gb_s: float  # that can be read
    tflops: float
    link_gb_s: float  # of one GPU, one way
    link_us: float  # of the smallest all-reduce, norm included


def stage_us(stage: dict[str, Any], here: Gpu, there: Gpu, stamp_us: float) -> float:
    """Of all calls of a stage on the other GPU."""
    took = max(0.0, stage["us"] - stage["calls"] * stamp_us)
    memory, math = stage["bytes"] / here.gb_s / 1e3, stage["ops"] / here.tflops / 1e6
    rest = max(0.0, took - max(memory, math))
    return max(memory * here.gb_s / there.gb_s, math * here.tflops / there.tflops) + rest


def all_reduce_us(rows: int, hidden: int, ranks: int, gpu: Gpu) -> float:
    """Of one: what a rank sends in one shot, or in two with fp32 sums, and a latency for each."""
    if ranks == 1:
        return 0.0
    row = hidden * 2 / gpu.link_gb_s / 1e3
    one = gpu.link_us + (ranks - 1) * rows * row
    two = 2 * gpu.link_us + 3 * (ranks - 1) / ranks * rows * row
    return min(one, two)


def project(report: dict[str, Any], there: Gpu) -> list[dict[str, float]]:
    """Of each verification with stages: what was measured, and what is projected, in us."""
    here = Gpu(report["read_gb_s"], report["tflops"], 0, 0)
    hidden, ranks, layers = report["info"]["hidden"], report["tp"], report["info"]["layers"]
    whole = {(w["rows"], w["context"], w["streams"]): w for w in report["works"] if w["part"] == "verify"}
    made = []
    for work in report["stages"]:
        at = (work["rows"], work["context"], work["streams"])
        if work["part"] != "verify" or at not in whole or work["routing"] != "uniform":
            continue
        own = [s for s in work["stages"] if not s["collective"]]
        stamp = report["stamp_us"]
        measured = sum(max(0.0, s["us"] - s["calls"] * stamp) for s in own)
        overlap = min(1.0, whole[at]["us"] / measured)  # stages run into one another where nothing stamps them
        compute = overlap * sum(stage_us(s, here, there, stamp) for s in own)
        collectives = (2 * layers + 1) * all_reduce_us(work["rows"], hidden, ranks, there)
        floor = whole[at]["bytes"] / there.gb_s / 1e3
        made.append(
            {"rows": work["rows"], "context": work["context"], "measured": whole[at]["us"], "compute": compute,
             "collectives": collectives, "step": compute + collectives, "floor": floor}
        )  # fmt: skip
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", nargs="?", type=Path, default=RESULTS / "rank_h200.json")
    parser.add_argument("--bandwidth", type=float, default=1.79, help="TB/s, as published")
    parser.add_argument("--tflops", type=float, default=250, help="of mma.sync, bf16 into fp32")
    parser.add_argument("--link", type=float, default=55, help="GB/s of a GPU to its peers, one way")
    parser.add_argument("--link-us", type=float, default=10, help="of the smallest all-reduce, norm included")
    options = parser.parse_args()
    for name in ("bandwidth", "tflops", "link"):
        if not 0 < getattr(options, name) < float("inf"):
            raise SystemExit(f"project: --{name} is {getattr(options, name)}: give a number above 0")
    if not 0 <= options.link_us < float("inf"):
        raise SystemExit(f"project: --link-us is {options.link_us}: give microseconds")
    try:
        report = json.loads(options.report.read_text())
        schema = report.get("schema")
    except (OSError, ValueError, AttributeError) as error:
        raise SystemExit(
            f"project: {options.report}: {error}: give what bench/rank_step.py --json has written"
        ) from None
    if schema != "kd rank_step 1":
        raise SystemExit(
            f"project: {options.report} is no report of bench/rank_step.py: give what its --json has written"
        )
    read = options.bandwidth * 1e3 * report["read_gb_s"] / PUBLISHED_GB_S
    there = Gpu(read, options.tflops, options.link, options.link_us)
    print(f"PROJECTED from {options.report.name}: one rank of {report['tp']}, {read:.0f} GB/s read, "
          f"{options.tflops:.0f} TFLOPS, {options.link:.0f} GB/s and {options.link_us} us between GPUs\n")  # fmt: skip
    print(
        f"{'rows':>5} {'context':>8} {'measured us':>12} {'compute us':>11} {'x floor':>8} {'all-reduces':>12} {'step us':>9}"
    )
    for p in project(report, there):
        print(f"{p['rows']:>5} {p['context']:>8} {p['measured']:>12.0f} {p['compute']:>11.0f} {p['compute'] / p['floor']:>8.2f} "
              f"{p['collectives']:>12.0f} {p['step']:>9.0f}")  # fmt: skip


if __name__ == "__main__":
    main()
