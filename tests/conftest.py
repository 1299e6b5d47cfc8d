"""What tests share: the libraries, built when they are stale, and the model folders.

BUILD_OUT names the folder of the libraries, as it does for build/make.sh (default: build/out).
"""

import fcntl
import os
import signal
import subprocess
from pathlib import Path

import pytest

for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):  # before numpy: workers of pytest-xdist share the cores
    os.environ.setdefault(variable, "1")

import backend  # noqa: E402 (it brings numpy)

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / (os.environ.get("BUILD_OUT") or "build/out")

LIBRARIES = {  # by target of build/make.sh
    "cpu": "libkd_cpu.so",
    "test": "libkd_cpu_test.so",
    "cuda": "libkd_cuda.so",
    "cuda-test": "libkd_cuda_test.so",
}
TARGETS = {"cpu": ("cpu", "test"), "cuda": ("cuda", "cuda-test")}  # by device: release library, test library


def pytest_addoption(parser):
    parser.addoption("--device", choices=TARGETS, default="cpu", help="the twin to test (default: cpu)")
    parser.addoption("--prebuilt", action="store_true", help="take the libraries as they are")
    parser.addoption("--share", default="1/1", help="I/N: of the tests, every N-th from the I-th on")


def pytest_configure(config):
    if (
        signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    ):  # started in the background: tests send it, and children inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    backend.DEVICE = config.getoption("--device")
    if backend.DEVICE == "cuda":
        backend.share_devices()
        # Ranks that share a GPU: a kernel that waits for another rank's would keep that one from being loaded.
        os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")


@pytest.hookimpl(trylast=True)  # what -k leaves is dealt out
def pytest_collection_modifyitems(config, items):
    first, step = map(int, config.getoption("--share").split("/"))
    kept = items[first - 1 :: step]
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for i, item in enumerate(items) if i % step != first - 1])
        items[:] = kept


def unexplained_skips(reporter) -> list[str]:
    """On a GPU only what needs a second one may be skipped."""
    reasons = [str(report.longrepr) for report in reporter.stats.get("skipped", ())]
    return [reason for reason in reasons if "second GPU" not in reason]


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session):
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if backend.DEVICE == "cuda" and reporter and session.exitstatus == 0 and unexplained_skips(reporter):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    if backend.DEVICE != "cuda":
        return
    counts = {kind: len(terminalreporter.stats.get(kind, ())) for kind in ("passed", "failed", "error", "skipped")}
    terminalreporter.write_line(f"on CUDA: {sum(counts.values()) - counts['skipped']} tests run, {counts}")
    for reason in unexplained_skips(terminalreporter):
        terminalreporter.write_line(f"skipped, though only a missing second GPU excuses that: {reason}")


def run_build(target: str) -> subprocess.CompletedProcess:
    """build/make.sh for one target; workers of pytest-xdist take turns."""
    OUT.mkdir(parents=True, exist_ok=True)
    with open(OUT / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return subprocess.run([ROOT / "build" / "make.sh", target], capture_output=True, text=True)


def build(target: str, prebuilt: bool) -> Path:
    if prebuilt:
        return OUT / LIBRARIES[target]
    done = run_build(target)
    if done.returncode != 0:
        pytest.fail(f"build/make.sh {target} failed:\n{done.stderr[-4000:]}", pytrace=False)
    return OUT / LIBRARIES[target]


def pytest_collection_finish(session):
    """Builds what the chosen tests need before the first one's clock starts: a cold build may outlast a test's timeout."""
    if session.config.option.collectonly or session.config.option.prebuilt:
        return
    wanted = {name for item in session.items for name in getattr(item, "fixturenames", ())}
    for fixture, target in zip(("library", "test_library"), TARGETS[backend.DEVICE], strict=True):
        if fixture in wanted:
            run_build(target)  # a failure is told by the fixture


@pytest.fixture(scope="session")
def library(pytestconfig) -> Path:
    """The release library: exports include/kd.h and nothing else."""
    return build(TARGETS[backend.DEVICE][0], pytestconfig.option.prebuilt)


@pytest.fixture(scope="session")
def test_library(pytestconfig) -> Path:
    """The same objects and the probes of native/probe*.cpp."""
    return build(TARGETS[backend.DEVICE][1], pytestconfig.option.prebuilt)


@pytest.fixture(scope="session")
def nano() -> Path:
    """The embedded default model."""
    return ROOT / "models" / "nano"


@pytest.fixture(scope="session")
def small3(tmp_path_factory) -> Path:
    """A random 3-layer model with a drafter, made once a session."""
    import fake_model

    return fake_model.write_model(tmp_path_factory.mktemp("small3"), **fake_model.SMALL3)


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """Hashes that kdctl remembers are this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def originals(library, tmp_path_factory) -> dict[str, Path]:
    """Folders with known hashes, to be copied (checkpoints.py)."""
    from checkpoints import write_originals

    return write_originals(library, tmp_path_factory.mktemp("originals"))
