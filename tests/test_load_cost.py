"""What a load costs, published or packed: its phases add up, and its memory is the weights and a stated constant."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT
from fake_model import SMALL3, write_model

from kd import Engine
from kd.convert import convert

READERS_H = (ROOT / "native/model/readers.h").read_text()
LIBRARY_BYTES = 24 << 20  # what an engine, its threads and buffers, and the allocator keep beside any load


def stated_bytes(tensors: int) -> int:
    """kLoadBytes and kTensorBytes: readers.h and docs/operations.md say them."""
    kib = re.findall(
        r"(?:kChunkBytes =\s+size_t\{4\} << 20|kReaderBytes = 3 \* kChunkBytes|kMaxReaders = 8)", READERS_H
    )
    assert (
        len(kib) == 3
        and "kLoadBytes = kMaxReaders * (kReaderBytes + (size_t{1} << 20)) + (size_t{4} << 20)" in READERS_H
    )
    stated = 8 * (3 * (4 << 20) + (1 << 20)) + (4 << 20)
    assert f"{stated >> 20} MiB and 1 KiB a tensor" in (ROOT / "docs/operations.md").read_text()
    assert "kTensorBytes = 1024" in READERS_H
    return stated + 1024 * tensors


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A model of a quarter of a gigabyte, of which half would show beside the constant, with nano's tokenizer."""
    place = tmp_path_factory.mktemp("cost")
    kind = {**SMALL3, "hidden": 1024, "vocab": 60_000, "inter": 1024}
    published = write_model(place / "published", **kind)
    for name in ("tiktoken.model", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(ROOT / "models/nano" / name, published)
    convert(published, place / "packed")
    return {"published": published, "packed": place / "packed"}


@pytest.mark.parametrize("kind", ["published", "packed"])
def test_phases_add_up_to_the_wall(library, folders, kind):
    missing = []
    with Engine(threads=1, library=library) as engine:
        for _ in range(5):
            began = time.monotonic()
            engine.load(folders[kind])
            wall_us = (time.monotonic() - began) * 1e6
            now = engine.load_progress()
            assert now["phase"] == "done" and set(now["phases"]) >= {"text", "read", "prepare"}
            assert now["bytes_done"] == now["bytes_total"] > 250 << 20
            assert abs(sum(now["phases"].values()) - now["elapsed_us"]) <= 5
            missing.append((wall_us - now["elapsed_us"]) / wall_us)
            engine.unload()
            assert engine.load_progress()["elapsed_us"] == now["elapsed_us"]  # the clock has stopped
    assert 0 <= min(missing) < 0.02, missing  # on a busy machine this thread may be woken late, not every time


PEAK = """
import sys
from pathlib import Path
import kd, kd.convert
from kd import Engine

def status(key):
    return 1024 * int(next(l for l in open("/proc/self/status") if l.startswith(key + ":")).split()[1])

what, folder, out = sys.argv[1:]
kd.Engine(threads=1).close()
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak is from now on
if what == "convert":
    kd.convert.convert(folder, out)
else:
    engine = Engine(threads=1, kv_bytes=16 << 20)
    engine.load(folder)
print(status("VmHWM") - before)
"""


@pytest.mark.parametrize("what", ["published", "packed", "convert"])
def test_the_peak_is_the_weights_and_a_constant(library, folders, tmp_path, what):
    folder = folders["published" if what == "convert" else what]
    with Engine(folder, threads=1, library=library) as engine:
        weights = engine.info.weight_bytes
    assert weights > 250 << 20
    tensors = 200
    code = [sys.executable, "-c", PEAK, what, str(folder), str(tmp_path / "out")]
    done = subprocess.run(code, capture_output=True, text=True, env={"PYTHONPATH": f"{ROOT / 'runtime'}:{ROOT}"})
    assert done.returncode == 0, done.stderr
    peak = int(done.stdout.splitlines()[-1])
    assert weights <= peak <= weights + stated_bytes(tensors) + LIBRARY_BYTES, (peak >> 20, weights >> 20)
