"""kdctl load: given up with Ctrl-C, left alone, cancelled from elsewhere."""

from __future__ import annotations

import json
import signal
import subprocess

import pytest
from daemons import ENV, starter, until
from kdctl_calls import COMMAND, caller

start = pytest.fixture(starter)
kdctl = pytest.fixture(caller)


@pytest.fixture
def slow(start):
    """A model serves; another one takes a minute to load."""
    return start({"load_s": 0, "next_load_s": 60})


def under_way(daemon) -> bool:
    with daemon.client() as client:
        return client.status()["load"]["under_way"]


def loading(daemon, *words) -> subprocess.Popen:
    process = subprocess.Popen(
        [*COMMAND, "--endpoint", daemon.serve, "load", "/fake/other", *words],
        env=ENV,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    until(lambda: under_way(daemon))
    return process


def still_serves(daemon) -> None:
    until(lambda: not under_way(daemon))
    with daemon.client() as client:
        status = client.status()
        assert status["ready"] and status["model"]["path"] == "/fake/model"
        assert client.generate([5], max_tokens=3).finish == "length"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_cancels_the_load_and_says_what_serves(slow, number, code):
    process = loading(slow, "--replace")
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (code, "")
    assert err.splitlines()[-1] == "kdctl: the load is cancelled; /fake/model serves"
    still_serves(slow)


def test_an_interrupt_of_one_that_was_refused_cancels_nobody_elses(slow, kdctl):
    process = loading(slow, "--replace")
    assert "a load is under way" in kdctl("load", "/fake/third", "--replace", endpoint=slow.serve, code=6).err
    assert under_way(slow)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130


def test_it_goes_on_detached_and_is_cancelled_from_elsewhere(slow, kdctl):
    done = kdctl("load", "/fake/other", "--replace", "--detach", endpoint=slow.serve)
    assert done.out.startswith("loading /fake/other: `kdctl ") and "load --cancel" in done.out
    assert under_way(slow)
    shown = kdctl("status", endpoint=slow.serve).out
    assert "loading" in shown and "read" in shown
    got = kdctl("load", "--cancel", "-o", "json", endpoint=slow.serve).json
    assert got["schema"] == "kdctl/load_cancel.v1" and got["model"]["path"] == "/fake/model"
    still_serves(slow)
    assert "loading" not in kdctl("status", endpoint=slow.serve).out
    assert "no load is under way" in kdctl("load", "--cancel", endpoint=slow.serve, code=6).err
    refused = json.loads(kdctl("load", "/fake/other", "--detach", "-o", "json", endpoint=slow.serve, code=6).err)
    assert refused["name"] == "CONFLICT"  # what is refused at once is not detached from


def test_what_to_load_is_said_once(kdctl):
    assert "--cancel takes no PATH" in kdctl("load", "/x", "--cancel", code=2).err
    assert "give the model's folder" in kdctl("load", code=2).err
