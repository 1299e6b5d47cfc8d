"""What clients do that they should not: garbage, floods, vanishing, never reading, other users, full disks."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time

import pytest
import zmq
from daemons import ENV, ROOT, Daemon, Raw, until
from fake_engine import token_at
from test_protocol import BOMBS, mutate, vectors

from kd import wire
from kd.client import Client, KdClientError

IDS = wire.pack_ids


@pytest.fixture
def daemon(tmp_path):
    made = Daemon(tmp_path, fake={"token_delay_s": 0.002}).wait()
    yield made
    made.kill()


def works(daemon: Daemon) -> None:
    with daemon.client() as client:
        assert client.generate([3], max_tokens=9).tokens == [token_at([3], i) for i in range(9)]
        assert client.status()["ready"]


@pytest.mark.parametrize("name", ["serve", "control"])
def test_every_bad_message_is_answered(daemon, name):
    endpoint = f"ipc://{daemon.socket(name)}"
    with Raw(endpoint) as raw:
        for vector in vectors("reject"):
            if vector["socket"] != name:
                continue
            raw.send(*(bytes.fromhex(f) for f in vector["frames"]))
            kind, ident, body = raw.get()
            assert kind == "ERROR", vector["name"]
            assert (body["code"], body["name"], ident.hex()) == (vector["code"], vector["error"], vector["id"])
        raw.send(b"KDP7", b"", b"")
        body = raw.get()[2]
        assert (body["version_min"], body["version_max"]) == (1, 1)
        raw.ask("PING", bytes(15) + b"x", {})
        assert raw.get()[0] == "PONG"
    works(daemon)


def test_garbage_and_mutations(daemon):
    rng = random.Random(2)
    seeds = [[bytes.fromhex(f) for f in v["frames"]] for v in vectors("accept") if v["socket"] == "serve"]
    with Raw(daemon.serve) as raw:
        for _ in range(1500):
            frames = mutate(rng, rng.choice(seeds)) if rng.random() < 0.8 else [rng.randbytes(rng.randint(0, 64))]
            raw.send(*frames)
            while raw.get(0, beats=True):
                pass
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as plain:  # not even ZMTP
        plain.connect(str(daemon.socket("serve")))
        plain.sendall(rng.randbytes(4096))
    assert daemon.process.poll() is None
    with daemon.client() as client:  # some mutants are valid requests: they end, or are cancelled with their client
        until(lambda: not client.ps())
    works(daemon)


def test_bombs_do_not_grow_the_daemon(daemon):
    works(daemon)
    before = daemon.rss_bytes()
    with Raw(daemon.serve) as raw:
        for bomb in BOMBS.values():
            raw.send(wire.TAG, b"\x82\xa1t\xa4PING\xa2id\xc4\x10" + bytes(16), bomb)
            assert raw.get()[2]["name"] == "MALFORMED"
        for _ in range(3):
            raw.send(wire.TAG, b"\x82\xa1t\xa4PING\xa2id\xc4\x10" + bytes(16), bytes(9 << 20))
            assert raw.get()[2]["name"] == "TOO_LARGE"
    assert daemon.rss_bytes() - before < 64 << 20
    works(daemon)


def test_an_enormous_frame_ends_the_connection_only(daemon):
    with Raw(daemon.serve) as raw:
        raw.send(wire.TAG, b"", bytes(wire.MAX_FRAME_BYTES + 1))
        assert raw.get(0.5) is None
    works(daemon)


def test_messages_too_large_for_the_client_itself_are_not_sent(daemon):
    with daemon.client() as client, pytest.raises(KdClientError) as caught:
        client.generate("x" * (9 << 20))
    assert caught.value.name == "TOO_LARGE"


CHILD = """
import sys
from kd.client import Client
client = Client(sys.argv[1])
stream = client.stream([5], max_tokens=4000, credit=4096)
for chunk in stream:
    print("token", flush=True)
