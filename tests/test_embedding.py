"""examples/embed.c: the document shows exactly this file, it compiles without a warning, and it runs without Python."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

import kd

ROOT = Path(__file__).resolve().parent.parent
NANO = ROOT / "models" / "nano"
EXAMPLE = ROOT / "examples" / "embed.c"
PROMPT = "def is_prime(n):\n"
OTHER_PROMPT = "def fibonacci(n: int) -> int:\n"
TOKENS = 64


@pytest.fixture(scope="module")
def program(tmp_path_factory, library) -> Path:
    there = tmp_path_factory.mktemp("embed") / "embed"
    done = subprocess.run(
        ["gcc", "-std=c11", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'include'}", str(EXAMPLE), "-o", str(there)]
        + [f"-L{library.parent}", "-lkd_cpu", f"-Wl,-rpath,{library.parent}"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return there


@pytest.fixture(scope="module")
def output(program) -> subprocess.CompletedProcess[str]:
    """One run, with an empty environment and from a folder where no Python or library could be found by accident."""
    return subprocess.run(
        [str(program), str(NANO)], env={}, cwd="/", capture_output=True, text=True, timeout=120, encoding="utf-8"
    )


def test_the_document_shows_the_file():
    blocks = re.findall(r"^```c\n(.*?)^```$", (ROOT / "docs" / "embedding.md").read_text(), re.M | re.S)
    assert EXAMPLE.read_text() in blocks, "docs/embedding.md shows another embed.c than examples/embed.c"


def test_the_prompts_are_what_the_comment_says():
    tokenizer = kd.Tokenizer.load(NANO)
    arrays = re.findall(r"static const int32_t \w+\[\] = \{([\d, ]+)\};", EXAMPLE.read_text())
    assert [[int(i) for i in a.split(",")] for a in arrays] == [tokenizer.encode(p) for p in (PROMPT, OTHER_PROMPT)]


def test_it_needs_no_python(program):
    linked = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=True).stdout
    assert "libkd_cpu.so" in linked
    assert "python" not in linked


def test_it_ends_well(output):
    assert output.returncode == 0, output.stderr


def test_its_text_is_what_plain_decoding_gives(output):
    """Trees, then chains from the third event on, with another request beside it: not a byte differs from budget 0."""
    with kd.Engine(NANO) as engine:
        plain = engine.generate(PROMPT, max_tokens=TOKENS, ignore_eos=True, builder="none", cold=True)
    assert len(plain.tokens) == TOKENS
    assert output.stdout == plain.text + "\n"


def test_its_summary_says_how_the_requests_ended(output):
    first = re.search(r"^request 1: (\w+), finish (\d), (\d+) tokens$", output.stderr, re.M)
    second = re.search(r"^request 2: (\w+), finish (\d), (\d+) tokens$", output.stderr, re.M)
    assert first.groups() == ("KD_OK", "2", str(TOKENS))  # KD_FINISH_LENGTH
    assert second.groups()[:2] == ("KD_E_CANCELLED", "3")  # KD_FINISH_CANCELLED
    assert 0 < int(second[3]) < 512


def test_it_swapped_the_builder_in_mid_stream(output):
    summary = re.search(
        r"^(\d+) tokens in (\d+) rounds; (\d+) events with the new builder, (\w+)$", output.stderr, re.M
    )
    assert summary, output.stderr
    assert int(summary[2]) < int(summary[1]), "no round accepted a drafted token"
    assert int(summary[3]) > 0
    assert summary[4] == "chain"


@pytest.mark.parametrize("broken", ["missing", "empty"])
def test_a_bad_folder_is_one_clear_sentence(program, tmp_path, broken):
    folder = tmp_path / broken
    if broken == "empty":
        folder.mkdir()
    done = subprocess.run([str(program), str(folder)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("embed: load: "), lines[0]
    assert str(folder) in lines[0]


def test_usage(program):
    done = subprocess.run([str(program)], capture_output=True, text=True, env=dict(os.environ))
    assert (done.returncode, done.stdout) == (64, "")
    assert done.stderr.startswith("usage: embed")
