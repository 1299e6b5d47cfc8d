"""The daemon loads one model in place of another while it serves."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from daemons import Raw, starter, until
from fake_model import SMALL3, write_model
from load_moments import Asking, answers, write_golden, write_pair

from kd import KdError, server, verbs
from kd.client import KdClientError
from kd.wire import ProtocolError

start = pytest.fixture(starter)
PROMPT = [5, 17, 3, 90]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    base = tmp_path_factory.mktemp("replace")
    a = write_model(base / "a", **{**SMALL3, "seed": 21})
    return a, write_model(base / "b", **{**SMALL3, "seed": 22, "vocab": 131, "prefix": "language_model."})


def test_requests_of_the_old_model_finish_and_the_new_one_serves(start, folders):
    daemon = start(real=True, model=folders[0])
    with daemon.client(timeout_s=60) as client, daemon.client(timeout_s=60) as operator:
        want = client.generate(PROMPT, max_tokens=400, ignore_eos=True)
        long: list = []
        asking = threading.Thread(target=lambda: long.append(client.generate(PROMPT, max_tokens=400, ignore_eos=True)))
        asking.start()
        until(lambda: operator.ps() != [])
        seen = []
        answer = operator.load(str(folders[1]), replace=True, progress=lambda now: seen.append(dict(now)))
        asking.join()
        assert long[0].tokens == want.tokens and long[0].finish == "length"
        assert (answer["state"], answer["model"]["path"]) == ("ready", str(folders[1]))
        assert answer["model"]["weights_generation"] == 2 and answer["model"]["skipped_tensors"] == 1
        status = operator.status()
        assert status["ready"] and status["model"]["vocab_size"] == 131
        load = status["load"]
        assert load["phase"] == "done" and load["rate_bytes_s"] > 0
        assert {"read", "prepare", "swap", "warm"} <= set(load["phases"])
        assert abs(sum(load["phases"].values()) - load["elapsed_us"]) <= 0.02 * load["elapsed_us"]
        assert client.generate(PROMPT, max_tokens=8, ignore_eos=True).finish == "length"
    assert daemon.end(signal.SIGTERM) == 0
    log = daemon.log()
    assert '"replaces": "' + str(folders[0]) in log and "text does not need" in log


def test_a_replacement_that_fails_leaves_the_old_model_in_place(start, folders, tmp_path):
    daemon = start(real=True, model=folders[0])
    with daemon.client(timeout_s=60) as client:
        want = client.generate(PROMPT, max_tokens=20, ignore_eos=True).tokens
        with pytest.raises(KdClientError) as caught:
            client.load(str(tmp_path / "none"), replace=True)
        assert caught.value.name in ("IO", "MODEL")
        with pytest.raises(KdClientError) as caught:
            client.load(str(folders[1]))
        assert caught.value.name == "CONFLICT" and "replace" in caught.value.message
        status = client.status()
        assert status["ready"] and status["model"]["path"] == str(folders[0])
        assert client.generate(PROMPT, max_tokens=20, ignore_eos=True).tokens == want
    assert daemon.end(signal.SIGTERM) == 0


def test_a_replacement_that_is_cancelled_while_it_waits(start, folders):
    daemon = start(real=True, model=folders[0])
    with daemon.client(timeout_s=60) as client, daemon.client(timeout_s=60) as operator:
        stream = client.stream(PROMPT, max_tokens=900, ignore_eos=True, credit=1)
        next(iter(stream))
        errors: list[KdClientError] = []

        def load() -> None:
            with daemon.client(timeout_s=60) as third:
                try:
                    third.load(str(folders[1]), replace=True)
                except KdClientError as error:
                    errors.append(error)

        loading = threading.Thread(target=load)
        loading.start()
        until(lambda: operator.status()["load"]["phase"] == "swap")
        operator.load_cancel()
        loading.join(20)
        assert [e.name for e in errors] == ["CANCELLED"]
        status = operator.status()
        assert status["ready"] and status["model"]["path"] == str(folders[0])
        stream.close()
        assert operator.generate(PROMPT, max_tokens=8, ignore_eos=True).finish == "length"
    assert daemon.end(signal.SIGTERM) == 0


def test_links_are_followed_where_the_configuration_says_so(start, folders, tmp_path):
    linked = tmp_path / "linked"
    linked.mkdir()
    for path in folders[0].iterdir():
        (linked / path.name).symlink_to(path)
    refused = start(real=True, model=linked, state=None)
    assert refused.end(timeout_s=60) == 65 and "symbolic link" in refused.log()
    daemon = start(None, "--set", "model.follow_links=true", real=True, model=linked)
    with daemon.client() as client:
        assert client.generate(PROMPT, max_tokens=8, ignore_eos=True).finish == "length"


# ---- nothing takes over that has not been checked


WRONG = {
    "content_hash": {"content_hash": "0123456789abcdef"},
    "tokens": {"tokens": [1, 2, 3, 4]},
    "files": {"files": {"tiktoken.model": hashlib.sha256(b"another").hexdigest()}},
    "not understood": {"tokens": "x"},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory, nano) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("pair"), nano)


@pytest.mark.parametrize("wrong", WRONG)
def test_a_replacement_that_is_not_what_golden_json_says(start, pair, library, tmp_path, wrong):
    """It is refused before it takes over: not one request is answered by it."""
    bad = shutil.copytree(pair[1], tmp_path / "bad")
    write_golden(library, bad, **WRONG[wrong])
    known = answers(library, pair[0])
    daemon = start(real=True, model=pair[0])
    with daemon.client(timeout_s=60) as client, Asking(daemon, [known]) as asking:
        until(lambda: asking.answered)
        with pytest.raises(KdClientError) as caught:
            client.load(str(bad), replace=True)
        assert caught.value.name == "MODEL" and "golden.json" in caught.value.message
        asked = asking.answered
        until(lambda: asking.answered > asked + 1)
        status = client.status()
        assert status["ready"] and status["model"]["path"] == str(pair[0]) and not status["load"]["under_way"]
    assert not asking.wrong
    assert '"state warming"' not in daemon.log().partition('"replaces": "/')[2]  # it was ready all the time


def test_draining_while_a_replacement_is_checked(start, folders):
    daemon = start(real=True, model=folders[0])
    with daemon.client(timeout_s=60) as client:
        stream = client.stream(PROMPT, max_tokens=900, ignore_eos=True, credit=1)
        next(iter(stream))
        states: list[str] = []

        def load() -> None:
            with daemon.client(timeout_s=60) as other:
                states.append(other.load(str(folders[1]), replace=True)["state"])

        loading = threading.Thread(target=load)
        loading.start()
        until(lambda: client.status()["load"]["under_way"])
        assert client.drain() == "draining"
        until(lambda: client.status()["load"]["phase"] == "swap")  # the only one this daemon ever came to
        stream.close()
        loading.join(30)
        assert states == ["draining"]  # it took over, and nobody is admitted
        with pytest.raises(KdClientError) as caught:
            client.generate(PROMPT, max_tokens=4)
        assert caught.value.name == "DRAINING"
        assert client.drain(False) == "ready" and client.status()["model"]["path"] == str(folders[1])
        assert client.generate(PROMPT, max_tokens=4, ignore_eos=True).finish == "length"


def test_a_cancel_right_behind_the_load(start, pair):
    """While the tokenizer is read, or before."""
    daemon = start(real=True, model=pair[0])
    with daemon.client(timeout_s=60) as client, Raw(f"ipc://{daemon.socket('control')}") as raw:
        for _ in range(20):
            load, cancel, other = (os.urandom(16) for _ in range(3))
            raw.ask("LOAD", load, {"path": str(pair[1]), "replace": True})
            raw.ask("LOAD_CANCEL", other, {"load": other})
            raw.ask("LOAD_CANCEL", cancel, {"load": load})
            answers = {}
            while len(answers) < 3:
                kind, about, body = raw.get()
                if kind != "PROGRESS":
                    answers[about] = body.get("name", kind)
            assert answers == {load: "CANCELLED", cancel: "DONE", other: "STATE"}
            until(lambda: not client.status()["load"]["under_way"])
            assert client.status()["model"]["path"] == str(pair[0])
        assert client.load(str(pair[1]), replace=True)["model"]["path"] == str(pair[1])


def test_the_first_progress_is_of_this_load(start, pair):
    daemon = start(real=True, model=pair[0])
    with Raw(f"ipc://{daemon.socket('control')}") as raw:
        for i in range(6):
            ident = os.urandom(16)
            raw.ask("LOAD", ident, {"path": str(pair[1 - i % 2]), "replace": True})
            seen = []
            while not seen or seen[-1][0] not in ("DONE", "ERROR"):
                kind, about, body = raw.get()
                assert about == ident
                seen.append((kind, body))
            assert [kind for kind, _ in seen[:1] + seen[-1:]] == ["PROGRESS", "DONE"]
            first = seen[0][1]
            assert first["under_way"] and first["phase"] != "done" and first["elapsed_us"] < 20_000_000
            order = ["open", "read", "prepare", "warm", "swap", "done"]
            phases = [order.index(body["phase"]) for kind, body in seen if kind == "PROGRESS"]
            assert phases == sorted(phases)


def test_a_builder_is_measured_alone_or_not_at_all(start, pair, library):
    daemon = start(real=True, model=pair[0], env={"KD_BUILDER_NAME": ""})
    known = [answers(library, folder) for folder in pair]

    def told(client) -> tuple:
        status = client.status()
        return status["daemon"]["builder_choice"], (status["stats"]["builder"], status["stats"]["builder_budget"])

    with daemon.client(timeout_s=60) as client:
        _, in_force = told(client)
        with Asking(daemon, known) as asking:
            until(lambda: asking.answered)
            client.load(str(pair[1]), replace=True)
        assert not asking.wrong
        choice, now = told(client)
        assert choice["measured"] == [] and "requests ran" in choice["reason"] and now == in_force
        client.load(str(pair[0]), replace=True)
        choice, now = told(client)
        assert len(choice["measured"]) == 7 and now == (choice["builder"], choice["budget"])


def test_a_text_that_comes_while_a_model_is_unloaded():
    """Not a folder without a tokenizer: no model."""
    side = SimpleNamespace(tokenizer=None, chat=None)
    daemon = SimpleNamespace(model_path="/m", log=Mock(), loader=Mock(no_load=nullcontext), state=Mock())

    def unload():
        with pytest.raises(ProtocolError, match="no model is loaded") as refused:
            verbs.text_side_of(daemon, False)
        assert refused.value.name == "NOT_READY"
        if daemon.engine.fails:
            raise KdError(-1, "KD_E_BUSY", "no")
        return 5

    daemon.engine = SimpleNamespace(text_side=lambda: side, unload=unload, fails=True)
    with pytest.raises(KdError):
        server.Daemon.unload(daemon)
    assert daemon.model_path == "/m"
    daemon.engine.fails = False
    assert server.Daemon.unload(daemon) == 5 and daemon.model_path is None

    def between():
        daemon.model_path = None
        return side

    daemon.model_path, daemon.engine.text_side = "/m", between
    with pytest.raises(ProtocolError, match="no model is loaded"):
        verbs.text_side_of(daemon, True)
    daemon.model_path, daemon.engine.text_side = "/m", lambda: side
    with pytest.raises(ProtocolError, match="has no chat template"):
        verbs.text_side_of(daemon, True)
