"""Model folders with damaged, odd and closed files, given to a daemon: refused with a sentence, never a hang."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from daemons import ENV, starter, until
from fake_model import SMALL3, write_model

import kd
from kd.client import KdClientError
from kd.files import read_bounded

start = pytest.fixture(starter)

NOBODY = 65534
SHARD = "model.safetensors"
FILES = ["tiktoken.model", "chat_template.jinja", "tokenizer_config.json", "golden.json", "config.json", SHARD]


@pytest.fixture(scope="module")
def common():
    """A folder that any user may enter, unlike pytest's own."""
    place = Path(tempfile.mkdtemp(prefix="kd-test-"))
    place.chmod(0o755)
    yield place
    shutil.rmtree(place)


@pytest.fixture(scope="module")
def whole(common, library, nano) -> Path:
    """A small model with every file that the daemon reads."""
    shape = {
        **SMALL3,
        "layers": 2,
        "heads": 2,
        "inter": 96,
        "moe_inter": 64,
        "experts": 3,
        "vocab": 4096,
        "draft": None,
    }
    folder = write_model(common / "whole", **shape)
    for name in ("tiktoken.model", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(nano / name, folder)
    with kd.Engine(folder, library=library) as engine:
        tokens = engine.generate([1, 2, 3], max_tokens=4, ignore_eos=True).tokens
        content_hash = f"{engine.info.content_hash:016x}"
    golden = {"prompt_tokens": [1, 2, 3], "tokens": tokens, "content_hash": content_hash}
    (folder / "golden.json").write_text(json.dumps(golden))
    return folder


AS_NOBODY = """
import os, signal, sys
import difflib, grp, tomllib  # and all the rest that is imported late: the interpreter's own files are root's
import kd.chat, kd.engine, kd.server, kd.tokenizer
from kd import __main__ as entry
with kd.Engine(sys.argv[1]) as engine:
    engine.generate("x", max_tokens=2)
    engine.chat.render([{"role": "user", "content": "x"}])
if os.geteuid() == 0:
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
signal.alarm(100)
os._exit(entry.main(sys.argv[2:]))
"""


def serve_as_nobody(whole: Path, place: Path, folder: Path, log: Path, *args: str) -> subprocess.Popen:
    place.mkdir(mode=0o700)
    if os.geteuid() == 0:
        os.chown(place, NOBODY, NOBODY)
    settings = ["--set", f"server.runtime_dir={place}", "--log-format", "json", "--model", str(folder)]
    with log.open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "-c", AS_NOBODY, str(whole), *settings, *args], env=ENV, stdout=out, stderr=out
        )


def put_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def put_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def put_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def close_to_others(path: Path) -> None:
    path.chmod(0)


@pytest.mark.parametrize("name", FILES)
def test_what_is_no_readable_file_is_refused_at_start(whole, common, tmp_path, name):
    """Never a hang, never a model that serves without what the folder says it has."""
    running = {}
    for damage in (put_fifo, put_link, put_folder, close_to_others):
        key = f"{name}-{damage.__name__}"
        folder = Path(shutil.copytree(whole, common / key))
        damage(folder / name)
        log = tmp_path / key
        running[damage] = serve_as_nobody(whole, common / f"{key}-rt", folder, log), log, folder
    for damage, (process, log, folder) in running.items():
        assert process.wait(60) == 65, f"{damage.__name__}\n{log.read_text()}"
        reasons = [r["reason"] for r in map(json.loads, log.read_text().splitlines()) if r["level"] == "error"]
        assert len(reasons) == 1 and str(folder / name) in reasons[0], reasons


def test_a_folder_of_another_user_is_refused_at_start(whole, common, tmp_path):
    folder = Path(shutil.copytree(whole, common / "closed"))
    folder.chmod(0)
    log = tmp_path / "log"
    assert serve_as_nobody(whole, common / "closed-rt", folder, log).wait(60) == 65, log.read_text()
    assert "cannot be read by user" in log.read_text()
    folder.chmod(0o755)
    process = serve_as_nobody(whole, common / "open-rt", folder, log, "--instance", "open")
    try:
        until(lambda: "state ready" in log.read_text() or process.poll() is not None)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, log.read_text()
    finally:
        process.kill()


