"""Looking at a model folder without an engine: what it holds, and whether it is whole.

`inspect` asks the library, which checks everything that a load would up to the first weight. `verify` reads every byte, finds
every fault there is, not the first one, and compares with everything that is known: the hashes in packed files, golden.json, the
names in Hugging Face's cache, and kd-hashes.json, which it can leave for the next time.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from kd import hashing
from kd.files import follow, present, read_bounded, why
from kd.golden import GOLDEN, Golden, GoldenError
from kd.hashing import HASHES, Digest, Segment, digest
from kd.headers import (
    INDEX,
    MAX_INDEX_BYTES,
    BadFile,
    Fault,
    Header,
    open_file,
    packed_names,
    read_header,
    read_index,
    shard_names,
    together,
)
from kd.known import Known
from kd.packed import Packed, read_packed
from kd.shapes import BadJson, Json

MAX_CONFIG_BYTES = 1 << 20
# What a load reads beside the weights.
TEXT_FILES = {"tiktoken.model", "tokenizer_config.json", "chat_template.jinja"}
_MODEL_FOLDER = "that Hugging Face's files are in, or one that `kdctl convert` has made"
SIDE_FILES = ("config.json", "generation_config.json", *sorted(TEXT_FILES))


def must_be_folder(path: str | Path, what: str = "folder") -> None:
    """Raises KdError, which calls it `what`."""
    from kd.structs import failure

    try:
        if stat.S_ISDIR(os.stat(path).st_mode):
            os.listdir(path)
            return
    except FileNotFoundError:
        raise failure("KD_E_NOT_FOUND", f"{path}: there is no such {what}; check the path") from None
    except NotADirectoryError:
        pass
    except OSError as error:
        raise failure(
            "KD_E_IO",
            f"{path}: the model folder cannot be read by user {os.geteuid()} ({error.strerror}); give that user access to "
            "it and to the folders above",
        ) from None
    raise failure("KD_E_NOT_FOUND", f"{path}: is a file; give the {what} that it is in")


def inspect(path: str | Path, *, draft: str | Path = "auto", follow_links: bool = False) -> dict[str, Any]:
    """kd_inspect: what the folder holds. Raises KdError."""
    from kd import structs
    from kd.native import ffi, load_library

    must_be_folder(path)
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


# ---- what is known of a folder -----------------------------------------------------------------------------------------


@dataclass
class Job:
    """A file to read. name: as it is told; sum: that of its segments' hashes, where these are tensors."""

    name: str
    real: str
    header: Header | None = None
    segments: list[Segment] = field(default_factory=list)
    packed: Packed | None = None
    expected: list[tuple[int, str]] | None = None
    found: Digest | None = None
    sum: int = 0

    @property
    def bytes(self) -> int:
        return os.path.getsize(self.real)

    @property
    def data_begin(self) -> int:
        return self.header.begin if self.header else 0


