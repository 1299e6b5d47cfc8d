"""Model folders nobody should trust: damaged, incomplete, hostile or unreadable; and loads that end early."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import struct
import traceback
from pathlib import Path

import pytest
from fake_model import SMALL3, write_model
from load_probe import (
    DRAFT_NONE,
    DRAFT_PATH,
    KD_E_CANCELLED,
    KD_E_IO,
    KD_E_MODEL,
    KD_OK,
    NEVER,
    Probe,
    Refused,
    refused,
)

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="session")
def probe(test_library) -> Probe:
    return Probe(test_library)


# ---- folders -----------------------------------------------------------------------------------------------------

TINY = {
    **SMALL3, "layers": 2, "heads": 2, "inter": 96, "moe_inter": 64, "experts": 3, "vocab": 65, "max_positions": 80,
    "draft": {**SMALL3["draft"], "heads": 2, "kv_heads": 1, "inter": 64, "block": 4, "taps": [0, 1]}, "shards": 2,
}  # fmt: skip
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"), **TINY)


@pytest.fixture
def folder(tiny, tmp_path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def read_file(path: Path) -> dict[str, tuple[dict, bytes]]:
    """name -> (its header entry, its bytes)."""
    data = path.read_bytes()
    n = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + n])
    return {name: (t, data[8 + n :][slice(*t["data_offsets"])]) for name, t in header.items() if name != "__metadata__"}


def write_file(path: Path, tensors: dict[str, tuple[dict, bytes]]) -> None:
    header, at = {}, 0
    for name, (t, data) in tensors.items():
        header[name] = {**t, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data for _, data in tensors.values()))


def holder(folder: Path, name: str) -> Path:
    """The shard that holds a tensor."""
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][name]


def edit(folder: Path, name: str, change, file: Path | None = None) -> None:
    """Rewrite one tensor: change(entry, bytes) -> (entry, bytes), or None to drop it from file and index."""
    path = file or holder(folder, name)
    tensors = read_file(path)
    new = change(*tensors[name])
    if new is None:
        del tensors[name]
    else:
        tensors[name] = new
    write_file(path, tensors)
    if new is None and file is None:
        edit_json(folder / INDEX, lambda index: index["weight_map"].pop(name))


def add(folder: Path, name: str) -> None:
    """Put one more tensor into the first shard and the index."""
    tensors = read_file(folder / ONE)
    write_file(folder / ONE, {**tensors, name: ({"dtype": "BF16", "shape": [2]}, bytes(4))})
    edit_json(folder / INDEX, lambda index: index["weight_map"].update({name: ONE}))


def edit_json(path: Path, change) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def poke(offset: int, data: bytes):
    """A change that overwrites bytes of a tensor."""
    return lambda entry, old: (entry, old[:offset] + data + old[offset + len(data) :])


def replace(path: Path, make) -> None:
    path.unlink()
    make(path)


NAN_BF16, INF_BF16, NAN_F32 = b"\xc0\x7f", b"\x80\xff", struct.pack("<f", float("nan"))
EXPERT = "model.layers.1.mlp.experts.2.down_proj"
NORM, BIAS = "model.norm.weight", "model.layers.1.mlp.gate.e_score_correction_bias"

# name -> (what is done to the folder, words of the sentence)
BAD_FOLDERS = {
    "no config": (lambda f: (f / "config.json").unlink(), ["config.json", "no such file"]),
    "config is a folder": (lambda f: replace(f / "config.json", Path.mkdir), ["config.json", "no regular file"]),
    "config is huge": (lambda f: os.truncate(f / "config.json", (1 << 20) + 1), ["config.json", "1048577 bytes"]),
    "config is cut": (lambda f: os.truncate(f / "config.json", 100), ["config.json", "no end at byte"]),
    "config of another model": (
        lambda f: edit_json(f / "config.json", lambda c: c.update(hidden_size=96)),
        ["shape", "config.json asks for", "96"],
    ),
    "one layer more": (
        lambda f: edit_json(f / "config.json", lambda c: c.update(num_hidden_layers=3)),
        ["tensor 'model.layers.2.", "is missing"],
    ),
    "one layer less": (
        lambda f: edit_json(f / "config.json", lambda c: c.update(num_hidden_layers=1)),
        ["'model.layers.1.", "has a use for"],
    ),
    "a million tensors": (
        lambda f: edit_json(f / "config.json", lambda c: c.update(num_hidden_layers=1024, n_routed_experts=4096)),
        ["mlp.gate.weight", "has shape [3, 64]", "[4096, 64]"],
    ),
    "bad generation config": (
        lambda f: (f / "generation_config.json").write_text("{"),
        ["generation_config.json", "byte 1"],
    ),
    "no shard": (lambda f: (f / TWO).unlink(), [TWO, "no such file"]),
    "no weights": (
        lambda f: [p.unlink() for p in (f / ONE, f / TWO, f / INDEX)],
        ["model.safetensors", "no such file"],
    ),
    "shard is a folder": (lambda f: replace(f / TWO, Path.mkdir), [TWO, "no regular file"]),
    "shard is a fifo": (lambda f: replace(f / TWO, os.mkfifo), [TWO, "no regular file"]),
    "shard is a device": (
        lambda f: replace(f / TWO, lambda p: os.mknod(p, stat.S_IFCHR | 0o666, os.makedev(1, 5))),
        [TWO, "no regular file"],
    ),
    "shard is a link out": (
        lambda f: (shutil.move(f / TWO, f.parent / TWO), (f / TWO).symlink_to(f.parent / TWO)),
        [TWO, "symbolic link"],
    ),
    "shard is a link within": (
        lambda f: (shutil.move(f / TWO, f / "x.safetensors"), (f / TWO).symlink_to("x.safetensors")),
        [TWO, "symbolic link"],
    ),
    "shard is a link up": (
        lambda f: replace(f / TWO, lambda p: p.symlink_to("../../blobs/../model/" + ONE)),
        [TWO, "symbolic link"],
    ),
    "config is a link": (
        lambda f: replace(f / "config.json", lambda p: p.symlink_to("/etc/passwd")),
        ["config.json", "symbolic link"],
    ),
    "empty shard": (lambda f: os.truncate(f / TWO, 0), [TWO, "is empty; fetch it again"]),
    "index up": (
        lambda f: edit_json(f / INDEX, lambda i: i["weight_map"].update({NORM: "../" + TWO})),
        [INDEX, "only plain names"],
    ),
    "index names a stranger": (
        lambda f: edit_json(f / INDEX, lambda i: i["weight_map"].update(ghost=TWO)),
        [TWO, "does not hold tensor 'ghost'"],
    ),
    "index forgets one": (
        lambda f: edit_json(f / INDEX, lambda i: i["weight_map"].pop(NORM)),
        [NORM, "the index does not name"],
    ),
    "index points to the other shard": (
        lambda f: edit_json(f / INDEX, lambda i: i["weight_map"].update({NORM: ONE})),
        [NORM, "do not belong together"],
    ),
    "index and single file": (lambda f: shutil.copy(f / ONE, f / "model.safetensors"), ["does not name it"]),
    "index is not JSON": (lambda f: (f / INDEX).write_bytes(b"\x80"), [INDEX, "byte 0"]),
    "tensor twice": (
        lambda f: write_file(f / ONE, {**read_file(f / ONE), NORM: read_file(f / TWO)[NORM]}),
        [ONE, NORM, "do not belong together"],
    ),
    "tensor missing": (lambda f: edit(f, NORM, lambda *_: None), [NORM, "is missing"]),
    "expert missing": (lambda f: edit(f, f"{EXPERT}.weight_scale", lambda *_: None), [EXPERT, "is missing"]),
    "tensor of no use": (lambda f: add(f, "model.layers.1.self_attn.q_proj.bias"), ["q_proj.bias", "has a use for"]),
    "zero points": (lambda f: add(f, f"{EXPERT}.weight_zero_point"), ["weight_zero_point", "has a use for"]),
    "layer of no use": (lambda f: add(f, "model.layers.2.enorm.weight"), ["model.layers.2.enorm", "has a use for"]),
    "wrong type": (lambda f: edit(f, NORM, lambda t, d: ({**t, "dtype": "F16"}, d)), [NORM, "is F16"]),
    "wrong type of a matrix": (
        lambda f: edit(f, "lm_head.weight", lambda t, d: ({**t, "dtype": "F16"}, d)),
        ["lm_head.weight", "is F16", "reads BF16"],
    ),
    "wrong type of words": (
        lambda f: edit(f, f"{EXPERT}.weight_packed", lambda t, d: ({**t, "dtype": "F32"}, d)),
        ["weight_packed", "is F32", "reads I32"],
    ),
    "transposed": (
        lambda f: edit(f, "lm_head.weight", lambda t, d: ({**t, "shape": t["shape"][::-1]}, d)),
        ["lm_head.weight", "has shape [64, 65]", "[65, 64]"],
    ),
    "flat": (lambda f: edit(f, "lm_head.weight", lambda t, d: ({**t, "shape": [65 * 64]}, d)), ["has shape [4160]"]),
    "norm as a matrix": (
        lambda f: edit(f, NORM, lambda t, d: ({**t, "shape": [1, 64]}, d)),
        [NORM, "has shape [1, 64]"],
    ),
    "stale weight_shape": (
        lambda f: edit(f, f"{EXPERT}.weight_shape", poke(0, struct.pack("<i", 32))),
        [f"{EXPERT}.weight_shape", "holds [32, 64]", "[64, 64]"],
    ),
    "weight_shape of one": (
        lambda f: edit(f, f"{EXPERT}.weight_shape", lambda t, d: ({**t, "shape": [1]}, d[:4])),
        ["weight_shape", "should be I32 [2]"],
    ),
    "NaN scale": (
        lambda f: edit(f, f"{EXPERT}.weight_scale", poke(6, NAN_BF16)),
        [f"{EXPERT}.weight_scale", "NaN or infinity at element 3"],
    ),
    "infinite norm": (lambda f: edit(f, NORM, poke(126, INF_BF16)), [NORM, "at element 63"]),
    "NaN bias": (lambda f: edit(f, BIAS, poke(4, NAN_F32)), [BIAS, "at element 1"]),
    "NaN matrix": (
        lambda f: edit(f, "lm_head.weight", poke(4160 * 2 - 2, NAN_BF16)),
        ["lm_head.weight", "at element 4159"],
    ),
    "drafter without config": (lambda f: (f / "draft/config.json").unlink(), ["draft/config.json", "no such file"]),
    "drafter without weights": (lambda f: (f / "draft/model.safetensors").unlink(), ["draft/model.safetensors"]),
    "drafter is a file": (lambda f: (shutil.rmtree(f / "draft"), (f / "draft").touch()), ["draft", "is no folder"]),
    "drafter is a link": (
        lambda f: (shutil.move(f / "draft", f.parent / "d"), (f / "draft").symlink_to(f.parent / "d")),
        ["draft", "symbolic link"],
    ),
    "drafter of another model": (
        lambda f: edit_json(f / "draft/config.json", lambda c: c.update(hidden_size=96)),
        ["draft/config.json", "hidden_size is 96", "belongs to another model; give this one's, or draft 'none'"],
    ),
    "drafter of another kind": (
        lambda f: edit_json(f / "draft/config.json", lambda c: c.update(architectures=["LlamaForCausalLMEagle3"])),
        ["draft/config.json", "Eagle3", "does not know that kind of drafter; give a DFlash drafter, or draft 'none'"],
    ),
    "drafter of another type": (
        lambda f: edit_json(f / "draft/config.json", lambda c: c.update(model_type="llama")),
        ["draft/config.json", "llama", "does not know that kind of drafter; give a DFlash drafter, or draft 'none'"],
    ),
    "no drafter in its folder": (
        lambda f: [file.unlink() for file in (f / "draft").iterdir()],
        [
            "/draft: holds no drafter",
            "neither a config.json nor weights; give the folder of a DFlash drafter, or draft",
        ],
    ),
    "drafter's NaN": (
        lambda f: edit(f, "fc.weight", poke(0, NAN_BF16), f / "draft/model.safetensors"),
        ["draft/model.safetensors", "fc.weight", "at element 0"],
    ),
    "drafter with an embedding": (
        lambda f: edit_json(f / "draft/config.json", lambda c: c["dflash_config"].update(target_layer_ids=[0])),
        ["fc.weight", "has shape [64, 128]"],
    ),
}


@pytest.mark.parametrize("case", BAD_FOLDERS)
def test_bad_folder_is_refused(probe, folder, case):
    probe.load(folder).__exit__()  # it is good before
    damage, words = BAD_FOLDERS[case]
    damage(folder)
    open_files = len(os.listdir("/proc/self/fd"))
    refused(lambda: probe.load(folder), *words)
    assert len(os.listdir("/proc/self/fd")) == open_files


def test_truncation_anywhere_is_noticed(probe, folder):
    for path in (folder / ONE, folder / TWO, folder / "draft/model.safetensors"):
        whole = path.read_bytes()
        header = 8 + int.from_bytes(whole[:8], "little")
        cuts = {0, 1, 7, 8, 9, header - 1, header, header + 1, len(whole) - 1, *range(10, len(whole), len(whole) // 60)}
        for cut in sorted(cuts):
            path.write_bytes(whole[:cut])
            refused(lambda path=path: probe.load(folder), path.name)
        path.write_bytes(whole + b"\0")
        refused(lambda path=path: probe.load(folder), path.name, "1 bytes follow")
        path.write_bytes(whole)


def test_truncation_names_file_tensor_and_offset(probe, folder):
    data = (folder / TWO).read_bytes()
    first = min(read_file(folder / TWO).items(), key=lambda item: item[1][0]["data_offsets"])
    header = 8 + int.from_bytes(data[:8], "little")
    (folder / TWO).write_bytes(data[: header + 1])
    refused(lambda: probe.load(folder), TWO, "truncated", f"tensor '{first[0]}'", str(header + 1))


def test_a_file_that_shrinks_during_the_load_is_noticed(probe, folder):
    size = (folder / TWO).stat().st_size
    probe.read(folder, TWO, size - 10, 10)
    refused(lambda: probe.read(folder, TWO, size - 10, 11), TWO, f"ends at byte {size}", "tensor 'x'", "truncated")


def test_flipped_header_bits_never_get_through(probe, folder):
    """Every bit of a small header: refused with a sentence, or the tensors still tile the file as before."""
    path = folder / "draft/model.safetensors"
    whole = path.read_bytes()
    want = probe.safetensors(whole)
    header = 8 + int.from_bytes(whole[:8], "little")
    for at in range(header):
        for bit in range(8):
            flipped = bytearray(whole[:header])
            flipped[at] ^= 1 << bit
            try:
                got = probe.safetensors(bytes(flipped), len(whole))
            except Refused as e:
                assert e.status in (KD_E_MODEL, -1) and e.sentence
                continue
            # what is read still tiles the file; only names, types of one size and shapes of one product can differ
            assert [(t["begin"], t["end"]) for t in got] == [(t["begin"], t["end"]) for t in want]


def test_stored_rope_frequencies_are_skipped(probe, folder):
    add(folder, "model.layers.0.self_attn.rotary_emb.inv_freq")
    add(folder, "vision_tower.blocks.0.weight")
    add(folder, "mm_projector.0.weight")
    probe.load(folder).__exit__()


def test_missing_folder_and_path(probe, tmp_path):
    for path in (tmp_path / "none", tmp_path / "file" / "x"):
        (tmp_path / "file").touch()
        what = (
            "no such folder; check the path"
            if path.name == "none"
            else "is a file, or leads through one; give the folder"
        )
        refused(lambda path=path: probe.load(path), str(path), what, status=KD_E_IO)


def test_wrong_draft_path(probe, folder, tmp_path):
    missing = tmp_path / "none"
    sentence = "there is no such drafter's folder"
    refused(lambda: probe.load(folder, draft=DRAFT_PATH, draft_path=missing), str(missing), sentence, status=KD_E_IO)
    refused(lambda: probe.load(folder, draft=DRAFT_PATH, draft_path=folder), "DeepseekV3ForCausalLM")


def test_a_bad_drafter_that_is_not_asked_for_is_not_looked_at(probe, folder):
    (folder / "draft/config.json").write_text("{")
    refused(lambda: probe.load(folder), "draft/config.json")
    with probe.load(folder, draft=DRAFT_NONE) as loaded:
        assert loaded.info()["draft"]["layers"] == 0


def in_child(user: int, body) -> None:
    """Run `body` in a child that has become `user`; its failure is ours."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read)
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            body()
        except BaseException:
            os.write(write, traceback.format_exc().encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(pid, 0)
    assert not said, said


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_unreadable_files_are_named_with_the_user(probe, folder):
    nobody = 65534
    for parent in folder.parents:  # pytest's own folders are private
        if parent.stat().st_uid == 0 and str(parent).startswith("/tmp/"):
            parent.chmod(parent.stat().st_mode | 0o011)
    folder.chmod(0o755)

    def check(name: str):
        refused(lambda: probe.load(folder), name, f"as user {nobody}", "Permission denied", status=KD_E_IO)

    for name in ("config.json", INDEX, TWO, "generation_config.json", "draft/config.json", "draft/model.safetensors"):
        mode = (folder / name).stat().st_mode
        (folder / name).chmod(0o600)
        in_child(nobody, lambda name=name: check(name))
        (folder / name).chmod(mode)
    (folder / "draft").chmod(0o700)
    in_child(nobody, lambda: check("draft"))
    (folder / "draft").chmod(0o755)
    folder.chmod(0o700)
    in_child(nobody, lambda: check("model"))


# ---- cancelling ----------------------------------------------------------------------------------------------------


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_cancelling_gives_the_memory_back(probe, nano):
    status, done, total = probe.load_until(nano, NEVER)  # warms up allocators, too
    assert status == KD_OK and done == total > 20e6
    before = resident_bytes()
    open_files = len(os.listdir("/proc/self/fd"))
    for percent in (0, 10, 50, 90, 100):
        for _ in range(3):
            status, done, _ = probe.load_until(nano, total * percent // 100)
            assert status == KD_E_CANCELLED
            assert total * percent // 100 <= done <= total * percent // 100 + (4 << 20)
    assert resident_bytes() - before < 4 << 20
    assert len(os.listdir("/proc/self/fd")) == open_files
    refused(lambda: probe.check(probe.load_until(nano, 0)[0]), "cancelled", status=KD_E_CANCELLED)


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])


def test_loading_takes_little_more_than_the_weights(probe, nano):
    """At most 16 MiB of buffers and 1 KiB a tensor beside what stays, at any moment."""
    probe.load(nano).__exit__()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    except OSError:
        pytest.skip("this kernel does not let a process reset its own peak")
    before = peak_bytes()
    with probe.load(nano) as loaded:
        tensors = len(json.loads((nano / INDEX).read_text())["weight_map"])
        most = loaded.info()["weight_bytes"] + (16 << 20) + 1024 * tensors
    assert 15e6 < peak_bytes() - before <= most


def test_failing_and_loading_again_gives_the_memory_back(probe, nano, tmp_path):
    broken = Path(shutil.copytree(nano, tmp_path / "nano"))
    edit(broken, "model.layers.5.input_layernorm.weight", poke(0, NAN_BF16))
    refused(lambda: probe.load(broken), "model.layers.5.input_layernorm.weight")
    probe.load(nano).__exit__()
    before = resident_bytes()
    for _ in range(4):
        refused(lambda: probe.load(broken), "NaN")
        probe.load(nano).__exit__()
    assert resident_bytes() - before < 4 << 20
