"""What clients ask of a daemon, on the fake engine: requests, credit, cancel, identity, signs of life, admission."""

from __future__ import annotations

import os
import threading
import time
from types import SimpleNamespace

import pytest
from daemons import Daemon, Raw, starter, until
from fake_engine import hash_at, token_at

from kd import protocol, wire
from kd.client import KdClientError


def new_id() -> bytes:
    return os.urandom(16)


start = pytest.fixture(starter)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """One daemon for tests that leave it as it was."""
    daemon = Daemon(tmp_path_factory.mktemp("shared"), fake={"token_delay_s": 0.001}).wait()
    yield daemon
    daemon.kill()


# ---- requests


def test_a_stream_has_every_token_once_and_proves_it(shared):
    prompt = list(b"hello")
    with shared.client() as client:
        stream = client.stream(prompt, max_tokens=101, hash_logits=True, logprobs=True, credit=4)
        chunks = list(stream)
    result = stream.result
    assert result.tokens == [token_at(prompt, i) for i in range(101)]
    assert result.hashes == [hash_at(prompt, i) for i in range(101)]
    assert result.logprobs == [-0.5] * 101
    assert result.text == bytes(result.tokens).decode()
    assert (result.finish, result.error, result.prompt_tokens) == ("length", None, 5)
    assert result.rounds == 51 and result.accepted == 50
    assert max(len(c.tokens) for c in chunks) == 2


def test_text_and_chat_are_encoded_in_the_daemon(shared):
    with shared.client() as client:
        assert client.generate("hello", max_tokens=9).tokens == client.generate(list(b"hello"), max_tokens=9).tokens
        chat = client.chat("hi", max_tokens=9)
        assert chat.tokens == client.generate(list(b"user:hi\n"), max_tokens=9).tokens
        assert client.tokenize("ab\n") == [97, 98, 10]
        assert client.detokenize([0xC3, 0xA9]) == "é"
        with pytest.raises(KdClientError) as caught:
            client.detokenize([1000])
        assert caught.value.name == "TOKEN"


def test_bytes_that_are_no_text_arrive_raw(shared):
    with Raw(shared.serve) as raw:
        raw.ask("DETOKENIZE", new_id(), {"tokens": wire.pack_ids([65, 255])})
        _, _, body = raw.get()
        assert body["text"] == "A\ufffd" and body["raw"] == b"A\xff"


def test_many_streams_on_one_connection_do_not_mix(shared):
    with shared.client() as client:
        streams = [client.stream([i + 3], max_tokens=20 + i) for i in range(20)]
        results = [s.read() for s in reversed(streams)][::-1]
    for i, result in enumerate(results):
        assert result.tokens == [token_at([i + 3], k) for k in range(20 + i)]


def test_many_clients_at_once(shared):
    wrong = []

    def one(i):
        with shared.client() as client:
            for k in range(3):
                if client.generate([i, k], max_tokens=15).tokens != [token_at([i, k], n) for n in range(15)]:
                    wrong.append(i)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(1, 11)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not wrong


def test_a_seed_is_drawn_and_told(shared):
    with shared.client() as client:
        seeds = {client.generate([1], max_tokens=1).seed for _ in range(5)}
        assert len(seeds) == 5
        assert client.generate([1], max_tokens=1, seed=7).seed == 7


@pytest.mark.parametrize(
    "options, name",
    [
        ({"max_tokens": 5000}, "CONTEXT"),
        ({"tokens": [511, 512]}, "TOKEN"),
        ({"builder": "oak"}, "NOT_FOUND"),
        ({"budget": 3}, "BAD_FIELD"),
        ({"temperature": 101.0}, "BAD_FIELD"),
        ({"max_tokens": 0}, "BAD_FIELD"),
    ],
)
def test_a_bad_request_fails_alone_with_its_reason(shared, options, name):
    options = {"tokens": [1], "max_tokens": 5, **options}
    with shared.client() as client:
        running = client.stream([9], max_tokens=30)
        with pytest.raises(KdClientError) as caught:
            client.generate(options.pop("tokens"), **options)
        assert caught.value.name == name and len(caught.value.message) > 20
        assert running.read().finish == "length"


