"""One pass over a file: its hashes, those of its parts, and whether it holds a NaN or an infinity."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from kd.headers import ELEMENT_BYTES, MAX_BYTES, Header
from kd.shapes import BadJson, Json, is_file_name

HASHES = "kd-hashes.json"
VERSION = 2  # its pieces end where tensors do; those of 1 did not
PIECE_BYTES = 4 << 20  # of one hash at most, so that a fault has a place; none reaches from one tensor into the next
CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class Segment:
    """Bytes begin .. end - 1 of a file, hashed by themselves after `before`."""

    begin: int
    end: int
    before: bytes = b""


@dataclass
class Digest:
    """pieces: (end, BLAKE2b) of each, as `cut` has them. segments: XXH3 of each, as native/model/hash.h has it. wild: tensor ->
    where its first NaN or infinity is."""

    sha256: str
    sha1: str  # as git has it
    pieces: list[tuple[int, str]]
    segments: list[int]
    wild: dict[str, int]


def _chunks(path: str) -> Iterator[tuple[int, bytes]]:
    with open(path, "rb", buffering=0) as file:
        at = 0
        while data := file.read(CHUNK_BYTES):
            yield at, data
            at += len(data)


def _wild(kind: str, data: bytes) -> int:
    """Index of the first byte of a NaN or infinity, or -1."""
    import numpy as np

    dtype, exponent = (np.uint16, 0x7F80) if kind == "BF16" else (np.uint32, 0x7F800000)
    values: Any = np.frombuffer(data, dtype, len(data) // np.dtype(dtype).itemsize)
    found = (values & exponent) == exponent
    return int(found.argmax()) * values.itemsize if found.any() else -1


class _Wild:
    """Looks for NaN and infinity in the tensors of a file that comes in chunks."""

    def __init__(self, header: Header | None):
        tensors = header.tensors.items() if header else ()
        self._floats = [(name, t) for name, t in tensors if t.kind in ("BF16", "F32")]
        self._first = 0
        self.found: dict[str, int] = {}

    def add(self, at: int, data: bytes) -> None:
        for name, t in self._floats[self._first :]:
            if t.begin >= at + len(data):
                break
            if t.end <= at:
                self._first += 1
                continue
            size = ELEMENT_BYTES[t.kind]
            low = max(t.begin, at) - at
            low += -(low + at - t.begin) % size
            found = _wild(t.kind, data[low : min(t.end - at, len(data))])
            if found >= 0:
                self.found.setdefault(name, at + low + found)


class _Segments:
    """Hashes segments that follow one another."""

    def __init__(self, segments: list[Segment]):
        self._left = iter(segments)
        self.values: list[int] = []
        self._next()

    def _next(self) -> None:
        self._now = next(self._left, None)
        self._hash = xxhash.xxh3_64(self._now.before) if self._now else None

    def add(self, at: int, data: bytes) -> None:
        while self._now and self._hash and self._now.begin < at + len(data):
            begin, end = max(self._now.begin, at) - at, min(self._now.end - at, len(data))
            if begin < end:
                self._hash.update(memoryview(data)[begin:end])
            if self._now.end > at + len(data):
                return
            self.values.append(self._hash.intdigest())
            self._next()

    def end(self) -> list[int]:
        while self._now and self._hash and self._now.begin == self._now.end:  # empty ones at the end of the file
            self.values.append(self._hash.intdigest())
            self._next()
        return self.values


def cut(size: int, header: Header | None) -> list[int]:
    """Where the pieces of a file end: its header, its tensors, and within these every PIECE_BYTES."""
    ends, begin = [], 0
    for end in (*([header.begin, *(t.end for t in header.tensors.values())] if header else ()), size):
        ends += [*range(begin + PIECE_BYTES, end, PIECE_BYTES), *([end] if end > begin else [])]
        begin = end
    return ends


class _Pieces:
    """Hashes what comes in chunks by pieces."""

    def __init__(self, ends: list[int]):
        self._left = iter(ends)
        self._end = next(self._left, -1)
        self._hash = hashlib.blake2b(digest_size=16)
        self.found: list[tuple[int, str]] = []

    def add(self, at: int, data: bytes) -> None:
        rest = memoryview(data)
        while rest and self._end >= 0:  # what a file has grown by meanwhile is in no piece
            now, rest = rest[: self._end - at], rest[self._end - at :]
            self._hash.update(now)
            at += len(now)
            if at == self._end:
                self.found.append((self._end, self._hash.hexdigest()))
                self._end, self._hash = next(self._left, -1), hashlib.blake2b(digest_size=16)


def digest(path: str, header: Header | None, segments: list[Segment], tick: Callable[[int], None]) -> Digest:
    """tick: called with the bytes of each chunk. Raises OSError."""
    size, whole = os.path.getsize(path), hashlib.sha256()
    git = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False) if header is None else None
    pieces, parts, wild = _Pieces(cut(size, header)), _Segments(segments), _Wild(header)
    for at, data in _chunks(path):
        whole.update(data)
        if git:
            git.update(data)
        pieces.add(at, data)
        parts.add(at, data)
        wild.add(at, data)
        tick(len(data))
    return Digest(whole.hexdigest(), git.hexdigest() if git else "", pieces.found, parts.end(), wild.found)


class NotWritten(Exception):
    """kd-hashes.json could not be left: where, why, what to do."""

    def __init__(self, folder: Path, error: OSError | None = None):
        denied = error is None or error.errno in (errno.EACCES, errno.EPERM)
        why = error.strerror if error else os.strerror(errno.EACCES)
        remedy = f"give user {os.geteuid()} leave to write there" if denied else "mend that"
        super().__init__(f"{folder}: kd-hashes.json cannot be written ({why}): verify without --write, or {remedy}")


def read_hashes(value: Json) -> dict[str, list[tuple[int, str]]]:
    """The pieces of each file that a kd-hashes.json names. Raises BadJson."""
    version = value.need("version")
    if version.value != VERSION:
        raise version.wrong(str(VERSION))
    files = {}
    for name, about in value.need("files").members():
        if not all(map(is_file_name, name.split("/"))):
            raise BadJson(f"{about.place} is not in the folder")
        pieces = [piece.pair() for piece in about.need("pieces").elements()]
        files[name] = [(end.integer(0, MAX_BYTES), piece.hex(32)) for end, piece in pieces]
    return files


def write_hashes(folder: Path, files: dict[str, Any]) -> Path:
    """kd-hashes.json: {file: {"pieces": [[end, hash], ...]}}. Raises NotWritten."""
    part = folder / f".{HASHES}.{os.getpid()}"
    try:
        part.write_text(json.dumps({"version": VERSION, "files": files}))
        os.replace(part, folder / HASHES)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise NotWritten(folder, error) from None
    return folder / HASHES
