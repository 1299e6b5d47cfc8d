"""What a model folder says of its weights before any of them is read: headers of safetensors files, and the index."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from kd.files import follow, present, read_bounded, why
from kd.shapes import BadJson, Json, is_file_name, spelled

INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
MAX_INDEX_BYTES = 256 << 20
MAX_TP = 8
MAX_BYTES = 2**63 - 1
ELEMENT_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4,
    "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong. offset: in the file; -1 where a file as a whole is meant."""

    file: str
    tensor: str
    offset: int
    what: str


class BadFile(Exception):
    """A file that is not what it should be: a Fault without the file's name."""

    def __init__(self, what: str, tensor: str = "", offset: int = -1):
        super().__init__(what)
        self.what, self.tensor, self.offset = what, tensor, offset


@dataclass(frozen=True)
class Tensor:
    """begin, end: offsets in the file."""

    kind: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """tensors: in the file's order. begin: of the data."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    begin: int

    def between(self, begin: int, end: int) -> list[str]:
        """The tensors with a byte in begin .. end - 1."""
        return [name for name, t in self.tensors.items() if t.begin < end and t.end > begin]


def open_file(path: Path, follow_links: bool) -> tuple[int, int]:
    """(descriptor, bytes) of a regular file. Raises BadFile, OSError."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow_links else os.O_NOFOLLOW)
    fd = os.open(follow(path, follow_links), flags)
    about = os.fstat(fd)
    if not stat.S_ISREG(about.st_mode):
        os.close(fd)
        raise BadFile("it is no regular file: put the file itself there")
    return fd, about.st_size


def read_header(path: Path, follow_links: bool) -> Header:
    """Raises BadFile, OSError."""
    fd, size = open_file(path, follow_links)
    try:
        if size == 0:
            raise BadFile("the file is empty: fetch it again", "", 0)
        prefix = os.pread(fd, 8, 0)
        n = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or n > size - 8:
            raise BadFile(f"the header should have {n} bytes and the file has {size}: it is truncated", "", 0)
        if not 2 <= n <= MAX_HEADER_BYTES:
            raise BadFile(f"the header should have {n} bytes, 2 to {MAX_HEADER_BYTES} are allowed", "", 0)
        try:
            metadata, rows = _tensors(Json.parse(os.pread(fd, n, 8)))
        except BadJson as error:
            raise BadFile(f"the header cannot be read ({error}): fetch it again", "", 8) from None
    finally:
        os.close(fd)
    at, found, data = 0, {}, 8 + n
    for name, kind, shape, begin, end in sorted(rows, key=lambda row: (row[3], row[4])):
        bytes_ = ELEMENT_BYTES[kind]
        for dimension in shape:
            bytes_ *= dimension
        if begin != at:
            raise BadFile("overlaps another" if begin < at else "has a hole before it", name, data + begin)
        if end - begin != bytes_:
            raise BadFile(f"has {end - begin} bytes, its shape and type say {bytes_}", name, data + begin)
        if data + end > size:
            raise BadFile(f"ends at byte {data + end}, the file has {size}: it is truncated", name, size)
        found[name] = Tensor(kind, shape, data + begin, data + end)
        at = end
    if data + at != size:
        raise BadFile(f"{size - data - at} bytes follow the last tensor", "", data + at)
    return Header(found, metadata, data)


def _tensors(header: Json) -> tuple[dict[str, str], list[tuple[str, str, tuple[int, ...], int, int]]]:
    """(metadata, rows of name, type, shape, begin, end). Raises BadJson."""
    metadata, rows = {}, []
    for name, entry in header.members():
        if name == "__metadata__":
            metadata = {key: text.text() for key, text in entry.members()}
            continue
        kind = entry.need("dtype")
        if kind.text() not in ELEMENT_BYTES:
            raise kind.wrong("a type of safetensors")
        shape = tuple(one.integer(0, MAX_BYTES) for one in entry.need("shape").elements())
        begin, end = (one.integer(0, MAX_BYTES) for one in entry.need("data_offsets").pair())
        rows.append((name, kind.text(), shape, begin, end))
    return metadata, rows


def together(names: Iterable[str], say: Callable[[str], str]) -> list[tuple[str, str]]:
    """One (tensor, sentence) for however many tensors there is the same to say of, or none."""
    first, *others = sorted(names) or [""]
    if not first:
        return []
    also = f", and so {'are' if len(others) > 1 else 'is'} {len(others)} more" if others else ""
    return [(first, say(also))]


def read_index(folder: Path, follow_links: bool, faults: list[Fault]) -> dict[str, set[str]]:
    """file -> the tensors that the index says it holds."""
    files: dict[str, set[str]] = {}
    outside: dict[str, str] = {}
    try:
        text = read_bounded(folder / INDEX, MAX_INDEX_BYTES, follow_links)
        for name, file in Json.parse(text).need("weight_map").members():
            if is_file_name(file.text()) and re.fullmatch(r"[^.].*\.safetensors", file.text()):
                files.setdefault(file.text(), set()).add(name)
            else:
                outside[name] = file.text()
    except (OSError, BadJson) as error:
        faults.append(Fault(INDEX, "", -1, f"cannot be read ({why(error)}): fetch it again"))
        return {}
    for first, more in together(outside, lambda also: also):
        say = f"is said to be in {spelled(outside[first])}{more}: only names of files in the folder are allowed; "
        faults.append(Fault(INDEX, first, -1, say + "fetch the index again"))
    return files


def shard_names(folder: Path) -> list[str]:
    """Files named like model-00001-of-00003.safetensors, sorted. Raises OSError."""
    return sorted(
        name for name in os.listdir(folder) if re.fullmatch(r".+-\d{5}-of-\d{5}\.safetensors", name, re.S | re.A)
    )


def packed_names(folder: Path) -> list[str]:
    """The packed files that are there, by rank."""
    return [name for rank in range(MAX_TP) if present(folder / (name := f"packed-rank-{rank}.safetensors"))]
