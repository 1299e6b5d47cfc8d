"""kd.Engine on the embedded model: requests, events, streams, threads, builders."""

import gc
import select
import threading
import time
from dataclasses import fields
from pathlib import Path

import pytest
from engine_events import drain, nothing_left, settled, tokens_of

from kd import Engine, KdError, Sampling
from kd.engine import Event

ROOT = Path(__file__).resolve().parent.parent
PROMPT = "def fib(n):\n"


@pytest.fixture(scope="module")
def engine(library, nano):
    with Engine(nano, threads=2, library=library) as opened:
        yield opened


# ---- submit and poll ---------------------------------------------------------------------------------------


def test_events_of_several_requests(engine):
    prompts = [PROMPT, "class A:\n", "import ", "x = [1, 2, 3]\n"]
    ids = [
        engine.submit(
            engine.tokenizer.encode(p),
            max_tokens=20,
            ignore_eos=True,
            hash_logits=i % 2 == 0,
            logprobs=i % 2 == 1,
            user=100 + i,
        )
        for i, p in enumerate(prompts)
    ]
    assert len(set(ids)) == 4 and 0 not in ids
    events = drain(engine, ids)
    for i, (request, prompt) in enumerate(zip(ids, prompts, strict=True)):
        mine = events[request]
        assert all(isinstance(e, Event) and e.user == 100 + i for e in mine)
        assert [e.sequence for e in mine] == list(range(len(mine)))
        assert [e.type for e in mine] == ["tokens"] * (len(mine) - 1) + ["end"]
        assert (mine[-1].finish, mine[-1].status, mine[-1].total_tokens) == ("length", 0, 20)
        assert all(e.finish is None for e in mine[:-1])
        for e in mine:
            assert len(e.hashes) == (len(e.tokens) if i % 2 == 0 else 0)
            assert len(e.logprobs) == (len(e.tokens) if i % 2 == 1 else 0)
            e.text.decode()  # cut at character boundaries
        assert b"".join(e.text for e in mine) == engine.tokenizer.decode_bytes(tokens_of(mine))
        assert tokens_of(mine) == engine.generate(prompt, max_tokens=20, ignore_eos=True).tokens
    nothing_left(engine)


def test_poll_takes_at_most_capacity(engine):
    request = engine.submit(engine.tokenizer.encode(PROMPT), max_tokens=20, ignore_eos=True, builder="none")
    seen = []
    while not seen or seen[-1].type != "end":
        found = engine.poll(1000, capacity=1)
        assert len(found) <= 1
        seen += found
    assert len(seen) == 20 and {e.id for e in seen} == {request}
    start = time.monotonic()
    assert engine.poll(50) == [] and 0.04 < time.monotonic() - start < 5
    for timeout, capacity in ((0, 0), (0, -1), (0, True), ("1", 1), (True, 1)):
        with pytest.raises(KdError, match="must be an integer"):
            engine.poll(timeout, capacity=capacity)


def test_event_fd(engine):
    fd = engine.event_fd
    assert select.select([fd], [], [], 0)[0] == []
    request = engine.submit(engine.tokenizer.encode(PROMPT), max_tokens=1, ignore_eos=True)
    assert select.select([fd], [], [], 30)[0] == [fd]
    assert drain(engine, [request])[request][-1].type == "end"
    assert select.select([fd], [], [], 0)[0] == []


def test_credit(engine):
    request = engine.submit(engine.tokenizer.encode(PROMPT), max_tokens=30, ignore_eos=True, builder="none", credit=2)
    first = []
    while len(first) < 2:
        first += engine.poll(5000)
    assert len(first) == 2
    assert engine.poll(100) == [], "more events than it had credit for"
    engine.credit(request, 3)
    seen = []
    while len(seen) < 3:
        seen += engine.poll(5000)
    assert engine.poll(100) == [] and len(seen) == 3
    engine.credit(request, 1000)
    drain(engine, [request])
    with pytest.raises(KdError) as error:
        engine.credit(request + 1000, 1)
    assert error.value.name == "KD_E_NOT_FOUND"


def test_slow_reader_is_cancelled(library, nano):
    with Engine(nano, threads=1, slow_reader_timeout_ms=50, library=library) as engine:
        request = engine.submit([1, 2, 3], max_tokens=50, ignore_eos=True, credit=1)
        end = drain(engine, [request])[request][-1]
        assert (end.finish, end.status) == ("error", -43)
        assert engine.generate([1, 2, 3], max_tokens=4, ignore_eos=True).finish == "length"


