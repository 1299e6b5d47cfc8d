"""Ten seconds of fuzzing of what reads model folders, under AddressSanitizer and UndefinedBehaviorSanitizer."""

import os
import subprocess

import pytest
from conftest import ROOT

SECONDS = 10


@pytest.mark.timeout(300)  # the first run builds the targets
def test_fuzzing_finds_nothing():
    done = subprocess.run(
        [ROOT / "tests/fuzz/run.sh", str(SECONDS)],
        capture_output=True,
        text=True,
        env={**os.environ, "ASAN_OPTIONS": "detect_leaks=1:allocator_may_return_null=0"},
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
