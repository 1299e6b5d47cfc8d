"""kdctl load: given up with Ctrl-C, left alone, cancelled from elsewhere."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from unittest.mock import Mock

import pytest
from daemons import ENV, starter, until
from kdctl_calls import COMMAND, caller

from kdctl import daemon as daemon_commands
from kdctl import model
from kdctl.output import Settings

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


@pytest.mark.parametrize("second", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("moment", ["load_cancel", "status"])
def test_a_second_interrupt_says_that_the_end_was_not_waited_for(capsys, second, moment):
    settings = Settings(_client=Mock(**{f"{moment}.side_effect": second}))
    with pytest.raises(second):
        model._cancelled(settings, b"16 bytes of an id")
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "kdctl: the load may go on, since its end was not waited for: see `kdctl status` and `kdctl load --cancel`"
    )


def test_an_interrupt_of_a_wait_says_what_goes_on(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(daemon_commands, "spawn", lambda *_: Mock(pid=7))
    monkeypatch.setattr(daemon_commands, "wait_until", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        daemon_commands._start(Settings(), None, None, (), "ready", 5)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("kdctl: the daemon (pid 7) goes on without being waited for: `kdctl status` shows how far")
    client = Mock(endpoints={"control": ""}, **{"hello.return_value": {"pid": 7}})
    monkeypatch.setattr(daemon_commands, "alive", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        daemon_commands._stop(Settings(_client=client), False, None)
    assert capsys.readouterr().err == "kdctl: the daemon (pid 7) goes on stopping without being waited for\n"


EARLY = """
import os, runpy, signal, sys
module = sys.argv.pop(1)
class Hook:
    def find_spec(self, name, *_):
        if name == module:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Hook())
{how}
"""
WAYS = {
    "kdctl": "from kdctl.entry import main; main()",
    "python -m kdctl": "runpy.run_module('kdctl', run_name='__main__', alter_sys=True)",
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("module", ["click", "kdctl.output", "kd.client", "zmq", "kd.config", "kdctl.look"])
def test_an_interrupt_while_it_starts_is_quiet(way, module):
    code = EARLY.format(how=WAYS[way])
    command = [sys.executable, "-c", code, module, "--instance", "absent", "status"]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
