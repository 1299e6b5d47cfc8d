"""A model in place of another: what was submitted before finishes on the old one, what comes later runs on the new one."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path

import pytest
from engine_events import drain, nothing_left, tokens_of
from fake_model import SMALL3, write_model

from kd import Engine, KdError

A = {**SMALL3, "seed": 11}
B = {
    **SMALL3,
    "seed": 12,
    "vocab": 131,
    "max_positions": 200,
    "heads": 4,
    "draft": {**SMALL3["draft"], "heads": 4, "kv_heads": 2},
}
PROMPT = [5, 17, 3, 90]
LONG = 400


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    base = tmp_path_factory.mktemp("replace")
    return write_model(base / "a", **A), write_model(base / "b", **B)


@pytest.fixture(scope="module")
def expected(library, folders) -> list[list[int]]:
    found = []
    for folder in folders:
        with Engine(folder, threads=1, library=library) as engine:
            found.append(engine.generate(PROMPT, max_tokens=120, ignore_eos=True, cold=True).tokens)
    return found


@pytest.fixture
def engine(library, folders):
    with Engine(folders[0], threads=2, library=library, max_streams=2) as opened:
        yield opened


def wait_for(what, seconds=30) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.002)


def collect(engine, events, enough, seconds=30) -> None:
    """Reads events, by request, until there are enough."""
    end = time.monotonic() + seconds
    while not enough():
        assert time.monotonic() < end
        for event in engine.poll(20):
            events.setdefault(event.id, []).append(event)


def replacing(engine, folder, errors):
    def run() -> None:
        try:
            engine.load(folder, replace=True)
        except KdError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_replacing_an_idle_model(engine, folders, expected):
    assert engine.generate(PROMPT, max_tokens=120, ignore_eos=True).tokens == expected[0]
    engine.load(folders[1], replace=True)
    assert (engine.info.vocab_size, engine.info.weights_generation) == (131, 2)
    assert engine.generate(PROMPT, max_tokens=120, ignore_eos=True).tokens == expected[1]
    engine.load(folders[0], replace=True)
    assert (engine.info.vocab_size, engine.info.weights_generation) == (259, 3)
    assert engine.generate(PROMPT, max_tokens=120, ignore_eos=True).tokens == expected[0]
    assert [e.weights_generation for e in engine.poll(100) if e.type == "load"] == [1, 2, 3]


def test_requests_before_finish_on_the_old_and_later_ones_run_on_the_new(engine, folders, expected):
    held = engine.submit(PROMPT, max_tokens=120, ignore_eos=True, credit=1)  # runs, and waits for credit
    queued = [engine.submit(PROMPT, max_tokens=120, ignore_eos=True) for _ in range(4)]  # some wait for a stream
    errors: list[KdError] = []
    thread = replacing(engine, folders[1], errors)
    wait_for(lambda: engine.load_progress()["phase"] == "swap")
    assert engine.info.weights_generation == 2  # who asks now asks the new one
    later = [engine.submit(PROMPT, max_tokens=120, ignore_eos=True) for _ in range(3)]
    events: dict = {}
    collect(engine, events, lambda: all(events.get(i) and events[i][-1].type == "end" for i in queued))
    time.sleep(0.05)
    assert engine.load_progress()["phase"] == "swap" and engine.poll() == []  # all wait for the one without credit
    engine.credit(held, 1000)
    collect(engine, events, lambda: all(events.get(i) and events[i][-1].type == "end" for i in [held, *later]))
    thread.join()
    assert not errors
    for request in [held, *queued]:
        assert all(e.weights_generation == 1 for e in events[request])
        assert tokens_of(events[request]) == expected[0]
    for request in later:
        assert all(e.weights_generation == 2 for e in events[request])
        assert tokens_of(events[request]) == expected[1]
    assert engine.stats()["weights_generation"] == 2
    while engine.poll():
        pass
    nothing_left(engine)


def test_new_requests_are_checked_against_the_new_model(engine, folders):
    held = engine.submit(PROMPT, max_tokens=50, ignore_eos=True, credit=1)
    thread = replacing(engine, folders[1], [])
    wait_for(lambda: engine.load_progress()["phase"] == "swap")
    with pytest.raises(KdError, match="ids are 0 .. 130"):
        engine.submit([200], max_tokens=4)
    with pytest.raises(KdError, match="context"):
        engine.submit(PROMPT, max_tokens=LONG)
    engine.cancel(held)
    thread.join()
    assert engine.info.weights_generation == 2


def test_cancelling_while_it_waits(engine, folders, expected):
    held = engine.submit(PROMPT, max_tokens=120, ignore_eos=True, credit=1)
    errors: list[KdError] = []
    thread = replacing(engine, folders[1], errors)
    wait_for(lambda: engine.load_progress()["phase"] == "swap")
    fits = engine.submit(PROMPT, max_tokens=120, ignore_eos=True)  # of the new model; the old one takes it over
    began = time.monotonic()
    engine.load_cancel()
    thread.join()
    assert time.monotonic() - began < 5 and [e.name for e in errors] == ["KD_E_CANCELLED"]  # `held` is never read
    assert engine.info.weights_generation == 1 and engine.info.vocab_size == 259
    engine.credit(held, 1000)
    events = drain(engine, [held, fits])
    assert tokens_of(events[held]) == tokens_of(events[fits]) == expected[0]
    assert engine.generate(PROMPT, max_tokens=120, ignore_eos=True).tokens == expected[0]


def test_a_failed_replacement_leaves_the_model_alone(engine, folders, expected, tmp_path):
    with pytest.raises(KdError, match="there is no such folder"):
        engine.load(tmp_path / "none", replace=True)
    assert engine.generate(PROMPT, max_tokens=120, ignore_eos=True).tokens == expected[0]
    with pytest.raises(KdError, match="KD_LOAD_REPLACE"):
        engine.load(folders[1])
    assert engine.info.weights_generation == 1


def test_scores_run_on_the_model_they_were_asked_of(engine, folders, library):
    ids = [i % 100 for i in range(40)]
    with Engine(folders[1], threads=1, library=library) as other:
        want = other.score(ids)
    first = engine.score(ids)
    held = engine.submit(PROMPT, max_tokens=50, ignore_eos=True, credit=1)
    thread = replacing(engine, folders[1], [])
    wait_for(lambda: engine.load_progress()["phase"] == "swap")
    got = []
    scorer = threading.Thread(target=lambda: got.append(engine.score(ids)))
    scorer.start()
    time.sleep(0.05)
    assert not got
    engine.cancel(held)
    scorer.join()
    thread.join()
    assert first.shape == (40, 259) and got[0].shape == (40, 131) and (got[0] == want).all()


def test_closing_while_it_waits(library, folders):
    engine = Engine(folders[0], threads=1, library=library)
    engine.submit(PROMPT, max_tokens=50, ignore_eos=True, credit=1)
    errors: list[KdError] = []
    thread = replacing(engine, folders[1], errors)
    wait_for(lambda: engine.load_progress()["phase"] == "swap")
    engine.close()
    thread.join()
    assert len(errors) == 1


def test_replacing_again_and_again_under_load(engine, folders, expected):
    """Every answer is one model's, whole; nothing is lost, and nothing leaks."""
    submitted, events, stop = [], {}, threading.Event()

    def ask() -> None:
        while not stop.is_set():
            if engine.stats()["waiting"] < 6:
                submitted.append(engine.submit(PROMPT, max_tokens=40, ignore_eos=True))
            time.sleep(0.002)

    def read() -> None:
        while not stop.is_set() or any(not e or e[-1].type != "end" for e in map(events.get, submitted)):
            for event in engine.poll(20):
                events.setdefault(event.id, []).append(event)

    threads = [threading.Thread(target=f) for f in (ask, read)]
    for thread in threads:
        thread.start()
    for i in range(12):
        engine.load(folders[(i + 1) % 2], replace=True)
    stop.set()
    for thread in threads:
        thread.join()
    generations = set()
    for request in submitted:
        of = events[request]
        assert of[-1].finish == "length", of[-1]
        assert len({e.weights_generation for e in of}) == 1
        generations.add(of[-1].weights_generation)
        assert tokens_of(of) == expected[(of[-1].weights_generation - 1) % 2][:40]
    assert len(generations) > 3


