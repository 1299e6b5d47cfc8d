"""The all-reduce of a model, fused with residual and norm, beside NCCL's with the rest in a kernel of its own: microseconds.

    python bench/allreduce.py [--device cuda] [--tp 2] [--quick] [--json FILE]

Runs the test library as bench/kernels.py does; each figure is the median of several plays of one recording of many calls, as
rank 0 sees them. With tp 2 on CUDA the traffic of eight ranks is imitated as well: each GPU exchanges with the other, by way of
seven buffers, the bytes and flags that it would exchange with seven; no fan-in from seven GPUs, so no measurement of eight.
What is not there, such as NCCL, is told below and does not end the run. On the CPU ranks are threads that meet in memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import kernels
from machine import machine

ROWS, HIDDEN = (1, 2, 8, 16, 32, 45, 64, 128, 640), 7168
# column: transport, way (native/probe_bench.h)
CUDA = {
    "one shot": ("one_shot", 0),
    "two shots": ("two_shots", 0),
    "by host": ("host", 0),
    "nccl, our sum": ("nccl", 0),
    "NCCL + norm": ("one_shot", 1),  # in a recording, which transport nccl does not make
}
EIGHT = {"8 as 2, one shot": ("one_shot", 2), "8 as 2, two": ("two_shots", 3)}
CPU = {"memory": ("memory", 0)}


def columns(device: str, tp: int) -> dict[str, tuple[str, int]]:
    if device == "cpu":
        return CPU
    return {**CUDA, **(EIGHT if tp == 2 else {})}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tp", type=int, choices=(2, 4, 8), default=2)
    parser.add_argument("--quick", action="store_true", help="few calls, few sizes: whether it runs")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    bench = kernels.Bench(options.device, options.tp)
    rows_tried = ROWS[:3] if options.quick else ROWS
    calls, plays = (3, 3) if options.quick else (100, 15)
    ways = columns(options.device, options.tp)
    report: dict[str, Any] = {
        "machine": machine(options.device),
        "device": options.device,
        "tp": options.tp,
        "hidden": HIDDEN,
        "rows": [],
    }
    print(f"{report['machine']}\nall-reduce + residual + norm, {options.tp} ranks, rows of {HIDDEN}, us\n")
    print(f"{'rows':>5}" + "".join(f"{name:>18}" for name in ways), flush=True)
    absent: dict[str, str] = {}
    for rows in rows_tried:
        entry: dict[str, Any] = {"rows": rows}
        for name, (transport, way) in ways.items():
            if name in absent:
                continue
            try:
                text = bench.ffi.new("char[]", transport.encode())
                entry[name] = bench.us("all_reduce", options.tp, text, way, rows, HIDDEN, calls=calls, plays=plays)
            except SystemExit as error:  # a transport that is not there: the other columns are
                absent[name] = str(error)
        report["rows"].append(entry)
        figures = (f"{statistics.median(entry[name]):.2f}" if name in entry else "-" for name in ways)
        print(f"{rows:>5}" + "".join(f"{figure:>18}" for figure in figures), flush=True)
    elements = int(bench.us("switch_over", options.tp, calls=1, plays=1)[0])
    report["two shots from elements"] = elements
    print(f"\ntwo shots, as measured by the ranks: {f'from {elements / HIDDEN:g} rows on' if elements else 'never'}")
    for name, why in absent.items():
        print(f"\n{name}: {why}")
    report["absent"] = absent
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    if len(absent) == len(ways):
        raise SystemExit("bench: nothing could be measured")


if __name__ == "__main__":
    main()