def test_an_empty_prompt_is_refused(shared):
    with shared.client() as client, pytest.raises(KdClientError, match="empty"):
        client.generate("")


def test_a_long_prompt_is_refused_before_it_is_encoded(shared):
    with shared.client() as client:
        with pytest.raises(KdClientError) as caught:
            client.generate("x" * (4096 * 256 + 1), max_tokens=1)
        assert caught.value.name == "CONTEXT" and "4096" in caught.value.message


# ---- credit


def test_without_credit_a_request_waits_and_others_go_on(shared):
    ident = new_id()
    with Raw(shared.serve) as raw, shared.client() as client:
        raw.ask("GENERATE", ident, {"tokens": wire.pack_ids([5]), "max_tokens": 40, "credit": 3})
        assert raw.until("ACCEPTED")[1] == ident
        got = [raw.until("PARTIAL")[2] for _ in range(3)]
        assert client.generate([6], max_tokens=50).finish == "length"  # a whole request passes meanwhile
        assert raw.get(0.3) is None
        raw.ask("CREDIT", new_id(), {"request": ident, "frames": 2})
        got += [raw.until("PARTIAL")[2] for _ in range(2)]
        assert raw.get(0.3) is None
        raw.ask("CREDIT", new_id(), {"request": ident, "frames": 4096})
        while (message := raw.get())[0] == "PARTIAL":
            got.append(message[2])
        final = message[2]
        assert message[0] == "FINAL" and [b["seq"] for b in got] == list(range(len(got))) and final["seq"] == len(got)
        tokens = [t for b in [*got, final] for t in b["tokens"]]
        assert tokens == [token_at([5], i) for i in range(40)]
        assert (final["total_tokens"], final["frames"]) == (40, len(got) + 1)
        assert final["token_hash"] == wire.hash_ids(tokens).to_bytes(8, "little")


def test_a_request_without_credit_for_too_long_ends_as_slow_reader(start):
    daemon = start({}, "--set", "engine.slow_reader_timeout_ms=300")
    with Raw(daemon.serve) as raw:
        raw.ask("GENERATE", new_id(), {"tokens": wire.pack_ids([5]), "max_tokens": 40, "credit": 1})
        _, _, final = raw.until("FINAL")
        assert (final["finish"], final["name"], final["code"]) == ("error", "SLOW_READER", 23)
        assert "slow_reader" in final["message"]


# ---- cancel, identity, idempotence


def test_cancel_has_an_answer(shared):
    with shared.client() as client, shared.client() as other:
        stream = client.stream([4], max_tokens=4000)
        next(iter_ := iter(stream))
        assert other.cancel(stream.ident) == "not_found"  # it is not theirs
        assert client.cancel(stream.ident) == "cancelled"
        for _ in iter_:
            pass
        assert (stream.result.finish, stream.result.error) == ("cancelled", "CANCELLED")
        assert stream.result.message == "the client cancelled the request"
        assert client.cancel(stream.ident) == "already_done"
        assert client.cancel(new_id()) == "not_found"
        assert client.cancel(stream.ident, operator=True) == "already_done"


def test_the_operator_cancels_anybodys(shared):
    with shared.client() as client, shared.client() as operator:
        stream = client.stream([4], max_tokens=4000)
        next(iter(stream_iter := iter(stream)))
        assert operator.ps()[0]["request"] == stream.ident.hex()
        assert operator.cancel(stream.ident, operator=True) == "cancelled"
        for _ in stream_iter:
            pass
        assert stream.result.finish == "cancelled"


def test_closing_a_stream_early_cancels_it(shared):
    with shared.client() as client:
        for _ in client.stream([4], max_tokens=4000):
            break
        until(lambda: not client.ps(), why="the request is gone")


