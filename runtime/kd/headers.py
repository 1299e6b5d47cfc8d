"""What a model folder says of its weights before any of them is read: headers of safetensors files, and the index."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kd.files import follow, present, read_bounded, why

INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
MAX_INDEX_BYTES = 256 << 20
MAX_TP = 8
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


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; raises ValueError if a key appears twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key appears twice")
    return found


def open_file(path: Path, follow_links: bool) -> tuple[int, int]:
    """(descriptor, bytes) of a regular file. Raises BadFile, OSError."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow_links else os.O_NOFOLLOW)
    fd = os.open(follow(path, follow_links), flags)
    about = os.fstat(fd)
    if not stat.S_ISREG(about.st_mode):
        os.close(fd)
        raise BadFile("it is no regular file")
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
            header = json.loads(os.pread(fd, n, 8), object_pairs_hook=unique)
            metadata = dict(header.pop("__metadata__", {}))
            rows = [(name, t["dtype"], tuple(t["shape"]), *t["data_offsets"]) for name, t in header.items()]
            if not all(isinstance(text, str) for text in metadata.values()):
                raise ValueError("__metadata__ is no text")
            for _, kind, shape, begin, end in rows:
                if kind not in ELEMENT_BYTES or not all(type(x) is int and x >= 0 for x in (*shape, begin, end)):
                    raise ValueError("an entry is no tensor")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise BadFile(f"the header cannot be read ({error})", "", 8) from None
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
        for name, file in json.loads(text, object_pairs_hook=unique)["weight_map"].items():
            if re.fullmatch(r"[^./\\\x00-\x1f\x7f][^/\\\x00-\x1f\x7f]*\.safetensors", file):
                files.setdefault(file, set()).add(name)
            else:
                outside[name] = file
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        faults.append(Fault(INDEX, "", -1, f"cannot be read ({why(error)})"))
        return {}
    for first, more in together(outside, lambda also: also):
        say = f"is said to be in {outside[first]!r:.100}{more}: only names of files in the folder are allowed; "
        faults.append(Fault(INDEX, first, -1, say + "fetch the index again"))
    return files


def packed_names(folder: Path) -> list[str]:
    """The packed files that are there, by rank."""
    return [name for rank in range(MAX_TP) if present(folder / (name := f"packed-rank-{rank}.safetensors"))]