"""


def child(daemon: Daemon, code: str = CHILD) -> subprocess.Popen:
    process = subprocess.Popen([sys.executable, "-c", code, daemon.serve], env=ENV, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"token\n"
    return process


def test_the_requests_of_a_killed_client_end_within_two_seconds(daemon):
    process = child(daemon)
    with daemon.client() as client:
        assert len(client.ps()) == 1
        process.kill()
        process.wait()
        began = time.monotonic()
        until(lambda: not client.ps() and client.status()["stats"]["streams"] == 0, 10)
        assert time.monotonic() - began < 5
        assert client.status()["stats"]["pages_free"] == 64


def test_a_client_killed_while_its_request_waits(tmp_path):
    """Nothing is ever sent to it after ACCEPTED: only the beat finds out."""
    daemon = Daemon(tmp_path, fake={}).wait()
    try:
        code = CHILD.replace("credit=4096", "credit=1").replace(
            'print("token", flush=True)', 'print("token", flush=True); input()'
        )
        process = subprocess.Popen(
            [sys.executable, "-c", code, daemon.serve], env=ENV, stdout=subprocess.PIPE, stdin=subprocess.PIPE
        )
        assert process.stdout.readline() == b"token\n"
        with daemon.client() as client:
            until(lambda: client.ps()[0]["credit"] == 0, 10)  # what the client granted on its first token is used up
            process.kill()
            process.wait()
            began = time.monotonic()
            until(lambda: not client.ps(), 10)
            assert time.monotonic() - began < 5
    finally:
        daemon.kill()


def test_a_stopped_client_loses_its_requests(daemon):
    process = child(daemon)
    try:
        process.send_signal(signal.SIGSTOP)
        with daemon.client() as client:
            until(lambda: not client.ps(), 20)  # ZMTP heartbeats: 6 s
    finally:
        process.kill()
        process.wait()


def test_a_reader_that_never_reads_slows_only_itself(daemon):
    with Raw(daemon.serve, rcvhwm=1) as lazy, daemon.client() as client:
        for i in range(8):
            lazy.ask(
                "GENERATE",
                os.urandom(16),
                {"tokens": IDS([i + 1]), "max_tokens": 4000, "credit": 4096, "hash_logits": True},
            )
        until(lambda: len(client.ps()) == 8)
        before = daemon.rss_bytes()
        began = time.monotonic()
        for i in range(5):
            assert client.generate([i + 20], max_tokens=100).tokens == [token_at([i + 20], k) for k in range(100)]
        assert time.monotonic() - began < 10
        until(lambda: not client.ps(), 60)  # more piled up than may wait for one client: it counts as gone
        assert daemon.rss_bytes() - before < 48 << 20
        assert any(r["message"] == "client gone" for r in daemon.records())
    works(daemon)


def test_a_flood_of_questions_nobody_reads_the_answers_of(daemon):
    works(daemon)
    before = daemon.rss_bytes()
    with Raw(daemon.serve, rcvhwm=1, sndtimeo=2000) as flood:
        with contextlib.suppress(zmq.Again):
            for i in range(30_000):
                flood.ask("PING", i.to_bytes(16, "big"), {})
        works(daemon)
    assert daemon.rss_bytes() - before < 64 << 20
    works(daemon)


def test_a_chosen_identity_cannot_take_over_a_living_one(daemon):
    ident = os.urandom(16)
    with Raw(daemon.serve, routing_id=b"me") as owner:
        owner.ask("GENERATE", ident, {"tokens": IDS([5]), "max_tokens": 30, "credit": 1})
        owner.until("PARTIAL")
        with Raw(daemon.serve, routing_id=b"me") as thief:
            thief.ask("CREDIT", os.urandom(16), {"request": ident, "frames": 100})
            assert thief.get(0.5) is None
        owner.ask("CREDIT", os.urandom(16), {"request": ident, "frames": 100})
        assert owner.until("FINAL")[2]["total_tokens"] == 30


def test_five_hundred_requests_at_once_are_bounded(daemon):
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(daemon.client()) for _ in range(4)]
        streams = [c.stream([i + 1], max_tokens=3) for c in clients for i in range(200)]
        ends: dict[str, int] = {}
        for stream in streams:
            try:
                end = stream.read().finish
            except KdClientError as error:
                end = error.name
            ends[end] = ends.get(end, 0) + 1
        assert set(ends) <= {"length", "BUSY"} and ends["length"] >= 64 and sum(ends.values()) == 800
    with daemon.client() as client:
        until(lambda: client.status()["daemon"]["open_requests"] == 0)
    works(daemon)


def test_cancel_storm_leaves_nothing_behind(daemon):
    rng = random.Random(3)
    with daemon.client() as client:
        for _ in range(40):
            streams = [client.stream([rng.randint(1, 99)], max_tokens=rng.randint(1, 200)) for _ in range(5)]
            for stream in streams:
                if rng.random() < 0.5:
                    client.cancel(stream.ident)
                elif rng.random() < 0.5:
                    stream.close()
            for stream in streams:
                with contextlib.suppress(KdClientError):
                    stream.read()
        until(lambda: client.status()["daemon"]["open_requests"] == 0)
        stats = client.status()["stats"]
        assert (stats["streams"], stats["pages_free"]) == (0, 64)
        assert stats["finished"] + stats["cancelled"] == stats["requests"]


AS_NOBODY = """
import os, sys, json, socket, zmq, msgpack  # all of it while the interpreter's own files can still be read
from kd.client import Client, KdClientError
gid = int(sys.argv[3])
os.setgroups([gid] if gid else [])
os.setgid(65534)
os.setuid(65534)
out = {}
for name, call in (("serve", lambda c: c.generate([3], max_tokens=3).finish),
                   ("control", lambda c: c.use_builder("none"))):
    try:
        out[name] = call(Client(sys.argv[1], timeout_s=3, stream_timeout_s=5))
    except KdClientError as error:
        out[name] = error.name