@dataclass
class _Place:
    """The target's folder, or the drafter's. prefix: before the names of its files."""

    prefix: str
    folder: Path
    weights: list[Job] = field(default_factory=list)
    sides: list[Job] = field(default_factory=list)
    bad: set[str] = field(default_factory=set)  # weights that cannot be read: told, and not compared

    def read(self, follow_links: bool, faults: list[Fault]) -> None:
        """Looks at everything but the bytes of the weights."""
        expected = self._expected(follow_links, faults)
        packed = not self.prefix and packed_names(self.folder)
        if not packed and not present(self.folder / INDEX) and not present(self.folder / "config.json"):
            if not present(self.folder / "model.safetensors") and not shard_names(self.folder):
                kind, give = (
                    ("drafter", "of a DFlash drafter, or draft 'none'") if self.prefix else ("model", _MODEL_FOLDER)
                )
                what = f"holds no {kind}: there is neither a config.json nor weights; give the folder {give}"
                faults.append(Fault(self.prefix.rstrip("/"), "", -1, what))
                return
        if packed:
            self._read_packed(packed, follow_links, faults)
        else:
            self._read_published(follow_links, faults)
        for job in self.weights:
            job.expected = expected.pop(job.name.removeprefix(self.prefix), None)
        expected = {name: pieces for name, pieces in expected.items() if name not in self.bad}
        names = [
            *expected,
            *(n for n in (*SIDE_FILES, GOLDEN, INDEX) if present(self.folder / n) and n not in expected),
        ]
        names = [name for name in names if self.prefix + name not in {fault.file for fault in faults}]  # told already
        for name in names:
            try:
                real = follow(self.folder / name, follow_links)
                os.close(open_file(Path(real), follow_links=True)[0])  # a FIFO would be waited for
                self.sides.append(Job(self.prefix + name, real, expected=expected.get(name)))
            except (OSError, BadFile) as error:
                faults.append(Fault(self.prefix + name, "", -1, why(error)))

    def _header(self, file: str, follow_links: bool, faults: list[Fault]) -> Job | None:
        self.bad.add(file)
        try:
            header = read_header(self.folder / file, follow_links)
            self.bad.remove(file)
            return Job(self.prefix + file, follow(self.folder / file, follow_links), header)
        except FileNotFoundError:
            faults.append(Fault(self.prefix + file, "", -1, "is missing: fetch it again"))
        except OSError as error:
            faults.append(Fault(self.prefix + file, "", -1, why(error)))
        except BadFile as bad:
            faults.append(Fault(self.prefix + file, bad.tensor, bad.offset, bad.what))
        return None

    def _read_published(self, follow_links: bool, faults: list[Fault]) -> None:
        indexed = present(self.folder / INDEX)
        files = read_index(self.folder, follow_links, faults) if indexed else {"model.safetensors": set()}
        if not indexed and not present(self.folder / "model.safetensors") and (shards := shard_names(self.folder)):
            files = {name: set() for name in shards}
            range_ = shards[0] + (f" to {shards[-1]}" if len(shards) > 1 else "")
            what = f"is missing, and without it the weights that are there ({range_}) are not read: fetch it again"
            faults.append(Fault(self.prefix + INDEX, "", -1, what))
        for file, named in files.items():
            job = self._header(file, follow_links, faults)
            if job is None or job.header is None:
                continue
            there = job.header.tensors
            if indexed:
                for name, more in together(named - there.keys(), lambda also: also):
                    faults.append(Fault(job.name, name, -1, f"is not in the file{more}; the index says it is"))
                for name, more in together(there.keys() - named, lambda also: also):
                    what = f"is in the file{more}; the index does not say so"
                    faults.append(Fault(job.name, name, there[name].begin, what))
            self.weights.append(job)

    def _read_packed(self, names: list[str], follow_links: bool, faults: list[Fault]) -> None:
        first: Packed | None = None
        for file in names:
            job = self._header(file, follow_links, faults)
            if job is None or job.header is None:
                continue
            try:
                job.packed = read_packed(self.folder / file, job.header, follow_links)
                first = first or job.packed
                job.packed.belongs(file, first)
            except BadFile as bad:
                faults.append(Fault(file, bad.tensor, bad.offset, bad.what))
            except OSError as error:
                faults.append(Fault(file, "", -1, why(error)))
            job.segments = job.packed.segments if job.packed else []
            self.weights.append(job)
        for rank in range(first.tp if first else 0):
            if (name := f"packed-rank-{rank}.safetensors") not in names:
                what = f"is missing: the folder was packed for {first.tp if first else 0} ranks; convert the checkpoint again"
                faults.append(Fault(name, "", -1, what))
        if first:
            faults += [Fault(*found) for found in first.other_configs(self.folder, follow_links)]

    def _expected(self, follow_links: bool, faults: list[Fault]) -> dict[str, list[tuple[int, str]]]:
        """What kd-hashes.json says of each file that is there."""
        if not present(self.folder / HASHES):
            return {}
        try:
            files = hashing.read_hashes(Json.parse(read_bounded(self.folder / HASHES, MAX_INDEX_BYTES, follow_links)))
        except (OSError, BadJson) as error:
            what = f"cannot be used ({why(error)}): remove it, and write it again with --write"
            faults.append(Fault(self.prefix + HASHES, "", -1, what))
            return {}
        for name in [name for name in files if not present(self.folder / name)]:
            del files[name]
            faults.append(Fault(self.prefix + name, "", -1, f"is missing; {HASHES} names it"))
        return files

    @property
    def written(self) -> bool:
        """Whether kd-hashes.json may be left there: not in a drafter's folder from elsewhere."""
        return self.prefix in ("", "draft/")

    def write(self) -> Path:
        """kd-hashes.json of what was read. Raises NotWritten."""
        jobs = [job for job in (*self.weights, *self.sides) if job.found]
        files = {job.name.removeprefix(self.prefix): {"pieces": job.found.pieces if job.found else []} for job in jobs}
        return hashing.write_hashes(self.folder, files)