def test_another_client_cannot_steer_a_request(start):
    daemon = start({"token_delay_s": 0.002})
    ident = new_id()
    with Raw(daemon.serve) as owner, Raw(daemon.serve) as thief:
        owner.ask("GENERATE", ident, {"tokens": wire.pack_ids([5]), "max_tokens": 30, "credit": 1})
        owner.until("PARTIAL")
        thief.ask("CREDIT", new_id(), {"request": ident, "frames": 100})
        thief.ask("CANCEL", new_id(), {"request": ident})
        assert thief.until("CANCELLED")[2]["result"] == "not_found"
        thief.ask("PS", new_id(), {})
        assert thief.until("REQUESTS")[2]["requests"] == []
        assert owner.get(0.3) is None  # the stolen credit bought nothing
        thief.ask("GENERATE", ident, {"tokens": wire.pack_ids([7]), "max_tokens": 2})  # the same id is another's
        assert thief.until("FINAL")[2]["total_tokens"] == 2
        owner.ask("CREDIT", new_id(), {"request": ident, "frames": 100})
        assert owner.until("FINAL")[2]["total_tokens"] == 30


def test_the_same_id_is_the_same_request(shared):
    ident, body = new_id(), {"tokens": wire.pack_ids([5]), "max_tokens": 30, "credit": 1, "seed": 1}
    with Raw(shared.serve) as raw, shared.client() as client:
        raw.ask("GENERATE", ident, body)
        raw.until("PARTIAL")
        raw.ask("GENERATE", ident, body)
        assert raw.until("ACCEPTED")[2]["duplicate"] is True
        raw.ask("GENERATE", ident, {**body, "max_tokens": 31})
        assert raw.until("ERROR")[2]["name"] == "CONFLICT"
        assert len(client.ps()) == 1
        raw.ask("CREDIT", new_id(), {"request": ident, "frames": 100})
        assert raw.until("FINAL")[2]["total_tokens"] == 30
        raw.ask("GENERATE", ident, body)
        assert raw.until("ERROR")[2]["name"] == "ALREADY_DONE"


def test_deadline(shared):
    with shared.client() as client:
        result = client.stream([5], max_tokens=4000, deadline_ms=200).read()
        assert (result.finish, result.error) == ("cancelled", "TIMEOUT")


# ---- signs of life


def test_a_silent_client_loses_its_requests_with_its_lease(start):
    daemon = start({"token_delay_s": 0.005}, "--set", "server.client_timeout_ms=1000")
    with Raw(daemon.serve) as raw:
        began = time.monotonic()
        raw.ask("GENERATE", new_id(), {"tokens": wire.pack_ids([5]), "max_tokens": 4000, "credit": 4096})
        _, _, final = raw.until("FINAL")
        assert (final["finish"], final["name"]) == ("cancelled", "LEASE_EXPIRED")
        assert time.monotonic() - began > 0.9
    assert ended(daemon)["error"] == "LEASE_EXPIRED"
    with daemon.client() as client:  # an honest one pings, and outlives many leases
        assert client.generate([5], max_tokens=600, lease_ms=1000).finish == "length"


def test_beats_come_while_a_request_is_open(start):
    daemon = start({})
    with Raw(daemon.serve) as raw:
        raw.ask("GENERATE", new_id(), {"tokens": wire.pack_ids([5]), "max_tokens": 50, "credit": 1})
        assert raw.until("BEAT", 5)[1] == protocol.NO_ID


# ---- admission


def test_a_full_queue_is_busy_and_encodes_nothing(start):
    daemon = start({"token_delay_s": 0.02}, "--set", "engine.max_streams=2", "--set", "engine.max_queue=3")
    with daemon.client() as client:
        streams = [client.stream([i], max_tokens=50) for i in range(1, 6)]
        encoded = client.status()["stats"]["encoded"]
        with pytest.raises(KdClientError) as caught:
            client.generate("text that would have to be encoded")
        assert caught.value.name == "BUSY" and caught.value.body["retry_ms"] > 0
        assert client.status()["stats"]["encoded"] == encoded
        for stream in streams:
            assert stream.read().finish == "length"
        assert client.generate("now it fits", max_tokens=2).finish == "length"


