"""systemd/: the unit is one systemd takes without a word, and the daemon keeps its side of Type=notify."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kd import config as configuration

ROOT = Path(__file__).resolve().parent.parent
UNITS = ROOT / "systemd"
NANO = ROOT / "models" / "nano"
START_S = 120


def unit() -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str
    parser.read(UNITS / "kd@.service")
    return parser


# ---- the files --------------------------------------------------------------------------------------------------


@pytest.fixture
def scratch_unit(tmp_path) -> Path:
    """The unit with an interpreter that exists: systemd-analyze looks for it."""
    text = (UNITS / "kd@.service").read_text()
    path = tmp_path / "kd@.service"
    path.write_text(text.replace("/opt/kd/bin/python", sys.executable))
    return path


def test_systemd_takes_the_unit_without_a_word(scratch_unit):
    if not shutil.which("systemd-analyze"):
        pytest.skip("systemd-analyze is not installed")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(scratch_unit.with_name("kd@default.service"))],
        capture_output=True,
        text=True,
        env={**os.environ, "SYSTEMD_UNIT_PATH": f"{scratch_unit.parent}:"},
    )
    # An unknown key or type is only a message, with status 0: any word is a failure.
    ours = [line for line in (done.stdout + done.stderr).splitlines() if "kd" in line]
    assert (done.returncode, ours) == (0, [])


def test_the_unit_is_hardened(scratch_unit):
    if not shutil.which("systemd-analyze"):
        pytest.skip("systemd-analyze is not installed")
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=20", str(scratch_unit)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-600:]


def test_what_the_unit_promises():
    service = unit()["Service"]
    assert service["Type"] == "notify"
    assert service["ExecStart"].endswith("-m kd --instance %i")
    assert service["Restart"] == "on-failure"
    assert service["User"] == "kd"
    assert service["RuntimeDirectory"] == "kd/%i"
    assert service["LimitCORE"] == "0"  # a core of the weights would stall the host
    assert service["KillMode"] == "mixed"


def test_statuses_that_are_not_retried_are_the_ones_a_restart_cannot_mend():
    from kd import __main__ as main
    from kd import state

    listed = {int(s) for s in unit()["Service"]["RestartPreventExitStatus"].split()}
    assert listed == {main.EX_USAGE, state.EX_DATA, state.EX_CONFIG}
    assert state.EX_SOFTWARE not in listed


def test_there_is_time_to_drain():
    stop_s = int(unit()["Service"]["TimeoutStopSec"])
    assert stop_s > configuration.SETTINGS["server.drain_timeout_ms"].default / 1000 + 10


def test_the_watchdog_is_slower_than_the_longest_step_it_allows():
    service = unit()["Service"]
    assert int(service["WatchdogSec"]) * 1000 >= configuration.SETTINGS["server.round_stall_timeout_ms"].default


def test_example_configuration_is_the_built_in_one():
    """Every setting is in it, commented out, with the value that is in force without it."""
    text = (UNITS / "kd.toml.example").read_text()
    assert tomllib.loads(text).keys() == set(configuration.SECTIONS)
    assert not any(tomllib.loads(text).values())
    settings = tomllib.loads(re.sub(r"^#(\w+ = )", r"\1", text, flags=re.M))
    found = {f"{section}.{key}": value for section, table in settings.items() for key, value in table.items()}
    assert found == {row.key: row.default for row in configuration.TABLE}


def test_example_configuration_is_accepted(tmp_path):
    text = re.sub(r"^#(\w+ = )", r"\1", (UNITS / "kd.toml.example").read_text(), flags=re.M)
    (tmp_path / "kd.toml").write_text(text)
    assert configuration.load(env={}, file=tmp_path / "kd.toml").engine.tp == 1


@pytest.mark.parametrize(("tool", "file"), [("systemd-sysusers", "kd.sysusers"), ("systemd-tmpfiles", "kd.tmpfiles")])
def test_user_and_folders_can_be_made(tmp_path, tool, file):
    if not shutil.which(tool) or os.geteuid() != 0:
        pytest.skip(f"{tool} is not installed, or this is not root")
    (tmp_path / "etc").mkdir()
    command = [tool, f"--root={tmp_path}", str(UNITS / file)]
    done = subprocess.run(command + (["--create"] if "tmpfiles" in tool else []), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if "sysusers" in tool:
        assert re.search(r"^kd:", (tmp_path / "etc" / "passwd").read_text(), re.M)
    else:
        assert (tmp_path / "var" / "lib" / "kd" / "models").is_dir()


# ---- the daemon, with a systemd that only listens ---------------------------------------------------------------


@dataclass
class Supervised:
    process: subprocess.Popen[str]
    socket: socket.socket
    heard: list[tuple[int, str]] = field(default_factory=list)  # (sender's process, one KEY=value)

    def listen(self, until: str, timeout_s: float = START_S) -> list[str]:
        """Receive until a line that starts with `until`; returns the lines up to it."""
        self.socket.settimeout(timeout_s)
        lines: list[str] = []
        while not any(line.startswith(until) for line in lines):
            data, ancillary, _, _ = self.socket.recvmsg(4096, socket.CMSG_SPACE(struct.calcsize("3i")))
            sender = struct.unpack("3i", ancillary[0][2])[0]
            new = data.decode().split("\n")
            self.heard += [(sender, line) for line in new]
            lines += new
        return lines


@pytest.fixture(params=["path", "abstract"])
def notify_socket(request, tmp_path) -> Iterator[tuple[str, socket.socket]]:
    address = f"@kd-test-{os.getpid()}" if request.param == "abstract" else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        s.bind(address.replace("@", "\0", 1) if request.param == "abstract" else address)
        yield address, s


def start(tmp_path: Path, address: str, listener: socket.socket, *arguments: str, **env: str) -> Supervised:
    runtime = tmp_path / "run" / "kd" / "test"
    runtime.mkdir(parents=True, mode=0o750)
    process = subprocess.Popen(
        [sys.executable, "-m", "kd", "--instance", "test", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT / "runtime"),
            "RUNTIME_DIRECTORY": str(runtime),
            "NOTIFY_SOCKET": address,
            **env,
        },
    )
    return Supervised(process, listener)


@pytest.fixture
def daemon(tmp_path, notify_socket, library) -> Iterator[Supervised]:
    supervised = start(tmp_path, *notify_socket, "--model", str(NANO), WATCHDOG_USEC="2000000")
    yield supervised
    supervised.process.kill()
    supervised.process.wait()


def test_ready_watchdog_and_stopping_in_that_order(daemon):
    before = daemon.listen("READY=1")
    states = [line.removeprefix("STATUS=").split(":")[0] for line in before if line.startswith("STATUS=")]
    for earlier, later in [("loading", "warming"), ("warming", "ready")]:
        assert states.index(earlier) < states.index(later), f"ready was told without {earlier} or {later}: {states}"
    assert "WATCHDOG=1" not in before
    assert not any(line.startswith("STOPPING") for line in before)

    daemon.listen("WATCHDOG=1", timeout_s=2)  # an idle engine is alive
    daemon.listen("WATCHDOG=1", timeout_s=2)

    daemon.process.send_signal(signal.SIGTERM)
    daemon.listen("STOPPING=1", timeout_s=10)
    output, _ = daemon.process.communicate(timeout=30)
    assert daemon.process.returncode == 0, output
    assert {sender for sender, _ in daemon.heard} == {daemon.process.pid}, "NotifyAccess=main hears one process only"
    lines = [line for _, line in daemon.heard]
    assert lines.count("READY=1") == 1
    assert "Traceback" not in output


@pytest.fixture
def plain_socket(tmp_path) -> Iterator[tuple[str, socket.socket]]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        s.bind(str(tmp_path / "notify"))
        yield str(tmp_path / "notify"), s


def test_a_model_that_cannot_be_loaded_is_never_ready(tmp_path, plain_socket, library):
    folder = tmp_path / "broken"
    shutil.copytree(NANO, folder)
    with open(folder / "model-00002-of-00002.safetensors", "r+b") as f:
        f.truncate(1000)
    supervised = start(tmp_path, *plain_socket, "--model", str(folder))
    output, _ = supervised.process.communicate(timeout=START_S)
    assert supervised.process.returncode == 65, output
    assert "model-00002-of-00002.safetensors" in output
    supervised.socket.setblocking(False)
    heard = b""
    try:
        while True:
            heard += supervised.socket.recv(4096) + b"\n"
    except BlockingIOError:
        pass
    assert b"READY=1" not in heard
    assert b"STOPPING=1" in heard


def test_a_wrong_configuration_ends_at_once_with_78(tmp_path, plain_socket):
    supervised = start(tmp_path, *plain_socket, "--set", "engine.tp=3")
    output, _ = supervised.process.communicate(timeout=30)
    assert supervised.process.returncode == 78
    assert len(output.splitlines()) == 1
    assert "engine.tp" in output


MDWE = """
import ctypes, os, sys
PR_SET_MDWE, REFUSE_EXEC_GAIN = 65, 1
if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_MDWE, REFUSE_EXEC_GAIN, 0, 0, 0):
    sys.exit(77)
os.execv(sys.executable, [sys.executable, "-m", "kd", *sys.argv[1:]])
"""


def test_it_runs_with_memory_that_may_not_become_executable(tmp_path, plain_socket, library):
    """What MemoryDenyWriteExecute= does, by the kernel's own switch."""
    address, listener = plain_socket
    runtime = tmp_path / "run" / "kd" / "test"
    runtime.mkdir(parents=True, mode=0o750)
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT / "runtime"), "NOTIFY_SOCKET": address}
    env["RUNTIME_DIRECTORY"] = str(runtime)
    process = subprocess.Popen(
        [sys.executable, "-c", MDWE, "--instance", "test", "--model", str(NANO)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
        env=env,
    )
    try:
        supervised = Supervised(process, listener)
        try:
            supervised.listen("READY=1", timeout_s=1 if process.poll() == 77 else START_S)
        except TimeoutError:
            if process.poll() == 77:
                pytest.skip("this kernel has no PR_SET_MDWE")
            raise
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=30)
        assert process.returncode == 0, output
    finally:
        process.kill()
        process.wait()
