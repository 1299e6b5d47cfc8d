"""Looking at a model folder without an engine: what it holds, and whether it is whole.

`inspect` asks the library, which checks everything that a load would up to the first weight. `verify` reads every byte and finds
every fault there is, not the first one; `write_hashes` leaves a kd-hashes.json for later comparisons.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kd.files import follow, present, read_bounded, why

HASHES = "kd-hashes.json"
INDEX = "model.safetensors.index.json"
PIECE_BYTES = 64 << 20  # of one hash, so that a fault has a place
CHUNK_BYTES = 4 << 20
MAX_HEADER_BYTES = 100_000_000
MAX_INDEX_BYTES = 256 << 20
MAX_CACHE_BYTES = 64 << 20
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


class _Bad(Exception):
    def __init__(self, what: str, tensor: str = "", offset: int = -1):
        super().__init__(what)
        self.what, self.tensor, self.offset = what, tensor, offset


def inspect(path: str | Path, *, draft: str | Path = "auto", follow_links: bool = False) -> dict[str, Any]:
    """kd_inspect: what the folder holds. Raises KdError."""
    from kd import structs
    from kd.native import ffi, load_library

    library = load_library("cpu")
    options, keep = structs.load_options(draft, None, False, follow_links)
    size = 1 << 16
    needed = ffi.new("uint32_t *")
    while True:
        text = ffi.new("char[]", size)
        rc = library.lib.kd_inspect(structs.path(path), options, text, size, needed)
        if rc == structs.CODES["KD_E_SIZE"] and needed[0] > size:
            size = needed[0]
            continue
        library.check(rc)
        del keep
        return json.loads(ffi.string(text))


# ---- headers ---------------------------------------------------------------------------------------------------------


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key appears twice")
    return found


def read_header(path: Path, follow_links: bool) -> dict[str, tuple[str, int, int]]:
    """name -> (type, begin, end in the file), in the file's order. Raises _Bad, OSError."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow_links else os.O_NOFOLLOW)
    fd = os.open(follow(path, follow_links), flags)
    try:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode):
            raise _Bad("it is no regular file")
        prefix = os.pread(fd, 8, 0)
        n = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or n > about.st_size - 8:
            raise _Bad(f"the header should have {n} bytes and the file has {about.st_size}: it is truncated", "", 0)
        if not 2 <= n <= MAX_HEADER_BYTES:
            raise _Bad(f"the header should have {n} bytes, 2 to {MAX_HEADER_BYTES} are allowed", "", 0)
        try:
            header = json.loads(os.pread(fd, n, 8), object_pairs_hook=_object)
            rows = [
                (name, t["dtype"], tuple(t["shape"]), *t["data_offsets"])
                for name, t in header.items()
                if name != "__metadata__"
            ]
            for _, kind, shape, begin, end in rows:
                if kind not in ELEMENT_BYTES or not all(type(x) is int and x >= 0 for x in (*shape, begin, end)):
                    raise ValueError("an entry is no tensor")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise _Bad(f"the header cannot be read ({error})", "", 8) from None
    finally:
        os.close(fd)
    at = 0
    found = {}
    for name, kind, shape, begin, end in sorted(rows, key=lambda row: (row[3], row[4])):
        size = ELEMENT_BYTES[kind]
        for dimension in shape:
            size *= dimension
        if begin != at:
            raise _Bad("overlaps another" if begin < at else "has a hole before it", name, 8 + n + begin)
        if end - begin != size:
            raise _Bad(f"has {end - begin} bytes, its shape and type say {size}", name, 8 + n + begin)
        if 8 + n + end > about.st_size:
            raise _Bad(
                f"ends at byte {8 + n + end}, the file has {about.st_size}: it is truncated", name, about.st_size
            )
        found[name] = (kind, 8 + n + begin, 8 + n + end)
        at = end
    if 8 + n + at != about.st_size:
        raise _Bad(f"{about.st_size - 8 - n - at} bytes follow the last tensor", "", 8 + n + at)
    return found


def _tensor_at(header: dict[str, tuple[str, int, int]], begin: int, end: int) -> str:
    return next((name for name, (_, first, last) in header.items() if first < end and last > begin), "")


# ---- contents --------------------------------------------------------------------------------------------------------


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


