"""What reads model folders against files nobody vouches for, under two sanitizers: the kept corpus again, and some seconds of
fuzzing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

SECONDS = 12
CORPUS = ROOT / "tests" / "fuzz" / "corpus"
TARGETS = ("json", "safetensors", "config", "drafter", "tokenizer")


@pytest.mark.timeout(300)  # the first run builds the targets
@pytest.mark.parametrize("driver", ["", "1"], ids=["libfuzzer-if-there", "own-driver"])
def test_fuzzing_finds_nothing(driver):
    """Every target reads its whole corpus first."""
    done = subprocess.run(
        [ROOT / "tests/fuzz/run.sh", str(SECONDS)],
        capture_output=True,
        text=True,
        env={**os.environ, "ASAN_OPTIONS": "detect_leaks=1:allocator_may_return_null=0", "KD_FUZZ_DRIVER": driver},
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]


def test_the_corpus_is_small_and_there():
    files = [path for path in CORPUS.rglob("*") if path.is_file()]
    assert {path.parent.name for path in files} == set(TARGETS)
    assert sum(path.stat().st_size for path in files) < 1 << 20


sys.path.insert(0, str(ROOT / "tests" / "fuzz"))


@pytest.mark.parametrize("path", sorted((CORPUS / "tokenizer").glob("*")), ids=lambda path: path.name)
def test_tokenizer_files_end_in_a_sentence(path: Path):
    from fuzz_tokenizer import one_input

    assert one_input(path.read_bytes())
