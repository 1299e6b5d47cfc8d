"""What verify-checkpoint remembers of files that it has hashed."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from kd import hashing
from kd.files import read_bounded
from kd.hashing import Digest, Segment

if TYPE_CHECKING:
    from kd.checkpoint import Job

MAX_CACHE_BYTES = 64 << 20  # some 5 TB of weights
MAX_FILES = 4096


class Known:
    """What is known of files that have not changed since (device, inode, size, times of change), in the user's cache folder:
    {key: [sha256, pieces, sums of segments, path]}, those asked for last at the end. What is written has the files alone that
    are there, unchanged, and of these the last ones asked for. forget: nothing is known of files until they have been hashed."""

    def __init__(self, path: Path | None, forget: bool = False):
        base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        self._path = path or Path(base) / "kd" / "hashes.json"
        try:
            told = dict(json.loads(read_bounded(self._path, MAX_CACHE_BYTES)))
        except (OSError, ValueError, TypeError, RecursionError):
            told = {}
        self._believed = not forget
        self._known = {key: entry for key, entry in told.items() if isinstance(key, str) and isinstance(entry, list)}

    @staticmethod
    def _file(path: str) -> str:
        s = os.stat(path)
        return f"{s.st_dev}:{s.st_ino}:{s.st_size}:{s.st_mtime_ns}:{s.st_ctime_ns}"

    def _key(self, path: str, segments: list[Segment]) -> str:
        parts = xxhash.xxh3_64_intdigest(b"".join(b"%d %d %s\n" % (p.begin, p.end, p.before) for p in segments))
        return f"{self._file(path)}:{parts:016x}"

    def get(self, job: Job) -> Digest | None:
        if not self._believed:
            return None
        try:
            key = self._key(job.real, job.segments)
            sha256, pieces, sums, *_ = self._known[key]
            found = Digest(
                str(sha256), "", [(int(end), str(piece)) for end, piece in pieces], [int(n) for n in sums], {}
            )
        except (KeyError, ValueError, TypeError, OverflowError):
            return None
        if [end for end, _ in found.pieces] != hashing.cut(job.bytes, job.header):
            return None
        self._put(key, job, sha256, pieces, sums)
        return found

    def put(self, job: Job, found: Digest) -> None:
        self._put(self._key(job.real, job.segments), job, found.sha256, found.pieces, [job.sum])

    def _put(self, key: str, job: Job, *entry: Any) -> None:
        self._known.pop(key, None)  # it goes to the end
        self._known[key] = [*entry, os.path.abspath(job.real)]

    def _still(self, key: str, entry: Any) -> bool:
        """Whether the file is there as it was. One whose path is not known (it was not written down once) is not."""
        try:
            return self._file(entry[3]) == key.rpartition(":")[0]
        except (OSError, LookupError, TypeError, ValueError):
            return False

    def save(self) -> None:
        part = self._path.with_suffix(f".{os.getpid()}")
        with suppress(OSError):  # only a cache
            self._path.parent.mkdir(parents=True, exist_ok=True)
            try:
                part.write_text(self._text())
                os.replace(part, self._path)
            except OSError:
                part.unlink(missing_ok=True)

    def _text(self) -> str:
        kept: list[str] = []
        left = MAX_CACHE_BYTES - len("{}") + len(", ")  # no comma before the first
        for key, entry in reversed(self._known.items()):
            if not self._still(key, entry):
                continue
            kept.append(f"{json.dumps(key)}: {json.dumps(entry)}")
            left -= len(kept[-1]) + len(", ")
            if left < 0 or len(kept) > MAX_FILES:
                kept.pop()
                break
        return f"{{{', '.join(reversed(kept))}}}"
