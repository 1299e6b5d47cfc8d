"""Everything an operator can do while one model replaces another and requests run, at many moments of it: afterwards the daemon
serves the one or the other, to the bit, and nothing is lost on the way. KD_LOAD_MOMENTS=100 looks closer."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
from daemons import Daemon, Raw, starter, until
from load_moments import MOST, PROMPT, Asking, answers, write_golden, write_pair

from kd.client import KdClientError
from kd.text_side import read_text_side

start = pytest.fixture(starter)
MOMENTS = int(os.environ.get("KD_LOAD_MOMENTS", "5"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory, library, nano) -> tuple[Path, Path]:
    pair = write_pair(tmp_path_factory.mktemp("moments"), nano)
    for folder in pair:
        write_golden(library, folder)
    return pair


@pytest.fixture(scope="module")
def known(folders, library) -> dict[str, tuple[list[int], list[int]]]:
    found = {str(folder): answers(library, folder) for folder in folders}
    assert len({tuple(hashes) for _, hashes in found.values()}) == 2
    assert len({tuple(read_text_side(folder).tokenizer.encode(PROMPT)) for folder in folders}) == 2
    return found


@pytest.fixture(scope="module")
def daemon(tmp_path_factory, folders):
    made = Daemon(tmp_path_factory.mktemp("d"), model=folders[0]).wait()
    yield made
    made.kill()


def serving(client, known) -> str:
    """Which one: what STATUS says and what it answers agree."""
    status = client.status()
    assert status["ready"] and status["state"] == "ready", status
    got = client.generate(PROMPT, max_tokens=MOST, ignore_eos=True, hash_logits=True)
    assert (got.tokens, got.hashes) == known[status["model"]["path"]]
    return status["model"]["path"]


def at(client) -> str:
    """The phase of a load under way."""
    load = client.status()["load"]
    return load["phase"] if load["under_way"] else ""


def in_force(client) -> tuple[str, int]:
    stats = client.status()["stats"]
    return stats["builder"], stats["builder_budget"]


class Replacing:
    """LOAD with replace, in a thread; `outcome`: "ready", or the error's name."""

    def __init__(self, daemon: Daemon, folder: str):
        self.outcome = ""
        self._daemon, self._folder = daemon, folder
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with self._daemon.client(timeout_s=60) as client:
            try:
                self.outcome = client.load(self._folder, replace=True)["state"]
            except KdClientError as error:
                self.outcome = error.name

    def join(self) -> str:
        self._thread.join(60)
        return self.outcome


def refusal(call, *arguments, **options) -> str:
    """The name of the error, or "" if there is none."""
    try:
        call(*arguments, **options)
    except KdClientError as error:
        return error.name
    return ""


