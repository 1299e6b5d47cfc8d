"""Packed folders: what comes back is what was loaded, bit for bit, or a sentence says why not."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import struct
from pathlib import Path

import numpy as np
import pytest
from fake_model import SMALL3, write_model
from load_probe import DRAFT_NONE, DRAFT_PATH, KD_E_CANCELLED, KD_E_IO, KD_OK, Probe, refused
from safetensors import safe_open
from xxhash import xxh3_64_hexdigest

from kd import KdError
from kd.checkpoint import inspect

RANK0 = "packed-rank-0.safetensors"
SIDE = ("config.json", "generation_config.json", "draft/config.json")


@pytest.fixture(scope="session")
def probe(test_library) -> Probe:
    return Probe(test_library)


def pack(probe: Probe, source: Path, out: Path, **options) -> Path:
    """A packed folder of `source`."""
    out.mkdir()
    with probe.load(source, **options) as loaded:
        loaded.save(out)
    for name in SIDE:
        if (source / name).exists():
            (out / name).parent.mkdir(exist_ok=True)
            shutil.copy(source / name, out / name)
    return out


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """More than one piece of 16 MiB in one part, so that pieces end within parts."""
    kind = {**SMALL3, "vocab": 90_003, "hidden": 128, "draft": {**SMALL3["draft"], "layers": 2}}
    return write_model(tmp_path_factory.mktemp("packed") / "model", **kind)


@pytest.fixture(scope="module")
def packed(probe, small) -> Path:
    return pack(probe, small, small.parent / "packed", tp=2)


@pytest.fixture
def folder(packed, tmp_path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(packed, tmp_path / "packed"))


def names_of(info: dict) -> list[str]:
    names = ["embed", "lm_head", "norm", "cos", "sin"]
    layer = ["input_norm", "post_norm", "qkv_a", "q_a_norm", "kv_a_norm", "q_b", "k_up", "v_up", "o"]
    for i in range(info["shape"]["layers"]):
        dense = i < info["shape"]["dense_layers"]
        more = ["gate_up", "down"] if dense else ["router", "router_bias", "experts.gate_up", "experts.down"]
        more += [] if dense else ["shared_gate_up", "shared_down"]
        names += [f"layers.{i}.{name}" for name in layer + more]
    if info["draft"]["layers"]:
        names += ["fc", "draft_hidden_norm", "draft_norm", "draft_cos", "draft_sin"]
        of_draft = ["input_norm", "post_norm", "q_norm", "k_norm", "qkv", "o", "gate_up", "down"]
        names += [f"draft_layers.{i}.{name}" for i in range(info["draft"]["layers"]) for name in of_draft]
    return names


def same(probe: Probe, a: Path, b: Path, **options) -> None:
    with probe.load(a, **options) as one, probe.load(b, **options) as other:
        for rank in range(one.tp):
            assert one.info(rank) == other.info(rank)
            for name in names_of(one.info(rank)):
                left, right = one.weight(rank, name), other.weight(rank, name)
                assert left.shape == right.shape and np.array_equal(left, right), (rank, name)


def test_a_packed_folder_loads_as_its_source(probe, small, packed):
    same(probe, small, packed, tp=2)
    same(probe, small, packed, tp=2, draft=DRAFT_NONE)  # the drafter is left out


def test_nano_and_every_number_of_ranks(probe, nano, tmp_path):
    for tp in (1, 4, 8):
        same(probe, nano, pack(probe, nano, tmp_path / f"tp{tp}", tp=tp), tp=tp)


def test_a_model_without_a_drafter(probe, small, tmp_path):
    folder = pack(probe, small, tmp_path / "bare", draft=DRAFT_NONE)
    same(probe, small, folder, draft=DRAFT_NONE)
    with probe.load(folder) as loaded:  # auto: there is none in it
        assert loaded.info()["draft"]["layers"] == 0


def test_the_files_are_safetensors(probe, packed):
    for rank in (0, 1):
        with safe_open(packed / f"packed-rank-{rank}.safetensors", "np") as file:
            about = file.metadata()
            assert (about["format"], about["tp"], about["rank"]) == ("kd-packed", "2", str(rank))
            assert about["layout"] == "3 cpu plain 1"
            parts = list(file.keys())
            assert {"vocabulary", "layers.0", "layers.2", "rope", "draft", "draft.layers.1", "draft.rope"} <= set(parts)
            sizes = [file.get_slice(part).get_shape()[0] for part in parts]
            assert all(file.get_slice(part).get_dtype() == "U8" for part in parts)
            assert sum(sizes) == int(about["bytes"])
            assert len(about["hashes"]) == 16 * sum(-(-size // (16 << 20)) for size in sizes)


def test_the_layout_has_not_changed_unnoticed(packed):
    """If this fails, files packed by an earlier build no longer fit: raise kPackedLayout, and write the new numbers here."""
    with safe_open(packed / RANK0, "np") as file:
        about = file.metadata()
    assert (about["layout"], about["fingerprint"], about["target_fingerprint"]) == (
        "3 cpu plain 1",
        "7e17a62df498b1d8",
        "88566907128d8a9b",
    )


def header_of(path: Path) -> tuple[dict, int]:
    data = path.read_bytes()
    n = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + n]), 8 + n


def edit_header(path: Path, change) -> None:
    header, begin = header_of(path)
    data = path.read_bytes()[begin:]
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def resign(path: Path) -> None:
    """The header's own hash anew."""
    header, begin = header_of(path)
    data = path.read_bytes()[begin:]
    header["__metadata__"]["header_hash"] = "0" * 16
    text = json.dumps(header, separators=(",", ":")).encode()
    zeroed = struct.pack("<Q", len(text)) + text
    own = b'"header_hash":"'
    path.write_bytes(zeroed.replace(own + b"0" * 16, own + xxh3_64_hexdigest(zeroed).encode()) + data)