class _Cache:
    """Hashes of files that have not changed since (device, inode, size, time of change), in the user's cache folder."""

    def __init__(self, path: Path | None):
        base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        self._path = path or Path(base) / "kd" / "hashes.json"
        try:
            self._known = dict(json.loads(read_bounded(self._path, MAX_CACHE_BYTES)))
        except (OSError, ValueError, TypeError):
            self._known = {}

    @staticmethod
    def _key(path: str) -> str:
        s = os.stat(path)
        return f"{s.st_dev}:{s.st_ino}:{s.st_size}:{s.st_mtime_ns}:{s.st_ctime_ns}"

    def get(self, path: str) -> dict[str, Any] | None:
        found = self._known.get(self._key(path))
        return found if isinstance(found, dict) else None

    def put(self, path: str, value: dict[str, Any]) -> None:
        self._known[self._key(path)] = value

    def save(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part = self._path.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps(self._known))
            os.replace(part, self._path)
        except OSError:  # only a cache
            pass


def _hash_file(
    path: str, header: dict[str, tuple[str, int, int]], tick: Callable[[int], None]
) -> tuple[dict[str, Any], list[Fault]]:
    """({"sha256", "pieces"}, NaNs and infinities), in one pass."""
    whole, pieces, faults = hashlib.sha256(), [], []
    piece = hashlib.blake2b(digest_size=16)
    floats = [(name, kind, begin, end) for name, (kind, begin, end) in header.items() if kind in ("BF16", "F32")]
    first = 0
    for at, data in _chunks(path):
        whole.update(data)
        piece.update(data)
        end = at + len(data)
        if end % PIECE_BYTES == 0 or len(data) < CHUNK_BYTES:
            pieces.append(piece.hexdigest())
            piece = hashlib.blake2b(digest_size=16)
        for name, kind, begin, last in floats[first:]:
            if begin >= end:
                break
            if last <= at:
                first += 1
                continue
            size = ELEMENT_BYTES[kind]
            low = max(begin, at) - at
            low += -(low + at - begin) % size
            found = _wild(kind, data[low : min(last, end) - at])
            if found >= 0:
                faults.append(Fault(os.path.basename(path), name, at + low + found, "holds a NaN or infinity"))
        tick(len(data))
    if whole.digest() and len(pieces) < -(-os.path.getsize(path) // PIECE_BYTES):
        pieces.append(piece.hexdigest())
    return {"sha256": whole.hexdigest(), "pieces": pieces}, faults


def weight_files(folder: Path, follow_links: bool, faults: list[Fault]) -> dict[str, set[str] | None]:
    """file -> the tensors an index says it holds, or None where there is no index."""
    index = folder / INDEX
    if not present(index):
        packed = sorted(p.name for p in folder.glob("packed-rank-*.safetensors"))
        return dict.fromkeys(packed or ["model.safetensors"])
    try:
        weight_map = json.loads(read_bounded(index, MAX_INDEX_BYTES, follow_links), object_pairs_hook=_object)[
            "weight_map"
        ]
        files: dict[str, set[str] | None] = {}
        for name, file in weight_map.items():
            if not re.fullmatch(r"[^./\\\x00-\x1f\x7f][^/\\\x00-\x1f\x7f]*\.safetensors", file):
                faults.append(
                    Fault(
                        INDEX,
                        name,
                        -1,
                        f"is said to be in {file!r:.100}: only names of files in the folder are allowed",
                    )
                )
                continue
            tensors = files.setdefault(file, set())
            assert tensors is not None
            tensors.add(name)
        return files
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        faults.append(Fault(INDEX, "", -1, f"cannot be read ({why(error)})"))
        return {}


def verify(
    folder: str | Path,
    *,
    draft: str | Path = "auto",
    follow_links: bool = False,
    hashes: bool = True,
    progress: Callable[[int, int], None] | None = None,
    cache: Path | None = None,
) -> dict[str, Any]:
    """{"faults", "files", "bytes", "hashed", "cached", "compared"}. Looks at presence, sizes, headers and index; with `hashes`
    at every byte, for NaN and infinity, and compares with the hashes there are: of kd-hashes.json, and in the names of Hugging
    Face's cache. Names of files are relative to the folder."""
    from kd.native import KdError

    folder = Path(folder)
    faults: list[Fault] = []
    report = {"files": 0, "bytes": 0, "hashed": 0, "cached": 0, "compared": 0}
    folders = [("", folder)]
    if draft not in ("auto", "none"):
        folders.append((f"{draft}/", Path(draft)))
    elif draft == "auto" and present(folder / "draft") and not present(folder / "packed-rank-0.safetensors"):
        folders.append(("draft/", folder / "draft"))
    known = _Cache(cache)
    jobs: list[tuple[str, str, dict[str, tuple[str, int, int]], dict[str, Any]]] = []
    for prefix, place in folders:
        expected = _expected(place, prefix, follow_links, faults)
        for file, tensors in weight_files(place, follow_links, faults).items():
            try:
                header = read_header(place / file, follow_links)
            except OSError as error:
                faults.append(Fault(prefix + file, "", -1, error.strerror or str(error)))
                continue
            except _Bad as bad:
                faults.append(Fault(prefix + file, bad.tensor, bad.offset, bad.what))
                continue
            for name in sorted((tensors or set()) - header.keys()):
                faults.append(Fault(prefix + file, name, -1, "is not in the file; the index says it is"))
            for name in sorted(header.keys() - tensors) if tensors is not None else ():
                faults.append(Fault(prefix + file, name, header[name][1], "is in the file; the index does not say so"))
            real = follow(place / file, follow_links)
            report["files"] += 1
            report["bytes"] += os.path.getsize(real)
            jobs.append((prefix + file, real, header, expected.get(file, {})))
    if not faults or hashes:
        try:
            inspect(folder, draft=draft, follow_links=follow_links)
        except KdError as error:
            if not faults:
                faults.append(Fault("", "", -1, error.message))
    if hashes:
        _compare(jobs, known, report, faults, progress)
        known.save()
    return report | {"faults": [asdict(fault) for fault in faults]}


def _expected(place: Path, prefix: str, follow_links: bool, faults: list[Fault]) -> dict[str, dict[str, Any]]:
    """What kd-hashes.json says of each file."""
    if not present(place / HASHES):
        return {}
    try:
        value = json.loads(read_bounded(place / HASHES, MAX_INDEX_BYTES, follow_links))
        if value["piece_bytes"] != PIECE_BYTES:
            raise ValueError(f"piece_bytes is {value['piece_bytes']}")
        files = {
            name: {"bytes": int(of["bytes"]), "pieces": list(map(str, of["pieces"]))}
            for name, of in value["files"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        faults.append(Fault(prefix + HASHES, "", -1, f"cannot be used ({why(error)})"))
        return {}
    for name in files:
        if not present(place / name):
            faults.append(Fault(prefix + name, "", -1, f"is missing; {HASHES} names it"))
    return files


def _compare(jobs: list, known: _Cache, report: dict[str, int], faults: list[Fault], progress: Any) -> None:
    done = 0

    def tick(n: int) -> None:
        nonlocal done
        done += n
        if progress:
            progress(done, report["bytes"])

    def one(job: tuple) -> list[Fault]:
        name, real, header, expected = job
        found = known.get(real)
        wild: list[Fault] = []
        if found is None:
            found, wild = _hash_file(real, header, tick)
            report["hashed"] += 1
            if not wild:
                known.put(real, found)
        else:
            report["cached"] += 1
            tick(os.path.getsize(real))
        bad = [Fault(name, w.tensor, w.offset, w.what) for w in wild]
        blob = os.path.basename(real)
        if re.fullmatch(r"[0-9a-f]{64}", blob):
            report["compared"] += 1
            if found["sha256"] != blob:
                bad.append(Fault(name, "", 0, f"has sha256 {found['sha256']}, it was downloaded as {blob}"))
        if expected:
            report["compared"] += 1
            if len(expected["pieces"]) != len(found["pieces"]):
                bad.append(Fault(name, "", -1, f"has {os.path.getsize(real)} bytes, {HASHES} says {expected['bytes']}"))
            for i, (a, b) in enumerate(zip(found["pieces"], expected["pieces"], strict=False)):
                if a != b:
                    begin, end = i * PIECE_BYTES, min((i + 1) * PIECE_BYTES, os.path.getsize(real))
                    what = f"bytes {begin} to {end} are not those {HASHES} was made of"
                    bad.append(Fault(name, _tensor_at(header, begin, end), begin, what))
        return bad

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for bad in pool.map(one, jobs):
            faults += bad


def write_hashes(folder: str | Path, *, follow_links: bool = False, cache: Path | None = None) -> Path:
    """kd-hashes.json for the folder's weight files, of a folder that has passed `verify`. Raises OSError."""
    folder = Path(folder)
    known = _Cache(cache)
    files = {}
    for file in weight_files(folder, follow_links, []):
        real = follow(folder / file, follow_links)
        found = known.get(real) or _hash_file(real, {}, lambda n: None)[0]
        files[file] = {"bytes": os.path.getsize(real), "pieces": found["pieces"]}
    part = folder / f".{HASHES}.{os.getpid()}"
    part.write_text(json.dumps({"piece_bytes": PIECE_BYTES, "files": files}, indent=1))
    os.replace(part, folder / HASHES)
    return folder / HASHES