def test_at_any_moment(daemon, folders, known):
    a, b = map(str, folders)
    chance = random.Random(7)
    with daemon.client(timeout_s=60) as client, Asking(daemon, list(known.values())) as asking:
        serving(client, known)
        began = time.monotonic()
        client.load(b, replace=True)
        client.load(a, replace=True)
        took_s = (time.monotonic() - began) / 2
        rss = daemon.rss_bytes()
        outcomes = set()
        for operation in ("cancel", "drain", "unload", "builder", "load", "kill"):
            for moment in range(MOMENTS):
                before = serving(client, known)
                other = b if before == a else a
                at_s = took_s * (moment + chance.random()) / MOMENTS
                if operation == "kill":
                    with Raw(f"ipc://{daemon.socket('control')}") as raw:
                        raw.ask("LOAD", os.urandom(16), {"path": other, "replace": True})
                        raw.until("PROGRESS")
                    until(lambda: not client.status()["load"]["under_way"])
                    assert serving(client, known) == other  # a load is the daemon's, not its client's
                    continue
                load = Replacing(daemon, other)
                time.sleep(at_s)
                if operation == "cancel":
                    told = refusal(client.load_cancel)
                    want = {"": "CANCELLED", "STATE": "ready"}[told]
                elif operation == "drain":
                    assert client.drain() == "draining"
                    told, want = "", "draining"
                elif operation == "unload":
                    told, want = refusal(client.unload), "ready"
                    assert told in ("BUSY", "")  # it may come before the load, or after
                elif operation == "builder":
                    budget = 1 + moment % 64  # engine.max_nodes
                    client.use_builder("chain", budget)
                    told, want = "", "ready"
                else:
                    told, want = refusal(client.load, before, replace=True), "ready"
                    assert told in ("BUSY", "")  # the same
                got = load.join()
                if operation == "drain":
                    assert client.drain(False) == "ready"
                    assert got in ("draining", "ready", "DRAINING")  # asked for before, after, or too late
                else:
                    came_first = told == "" and operation in ("unload", "load")
                    assert got == want or (came_first and got == "BUSY"), (operation, moment, told)
                outcomes.add((operation, told, got))
                if operation == "unload" and client.status()["state"] == "empty":
                    client.load(other)
                elif operation == "builder":
                    until(lambda want=budget: in_force(client) == ("chain", want))  # counted at the end of a turn
                after = serving(client, known)
                if operation == "cancel":
                    assert after == (before if got == "CANCELLED" else other)
        assert ("cancel", "", "CANCELLED") in outcomes and ("unload", "BUSY", "ready") in outcomes
    assert asking.answered > 10
    # An UNLOAD that is not refused cancels what runs, and leaves nothing until the next load.
    unloaded = any(operation == "unload" and told == "" for operation, told, _ in outcomes)
    assert not [w for w in asking.wrong if not (unloaded and w[1] in ("CANCELLED", "STATE"))], asking.wrong
    assert daemon.rss_bytes() - rss < 48 << 20


@pytest.mark.parametrize("cancelled", [True, False])
def test_a_text_is_encoded_for_the_model_that_answers(daemon, folders, known, cancelled):
    """Asked while the new model waits for its place: its tokens are the new one's, and if that does not come, the old one's."""
    with daemon.client(timeout_s=60) as client:
        before = serving(client, known)
        other = next(str(folder) for folder in folders if str(folder) != before)
        paused = client.stream(PROMPT, max_tokens=600, ignore_eos=True, credit=1)
        next(iter(paused))
        load = Replacing(daemon, other)
        until(lambda: at(client) == "swap")
        assert client.status()["model"]["path"] == other  # what is asked from now on is asked of that one
        with daemon.client(timeout_s=60) as second:
            stream = second.stream(PROMPT, max_tokens=MOST, ignore_eos=True, hash_logits=True)
            until(lambda: len([row for row in client.ps() if row["state"] == "running"]) == 2)
            if cancelled:
                client.load_cancel()
            else:
                paused.close()
            for _ in stream:
                pass
            got = stream.result
        assert load.join() == ("CANCELLED" if cancelled else "ready")
        assert (got.tokens, got.hashes) == known[before if cancelled else other]
        paused.close()
        assert serving(client, known) == (before if cancelled else other)


@pytest.mark.parametrize("phase", ["open", "warm", "swap"])
def test_a_signal_in_the_middle(start, folders, phase):
    """It stops, in order, whatever the load is about, and running requests get their time."""
    daemon = start(real=True, model=folders[0])
    with daemon.client(timeout_s=60) as client:
        stream = client.stream(PROMPT, max_tokens=600, ignore_eos=True, credit=4)
        next(iter(stream))
        load = Replacing(daemon, str(folders[1]))
        until(lambda: client.status()["load"]["under_way"])
        if phase != "open":
            until(lambda: at(client) in (phase, "swap"))
        daemon.process.send_signal(signal.SIGTERM)
        for _ in stream:
            pass
        assert stream.result.finish == "length" and len(stream.result.tokens) == 600
    assert load.join() == "CANCELLED"
    assert daemon.end() == 0
