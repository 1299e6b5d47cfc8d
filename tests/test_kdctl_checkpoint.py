"""kdctl inspect, verify-checkpoint and convert: model folders without a daemon."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from fake_model import SMALL3, write_model

from kd import Engine, KdError, checkpoint, hashing
from kd.convert import convert
from kdctl import checkpoint as commands
from kdctl.__main__ import run

SHARDS = {**SMALL3, "shards": 3, "prefix": "language_model."}
TWO = "model-00002-of-00003.safetensors"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("whole") / "model", **SHARDS)


@pytest.fixture
def folder(whole, tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Path(shutil.copytree(whole, tmp_path / "model"))


def kdctl(capsys, *words) -> tuple[int, dict]:
    code = run([*map(str, words), "-o", "json"])
    out, err = capsys.readouterr()
    return code, json.loads(out or err)


# ---- inspect -----------------------------------------------------------------------------------------------------------


def test_inspect_says_what_a_load_finds(capsys, library, folder):
    code, about = kdctl(capsys, "inspect", folder, "--device", "cpu", "--context", 512, "--streams", 3)
    assert code == 0
    with Engine(folder, threads=1, library=library) as engine:
        info = engine.info
    assert about["parameters"] == info.parameters and about["draft"]["parameters"] == info.draft_parameters
    assert tuple(about["stop_ids"]) == info.stop_ids and about["skipped_tensors"] == info.skipped_tensors == 1
    one = about["memory"][0]
    assert (one["tp"], one["weight_bytes"], one["expert_bytes"]) == (1, info.weight_bytes, info.expert_bytes)
    assert one["kv_bytes_token"] == info.kv_bytes_token and one["kv_bytes"] == info.kv_bytes_token * 512 * 3
    assert one["fits"] == "yes" and one["bytes"] == one["weight_bytes"] + one["kv_bytes"] + one["buffer_bytes"]
    assert [row["tp"] for row in about["memory"]] == [1, 2, 4, 8]
    weights = sum(p.stat().st_size for p in folder.glob("*.safetensors"))
    assert about["file_bytes"] == weights and sum(about["bytes"].values()) + about["skipped_bytes"] < weights
    assert about["bytes"]["experts"] > 0 and about["bytes"]["router"] > 0
    assert run(["inspect", str(folder)]) == 0
    assert "matches" in capsys.readouterr().out


def test_inspect_ranks_that_cannot_be_and_gpus_that_are_not_there(capsys, tmp_path, monkeypatch):
    folder = write_model(tmp_path / "model", **{**SMALL3, "heads": 6, "draft": None})
    _, about = kdctl(capsys, "inspect", folder)
    assert "6 attention heads" in about["memory"][2]["refused"] and about["memory"][2]["fits"].startswith(
        "no: tensor parallelism of 4"
    )
    monkeypatch.setattr(commands, "gpus", lambda: [("H200", 141 << 30)] * 2)
    _, about = kdctl(capsys, "inspect", folder)
    assert about["device"] == "cuda" and [row["fits"] for row in about["memory"]][:2] == ["yes", "yes"]
    monkeypatch.setattr(commands, "gpus", lambda: [("tiny", 1 << 20)])
    _, about = kdctl(capsys, "inspect", folder)
    assert [row["fits"] for row in about["memory"]][:2] == ["no", "no: 1 GPU"]
    monkeypatch.setattr(commands, "gpus", list)
    _, about = kdctl(capsys, "inspect", folder, "--device", "cuda")
    assert about["memory"][0]["fits"] == "no GPU here"


def test_inspect_says_why_a_drafter_does_not_match(capsys, folder):
    config = json.loads((folder / "draft/config.json").read_text())
    (folder / "draft/config.json").write_text(json.dumps(config | {"hidden_size": 96}))
    code, about = kdctl(capsys, "inspect", folder)
    assert code == 0 and about["draft"] is None
    assert "belongs to another model" in about["draft_refused"]


def test_inspect_refuses_as_a_load_does(capsys, folder, tmp_path):
    (folder / TWO).unlink()
    code, error = kdctl(capsys, "inspect", folder)
    assert (code, error["name"]) == (1, "KD_E_MODEL") and TWO in error["message"]
    code, error = kdctl(capsys, "inspect", tmp_path / "none")
    assert (code, error["name"]) == (5, "KD_E_NOT_FOUND")


def test_inspect_tells_what_lies_beside_the_weights(capsys, folder, nano):
    beside = kdctl(capsys, "inspect", nano)[1]["beside"]
    assert [beside[name]["usable"] for name in ("golden.json", "tokenizer_config.json")] == [True, True]
    assert re.fullmatch(
        r"\d+ tokens that give \d+, content_hash, .*sha256 of \d+ files?", beside["golden.json"]["about"]
    )
    described = json.loads((nano / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    assert beside["tokenizer_config.json"]["about"] == f"{len(described)} special tokens"
    assert beside["tiktoken.model"]["about"].endswith(" tokens of text")
    assert beside["chat_template.jinja"] == {"present": True, "usable": True, "about": "a chat template"}
    names = ["golden.json", "kd-hashes.json", "tiktoken.model", "tokenizer_config.json", "chat_template.jinja"]
    for name in names:
        (folder / name).unlink(missing_ok=True)
    beside = kdctl(capsys, "inspect", folder)[1]["beside"]
    assert list(beside) == names and not any(file["present"] for file in beside.values())
    assert kdctl(capsys, "verify-checkpoint", folder, "--write")[0] == 0
    n = len(json.loads((folder / "kd-hashes.json").read_text())["files"])
    beside = kdctl(capsys, "inspect", folder)[1]["beside"]
    assert beside["kd-hashes.json"] == {
        "present": True,
        "usable": True,
        "about": f"hashes of {n} files, for verify-checkpoint",
    }
    (folder / "generation_config.json").rename(folder / "x")
    bad = {
        "golden.json": ('{"prompt_tokens": [1], "tokens": [1000000]}', "tokens[0] is 1000000"),
        "kd-hashes.json": (None, "names generation_config.json, which is missing"),
        "tokenizer_config.json": ('{"added_tokens_decoder": {}}', "without tiktoken.model"),
        "chat_template.jinja": ("{{ x }}", "without tiktoken.model"),
    }
    for name, (text, _) in bad.items():
        if text:
            (folder / name).write_text(text)
    _, about = kdctl(capsys, "inspect", folder)
    assert run(["inspect", str(folder)]) == 0
    out = capsys.readouterr().out
    for name, (_, what) in bad.items():
        assert about["beside"][name]["usable"] is False and what in about["beside"][name]["about"]
        assert re.search(rf"^{re.escape(name)} +not usable: .*{re.escape(what)}", out, re.M)
    for name in names:
        (folder / name).write_text("{")
    found = kdctl(capsys, "inspect", folder)[1]["beside"]
    assert found.pop("chat_template.jinja")["about"] == "not looked at, for want of a tokenizer"
    assert found.pop("tiktoken.model")["about"].startswith("line 1: is not a base64 token")
    for file in found.values():
        assert file["usable"] is False and re.search("fetch|remove", file["about"])


def spoil_golden(folder, of):
    golden = json.loads((folder / "golden.json").read_text())
    (folder / "golden.json").write_text(json.dumps({**golden, "files": {**golden["files"], **of}}))


@pytest.mark.parametrize(
    ("file", "spoil", "what"),
    [
        (
            "golden.json",
            lambda f: spoil_golden(f, {"tiktoken.model": "0" * 64}),
            "is not the file golden.json was made",
        ),
        (
            "golden.json",
            lambda f: spoil_golden(f, {"absent.json": "0" * 64}),
            "names absent.json, which cannot be read",
        ),
        ("tiktoken.model", lambda f: (f / "tiktoken.model").write_text("rubbish"), "is not a base64 token"),
        ("tiktoken.model", lambda f: (f / "tokenizer_config.json").unlink(), "without tokenizer_config.json"),
        ("tokenizer_config.json", lambda f: (f / "tokenizer_config.json").write_text("[]"), "the file is damaged"),
        (
            "tokenizer_config.json",
            lambda f: (f / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"5": {"content": "x"}}}'),
            "do not belong together",
        ),
        ("chat_template.jinja", lambda f: (f / "chat_template.jinja").write_text("{% if"), "line 1: unexpected"),
    ],
)
def test_inspect_says_of_small_files_what_a_load_does(capsys, nano, library, tmp_path, file, spoil, what):
    folder = Path(shutil.copytree(nano, tmp_path / "nano"))
    spoil(folder)
    found = kdctl(capsys, "inspect", folder)[1]["beside"][file]
    assert found["usable"] is False and what in found["about"], found
    if file != "golden.json":  # of which the daemon speaks
        with Engine(library=library, threads=1) as engine, pytest.raises(KdError) as error:
            engine.load(folder)
        assert error.value.name == "KD_E_MODEL"


def test_shards_without_an_index_are_told_so(capsys, folder):
    (folder / checkpoint.INDEX).unlink()
    one, _, three = sorted(path.name for path in folder.glob("model-*.safetensors"))
    what = f"is missing, and without it the weights that are there ({one} to {three})"
    code, error = kdctl(capsys, "inspect", folder)
    assert code == 1 and error["message"] == f"{folder / checkpoint.INDEX}: {what} are not read; fetch it again"
    (fault,) = faults(capsys, folder)
    assert fault["file"] == checkpoint.INDEX and fault["what"] == f"{what} are not read: fetch it again"
    for shard in folder.glob("model-0000[23]-*"):
        shard.unlink()
    assert f"there ({one}) are not read" in kdctl(capsys, "inspect", folder)[1]["message"]
    (folder / "config.json").rename(folder / "x")  # weights are there: the folder is the right one
    assert f"{folder / 'config.json'}: there is no such file" in kdctl(capsys, "inspect", folder)[1]["message"]
    assert {"config.json", checkpoint.INDEX} >= {one["file"] for one in faults(capsys, folder)}
    next(folder.glob("model-00001-*")).rename(folder / "adapter.safetensors")
    assert "holds no model" in kdctl(capsys, "inspect", folder)[1]["message"]
    (folder / "x").rename(folder / "config.json")
    assert f"{folder / 'model.safetensors'}: there is no such file" in kdctl(capsys, "inspect", folder)[1]["message"]
    assert [one["file"] for one in faults(capsys, folder)] == ["model.safetensors"]


@pytest.mark.parametrize("verb", ["inspect", "verify-checkpoint", "convert"])
def test_a_drafter_that_is_not_there_is_told_with_its_path(capsys, folder, tmp_path, monkeypatch, verb):
    more = [tmp_path / "out"] if verb == "convert" else []
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for name, place, what in (
        ("missing", "missing", "there is no such drafter's folder; check the path"),
        ("file", "file", "give the drafter's folder that it is in"),
        (
            "empty",
            "empty",
            "holds no drafter: there is neither a config.json nor weights; give the folder of a DFlash drafter",
        ),
    ):
        code, said = kdctl(capsys, verb, folder, *more, "--draft", tmp_path / name)
        assert code == (0 if verb == "inspect" else code or -1)
        text = said.get("draft_refused") or said.get("message") or "{file}: {what}".format(**said["faults"][0])
        assert text.startswith(f"{tmp_path / place}: ") and what in text, text
    other = Path(shutil.copytree(folder / "draft", tmp_path / "other"))
    (other / "config.json").write_text(
        (other / "config.json").read_text().replace('"hidden_size": ', '"hidden_size": 1')
    )
    monkeypatch.chdir(tmp_path)
    _, said = kdctl(capsys, verb, folder, *more, "--draft", "other")
    text = said.get("draft_refused") or said.get("message") or "{file}: {what}".format(**said["faults"][0])
    assert text.removeprefix(f"{tmp_path}/").startswith("other/config.json: hidden_size is 1"), text
    code, error = kdctl(capsys, verb, folder, *more, "--draft", "")
    assert code == 2 and "it is empty: give auto, none, or the drafter's folder" in error["message"]


# ---- verify ------------------------------------------------------------------------------------------------------------


def test_what_is_remembered_is_of_files_that_are_there_and_bounded(capsys, folder, tmp_path, monkeypatch):
    def verified(path) -> tuple[int, list[str]]:
        """(known before, paths remembered after)"""
        code, found = kdctl(capsys, "verify-checkpoint", path)
        assert code == 0 and found["cached"] + found["hashed"] == 4
        return found["cached"], [entry[3] for entry in json.loads(cache.read_text()).values()]

    cache = tmp_path / "cache" / "kd" / "hashes.json"
    files = {str(path) for path in folder.rglob("*.safetensors")}
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    assert verified(folder)[0] == 0
    known, paths = verified(other)
    assert known == 0 and len(paths) == 8 and set(paths[:4]) == files
    known, paths = verified(folder)  # those asked for last are at the end
    assert known == 4 and len(paths) == 8 and set(paths[4:]) == files
    os.utime(other / TWO)  # changed
    shutil.rmtree(other / "draft")  # gone
    known, paths = verified(folder)
    assert known == 4 and len(paths) == 6 and files < set(paths) and not {p for p in paths if "draft" in p} - files
    former = {key: entry[:3] for key, entry in json.loads(cache.read_text()).items()}
    cache.write_text(json.dumps({**former, "x": 1, "y:z": [1, 2, 3, 4], "1:2": ["", [], [], "\0"]}))
    known, paths = verified(folder)  # as they were written without paths
    assert known == 4 and len(paths) == 4 and set(paths) == files
    size = cache.stat().st_size
    monkeypatch.setattr("kd.known.MAX_CACHE_BYTES", size)
    assert len(verified(folder)[1]) == 4 and cache.stat().st_size == size
    monkeypatch.setattr("kd.known.MAX_CACHE_BYTES", size - 1)
    cache.unlink()
    assert len(verified(folder)[1]) == 3
    monkeypatch.setattr("kd.known.MAX_CACHE_BYTES", 1 << 20)
    monkeypatch.setattr("kd.known.MAX_FILES", 2)
    assert len(verified(folder)[1]) == 2


def header_of(path: Path) -> tuple[dict, int]:
    data = path.read_bytes()
    n = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + n]), 8 + n


def faults(capsys, folder: Path, *words) -> list[dict]:
    code, found = kdctl(capsys, "verify-checkpoint", folder, *words)
    assert code == bool(found["faults"])
    return found["faults"]


def test_a_whole_folder(capsys, folder):
    code, found = kdctl(capsys, "verify-checkpoint", folder)
    assert (code, found["files"], found["hashed"], found["cached"], found["faults"]) == (0, 4, 4, 0, [])
    code, found = kdctl(capsys, "verify-checkpoint", folder)  # remembered
    assert (code, found["hashed"], found["cached"]) == (0, 0, 4)
    os.utime(folder / TWO)
    assert kdctl(capsys, "verify-checkpoint", folder)[1]["hashed"] == 1
    assert run(["verify-checkpoint", str(folder)]) == 0
    assert "whole: 4 files" in capsys.readouterr().out


def test_every_fault_is_named_with_file_tensor_and_offset(capsys, folder):
    """Four things wrong at once: all are found."""
    (folder / "model-00001-of-00003.safetensors").unlink()
    header, begin = header_of(folder / TWO)
    name = next(n for n, t in header.items() if t["dtype"] == "BF16")
    at = begin + header[name]["data_offsets"][0] + 6
    data = bytearray((folder / TWO).read_bytes())
    data[at : at + 2] = b"\xc0\x7f"
    (folder / TWO).write_bytes(data)
    three = folder / "model-00003-of-00003.safetensors"
    os.truncate(three, three.stat().st_size - 1)
    index = json.loads((folder / checkpoint.INDEX).read_text())
    index["weight_map"]["evil"] = "../x.safetensors"
    index["weight_map"]["ghost"] = TWO
    (folder / checkpoint.INDEX).write_text(json.dumps(index))
    found = {(f["file"], f["tensor"]): f for f in faults(capsys, folder)}
    assert found["model-00001-of-00003.safetensors", ""]["what"] == "is missing: fetch it again"
    assert found[TWO, name] == {"file": TWO, "tensor": name, "offset": at, "what": "holds a NaN or infinity"}
    assert "only names of files in the folder" in found[checkpoint.INDEX, "evil"]["what"]
    assert "the index says it is" in found[TWO, "ghost"]["what"]
    last = max(header_of(three)[0].items(), key=lambda item: item[1].get("data_offsets", [0, 0])[1])[0]
    cut = found[three.name, last]
    assert cut["offset"] == three.stat().st_size and "truncated" in cut["what"]


@pytest.mark.parametrize("where", ["first", "last", "draft"])
def test_a_flipped_bit_is_found_by_its_hash(capsys, folder, where):
    written = [str(folder / name / "kd-hashes.json") for name in ("", "draft")]
    assert kdctl(capsys, "verify-checkpoint", folder, "--write")[1]["written"] == written
    assert kdctl(capsys, "verify-checkpoint", folder)[1]["compared"] == 8  # with configs and index
    file = {"first": "model-00001-of-00003.safetensors", "last": TWO, "draft": "draft/model.safetensors"}[where]
    data = bytearray((folder / file).read_bytes())
    at = header_of(folder / file)[1] if where == "first" else len(data) - 1
    data[at] ^= 1
    (folder / file).write_bytes(data)
    (one,) = faults(capsys, folder)
    assert one["file"] == file and "kd-hashes.json" in one["what"] and one["tensor"]


def test_a_fault_beyond_the_first_piece_has_its_place(capsys, folder, monkeypatch):
    monkeypatch.setattr(hashing, "PIECE_BYTES", 1 << 16)
    monkeypatch.setattr(hashing, "CHUNK_BYTES", 3 << 12)  # chunks end within pieces
    checkpoint.verify(folder, write=True)
    data = bytearray((folder / TWO).read_bytes())
    data[150_000] ^= 1
    (folder / TWO).write_bytes(data)
    (one,) = faults(capsys, folder)
    begin, end = (header_of(folder / TWO)[1] + at for at in header_of(folder / TWO)[0][one["tensor"]]["data_offsets"])
    assert begin <= one["offset"] <= 150_000 < min(end, one["offset"] + (1 << 16))


def test_what_was_downloaded_is_compared_with_its_name(capsys, whole, tmp_path, monkeypatch):
    import hashlib

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    snapshot, blobs = tmp_path / "snapshots" / "0a", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in (p for p in whole.iterdir() if p.is_file()):
        blob = blobs / hashlib.sha256(path.read_bytes()).hexdigest()
        shutil.copy(path, blob)
        (snapshot / path.name).symlink_to(f"../../blobs/{blob.name}")
    code, found = kdctl(capsys, "verify-checkpoint", snapshot)
    assert (code, found["compared"]) == (0, 6)
    real = (snapshot / TWO).resolve()
    data = bytearray(real.read_bytes())
    data[-1] ^= 1
    real.write_bytes(data)
    (one,) = faults(capsys, snapshot)
    assert one["file"] == TWO and "it was downloaded as" in one["what"]


def test_links_out_of_the_folder(capsys, folder, tmp_path):
    shutil.move(folder / TWO, tmp_path / TWO)
    (folder / TWO).symlink_to(tmp_path / TWO)
    (one,) = (f for f in faults(capsys, folder, "--no-hashes") if f["file"] == TWO)
    assert "symbolic link" in one["what"]
    assert faults(capsys, folder, "--follow-links") == []


HEADERS = {
    "hole": lambda h: next(iter(h.values()))["data_offsets"].__setitem__(0, 1),
    "negative": lambda h: next(iter(h.values()))["shape"].__setitem__(0, -1),
    "unknown type": lambda h: next(iter(h.values())).update(dtype="Q4"),
    "text as offset": lambda h: next(iter(h.values())).update(data_offsets=["0", "1"]),
    "no shape": lambda h: next(iter(h.values())).pop("shape"),
    "huge": lambda h: next(iter(h.values())).update(shape=[1 << 60, 1 << 60]),
}


@pytest.mark.parametrize("case", HEADERS)
def test_bad_headers(capsys, folder, case):
    header, begin = header_of(folder / TWO)
    data = (folder / TWO).read_bytes()[begin:]
    HEADERS[case](header)
    text = json.dumps(header).encode()
    (folder / TWO).write_bytes(len(text).to_bytes(8, "little") + text + data)
    assert any(f["file"] == TWO for f in faults(capsys, folder, "--no-hashes"))


def test_a_damaged_list_of_hashes_is_a_fault(capsys, folder):
    for text in ("{", "[]", '{"version": 1, "files": {}}', '{"version": 2, "files": {"x": {}}}'):
        (folder / "kd-hashes.json").write_text(text)
        (one,) = faults(capsys, folder)
        assert one["file"] == "kd-hashes.json"
    (folder / "kd-hashes.json").write_text(
        json.dumps({"version": hashing.VERSION, "files": {"gone.safetensors": {"pieces": [[1, "0" * 32]]}}})
    )
    (one,) = faults(capsys, folder)
    assert one["file"] == "gone.safetensors" and "is missing" in one["what"]


# ---- convert -----------------------------------------------------------------------------------------------------------


def test_convert_and_serve(capsys, library, folder, tmp_path):
    out = tmp_path / "deep" / "packed"
    code, said = kdctl(capsys, "convert", folder, out, "--tp", 2)
    assert code == 0 and said["bytes"] > 100_000
    assert sorted(p.name for p in out.iterdir()) == [
        "config.json", "draft", "generation_config.json", "kd-hashes.json", "packed-rank-0.safetensors",
        "packed-rank-1.safetensors",
    ]  # fmt: skip
    prompt = [3, 50, 7]
    found = []
    for path in (folder, out):
        with Engine(path, tp=2, threads=2, library=library) as engine:
            one = engine.generate(prompt, max_tokens=30, ignore_eos=True, hash_logits=True)
            found.append(
                (one.tokens, one.hashes, engine.info.content_hash, engine.info.parameters, engine.info.stop_ids)
            )
            assert np.isfinite(engine.score(prompt)).all()
    assert found[0] == found[1]
    _, about = kdctl(capsys, "inspect", out)
    assert (about["kind"], about["packed_tp"], about["packed_layout"]) == ("packed", 2, "3 cpu plain 1")
    assert about["content_hash"] == f"{found[0][2]:016x}"
    assert faults(capsys, out) == []
    code, error = kdctl(capsys, "convert", folder, out)
    assert (code, error["name"]) == (6, "KD_E_EXISTS")


def test_nano_is_golden_when_packed(nano, library, tmp_path):
    out = tmp_path / "nano"
    convert(nano, out)
    golden = json.loads((out / "golden.json").read_text())
    with Engine(out, threads=1, library=library) as engine:
        assert f"{engine.info.content_hash:016x}" == golden["content_hash"]
        assert engine.generate(golden["prompt_tokens"], max_tokens=len(golden["tokens"])).tokens == golden["tokens"]
        assert engine.tokenizer is not None and engine.chat is not None
    with Engine(threads=1, library=library) as engine:
        engine.load(out, draft="none")
        assert f"{engine.info.content_hash:016x}" == golden["target_hash"]


def test_what_fails_leaves_nothing(capsys, folder, tmp_path, monkeypatch):
    parent = tmp_path / "out"
    (folder / TWO).unlink()
    code, error = kdctl(capsys, "convert", folder, parent / "packed")
    assert code == 1 and TWO in error["message"]
    assert list(parent.iterdir()) == []
    (tmp_path / "file").touch()
    code, error = kdctl(capsys, "convert", folder, tmp_path / "file" / "packed")
    assert (code, error["name"]) == (1, "KD_E_IO")


def test_an_exception_in_progress_ends_a_conversion(folder, tmp_path):
    phases = []

    def progress(now):
        phases.append(now["phase"])
        if now["phase"] in ("write", "done") and "write" in phases[:-1] + [now["phase"]]:
            raise KeyboardInterrupt

    try:
        convert(folder, tmp_path / "out" / "packed", progress=progress)
    except KeyboardInterrupt:
        assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("damage", ["[" * 200_000, '[[1, [0, 0, 0, "/etc/passwd"]]]', '{"a": 5}', "infinite"])
def test_a_damaged_memory_of_hashes_is_forgotten(capsys, folder, tmp_path, monkeypatch, damage):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kdctl(capsys, "verify-checkpoint", folder)
    memory = tmp_path / "cache" / "kd" / "hashes.json"
    if damage == "infinite":
        damage = json.dumps(
            {key: [a, b, [float("inf")], *rest] for key, (a, b, _, *rest) in json.loads(memory.read_text()).items()}
        )
        assert "Infinity" in damage
    memory.write_text(damage)
    assert kdctl(capsys, "verify-checkpoint", folder)[0] == 0
    assert len(json.loads(memory.read_text())) > 0
    memory.unlink()
    memory.mkdir()  # nothing can be written in its place, and nothing is left beside it
    assert kdctl(capsys, "verify-checkpoint", folder)[0] == 0
    assert list(memory.parent.iterdir()) == [memory]