print(json.dumps(out))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("member", [False, True])
def test_other_users_reach_what_the_modes_say(member):
    import tempfile

    group = 54321  # any number: files and processes have it, /etc/group need not
    with tempfile.TemporaryDirectory(prefix="kd-t-", dir="/tmp") as place:
        os.chmod(place, 0o755)
        from pathlib import Path

        daemon = Daemon(Path(place), fake={}).wait()
        try:
            os.chmod(daemon.place / "t", 0o710)
            for path in (daemon.place / "t", daemon.socket("serve")):
                os.chown(path, -1, group)
            copy = Path(place) / "kd"  # the checkout may be closed to others
            subprocess.run(["cp", "-r", ROOT / "runtime" / "kd", copy], check=True)
            subprocess.run(["chmod", "-R", "a+rX", copy], check=True)
            done = subprocess.run(
                [sys.executable, "-c", AS_NOBODY, daemon.serve, "", str(group if member else 0)],
                env={**ENV, "PYTHONPATH": place},
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert done.returncode == 0, done.stderr
            out = json.loads(done.stdout)
            assert out["control"] == "PERMISSION"
            assert out["serve"] == ("length" if member else "PERMISSION")
        finally:
            daemon.kill()


def test_a_log_on_a_full_disk_stops_nothing(tmp_path):
    with open("/dev/full", "wb") as full:
        daemon = Daemon(tmp_path, fake={}, stderr=full).wait()
        try:
            works(daemon)
            with daemon.client() as client:
                assert client.status()["daemon"]["log_dropped"] > 3
            assert daemon.end(signal.SIGTERM) == 0
        finally:
            daemon.kill()


def test_a_log_that_may_not_grow_stops_nothing(tmp_path):
    with open(tmp_path / "small", "wb") as small:
        daemon = Daemon(
            tmp_path, fake={}, stderr=small, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (700, 700))
        ).wait()
        try:
            for _ in range(3):
                works(daemon)
            assert daemon.end(signal.SIGTERM) == 0
            assert (tmp_path / "small").stat().st_size <= 700
        finally:
            daemon.kill()


def test_a_closed_stderr_stops_nothing(tmp_path):
    reader, writer = os.pipe()
    daemon = Daemon(tmp_path, fake={}, stderr=writer).wait()
    os.close(writer)
    os.close(reader)
    try:
        works(daemon)
        assert daemon.end(signal.SIGTERM) == 0
    finally:
        daemon.kill()


def test_kill_9_at_random_moments_leaves_no_obstacle(tmp_path):
    rng = random.Random(4)
    for _ in range(6):
        daemon = Daemon(tmp_path, fake={"token_delay_s": 0.001, "load_s": 0.05})
        with contextlib.suppress(KdClientError, AssertionError):
            until(lambda: daemon.socket("serve").exists(), 10)  # noqa: B023
            if rng.random() < 0.7:
                daemon.wait()
                Client(daemon.serve, timeout_s=2).stream([1], max_tokens=4000)
        time.sleep(rng.random() * 0.1)
        daemon.kill()
    daemon = Daemon(tmp_path, fake={}).wait()
    works(daemon)
    daemon.kill()


# ---- tcp


def free_port() -> int:
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_tcp_needs_insecure_or_keys(tmp_path):
    port = free_port()
    daemon = Daemon(tmp_path, "--set", f"server.serve=tcp://127.0.0.1:{port}", "--insecure", fake={}).wait_control()
    try:
        with Client(f"tcp://127.0.0.1:{port}", timeout_s=5) as client:
            assert client.generate([3], max_tokens=5).finish == "length"
    finally:
        daemon.kill()


def test_curve_keys_decide_who_may_do_what(tmp_path):
    from kd import curve

    keys = tmp_path / "keys"
    curve.create(keys)
    stranger = tmp_path / "other"
    curve.create(stranger)
    (stranger / "client" / "server.key").write_bytes((keys / "server.key").read_bytes())
    serve, control = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    daemon = Daemon(
        tmp_path,
        "--set",
        f"server.serve={serve}",
        "--set",
        f"server.control={control}",
        "--set",
        f"server.curve_dir={keys}",
        fake={},
    )
    try:

        def client(folder, **options):
            return Client(
                serve,
                control=control,
                curve_dir=str(folder) if folder else None,
                **{"timeout_s": 10, "stream_timeout_s": 10, **options},
            )

        with client(keys / "operator") as operator:
            until(lambda: operator.status()["ready"])
            operator.use_builder("chain")
            assert operator.generate([3], max_tokens=5).finish == "length"
        with client(keys / "client") as user:
            assert user.generate([3], max_tokens=5).finish == "length"
        for folder, call in (
            (keys / "client", lambda c: c.use_builder("none")),
            (stranger / "client", lambda c: c.generate([3])),
            (None, lambda c: c.generate([3])),
        ):
            with client(folder, timeout_s=1, stream_timeout_s=1) as refused, pytest.raises(KdClientError) as caught:
                call(refused)
            assert caught.value.name == "NO_ANSWER"
        with client(keys / "operator") as operator:
            assert [b["name"] for b in operator.builders() if b["in_force"]] == ["chain"]
    finally:
        daemon.kill()
