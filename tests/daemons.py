"""Daemons in processes of their own for tests: with the fake engine, or with the real library and a model folder."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from kd import protocol
from kd.client import Client, KdClientError

ROOT = Path(__file__).resolve().parent.parent
ENV = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "runtime"), str(ROOT)]), "PYTHONFAULTHANDLER": "1"}
ENV["KD_BUILDER_NAME"] = "heap"  # not what happens to be the fastest just now; a test of the choice sets it to ""
WAIT_S = 30.0


def until(what: Callable[[], Any], timeout_s: float = WAIT_S, why: str = "") -> Any:
    """Poll until `what()` is true; its value. Fails the test after timeout_s."""
    limit = time.monotonic() + timeout_s
    while True:
        value = what()
        if value:
            return value
        assert time.monotonic() < limit, f"not within {timeout_s} s: {why or what}"
        time.sleep(0.01)


class Daemon:
    """One daemon process; `fake`: options of the fake engine, None: the real one; `fault`: the first arguments of
    fault_daemon.py."""

    def __init__(
        self,
        place: Path,
        *args: str,
        fake: dict | None = None,
        model: str | Path | None = "/fake/model",
        env: dict | None = None,
        instance: str = "t",
        stderr: Any = None,
        fault: tuple[str, str] | None = None,
        **popen: Any,
    ):
        self.instance, self.place = instance, place
        self.log_path = place / "log"
        command = (
            [sys.executable, "-m", "kd"]
            if fake is None
            else [sys.executable, str(ROOT / "tests" / "fake_daemon.py"), json.dumps(fake)]
        )
        if fault:
            command = [sys.executable, str(ROOT / "tests" / "fault_daemon.py"), *fault]
        command += ["--instance", instance, "--set", f"server.runtime_dir={place}", "--log-format", "json"]
        command += ["--model", str(model)] if model else []
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *args],
                env={**ENV, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log if stderr is None else stderr,
                **popen,
            )

    @property
    def serve(self) -> str:
        return f"ipc://{self.place / self.instance / 'serve.sock'}"

    def socket(self, name: str) -> Path:
        return self.place / self.instance / f"{name}.sock"

    def client(self, **options: Any) -> Client:
        return Client(self.serve, self.instance, **{"timeout_s": 10, "stream_timeout_s": 30, **options})

    def wait(self, state: str = "ready", timeout_s: float = WAIT_S) -> Daemon:
        def there() -> bool:
            assert self.process.poll() is None, self.log()
            try:
                with self.client(timeout_s=2) as client:
                    return client.ping()["state"] == state
            except KdClientError:
                return False

        until(there, timeout_s, f"state {state}; log:\n{self.log()}")
        return self

    def wait_control(self) -> Daemon:
        """Wait for ready by asking the control socket, where serve is elsewhere."""

        def there() -> bool:
            assert self.process.poll() is None, self.log()
            try:
                with Client(
                    f"ipc://{self.socket('serve')}", control=f"ipc://{self.socket('control')}", timeout_s=2
                ) as client:
                    return client.ping()["ready"]
            except KdClientError:
                return False

        until(there, why=f"ready; log:\n{self.log()}")
        return self

    def log(self) -> str:
        return self.log_path.read_text()

    def records(self) -> list[dict]:
        return [json.loads(line) for line in self.log().splitlines() if line.startswith("{")]

    def end(self, number: int | None = None, timeout_s: float = 30) -> int:
        """Send a signal, if any; wait; the exit status."""
        if number is not None:
            self.process.send_signal(number)
        return self.process.wait(timeout_s)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)

    def cpu_s(self) -> float:
        """CPU time the process has used."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def sleeps(self) -> int:
        """How often threads of the process have gone to sleep so far."""
        tasks = Path(f"/proc/{self.process.pid}/task").iterdir()
        counts = (re.search(r"\nvoluntary_ctxt_switches:\s+(\d+)", (t / "status").read_text()) for t in tasks)
        return sum(int(count[1]) for count in counts if count)

    def idles(self, for_s: float = 4) -> bool:
        """It neither spins nor wakes up all the time. What a wake-up costs is the machine's matter: ten a second cost
        2 % of a core of a throttled one."""
        cpu_s, sleeps = self.cpu_s(), self.sleeps()
        time.sleep(for_s)  # the measurement itself
        return self.cpu_s() - cpu_s < for_s / 4 and self.sleeps() - sleeps < 25 * for_s

    def rss_bytes(self) -> int:
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Raw:
    """A DEALER that sends what it is told, for everything an honest client does not do."""

    def __init__(self, endpoint: str, **options: int):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        for name, value in options.items():
            setattr(self.socket, name, value)
        self.socket.connect(endpoint)

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def ask(self, kind: str, ident: bytes, body: dict) -> None:
        self.send(*protocol.encode(kind, ident, body))

    def get(self, timeout_s: float = 10, beats: bool = False) -> tuple[str, bytes, dict] | None:
        """The next message, or None."""
        limit = time.monotonic() + timeout_s
        while self.socket.poll(max(0, int((limit - time.monotonic()) * 1000))):
            message = protocol.decode(self.socket.recv_multipart(), "reply")
            if beats or message[0] != "BEAT":
                return message
        return None

    def until(self, kind: str, timeout_s: float = 20) -> tuple[str, bytes, dict]:
        """The next message of that type; others are dropped."""
        limit = time.monotonic() + timeout_s
        while True:
            message = self.get(limit - time.monotonic(), beats=kind == "BEAT")
            assert message is not None, f"no {kind} within {timeout_s} s"
            if message[0] == kind:
                return message

    def close(self) -> None:
        self.socket.close(0)
        self.context.term()

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def starter(tmp_path_factory):
    """A fixture: start(fake, *args, **options) -> a Daemon; all are killed at the end. real: the real engine."""
    made = []

    def make(fake=None, *args, state="ready", real=False, **options):
        daemon = Daemon(tmp_path_factory.mktemp("d"), *args, fake=None if real else fake or {}, **options)
        made.append(daemon)
        return daemon.wait(state) if state else daemon

    yield make
    for daemon in made:
        daemon.kill()