# ---- verify --------------------------------------------------------------------------------------------------------------


def verify(
    folder: str | Path,
    *,
    draft: str | Path = "auto",
    follow_links: bool = False,
    hashes: bool = True,
    again: bool = False,
    write: bool = False,
    progress: Callable[[int, int], None] | None = None,
    cache: Path | None = None,
) -> dict[str, Any]:
    """{"faults", "files", "bytes", "hashed", "cached", "compared", "written"}. Looks at presence, sizes, headers and index; with
    `hashes` at every byte, for NaN and infinity, and compares with everything there is to compare with, files that have not
    changed since they were hashed only by what is remembered, unless `again`; `write`: a folder without faults gets a
    kd-hashes.json, and so does its draft/. Names of files are relative to the folder, those of a drafter from elsewhere
    absolute. Raises KdError for what is no folder, NotWritten where hashes cannot be."""
    must_be_folder(folder)
    folder = Path(folder)
    faults: list[Fault] = []
    places = [_Place("", folder)]
    if draft not in ("auto", "none"):
        draft = os.path.abspath(draft)
        must_be_folder(draft, "drafter's folder")
        places.append(_Place(f"{draft}/", Path(draft)))
    elif draft == "auto" and present(folder / "draft") and not packed_names(folder):
        if (folder / "draft").is_dir():
            places.append(_Place("draft/", folder / "draft"))
        else:
            faults.append(Fault("draft", "", -1, "is no folder, and holds no drafter; remove it, or give --draft"))
    if write:
        for place in places:
            if place.written and not os.access(place.folder, os.W_OK):
                raise hashing.NotWritten(place.folder)
    for place in places:
        try:
            place.read(follow_links, faults)
        except OSError as error:
            faults.append(Fault(place.prefix, "", -1, f"cannot be read ({error.strerror}) by user {os.geteuid()}"))
    weights = [job for place in places for job in place.weights]
    report: dict[str, Any] = {"files": len(weights), "bytes": sum(job.bytes for job in weights)}
    report |= {"hashed": 0, "cached": 0, "compared": 0, "written": []}
    about = _inspect(folder, draft, follow_links, faults)
    if hashes:
        for place, skipped in zip(places, ("skipped", "draft_skipped"), strict=False):
            _segment(place, set(about.get(skipped, ())))
        known = Known(cache, forget=again)
        golden = _golden(folder, follow_links, faults)
        told = {fault.file for fault in faults}  # what a file is refused for is not told of its hashes again
        _read(places, known, told, report, faults, progress)
        known.save()
        if golden:
            _compare_golden(golden, places, draft, follow_links, about, told, report, faults)
    if write and not faults:
        report["written"] = [str(place.write()) for place in places if place.written]
    return report | {"faults": [asdict(fault) for fault in faults]}


