"""A model that is held before it takes its place: it decodes as it will serve, nobody sees it, and nothing that becomes of it
harms the one that serves."""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
import time
from pathlib import Path

import pytest
from engine_events import drain, tokens_of
from fake_model import SMALL3, write_model

from kd import Engine, KdError, loads

A = {**SMALL3, "seed": 31}
B = {**SMALL3, "seed": 32, "vocab": 131}
PROMPT = [5, 17, 3, 90]
MOMENTS = int(os.environ.get("KD_LOAD_MOMENTS", "24"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    base = tmp_path_factory.mktemp("held")
    return write_model(base / "a", **A), write_model(base / "b", **B)


@pytest.fixture(scope="module")
def expected(library, folders) -> list[tuple[list[int], list[int]]]:
    found = []
    for folder in folders:
        with Engine(folder, threads=1, library=library) as engine:
            got = engine.generate(PROMPT, max_tokens=60, ignore_eos=True, cold=True, hash_logits=True)
            found.append((got.tokens, got.hashes))
    return found


@pytest.fixture
def engine(library, folders):
    with Engine(folders[0], threads=2, library=library, max_streams=2) as opened:
        yield opened


def served(engine) -> tuple[list[int], list[int]]:
    got = engine.generate(PROMPT, max_tokens=60, ignore_eos=True, cold=True, hash_logits=True)
    return got.tokens, got.hashes


class Wrong(Exception):
    pass


def refuse(held) -> None:
    raise Wrong


@pytest.mark.parametrize("tp", [1, 2])
def test_it_decodes_the_bits_it_will_serve(library, folders, expected, tp):
    with Engine(folders[0], threads=2, tp=tp, library=library) as engine:
        seen = []

        def check(held) -> None:
            assert engine.load_progress()["phase"] == "warm" and engine.info.weights_generation == 1
            assert (held.info.vocab_size, held.info.weights_generation) == (131, 2)
            for builder, budget in (("none", 0), ("chain", 5), ("heap", 0), ("heap", 33)):
                trial = held.decode(
                    PROMPT, max_tokens=60, ignore_eos=True, hash_logits=True, builder=builder, budget=budget
                )
                seen.append((trial.tokens, trial.hashes))
            assert held.decode(PROMPT, max_tokens=60, ignore_eos=True).hashes == []

        engine.load(folders[1], replace=True, check=check)
        got = engine.generate(PROMPT, max_tokens=60, ignore_eos=True, cold=True, hash_logits=True)
        assert seen == [(got.tokens, got.hashes)] * 4
        assert tp > 1 or seen[0] == expected[1]


def test_stop_ids_end_a_trial(engine, folders, expected):
    stop = expected[1][0][10]
    first = expected[1][0].index(stop)

    def check(held) -> None:
        trial = held.decode(PROMPT, max_tokens=60, stop_ids=[stop], ignore_eos=True, builder="heap")
        assert trial.tokens == expected[1][0][: first + 1]
        with pytest.raises(KdError, match="ids are 0 .. 130"):
            held.decode([200], max_tokens=4)

    engine.load(folders[1], replace=True, check=check)


def test_the_one_that_serves_goes_on_meanwhile(engine, folders, expected):
    """Requests run to their end while the other decodes, and neither changes a bit of the other's."""

    def check(held) -> None:
        ids = [engine.submit(PROMPT, max_tokens=60, ignore_eos=True, hash_logits=True) for _ in range(4)]
        trials = [held.decode(PROMPT, max_tokens=60, ignore_eos=True, hash_logits=True) for _ in range(3)]
        assert all((t.tokens, t.hashes) == expected[1] for t in trials)
        events = drain(engine, ids)
        assert all(tokens_of(events[i]) == expected[0][0] for i in ids)
        assert all(e.weights_generation == 1 for i in ids for e in events[i])

    engine.load(folders[1], replace=True, check=check)
    assert served(engine) == expected[1]


def test_what_is_refused_never_serves(engine, folders, expected):
    held_then = []

    def check(held) -> None:
        held_then.append(held)
        raise Wrong

    for _ in range(3):
        with pytest.raises(Wrong):
            engine.load(folders[1], replace=True, check=check)
        assert served(engine) == expected[0] and engine.info.weights_generation == 1
    for call in (lambda: held_then[0].decode(PROMPT, max_tokens=4), held_then[0].accept, lambda: held_then[0].info):
        with pytest.raises(KdError, match="the load was cancelled"):
            call()
    engine.unload()
    with pytest.raises(Wrong):
        engine.load(folders[1], check=refuse)
    assert engine.state == "empty"
    engine.load(folders[1], check=lambda held: None)
    assert served(engine) == expected[1]


def test_refusals_give_the_memory_back(library, tmp_path):
    import psutil

    big = write_model(tmp_path / "big", **{**SMALL3, "hidden": 512, "vocab": 8_000, "draft": None})
    with Engine(big, threads=1, library=library) as engine:
        rss = []
        for _ in range(4):
            with pytest.raises(Wrong):
                engine.load(big, replace=True, check=refuse)
            rss.append(psutil.Process().memory_info().rss)
        assert rss[-1] - rss[0] < 12 << 20  # one is 16 MiB, and there were three more


def test_a_builder_comes_into_force_with_the_model(engine, folders):
    generations = []

    def check(held) -> None:
        with pytest.raises(KdError, match="there is no builder|no such builder|nosuch"):
            held.accept("nosuch")
        with pytest.raises(KdError, match="budget is 1000"):
            held.accept("heap", 1000)
        held.accept("chain", 5)
        with pytest.raises(KdError, match="no load holds a model"):
            held.accept("chain", 5)

    engine.load(folders[1], replace=True, check=check)
    assert (engine.stats()["builder"], engine.stats()["builder_budget"]) == ("chain", 5)

    def late(held) -> None:
        stream = engine.submit(PROMPT, max_tokens=50, ignore_eos=True, credit=1)  # holds the old one in its place
        held.accept("chain", 3)
        generations.append(engine.use_builder("heap", 9))
        engine.cancel(stream)

    engine.load(folders[0], replace=True, check=late)
    assert (engine.stats()["builder"], engine.stats()["builder_budget"]) == ("heap", 9)


def test_a_builder_named_while_the_first_model_loads(library, folders):
    with Engine(threads=1, library=library) as engine:
        generations = []
        engine.load(folders[0], check=lambda held: generations.append(engine.use_builder("heap", 9)))
        stats = engine.stats()
        assert (stats["builder"], stats["builder_budget"], stats["builder_generation"]) == ("heap", 9, generations[0])


def test_a_model_without_a_drafter_takes_no_trees(engine, folders, tmp_path, expected):
    plain = tmp_path / "plain"
    shutil.copytree(folders[1], plain, ignore=shutil.ignore_patterns("draft"))
    engine.use_builder("heap", 9)

    def check(held) -> None:
        with pytest.raises(KdError, match="needs a drafter"):
            held.decode(PROMPT, max_tokens=4, builder="heap")
        with pytest.raises(KdError, match="needs a drafter"):
            held.accept("heap")
        assert held.decode(PROMPT, max_tokens=60, ignore_eos=True).tokens == expected[1][0]

    engine.load(plain, replace=True, check=check)
    assert engine.stats()["builder"] == "none" and served(engine) == expected[1]
    engine.load(folders[0], replace=True)
    assert engine.stats()["builder"] == "heap"  # what was asked for outlasts it


def test_one_trial_at_a_time_and_a_cancel_ends_it(engine, folders, expected):
    errors = []

    def attempt(held) -> None:
        try:
            held.decode(PROMPT, max_tokens=900, ignore_eos=True)
        except KdError as error:
            errors.append(error.name)

    def check(held) -> None:
        threads = [threading.Thread(target=attempt, args=[held]) for _ in range(2)]
        for thread in threads:
            thread.start()
        while not errors:  # one of them is refused at once
            time.sleep(0.001)
        began = time.monotonic()
        engine.load_cancel()
        for thread in threads:
            thread.join()
        assert time.monotonic() - began < 5
        with pytest.raises(KdError, match="cancelled|no load holds"):
            held.accept()
        raise Wrong

    with pytest.raises(Wrong):
        engine.load(folders[1], replace=True, check=check)
    assert sorted(errors) == ["KD_E_BUSY", "KD_E_CANCELLED"]
    assert served(engine) == expected[0]


def test_closing_while_one_is_held(library, folders):
    engine = Engine(folders[0], threads=1, library=library)
    held, errors = threading.Event(), []

    def check(model) -> None:
        held.set()
        for _ in range(10_000):
            model.decode(PROMPT, max_tokens=60, ignore_eos=True)

    def load() -> None:
        try:
            engine.load(folders[1], replace=True, check=check)
        except KdError as error:
            errors.append(error.name)

    thread = threading.Thread(target=load)
    thread.start()
    held.wait()
    engine.close()
    thread.join(20)
    assert len(errors) == 1


# ---- cancelling


def test_a_cancel_is_kept_or_comes_too_late_whatever_the_moment(engine, folders, expected):
    """Swept over the whole of a load: what load_cancel() answers is what happens."""
    where, answers, requests = 0, [], random.Random(5)

    def check(held) -> None:
        held.decode(PROMPT, max_tokens=8, ignore_eos=True)

    began = time.monotonic()
    engine.load(folders[1], replace=True, check=check)
    took_s = time.monotonic() - began
    where = 1
    for moment in range(MOMENTS):
        stop, outcome = threading.Event(), []

        def cancel(stop=stop, outcome=outcome, moment=moment) -> None:
            stop.wait(1.3 * took_s * moment / MOMENTS)
            try:
                engine.load_cancel()
                outcome.append("cancelled")
            except KdError as error:
                outcome.append(error.name)

        thread = threading.Thread(target=cancel)
        answer: list = []
        most = requests.choice([1, 30, 60])

        def ask(answer=answer, most=most) -> None:
            got = engine.generate(PROMPT, max_tokens=most, ignore_eos=True, cold=True, hash_logits=True)
            answer.append((got.tokens, got.hashes))

        asking = threading.Thread(target=ask)
        asking.start()
        thread.start()
        try:
            engine.load(folders[1 - where], replace=True, check=check)
            stop.set()
            loaded = True
        except KdError as error:
            assert error.name == "KD_E_CANCELLED"
            loaded = False
        thread.join()
        assert outcome == (["KD_E_STATE"] if loaded else ["cancelled"]), moment
        asking.join()
        assert answer[0] in [tuple(kind[:most] for kind in both) for both in expected]  # one model's, whole
        where = 1 - where if loaded else where
        assert served(engine) == expected[where]
        answers.append(loaded)
    assert any(answers) and not all(answers)


@pytest.fixture
def slow_text(monkeypatch):
    """Reading a tokenizer takes until it is told to end."""
    reading, go_on = threading.Event(), threading.Event()
    read = loads.read_text_side

    def slowly(*args):
        reading.set()
        assert go_on.wait(30)
        return read(*args)

    monkeypatch.setattr(loads, "read_text_side", slowly)
    return reading, go_on


@pytest.mark.parametrize("replace", [False, True])
def test_a_cancel_while_the_tokenizer_is_read(library, nano, folders, expected, slow_text, replace):
    reading, go_on = slow_text
    go_on.set()
    with Engine(folders[0], threads=1, library=library) as engine:
        if not replace:
            engine.unload()
        reading.clear()
        go_on.clear()
        errors = []

        def load() -> None:
            try:
                engine.load(nano, replace=replace)
            except KdError as error:
                errors.append(error.name)

        thread = threading.Thread(target=load)
        thread.start()
        assert reading.wait(30)
        now = engine.load_progress()
        assert (now["phase"], now["bytes_done"], list(now["phases"])) == ("open", 0, ["text"])  # not the load before
        with pytest.raises(KdError, match="a load is under way"):
            engine.load(folders[1], replace=True)
        engine.load_cancel()
        go_on.set()
        thread.join(30)
        assert errors == ["KD_E_CANCELLED"]
        if replace:
            assert served(engine) == expected[0]
        else:
            assert engine.state == "empty"
        with pytest.raises(KdError, match="no load is under way"):
            engine.load_cancel()
        engine.load(folders[1], replace=True)
        assert served(engine) == expected[1]


def test_a_load_that_waits_for_nobody_can_be_cancelled_too(library, folders):
    with Engine(threads=1, library=library) as engine:
        engine.load(folders[0], wait=False)
        try:
            engine.load_cancel()
            cancelled = True
        except KdError:
            cancelled = False  # its model had taken over
        try:
            while not engine._load_ended(1000):
                pass
            assert not cancelled
        except KdError as error:
            assert cancelled and error.name == "KD_E_CANCELLED"


# ---- texts, stop ids


def test_tokens_of_one_vocabulary_are_no_request_to_another(engine, folders, nano, expected):
    engine.load(nano, replace=True)
    side = engine.text_side()
    assert side.id and side.tokenizer and engine.generate("def f", max_tokens=4).text
    ids = side.tokenizer.encode("def f")
    engine.load(folders[0], replace=True)
    assert engine.text_side().id == 0 and engine.tokenizer is None
    assert engine.generate(PROMPT, max_tokens=4, text_id=0).tokens == expected[0][0][:4]
    with pytest.raises(KdError, match="another model's vocabulary") as caught:
        engine.submit(ids, max_tokens=4, text_id=side.id)
    assert caught.value.name == "KD_E_STATE"


def test_tokens_that_wait_for_a_model_that_does_not_come(engine, folders, nano, expected):
    """Made for the model that was to take over; it is cancelled. Those made for nobody in particular run on the old one."""
    held = engine.submit(PROMPT, max_tokens=60, ignore_eos=True, credit=1)
    thread = threading.Thread(target=lambda: pytest.raises(KdError, engine.load, nano, replace=True))
    thread.start()
    limit = time.monotonic() + 30
    while engine.load_progress()["phase"] != "swap":
        assert time.monotonic() < limit
        time.sleep(0.002)
    side = engine.text_side()
    waiting = engine.submit([5, 6], max_tokens=4, text_id=side.id)
    anybody = engine.submit(PROMPT, max_tokens=4, ignore_eos=True)
    engine.load_cancel()
    thread.join()
    engine.credit(held, 1000)
    events = drain(engine, [held, waiting, anybody])
    assert (events[waiting][-1].finish, events[waiting][-1].status) == ("error", -20)
    assert tokens_of(events[held]) == expected[0][0] and tokens_of(events[anybody]) == expected[0][0][:4]


def test_the_same_files_have_the_same_id_and_others_another(library, nano, tmp_path):
    ids = []
    for change in (None, None, "chat_template.jinja", "tiktoken.model"):
        folder = tmp_path / str(len(ids))
        shutil.copytree(nano, folder)
        if change == "chat_template.jinja":
            (folder / change).write_text((nano / change).read_text() + " ")
        elif change:
            lines = (nano / change).read_bytes().splitlines()
            first, second = lines[400].split(), lines[401].split()
            lines[400], lines[401] = first[0] + b" " + second[1], second[0] + b" " + first[1]
            (folder / change).write_bytes(b"\n".join(lines) + b"\n")
        ids.append(loads.read_text_side(folder).id)
    assert ids[0] == ids[1] and len({*ids}) == 3 and 0 not in ids


def test_stop_ids_are_ids_of_the_vocabulary(engine, folders, expected):
    for bad in (259, 10_000, -1):
        with pytest.raises(KdError, match=f"stop id 1 is {bad}: ids are 0 .. 258, the vocabulary") as caught:
            engine.submit(PROMPT, max_tokens=4, stop_ids=[258, bad])
        assert caught.value.name == "KD_E_INVALID"
    assert engine.generate(PROMPT, max_tokens=4, ignore_eos=True, stop_ids=[258]).tokens == expected[0][0][:4]


def test_a_request_that_changes_its_model_stops_where_that_one_does(engine, folders, expected, tmp_path):
    """It waits for B and gets A again: what B would stop at is nothing to it."""
    tokens = expected[0][0]
    stop = next(t for t in tokens if t < 131)
    other = tmp_path / "other"
    shutil.copytree(folders[1], other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"eos_token_id": stop}))
    held = engine.submit(PROMPT, max_tokens=60, ignore_eos=True, credit=1)
    thread = threading.Thread(target=lambda: pytest.raises(KdError, engine.load, other, replace=True))
    thread.start()
    limit = time.monotonic() + 30
    while engine.load_progress()["phase"] != "swap":
        assert time.monotonic() < limit
        time.sleep(0.002)
    assert stop in engine.info.stop_ids
    waits = engine.submit(PROMPT, max_tokens=60)
    engine.load_cancel()
    thread.join()
    engine.cancel(held)
    got = tokens_of(drain(engine, [waits])[waits])
    assert stop in got and got == engine.generate(PROMPT, max_tokens=60).tokens and len(got) == 60
