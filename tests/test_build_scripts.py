"""build/make.sh and tests/sanitize/cuda.sh with compilers and a sanitizer that only say how they were called."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

SAY = """#!/bin/bash
[ "$1" != --dryrun ] || { echo "#\\$ TOP=$TOP" >&2; exit; }
echo "$(basename "$0") BUILD_OUT=${BUILD_OUT:-} $*" >>"$SAID"
echo "1 passed"; echo "SUMMARY: 0 errors"
while [ $# -gt 0 ]; do
    case $1 in -o) : >"$2" ;; -MF) echo "it: " >"$2" ;; esac
    shift
done
"""
PROGRAMS = {"CXX": "g++", "NVCC": "nvcc", "SANITIZER": "compute-sanitizer"}


@pytest.fixture
def run(tmp_path):
    """Runs a script in a tree of a few sources: run(script, *arguments, **environment) -> what its programs were called with."""
    tree = tmp_path / "tree"
    for script in ("build/make.sh", "tests/sanitize/cuda.sh"):
        (tree / script).parent.mkdir(parents=True)
        shutil.copy2(ROOT / script, tree / script)
    for source in ("page.cpp", "probe.cpp", "cpu/op.cpp", "cuda/op.cu"):
        (tree / "native" / source).parent.mkdir(parents=True, exist_ok=True)
        (tree / "native" / source).touch()
    toolkit = tmp_path / "toolkit"
    (toolkit / "lib64").mkdir(parents=True)
    (toolkit / "lib64" / "libcudart_static.a").touch()
    said = tmp_path / "said"
    env = {"PATH": os.environ["PATH"], "ARCHS": "90a", "JOBS": "1", "TOP": str(toolkit), "SAID": str(said)}
    for variable, program in PROGRAMS.items():
        (tmp_path / program).write_text(SAY)
        (tmp_path / program).chmod(0o755)
        env[variable] = str(tmp_path / program)

    def call(script: str, *arguments: str, **more: str) -> list[str]:
        said.unlink(missing_ok=True)
        done = subprocess.run([tree / script, *arguments], env={**env, **more}, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        call.told = [line for line in done.stdout.splitlines() if line.startswith(("compiling", "  "))]
        return said.read_text().splitlines() if said.exists() else []

    return call


def compiled(calls: list[str], program: str, source: str) -> list[str]:
    return [call for call in calls if call.startswith(program + " ") and f" -c {source} " in call]


def test_flags_are_for_gxx_and_cuda_flags_for_nvcc(run):
    calls = run("build/make.sh", "cuda", BUILD_OUT="build/out/other", FLAGS="-DONE -DTWO", CUDA_FLAGS="-DTHREE -DFOUR")
    (page,), (kernel,) = compiled(calls, "g++", "native/page.cpp"), compiled(calls, "nvcc", "native/cuda/op.cu")
    assert {"-DONE", "-DTWO"} <= set(page.split())
    assert not {"-DTHREE", "-DFOUR"} & set(page.split())
    assert {"-DTHREE", "-DFOUR"} <= set(kernel.split())
    assert not {"-DONE", "-DTWO"} & set(kernel.split())
    assert all(" build/out/other/" in call for call in calls)


@pytest.mark.parametrize("tools", [(), ("racecheck",), ("memcheck", "synccheck")], ids=["all", "one", "others"])
def test_racecheck_has_libraries_in_which_every_lane_arrives(run, tools):
    calls = run("tests/sanitize/cuda.sh", *tools, SHARES="2", BUILD_OUT="of/somebody", CUDA_FLAGS="-DSOMEBODY")
    folders = {}
    for call in calls:
        if call.startswith("compute-sanitizer "):
            words = call.split()
            folders.setdefault(words[words.index("--tool") + 1], []).append(words[1].removeprefix("BUILD_OUT="))
    assert folders == {
        tool: ["build/out/every-lane" if tool == "racecheck" else "build/out"] * 2
        for tool in tools or ("memcheck", "racecheck", "initcheck", "synccheck")
    }
    flags = {
        words[1].removeprefix("BUILD_OUT="): "-DKD_EVERY_LANE_ARRIVES" in words
        for words in map(str.split, compiled(calls, "nvcc", "native/cuda/op.cu"))
    }
    assert flags == {
        folder: folder == "build/out/every-lane" for folder in {folder for each in folders.values() for folder in each}
    }


def test_shares_are_dealt_of_the_chosen_tests():
    def collected(*arguments: str) -> list[str]:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--collect-only", *arguments]
        done = subprocess.run([*command, "tests/test_build_scripts.py", "-k", "racecheck or shares"], cwd=ROOT,
                              env={**os.environ, "PYTHONPATH": "runtime:."}, capture_output=True, text=True)  # fmt: skip
        return [line for line in done.stdout.splitlines() if "::" in line]

    chosen = collected()
    assert len(chosen) == 4
    assert [collected("--share", f"{share}/2") for share in (1, 2)] == [chosen[::2], chosen[1::2]]


def test_a_build_of_kernels_says_what_it_does_and_nothing_when_there_is_nothing(run, tmp_path):
    tree = tmp_path / "tree"
    (tree / "native" / "cuda" / "more.cu").touch()
    run("build/make.sh", "cuda", ARCHS="90a 120f")
    first, *files = run.told
    assert first.startswith("compiling 2 CUDA sources for sm_90a sm_120f, 1 at once")
    assert sorted(files) == ["  native/cuda/more.cu", "  native/cuda/op.cu"]
    for obj in (tree / "build" / "out").glob("*.o.d"):
        obj.write_text("it: build/make.sh\n")
    run("build/make.sh", "cuda", ARCHS="90a 120f")
    assert run.told == []
    run("build/make.sh", "cpu")
    assert run.told == []


# ---- without a compiler, and with what is no architecture --------------------------------------------------------------------


def commands(folder: Path, *names: str) -> str:
    """A PATH with these alone."""
    folder.mkdir()
    for name in names:
        (folder / name).symlink_to(str(shutil.which(name)))
    return str(folder)


def test_the_line_about_cuda_starts_nothing(tmp_path):
    tree = tmp_path / "tree"
    (tree / "build").mkdir(parents=True)
    shutil.copy2(ROOT / "build/cuda_status.sh", tree / "build")
    path = commands(tmp_path / "bin", "bash", "dirname", "ls")
    called = tmp_path / "called"
    (tmp_path / "bin" / "make").write_text(f"#!/bin/bash\necho $* >>{called}\n")
    (tmp_path / "bin" / "make").chmod(0o755)

    def line() -> str:
        done = subprocess.run([tree / "build/cuda_status.sh"], env={"PATH": path}, capture_output=True, text=True)
        assert done.returncode == 0 and not done.stderr and not called.exists()
        return done.stdout

    assert line().startswith("CUDA: no CUDA compiler (nvcc) found") and line().endswith('"make cuda" fetches one.\n')
    nvcc = tree / ".venv/lib/python3.11/site-packages/nvidia/cu13/bin/nvcc"  # of PyPI
    nvcc.parent.mkdir(parents=True)
    nvcc.touch()
    assert line().startswith("CUDA: nvcc")


@pytest.mark.parametrize("archs", ["foo", "90x", "9.0", "sm_90a", "all 75", "90a,120f", "75", "80/../x"])
def test_what_is_no_architecture_is_told_with_those_that_are(archs):
    done = subprocess.run(
        [ROOT / "build/make.sh", "cuda"], env={**os.environ, "ARCHS": archs}, capture_output=True, text=True
    )
    assert done.returncode == 64 and done.stderr.count("\n") == 1
    assert "is no architecture" in done.stderr and "90a" in done.stderr and f'ARCHS="{archs}"' in done.stderr


def test_an_architecture_named_twice_is_compiled_once(run):
    (kernel,) = compiled(run("build/make.sh", "cuda", ARCHS="90a 120f 90a"), "nvcc", "native/cuda/op.cu")
    assert kernel.count("code=sm_90a ") == 1 and kernel.index("compute_90a") < kernel.index("compute_120f")


GPUS = {  # what nvidia-smi prints -> its exit status and what is compiled for; none: refused
    "9.0\n9.0\n12.0": (0, "90a 120f"),
    "6.1": (0, None),
    "9.0\n7.5": (0, None),
    "13.0": (0, None),
    "[N/A]": (0, "90a 120f"),
    "No devices were found": (6, "90a 120f"),
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.": (9, "90a 120f"),
}


@pytest.mark.parametrize("printed", GPUS)
def test_the_gpus_here_are_asked_after_by_builds_for_them_alone(run, tmp_path, printed):
    status, archs = GPUS[printed]
    (tmp_path / "smi").mkdir()
    smi = tmp_path / "smi" / "nvidia-smi"
    smi.write_text(f'#!/bin/bash\ncat <<"END"\n{printed}\nEND\nexit {status}\n')
    smi.chmod(0o755)
    path = {"PATH": f"{smi.parent}:{os.environ['PATH']}"}
    for more in ({"ARCHS": ""}, {"ARCHS": "foo"}):
        assert run("build/make.sh", "cpu", "test", BUILD_OUT=f"of/{more['ARCHS'] or 'none'}", **path, **more)
    if archs:
        (kernel,) = compiled(run("build/make.sh", "cuda", ARCHS="", **path), "nvcc", "native/cuda/op.cu")
        assert [f"code=sm_{arch}" in kernel for arch in ("90a", "120f")] == [arch in archs for arch in ("90a", "120f")]
        assert kernel.count("code=sm_") == len(archs.split())
        return
    tree, other = (
        tmp_path / "tree",
        {**os.environ, **path, "NVCC": str(tmp_path / "nvcc"), "TOP": "/", "SAID": "/dev/null"},
    )
    other.pop("ARCHS", None)
    done = subprocess.run([tree / "build/make.sh", "cuda"], env=other, capture_output=True, text=True)
    assert done.returncode == 69 and done.stderr.count("\n") == 1, done.stderr
    assert f"of compute capability {printed.splitlines()[-1]}, which kd has no kernels for" in done.stderr


def test_a_compiler_that_is_no_program_is_named():
    env = {**os.environ, "NVCC": "/nonexistent/nvcc", "ARCHS": "90a"}
    done = subprocess.run([ROOT / "build/make.sh", "cuda"], env=env, capture_output=True, text=True)
    assert done.returncode == 69 and done.stderr.count("\n") == 1 and 'NVCC="/nonexistent/nvcc"' in done.stderr
