"""kdctl convert: what it refuses, and what is left when it is interrupted or killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import TWO, edit, faults, flip, kdctl
from conftest import ROOT

from kd import checkpoint
from kd.convert import LOCK, convert
from kdctl.__main__ import run

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def published(originals, tmp_path) -> Path:
    return Path(shutil.copytree(originals["published"], tmp_path / "published"))


def test_convert_refuses_what_golden_json_does_not_know(capsys, published, tmp_path):
    out = tmp_path / "deep" / "out"
    flip(published / TWO, (published / TWO).stat().st_size - 2)
    code, error = kdctl(capsys, "convert", published, out)
    assert (code, error["name"]) == (1, "KD_E_MODEL") and "target_hash" in error["message"]
    flip(published / TWO, (published / TWO).stat().st_size - 2)
    edit(published / "golden.json", lambda g: g["files"].update({"config.json": "0" * 64}))
    code, error = kdctl(capsys, "convert", published, out)
    assert (code, error["name"]) == (1, "KD_E_MODEL") and "is not the file golden.json" in error["message"]
    assert list(out.parent.iterdir()) == []


def test_converted_with_another_drafter_it_is_whole_and_loads(capsys, published, originals, tmp_path):
    draft = Path(shutil.copytree(published / "draft", tmp_path / "draft"))
    flip(draft / "model.safetensors", (draft / "model.safetensors").stat().st_size - 2)
    out = tmp_path / "out"
    assert kdctl(capsys, "convert", published, out, "--draft", draft)[0] == 0
    assert faults(capsys, out) == []
    golden = json.loads((out / "golden.json").read_text())
    assert "content_hash" not in golden and "target_hash" in golden


KILLED = """
import os, signal, sys
from pathlib import Path
import kd.convert
source, out, moment = sys.argv[1:]
def die(*_, **__):
    os.kill(os.getpid(), int(getattr(signal, os.environ["SIGNAL"])))
loaded = []
def progress(now):
    if moment == "read" or (moment == "write" and loaded):
        die()
    if now["phase"] == "done":
        loaded.append(now)
if moment == "start":
    kd.convert.Engine = die
if moment in ("files", "rename"):
    kd.convert.write_hashes = die
if moment == "rename":
    kd.convert.write_hashes, os.rename = lambda *_: None, die
print("begins", flush=True)
kd.convert.convert(source, out, progress=progress)
"""
MOMENTS = ["start", "read", "write", "files", "rename"]


def killed(source: Path, out: Path, moment: str, by: str) -> int:
    code = [sys.executable, "-c", KILLED, str(source), str(out), moment]
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'runtime'}:{ROOT}", "SIGNAL": by}
    return subprocess.run(code, env=env, capture_output=True, timeout=100).returncode


@pytest.mark.parametrize("moment", MOMENTS)
def test_what_a_killed_conversion_leaves_the_next_one_removes(published, tmp_path, moment):
    out = tmp_path / "made" / "out"
    assert killed(published, out, moment, "SIGKILL") == -signal.SIGKILL
    (left,) = out.parent.iterdir()
    assert left.name == ".out.kd-partial" and (left / LOCK).exists()
    if moment != "start" and moment != "read":
        assert any(left.glob("packed-rank-*"))
    convert(published, out)
    assert [p.name for p in out.parent.iterdir()] == ["out"]
    assert checkpoint.verify(out)["faults"] == [] and not (out / LOCK).exists()


@pytest.mark.parametrize("moment", ["start", "write", "rename"])
def test_ctrl_c_leaves_nothing(published, tmp_path, moment):
    out = tmp_path / "made" / "out"
    assert killed(published, out, moment, "SIGINT") != 0
    assert list(out.parent.iterdir()) == []


def test_a_conversion_that_runs_is_left_alone(capsys, published, tmp_path):
    """Another one to the same place is refused at once, and does not touch it."""
    out = tmp_path / "made" / "out"
    tried = []

    def progress(now):
        if not tried:
            tried.append(kdctl(capsys, "convert", published, out))
            assert (out.parent / ".out.kd-partial" / LOCK).exists()

    convert(published, out, progress=progress)
    ((code, error),) = tried
    assert (code, error["name"]) == (6, "KD_E_BUSY") and "another conversion" in error["message"]
    assert checkpoint.verify(out)["faults"] == []


def test_a_place_where_no_folder_can_be(capsys, published):
    code, error = kdctl(capsys, "convert", published, "/proc/out")
    assert (code, error["name"]) == (1, "KD_E_IO") and "/proc/out: cannot be made" in error["message"]


def test_what_is_not_ours_is_not_removed(capsys, published, tmp_path):
    out = tmp_path / "made" / "out"
    out.parent.mkdir()
    (out.parent / ".out.kd-partial").symlink_to(tmp_path)
    code, error = kdctl(capsys, "convert", published, out)
    assert code == 1 and ".out.kd-partial is in the way" in error["message"]
    assert published.exists()


@pytest.mark.parametrize(("out", "code"), [("", 2), (".", 6), ("/", 6)])
def test_convert_to_what_is_there(capsys, published, monkeypatch, out, code):
    monkeypatch.chdir(published)
    assert run(["convert", str(published), out]) == code
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("again", [False, True])
def test_an_interrupt_says_what_is_left(capsys, published, tmp_path, monkeypatch, again):
    """The first one waits for the removal of what there was; the second one does not."""
    out = tmp_path / "made" / "out"

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("kd.convert.Engine", interrupted)
    if again:
        monkeypatch.setattr(shutil, "rmtree", interrupted)
    assert run(["convert", str(published), str(out)]) == 130
    left = f"{out.with_name('.out.kd-partial')} is left of it: the next conversion to {out} removes it"
    assert capsys.readouterr().err.splitlines()[-1] == (f"kdctl: {left}" if again else f"kdctl: {out} was not made")
    monkeypatch.undo()
    convert(published, out)
    assert [p.name for p in out.parent.iterdir()] == ["out"]
