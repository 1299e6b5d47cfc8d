"""What tests share: the libraries, built when they are stale, and the model folders."""

import fcntl
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def build(target: str) -> Path:
    """Run build/make.sh for one target; workers of pytest-xdist take turns."""
    out = ROOT / "build" / "out"
    out.mkdir(parents=True, exist_ok=True)
    with open(out / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run([ROOT / "build" / "make.sh", target], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.fail(f"build/make.sh {target} failed:\n{done.stderr[-4000:]}", pytrace=False)
    return out / {"cpu": "libkd_cpu.so", "test": "libkd_cpu_test.so"}[target]


@pytest.fixture(scope="session")
def library() -> Path:
    """The release library: exports include/kd.h and nothing else."""
    return build("cpu")


@pytest.fixture(scope="session")
def test_library() -> Path:
    """The same objects and the probes of native/probe*.cpp."""
    return build("test")


@pytest.fixture(scope="session")
def nano() -> Path:
    """The embedded default model."""
    return ROOT / "models" / "nano"


@pytest.fixture(scope="session")
def small3(tmp_path_factory) -> Path:
    """A random 3-layer model with a drafter, made once a session."""
    import fake_model

    return fake_model.write_model(tmp_path_factory.mktemp("small3"), **fake_model.SMALL3)