def test_one_client_cannot_have_too_many(start):
    daemon = start({"token_delay_s": 0.02}, "--set", "server.max_requests_client=2")
    with daemon.client() as client, daemon.client() as other:
        streams = [client.stream([i], max_tokens=50) for i in (1, 2)]
        with pytest.raises(KdClientError) as caught:
            client.generate([3])
        assert caught.value.name == "BUSY"
        assert other.generate([4], max_tokens=2).finish == "length"
        for stream in streams:
            stream.close()


# ---- what the log says of requests that were left


def ended(daemon) -> dict:
    return until(lambda: next((r for r in daemon.records() if r["message"] == "request ended"), None))


def long_request(raw) -> bytes:
    ident = new_id()
    raw.ask("GENERATE", ident, {"tokens": wire.pack_ids([5]), "max_tokens": 4000, "credit": 4096})
    raw.until("PARTIAL")
    return ident


def test_the_log_tells_who_ended_a_request(start):
    daemon = start({"token_delay_s": 0.005})
    with Raw(daemon.serve) as raw:
        long_request(raw)
    record = ended(daemon)
    assert record["reason"] == "the client is gone" and "error" not in record


@pytest.mark.parametrize("operator", [False, True])
def test_the_log_tells_a_cancel_from_a_client_that_left(start, operator):
    daemon = start({"token_delay_s": 0.005})
    with Raw(daemon.serve) as raw, daemon.client() as other:
        ident = long_request(raw)
        if operator:
            other.cancel(ident, operator=True)
        else:
            raw.ask("CANCEL", new_id(), {"request": ident})
    record = ended(daemon)
    assert record["reason"] == (
        "the operator cancelled the request" if operator else "the client cancelled the request"
    )
    assert "error" not in record


def test_the_first_reason_for_an_end_stands():
    """Ctrl-C: the client cancels, and is gone before the engine has ended the request."""
    from kd.serve_socket import CLIENT_GONE, ServeThread
    from kd.sessions import Hub

    serve = object.__new__(ServeThread)
    serve.hub = Hub(8, 1000)
    session, _ = serve.hub.open(b"peer", new_id(), {"credit": 1, "deadline_ms": 0, "lease_ms": 0, "seed": 1})
    serve.end_early(session, ("CANCELLED", "the first"))
    serve.end_early(session, ("LEASE_EXPIRED", CLIENT_GONE))
    assert session.cancelled and session.verdict == ("CANCELLED", "the first")


@pytest.mark.parametrize(("status", "prepared_again"), [(-26, False), (-20, True)])
def test_a_text_without_a_token_yet_ends_with_its_unloaded_model(status, prepared_again):
    """It is prepared again for the model that took the place of the one it waited for, not where there is none."""
    from kd.serve_socket import ServeThread
    from kd.sessions import Hub

    serve, done = object.__new__(ServeThread), []
    serve.hub = Hub(8, 1000)
    serve.d = SimpleNamespace(engine=SimpleNamespace(text_side=lambda: SimpleNamespace(id=0)))
    serve._again, serve._finish = lambda s: done.append("again"), lambda s, chunk, *end: done.append(end)
    body = {"credit": 1, "deadline_ms": 0, "lease_ms": 0, "seed": 1, "hash_logits": False, "logprobs": False}
    session, _ = serve.hub.open(b"peer", new_id(), body)
    session.state, session.accepted, session.text_id = "running", True, 7
    end = {"type": "end", "user": session.user, "status": status, "finish": "cancelled" if status == -26 else "error"}
    nothing = {
        "tokens": (),
        "nodes": 0,
        "cached_tokens": 0,
        "text": b"",
        "builder_generation": 1,
        "weights_generation": 1,
    }
    serve._event(SimpleNamespace(**end, **nothing))
    unloaded = ("cancelled", "CANCELLED", "the model was unloaded before the request had come to its end")
    assert done == (["again"] if prepared_again else [unloaded])


