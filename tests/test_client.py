"""kd.Client: what it says when things are wrong, and against the real engine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import zmq
from daemons import ENV, Daemon, starter, until
from fake_engine import token_at

import kd
from kd import protocol, wire
from kd.client import Client, KdClientError

start = pytest.fixture(starter)


@pytest.fixture(scope="module")
def fake(tmp_path_factory):
    daemon = Daemon(tmp_path_factory.mktemp("fake"), fake={"token_delay_s": 0.001}).wait()
    yield daemon
    daemon.kill()


@pytest.fixture(scope="module")
def real(tmp_path_factory, library, nano):
    """The real engine on the embedded model."""
    daemon = Daemon(tmp_path_factory.mktemp("real"), model=nano, fake=None).wait(timeout_s=120)
    yield daemon
    daemon.kill()


def test_no_daemon_names_the_socket_and_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setenv("KD_SERVER_RUNTIME_DIR", str(tmp_path))
    with kd.Client(instance="nobody") as client, pytest.raises(KdClientError) as caught:
        client.generate("x")
    assert caught.value.name == "NOT_RUNNING"
    assert str(tmp_path / "nobody" / "serve.sock") in caught.value.message
    assert "kdctl --instance nobody start" in caught.value.message


def test_a_client_needs_no_native_library():
    code = (
        "import sys, kd; kd.Client(); "
        "bad = {'kd.native', 'kd.engine', 'numpy', 'cffi', 'tiktoken', 'torch', 'jinja2'} & set(sys.modules); "
        "sys.exit(f'imported {bad}' if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=ENV, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def impostor(tmp_path):
    """A ROUTER that answers what the test wants."""
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.linger = 0
    socket.bind(f"ipc://{tmp_path}/serve.sock")
    yield socket, Client(f"ipc://{tmp_path}/serve.sock", timeout_s=0.5, stream_timeout_s=0.5)
    socket.close(0)
    context.term()


def generate_id(socket) -> tuple[bytes, bytes]:
    """(peer, id) of the next GENERATE."""
    while True:
        peer, *frames = socket.recv_multipart()
        kind, ident, _ = protocol.decode(frames, "serve")
        if kind == "GENERATE":
            return peer, ident


FINAL = {"text": "", "finish": "stop", "code": 0, "prompt_tokens": 1, "cached_tokens": 0, "nodes": 0}


@pytest.mark.parametrize(
    "frames, word",
    [
        ([("PARTIAL", {"seq": 1, "tokens": b"", "text": ""})], "frame 0"),
        (
            [
                (
                    "FINAL",
                    {
                        **FINAL,
                        "seq": 0,
                        "tokens": b"",
                        "total_tokens": 1,
                        "frames": 1,
                        "token_hash": wire.hash_ids([]).to_bytes(8, "little"),
                    },
                )
            ],
            "not what its end says",
        ),
        (
            [
                (
                    "FINAL",
                    {
                        **FINAL,
                        "seq": 0,
                        "tokens": wire.pack_ids([7]),
                        "total_tokens": 1,
                        "frames": 1,
                        "token_hash": wire.hash_ids([8]).to_bytes(8, "little"),
                    },
                )
            ],
            "not what its end says",
        ),
        (
            [
                (
                    "FINAL",
                    {
                        **FINAL,
                        "seq": 0,
                        "tokens": wire.pack_ids([7]),
                        "total_tokens": 1,
                        "frames": 2,
                        "token_hash": wire.hash_ids([7]).to_bytes(8, "little"),
                    },
                )
            ],
            "not what its end says",
        ),
    ],
)
def test_what_was_lost_is_noticed(impostor, frames, word):
    socket, client = impostor
    stream = client.stream([1])
    peer, ident = generate_id(socket)
    for kind, body in frames:
        socket.send_multipart([peer, *protocol.encode(kind, ident, body)])
    with pytest.raises(KdClientError, match=word) as caught:
        stream.read()
    assert caught.value.name == "LOST"
    client.close()


def test_silence_has_an_end(impostor):
    _, client = impostor
    began = time.monotonic()
    with pytest.raises(KdClientError) as caught:
        client.ping()
    assert caught.value.name == "NO_ANSWER"
    with pytest.raises(KdClientError) as caught:
        client.generate([1])
    assert caught.value.name == "NO_ANSWER" and time.monotonic() - began < 5
    client.close()


def test_nonsense_from_a_daemon_is_an_error(impostor):
    socket, client = impostor
    stream = client.stream([1])
    peer, _ = generate_id(socket)
    socket.send_multipart([peer, b"KDP1", b"\x00", b"\x00"])
    with pytest.raises(KdClientError) as caught:
        stream.read()
    assert caught.value.name == "MALFORMED"
    client.close()


def test_unknown_reply_types_and_fields_are_ignored(impostor):
    socket, client = impostor
    stream = client.stream([1])
    peer, ident = generate_id(socket)
    socket.send_multipart([peer, *protocol.encode("TRACE", ident, {"a": 1})])
    socket.send_multipart(
        [
            peer,
            *protocol.encode(
                "FINAL",
                ident,
                {
                    **FINAL,
                    "seq": 0,
                    "tokens": b"",
                    "total_tokens": 0,
                    "frames": 1,
                    "later": [1],
                    "token_hash": wire.hash_ids([]).to_bytes(8, "little"),
                },
            ),
        ]
    )
    assert stream.read().finish == "stop"
    client.close()


def test_options_are_checked(fake):
    with fake.client() as client:
        with pytest.raises(ValueError, match="temprature"):
            client.generate("x", temprature=1)
        with pytest.raises(ValueError):
            client.generate()
        with pytest.raises(ValueError):
            client.generate("x", messages=[])


def test_a_stream_survives_other_calls_in_between(fake):
    with fake.client() as client:
        got = []
        for chunk in client.stream([9], max_tokens=60):
            got += chunk.tokens
            client.ping()
            client.ps(own=True)
        assert got == [token_at([9], i) for i in range(60)]


def test_a_client_does_not_cross_a_fork(fake):
    client = fake.client()
    client.ping()
    pid = os.fork()
    if pid == 0:
        try:
            client.ping()
        except KdClientError as error:
            os._exit(0 if error.name == "LOST" else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    client.close()


def test_a_daemon_that_goes_while_we_connect_is_missed_soon(tmp_path):
    path = tmp_path / "serve.sock"
    with socket.socket(socket.AF_UNIX) as listener, Client(f"ipc://{path}", timeout_s=30) as client:
        listener.bind(str(path))
        listener.listen()
        threading.Timer(0.3, listener.close).start()
        began = time.monotonic()
        with pytest.raises(KdClientError) as caught:
            client.hello()
        assert caught.value.name == "NOT_RUNNING" and time.monotonic() - began < 10


def test_the_daemon_dying_ends_a_stream_soon(tmp_path):
    daemon = Daemon(tmp_path, fake={"token_delay_s": 0.01}).wait()
    with daemon.client(stream_timeout_s=60) as client:
        stream = client.stream([1], max_tokens=4000)
        next(stream)
        daemon.kill()
        began = time.monotonic()
        with pytest.raises(KdClientError) as caught:
            stream.read()
        assert caught.value.name in ("NOT_RUNNING", "NO_ANSWER") and time.monotonic() - began < 8


# ---- the real engine


def test_real_trees_change_no_bit(real):
    with real.client() as client:
        for options in ({}, {"temperature": 0.8, "seed": 3}, {"temperature": 1.0, "seed": 4, "top_p": 0.9}):
            fixed = {"max_tokens": 40, "hash_logits": True, "ignore_eos": True, **options}
            plain = client.generate("def add(a, b):\n", builder="none", cold=True, **fixed)
            trees = client.generate("def add(a, b):\n", builder="heap", **fixed)
            assert trees.tokens == plain.tokens and trees.hashes == plain.hashes
            assert len(plain.hashes) == 40 and plain.rounds == 40 and trees.rounds < 40


def test_real_text_is_the_tokens_text(real):
    with real.client() as client:
        result = client.generate("# naïve café 🎉\ndef f():\n", max_tokens=30)
        assert result.text == client.detokenize(result.tokens) or result.finish == "stop"
        assert result.prompt_tokens == len(client.tokenize("# naïve café 🎉\ndef f():\n"))


def test_real_stop_strings_end_before_them(real):
    with real.client() as client:
        free = client.generate("def f(x):\n", max_tokens=60, ignore_eos=True)
        word = free.text[10:14]
        cut = client.generate("def f(x):\n", max_tokens=60, ignore_eos=True, stop=word)
        assert cut.finish == "stop" and cut.text == free.text[: free.text.index(word)]


def test_real_context_is_an_error_not_a_cut(real):
    with real.client() as client:
        most = client.hello()["model"]["max_positions"]
        with pytest.raises(KdClientError) as caught:
            client.generate([5] * (most - 3), max_tokens=4)
        assert caught.value.name == "CONTEXT"


def test_real_builder_swap_under_load_changes_nothing(real):
    with real.client() as client, real.client() as operator:
        want = client.generate("class Tree:\n", max_tokens=80, builder="none", ignore_eos=True).tokens
        got, seen = [], set()
        for i, chunk in enumerate(client.stream("class Tree:\n", max_tokens=80, ignore_eos=True)):
            operator.use_builder(("none", "chain", "heap")[i % 3])
            got += chunk.tokens
            seen.add(chunk.builder_generation)
        operator.use_builder("heap")
        assert got == want and len(seen) > 1


def test_real_killed_client_gives_everything_back(real):
    code = (
        "import sys; from kd.client import Client\n"
        "for _ in Client(sys.argv[1]).stream('def f():', max_tokens=1500, ignore_eos=True, credit=4096, cold=True):\n"
        "    print('token', flush=True)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, real.serve], env=ENV, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"token\n"
    with real.client() as client:
        assert len(client.ps()) == 1
        process.kill()
        process.wait()
        began = time.monotonic()
        until(lambda: not client.ps(), 10)
        assert time.monotonic() - began < 5
        stats = until(lambda: (s := client.status()["stats"])["streams"] == 0 and s)
        assert stats["pages_free"] + stats["pages_cached"] == stats["pages_total"]


def test_real_unload_and_load(tmp_path, library, nano):
    daemon = Daemon(tmp_path, model=nano, fake=None).wait(timeout_s=120)
    try:
        with daemon.client() as client:
            first = client.generate("def f():", max_tokens=10).tokens
            assert client.unload() > 1 << 20
            phases = []
            client.load(str(nano), progress=lambda p: phases.append(p["phase"]))
            assert client.generate("def f():", max_tokens=10).tokens == first
            assert client.status()["model"]["weights_generation"] == 2
            client.unload()
            with pytest.raises(KdClientError) as caught:
                client.load(str(tmp_path))
            assert caught.value.name in ("IO", "MODEL") and str(tmp_path) in caught.value.message
        assert daemon.end(signal.SIGTERM) == 0
    finally:
        daemon.kill()


def test_real_sigterm_finishes_streams(tmp_path, library, nano):
    daemon = Daemon(tmp_path, model=nano, fake=None).wait(timeout_s=120)
    try:
        with daemon.client() as client:
            streams = [client.stream(p, max_tokens=200, ignore_eos=True) for p in ("a = 1", "b = 2", "c = 3")]
            for stream in streams:
                next(stream)
            daemon.process.send_signal(signal.SIGTERM)
            assert [(r.finish, len(r.tokens)) for r in (s.read() for s in streams)] == [("length", 200)] * 3
        assert daemon.end() == 0
    finally:
        daemon.kill()


def test_real_damaged_model_is_65_and_named(tmp_path, library, nano):
    import shutil

    broken = tmp_path / "broken"
    shutil.copytree(nano, broken)
    shard = broken / "model-00002-of-00002.safetensors"
    with shard.open("r+b") as f:
        f.truncate(shard.stat().st_size - 100)
    daemon = Daemon(tmp_path, model=broken, fake=None)
    assert daemon.end(timeout_s=60) == 65
    assert "model-00002-of-00002.safetensors" in daemon.log()


def test_real_idle_daemon_costs_nothing(real):
    with real.client() as client:
        client.generate("x", max_tokens=3)
    assert real.idles()


def test_what_cannot_be_written_is_said(fake):
    with fake.client() as client:
        for ask in (
            lambda: client.generate([-1], max_tokens=1),
            lambda: client.generate([1], max_tokens=1, stop_ids=[-1]),
            lambda: client.generate([1], max_tokens=1, seed=1 << 64),
            lambda: client.detokenize([-1]),
            lambda: client.tokenize("\udcff"),
            lambda: client.generate("a\udcff", max_tokens=1),
        ):
            with pytest.raises(KdClientError) as caught:
                ask()
            assert caught.value.name == "BAD_FIELD"
        assert client.generate([5, 6], max_tokens=2).finish == "length"


@pytest.mark.parametrize(
    ("draft", "sent"), [("auto", "auto"), ("none", "none"), ("", ""), ("d", os.path.abspath("d")), ("/d", "/d")]
)
def test_load_names_a_drafter_from_the_folder_of_the_client(monkeypatch, draft, sent):
    """As it does the model: the daemon's own folder is another."""
    bodies = []
    monkeypatch.setattr(Client, "_call", lambda self, kind, body, *_: bodies.append(body))
    object.__new__(Client).load("m", draft=draft)
    assert bodies == [{"path": os.path.abspath("m"), "draft": sent}]


def test_what_a_daemon_said_before_it_left_is_still_read(start):
    daemon = start({"token_delay_s": 0.01})
    with daemon.client() as client:
        streams = [client.stream([i], max_tokens=100) for i in (1, 2, 3)]
        next(iter(streams[0]))
        assert daemon.end(signal.SIGTERM) == 0
        time.sleep(0.2)  # the connection is seen to be gone
        assert [(s.read().finish, len(s.result.tokens)) for s in streams] == [("length", 100)] * 3
        with pytest.raises(KdClientError) as caught:
            client.generate([1])
        assert caught.value.name == "NOT_RUNNING" and not client._sockets
