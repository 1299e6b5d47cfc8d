"""Every key of every JSON file of a model folder, with values of other kinds in it: each is taken, or refused in one sentence
that names file and key, in no words of Python. KD_ABSURD_VALUES=100000 tries all of them."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from daemons import ENV
from fake_model import SMALL3, write_model

from kd import Engine, KdError
from kd.golden import Golden, GoldenError
from kdctl.__main__ import run

MOST = int(os.environ.get("KD_ABSURD_VALUES", "15"))  # of each file
INDEX = "model.safetensors.index.json"
FILES = [
    "config.json",
    "draft/config.json",
    "generation_config.json",
    "golden.json",
    INDEX,
    "tokenizer_config.json",
    "kd-hashes.json",
]
VALUES: list[Any] = [
    None, True, False, 0, -1, 3, 2**31, 2**70, 1.5, 1e300, "", "x", "7", "../x.safetensors", "a\0b", "\ud800",
    "\N{SNOWMAN}" * 300, [], [None], [[1]], ["x", 2], {}, {"a": 1}, {"": []}, {"content": 3},
]  # fmt: skip
TEXTS = [
    b"", b"{", b"nul", b"[1]", b'"x"', b"7", b"\xff\xfe", b'{"a": NaN}', b'{"a": 1, "a": 2}', b'{"a": "\xff"}', b'{"\\ud800": 1}',
    b"[" * 100_000, b'{"a": ' * 50_000, b"1" * 5000, b'{"a": ' + b"1" * 5000 + b"}",
]  # fmt: skip
PYTHON = re.compile(
    r"Traceback|NoneType|\b(Key|Type|Value|Attribute|Unicode\w*|Recursion|Overflow)Error"
    r"|'(str|int|float|list|dict|bool|tuple)'|\b(dict|tuple)\b|object has no|list ind|subscriptable|unhashable|iterable"
    r"|codec|recursion|int\(\)|Python|argument|<class| None\b"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, library, nano) -> Path:
    """With every file that something reads."""
    place = write_model(tmp_path_factory.mktemp("absurd") / "model", **{**SMALL3, "vocab": 4096, "shards": 2})
    for name in ("tiktoken.model", "tokenizer_config.json"):
        shutil.copy(nano / name, place)
    config = json.loads((place / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ messages[0].content }}"
    (place / "tokenizer_config.json").write_text(json.dumps(config))
    with Engine(place, threads=1, library=library) as engine:
        tokens = engine.generate([1, 2, 3], max_tokens=3, ignore_eos=True).tokens
        info = engine.info
    golden = {"prompt_tokens": [1, 2, 3], "tokens": tokens, "target_hash": f"{info.target_hash:016x}"}
    golden |= {"content_hash": f"{info.content_hash:016x}"}
    golden["files"] = {"tiktoken.model": hashlib.sha256((place / "tiktoken.model").read_bytes()).hexdigest()}
    (place / "golden.json").write_text(json.dumps(golden))
    return place


@pytest.fixture(autouse=True)
def remembered(tmp_path_factory, monkeypatch):
    """What was hashed stays known: the weights are the same all the time."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