def test_a_client_that_left_before_it_was_accepted_is_no_error():
    from kd.serve_socket import CLIENT_GONE, _blame

    assert _blame("LEASE_EXPIRED", CLIENT_GONE) is None and _blame("CANCELLED", "before it was accepted") is None
    assert _blame("LEASE_EXPIRED", "nothing was heard") == "LEASE_EXPIRED" and _blame(None, None) is None


def test_a_stop_waits_for_its_last_operation(tmp_path):
    """Whatever the operations thread still does, it does not meet a closed engine."""
    from types import SimpleNamespace

    from fake_engine import FakeEngine, KdError

    from kd import config as configuration
    from kd import server
    from kd.logs import Log

    class Slow(FakeEngine):
        def drain(self, on=True):
            time.sleep(0.3)  # the operation takes so long; the control loop has nothing else to wait for
            if self.closed:
                raise KdError(-20, "KD_E_STATE", "this engine is closed; open another one")
            super().drain(on)

    with (tmp_path / "log").open("wb") as log:
        config = configuration.load(env={}, flags={"server.runtime_dir": str(tmp_path), "server.instance": "t"})
        made = server.Daemon(config, Log(log.fileno()), Slow, SimpleNamespace)
        made.exit_now = lambda status: None
        ended: list[int] = []
        runner = threading.Thread(target=lambda: ended.append(made.run()), daemon=True)
        runner.start()
        until(lambda: made.state.started)
        made.control.call(made.control.stop, 0)
        runner.join(20)
        assert ended == [0]
        made.control.operations.join(10)
    text = (tmp_path / "log").read_text()
    assert '"stopped"' in text and "operation failed" not in text and "stuck" not in text, text


def test_detokenize_takes_so_many_ids_and_no_more(shared):
    ids = [97] * wire.MAX_DETOKENIZE
    with shared.client() as client:
        assert client.detokenize(ids) == "a" * len(ids)
        with pytest.raises(KdClientError) as caught:
            client.detokenize([*ids, 97])
        assert caught.value.name == "BAD_FIELD" and str(wire.MAX_DETOKENIZE) in caught.value.message


@pytest.mark.parametrize(
    "piece, fits", [(b"a" * 128, True), (b"a" * 129, False), (b"\xff" * 42, True), (b"\xff" * 43, False)]
)
def test_detokenize_gives_no_text_that_a_reply_cannot_hold(piece, fits):
    """A token has up to 256 bytes, and bytes that are no text go twice: as replacement characters and raw."""
    from types import SimpleNamespace

    from kd import protocol, verbs

    tokenizer = SimpleNamespace(n_vocab=1, decode_bytes=lambda ids: piece * len(ids))
    daemon = SimpleNamespace(
        engine=SimpleNamespace(text_side=lambda: SimpleNamespace(tokenizer=tokenizer)), model_path="/m"
    )
    body = {"tokens": [0] * wire.MAX_DETOKENIZE}
    if fits:
        kind, reply = verbs.detokenize(daemon, body)
        assert protocol.decode(protocol.encode(kind, new_id(), reply), "reply")[2]["text"] == reply["text"]
    else:
        with pytest.raises(wire.ProtocolError) as caught:
            verbs.detokenize(daemon, body)
        assert caught.value.name == "TOO_LARGE"


@pytest.mark.parametrize("verb", ["generate", "use_builder"])
def test_a_budget_out_of_range_names_the_setting(shared, verb):
    with shared.client() as client, pytest.raises(KdClientError, match="engine.max_nodes") as caught:
        if verb == "generate":
            client.generate([1], max_tokens=2, builder="chain", budget=257)
        else:
            client.use_builder("chain", 257)
    assert caught.value.name == "BAD_FIELD"
