"""What the compiler says of the CUDA kernels: registers, spills, shared memory. Reads what build/make.sh cuda left."""

import re

import pytest
from conftest import OUT, ROOT

ARCHS = OUT / "libkd_cuda.so.archs"  # of the build in force; reports of others may lie beside it
REPORTS = sorted(OUT.glob(f"native.cuda.*.{'_'.join(ARCHS.read_text().split())}.o.ptxas")) if ARCHS.exists() else []
STATIC_BYTES = int(re.search(r"kStaticBytes = (\d+);", (ROOT / "native/cuda/launch.h").read_text())[1])

KERNEL = re.compile(
    r"Compiling entry function '(?P<name>\w+)' for '(?P<arch>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.S,
)


def kernels():
    if not REPORTS:
        pytest.skip("the CUDA twin is not built here: run `make cuda`")
    found = [m for report in REPORTS for m in KERNEL.finditer(report.read_text())]
    assert len(found) > 20
    return found


def test_kernels_do_not_spill():
    spilled = [
        f"{m['name']} ({m['arch']}): {m['stores']} bytes" for m in kernels() if int(m["stores"]) + int(m["loads"])
    ]
    assert not spilled, "\n".join(spilled)


def test_static_shared_memory_leaves_room_for_what_launches_ask_for():
    """launch<> holds dynamic memory under 99 KiB less kStaticBytes; this is the other half."""
    large = []
    for m in kernels():
        static = re.search(r"(\d+) bytes smem", m["rest"])
        if static and int(static[1]) > STATIC_BYTES:
            large.append(f"{m['name']} ({m['arch']}): {static[1]} bytes, at most {STATIC_BYTES}")
    assert not large, "\n".join(large)


def test_every_source_is_compiled_for_the_same_architectures():
    archs = {}
    for m in kernels():
        archs.setdefault(m["arch"], 0)
        archs[m["arch"]] += 1
    assert len(set(archs.values())) == 1, archs
