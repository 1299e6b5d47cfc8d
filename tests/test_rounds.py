"""bench/rounds.py on a small model of two ranks: the form of its figures, and where the time of a round goes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import backend
import numpy as np
import pytest
from test_rank_step import names_of

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "bench"))

import rounds as bench  # noqa: E402

import kd  # noqa: E402

TP = 2 if backend.DEVICE == "cpu" or backend.gpus() > 1 else 1
ATTENTION = {"linear qkv_a", "mla_latent q_b", "mla_query k_up", "mla_attention", "mla_value v_up",
             "linear o", "add_norm post_norm"}  # fmt: skip


@pytest.fixture(scope="module")
def made(small3, test_library, tmp_path_factory):
    file = tmp_path_factory.mktemp("rounds") / "rounds.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "PASSES", 1)
        made = bench.main(["--device", backend.DEVICE, "--tp", str(TP), "--model", str(small3), "--streams", "1,3",
                           "--tokens", "40", "--stages", "--json", str(file)])  # fmt: skip
    assert json.loads(file.read_text()) == made
    return made


def test_figures_have_a_form(made):
    assert made["tp"] == TP and made["tokens"] == 40 and made["machine"]["cores"] > 0
    at_once = {1} if backend.DEVICE == "cpu" else {1, 64}
    wanted = {(s, b, n, a) for s in (1, 3) for b, n in bench.BUILDERS for a in (at_once if b != "heap" else {1})}
    assert {(r["streams"], r["builder"], r["budget"], r["at_once"]) for r in made["rows"]} == wanted
    assert all(r["tokens_per_second"] > 0 and r["round_us"] > 0 for r in made["rows"])


def test_stages_are_those_of_a_round_on_every_rank(made):
    """Three layers, the first of them dense."""
    staged = [r for r in made["rows"] if "stages" in r]
    assert {(r["streams"], r["builder"], r["budget"]) for r in staged} == {
        (s, *b) for s in (1, 3) for b in bench.STAGED
    }
    for row in staged:
        told = row["stages"]
        calls = {(stage["part"], stage["stage"]): stage["calls"] for stage in told["stages"]}
        parts = {part for part, _ in calls}
        assert parts == ({"verify"} if row["builder"] == "none" else {"context", "draft", "verify"})
        assert {calls["verify", name] for name in ATTENTION} == {3}
        assert calls["verify", "moe experts"] == 2 and calls["verify", "add_norm input_norm"] == 3
        assert calls["verify", "add_norm norm"] == calls["verify", "end_round"] == 1
        assert told["plays"] > 0 and len(told["whole_us"]) == TP
        assert all(len(stage["us"]) == TP and min(stage["us"]) >= 0 for stage in told["stages"])
        # medians of parts and of their sum
        together = np.sum([stage["us"] for stage in told["stages"]], axis=0)
        assert (together > 0.3 * np.array(told["whole_us"])).all()


@pytest.fixture
def probe(small3, test_library):
    with kd.Engine(small3, library=test_library, device=backend.DEVICE, tp=TP, threads=2, max_nodes=32) as engine:
        yield bench.Probe(test_library, engine)


def test_stamps_change_no_token_and_add_up(probe):
    def text():
        done = probe.engine.generate([1, 2, 3], max_tokens=30, hash_logits=True, builder="device", budget=8)
        return done.tokens, done.hashes

    seen = [text()]
    ranks = probe.stages(TP, lambda: seen.append(text()))
    seen.append(text())
    assert seen[1] == seen[2] == seen[0]
    assert len({json.dumps([names_of(part["calls"]) for part in parts]) for parts in ranks}) == 1
    for parts in ranks:
        for part in parts:
            assert np.sum([call["ns"] for call in part["calls"]], axis=0).tolist() == part["ns"]
    assert any(len(part["ns"]) > bench.WARM for part in ranks[0])


def test_too_many_stamps_are_told_and_the_engine_goes_on(probe, monkeypatch):
    monkeypatch.setattr(bench, "STAMPS", 20)
    with pytest.raises(SystemExit, match="take more room than 20 stamps: give more"):
        probe.stages(TP, lambda: probe.engine.generate([1, 2, 3], max_tokens=8))
    assert len(probe.engine.generate([1, 2, 3], max_tokens=8, ignore_eos=True).tokens) == 8


def test_layers_are_summed_and_warm_plays_left_out():
    def part(ops, *plays):
        calls = [
            {"op": op, "of": of, "ns": list(ns)} for (op, of), ns in zip(ops, zip(*plays, strict=True), strict=True)
        ]
        return {"ns": [sum(play) for play in plays], "calls": calls}

    ops = [("plan_verify", ""), ("moe", "layers.1.experts"), ("add_norm", "norm"), ("moe", "layers.2.experts")]
    few = part(ops[:1], (9,), (9,), (9,))
    one = part(
        ops,
        (99, 99, 99, 99),
        (99, 99, 99, 99),
        (1000, 2000, 3000, 4000),
        (1000, 4000, 3000, 6000),
        (1000, 1000, 500, 1000),
    )
    other = part(ops, *[(2000, 3000, 4000, 5000)] * 5)
    told = bench.stages_of([[few, one], [few, other]])
    assert told["plays"] == 3 and told["whole_us"] == [10, 14]
    assert [(s["part"], s["stage"], s["calls"], s["us"]) for s in told["stages"]] == [
        ("verify", "plan_verify", 1, [1, 2]),
        ("verify", "moe experts", 2, [6, 8]),
        ("verify", "add_norm norm", 1, [3, 4]),
    ]
    with pytest.raises(SystemExit, match="give more --tokens"):
        bench.stages_of([[few | {"ns": [9, 9]}]])