def test_cancel(engine):
    request = engine.submit(engine.tokenizer.encode(PROMPT), max_tokens=1500, ignore_eos=True)
    assert engine.cancel(request) == "cancelled"
    end = drain(engine, [request])[request][-1]
    assert end.finish == "cancelled" and end.status == -26
    assert engine.cancel(request) == "already_done"
    assert engine.cancel(0) == engine.cancel(request + 10_000) == "not_found"


def test_what_a_cancel_was_told_stays_true(engine):
    """It does not wait, so the request may come to its own end meanwhile."""
    told = {"cancelled": 0, "already_done": 0}
    for i in range(300):
        request = engine.submit([1, 2, 3], max_tokens=1 + i % 3, ignore_eos=True)
        time.sleep(i % 30 / 10_000)
        answer = engine.cancel(request)
        end = drain(engine, [request])[request][-1]
        assert (end.finish, end.status) == (("cancelled", -26) if answer == "cancelled" else ("length", 0))
        told[answer] += 1
    assert min(told.values()) > 10


def test_drain_refuses_and_admits(engine):
    engine.drain()
    try:
        assert engine.state == "draining"
        with pytest.raises(KdError) as error:
            engine.submit([1], max_tokens=1)
        assert error.value.name == "KD_E_DRAINING"
    finally:
        engine.drain(False)
    assert engine.generate([1], max_tokens=1).tokens


def test_queue_is_bounded(library, nano):
    with Engine(nano, threads=1, max_streams=1, max_queue=2, library=library) as engine:
        ids, refused = [], 0
        for _ in range(12):
            try:
                ids.append(engine.submit([1, 2, 3], max_tokens=200, ignore_eos=True))
            except KdError as error:
                assert error.name == "KD_E_BUSY"
                refused += 1
        assert refused >= 8
        for request in ids:
            engine.cancel(request)
        drain(engine, ids)


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"tokens": []}, "KD_E_INVALID"),
        ({"tokens": "text"}, "KD_E_INVALID"),
        ({"tokens": [1.5]}, "KD_E_INVALID"),
        ({"tokens": None}, "KD_E_INVALID"),
        ({"tokens": [1 << 40]}, "KD_E_TOKEN"),
        ({"tokens": [4096]}, "KD_E_TOKEN"),
        ({"tokens": [-1]}, "KD_E_TOKEN"),
        ({"max_tokens": 0}, "KD_E_INVALID"),
        ({"max_tokens": -1}, "KD_E_INVALID"),
        ({"max_tokens": 1 << 33}, "KD_E_INVALID"),
        ({"max_tokens": "9"}, "KD_E_INVALID"),
        ({"max_tokens": 2046}, "KD_E_CONTEXT"),
        ({"tokens": [1] * 2048}, "KD_E_CONTEXT"),
        ({"stop_ids": [1] * 17}, "KD_E_INVALID"),
        ({"stop_strings": "x"}, "KD_E_INVALID"),
        ({"stop_strings": [""]}, "KD_E_INVALID"),
        ({"stop_strings": ["x" * 257]}, "KD_E_INVALID"),
        ({"stop_strings": ["x"] * 17}, "KD_E_INVALID"),
        ({"credit": -1}, "KD_E_INVALID"),
        ({"user": -1}, "KD_E_INVALID"),
        ({"user": 1 << 64}, "KD_E_INVALID"),
        ({"builder": "absent"}, "KD_E_NOT_FOUND"),
        ({"builder": "a\0b"}, "KD_E_INVALID"),
        ({"builder": "heap", "budget": 1000}, "KD_E_INVALID"),
        ({"budget": 4}, "KD_E_INVALID"),
        ({"sampling": Sampling(temperature=-1)}, "KD_E_SAMPLING"),
        ({"sampling": Sampling(top_p=float("nan"))}, "KD_E_SAMPLING"),
        ({"sampling": Sampling(seed=-1)}, "KD_E_INVALID"),
        ({"sampling": Sampling(seed=1 << 64)}, "KD_E_INVALID"),
        ({"sampling": Sampling(temperature="hot")}, "KD_E_INVALID"),
        ({"sampling": Sampling(top_k=1 << 31)}, "KD_E_INVALID"),
        ({"sampling": 0.5}, "KD_E_INVALID"),
        ({"stop_strings": 5}, "KD_E_INVALID"),
        ({"stop_strings": ["x", 5]}, "KD_E_INVALID"),
        ({"cold": "no"}, "KD_E_INVALID"),
        ({"builder": 5}, "KD_E_INVALID"),
        ({"builder": "heap", "budget": True}, "KD_E_INVALID"),
        *(({name: True}, "KD_E_INVALID") for name in ("max_tokens", "credit", "user", "text_id")),
        *(({"sampling": Sampling(**{f.name: True})}, "KD_E_INVALID") for f in fields(Sampling)),
    ],
)
def test_bad_requests(engine, values, name):
    arguments = {"tokens": [1, 2, 3], "max_tokens": 4} | values
    with pytest.raises(KdError) as error:
        engine.submit(arguments.pop("tokens"), **arguments)
    assert error.value.name == name and error.value.message
    nothing_left(engine)