def metadata(**values):
    def change(folder: Path) -> None:
        edit_header(folder / RANK0, lambda h: h["__metadata__"].update(values))

    return change


def without(key: str):
    return lambda folder: edit_header(folder / RANK0, lambda h: h["__metadata__"].pop(key))


def flip(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def swap_ranks(folder: Path) -> None:
    os.rename(folder / RANK0, folder / "x")
    os.rename(folder / "packed-rank-1.safetensors", folder / RANK0)
    os.rename(folder / "x", folder / "packed-rank-1.safetensors")


def rename_part(folder: Path) -> None:
    def change(header):
        items = [("vocabularx" if k == "vocabulary" else k, v) for k, v in header.items()]
        header.clear()
        header.update(items)

    edit_header(folder / RANK0, change)


DAMAGE = {
    "another layout": (
        metadata(layout="4 cpu plain 1"),
        ["layout '4 cpu plain 1'", "needs '3 cpu plain 1'", "convert"],
    ),
    "another backend": (metadata(layout="1 cuda tiles 1"), ["layout '1 cuda tiles 1'", "convert"]),
    "another format": (metadata(format="pt"), ["format 'pt'"]),
    "another fingerprint": (metadata(fingerprint="0" * 16), ["fingerprint"]),
    "another size": (metadata(bytes="64"), ["bytes '64'"]),
    "no number": (metadata(parameters="many"), ["parameters = 'many'", "no number"]),
    "absurd ranks": (metadata(tp="99"), ["99 ranks"]),
    "no hashes": (without("hashes"), ["has no hashes"]),
    "few hashes": (metadata(hashes="0" * 16), ["too few hashes"]),
    "hashes that are none": (metadata(hashes="x" * 4096), ["too few hashes"]),
    "no format": (without("format"), ["has no format"]),
    "ranks swapped": (swap_ranks, ["rank '1'", "needs '0'"]),
    "a part renamed": (rename_part, ["tensor 'vocabularx' stands where part 'vocabulary'"]),
    "one rank missing": (lambda f: (f / "packed-rank-1.safetensors").unlink(), ["packed-rank-1", "no such file"]),
    "another config": (
        lambda f: (f / "config.json").write_text((f / "config.json").read_text() + " "),
        ["another config.json"],
    ),
    "another drafter's config": (
        lambda f: (f / "draft/config.json").write_text((f / "draft/config.json").read_text() + " "),
        ["another config.json"],
    ),
    "no drafter's config": (lambda f: (f / "draft/config.json").unlink(), ["/draft: holds no drafter", "config.json"]),
    "cut": (lambda f: os.truncate(f / RANK0, (f / RANK0).stat().st_size - 1), [RANK0, "truncated"]),
    "longer": (lambda f: os.truncate(f / RANK0, (f / RANK0).stat().st_size + 1), [RANK0, "1 bytes follow"]),
    "a link": (lambda f: (shutil.move(f / RANK0, f.parent / "x"), (f / RANK0).symlink_to("../x")), ["symbolic link"]),
    "another source": (
        lambda f: edit_header(
            f / "packed-rank-1.safetensors", lambda h: h["__metadata__"].update(content_hash="1" * 16)
        ),
        ["from another checkpoint than packed-rank-0"],
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_what_does_not_fit_is_refused(probe, folder, case):
    damage, words = DAMAGE[case]
    damage(folder)
    refused(lambda: probe.load(folder, tp=2), *words)


@pytest.mark.parametrize("case", sorted({*DAMAGE} - {"another layout", "another backend"}))
def test_inspect_refuses_what_a_load_does(library, folder, case):
    damage, words = DAMAGE[case]
    assert inspect(folder)["files"] == 2
    damage(folder)
    with pytest.raises(KdError) as error:
        inspect(folder)
    assert all(word in str(error.value) for word in words)


OF_ANOTHER = {
    "cut": lambda f: os.truncate(f, f.stat().st_size - 1),
    "no file of weights": lambda f: f.write_bytes(b"x"),
    "another rank's": lambda f: shutil.copy(f.with_name(RANK0), f),
    "missing": lambda f: f.unlink(),
    "header": lambda f: edit_header(f, lambda h: h["__metadata__"].update(bytes="1")),
}


@pytest.mark.parametrize("case", OF_ANOTHER)
def test_inspect_looks_at_every_file_of_another_backend(library, folder, case):
    """As far as it can be told without its layout."""
    for file in folder.glob("packed-rank-*"):
        edit_header(file, lambda h: h["__metadata__"].update(layout="3 cuda tiles 1"))
        resign(file)
    assert inspect(folder)["packed_layout"] == "3 cuda tiles 1"
    OF_ANOTHER[case](folder / "packed-rank-1.safetensors")
    with pytest.raises(KdError, match="packed-rank-1"):
        inspect(folder)


def test_another_number_of_ranks_is_refused(probe, folder):
    refused(lambda: probe.load(folder, tp=1), "for tp 2, not for tp 1", "run it with tp 2", "kdctl convert --tp 1")


def test_a_drafter_from_elsewhere_is_refused(probe, folder, small):
    refused(lambda: probe.load(folder, tp=2, draft=DRAFT_PATH, draft_path=small / "draft"), "packed with it", "convert")


def test_a_flipped_bit_anywhere_is_found_and_named(probe, folder):
    path = folder / "packed-rank-1.safetensors"
    header, begin = header_of(path)
    size = path.stat().st_size
    for at in (begin, begin + (16 << 20) - 1, begin + (16 << 20), (begin + size) // 2, size - 1):
        flip(path, at)
        sentence = refused(lambda: probe.load(folder, tp=2), path.name, "not those that were written")
        first, last = (int(word) for word in sentence.split("bytes ")[1].split(" (")[0].split(" to "))
        assert first <= at < last
        name = sentence.split("tensor '")[1].split("'")[0]
        assert header[name]["data_offsets"][0] <= at - begin < header[name]["data_offsets"][1]
        flip(path, at)
    probe.load(folder, tp=2).__exit__()


def test_truncation_anywhere_is_noticed(probe, folder):
    path = folder / RANK0
    _, begin = header_of(path)
    for cut in (0, 7, 8, 100, begin - 1, begin, begin + 1, path.stat().st_size // 2):
        data = path.read_bytes()
        os.truncate(path, cut)
        refused(lambda: probe.load(folder, tp=2), RANK0)
        path.write_bytes(data)


def test_writing_ends_cleanly(probe, small, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    with probe.load(small, tp=2) as loaded:
        refused(lambda: loaded.save(out, stop_at=0), "cancelled", status=KD_E_CANCELLED)
        assert os.listdir(out) == []
        refused(lambda: loaded.save(out, stop_at=32 << 20), "cancelled", status=KD_E_CANCELLED)  # in the second file
        assert os.listdir(out) == []
        refused(lambda: loaded.save(tmp_path / "none"), "cannot create", status=KD_E_IO)
        (out / RANK0).write_text("mine")
        refused(lambda: loaded.save(out), "File exists", status=KD_E_IO)
        assert (out / RANK0).read_text() == "mine"


def test_cancelling_a_packed_load(probe, packed):
    status, done, total = probe.load_until(packed, 2**64 - 1, tp=2)
    assert status == KD_OK and done == total
    for percent in (0, 10, 50, 90, 100):
        status, done, _ = probe.load_until(packed, total * percent // 100, tp=2)
        assert status == KD_E_CANCELLED and done <= total * percent // 100 + (8 << 20)


def test_full_disks_are_named(probe, small):
    with probe.load(small) as loaded:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        out = small.parent / "limited"
        out.mkdir()
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
            refused(lambda: loaded.save(out), "cannot write", "File too large", status=KD_E_IO)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, before)
        assert os.listdir(out) == []