def _inspect(folder: Path, draft: str | Path, follow_links: bool, faults: list[Fault]) -> dict[str, Any]:
    """What a load would say: where something was found already, it would be said twice."""
    from kd.native import KdError
    from kd.text_side import read_text_side

    def look(at: Callable[[], Any]) -> Any:
        try:
            return at()
        except KdError as error:
            place, _, what = error.message.partition(": ")
            place, line = (
                (found[1], f"line {found[2]}: ") if (found := re.fullmatch(r"(.*):(\d+)", place)) else (place, "")
            )
            known = what and (Path(place).is_relative_to(folder) or Path(place).is_relative_to(draft))
            file = os.path.relpath(place, folder) if Path(place).is_relative_to(folder) else place
            file = "" if file == "." or not known else file
            faults.append(Fault(file, "", -1, line + what if known else error.message))

    told = {fault.file for fault in faults}
    about = None if told else look(lambda: inspect(folder, draft=draft, follow_links=follow_links))
    if not told & TEXT_FILES:
        look(lambda: read_text_side(folder, follow_links))
    return about or {}


def _segment(place: _Place, skipped: set[str]) -> None:
    """Of published weights: the tensors that content_hash is made of."""
    for job in place.weights:
        if job.header and not job.packed:
            job.segments = [
                Segment(t.begin, t.end, f"{name}{t.kind}[{', '.join(map(str, t.shape))}]".encode())
                for name, t in job.header.tensors.items()
                if name not in skipped
            ]


def _read(
    places: list[_Place], known: Known, told: set[str], report: dict[str, Any], faults: list[Fault], progress: Any
) -> None:
    done = 0

    def tick(n: int) -> None:
        nonlocal done
        done += n
        if progress:
            progress(min(done, report["bytes"]), report["bytes"])

    def weights(job: Job) -> list[Fault]:
        job.found = known.get(job)
        if job.found:
            report["cached"] += 1
            job.sum = job.found.segments[0] if job.found.segments else 0
            tick(job.bytes)
            bad = []
        else:
            job.found = digest(job.real, job.header, job.segments, tick)
            report["hashed"] += 1
            job.sum = sum(job.found.segments) & (1 << 64) - 1
            bad = list(_wild(job))
            if job.packed:
                bad += _runs(job, job.segments, job.packed.hashes, job.found.segments, "that were written")
            if not bad:
                known.put(job, job.found)
        report["compared"] += bool(job.packed)
        return bad + list(_compare(job, report))

    def side(job: Job) -> list[Fault]:
        job.found = digest(job.real, None, [], lambda n: None)
        return list(_compare(job, report))

    def one(job: Job) -> list[Fault]:
        try:
            return weights(job) if job.header else side(job)
        except (OSError, BadFile) as error:
            return [Fault(job.name, "", -1, f"cannot be read ({why(error)})")]

    jobs = [
        job for place in places for job in (*place.weights, *(side for side in place.sides if side.name not in told))
    ]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for bad in pool.map(one, jobs):
            faults += bad


def _wild(job: Job) -> Iterator[Fault]:
    wild = job.found.wild if job.found else {}
    for name, more in together(wild, lambda also: also):
        yield Fault(job.name, name, wild[name], f"holds a NaN or infinity{more}")


def _runs(job: Job, segments: list[Segment], known: list, found: list, than: str) -> Iterator[Fault]:
    """One fault for each run of neighbours that differ; a header is none."""
    runs: list[Segment] = []
    for segment, *hashes in zip(segments, known, found, strict=False):
        if hashes[0] == hashes[1]:
            continue
        begin = runs.pop().begin if runs and runs[-1].end == segment.begin != job.data_begin else segment.begin
        runs.append(Segment(begin, segment.end))
    for run in runs:
        names = job.header.between(run.begin, run.end) if job.header else []
        what = f" ({len(names)} tensors, the last is {names[-1]})" if len(names) > 1 else ""
        what = " (its header)" if run.end == job.data_begin else what
        what = f"bytes {run.begin} to {run.end}{what} are not those {than}"
        yield Fault(job.name, names[0] if names else "", run.begin, what)