def test_context_is_exact(engine):
    limit = engine.info.max_positions
    request = engine.submit([1] * (limit - 1), max_tokens=1)
    assert engine.cancel(request) in ("cancelled", "already_done")
    drain(engine, [request])
    with pytest.raises(KdError, match=rf"{limit - 1}.* 2.*{limit}"):
        engine.submit([1] * (limit - 1), max_tokens=2)


def test_numpy_tokens(engine):
    import numpy

    ids = numpy.array(engine.tokenizer.encode(PROMPT), numpy.int64)
    assert engine.generate(ids, max_tokens=4).tokens == engine.generate(ids.tolist(), max_tokens=4).tokens


# ---- streams -----------------------------------------------------------------------------------------------


def test_stream(engine):
    events = list(engine.stream(PROMPT, max_tokens=16, ignore_eos=True))
    assert [e.type for e in events[-2:]] == ["tokens", "end"] or len(events) == 1
    assert tokens_of(events) == engine.generate(PROMPT, max_tokens=16, ignore_eos=True).tokens


def test_stream_gives_credit_back(engine):
    """More events than its first credit: it does not stop half way."""
    events = list(engine.stream(PROMPT, max_tokens=300, ignore_eos=True, builder="none", credit=64))
    assert len(tokens_of(events)) == 300 and len(events) == 300


def test_stream_with_little_credit(engine):
    events = list(engine.stream(PROMPT, max_tokens=20, ignore_eos=True, builder="none", credit=1))
    assert len(tokens_of(events)) == 20


@pytest.mark.parametrize("how", ["close", "with", "drop", "unread"])
def test_stream_ended_early_cancels(engine, how):
    before = settled(engine)["cancelled"]
    stream = engine.stream(PROMPT, max_tokens=1500, ignore_eos=True)
    if how != "unread":
        assert next(stream).tokens
    if how == "with":
        with stream:
            pass
    elif how == "close":
        stream.close()
        stream.close()
        assert list(stream) == []
    else:
        del stream
        gc.collect()
    assert settled(engine)["cancelled"] == before + 1
    nothing_left(engine)


def test_stream_errors_come_at_once(engine):
    with pytest.raises(KdError):
        engine.stream([4096])


def test_streams_side_by_side(engine):
    """Events find their own stream, whoever polls; what belongs to no stream stays for poll()."""
    request = engine.submit(engine.tokenizer.encode("y = "), max_tokens=10, ignore_eos=True)
    a = engine.stream(PROMPT, max_tokens=24, ignore_eos=True)
    b = engine.stream("import ", max_tokens=12, ignore_eos=True)
    got_a, got_b = [next(a)], [next(b)]
    got_b += list(b)
    got_a += list(a)
    assert len(tokens_of(got_a)) == 24 and len(tokens_of(got_b)) == 12
    assert {e.id for e in got_a} == {a.id} and {e.id for e in got_b} == {b.id}
    assert len(tokens_of(drain(engine, [request])[request])) == 10


