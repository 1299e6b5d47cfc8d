"""The daemon's choice of the builder at load: in force, in STATUS and in the log; what is configured or asked for stays."""

from __future__ import annotations

import pytest
from daemons import Daemon, starter
from fake_model import SMALL3, write_model

start = pytest.fixture(starter)
UNSET = {"KD_BUILDER_NAME": ""}
SLOW = {"token_delay_s": 0.004}  # a round of the fake engine, whatever the builder, and none yields half of the others


def told(daemon: Daemon) -> tuple[dict | None, tuple[str, int]]:
    """(the choice in STATUS, what is in force)"""
    with daemon.client() as client:
        status = client.status()
    return status["daemon"]["builder_choice"], (status["stats"]["builder"], status["stats"]["builder_budget"])


def test_the_fastest_is_in_force_and_told(start):
    daemon = start(SLOW, env=UNSET)
    choice, in_force = told(daemon)
    assert choice["builder"] in ("chain", "heap") and in_force == (choice["builder"], choice["budget"])
    speeds = {(m["builder"], m["budget"]): m["tokens_per_s"] for m in choice["measured"]}
    assert len(speeds) == 7 and max(speeds, key=speeds.get) == in_force
    record = next(r for r in daemon.records() if r.get("event", r.get("message")) == "builder chosen")
    assert (record["builder"], record["budget"]) == in_force and record["why"] == choice["reason"]


def test_trees_that_do_not_pay_are_not_used(start):
    choice, in_force = told(start({"token_delay_s": 0.004, "per_round": 1, "tree_delay_s": 0.01}, env=UNSET))
    assert choice["builder"] == "none" == in_force[0]


def test_a_configured_builder_is_kept_and_nothing_measured(start):
    daemon = start(SLOW, "--builder", "chain", "--budget", "5", env=UNSET)
    assert told(daemon) == (None, ("chain", 5))
    assert "builder chosen" not in daemon.log()


def test_what_an_operator_puts_in_force_is_no_choice_and_outlasts_a_load(start):
    daemon = start(SLOW, env=UNSET)
    with daemon.client() as client:
        client.use_builder("chain", 3)
        assert told(daemon) == (None, ("chain", 3))
        client.unload()
        client.load("/fake/other")
    assert told(daemon.wait()) == (None, ("chain", 3))


def test_a_second_load_measures_again(start):
    daemon = start(SLOW, env=UNSET)
    with daemon.client() as client:
        client.unload()
        assert told(daemon)[0] is None
        client.load("/fake/other")
    assert told(daemon.wait())[0] is not None
    assert daemon.log().count("builder chosen") == 2


def test_a_builder_that_changes_the_output_refuses_the_model(start):
    daemon = start({**SLOW, "diverge": "chain"}, env=UNSET, state=None)
    assert daemon.process.wait(30) == 65
    assert "builder chain with budget 7 changed the output at token " in daemon.log()


def test_a_small_limit_of_nodes_leaves_out_larger_trees(start):
    choice, _ = told(start(SLOW, "--set", "engine.max_nodes=6", env=UNSET))
    assert [(m["builder"], m["budget"]) for m in choice["measured"]] == [("none", 0), ("heap", 4)]


def test_a_model_without_a_drafter_decodes_plainly(start, library, tmp_path):
    folder = write_model(tmp_path / "m", **{**SMALL3, "draft": None})
    choice, in_force = told(start(real=True, model=folder, env=UNSET))
    assert (choice["builder"], choice["measured"]) == ("none", []) and in_force[0] == "none"
    assert "no drafter" in choice["reason"]
