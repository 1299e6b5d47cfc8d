"""The daemon and model folders that are slow, small or without a drafter; logs and descriptors that are odd."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import threading

import pytest
from daemons import ENV, starter, until
from fake_model import SMALL3, write_model

import kd
from kd.client import KdClientError

start = pytest.fixture(starter)


# ---- loads that hang


def test_a_start_fails_if_its_load_hangs_and_cannot_be_cancelled(start, tmp_path):
    hang = tmp_path / "hang"
    hang.touch()
    daemon = start({"hang_file": str(hang)}, "--set", "server.load_stall_timeout_ms=1000", state=None)
    assert daemon.end(timeout_s=30) == 70
    assert "stalled" in daemon.log() and "server.load_stall_timeout_ms" in daemon.log()


def test_a_load_fails_if_it_hangs_and_cannot_be_cancelled(start, tmp_path):
    hang = tmp_path / "hang"
    hang.touch()
    daemon = start({"hang_file": str(hang)}, "--set", "server.load_stall_timeout_ms=1000", model=None, state="empty")
    with daemon.client(timeout_s=20) as client:
        with pytest.raises(KdClientError) as caught:
            client.load("/hangs")
        assert caught.value.name == "TIMEOUT" and "stalled" in caught.value.message
        status = client.status()
        assert status["state"] == "empty" and status["live"]
        with pytest.raises(KdClientError) as caught:
            client.load("/another")
        assert caught.value.name == "BUSY" and "/hangs" in caught.value.message
        hang.unlink()  # it comes back, long after it was given up: nothing of it may stay

        def loads() -> bool:
            try:
                return client.load("/another")["state"] == "ready"
            except KdClientError as error:
                assert error.name == "BUSY"
                return False

        until(loads)
        assert client.status()["model"]["path"] == "/another"
        assert client.generate([1], max_tokens=3).finish == "length"
    assert daemon.end(signal.SIGTERM) == 0


def test_a_hanging_load_does_not_hold_a_stop(start, tmp_path):
    hang = tmp_path / "hang"
    hang.touch()
    daemon = start({"hang_file": str(hang)}, "--set", "server.load_stall_timeout_ms=1000", model=None, state="empty")
    with daemon.client(timeout_s=20) as client, pytest.raises(KdClientError):
        client.load("/hangs")
    assert daemon.end(signal.SIGTERM, timeout_s=8) == 0


# ---- models without a drafter, and small ones


def test_a_chosen_builder_outlives_a_model_that_cannot_use_it(nano, start):
    daemon = start(model=nano, real=True)
    with daemon.client() as client:
        client.use_builder("heap", 5)
        client.unload()
        assert client.load(nano, draft="none")["state"] == "ready"
        assert client.status()["stats"]["builder"] == "none"
        want = client.generate([5, 6, 7], max_tokens=20).tokens
        client.unload()
        client.load(nano)
        stats = client.status()["stats"]
        assert (stats["builder"], stats["builder_budget"]) == ("heap", 5)
        assert client.generate([5, 6, 7], max_tokens=20).tokens == want


def test_a_configured_builder_without_a_drafter_is_a_warning(nano, start):
    daemon = start(None, "--builder", "heap", "--draft", "none", model=nano, real=True)
    with daemon.client() as client:
        assert client.status()["stats"]["builder"] == "none"
        assert client.generate([5, 6, 7], max_tokens=3).finish == "length"
    warnings = [r for r in daemon.records() if r["level"] == "warning"]
    assert [(r["message"], r["wanted"]) for r in warnings] == [
        ("the model has no drafter: builder none is in force", "heap")
    ]


@pytest.mark.parametrize("positions", [2, 3, 9, 17])
def test_a_tiny_context_warms_up(library, tmp_path, start, positions):
    folder = write_model(tmp_path / "model", **{**SMALL3, "yarn": None, "max_positions": positions})
    daemon = start(model=folder, real=True)
    with daemon.client() as client:
        assert client.status()["model"]["max_positions"] == positions
        assert client.generate([1] * (positions - 1), max_tokens=1, ignore_eos=True).finish == "length"


def test_a_context_of_one_position_is_refused(library, tmp_path):
    """It could not hold a prompt and an answer: no request could ever run."""
    folder = write_model(tmp_path / "model", **{**SMALL3, "yarn": None, "max_positions": 1})
    with (
        kd.Engine(library=library) as engine,
        pytest.raises(kd.KdError, match="max_position_embeddings is 1") as caught,
    ):
        engine.load(folder)
    assert caught.value.name == "KD_E_MODEL"


@pytest.mark.parametrize("text", ["[]", "3", '"x"', "null"])
def test_a_config_that_is_no_object(library, tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with kd.Engine(library=library) as engine, pytest.raises(kd.KdError) as caught:
        engine.load(tmp_path)
    assert caught.value.name == "KD_E_MODEL"
    assert caught.value.message.startswith(f"{tmp_path}/config.json: the file is ")


def test_limits_are_told_in_words_of_both_audiences(library, nano):
    """A user of the daemon knows engine.max_nodes, one of the library kd_options.max_nodes."""
    with kd.Engine(nano, library=library, max_nodes=8) as engine:
        calls = (
            lambda: engine.use_builder("heap", 9),
            lambda: engine.submit([1], max_tokens=1, builder="heap", budget=9),
        )
        for call in calls:
            with pytest.raises(kd.KdError, match="0 .. 8, the engine's max_nodes"):
                call()


def test_drain_unload_and_end_of_drain_is_empty(start):
    daemon = start({})
    with daemon.client() as client:
        assert client.drain() == "draining"
        client.unload()
        assert client.drain(False) == "empty"
        assert client.status()["state"] == "empty"
        with pytest.raises(KdClientError) as caught:
            client.generate([1])
        assert caught.value.name == "NOT_READY"
        assert client.load("/again")["state"] == "ready"


# ---- logs nobody takes, descriptors that are closed


def test_a_log_that_nobody_reads_stops_nothing(start):
    """A pipe holds some kilobytes and then makes its writer wait: not the daemon."""
    reader, writer = os.pipe()
    try:
        daemon = start({}, "--log-level", "debug", stderr=writer)
        with daemon.client() as client:
            until(lambda: client.generate([1], max_tokens=1) and client.status()["daemon"]["log_dropped"] > 20)
            assert client.generate([1], max_tokens=5).finish == "length" and client.status()["live"]
        assert daemon.end(signal.SIGTERM) == 0
    finally:
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize("closed", [(2,), (0, 1, 2)])
def test_closed_standard_descriptors(library, nano, start, closed):
    def close():
        for fd in closed:
            os.close(fd)

    daemon = start(model=nano, real=True, preexec_fn=close)
    for fd in closed:
        assert os.readlink(f"/proc/{daemon.process.pid}/fd/{fd}") == "/dev/null"
    with daemon.client() as client:
        assert client.generate([5], max_tokens=3).finish == "length"
    assert daemon.end(signal.SIGTERM) == 0


# ---- a load that is given up, a builder asked for meanwhile


def test_a_load_can_be_cancelled_while_it_warms_up(nano, start):
    """The measurement of the builders takes a second: long enough to be asked to stop."""
    daemon = start(model=None, state="empty", real=True, env={"KD_BUILDER_NAME": ""})
    ended = []

    def load():
        with daemon.client() as client:
            try:
                ended.append(client.load(nano)["state"])
            except KdClientError as error:
                ended.append(error.name)

    thread = threading.Thread(target=load)
    thread.start()
    with daemon.client() as client:
        until(lambda: client.status()["state"] == "warming")
        client.load_cancel()
        thread.join(20)
        assert ended == ["CANCELLED"] and client.status()["state"] == "empty"
        assert client.load(nano)["state"] == "ready"


def test_a_builder_asked_for_while_others_are_measured_is_kept(nano, start):
    daemon = start(model=None, state="empty", real=True, env={"KD_BUILDER_NAME": ""})
    thread = threading.Thread(target=lambda: daemon.client().load(nano))
    thread.start()
    with daemon.client() as client:
        until(lambda: client.status()["state"] == "warming")
        client.use_builder("heap", 20)
        thread.join(20)
        stats = client.status()["stats"]
        assert (stats["builder"], stats["builder_budget"]) == ("heap", 20)


def test_a_builder_that_is_not_there_is_a_bad_configuration(nano, start):
    daemon = start(None, "--builder", "nosuch", model=nano, real=True, state=None)
    assert daemon.end() == 78
    assert "no builder 'nosuch'" in daemon.log()


# ---- more connections than a login shell allows files


def test_as_many_files_as_may_be_had(start):
    def few():
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

    daemon = start(preexec_fn=few)
    with daemon.client() as client:
        idle = []
        for _ in range(600):
            s = socket.socket(socket.AF_UNIX)
            until(lambda s=s: s.connect_ex(client.endpoints["serve"].removeprefix("ipc://")) == 0)
            idle.append(s)
        assert client.generate([5, 6, 7], max_tokens=3).finish == "length"
        for s in idle:
            s.close()


def test_a_refusal_does_not_wait_for_a_full_pipe(tmp_path):
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        while True:
            os.write(writer, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(writer, True)
    command = [sys.executable, "-m", "kd", "--set", "engine.tp=3", "--set", f"server.runtime_dir={tmp_path}"]
    assert subprocess.run(command, env=ENV, stderr=writer, timeout=30).returncode == 78
    os.close(reader)
    os.close(writer)
