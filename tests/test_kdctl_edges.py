"""kdctl where things go wrong: outputs that fail, values that cannot be, what goes to stderr for programs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from daemons import ENV, ROOT, Daemon
from kdctl_calls import COMMAND, caller, place_of

kdctl = pytest.fixture(caller)
place = pytest.fixture(place_of)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    made = Daemon(tmp_path_factory.mktemp("edges"), fake={}).wait()
    yield made
    made.kill()


@pytest.fixture
def on(kdctl, daemon):
    return lambda *words, code=0: kdctl(*words, code=code, endpoint=daemon.serve)


@pytest.mark.parametrize("where", [">/dev/full", ">&-"])
@pytest.mark.parametrize(
    "words", [["generate", "x", "--max-tokens", "5"], ["status"], ["status", "-o", "json"], ["-h"]]
)
def test_an_output_that_fails_is_one_sentence(daemon, where, words):
    command = [*COMMAND, "--endpoint", daemon.serve, *words]
    done = subprocess.run(
        ["bash", "-c", f'"$@" {where}', "x", *command], env=ENV, cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1, done.stderr
    assert "standard output" in done.stderr and len(done.stderr.splitlines()) == 1


def test_closed_streams_of_the_other_kinds(daemon):
    for tail, code in (("2>&-", 0), ("<&-", 0)):
        command = [*COMMAND, "--endpoint", daemon.serve, "status"]
        done = subprocess.run(["bash", "-c", f'"$@" {tail}', "x", *command], env=ENV, cwd=ROOT, capture_output=True)
        assert done.returncode == code, (tail, done.stderr)
    done = subprocess.run(
        ["bash", "-c", '"$@" <&-', "x", *COMMAND, "--endpoint", daemon.serve, "generate"],
        env=ENV,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr


def test_what_the_user_gave_wrong_is_usage(on, monkeypatch):
    import io

    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert "empty" in on("generate", code=2).err
    error = json.loads(on("generate", "x", "--max-tokens", "100000000", "-o", "json", code=2).err)
    assert error["code"] == 2


def test_a_budget_beyond_the_limit_names_the_setting(on):
    for words in (["generate", "x", "--builder", "heap"], ["builders", "use", "heap"]):
        assert "engine.max_nodes = 64" in on(*words, "--budget", "65", code=2).err
    on("generate", "x", "--builder", "heap", "--budget", "64", "--max-tokens", "2")


def test_values_that_cannot_be(kdctl, place):
    for words in (["--timeout", "0", "status"], ["stop", "--drain", "0s"], ["logs", "-n", "-1"]):
        kdctl(*words, code=2)
    for name in ("../x", "A", "x" * 33):
        assert "lower-case letters" in kdctl("--instance", name, "status", code=2).err
    error = kdctl("detokenize", "x", code=2).err
    assert "--ids" not in error and "not token ids" in error


def test_hints_name_the_same_daemon(kdctl, place):
    error = json.loads(kdctl("-o", "json", "--instance", "nope", "status", code=3).err)
    assert error["hint"] == "kdctl --instance nope start"


def test_a_log_of_no_lines_and_of_more_than_a_block(kdctl, place):
    (place / "default").mkdir(mode=0o700)
    (place / "default" / "daemon.log").write_text("".join(f"line {i} {'x' * 90}\n" for i in range(2000)))
    assert kdctl("logs", "-n", "0").out == ""
    assert kdctl("logs", "-n", "0", "-o", "json").json["lines"] == []
    assert len(kdctl("logs", "-n", "1500").out.splitlines()) == 1500


def test_stderr_has_no_notes_for_programs(on):
    done = on("bench", "--concurrency", "1", "--requests", "1", "--max-tokens", "4", "-o", "json")
    assert done.err == "" and done.json["rows"]
    assert on("generate", "x", "--max-tokens", "2", "--stats", "-o", "json").err == ""


def test_a_start_that_fails_is_one_document_for_programs(kdctl, place, library, tmp_path_factory):
    broken = tmp_path_factory.mktemp("broken")
    error = json.loads(kdctl("start", "--model", broken, "-o", "json", code=1).err)
    assert error["name"] == "START_FAILED" and error["exit_status"] == 65
    records = [json.loads(one) for one in error["tail"] if one.startswith("{")]
    assert len([r for r in records if r.get("reason")]) == 1, "the reason is logged once"


def test_load_leaves_the_path_to_the_daemon(kdctl, place, library, monkeypatch, tmp_path):
    kdctl("start")
    try:
        monkeypatch.chdir(tmp_path)
        done = kdctl("load", "nonexist", code=1)
        assert str(tmp_path / "nonexist") in done.err and "Usage" not in done.err
    finally:
        kdctl("stop", "--now")
