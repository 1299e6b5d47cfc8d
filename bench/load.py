"""How fast a model folder becomes a loaded model, beside what the machine's disk and memory give to a plain reader.

    python bench/load.py FOLDER [--packed PACKED] [--device cpu] [--tp 1] [--repeat 3]

FOLDER: a published folder, e.g. one that tests/wide_model.py has written. PACKED is made from it if it is not there. Each is
loaded with its files out of the page cache and with them in it, and read by as many plain threads as a load has readers, with
the same reads into memory touched before (`reread`) and into fresh memory (`fresh`, what a load needs: the fair ceiling from the
page cache, since a virtual machine's first touch of memory may cost more than the copy). `fio`, if it is installed, reads the
same files past the page cache, eight reads of 4 MiB at once: the disk's own speed. What is compared takes turns. `load` is the
phase that reads; `of_disk` and `of_memory` are its share of `fio` cold and of `fresh` warm. Prints one JSON document.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from machine import told

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "runtime"), str(ROOT)]
READERS, CHUNK = 8, 4 << 20  # as native/model/readers.h
PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


def forget(folder: Path) -> None:
    """Take the folder's files out of the page cache."""
    for path in folder.rglob("*.safetensors"):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def have_memory(folder: Path) -> None:
    """A virtual machine's free memory may have gone back to its host, and the first touch then costs what it takes to get it
    again: touched and freed just before, it costs what it costs on a machine of one's own."""
    n = sum(p.stat().st_size for p in folder.rglob("*.safetensors")) + (1 << 30)
    with mmap.mmap(-1, n, PRIVATE) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        ctypes.memset(at, 1, n)


def fio(folder: Path) -> float | None:
    """Seconds that fio takes to read every file past the page cache; None without fio."""
    files = sorted(folder.rglob("*.safetensors"))
    if not shutil.which("fio"):
        return None
    words = ["--name=read", "--rw=read", "--bs=4M", "--direct=1", "--ioengine=libaio", "--iodepth=8", "--readonly"]
    more = ["--filename=" + ":".join(map(str, files)), "--output-format=json"]
    done = subprocess.run(["fio", *words, *more], capture_output=True, text=True, check=True)
    read = json.loads(done.stdout)["jobs"][0]["read"]
    return sum(path.stat().st_size for path in files) / read["bw_bytes"]


def read_all(folder: Path, fresh: bool) -> float:
    """Seconds to read every file with plain threads."""
    jobs = [
        (path, at) for path in sorted(folder.rglob("*.safetensors")) for at in range(0, path.stat().st_size, 4 * CHUNK)
    ]
    total = sum(p.stat().st_size for p in folder.rglob("*.safetensors"))
    readers = min(READERS, len(os.sched_getaffinity(0)))
    whole = mmap.mmap(-1, total + 4 * CHUNK * len(jobs), PRIVATE) if fresh else None
    if whole is not None:
        whole.madvise(mmap.MADV_HUGEPAGE)
    view, lock = memoryview(whole) if whole is not None else None, threading.Lock()
    left = list(enumerate(jobs))

    def read() -> None:
        own = None if view is not None else memoryview(mmap.mmap(-1, CHUNK, PRIVATE))
        while True:
            with lock:
                if not left:
                    return
                number, (path, begin) = left.pop(0)
            fd = os.open(path, os.O_RDONLY)
            for at in range(0, 4 * CHUNK, CHUNK):
                place = own if own is not None else view[number * 4 * CHUNK + at :][:CHUNK]
                if os.preadv(fd, [place], begin + at) < CHUNK:
                    break
            os.close(fd)

    threads = [threading.Thread(target=read) for _ in range(readers)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.monotonic() - began


def load(folder: Path, device: str, tp: int) -> dict[str, float]:
    """Seconds of each phase, in a process of its own."""
    code = (
        "import json, sys, kd\n"
        "engine = kd.Engine(device=sys.argv[2], tp=int(sys.argv[3]))\n"
        "engine.load(sys.argv[1])\n"
        "p = engine.load_progress()\n"
        "print(json.dumps({k: v / 1e6 for k, v in p['phases'].items()} | {'all': p['elapsed_us'] / 1e6}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder), device, str(tp)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'runtime'}:{ROOT}"},
    )
    if done.returncode:
        raise SystemExit(done.stderr.strip().split("\n")[-1])
    return json.loads(done.stdout)


def once(what: str, cache: str, folder: Path, device: str, tp: int) -> tuple[dict[str, float], float | None]:
    """(phases of a load, seconds)"""
    if what == "fio":
        return {}, fio(folder)
    if cache == "cold":
        forget(folder)
    if what == "reread":
        return {}, read_all(folder, False)
    have_memory(folder)
    if what == "fresh":
        return {}, read_all(folder, True)
    phases = load(folder, device, tp)
    return phases, phases["read"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--packed", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=3)
    a = parser.parse_args()
    packed = a.packed or a.folder.with_name(f"{a.folder.name}-packed-{a.device}-tp{a.tp}")
    if not packed.exists():
        from kd.convert import convert

        convert(a.folder, packed, device=a.device, tp=a.tp)
    rows = []
    for name, folder in (("published", a.folder), ("packed", packed)):
        gb = sum(p.stat().st_size for p in folder.rglob("*.safetensors")) / 1e9
        for cache, kinds in (("cold", ("fio", "reread", "fresh", "load")), ("warm", ("reread", "fresh", "load"))):
            best: dict[str, dict[str, Any]] = {}
            for _ in range(a.repeat):
                for what in kinds:
                    phases, seconds = once(what, cache, folder, a.device, a.tp)
                    if seconds and (what not in best or seconds < best[what]["seconds"]):
                        best[what] = {"seconds": seconds, "phases": phases}
            for what, row in best.items():
                row |= {"folder": name, "cache": cache, "what": what, "gb": round(gb, 3)}
                row |= {"seconds": round(row["seconds"], 3), "gb_s": round(gb / row["seconds"], 2)}
                if what == "load" and (ceiling := best.get("fio" if cache == "cold" else "fresh")):
                    row["of_disk" if cache == "cold" else "of_memory"] = round(ceiling["seconds"] / row["seconds"], 3)
                rows.append(row)
                print(json.dumps(row), file=sys.stderr)
    print(json.dumps({"device": a.device, "tp": a.tp, "cores": len(os.sched_getaffinity(0)), "rows": rows}, indent=1))


if __name__ == "__main__":
    told(main)
