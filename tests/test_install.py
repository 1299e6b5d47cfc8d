"""`pip install .` from a clean copy of the tree: works, leaves git clean, and what it installs works elsewhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run(*command: str | Path, cwd: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as home:
        env = {"PATH": os.environ["PATH"], "HOME": home, "LANG": "C.UTF-8", "PIP_NO_CACHE_DIR": "1"}
        done = subprocess.run([str(c) for c in command], cwd=cwd, env=env, capture_output=True, text=True)
    assert not check or done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def checkout(tmp_path_factory, library) -> Path:
    """A commit of the tree as it stands, with the objects already built: building them again proves nothing new."""
    if not shutil.which("git"):
        pytest.skip("git is not installed: whether an install leaves the tree clean cannot be told")
    there = tmp_path_factory.mktemp("checkout") / "kd"
    there.mkdir()
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True
    )
    if listed.returncode:
        pytest.skip("this tree is no git checkout: whether an install leaves it clean cannot be told")
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (there / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, there / name)
    run("git", "init", "--quiet", cwd=there)
    run("git", "add", "--all", cwd=there)
    run("git", "-c", "user.name=t", "-c", "user.email=t@localhost", "commit", "--quiet", "-m", "tree", cwd=there)
    (there / "build" / "out").mkdir()
    for file in library.parent.iterdir():
        if file.is_file() and not file.name.startswith("."):
            shutil.copy2(file, there / "build" / "out" / file.name)
    return there


@pytest.fixture(scope="module")
def installed(checkout, tmp_path_factory) -> Path:
    """The bin folder of a fresh environment with kd in it. The dependencies are those of the running environment."""
    there = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "venv", "--without-pip", there / "venv", cwd=there)
    python = there / "venv" / "bin" / "python"
    site = Path(
        run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])", cwd=there).stdout.strip()
    )
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    pip = [python, "-m", "pip", "install", "--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed"]
    run(*pip, "--quiet", "--disable-pip-version-check", ".", cwd=checkout)
    return there / "venv" / "bin"


def test_installing_leaves_the_tree_clean(checkout, installed):
    assert run("git", "status", "--porcelain", "--untracked-files=all", cwd=checkout).stdout == ""


def test_the_library_and_the_header_are_installed(installed, tmp_path):
    where = run(installed / "python", "-c", "import kd; print(kd.__path__[0])", cwd=tmp_path).stdout.strip()
    assert where.startswith(str(installed.parent)), f"kd was imported from {where}"
    assert (Path(where) / "kd.h").read_text() == (ROOT / "include" / "kd.h").read_text()
    assert [p.name for p in (Path(where) / "lib").iterdir()] == ["libkd_cpu.so"]
    assert {p.name for p in (Path(where) / "models/nano").iterdir()} == {
        p.name for p in (ROOT / "models/nano").iterdir()
    }


def test_an_engine_opens_from_the_installed_library(installed, tmp_path):
    code = (
        "import kd\n"
        "with kd.Engine() as engine: print(engine.stats()['state'])\n"
        "print(*sorted({l.split()[-1] for l in open('/proc/self/maps') if 'libkd' in l}))\n"
    )
    state, library = run(installed / "python", "-c", code, cwd=tmp_path).stdout.splitlines()
    assert state == "empty"
    assert library.startswith(str(installed.parent)), f"the library came from {library}"


def test_kdctl_is_a_command(installed, tmp_path):
    assert "Usage: kdctl" in run(installed / "kdctl", "--help", cwd=tmp_path).stdout


def test_nothing_else_is_installed(installed):
    site = next(installed.parent.glob("lib/python3*/site-packages"))
    names = {p.name for p in site.iterdir() if not p.name.startswith("__")}
    assert {n for n in names if not n.startswith("kd-")} == {"kd", "kdctl", "dependencies.pth"}
