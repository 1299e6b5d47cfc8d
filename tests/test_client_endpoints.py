"""Which daemon a client speaks to: the one that was named, never another that happens to be there."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from daemons import ENV, Daemon

from kd.client import Client, KdClientError

NOWHERE = "tcp://127.0.0.1:1"  # nothing listens there


@pytest.fixture
def local(tmp_path, monkeypatch):
    """The default instance of this machine, alive: what an endpoint elsewhere must not fall back to."""
    daemon = Daemon(tmp_path, fake={}).wait()
    monkeypatch.setenv("KD_SERVER_RUNTIME_DIR", str(tmp_path))
    yield daemon
    daemon.kill()


@pytest.mark.parametrize("call", ["stop", "unload", "drain", "load_cancel", "cancel_all"])
def test_an_endpoint_elsewhere_never_reaches_the_local_daemon(local, call):
    with Client(NOWHERE, timeout_s=0.3) as client, pytest.raises(KdClientError) as caught:
        if call == "cancel_all":
            client.cancel_all(operator=True)
        else:
            getattr(client, call)()
    assert caught.value.name in ("BAD_ENDPOINT", "NO_ANSWER", "TIMEOUT")
    assert local.process.poll() is None
    with local.client() as client:
        assert client.status()["state"] != "draining"


@pytest.mark.parametrize("call", ["status", "ps", "ping", "builders"])
def test_questions_do_not_fall_back_either(local, call):
    with Client(NOWHERE, timeout_s=0.3) as client, pytest.raises(KdClientError) as caught:
        getattr(client, call)()
    assert caught.value.name in ("NO_ANSWER", "TIMEOUT")


def test_the_missing_control_endpoint_is_named():
    with Client(NOWHERE) as client, pytest.raises(KdClientError, match="--control-endpoint") as caught:
        client.unload()
    assert caught.value.name == "BAD_ENDPOINT"


def test_events_of_an_unknown_endpoint_are_refused(local):
    with Client(NOWHERE) as client, pytest.raises(KdClientError) as caught:
        next(client.events(timeout_s=0.1))
    assert caught.value.name == "BAD_ENDPOINT"


@pytest.mark.parametrize(
    "endpoint", ["foo", "tcp://", "tcp://host", "tcp://host:port", "ipc://", "inproc://x", "http://x:1", ""]
)
def test_what_is_no_endpoint_is_refused_at_once(endpoint):
    for given in ({"endpoint": endpoint or "?"}, {"control": endpoint or "?"}):
        with pytest.raises(KdClientError) as caught:
            Client(**given)
        assert caught.value.name == "BAD_ENDPOINT" and "tcp://HOST:PORT" in caught.value.message


def test_an_endpoint_that_cannot_be_connected_to_does_not_hang(tmp_path):
    """A path too long for a socket, a port beyond the last: an error, and close() returns."""
    began = time.monotonic()
    for endpoint in (f"ipc://{tmp_path}/{'x' * 200}/serve.sock", "tcp://127.0.0.1:99999"):
        with Client(endpoint, timeout_s=0.3) as client, pytest.raises(KdClientError):
            client.ping()
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("verb", [["generate", "x"], ["status"], ["stop"], ["ps"]])
def test_kdctl_says_so_as_a_usage_error(verb):
    done = subprocess.run(
        [sys.executable, "-m", "kdctl", "--endpoint", "foo", *verb], capture_output=True, text=True, timeout=20, env=ENV
    )
    assert done.returncode == 2 and "no endpoint" in done.stderr and "Traceback" not in done.stderr
