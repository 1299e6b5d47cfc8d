"""What a measurement needs and does not find here it says in one sentence, before anything is built."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run(tmp_path: Path, script: str, *words: str, missing: str = "") -> subprocess.CompletedProcess:
    """With a PATH that has bash alone, so no nvidia-smi, and without the modules `missing`."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "bash").symlink_to("/bin/bash")
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys\nfor name in {missing.split()!r}:\n    sys.modules[name] = None\n"
    )
    paths = [str(tmp_path), str(ROOT / "runtime"), str(ROOT)]
    return subprocess.run(
        [sys.executable, ROOT / "bench" / script, *words], capture_output=True, text=True, timeout=60, cwd=tmp_path,
        env={**os.environ, "PATH": str(tmp_path / "bin"), "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip


@pytest.mark.parametrize("script", ["kernels.py", "allreduce.py", "contract.py", "rank_step.py", "rounds.py"])
def test_a_gpu_is_looked_for_before_anything_is_built(tmp_path, script):
    done = run(tmp_path, script)
    assert (done.returncode, done.stdout) == (1, "")
    assert "no NVIDIA GPU here" in done.stderr and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize(
    ("script", "missing"),
    [("experts.py", "torch"), ("fa3.py", "torch"), ("int4.py", "torch"), ("small_kernels.py", "torch")],
)
def test_a_peer_names_the_package_that_is_missing(tmp_path, script, missing):
    done = run(tmp_path, f"peers/{script}", missing=missing)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"bench/peers/{script} needs {missing}, which is not installed here: pip install {missing}\n"


@pytest.mark.parametrize("script", ["int4.py", "small_kernels.py"])
def test_a_part_of_a_measurement_names_the_whole(tmp_path, script):
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("def jit(function):\n    return function\n")
    (tmp_path / "triton" / "language.py").write_text("constexpr = int\n")
    (tmp_path / "torch.py").write_text("class Tensor: ...\n")
    done = run(tmp_path, f"peers/{script}")
    assert (done.returncode, done.stdout) == (1, "")
    assert "is a part of bench/peers/experts.py" in done.stderr and done.stderr.count("\n") == 1, done.stderr