def test_cancelling_gives_the_memory_back_within_a_quarter_of_a_second(library, tmp_path):
    import psutil

    kind = {**SMALL3, "hidden": 1024, "vocab": 60_000, "inter": 1024, "draft": None}
    folder = write_model(tmp_path / "big", **kind)
    with Engine(threads=1, library=library) as engine:
        engine.load(folder)
        engine.unload()
        before = psutil.Process().memory_info().rss
        took_s = []
        for _ in range(5):
            engine.load(folder, wait=False)
            wait_for(lambda: engine.load_progress()["bytes_done"] > 0 or engine.load_progress()["phase"] == "done")
            began = time.monotonic()
            try:
                engine.load_cancel()
                with pytest.raises(KdError, match="cancelled"):
                    while not engine._load_ended(1000):
                        pass
            except KdError as error:
                assert error.name == "KD_E_STATE"  # it had ended
                engine.unload()
            took_s.append(time.monotonic() - began)
        assert min(took_s) < 0.25, took_s  # on a busy machine this thread may be woken late, not every time
        assert psutil.Process().memory_info().rss - before < 16 << 20


def test_what_does_not_fit_beside_is_refused_with_the_numbers(engine, folders, expected, tmp_path):
    """No machine has this: the KV cache of the second model is asked for in full."""
    with Engine(folders[0], threads=1, library=engine.library, kv_bytes=1 << 60) as greedy:
        long = tmp_path / "long"
        shutil.copytree(folders[1], long)
        config = json.loads((long / "config.json").read_text())
        (long / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1 << 21}))
        with pytest.raises(KdError, match="KV cache needs .* MiB beside the model that serves, .* MiB are free"):
            greedy.load(long, replace=True)
        assert greedy.generate(PROMPT, max_tokens=20, ignore_eos=True).tokens == expected[0][:20]
