"""What verify-checkpoint remembers of files that it has hashed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from kd import hashing
from kd.files import read_bounded
from kd.hashing import Digest, Segment

if TYPE_CHECKING:
    from kd.checkpoint import Job

MAX_CACHE_BYTES = 64 << 20


class Known:
    """What is known of files that have not changed since (device, inode, size, time of change), in the user's cache folder."""

    def __init__(self, path: Path | None):
        base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        self._path = path or Path(base) / "kd" / "hashes.json"
        try:
            self._known = dict(json.loads(read_bounded(self._path, MAX_CACHE_BYTES)))
        except (OSError, ValueError, TypeError):
            self._known = {}

    @staticmethod
    def _key(path: str, segments: list[Segment]) -> str:
        s = os.stat(path)
        parts = xxhash.xxh64_intdigest(b"".join(b"%d %d %s\n" % (p.begin, p.end, p.before) for p in segments))
        return f"{s.st_dev}:{s.st_ino}:{s.st_size}:{s.st_mtime_ns}:{s.st_ctime_ns}:{parts:016x}"

    def get(self, job: Job) -> Digest | None:
        try:
            sha256, pieces, sums = self._known[self._key(job.real, job.segments)]
            found = Digest(
                str(sha256), "", [(int(end), str(piece)) for end, piece in pieces], [int(n) for n in sums], {}
            )
        except (KeyError, ValueError, TypeError):
            return None
        return found if [end for end, _ in found.pieces] == hashing.cut(job.bytes, job.header) else None

    def put(self, job: Job, found: Digest) -> None:
        self._known[self._key(job.real, job.segments)] = [found.sha256, found.pieces, [job.sum]]

    def save(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part = self._path.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps(self._known))
            os.replace(part, self._path)
        except OSError:  # only a cache
            pass
