"""kdctl restart: what it keeps of the start and the load before, and what it refuses before it stops anything."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from daemons import until
from kdctl_calls import caller, held_before_start, place_of

from kd.convert import convert
from kd.native import library_paths
from kdctl import output, started
from kdctl.look_first import look_first

kdctl = pytest.fixture(caller)
place = pytest.fixture(place_of)
slow = pytest.fixture(held_before_start)


def test_restart_keeps_what_start_was_told(kdctl, place, library, nano, tmp_path):
    def words():
        return (Path("/proc") / str(data["pid"]) / "cmdline").read_text().split("\0")

    def threads_and_chunk():
        """As the running daemon was told."""
        return [w.partition("=")[2] for w in words() if w.startswith(("engine.threads=", "engine.prefill_chunk="))]

    file = tmp_path / "kd.toml"
    file.write_text("[engine]\nmax_queue = 7\n")
    data = kdctl(
        "start", "--config", file, "--set", "engine.threads=1", "--set", "engine.prefill_chunk=64", "-o", "json"
    ).json
    assert (place / "default" / "started.json").stat().st_mode & 0o777 == 0o600
    kdctl("load", nano)
    data = kdctl("restart", "-o", "json").json
    assert threads_and_chunk() == ["1", "64"] and data["model"] == str(nano)
    data = kdctl("restart", "--set", "engine.threads=2", "-o", "json").json
    assert threads_and_chunk() == ["1", "64", "2"] and data["model"] == str(nano)  # the last one counts
    assert str(file) in words()
    kdctl("stop", "--now")
    data = kdctl("restart", "-o", "json").json  # what is not running, too
    assert threads_and_chunk() == ["1", "64", "2"]
    kdctl("stop", "--now")
    data = kdctl("start", "--set", "engine.threads=1", "-o", "json").json  # a start is not told by the one before
    assert threads_and_chunk() == ["1"] and data["model"] is None
    told = place / "default" / "started.json"
    told.write_text(told.read_text().replace(str(data["pid"]), "1"))
    data = kdctl("restart", "-o", "json").json  # of a daemon that somebody else has started
    assert threads_and_chunk() == []
    told.write_text("{")
    kdctl("restart")
    kdctl("stop", "--now")
    data = kdctl("start", "--set", f"model.path={nano}", "--set", "engine.threads=1", "-o", "json").json
    for bad in ("engine.tp=3", "nonsense.x=1", "engine"):
        kdctl("restart", "--set", bad, code=2 if bad == "engine" else 78)
        assert words()[0] and kdctl("health").err == ""  # nothing was stopped for it
    broken = tmp_path / "broken"
    shutil.copytree(nano, broken)
    (broken / "model.safetensors.index.json").write_text("[]")
    packed = tmp_path / "packed"
    convert(nano, packed, tp=2)
    damaged = [
        Path(shutil.copytree(nano, tmp_path / name))
        for name in ("golden.json", "tokenizer_config.json", "tiktoken.model")
    ]
    for folder in damaged:
        (folder / folder.name).write_text("{bad")
    for bad in (
        f"model.path={tmp_path / 'nowhere'}", f"model.path={broken}", f"model.draft={tmp_path / 'nowhere'}",
        *(f"model.path={folder}" for folder in damaged),
        f"model.path={packed}", "builder.name=nonsense",
        *(["engine.device=cuda"] if not any(map(Path.is_file, library_paths("cuda"))) else []),
    ):  # fmt: skip
        assert "nothing was stopped" in kdctl("restart", "--set", bad, code=1).err
        assert words()[0] and kdctl("health").err == ""
    kdctl("stop", "--now")
    kdctl("start", "--model", broken, code=1)
    data = kdctl("restart", "-o", "json").json  # what has never served is not what is started again
    assert data["model"] == str(nano) and threads_and_chunk() == ["1"]
    other = tmp_path / "other"
    shutil.copytree(nano, other)
    kdctl("load", "--replace", other)
    data = kdctl("restart", "-o", "json").json
    assert data["model"] == str(other) and threads_and_chunk() == ["1"]  # what was loaded, not what was told first
    kdctl("stop", "--now")


def test_restart_keeps_what_load_was_told(kdctl, place, library, nano, tmp_path):
    linked = Path(shutil.copytree(nano, tmp_path / "linked"))
    for file in (*linked.glob("model-*.safetensors"), linked / "golden.json"):
        file.unlink()
        file.symlink_to(nano / file.name)
    kdctl("start")
    kdctl("load", linked, "--follow-links", "--draft", "none")
    for _ in range(2):
        done = kdctl("restart")
        assert "not kept" not in done.err
        model = kdctl("status", "-o", "json").json["model"]
        kept = (model["path"], model["draft"], model["follow_links"], model["draft_layers"])
        assert kept == (str(linked), "none", True, 0)
    told = json.loads((place / "default" / "started.json").read_text())["set"]
    assert sorted(told) == ["model.draft=none", "model.follow_links=true"]  # once, however often
    kdctl("restart", "--set", f"model.draft={nano / 'draft'}")  # what is given on top
    model = kdctl("status", "-o", "json").json["model"]
    assert (model["draft"], model["draft_layers"] > 0) == (str(nano / "draft"), True)
    done = kdctl("restart", "--model", linked, "--set", "model.draft=none")  # the same folder, said again
    assert "is not kept" not in done.err and kdctl("status", "-o", "json").json["model"]["follow_links"] is True
    said = [
        f"kdctl: {item} was for {linked} and is not kept" for item in ("model.draft=none", "model.follow_links=true")
    ]
    done = kdctl(
        "restart", "--set", f"model.path={nano}"
    )  # another one: what was told for the one before is not for it
    model = kdctl("status", "-o", "json").json["model"]
    assert (model["path"], model["draft"], model["follow_links"]) == (str(nano), "auto", False)
    assert all(one in done.err for one in said)
    kdctl("load", "--replace", linked, "--follow-links", "--draft", "none")
    done = kdctl("restart", "--model", nano, "--set", f"model.draft={nano / 'draft'}")
    model = kdctl("status", "-o", "json").json["model"]
    assert (model["draft"], model["follow_links"]) == (str(nano / "draft"), False) and said[1] in done.err
    kdctl("builders", "use", "chain", "--budget", "5")
    done = kdctl("restart")
    kept = "kdctl: builder chain was set by a command and is not kept: --set builder.name=chain --set builder.budget=5"
    assert f"{kept} starts with it" in done.err.splitlines()
    assert kdctl("status", "-o", "json").json["daemon"]["builder_told"] is None
    kdctl("builders", "use", "chain")
    assert "not kept" not in kdctl("restart", "--set", "builder.name=heap").err
    kdctl("stop", "--now")


def test_restart_knows_a_tp_that_does_not_divide(monkeypatch, nano):
    ranks = [{"tp": 1}, {"tp": 2, "refused": "3 heads: tensor parallelism of 2 does not divide them"}]
    monkeypatch.setattr("kd.checkpoint.inspect", lambda *_, **__: {"ranks": ranks, "target": about["target"]})
    about = {"target": {"vocab": 4096, "max_positions": 2048}}
    for tp in (1, 2):
        config = SimpleNamespace(
            engine=SimpleNamespace(device="cpu", tp=tp),
            builder=SimpleNamespace(name=""),
            model=SimpleNamespace(path=str(nano), draft="auto", follow_links=False),
        )
        if tp == 1:
            look_first(config, "/", None)
        else:
            with pytest.raises(output.Failure, match="does not divide them; nothing was stopped"):
                look_first(config, "/", None)


def test_restart_knows_a_library_that_is_cut_short(monkeypatch, library, tmp_path):
    cut = tmp_path / "libkd_cpu.so"
    cut.write_bytes(library.read_bytes()[:-1])
    monkeypatch.setattr("kd.native.find_library", lambda _: cut)
    with pytest.raises(output.Failure, match="is cut short: .*; nothing was stopped"):
        look_first(SimpleNamespace(engine=SimpleNamespace(device="cpu")), "/", None)


def test_restart_stops_a_daemon_that_has_no_socket_yet(kdctl, place, library, slow):
    pid = kdctl("start", "--wait", "none", "--set", "engine.threads=1", "-o", "json").json["pid"]
    try:
        again = kdctl("restart", "--wait", "none", "-o", "json").json["pid"]
        words = Path("/proc") / str(again) / "cmdline"
        until(lambda: words.read_text().count("engine.threads=1") == 1)  # it may be just before its exec
        assert again != pid
        assert started.born(pid) is None
        kdctl("stop")
    finally:
        subprocess.run(["kill", "-9", str(pid), str(again)], capture_output=True)
