"""kdctl verify-checkpoint and convert compare with everything that is known of a folder, and say in one sentence what differs."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from fake_model import SMALL3, write_model

from kd import Engine, KdError, checkpoint, hashing
from kd.convert import LOCK, convert
from kdctl.__main__ import run

INDEX = "model.safetensors.index.json"
PACKED = [f"packed-rank-{rank}.safetensors" for rank in (0, 1)]
TWO = "model-00002-of-00003.safetensors"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def originals(library, tmp_path_factory) -> dict[str, Path]:
    """A published folder that has a golden.json, and a packed one of it. Parts of the packed one are longer than a piece."""
    place = tmp_path_factory.mktemp("originals")
    kind = {**SMALL3, "shards": 3, "prefix": "language_model.", "vocab": 90_003, "hidden": 128}
    published = write_model(place / "published", **kind)
    prompt = [3, 50, 7]
    with Engine(published, threads=1, library=library) as engine:
        tokens = engine.generate(prompt, max_tokens=4, ignore_eos=True).tokens
        info = engine.info
    config = (published / "config.json").read_bytes()
    golden = {"prompt_tokens": prompt, "tokens": tokens, "files": {"config.json": hashlib.sha256(config).hexdigest()}}
    golden |= {"content_hash": f"{info.content_hash:016x}", "target_hash": f"{info.target_hash:016x}"}
    (published / "golden.json").write_text(json.dumps(golden))
    convert(published, place / "packed", tp=2)
    return {"published": published, "packed": place / "packed"}


@pytest.fixture(params=["published", "packed"])
def folder(originals, tmp_path, request) -> Path:
    return Path(shutil.copytree(originals[request.param], tmp_path / request.param))


@pytest.fixture
def published(originals, tmp_path) -> Path:
    return Path(shutil.copytree(originals["published"], tmp_path / "published"))


@pytest.fixture
def packed(originals, tmp_path) -> Path:
    return Path(shutil.copytree(originals["packed"], tmp_path / "packed"))


def kdctl(capsys, *words) -> tuple[int, dict]:
    code = run([*map(str, words), "-o", "json"])
    out, err = capsys.readouterr()
    return code, json.loads(out or err)


def faults(capsys, folder: Path, *words) -> list[dict]:
    code, found = kdctl(capsys, "verify-checkpoint", folder, *words)
    assert code == bool(found["faults"])
    return found["faults"]


def flip(path: Path, at: int, bit: int = 1) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ bit]))


def header_of(path: Path) -> tuple[dict, int]:
    data = path.read_bytes()
    n = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + n]), 8 + n


def edit(path: Path, change) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def test_whole_folders_are_whole(capsys, folder):
    code, found = kdctl(capsys, "verify-checkpoint", folder)
    assert (code, found["faults"]) == (0, []) and found["hashed"] == found["files"] and found["compared"] >= 3
    code, again = kdctl(capsys, "verify-checkpoint", folder)
    assert (code, again["cached"], again["compared"]) == (0, found["files"], found["compared"])
    assert faults(capsys, folder, "--draft", "none") == []
    assert faults(capsys, folder, "--no-hashes") == []


# ---- packed folders ------------------------------------------------------------------------------------------------------


def test_a_flipped_byte_of_a_packed_file_is_named(capsys, packed):
    path = packed / PACKED[1]
    header, begin = header_of(path)
    size = path.stat().st_size
    for at in (begin, begin + (16 << 20) - 1, begin + (16 << 20), (begin + size) // 2, size - 1):
        flip(path, at)
        (one,) = faults(capsys, packed)
        first, last = (int(word) for word in one["what"].removeprefix("bytes ").split(" are ")[0].split(" to "))
        assert one["file"] == PACKED[1] and one["offset"] == first <= at < last <= first + (16 << 20)
        part = header[one["tensor"]]["data_offsets"]
        assert part[0] <= at - begin < part[1]
        flip(path, at)
    assert faults(capsys, packed) == []


def test_every_byte_of_a_packed_header_counts(capsys, packed):
    """Not only those that the layout needs: a count of parameters that is another is damage, too."""
    path = packed / PACKED[0]
    text = path.read_bytes()[: header_of(path)[1]]
    for word in (
        b'"parameters":"',
        b'"content_hash":"',
        b'"hashes":"',
        b'"header_hash":"',
        b'"fingerprint":"',
        b'":{"dtype',
    ):
        at = text.index(word) + len(word)
        flip(path, at)
        found = faults(capsys, packed)
        assert found and found[0]["file"] == PACKED[0], word
        with pytest.raises(KdError, match=PACKED[0]), Engine(packed, tp=2, threads=1):
            pass
        flip(path, at)
    assert faults(capsys, packed, "--no-hashes") == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_rank_is_named(capsys, packed, rank):
    (packed / PACKED[rank]).unlink()
    (one,) = faults(capsys, packed, "--no-hashes")
    assert one["file"] == PACKED[rank] and "packed for 2 ranks" in one["what"]
    with pytest.raises(KdError, match=PACKED[rank]), Engine(packed, tp=2, threads=1):
        pass


def test_files_of_other_conversions_are_named(capsys, packed, originals, tmp_path):
    convert(originals["published"], tmp_path / "four", tp=4)
    shutil.copy(tmp_path / "four" / "packed-rank-3.safetensors", packed)
    (one,) = faults(capsys, packed, "--no-hashes")
    assert one["file"] == "packed-rank-3.safetensors" and "for 4 ranks, the others for 2" in one["what"]
    (packed / "packed-rank-3.safetensors").rename(packed / PACKED[1])
    assert any("rank 3" in f["what"] for f in faults(capsys, packed, "--no-hashes"))
    edit(packed / "config.json", lambda c: c.update(note=1))
    assert any(f["file"] == "config.json" for f in faults(capsys, packed, "--no-hashes"))


SIDES = ["config.json", "generation_config.json", "draft/config.json"]


@pytest.mark.parametrize("name", SIDES)
def test_a_flipped_byte_beside_packed_files_is_named(capsys, packed, name):
    data = bytearray((packed / name).read_bytes())
    data[data.index(b"\n")] = ord(" ")  # still the same JSON
    (packed / name).write_bytes(data)
    assert name in {f["file"] for f in faults(capsys, packed)}
    (packed / name).unlink()
    assert name in {f["file"] for f in faults(capsys, packed)}


# ---- golden.json ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [TWO, "draft/model.safetensors"])
def test_a_flipped_byte_differs_from_golden_json(capsys, published, name):
    flip(published / name, (published / name).stat().st_size - 2)
    (one,) = faults(capsys, published)
    assert one["file"] == "golden.json" and "content hash" in one["what"]
    assert ("target_hash" in one["what"]) == (name == TWO)
    assert bool(faults(capsys, published, "--draft", "none")) == (name == TWO)


@pytest.mark.parametrize("key", ["content_hash", "target_hash"])
def test_golden_json_of_another_folder(capsys, folder, key):
    edit(folder / "golden.json", lambda g: g.update({key: "0" * 16}))
    assert any(f["file"] == "golden.json" and key in f["what"] for f in faults(capsys, folder))


def test_files_that_golden_json_names(capsys, folder):
    edit(folder / "golden.json", lambda g: g["files"].update({"config.json": "0" * 64, "tiktoken.model": "1" * 64}))
    found = {f["file"]: f["what"] for f in faults(capsys, folder)}
    assert "is not the file golden.json was made with" in found["config.json"]
    assert "cannot be read" in found["tiktoken.model"]
    (folder / "golden.json").write_text("{")
    assert any(f["file"] == "golden.json" and "cannot be used" in f["what"] for f in faults(capsys, folder))


def test_a_drafter_that_is_gone(capsys, published):
    shutil.rmtree(published / "draft")
    (one,) = faults(capsys, published)
    assert one["file"] == "draft" and "--draft none" in one["what"]
    assert faults(capsys, published, "--draft", "none") == []


def test_a_drafter_from_elsewhere_leaves_the_target_compared(capsys, published, originals):
    elsewhere = originals["published"] / "draft"
    assert faults(capsys, published, "--draft", elsewhere) == []
    flip(published / TWO, (published / TWO).stat().st_size - 2)
    (one,) = faults(capsys, published, "--draft", elsewhere)
    assert "target_hash" in one["what"]


# ---- --write -------------------------------------------------------------------------------------------------------------


def test_hashes_are_written_only_of_what_agrees(capsys, folder):
    """A damaged folder is not blessed, whatever it is that knows better."""
    before = (folder / "kd-hashes.json").read_bytes() if (folder / "kd-hashes.json").exists() else None
    name = TWO if (folder / TWO).exists() else PACKED[1]
    flip(folder / name, (folder / name).stat().st_size - 2)
    code, found = kdctl(capsys, "verify-checkpoint", folder, "--write")
    assert code == 1 and found["faults"] and found["written"] == []
    after = (folder / "kd-hashes.json").read_bytes() if (folder / "kd-hashes.json").exists() else None
    assert after == before
    run(["verify-checkpoint", str(folder), "--write"])
    assert "no kd-hashes.json was written" in capsys.readouterr().out


def test_written_hashes_name_file_tensor_and_byte(capsys, folder, monkeypatch):
    monkeypatch.setattr(hashing, "PIECE_BYTES", 1 << 16)
    (folder / "kd-hashes.json").unlink(missing_ok=True)  # its pieces are longer
    assert kdctl(capsys, "verify-checkpoint", folder, "--write")[1]["written"]
    name = TWO if (folder / TWO).exists() else PACKED[1]
    header, begin = header_of(folder / name)
    at = begin + 200_000
    flip(folder / name, at)
    one = next(f for f in faults(capsys, folder) if "kd-hashes.json" in f["what"])
    assert one["file"] == name and one["offset"] == at // (1 << 16) * (1 << 16)
    offsets = header[one["tensor"]]["data_offsets"]
    assert offsets[0] <= one["offset"] + (1 << 16) - begin and offsets[1] > one["offset"] - begin


def test_neighbouring_pieces_are_one_fault(capsys, published, monkeypatch):
    monkeypatch.setattr(hashing, "PIECE_BYTES", 1 << 16)
    checkpoint.verify(published, write=True)
    for piece in (3, 4, 5, 9):
        flip(published / TWO, (piece << 16) + 5, bit=0x80)
    found = [f for f in faults(capsys, published) if "kd-hashes.json" in f["what"]]
    assert [f["offset"] for f in found] == [3 << 16, 9 << 16]
    assert f"bytes {3 << 16} to {6 << 16}" in found[0]["what"]


def test_what_cannot_be_written_is_said_before_reading(capsys, published, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(checkpoint, "_read", lambda *_, **__: pytest.fail("hours of reading for nothing"))
    code, error = kdctl(capsys, "verify-checkpoint", published, "--write")
    assert (code, error["name"]) == (9, "PERMISSION")
    assert str(published) in error["message"] and "without --write" in error["message"]


def test_a_read_only_disk(capsys, published, monkeypatch):
    def full(*_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "replace", full)
    code, error = kdctl(capsys, "verify-checkpoint", published, "--write")
    assert code == 9 and "Read-only file system" in error["message"]
    assert not list(published.glob(".kd-hashes*"))


def test_writing_needs_the_hashes(capsys, published):
    assert run(["verify-checkpoint", str(published), "--write", "--no-hashes"]) == 2
    assert "--no-hashes" in capsys.readouterr().err


def test_hashes_of_files_elsewhere_are_refused(capsys, published):
    (published / "kd-hashes.json").write_text(
        json.dumps({"piece_bytes": 64 << 20, "files": {"../x": {"bytes": 1, "pieces": ["0"]}}})
    )
    (one,) = faults(capsys, published)
    assert one["file"] == "kd-hashes.json" and "not in the folder" in one["what"]


# ---- sentences -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["inspect", "verify-checkpoint", "convert"])
def test_what_is_no_folder(capsys, tmp_path, verb):
    more = [tmp_path / "out"] if verb == "convert" else []
    code, error = kdctl(capsys, verb, tmp_path / "none", *more)
    assert (code, error["name"]) == (5, "KD_E_NOT_FOUND") and str(tmp_path / "none") in error["message"]
    assert "there is no such folder" in error["message"]
    (tmp_path / "file").touch()
    code, error = kdctl(capsys, verb, tmp_path / "file", *more)
    assert (code, error["name"]) == (5, "KD_E_NOT_FOUND") and "is a file" in error["message"]
    (tmp_path / "empty").mkdir()
    code, found = kdctl(capsys, verb, tmp_path / "empty", *more)
    assert code == 1
    if verb == "verify-checkpoint":
        (one,) = found["faults"]
        sentence = one["what"]
    else:
        sentence = found["message"]
        assert str(tmp_path / "empty") in sentence
    assert "holds no model" in sentence and "kdctl convert" in sentence and len(sentence) < 300
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


def test_one_sentence_for_however_many_tensors(capsys, published):
    def change(index):
        names = sorted(index["weight_map"])
        index["weight_map"].update(dict.fromkeys(names[:40], "../elsewhere.safetensors"))
        index["weight_map"].update({f"ghost.{i}": TWO for i in range(30)})

    edit(published / INDEX, change)
    found = faults(capsys, published, "--no-hashes")
    by = {(f["file"], " ".join(f["what"].split()[:3])): f for f in found}
    outside = by[INDEX, "is said to"]
    assert (
        "'../elsewhere.safetensors', and so are 39 more" in outside["what"] and "only names of files" in outside["what"]
    )
    ghost = by[TWO, "is not in"]
    assert ghost["tensor"] == "ghost.0" and "and so are 29 more; the index says" in ghost["what"]
    assert len(found) <= 5  # and a sentence for each shard that holds tensors the index now places elsewhere


def test_an_empty_shard(capsys, published, library):
    checkpoint.verify(published, write=True)  # told once, not by its hash again
    (published / TWO).write_bytes(b"")
    (one,) = faults(capsys, published)
    assert (one["file"], one["offset"], one["what"]) == (TWO, 0, "the file is empty: fetch it again")
    with pytest.raises(KdError, match=f"{TWO}: is empty; fetch it again"), Engine(published, library=library):
        pass


def test_a_fifo_is_no_file_to_wait_for(capsys, published):
    (published / "generation_config.json").unlink()
    os.mkfifo(published / "generation_config.json")
    assert any(f["file"] == "generation_config.json" for f in faults(capsys, published))


# ---- convert -------------------------------------------------------------------------------------------------------------


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


def test_what_is_no_fault_of_writing_is_not_told_as_one(capsys, published):
    shutil.rmtree(published / "draft", ignore_errors=True)
    (published / "draft").write_text("hi")
    code, found = kdctl(capsys, "verify-checkpoint", published)
    assert code == 1 and [(f["file"], f["what"].split(",")[0]) for f in found["faults"]] == [("draft", "is no folder")]


def test_hashes_that_cannot_be_written(capsys, published, monkeypatch):
    def full(self, text):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        code, error = kdctl(capsys, "verify-checkpoint", published, "--write")
    assert code == 9 and "(No space left on device): verify without --write, or mend that" in error["message"]
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: Path(path).name != "draft")
        code, error = kdctl(capsys, "verify-checkpoint", published, "--write")
    assert code == 9 and error["message"].startswith(f"{published / 'draft'}: kd-hashes.json cannot be written")
    assert not (published / "kd-hashes.json").exists()  # not half of it


@pytest.mark.parametrize(("out", "code"), [("", 2), (".", 6), ("/", 6)])
def test_convert_to_what_is_there(capsys, published, monkeypatch, out, code):
    monkeypatch.chdir(published)
    assert run(["convert", str(published), out]) == code
    assert "Traceback" not in capsys.readouterr().err


def test_inspect_of_a_packed_folder_fits_its_own_ranks_alone(capsys, published, tmp_path):
    convert(published, tmp_path / "packed", tp=2)
    rows = kdctl(capsys, "inspect", tmp_path / "packed", "--device", "cpu")[1]["memory"]
    assert {row["tp"]: row["fits"] for row in rows}[1] == "no: packed for 2 ranks"
    assert [row["tp"] for row in rows if row["fits"] == "yes"] == [2]
