"""Ranks may meet in several ways; what an all-reduce gives is the same bits by each: in rank order, fp32, whatever the number
of rows and a row's place among them.

On the CPU there is one way. On CUDA ranks share a GPU here, which shows the order with the kernels of several; NCCL
needs a GPU for each rank."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import backend
import numpy as np
import pytest
from probes import Device, ProbeError, Probes

ROOT = Path(__file__).resolve().parent.parent
CUDA = backend.DEVICE == "cuda"
TRANSPORTS = ["host", "one_shot", "two_shots", "nccl"] if CUDA else ["memory"]
WIDTH = 7168 if CUDA else 448
ISAS = list(backend.isas()) if CUDA else ["plain"]


@pytest.fixture(scope="module")
def probes(test_library) -> Probes:
    return Probes(test_library)


@pytest.fixture(params=TRANSPORTS)
def transport(request) -> str:
    return request.param


def ready(transport: str, tp: int) -> None:
    if transport == "nccl" and backend.gpus() < tp:
        pytest.skip("NCCL needs a second GPU" if tp == 2 else f"a second GPU is not enough for {tp} ranks of NCCL")


def rounded(a: np.ndarray) -> np.ndarray:
    """What an activation holds of it."""
    a = np.ascontiguousarray(a, np.float32)
    if not CUDA:
        return a
    bits = a.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def parts_of(rng: np.random.Generator, tp: int, *shape: int) -> np.ndarray:
    """Partial sums of very different sizes: another order of adding them gives other bits nearly everywhere."""
    scale = 2.0 ** rng.integers(-12, 13, (tp, *[1] * (len(shape) - 1), shape[-1]))
    return rounded(rng.standard_normal((tp, *shape)) * scale)


def in_rank_order(x: np.ndarray, parts: np.ndarray) -> np.ndarray:
    total = parts[0].copy()
    for more in parts[1:]:
        total += more
    return x + total


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("tp", [2, 3, 4, 8])
@pytest.mark.parametrize("width", [WIDTH, 1536, 1024, 96, 50, 7])
def test_sums_are_in_rank_order(probes, transport, tp, width, isa):
    ready(transport, tp)
    rng = np.random.default_rng(tp * width)
    for rows in (1, 5, 300):
        x = rng.standard_normal((rows, width)).astype(np.float32)
        y = parts_of(rng, tp, rows, width)
        _, got = probes.add_norm(
            Device(isa, tp=tp, transport=transport), x=x, y=y, w=np.ones(width, np.float32), eps=1e-5
        )
        assert np.array_equal(got, in_rank_order(x, y))
        if tp > 2 and rows == 300:
            assert not np.array_equal(in_rank_order(x, y), in_rank_order(x, y[::-1]))


@pytest.mark.parametrize("tp", [2, 8])
def test_a_row_is_the_same_alone_and_among_others_by_every_transport(probes, tp):
    rng = np.random.default_rng(5)
    x = rng.standard_normal((1, WIDTH)).astype(np.float32)
    y = parts_of(rng, tp, 1, WIDTH)
    w = rng.standard_normal(WIDTH).astype(np.float32)
    seen = {}
    for transport in TRANSPORTS:
        if transport == "nccl" and backend.gpus() < tp:
            continue
        device = Device(ISAS[0], tp=tp, transport=transport)
        h, sums = probes.add_norm(device, x=x, y=y, w=w, eps=1e-5)
        seen[transport, "alone"] = h.tobytes() + sums.tobytes()
        others_x = rng.standard_normal((640, WIDTH)).astype(np.float32)
        others_y = parts_of(rng, tp, 640, WIDTH)
        for at in (0, 639):
            others_x[at], others_y[:, at] = x[0], y[:, 0]
            h, sums = probes.add_norm(device, x=others_x, y=others_y, w=w, eps=1e-5)
            seen[transport, at] = h[at].tobytes() + sums[at].tobytes()
    assert len(seen) >= 3 and len(set(seen.values())) == 1, {key: hash(value) for key, value in seen.items()}


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_collectives_that_follow_one_another(probes, transport, tp):
    """What a rank shows is not written over while another still reads it: many in flight, of any number of rows, none too."""
    ready(transport, tp)
    rng = np.random.default_rng(6)
    times, rows, width = (120, 20, 1536) if CUDA else (40, 20, 96)
    counts = rng.integers(0, rows + 1, times)
    counts[[3, 4, 5, 50 % times]] = 0
    counts[-1] = rows
    x = rng.standard_normal((rows, width)).astype(np.float32)
    y = parts_of(rng, tp, times, rows, width)
    want = x.copy()
    for t, n in enumerate(counts):
        want[:n] = in_rank_order(want[:n], y[:, t, :n])
    device = Device(ISAS[0], tp=tp, transport=transport)
    for _ in range(3):
        h, got = probes.add_norms(device, x=x, y=y, w=np.ones(width, np.float32), counts=counts, eps=1e-5)
        assert np.array_equal(got, want)
        norm = want / np.sqrt((want.astype(np.float64) ** 2).mean(1, keepdims=True) + 1e-5)
        assert np.abs(h - norm).max() < (0.05 if CUDA else 1e-4)


def test_a_transport_that_is_not_there_is_refused_by_name(probes):
    x = np.zeros((1, 8), np.float32)
    with pytest.raises(ProbeError, match="pigeons"):
        probes.add_norm(
            Device(ISAS[0], tp=2, transport="pigeons"), x=x, y=np.zeros((2, 1, 8)), w=np.ones(8, np.float32), eps=1e-5
        )


@pytest.mark.skipif(CUDA, reason="there bench/allreduce.py is run for its figures; NCCL in it needs a second GPU")
def test_the_bench_of_all_reduces_runs(test_library, tmp_path):
    path = tmp_path / "figures.json"
    command = [
        sys.executable,
        ROOT / "bench" / "allreduce.py",
        "--device",
        "cpu",
        "--tp",
        "4",
        "--quick",
        "--json",
        path,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(path.read_text())
    assert report["absent"] == {} and report["two shots from elements"] == 0  # there is one way
    assert [row["rows"] for row in report["rows"]] == [1, 2, 8]
    assert all(len(row["memory"]) == 3 and min(row["memory"]) > 0 for row in report["rows"])