def test_threads(engine):
    """Eight threads at once, each gets its own text; submit() events go to poll() all the while."""
    prompts = [f"value_{i} = " for i in range(8)]
    want = [engine.generate(p, max_tokens=24, ignore_eos=True, hash_logits=True) for p in prompts]
    got, errors = {}, []

    def work(i):
        try:
            got[i] = engine.generate(prompts[i], max_tokens=24, ignore_eos=True, hash_logits=True)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    request = engine.submit(engine.tokenizer.encode(PROMPT), max_tokens=10, ignore_eos=True)
    mine = drain(engine, [request])[request]
    for t in threads:
        t.join(60)
    assert not errors and len(tokens_of(mine)) == 10
    assert [(got[i].tokens, got[i].hashes) for i in range(8)] == [(w.tokens, w.hashes) for w in want]
    nothing_left(engine)


def test_generate_says_why_it_failed(library, nano):
    with Engine(nano, threads=1, library=library) as engine:
        failed = []

        def work():
            try:
                failed.append(engine.generate(PROMPT, max_tokens=1500, ignore_eos=True))
            except KdError as error:
                failed.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        while not engine.stats()["tokens"]:
            time.sleep(0.001)
        engine.unload()
        thread.join(30)
        assert failed[0].finish == "cancelled" and 0 < len(failed[0].tokens) < 1500


def test_requests_that_an_unload_meets_are_all_cancelled(library, nano):
    """Those, too, that come while it waits for its turn."""
    with Engine(threads=1, library=library, max_queue=4096) as engine:
        for _ in range(3):
            engine.load(nano)
            before = engine.stats()["requests"]
            ids = [engine.submit([5] * 1000, max_tokens=1000, ignore_eos=True)]
            while engine.stats()["requests"] == before:
                pass
            thread = threading.Thread(target=engine.unload)
            thread.start()
            while True:
                try:
                    ids.append(engine.submit([5, 6], max_tokens=500, ignore_eos=True))
                except KdError as error:
                    if error.name == "KD_E_STATE":
                        break
                    assert error.name == "KD_E_BUSY"
            thread.join(30)
            ends = [events[-1] for events in drain(engine, ids).values()]
            assert {(end.finish, end.status) for end in ends} == {("cancelled", -26)}


# ---- builders ----------------------------------------------------------------------------------------------


def test_builders(engine):
    names = {b["name"] for b in engine.builders()}
    assert {"none", "chain", "heap"} <= names and sum(b["in_force"] for b in engine.builders()) == 1
    before = next(b for b in engine.builders() if b["in_force"])
    try:
        generation = engine.use_builder("chain", 5)
        now = next(b for b in engine.builders() if b["in_force"])
        assert (now["name"], now["budget"]) == ("chain", 5)
        events = list(engine.stream(PROMPT, max_tokens=8))
        assert {e.builder_generation for e in events} == {generation}
        assert engine.use_builder("none") > generation
        assert engine.generate(PROMPT, max_tokens=8).nodes == 0
    finally:
        engine.use_builder(before["name"], before["budget"])
    for bad, name in [
        (("absent",), "KD_E_NOT_FOUND"),
        (("heap", -1), "KD_E_INVALID"),
        (("heap", 1 << 40), "KD_E_INVALID"),
        (("heap", 0, 1 << 60), "KD_E_NOT_FOUND"),
        (("a\0b",), "KD_E_INVALID"),
    ]:
        with pytest.raises(KdError) as error:
            engine.use_builder(*bad)
        assert error.value.name == name


def test_builder_swap_while_running_changes_no_token(engine):
    want = engine.generate(PROMPT, max_tokens=200, ignore_eos=True, hash_logits=True)
    stream = engine.stream(PROMPT, max_tokens=200, ignore_eos=True, hash_logits=True, builder="none")
    events, names, generations = [], ["heap", "none", "chain"], set()
    for event in stream:
        events.append(event)
        if len(events) % 5 == 0 and event.type != "end":
            try:
                generations.add(engine.use_builder(names[len(generations) % 3], 6, id=stream.id))
            except KdError as error:
                assert error.name in ("KD_E_DONE", "KD_E_NOT_FOUND")  # it had ended when this came
    assert tokens_of(events) == want.tokens and [h for e in events for h in e.hashes] == want.hashes
    assert generations & {e.builder_generation for e in events}


def test_without_a_drafter_trees_are_refused(library, nano):
    with Engine(nano, draft="none", threads=1, library=library) as engine:
        assert engine.generate(PROMPT, max_tokens=4).nodes == 0
        with pytest.raises(KdError) as error:
            engine.use_builder("heap")
        assert error.value.name == "KD_E_STATE"