def places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Of all values; of long lists and objects the first and the last."""
    yield path
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    for key in keys if len(keys) < 120 else [keys[0], keys[-1]]:
        yield from places(value[key], (*path, key))


def kind(value: Any) -> str:
    return "number" if type(value) in (int, float) else type(value).__name__


def absurd(whole: Any) -> list[tuple[tuple, Any, bytes]]:
    """(place, what stands there, the file) of MOST of all that there is."""
    every = [(path, value) for path in places(whole) for value in VALUES]
    chosen = every if len(every) <= MOST else random.Random(len(every)).sample(every, MOST)
    made = []
    for path, value in chosen:
        top = [copy.deepcopy(whole)]
        at: Any = top
        for key in (0, *path)[:-1]:
            at = at[key]
        at[(0, *path)[-1]] = value
        made.append((path, value, json.dumps(top[0]).encode()))
    return made + [((), None, text) for text in TEXTS]


def judge(message: str, name: str, path: tuple, value: Any, before: Any) -> None:
    """One sentence, that says a thing once, and names the file and, where a kind of value is wrong, the key."""
    told = f"{path} = {value!r}: {message}"
    assert not PYTHON.search(message), told
    assert "\n" not in message and len(message) < 700 and message.isprintable(), told
    clauses = [clause.strip() for clause in re.split(r"[;:(),]", message) if len(clause.strip()) > 12]
    assert len(clauses) == len(set(clauses)), told
    if path and kind(value) != kind(before) and "should stand" in message:
        key = f"[{path[-1]}]" if isinstance(path[-1], int) else path[-1]
        assert name in message and key[:40] in message, told


def value_at(whole: Any, path: tuple) -> Any:
    for key in path:
        whole = whole[key]
    return whole


@pytest.mark.parametrize("name", FILES)
def test_values_of_other_kinds(capsys, library, folder, name):
    """For inspect, verify-checkpoint and what a load reads, golden.json with it."""
    if name == "kd-hashes.json":
        assert run(["verify-checkpoint", str(folder), "--write"]) == 0
        capsys.readouterr()
    text = (folder / name).read_bytes()
    whole, refusals = json.loads(text), 0
    try:
        with Engine(threads=1, library=library) as engine:
            for path, value, damaged in absurd(whole):
                (folder / name).write_bytes(damaged)
                before = value_at(whole, path)
                messages = []
                code = run(["inspect", str(folder), "-o", "json"])
                out, err = capsys.readouterr()
                assert code == (1 if err else 0), (path, value, err)
                messages.append(json.loads(err)["message"] if err else json.loads(out)["draft_refused"] or "")
                try:
                    Golden.read(folder)
                    if name not in ("golden.json", "kd-hashes.json"):
                        engine.load(folder)
                        engine.unload()
                except KdError as error:
                    assert error.name == "KD_E_MODEL", (path, value, error)
                    messages.append(error.message)
                except GoldenError as error:
                    messages.append(str(error))
                code = run(["verify-checkpoint", str(folder), "-o", "json"])
                out, err = capsys.readouterr()
                faults = json.loads(out)["faults"]
                assert code == bool(faults) and not err, (path, value, err)
                assert not messages or not any(messages) or faults, (path, value, messages)
                messages += [f"{fault['file']}: {fault['what']}" for fault in faults]
                for message in messages:
                    judge(message, name, path, value, before)
                refusals += any(messages)
    finally:
        (folder / name).write_bytes(text)
        (folder / "kd-hashes.json").unlink(missing_ok=True)
    assert refusals > len(TEXTS) - 3


SAMPLES = {
    "config.json": {"hidden_size": "many"},
    "draft/config.json": {"dflash_config": [1]},
    "generation_config.json": {"eos_token_id": {"a": 1}},
    "golden.json": {"tokens": 7},
    INDEX: {"weight_map": {"a": 3}},
    "tokenizer_config.json": {"added_tokens_decoder": {"4090": None}},
}


@pytest.mark.parametrize("name", SAMPLES)
def test_a_daemon_ends_with_65(folder, tmp_path, name):
    text = (folder / name).read_bytes()
    (folder / name).write_text(json.dumps(json.loads(text) | SAMPLES[name]))
    try:
        command = [sys.executable, "-m", "kd", "--model", str(folder), "--set", f"server.runtime_dir={tmp_path}"]
        done = subprocess.run(command, env=ENV, cwd=ROOT, capture_output=True, text=True, timeout=60)
    finally:
        (folder / name).write_bytes(text)
    assert done.returncode == 65, done.stderr
    assert not PYTHON.search(done.stderr) and name in done.stderr and next(iter(SAMPLES[name])) in done.stderr, (
        done.stderr
    )
