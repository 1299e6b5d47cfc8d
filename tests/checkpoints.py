"""Model folders to damage, and what kdctl says of them: for the tests of verify-checkpoint and convert."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from fake_model import SMALL3, write_model

from kd import Engine
from kd.convert import convert
from kdctl.__main__ import run

INDEX = "model.safetensors.index.json"
PACKED = [f"packed-rank-{rank}.safetensors" for rank in (0, 1)]
TWO = "model-00002-of-00003.safetensors"


def write_originals(library: Path, place: Path) -> dict[str, Path]:
    """A published folder that has a golden.json, and a packed one of it. Parts of the packed one are longer than a piece."""
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
