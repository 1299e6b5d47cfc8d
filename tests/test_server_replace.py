"""The daemon loads one model in place of another while it serves."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest
from daemons import starter, until
from fake_model import SMALL3, write_model

from kd.client import KdClientError

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
