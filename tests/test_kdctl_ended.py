"""Of a daemon that is gone kdctl says why, if its record of steps or its log tells."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from daemons import Daemon
from kdctl_calls import caller, place_of

from kdctl import started
from kdctl.ended import exit_words

kdctl = pytest.fixture(caller)
place = pytest.fixture(place_of)


def dead(pid: int) -> None:
    while started.born(pid) is not None:
        time.sleep(0.01)


def test_a_daemon_that_was_killed(kdctl, place, library, nano):
    """As long as no other has started; one that was stopped is no matter of this."""
    pid = kdctl("start", "--model", nano, "--set", "builder.name=heap", "-o", "json").json["pid"]
    os.kill(pid, signal.SIGKILL)
    dead(pid)
    first = kdctl("status", code=3).err
    why = first[first.index("; the last one") :].rstrip()
    assert re.fullmatch(
        rf"; the last one \(process {pid}\) ended without closing, .*: it was killed, or the machine stopped", why
    )
    assert kdctl("status", code=3).err == first  # looking takes nothing away
    assert first.endswith(f"start it with `kdctl start`{why}\n")
    assert json.loads(kdctl("health", "-o", "json", code=3).err)["message"].endswith(why)
    assert why in kdctl("stop", code=3).err
    assert why in kdctl("--endpoint", f"ipc://{place}/default/serve.sock", "ps", code=3).err
    assert "last one" not in kdctl("--endpoint", "tcp://127.0.0.1:9", "--timeout", "100ms", "status", code=7).err
    kdctl("start")
    assert any("before this one" in one and str(pid) in one for one in kdctl("logs").out.splitlines())
    kdctl("stop")
    assert "last one" not in kdctl("status", code=3).err


@pytest.mark.parametrize("form", ["json", "text"])
def test_a_daemon_that_failed(kdctl, tmp_path, form):
    (tmp_path / "t").mkdir(mode=0o700)
    fatal = tmp_path / "fatal"
    with (tmp_path / "t" / "daemon.log").open("ab") as log:
        daemon = Daemon(
            tmp_path, "--set", f"server.log_format={form}", fake={"fatal_file": str(fatal)}, stderr=log
        ).wait()
    try:
        fatal.touch()
        assert daemon.end() == 70
        done = kdctl("status", code=3, endpoint=daemon.serve)
        assert f"; the last one (process {daemon.process.pid}) failed: " in done.err and done.err.count("\n") == 1
        assert done.err.partition("failed: ")[2] == "injected fault\n"
    finally:
        daemon.kill()


def starting(pid: int) -> str:
    return json.dumps({"level": "info", "message": "starting", "pid": pid})


FAILED = '{"level": "error", "message": "state failed", "reason": "the roof fell in"}'
STOPPED = '{"level": "info", "message": "stopped", "status": 70}'


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["PID", FAILED, STOPPED], "failed: the roof fell in"),
        (["PID", FAILED], "failed: the roof fell in"),
        (["PID", '{"level": "error", "message": "request failed"}', STOPPED], ""),
        (["PID"], "ended without closing: it was killed, or the machine stopped"),
        (["PID", "[]", "\x00", '{"level": 1}'], "ended without closing: it was killed, or the machine stopped"),
        (["OTHER", FAILED, STOPPED, "PID", STOPPED], ""),
        (["PID", FAILED, "OTHER", FAILED], ""),  # of one whose log this is not
        ([], ""),
    ],
)
def test_what_a_log_tells(kdctl, place, lines, words):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    where = place / "default"
    where.mkdir(mode=0o700)
    assert "last one" not in kdctl("status", code=3).err
    (where / "daemon.lock").write_text(f"{gone.pid}\n")
    told = {"PID": starting(gone.pid), "OTHER": starting(1)}
    (where / "daemon.log").write_text("".join(f"{told.get(one, one)}\n" for one in lines))
    said = kdctl("status", code=3).err.partition(f"the last one (process {gone.pid}) ")[2]
    assert said.strip() == words
    (where / "steps").write_bytes(b"")
    assert ("of another version" in kdctl("status", code=3).err) == (not words.startswith("failed"))
    (where / "daemon.lock").write_text("1\n")  # one that lives is not gone
    assert "last one" not in kdctl("status", code=3).err


def test_a_start_that_a_signal_ends_names_it(kdctl, place, library, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("import os\nos.kill(os.getpid(), 7)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    error = json.loads(kdctl("start", "-o", "json", code=1).err)
    assert (
        error["message"].startswith("the daemon ended with SIGBUS before it was ready") and error["exit_status"] == -7
    )
    assert exit_words(-1000) == "signal 1000"
