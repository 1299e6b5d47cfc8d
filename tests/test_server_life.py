"""The daemon's life, on the fake engine: states, loads, drain, stop, failure, locks, systemd, logs."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import stat
import threading
import time

import pytest
from daemons import Daemon, Raw, starter, until
from fake_engine import token_at

from kd import wire
from kd.client import KdClientError
from kd.state import DaemonState


def new_id() -> bytes:
    return os.urandom(16)


start = pytest.fixture(starter)


# ---- states


def test_control_answers_at_once_while_a_model_loads(start):
    daemon = start({"load_s": 3.0}, state=None)
    with daemon.client(timeout_s=2) as client:
        until(lambda: daemon.socket("control").exists())
        status = until(lambda: (s := client.status())["state"] == "loading" and s)
        assert not status["ready"] and status["live"] and not status["started"]
        load = until(lambda: (p := client.status()["load"]) and p["phase"] == "read" and p)
        assert 0 <= load["percent"] < 100 and load["bytes_total"] == 1000
        with pytest.raises(KdClientError) as caught:
            client.generate([1])
        assert caught.value.name == "NOT_READY" and caught.value.body["retry_ms"] > 0
    daemon.wait()
    with daemon.client() as client:
        status = client.status()
        assert status["ready"] and status["started"] and status["model"]["name"] == "model"
        assert status["timings"]["ready_ms"] >= 3000


def test_without_a_model_it_is_live_and_not_ready_until_one_is_loaded(start):
    daemon = start({}, model=None, state="empty")
    with daemon.client() as client:
        status = client.status()
        assert status["live"] and status["started"] and not status["ready"] and status["model"] is None
        with pytest.raises(KdClientError) as caught:
            client.generate([1])
        assert caught.value.name == "NOT_READY" and "kdctl load" in caught.value.message
        with pytest.raises(KdClientError) as caught:
            client.load("/there/is/one/missing")
        assert caught.value.name == "IO"
        assert client.status()["state"] == "empty"
        seen = []
        assert client.load("/some/model", progress=seen.append)["model"]["path"] == "/some/model"
        assert seen and client.status()["ready"]
        with pytest.raises(KdClientError) as caught:
            client.load("/another")
        assert caught.value.name == "CONFLICT"
        assert client.generate([1], max_tokens=3).finish == "length"
        assert client.unload() == 1 << 20
        assert client.status()["state"] == "empty"
        with pytest.raises(KdClientError) as caught:
            client.unload()
        assert caught.value.name == "STATE"


def test_unload_ends_running_requests(start):
    daemon = start({"token_delay_s": 0.005})
    with daemon.client() as client, daemon.client() as operator:
        stream = client.stream([5], max_tokens=4000)
        it = iter(stream)
        next(it)
        operator.unload()
        for _ in it:
            pass
        ended = stream.result
        assert (ended.finish, ended.error) == ("cancelled", "CANCELLED") and "the model was unloaded" in ended.message


def test_a_load_can_be_cancelled(start):
    daemon = start({"load_s": 60}, model=None, state="empty")
    got = []

    def load():
        with daemon.client() as client:
            try:
                client.load("/big")
            except KdClientError as error:
                got.append(error.name)

    thread = threading.Thread(target=load)
    thread.start()
    with daemon.client() as client:
        until(lambda: client.status()["state"] == "loading")
        with pytest.raises(KdClientError) as caught:
            client.load("/other")
        assert caught.value.name == "BUSY"
        client.load_cancel()
        thread.join(10)
        assert got == ["CANCELLED"] and client.status()["state"] == "empty"


def test_a_load_that_stalls_is_cancelled(start):
    daemon = start({"load_s": 1e6}, "--set", "server.load_stall_timeout_ms=1000", state=None)
    assert daemon.end(timeout_s=20) == 70
    assert any("stalled" in r["message"] for r in daemon.records())


@pytest.mark.parametrize(
    "fake, status, word",
    [
        ({"load_error": [-62, "KD_E_MODEL", "shard 2 is cut"]}, 65, "shard 2 is cut"),
        ({"load_error": [-61, "KD_E_IO", "no config.json"]}, 65, "no config.json"),
        ({"load_error": [-60, "KD_E_NOMEM", "needs 9 GiB"]}, 71, "needs 9 GiB"),
        ({"load_error": [-90, "KD_E_FATAL", "broken"]}, 70, "broken"),
        ({"diverge": "heap"}, 65, "changed the output"),
    ],
)
def test_a_start_that_fails_says_why_and_exits(start, fake, status, word):
    daemon = start(fake, state=None)
    assert daemon.end() == status
    assert sum(word in str(record) for record in daemon.records()) == 1  # said once, not again on the way out


def test_golden_json_is_checked(start, tmp_path):
    prompt = [1, 2, 3]
    good = {"prompt_tokens": prompt, "tokens": [token_at(prompt, i) for i in range(6)]}
    (tmp_path / "golden.json").write_text(json.dumps(good))
    daemon = start({}, model=tmp_path)
    assert daemon.end(signal.SIGTERM) == 0
    good["tokens"][4] += 1
    (tmp_path / "golden.json").write_text(json.dumps(good))
    daemon = start({}, model=tmp_path, state=None)
    assert daemon.end() == 65
    assert "token 4" in daemon.log()
    for key, ids, said in (
        ("prompt_tokens", [1, 10**6], "prompt_tokens[1] is 1000000"),
        ("tokens", [1] * 200_000, "context"),
    ):
        (tmp_path / "golden.json").write_text(json.dumps({**good, key: ids}))
        daemon = start({}, model=tmp_path, state=None)
        assert daemon.end() == 65
        assert said in daemon.log()
    (tmp_path / "golden.json").write_text("[]")
    daemon = start({}, model=tmp_path, state=None)
    assert daemon.end() == 65


def test_drain_and_undrain(start):
    daemon = start({"token_delay_s": 0.005})
    with daemon.client() as client, daemon.client() as operator:
        stream = client.stream([5], max_tokens=100)
        it = iter(stream)
        next(it)
        assert operator.drain() == "draining"
        with pytest.raises(KdClientError) as caught:
            operator.generate([1])
        assert caught.value.name == "DRAINING"
        assert not operator.status()["ready"] and operator.status()["live"]
        for _ in it:
            pass
        assert stream.result.finish == "length"
        assert operator.drain(False) == "ready"
        assert operator.generate([1], max_tokens=2).finish == "length"


def test_builders(start):
    daemon = start({})
    with daemon.client() as client:
        assert [b["name"] for b in client.builders() if b["in_force"]] == ["heap"]
        generation = client.use_builder("chain", 3)
        assert [b["name"] for b in client.builders() if b["in_force"]] == ["chain"]
        assert next(iter(client.stream([1], max_tokens=9))).builder_generation == generation
        with pytest.raises(KdClientError) as caught:
            client.use_builder("oak")
        assert caught.value.name == "NOT_FOUND"
        with pytest.raises(KdClientError) as caught:
            client.use_builder("none", request=new_id().hex())
        assert caught.value.name == "NOT_FOUND"
        with pytest.raises(KdClientError, match="engine.max_nodes = 64"):
            client.use_builder("chain", 65)
        with pytest.raises(KdClientError, match="engine.max_nodes = 64"):
            client.generate([1], max_tokens=2, builder="chain", budget=65)


def test_the_configured_builder_is_in_force(start):
    daemon = start({}, "--builder", "chain", "--budget", "5")
    with daemon.client() as client:
        assert client.status()["stats"]["builder"] == "chain" and client.status()["stats"]["builder_budget"] == 5


def test_events(start):
    daemon = start({}, "--set", "server.publish_interval_ms=100")
    with daemon.client() as client:
        events = client.events(timeout_s=10)
        first = next(events)
        assert first["topic"] == "state" and first["state"] == "ready"
        metrics = next(e for e in events if e["topic"] == "metrics")
        assert metrics["stats"]["pages_total"] == 64 and metrics["ready"] is True
        counters = ("opened", "refused", "stop", "length", "cancelled", "error", "client_gone")
        assert [metrics[name] for name in counters] == [0] * 7  # those that counted nothing yet are there, too
        client.drain()
        seen = []
        for event in events:
            seen.append(event)
            if event["topic"] == "state" and event["state"] == "draining":
                break
        numbers = [first["seq"], *(e["seq"] for e in seen)]
        assert numbers == sorted(set(numbers))


# ---- stopping


def test_sigterm_lets_streams_finish_and_refuses_new_work(start):
    daemon = start({"token_delay_s": 0.01})
    with daemon.client() as client, daemon.client() as other:
        streams = [client.stream([i], max_tokens=300) for i in (1, 2, 3)]  # 3 s, which outlasts what follows
        first = iter(streams[0])
        next(first)
        daemon.process.send_signal(signal.SIGTERM)
        until(lambda: other.ping()["state"] == "draining")
        with pytest.raises(KdClientError) as caught:
            other.generate([9])
        assert caught.value.name == "DRAINING"
        for _ in first:
            pass
        assert [s.read().finish for s in streams[1:]] == ["length", "length"]
        assert streams[0].result.finish == "length"
    assert daemon.end() == 0
    assert not daemon.socket("serve").exists() and not daemon.socket("control").exists()


def test_the_drain_has_a_deadline(start):
    daemon = start({"token_delay_s": 0.01}, "--set", "server.drain_timeout_ms=500")
    with daemon.client() as client:
        stream = client.stream([1], max_tokens=4000)
        it = iter(stream)
        next(it)
        began = time.monotonic()
        daemon.process.send_signal(signal.SIGTERM)
        for _ in it:
            pass
        assert (stream.result.finish, stream.result.error) == ("cancelled", "CANCELLED")
        assert "stopping" in stream.result.message
        assert daemon.end() == 0
        assert 0.4 < time.monotonic() - began < 5


def test_a_second_signal_ends_it_now(start):
    daemon = start({"token_delay_s": 0.01})
    with daemon.client() as client:
        stream = client.stream([1], max_tokens=4000)
        next(iter(stream))
        daemon.process.send_signal(signal.SIGTERM)
        until(lambda: client.ping()["state"] == "draining")
        began = time.monotonic()
        daemon.process.send_signal(signal.SIGINT)
        assert daemon.end() == 0
        assert time.monotonic() - began < 5


def test_sigterm_during_a_load(start):
    daemon = start({"load_s": 60}, state="loading")
    began = time.monotonic()
    assert daemon.end(signal.SIGTERM) == 0
    assert time.monotonic() - began < 5


def test_stop_by_message(start):
    daemon = start({})
    with daemon.client() as client:
        client.stop(now=True)
    assert daemon.end() == 0


def test_a_wedged_engine_cannot_hold_the_process(start, tmp_path):
    gate = tmp_path / "gate"
    daemon = start({"gate_file": str(gate), "token_delay_s": 0.01}, "--set", "server.drain_timeout_ms=500")
    with daemon.client() as client:
        stream = client.stream([1], max_tokens=4000)
        next(iter(stream))
        gate.touch()
        began = time.monotonic()
        daemon.process.send_signal(signal.SIGTERM)
        daemon.end(timeout_s=20)
        assert time.monotonic() - began < 12


# ---- liveness and failure


def test_a_wedged_engine_is_not_live_while_everything_still_answers(start, tmp_path):
    gate = tmp_path / "gate"
    daemon = start({"gate_file": str(gate), "token_delay_s": 0.01}, "--set", "server.round_stall_timeout_ms=1000")
    with daemon.client() as client, daemon.client() as other:
        stream = client.stream([1], max_tokens=4000)
        next(iter(stream))
        gate.touch()
        pong = until(lambda: (p := other.ping())["live"] is False and p)
        assert pong["turn_age_us"] >= 1_000_000 and not pong["ready"]
        assert other.status()["live"] is False and len(other.ps()) == 1
        with pytest.raises(KdClientError, match=r"no progress for \d+ s: retry") as caught:
            other.generate([1])
        assert caught.value.name == "NOT_READY"
        assert daemon.end(timeout_s=20) == 70
    assert any("no progress" in r.get("reason", "") for r in daemon.records())


def test_an_idle_engine_stays_live(start):
    daemon = start({}, "--set", "server.round_stall_timeout_ms=1000")
    with daemon.client() as client:
        client.generate([1], max_tokens=3)
        turns = client.ping()["turns"]
        limit = time.monotonic() + 3
        while time.monotonic() < limit:
            pong = client.ping()
            assert pong["live"] and pong["ready"]
        assert pong["turns"] - turns <= 1


def test_a_request_that_waits_for_credit_is_no_stall(start):
    daemon = start({}, "--set", "server.round_stall_timeout_ms=1000")
    with Raw(daemon.serve) as raw, daemon.client() as client:
        raw.ask("GENERATE", new_id(), {"tokens": wire.pack_ids([5]), "max_tokens": 50, "credit": 1})
        raw.until("PARTIAL")
        limit = time.monotonic() + 3
        while time.monotonic() < limit:
            assert client.ping()["live"]


@pytest.mark.parametrize("then", [None, signal.SIGTERM])
def test_a_fatal_engine_fails_streams_and_exits_70_whatever_follows(start, tmp_path, then):
    fatal = tmp_path / "fatal"
    daemon = start({"fatal_file": str(fatal), "token_delay_s": 0.01})
    with daemon.client() as client:
        stream = client.stream([1], max_tokens=4000)
        it = iter(stream)
        next(it)
        fatal.touch()
        for _ in it:
            pass
        assert (stream.result.finish, stream.result.error, stream.result.message) == (
            "error",
            "FATAL",
            "injected fault",
        )
    assert daemon.end(then) == 70


# ---- one daemon an endpoint, permissions


def test_a_second_daemon_is_told_who_runs(start):
    daemon = start({})
    second = Daemon(daemon.place, fake={})
    assert second.end() == 69
    assert f"process {daemon.process.pid}" in daemon.log()
    with daemon.client() as client:
        assert client.generate([1], max_tokens=3).finish == "length"


def test_after_kill_9_it_starts_again_at_once(start):
    daemon = start({})
    daemon.process.kill()
    daemon.process.wait()
    assert daemon.socket("serve").exists()  # left behind, and no obstacle
    with pytest.raises(KdClientError) as caught:
        daemon.client().ping()
    assert caught.value.name == "NOT_RUNNING" and "start" in caught.value.message
    again = Daemon(daemon.place, fake={})
    try:
        again.wait()
        with again.client() as client:
            assert client.generate([1], max_tokens=3).finish == "length"
    finally:
        again.kill()


def test_the_lock_is_held_by_the_process_alone(start):
    daemon = start({})
    lock = daemon.place / "t" / "daemon.lock"
    assert lock.read_text().strip() == str(daemon.process.pid)
    with lock.open("r+") as f, pytest.raises(OSError):
        fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert daemon.end(signal.SIGTERM) == 0
    with lock.open("r+") as f:
        fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_modes_of_sockets(start):
    daemon = start({})
    modes = {name: stat.S_IMODE(daemon.socket(name).stat().st_mode) for name in ("control", "serve", "events")}
    assert modes == {"control": 0o600, "serve": 0o660, "events": 0o660}


def test_bad_configuration_is_78_and_bad_usage_64(tmp_path):
    daemon = Daemon(tmp_path, "--set", "engine.tp=3", fake=None)
    assert daemon.end() == 78 and "engine.tp" in daemon.log()
    daemon = Daemon(tmp_path, "--set", "server.serve=tcp://127.0.0.1:1", fake=None)
    assert daemon.end() == 78 and "insecure" in daemon.log()
    daemon = Daemon(tmp_path, "--config", str(tmp_path / "absent"), fake=None)
    assert daemon.end() == 78 and "no such file" in daemon.log()
    daemon = Daemon(tmp_path, "--frobnicate", fake=None)
    assert daemon.end() == 64


# ---- systemd


def test_what_systemd_is_told(start, tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(20)
        gate = tmp_path / "gate"
        daemon = start(
            {"load_s": 1, "gate_file": str(gate), "token_delay_s": 0.01},
            "--set",
            "server.round_stall_timeout_ms=1000",
            state=None,
            env={"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "1000000"},
        )
        lines: list[str] = []

        def read_until(word):
            while not any(word in one for one in lines):
                lines.extend(listener.recv(4096).decode().splitlines())

        read_until("READY=1")
        assert any(one.startswith("EXTEND_TIMEOUT_USEC=") for one in lines)
        assert any("loading: read" in one for one in lines)
        assert not any("WATCHDOG=1" in one for one in lines)  # armed only once it is ready
        read_until("WATCHDOG=1")
        with daemon.client() as client:
            stream = client.stream([1], max_tokens=4000)
            next(iter(stream))
            gate.touch()
            until(lambda: not client.ping()["live"])
            while True:  # what is in the pipe already
                try:
                    listener.settimeout(0.05)
                    listener.recv(4096)
                except TimeoutError:
                    break
            listener.settimeout(20)
            lines.clear()
            read_until("STOPPING=1")  # the daemon gives up on the engine
            assert not any("WATCHDOG=1" in one for one in lines)
        assert daemon.end() == 70


# ---- logs and idleness


def test_logs_have_request_ids_and_no_prompt(start):
    daemon = start({})
    with daemon.client() as client:
        result = client.generate("the secret of the prompt", max_tokens=5)
    assert daemon.end(signal.SIGTERM) == 0
    records = daemon.records()
    assert all({"time", "level", "message"} <= set(r) for r in records)
    mine = [r for r in records if r.get("request") == result.request]
    assert [r["message"] for r in mine] == ["request accepted", "request ended"]
    assert "secret" not in daemon.log() and result.text not in daemon.log()


def test_an_idle_daemon_costs_nothing(start):
    daemon = start({})
    with daemon.client() as client:
        client.generate([1], max_tokens=3)
    assert daemon.idles()


def test_whoever_sees_the_first_state_may_load():
    """A load that was asked for on seeing `empty` was refused for a moment: start-up was over only after that."""
    seen: list[tuple[str, bool]] = []
    state = DaemonState(lambda name, reason: seen.append((name, state.started)))
    state.enter("loading")
    state.enter("empty", started=True)
    state.enter("loading")
    assert seen == [("loading", False), ("empty", True), ("loading", True)]