def _compare(job: Job, report: dict[str, Any]) -> Iterator[Fault]:
    """With the name that Hugging Face's cache gives it, and with kd-hashes.json."""
    found, blob = job.found, os.path.basename(job.real)
    assert found is not None
    for name, size, value in (("sha256", 64, found.sha256), ("git hash", 40, found.sha1)):
        if value and _is_blob(job.real, size):
            report["compared"] += 1
            if value != blob:
                yield Fault(job.name, "", 0, f"has the {name} {value}, it was downloaded as {blob}: fetch it again")
    if job.expected is None:
        return
    report["compared"] += 1
    ends, expected = [end for end, _ in found.pieces], [end for end, _ in job.expected]
    if ends != expected:
        what = f"has {job.bytes} bytes" if ends[-1:] != expected[-1:] else "holds other tensors"
        yield Fault(job.name, "", -1, f"{what}, {HASHES} was made of another file: fetch it again")
        return
    pieces = [Segment(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
    yield from _runs(job, pieces, job.expected, found.pieces, f"{HASHES} was made of")


def _is_blob(real: str, size: int) -> bool:
    place, name = os.path.split(real)
    return os.path.basename(place) == "blobs" and bool(re.fullmatch(f"[0-9a-f]{{{size}}}", name))


def _golden(folder: Path, follow_links: bool, faults: list[Fault]) -> Golden | None:
    if GOLDEN in {fault.file for fault in faults}:
        return None
    try:
        return Golden.read(folder, follow_links)
    except GoldenError as error:
        faults.append(Fault(GOLDEN, "", -1, str(error).removeprefix(f"{folder / GOLDEN} ")))
        return None


def _compare_golden(
    golden: Golden,
    places: list[_Place],
    draft: str | Path,
    follow_links: bool,
    about: dict[str, Any],
    told: set[str],
    report: dict[str, Any],
    faults: list[Fault],
) -> None:
    report["compared"] += len(golden.files)
    faults += [Fault(name, "", -1, what) for name, what in golden.other_files(follow_links) if name not in told]
    unfit = golden.unfit(about["target"]["vocab"], about["target"]["max_positions"]) if about else None
    if unfit:
        faults.append(Fault(GOLDEN, "", -1, unfit))
    packed = next((job.packed for job in places[0].weights if job.packed), None)
    if packed:
        target, content = packed.target_hash, packed.content_hash if packed.draft and draft == "auto" else None
    elif not about:
        return  # what is missing has been told
    else:
        target, content = _content(places, follow_links)
        content = content if len(places) == 2 and draft == "auto" else None
    report["compared"] += (golden.target_hash is not None) + (content is not None and golden.content_hash is not None)
    what = golden.other_weights(target, content)
    if what:
        faults.append(Fault(GOLDEN, "", -1, what))
    elif draft == "auto" and not packed and len(places) == 1 and golden.content_hash not in (None, f"{target:016x}"):
        what = "is missing: golden.json was made with a drafter beside the target; copy it again, or verify with --draft none"
        faults.append(Fault("draft", "", -1, what))


def _content(places: list[_Place], follow_links: bool) -> tuple[int, int]:
    """(target_hash, content_hash) of what was read."""
    hash_, values = xxhash.xxh3_64(), []
    for place in places:
        hash_.update(read_bounded(place.folder / "config.json", MAX_CONFIG_BYTES, follow_links))
        hash_.update((sum(job.sum for job in place.weights) & (1 << 64) - 1).to_bytes(8, "little"))
        values.append(hash_.intdigest())
    return values[0], values[-1]
