"""Ctrl-C at any moment: whatever a call of the engine was about, nothing waits for it afterwards."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest
from fake_model import SMALL3, write_model

from kd import Engine, KdError

STORMS = int(os.environ.get("KD_INTERRUPTS", "1000"))
PROMPT = [5, 17, 3, 90]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("interrupts") / "m", **SMALL3)


@pytest.fixture
def interrupts():
    """alarm(s): a KeyboardInterrupt in this thread so many seconds from now; 0: none."""

    def interrupt(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def storm(alarm, act, times=STORMS) -> int:
    """`act` again and again, an interrupt somewhere in each; returns how many hit."""
    chance, hits = random.Random(3), 0
    took = []
    for _ in range(5):
        began = time.perf_counter()
        act()
        took.append(time.perf_counter() - began)
    for _ in range(times):
        try:
            try:
                alarm(max(1e-6, chance.random() * min(took)))
                act()
            finally:
                alarm(0)
        except KeyboardInterrupt:
            hits += 1
    return hits


def closes(engine) -> None:
    """Nothing is left that close() would wait for. In a thread: it must not hang the suite."""
    thread = threading.Thread(target=engine.close, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "close() waits for a call that has ended"
    with pytest.raises(KdError, match="closed"):
        engine.stats()


def test_short_calls(library, folder, interrupts):
    engine = Engine(folder, threads=1, library=library)

    def act() -> None:
        engine.stats()
        engine.builders()
        engine.cancel(1 << 40)
        engine.poll()

    assert storm(interrupts, act) > STORMS // 50  # a timer comes late on a busy machine
    assert engine.generate(PROMPT, max_tokens=4).tokens
    closes(engine)


def test_requests(library, folder, interrupts):
    engine = Engine(folder, threads=1, library=library)
    want = engine.generate(PROMPT, max_tokens=6, ignore_eos=True).tokens

    def act() -> None:
        assert engine.generate(PROMPT, max_tokens=6, ignore_eos=True).tokens == want

    assert storm(interrupts, act, STORMS // 5) > STORMS // 50
    act()
    closes(engine)


def test_another_thread_polls_on(library, folder, interrupts):
    """The interrupted thread may have been the one that polls for all."""
    engine = Engine(folder, threads=1, library=library)
    answered, stop = [], threading.Event()

    def ask() -> None:
        while not stop.is_set():
            answered.append(len(engine.generate(PROMPT, max_tokens=6, ignore_eos=True).tokens))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    storm(interrupts, lambda: engine.poll(1), STORMS // 5)
    before = len(answered)
    limit = time.monotonic() + 20
    while len(answered) < before + 3:
        assert time.monotonic() < limit, "nobody polls any more"
        time.sleep(0.01)
    stop.set()
    thread.join(20)
    assert not thread.is_alive() and set(answered) == {6}
    closes(engine)


def test_a_thread_that_was_taken_away_before_it_could_say_so(library, folder):
    """It says that it polls, and is in no call: the others do not wait for it."""
    engine = Engine(folder, threads=1, library=library)
    engine._polling = threading.get_ident()
    got: list = []
    thread = threading.Thread(target=lambda: got.append(engine.generate(PROMPT, max_tokens=6).tokens), daemon=True)
    thread.start()
    thread.join(20)
    assert got and engine.generate(PROMPT, max_tokens=6).tokens == got[0]
    closes(engine)


def test_loads(library, folder, interrupts):
    """An interrupted load is cancelled: the next one finds its place free, and the model that serves is one of them."""
    engine = Engine(folder, threads=1, library=library)

    def act() -> None:
        engine.load(folder, replace=True, check=lambda held: held.decode(PROMPT, max_tokens=2))

    assert storm(interrupts, act, max(20, STORMS // 30)) > 5
    act()
    assert engine.generate(PROMPT, max_tokens=4).tokens
    closes(engine)


def test_a_handler_may_call_while_its_thread_is_in_a_call(library, folder):
    engine = Engine(folder, threads=1, library=library)
    seen = []

    def handler(number, frame) -> None:
        seen.append((engine.stats()["state"], engine.poll()))

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
        for _ in range(20):
            assert len(engine.generate(PROMPT, max_tokens=30, ignore_eos=True).tokens) == 30
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert seen and {state for state, _ in seen} == {"ready"}
    closes(engine)


def test_closing_in_a_child_process(library, folder):
    """The parent's other threads, one of them in a call, are not there: nobody waits for them."""
    program = f"""
import os, threading, time
from kd import Engine, KdError
engine = Engine({str(folder)!r}, threads=1, library={str(library)!r})
thread = threading.Thread(target=lambda: engine.poll(3000))
thread.start()
time.sleep(0.2)
if not (child := os.fork()):
    try:
        engine.close()
    except KdError as error:
        os._exit(0 if error.name == "KD_E_FORKED" else 3)
    os._exit(4)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
thread.join()
engine.close()
raise SystemExit(code)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    assert done.returncode == 0


def test_every_call_in_a_child_process_says_whose_the_engine_is(library, nano):
    """Also where another thread of the parent has the engine's lock, which nobody gives back in the child."""
    program = f"""
import os, signal, threading
from kd import Engine, KdError
signal.alarm(50)  # is no child's
engine = Engine({str(nano)!r}, threads=1, library={str(library)!r})
stream = engine.stream([1, 2, 3], max_tokens=1000, ignore_eos=True)
taken, done = threading.Event(), threading.Event()
def hold():
    with engine._lock, engine._closer:
        taken.set()
        done.wait()
thread = threading.Thread(target=hold)
thread.start()
taken.wait()
if not (child := os.fork()):
    signal.alarm(40)
    calls = dict(
        generate=lambda: engine.generate("def f():"), ids=lambda: engine.generate([1]), stream=lambda: engine.stream("x"),
        submit=lambda: engine.submit([1], max_tokens=1), poll=lambda: engine.poll(), tokenizer=lambda: engine.tokenizer,
        chat=lambda: engine.chat, info=lambda: engine.info, stats=lambda: engine.stats(), load=lambda: engine.load("x"),
        save=lambda: engine.save("x"), progress=lambda: engine.load_progress(), cancel=lambda: engine.load_cancel(),
        next=lambda: next(stream), end=lambda: stream.close(), close=lambda: engine.close(), score=lambda: engine.score([1]),
    )
    for name, call in calls.items():
        try:
            call()
            print(name, "was taken")
        except KdError as error:
            if error.name != "KD_E_FORKED" or f"opened in process {{os.getppid()}}" not in error.message:
                print(name, error)
    print("asked", len(calls), flush=True)
    del stream, engine, calls
    os._exit(0)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
done.set()
thread.join()
stream.close()
engine.close()
raise SystemExit(code)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], timeout=60, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "asked 17\n"), done.stdout + done.stderr
