"""kd.notify against a supervisor made of one datagram socket."""

import os
import socket
import struct
import subprocess
import sys
import time

import pytest

from kd import notify


class Supervisor:
    """Receives datagrams and, by SO_PASSCRED, who sent them."""

    def __init__(self, address):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self.socket.bind(address)
        self.socket.settimeout(10)

    def receive(self):
        data, ancillary, _, _ = self.socket.recvmsg(65536, socket.CMSG_SPACE(12))
        ((_, kind, credentials),) = ancillary
        assert kind == socket.SCM_CREDENTIALS
        pid, _, _ = struct.unpack("3i", credentials)
        return data.decode(), pid


@pytest.fixture(params=["path", "abstract"])
def supervisor(request, tmp_path, monkeypatch):
    if request.param == "path":
        name, address = str(tmp_path / "notify"), str(tmp_path / "notify")
    else:
        name = f"@kd-test-{os.getpid()}-{time.monotonic_ns()}"
        address = "\0" + name[1:]
    monkeypatch.setenv("NOTIFY_SOCKET", name)
    found = Supervisor(address)
    yield found
    found.socket.close()


def test_every_message(supervisor):
    assert notify.status("loading nano: read 61 %")
    assert supervisor.receive() == ("STATUS=loading nano: read 61 %", os.getpid())
    assert notify.extend_timeout(5_000_000)
    assert supervisor.receive()[0] == "EXTEND_TIMEOUT_USEC=5000000"
    assert notify.ready("serving")
    assert supervisor.receive()[0] == "READY=1\nSTATUS=serving"
    assert notify.ready()
    assert supervisor.receive()[0] == "READY=1"
    assert notify.watchdog()
    assert supervisor.receive()[0] == "WATCHDOG=1"
    before = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    assert notify.reloading()
    first, second = supervisor.receive()[0].split("\n")
    assert first == "RELOADING=1" and second.startswith("MONOTONIC_USEC=")
    assert before <= int(second.partition("=")[2]) <= time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    assert notify.mainpid()
    assert supervisor.receive()[0] == f"MAINPID={os.getpid()}"
    assert notify.mainpid(17)
    assert supervisor.receive()[0] == "MAINPID=17"
    assert notify.stopping()
    assert supervisor.receive()[0] == "STOPPING=1"
    assert notify.stopping("asked to")
    assert supervisor.receive()[0] == "STOPPING=1\nSTATUS=asked to"


def test_a_value_cannot_start_another_key(supervisor):
    notify.status("loading\nREADY=1")
    assert supervisor.receive()[0] == "STATUS=loading READY=1"


def test_the_sender_is_the_process_itself(supervisor):
    """systemd (NotifyAccess=main) drops messages from helpers."""
    child = subprocess.Popen(
        [sys.executable, "-c", "import os; from kd import notify; print(os.getpid()); assert notify.ready()"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    text, pid = supervisor.receive()
    out, _ = child.communicate(timeout=30)
    assert child.returncode == 0 and text == "READY=1" and pid == int(out) == child.pid


@pytest.mark.parametrize(
    "address",
    [None, "", "@", "/", "relative", "vsock:2:1234", "/nonexistent/notify", "@kd-nobody-listens", "/" + "x" * 200],
)
def test_no_supervisor_is_no_error(monkeypatch, address):
    if address is None:
        monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    else:
        monkeypatch.setenv("NOTIFY_SOCKET", address)
    for sent in (
        notify.ready("x"),
        notify.status("x"),
        notify.stopping(),
        notify.reloading(),
        notify.watchdog(),
        notify.extend_timeout(1),
        notify.mainpid(),
    ):
        assert sent is False


def test_a_supervisor_that_does_not_read_does_not_block(supervisor):
    while notify.watchdog():  # until its buffer is full
        pass
    start = time.monotonic()
    assert notify.watchdog() is False
    assert time.monotonic() - start < 5


def test_a_supervisor_that_went_away(supervisor):
    supervisor.socket.close()
    assert notify.ready() is False


@pytest.mark.parametrize(
    ("usec", "pid", "want"),
    [
        (None, None, 0),
        ("30000000", None, 30_000_000),
        ("30000000", "self", 30_000_000),
        ("30000000", "1", 0),
        ("garbage", None, 0),
        ("-5", None, 0),
    ],
)
def test_watchdog_interval(monkeypatch, usec, pid, want):
    for name, value in (("WATCHDOG_USEC", usec), ("WATCHDOG_PID", str(os.getpid()) if pid == "self" else pid)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert notify.watchdog_interval_us() == want
