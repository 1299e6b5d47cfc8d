"""kdctl as a process: start and stop, signals, pipes, start-up time, help, completion, demo."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import click
import psutil
import pytest
from daemons import ENV, ROOT, Daemon, until
from kdctl_calls import COMMAND, caller, held_before_start, place_of

from kdctl import __main__ as entry
from kdctl import output, started
from kdctl.generate import parse_ids

kdctl = pytest.fixture(caller)
place = pytest.fixture(place_of)
slow = pytest.fixture(held_before_start)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory, library, nano):
    made = Daemon(
        tmp_path_factory.mktemp("real"), "--set", "server.publish_interval_ms=200", model=nano, fake=None
    ).wait(timeout_s=120)
    yield made
    made.kill()


# ---- start, stop, load


def test_life_of_a_daemon(kdctl, place, library, nano):
    kdctl("status", code=3)
    kdctl("stop", code=3)
    data = kdctl("start", "--model", nano, "-o", "json").json
    assert data["state"] == "ready" and data["model"] == str(nano)
    again = kdctl("start", "-o", "json", code=6)
    assert f"pid {data['pid']}" in json.loads(again.err)["message"]
    assert kdctl("drain", "-o", "json").json["state"] == "draining"
    kdctl("health", code=4)
    kdctl("health", "--live")
    assert json.loads(kdctl("generate", "x", "-o", "json", code=6).err)["name"] == "DRAINING"
    assert kdctl("undrain").out == "ready\n"
    assert kdctl("unload", "-o", "json").json["freed_bytes"] > 1 << 20
    assert kdctl("health", "-o", "json", code=4).json["state"] == "empty"
    kdctl("generate", "x", code=4)
    kdctl("unload", code=6)
    assert kdctl("load", nano, "-o", "json").json["model"]["name"] == "nano"
    kdctl("load", nano, code=6)
    restarted = kdctl("restart", "-o", "json").json
    assert restarted["pid"] != data["pid"] and restarted["model"] == str(nano)
    lines = kdctl("logs", "-n", "5", "-o", "json").json["lines"]
    assert len(lines) == 5 and json.loads(lines[-1])["message"] == "state ready"
    assert len(kdctl("logs", "-n", "3").out.splitlines()) == 3
    assert kdctl("stop", "-o", "json").json["pid"] == restarted["pid"]
    kdctl("status", code=3)
    assert json.loads(kdctl("status", "-o", "json", code=3).err)["hint"] == "kdctl start"


@pytest.mark.parametrize("elsewhere", [False, True])
def test_stop_finds_a_daemon_that_has_no_socket_yet(kdctl, place, slow, elsewhere):
    options = ["--set", f"server.runtime_dir={place / 'other'}"] if elsewhere else []
    reach = ["--endpoint", f"ipc://{place / 'other' / 'default' / 'serve.sock'}"] if elsewhere else []
    pid = kdctl("start", "--wait", "none", *options, "-o", "json").json["pid"]
    try:
        assert f"is running already, pid {pid}" in kdctl("start", *options, code=6).err
        assert kdctl(*reach, "stop").out == f"stopped, pid was {pid}\n"
        kdctl(*reach, "stop", code=3)
        assert started.born(pid) is None
    finally:
        subprocess.run(["kill", "-9", str(pid)], capture_output=True)


def test_a_start_that_cannot_be_noted_down_leaves_no_daemon(kdctl, place, library):
    (place / "default" / "started.new").mkdir(parents=True)
    (place / "default").chmod(0o700)
    assert "so nothing was started" in kdctl("start", code=1).err
    assert not [p for p in psutil.process_iter() if "default" in p.cmdline() and str(place) in p.environ().values()]


def test_stop_ends_no_process_that_only_has_the_number(kdctl, place):
    told = place / "default" / "started.json"
    told.parent.mkdir(mode=0o700)
    other = subprocess.Popen(["sleep", "60"])
    try:
        started.remember(told, other.pid, endpoint=None)
        right = told.read_text()
        for wrong in (
            right.replace(str(started.born(other.pid)), "1"),  # of an earlier process
            right.replace('"endpoint": null', '"endpoint": "ipc:///elsewhere"'),
            right.replace(str(other.pid), '"x"'),
            "[]",
        ):
            assert wrong != right
            told.write_text(wrong)
            kdctl("stop", code=3)
            assert other.poll() is None
        told.write_text(right)
        kdctl("-o", "json", "stop")
        assert other.wait(10) == -signal.SIGTERM
    finally:
        other.kill()


def test_start_that_fails_says_why_and_shows_its_own_log(kdctl, place, library, nano, tmp_path_factory):
    broken = tmp_path_factory.mktemp("broken")
    shutil.copy(nano / "config.json", broken)
    log = place / "default" / "daemon.log"
    log.parent.mkdir(mode=0o700)
    for former, form in (("", "json"), ('{"level": "error", "message": "a former one"}\nkd: a former one\n', "text")):
        log.write_text(former)
        done = kdctl("start", "--model", broken, "--set", f"server.log_format={form}", code=1)
        first, *rest = done.err.splitlines()
        assert first.startswith(f"kdctl: {broken}/model.safetensors: there is no such file"), first
        assert f"exit status 65 before it was ready; its log is {log})" in first and "a former one" not in done.err
        assert "starting" in rest[0] and "stopped" in rest[-1] and rest == log.read_text()[len(former) :].splitlines()
    error = json.loads(kdctl("start", "--model", broken, "-o", "json", code=1).err)
    assert len(error["tail"]) == 5 and error["message"] in first.removeprefix("kdctl: ")
    kdctl("start", "--set", "engine.tp=3", code=78)
    kdctl("start", "--set", "engine.tp", code=2)
    assert "engine.tpp" in kdctl("start", "--set", "engine.tpp=1", code=78).err
    absent = tmp_path_factory.mktemp("absent") / "kd.toml"
    for words in (
        ["start", "--config"],
        ["restart", "--config"],
        ["config", "show", "--config"],
        ["config", "validate"],
    ):
        assert f"{absent}: there is no such file" in kdctl(*words, absent, code=78).err  # as `python -m kd` ends


def test_start_without_a_model_says_so(kdctl, place, library):
    done = kdctl("--instance", "bare", "start")
    assert done.out.startswith("empty") and "without a model: `kdctl --instance bare load PATH`" in done.out
    assert done.err == ""  # no load to report on
    assert kdctl("--instance", "bare", "status", "-o", "json").json["load"] is None
    kdctl("--instance", "bare", "stop", "--now")
    assert "without a model: `kdctl load PATH`" in kdctl("start").out
    assert kdctl("load", place / "absent", code=1).err.count("\n") == 1  # what went wrong, and no progress before it
    kdctl("stop", "--now")
    elsewhere = f"ipc://{place / 'serve.sock'}"
    done = kdctl("start", "--set", f"server.serve={elsewhere}")
    assert f"`kdctl --endpoint {elsewhere} load PATH`" in done.out
    kdctl("stop", "--now", code=0)


def test_start_names_the_owner_when_the_lock_is_held(kdctl, place, library):
    """A daemon that holds the lock but answers no more: the exit status of the new one says so."""
    (place / "default").mkdir(mode=0o700)
    lock = place / "default" / "daemon.lock"
    with lock.open("w") as f:
        import fcntl

        fcntl.flock(f, fcntl.LOCK_EX)
        f.write("12345\n")
        f.flush()
        done = kdctl("start", code=6)
        assert "12345" in done.err and "69" in done.err
    lock.unlink()


def test_config(kdctl, tmp_path, monkeypatch):
    file = tmp_path / "kd.toml"
    file.write_text("[engine]\nthreads = 3\n")
    monkeypatch.setenv("KD_BUILDER_BUDGET", "5")
    rows = {r["key"]: r for r in kdctl("config", "show", "--config", file, "-o", "json").json["settings"]}
    assert (rows["engine.threads"]["value"], rows["engine.threads"]["origin"]) == (3, str(file))
    assert (rows["builder.budget"]["value"], rows["builder.budget"]["origin"]) == (5, "environment KD_BUILDER_BUDGET")
    assert rows["engine.tp"]["origin"] == "built-in"
    assert re.search(r"^engine.threads +3 ", kdctl("config", "show", "engine.threads", "--config", file).out, re.M)
    kdctl("config", "show", "engine.tp.x", code=2)
    assert kdctl("config", "validate", file, "-o", "json").json["ok"] is True
    file.write_text("[engine]\ntp = 3\n")
    error = json.loads(kdctl("config", "validate", file, "-o", "json", code=78).err)
    assert error["name"] == "CONFIG" and "engine.tp" in error["message"]
    kdctl("config", "show", "--config", file, code=78)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for words in (["config", "validate", pipe], ["config", "show", "--config", pipe], ["start", "--config", tmp_path]):
        assert "is not a file" in kdctl(*words, code=78).err
    assert kdctl("config", "validate", "/dev/null").out == "/dev/null: good\n"
    assert "engine.tp" in kdctl("start", "--config", file, code=78).err


# ---- the process


def shell(words: str, **options):
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {words}"],
        env={**ENV, **options.pop("env", {})},
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        **options,
    )


def test_head_does_not_traceback(daemon):
    base = f"{sys.executable} -m kdctl --endpoint {daemon.serve}"
    done = shell(f"{base} generate 'def f():' --max-tokens 400 | head -c 5")
    assert done.stdout and "Traceback" not in done.stderr and done.returncode in (0, 141)
    with daemon.client() as client:
        until(lambda: not client.ps())


def test_interrupt_cancels_and_exits_130(daemon):
    process = subprocess.Popen(
        [*COMMAND, "--endpoint", daemon.serve, "generate", "def f():", "--max-tokens", "1500"],
        env=ENV,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )
    assert process.stdout.read(4)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    assert b"Traceback" not in process.stderr.read()
    with daemon.client() as client:
        until(lambda: not client.ps())


def test_terminate_exits_143(daemon):
    process = subprocess.Popen(
        [*COMMAND, "--endpoint", daemon.serve, "events", "-f"],
        env=ENV,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )
    assert process.stdout.readline()
    process.terminate()
    assert process.wait(20) == 143
    assert b"Traceback" not in process.stderr.read()


def test_starts_without_the_library_and_with_little_else(daemon):
    """What starting costs is what is imported: the libraries it stands on, and little of our own and of Python's beside. That is
    counted, not timed: on a busy machine a clock says nothing about the program."""
    code = (
        "import sys\nimport click, zmq, msgpack\nbefore = set(sys.modules)\n"
        "from kdctl.__main__ import run\nrc = run(sys.argv[1:])\n"
        "bad = {'kd.native', 'kd.engine', 'kd.server', 'numpy', 'cffi', 'jinja2', 'tiktoken'} & set(sys.modules)\n"
        "more = sorted(set(sys.modules) - before)\n"
        "sys.exit(f'imported {bad}' if bad else rc or (f'{len(more)} modules more: {more}' if len(more) > 40 else 0))"
    )
    command = [sys.executable, "-c", code, "--endpoint", daemon.serve, "status"]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_usage_errors(kdctl):
    kdctl("frobnicate", code=2)
    error = json.loads(kdctl("-o", "json", "frobnicate", code=2).err)
    assert error["name"] == "USAGE" and error["code"] == 2
    kdctl("status", "--nope", code=2)
    kdctl("--timeout", "soon", "status", code=2)
    kdctl("start", "--model", "/does/not/exist", code=2)


def test_help_of_every_command(kdctl):
    top = kdctl("--help").out
    with click.Context(entry.cli) as ctx:
        for name in entry.COMMANDS:
            assert re.search(rf"^  {name} ", top, re.M)
            command = entry.cli.get_command(ctx, name)
            assert command.name == name and command.help
            assert "Usage: kdctl" in kdctl(name, "--help").out


def test_every_error_of_the_protocol_has_an_exit_code():
    from kd import wire

    assert all(0 < output.exit_of(name) <= 10 for name in wire.ERRORS)
    assert set(output._EXITS) - set(wire.ERRORS) == {"NOT_RUNNING", "NO_ANSWER", "PERMISSION", "BAD_ENDPOINT"}


@pytest.mark.parametrize("name", ["bash", "zsh", "fish"])
def test_completion(kdctl, name):
    assert "_KDCTL_COMPLETE" in kdctl("completion", name).out
    assert kdctl("completion", name, "-o", "json").json["shell"] == name


def test_completion_completes():
    env = {"COMP_WORDS": "kdctl sta", "COMP_CWORD": "1", "_KDCTL_COMPLETE": "bash_complete"}
    done = shell(f"{sys.executable} -m kdctl", env=env)
    assert done.stdout.split() == ["plain,start", "plain,status"]


def test_duration_and_ids():
    assert [output.DURATION.convert(v, None, None) for v in ("10", "500ms", "2m", "1.5s")] == [10, 0.5, 120, 1.5]
    assert parse_ids("[1, 2 3]\n") == [1, 2, 3]
    with pytest.raises(click.UsageError):
        parse_ids("")


def test_logs_follow(kdctl, place, library, nano):
    kdctl("--instance", "l", "start", "--model", nano)
    process = subprocess.Popen(
        [*COMMAND, "--instance", "l", "logs", "-f", "-n", "1"],
        env={**ENV, "KD_SERVER_RUNTIME_DIR": str(place)},
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        assert "state ready" in process.stdout.readline()
        time.sleep(0.3)  # it seeks to the end before it follows; nothing else tells when
        got = []
        reader = threading.Thread(target=lambda: got.append(process.stdout.readline()))
        reader.start()
        kdctl("--instance", "l", "generate", "x", "--max-tokens", "2")
        reader.join(10)
        assert "request accepted" in got[0]
    finally:
        process.kill()
        process.wait()
    kdctl("--instance", "l", "stop")


# ---- demo


def test_demo(kdctl, library):
    data = kdctl("demo", "--max-tokens", "24", "-o", "json").json
    assert data["bits_equal"] and data["exit_status"] == 0
    plain, trees = data["runs"]
    choice = data["builder_choice"]
    fastest = max(choice["measured"], key=lambda m: m["tokens_per_s"])
    assert (choice["builder"], choice["budget"]) == (fastest["builder"], fastest["budget"])
    assert plain["builder"] == "none" and trees["builder"] == (
        choice["builder"] if choice["builder"] != "none" else "heap"
    )
    assert plain["tokens_a_round"] == 1 < trees["tokens_a_round"] and plain["rows_a_round"] == 1
    done = kdctl("demo", "--max-tokens", "16")
    assert "def fibonacci(n):" in done.out and "bits equal  yes" in done.out and "CPU twin" in done.out
    assert "chosen" in done.out and "the fastest at warm-up (tokens/s: " in done.out


@pytest.mark.parametrize(
    "damage",
    ["{", "[]", '{"pid": "1"}', '{"pid": 1, "set": 5}', '{"pid": 1, "set": [null]}', '{"pid": 1, "model": [1]}'],
)
def test_a_damaged_note_of_a_start_is_as_none(tmp_path, damage):
    note = tmp_path / "started.json"
    started.remember(
        note, os.getpid(), model=None, config=None, set=["builder.name=heap"], cwd="/", endpoint="ipc:///x"
    )
    assert started.remembered(note, os.getpid())["set"] == ["builder.name=heap"] and started.remembered(note, 1) == {}
    note.write_text(damage)
    assert started.remembered(note, None) == started.remembered(note, 1) == {}


def test_a_signal_is_held_back_until_both_are_done():
    done = []
    with pytest.raises(KeyboardInterrupt):
        with started.held_back(signal.SIGINT):
            signal.raise_signal(signal.SIGINT)
            done.append(1)
        done.append(2)
    assert done == [1]
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with started.held_back(signal.SIGINT):
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # a child is to inherit that
    finally:
        signal.signal(signal.SIGINT, former)


def test_an_interrupt_while_a_child_is_let_go_is_no_traceback(kdctl, place, library, tmp_path):
    """At the worst moment: in the destructor of what started the daemon."""
    (tmp_path / "sitecustomize.py").write_text(
        "import signal, subprocess\nsubprocess.Popen.__del__ = lambda self: signal.raise_signal(signal.SIGINT)\n"
    )
    env = {**ENV, "KD_SERVER_RUNTIME_DIR": str(place)}
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), ENV["PYTHONPATH"]])
    command = [*COMMAND, "start", "--wait", "none"]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stderr == "" and done.stdout.startswith("starting, pid ")
    assert done.returncode in (0, 130, -signal.SIGINT)
    kdctl("stop", "--now")
