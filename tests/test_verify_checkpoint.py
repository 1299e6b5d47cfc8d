"""kdctl verify-checkpoint compares with everything that is known of a folder, and says in one sentence what differs."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
from pathlib import Path

import pytest
from checkpoints import INDEX, PACKED, TWO, edit, faults, flip, header_of, kdctl

from kd import Engine, KdError, checkpoint, hashing
from kd.convert import convert
from kdctl.__main__ import run

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(params=["published", "packed"])
def folder(originals, tmp_path, request) -> Path:
    return Path(shutil.copytree(originals[request.param], tmp_path / request.param))


@pytest.fixture
def published(originals, tmp_path) -> Path:
    return Path(shutil.copytree(originals["published"], tmp_path / "published"))


@pytest.fixture
def packed(originals, tmp_path) -> Path:
    return Path(shutil.copytree(originals["packed"], tmp_path / "packed"))


def test_whole_folders_are_whole(capsys, folder):
    code, found = kdctl(capsys, "verify-checkpoint", folder)
    assert (code, found["faults"]) == (0, []) and found["hashed"] == found["files"] and found["compared"] >= 3
    code, again = kdctl(capsys, "verify-checkpoint", folder)
    assert (code, again["cached"], again["compared"]) == (0, found["files"], found["compared"])
    code, again = kdctl(capsys, "verify-checkpoint", folder, "--again")
    assert (code, again["faults"], again["hashed"], again["cached"]) == (0, [], found["files"], 0)
    code, again = kdctl(capsys, "verify-checkpoint", folder)
    assert (code, again["cached"]) == (0, found["files"])
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


@pytest.mark.parametrize("key, ids", [("prompt_tokens", [1, 10**6]), ("tokens", [10**6]), ("tokens", [1] * 100_000)])
def test_golden_json_of_a_larger_model(capsys, folder, key, ids):
    edit(folder / "golden.json", lambda g: g.update({key: ids}))
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


@pytest.mark.parametrize("how", ["folder", "fifo", "link", "empty"])
@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "golden.json", INDEX, TWO, "draft/config.json"]
)
def test_one_cause_is_told_once(capsys, published, tmp_path, name, how):
    checkpoint.verify(published, write=True)
    path = published / name
    shutil.move(path, tmp_path / "moved")
    if how == "folder":
        path.mkdir()
    elif how == "fifo":
        os.mkfifo(path)
    elif how == "link":
        path.symlink_to(tmp_path / "moved")
    else:
        path.touch()
    found = [fault for fault in faults(capsys, published) if fault["file"] == name]
    assert len(found) == 1, found


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
    """Of any byte: the tensor it is in, and at most PIECE_BYTES of that."""
    monkeypatch.setattr(hashing, "PIECE_BYTES", 1 << 16)
    (folder / "kd-hashes.json").unlink(missing_ok=True)  # its pieces are longer
    assert kdctl(capsys, "verify-checkpoint", folder, "--write")[1]["written"]
    name = TWO if (folder / TWO).exists() else PACKED[1]
    header, begin = header_of(folder / name)
    offsets = {key: of["data_offsets"] for key, of in header.items() if key != "__metadata__"}
    chance = random.Random(5)
    filled = [key for key, (first, end) in offsets.items() if end > first]
    for tensor in chance.sample(filled, min(12, len(filled))):
        first, end = (begin + at for at in offsets[tensor])
        at = chance.choice([first, end - 1, chance.randrange(first, end)])
        flip(folder / name, at)
        (one,) = (f for f in faults(capsys, folder) if "kd-hashes.json" in f["what"])
        low, high = map(int, re.match(r"bytes (\d+) to (\d+) are not", one["what"]).groups())
        assert (one["file"], one["tensor"], one["offset"]) == (name, tensor, low)
        assert max(first, at - (1 << 16)) <= low <= at < high <= min(end, low + (1 << 16))
        flip(folder / name, at)


def test_the_header_is_a_piece_of_its_own(capsys, published):
    checkpoint.verify(published, write=True)
    data = (published / TWO).read_bytes()
    at = data.index(b"language_model")
    flip(published / TWO, at + 3)  # another name
    found = [f for f in faults(capsys, published) if "kd-hashes.json" in f["what"]]
    assert [(f["tensor"], f["offset"]) for f in found] == [("", 0)]
    assert found[0]["what"].startswith(f"bytes 0 to {header_of(published / TWO)[1]} (its header) are not those")


def test_neighbouring_pieces_are_one_fault(capsys, published, monkeypatch):
    monkeypatch.setattr(hashing, "PIECE_BYTES", 1 << 12)
    checkpoint.verify(published, write=True)
    header, begin = header_of(published / TWO)
    rows = sorted((begin + of["data_offsets"][0], begin + of["data_offsets"][1], name) for name, of in header.items())
    low = next(i for i, (first, end, _) in enumerate(rows) if end - first > 4 << 12)
    long, (_, after, name) = rows[low], rows[low + 1]
    for piece in (0, 2, 3):
        flip(published / TWO, long[0] + (piece << 12) + 1, bit=2)
    at = after - 1
    for place in range(long[0] + (4 << 12), at, 1 << 10):  # the rest of it, and the next tensor
        flip(published / TWO, place)
    flip(published / TWO, at)
    found = [f for f in faults(capsys, published) if "kd-hashes.json" in f["what"]]
    assert [(f["tensor"], f["offset"]) for f in found] == [(long[2], long[0]), (long[2], long[0] + (2 << 12))]
    assert found[0]["what"].startswith(f"bytes {long[0]} to {long[0] + (1 << 12)} are not")
    assert f"bytes {found[1]['offset']} to {at + 1} (2 tensors, the last is {name}) are not" in found[1]["what"]


@pytest.mark.parametrize("what", ["size", "tensors", "version"])
def test_hashes_of_another_file(capsys, published, what):
    checkpoint.verify(published, write=True)

    def change(hashes):
        pieces = hashes["files"][TWO]["pieces"]
        if what == "version":
            hashes["version"] = 1
        elif what == "size":
            pieces[-1][0] += 1
        else:
            pieces[-2][0] -= 1

    edit(published / "kd-hashes.json", change)
    (one,) = faults(capsys, published)
    expected = {
        "size": (TWO, f"has {(published / TWO).stat().st_size} bytes, kd-hashes.json was made of another file"),
        "tensors": (TWO, "holds other tensors, kd-hashes.json was made of another file"),
        "version": ("kd-hashes.json", "cannot be used (version is 1, 2 should stand there)"),
    }[what]
    assert one["file"] == expected[0] and one["what"].startswith(expected[1])


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
        json.dumps({"version": hashing.VERSION, "files": {"../x": {"pieces": [[1, "0" * 32]]}}})
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
        '"../elsewhere.safetensors", and so are 39 more' in outside["what"] and "only names of files" in outside["what"]
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


def test_inspect_of_a_packed_folder_fits_its_own_ranks_alone(capsys, published, tmp_path):
    convert(published, tmp_path / "packed", tp=2)
    rows = kdctl(capsys, "inspect", tmp_path / "packed", "--device", "cpu")[1]["memory"]
    assert {row["tp"]: row["fits"] for row in rows}[1] == "no: packed for 2 ranks"
    assert [row["tp"] for row in rows if row["fits"] == "yes"] == [2]