@pytest.mark.parametrize("name", FILES)
def test_what_is_no_readable_file_is_refused_by_load(whole, tmp_path, start, name):
    daemon = start(model=None, state="empty", real=True)
    with daemon.client() as client:
        for damage in (put_fifo, put_link, put_folder):
            folder = Path(shutil.copytree(whole, tmp_path / damage.__name__))
            damage(folder / name)
            with pytest.raises(KdClientError) as caught:
                client.load(folder, timeout_s=30)
            assert caught.value.name in ("MODEL", "IO") and str(folder / name) in caught.value.message
            assert client.status()["state"] == "empty"
        assert client.load(whole)["state"] == "ready"


def test_bounded_reads_leave_no_descriptor_behind(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "good").write_bytes(b"12345")
    before = set(os.listdir("/proc/self/fd"))
    for bad in ("fifo", ".", "/dev/zero", "absent"):
        with pytest.raises(OSError):
            read_bounded(tmp_path / bad, 10)
    with pytest.raises(OSError, match="larger than 4 bytes"):
        read_bounded(tmp_path / "good", 4)
    assert read_bounded(tmp_path / "good", 5) == b"12345"
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_flipped_weight_byte_is_refused(nano, tmp_path, start):
    """Greedy tokens may well survive one wrong byte: the content hash does not."""
    folder = Path(shutil.copytree(nano, tmp_path / "nano"))
    shards = sorted(folder.rglob("*.safetensors"))
    assert [s.parent.name for s in shards] == ["draft", "nano", "nano"]
    daemon = start(model=None, state="empty", real=True)
    for shard in shards:
        whole = shard.read_bytes()
        at = 8 + int.from_bytes(whole[:8], "little")
        at += 2 * ((len(whole) - at) // 4)  # the low byte of a number half-way through the tensors
        shard.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with daemon.client() as client:
            with pytest.raises(KdClientError) as caught:
                client.load(folder)
            assert caught.value.name == "MODEL" and "content hash" in caught.value.message
            assert client.status()["state"] == "empty"
        if shard == shards[-1]:
            failing = start(model=folder, state=None, real=True)
            assert failing.end() == 65
            assert "content hash" in failing.log()
        shard.write_bytes(whole)
    with daemon.client() as client:
        assert client.load(folder)["state"] == "ready"
        client.unload()
        assert client.load(folder, draft="none")["state"] == "ready"  # the hash is with the folder's own drafter


def flip_middle_of_last_shard(folder: Path) -> None:
    shard = sorted(p for p in folder.glob("*.safetensors"))[-1]
    data = bytearray(shard.read_bytes())
    at = 8 + int.from_bytes(data[:8], "little")
    data[at + 2 * ((len(data) - at) // 4)] ^= 4
    shard.write_bytes(data)


def test_the_target_alone_is_compared_too(nano, tmp_path, start):
    """Without a drafter, by choice or since the folder has none any more, there is a hash of the target alone."""
    folder = Path(shutil.copytree(nano, tmp_path / "nano"))
    daemon = start(model=None, state="empty", real=True)
    with daemon.client() as client:
        assert client.load(folder, draft="none")["state"] == "ready"
        client.unload()
        assert client.load(folder, draft=str(nano / "draft"))["state"] == "ready"
        assert any("golden.json" in r["message"] for r in daemon.records() if r["level"] == "warning")
        client.unload()
        shutil.rmtree(folder / "draft")
        assert client.load(folder)["state"] == "ready"
        client.unload()
        flip_middle_of_last_shard(folder)
        for draft in ("auto", "none"):
            with pytest.raises(KdClientError, match="target_hash"):
                client.load(folder, draft=draft)


def test_another_tokenizer_is_refused(nano, tmp_path, start):
    folder = Path(shutil.copytree(nano, tmp_path / "nano"))
    lines = (folder / "tiktoken.model").read_text().splitlines()
    (one, a), (two, b) = (lines[i].split() for i in (324, 325))
    lines[324:326] = [f"{two} {a}", f"{one} {b}"]
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    daemon = start(model=None, state="empty", real=True)
    with daemon.client() as client, pytest.raises(KdClientError, match="tiktoken.model is not the file"):
        client.load(folder)
