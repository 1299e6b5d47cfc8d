"""bench/project.py against figures made by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "bench"))

from project import RESULTS, Gpu, all_reduce_us, project, stage_us  # noqa: E402

HERE = Gpu(gb_s=4000, tflops=800, link_gb_s=100, link_us=2)


def stage(us: float, mega: float = 0, giga: float = 0, calls: int = 1) -> dict:
    return {"us": us, "calls": calls, "bytes": mega * 1e6, "ops": giga * 1e9}


def test_a_stage_takes_what_it_took_where_nothing_differs():
    for one in (stage(10, mega=20), stage(10, giga=4), stage(2), stage(30, 20, 4, calls=5)):
        assert stage_us(one, HERE, HERE, 0.5) == pytest.approx(one["us"] - 0.5 * one["calls"])


def test_bytes_and_operations_take_what_the_other_gpu_needs_and_latency_stays():
    half, slow = HERE._replace(gb_s=2000), HERE._replace(tflops=100)
    assert stage_us(stage(9, mega=20), HERE, half, 0) == pytest.approx(9 + 5)  # 20 MB: 5 us here, 10 there
    assert stage_us(stage(9, mega=20), HERE, slow, 0) == pytest.approx(9)
    assert stage_us(stage(9, giga=4), HERE, slow, 0) == pytest.approx(9 + 35)  # 4 Gop: 5 us here, 40 there
    assert stage_us(stage(4, mega=20), HERE, half, 0) == pytest.approx(
        10
    )  # faster than the ceiling: nothing is latency


def test_an_all_reduce_takes_the_shorter_way():
    assert all_reduce_us(64, 7168, 1, HERE) == 0
    row = 7168 * 2 / 100e3
    assert all_reduce_us(1, 7168, 8, HERE) == pytest.approx(2 + 7 * row)
    assert all_reduce_us(64, 7168, 8, HERE) == pytest.approx(4 + 64 * 3 * 7 / 8 * row)


def test_what_was_measured_is_projected():
    report = json.loads((RESULTS / "rank_h200.json").read_text())
    made = project(report, Gpu(report["read_gb_s"], report["tflops"], 1e9, 0))
    assert {1, 8, 64} <= {p["rows"] for p in made}
    for p in made:  # the same GPU, and links that cost nothing
        assert p["step"] == pytest.approx(p["compute"]) and p["compute"] <= p["measured"] * 1.001
        assert p["compute"] > 0.9 * p["measured"]


def test_it_says_that_it_is_no_measurement():
    done = subprocess.run([sys.executable, ROOT / "bench" / "project.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("PROJECTED from rank_h200.json: one rank of 8")


@pytest.mark.parametrize(
    "words, says",
    [
        (["nowhere.json"], "nowhere.json"),
        ([str(RESULTS)], "give what bench/rank_step.py"),
        ([str(RESULTS / "kernels_h200.json")], "is no report of bench/rank_step.py"),
        (["--bandwidth", "nan"], "--bandwidth is nan"),
        (["--link", "0"], "--link is 0"),
        (["--link-us", "-5"], "--link-us is -5"),
    ],
)
def test_what_cannot_be_is_told_in_one_sentence(words, says):
    done = subprocess.run([sys.executable, ROOT / "bench" / "project.py", *words], capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    assert says in done.stderr and done.stderr.count("\n") == 1
