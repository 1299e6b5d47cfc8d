"""How many blocks of each kernel run at once on a multiprocessor of sm_120: computed from what the compiler says, not run.

    python bench/occupancy.py [--only REGEX] [--json FILE]

Compiles native/cuda for 120f, reads registers and static memory off the compiler's report and the bound of threads off the
binary, and the dynamic memory of each launch off build/out/libkd_cuda.so (`make cuda`), in which every launch has its name. A
multiprocessor has 65,536 registers, given to warps by 256, 48 warps, 24 blocks, and 100 KiB of shared memory, of which a block
takes 1 KiB for itself (CUDA C++ Programming Guide, compute capability 12.x).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "build/out/libkd_cuda.so"
ARCH = "120f"
REGISTERS, REGISTER_STEP, WARPS, BLOCKS, SHARED, OWN = 65536, 256, 48, 24, 100 << 10, 1 << 10
MOST_OF_A_BLOCK = 101376
MAX_THREADS = 0x05  # EIATTR_MAX_THREADS
REPORT = re.compile(r"Compiling entry function '(\w+)' for.*?Used (\d+) registers([^\n]*)", re.S)
LAUNCH = re.compile(rb"launch_with\([^\0]*?kKernel = ([^\0]*?); int kDynamic = (\d+);")


class Kernel(NamedTuple):
    name: str
    threads: int  # at most
    registers: int
    static: int
    dynamic: int

    def blocks(self) -> tuple[int, str]:
        """(at once, what bounds it)"""
        warps = -(-self.threads // 32)
        of_a_warp = -(-self.registers * 32 // REGISTER_STEP) * REGISTER_STEP
        bounds = {
            "registers": REGISTERS // of_a_warp // warps,
            "warps": WARPS // warps,
            "blocks": BLOCKS,
            "shared memory": SHARED // (self.static + self.dynamic + OWN),
        }
        bound = min(bounds, key=lambda what: bounds[what])
        return bounds[bound], bound


def sections(cubin: bytes) -> Iterator[tuple[str, bytes]]:
    """Names and contents of an ELF file's sections."""
    (offset,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, offset + i * size) for i in range(count)]
    texts = headers[names][4]
    for name, _, _, _, at, length in headers:
        start = texts + name
        yield cubin[start : cubin.index(b"\0", start)].decode(), cubin[at : at + length]


def thread_bounds(cubin: bytes) -> dict[str, int]:
    """The most threads of a block, by kernel."""
    found = {}
    for name, data in sections(cubin):
        kernel = name.removeprefix(".nv.info.")
        at = 0
        while kernel != name and at + 4 <= len(data):
            form, attribute, value = struct.unpack_from("<BBH", data, at)
            at += 4
            if form == 4:  # `value` bytes follow
                if attribute == MAX_THREADS:
                    x, y, z = struct.unpack_from("<III", data, at)
                    found[kernel] = x * y * z
                at += value
    return found


def without_defaults(tile: re.Match) -> str:
    """A Tile of linear_tile.h without the last arguments that are its defaults, which launches do not spell."""
    given = tile[1].split(",")
    for default in ("0", "1", "16"):
        if len(given) <= 4 or given[-1] != default or len(given) != 4 + {"0": 3, "1": 2, "16": 1}[default]:
            break
        given.pop()
    return f"Tile<{','.join(given)}>"


def plain(name: str) -> str:
    """The name of a kernel as launches spell it or as the compiler does, brought to one form."""
    name = re.sub(r"\(anonymous namespace\)|_GLOBAL__N__\w+|\{anonymous\}", "", name)
    name = re.sub(
        r"kd::cuda::Way::(warps|groups)|Way::(warps|groups)", lambda m: "01"[(m[1] or m[2]) == "groups"], name
    )
    name = re.sub(r"\(kd::cuda::Way\)|kd::|ops::|cuda::|::|\s|(?<=\d)u", "", name)
    return re.sub(r"Tile<([^<>]*)>", without_defaults, name)


def demangled(names: list[str]) -> list[str]:
    told = subprocess.run(["c++filt", "-p"], input="\n".join(names), capture_output=True, text=True, check=True)
    return [re.sub(r"^void ", "", line) for line in told.stdout.splitlines()]


def dynamic_bytes() -> dict[str, int]:
    found: dict[str, int] = {}
    for name, size in LAUNCH.findall(LIBRARY.read_bytes()):
        key = plain(name.decode())
        found[key] = max(found.get(key, 0), int(size))
    return found


def compile_one(source: Path, folder: Path) -> tuple[bytes, str]:
    out = folder / f"{source.stem}.cubin"
    flags = ["-std=c++20", "-O3", "-fmad=false", "-diag-suppress", "554", f"-arch=sm_{ARCH}", "-Xptxas", "-v", "-cubin"]
    done = subprocess.run(
        ["nvcc", *flags, f"-DKD_CUDA_ARCHS=\"{ARCH}\"", "-Iinclude", "-Inative", "-o", out, source],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{source.name}: nvcc failed:\n{done.stderr[:2000]}")
    return out.read_bytes(), done.stderr


def kernels(sources: list[Path]) -> list[Kernel]:
    dynamic = dynamic_bytes()
    found = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for cubin, report in pool.map(lambda source: compile_one(source, Path(folder)), sources):
            threads = thread_bounds(cubin)
            entries = REPORT.findall(report)
            for name, (mangled, registers, rest) in zip(demangled([e[0] for e in entries]), entries, strict=True):
                key = plain(name)
                if key not in dynamic or mangled not in threads or dynamic[key] > MOST_OF_A_BLOCK:
                    continue  # nobody launches it here: of another architecture
                static = re.search(r"(\d+) bytes smem", rest)
                found.append(
                    Kernel(key, threads[mangled], int(registers), int(static[1]) if static else 0, dynamic[key])
                )
    return sorted(found)


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--only", default=".", metavar="REGEX")
    args.add_argument("--json", type=Path)
    options = args.parse_args()
    if not LIBRARY.exists():
        raise SystemExit(f"{LIBRARY} is not there: run `make cuda`")
    if not shutil.which("nvcc"):
        raise SystemExit("there is no CUDA compiler (nvcc) on the PATH, and this reads what it makes")
    rows = [k for k in kernels(sorted((ROOT / "native/cuda").glob("*.cu"))) if re.search(options.only, k.name)]
    print(
        f"{'kernel, sm_120, computed':64}{'threads':>9}{'registers':>11}{'shared B':>10}{'blocks':>8}{'of 48 warps':>13}  bound"
    )
    for k in rows:
        blocks, bound = k.blocks()
        warps = blocks * -(-k.threads // 32)
        print(
            f"{k.name[:63]:64}{k.threads:9}{k.registers:11}{k.static + k.dynamic:10}{blocks:8}{warps:9} {100 * warps // WARPS:2}%"
            f"  {bound}"
        )
    if options.json:
        table = [k._asdict() | {"blocks": k.blocks()[0], "bound": k.blocks()[1]} for k in rows]
        options.json.write_text(json.dumps({"arch": ARCH, "kernels": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
