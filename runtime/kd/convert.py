"""A model folder into a packed one: each rank's memory as it is after loading, so that the next load reads and copies.

The packed folder holds copies of the small files (configs, tokenizer, chat template) and a packed-rank-<r>.safetensors a rank. It
fits one backend, one number of ranks and one layout; another build that lays weights out differently says so and refuses it.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kd.checkpoint import must_be_folder
from kd.engine import Engine
from kd.files import present, read_bounded
from kd.golden import GOLDEN, Golden, GoldenError
from kd.hashing import digest, write_hashes
from kd.structs import failure

# What is not weights: everything a loader, a tokenizer or a person reads.
SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "tiktoken.model",
    "tokenizer_config.json",
    "chat_template.jinja",
    "golden.json",
    "draft/config.json",
    *(FOR_PEOPLE := ("README.md", "LICENSE", "NOTICE")),
)
MAX_SIDE_BYTES = 64 << 20
LOCK = ".kd-lock"


def convert(
    source: str | Path,
    out: str | Path,
    *,
    device: str = "cpu",
    tp: int = 1,
    draft: str | Path = "auto",
    follow_links: bool = False,
    progress: Callable[[dict], None] | None = None,
    share_devices: bool = False,
) -> int:
    """Write the packed folder `out`, which must not be there; it appears when it is complete. Takes the memory that serving
    takes. Returns the bytes written. A source that is not what its golden.json says is refused. Raises KdError."""
    source, out = Path(source), Path(os.path.abspath(out))
    must_be_folder(source)
    try:
        golden = Golden.read(source, follow_links)
    except GoldenError as error:
        raise failure("KD_E_MODEL", str(error)) from None
    for name, what in golden.other_files(follow_links) if golden else ():
        raise failure("KD_E_MODEL", f"{source / name} {what}")
    try:
        with _room_for(out) as partial:
            with Engine(device=device, tp=tp, kv_bytes=0, max_streams=1, share_devices=share_devices) as engine:
                engine.load(source, draft=draft, follow_links=follow_links, progress=progress)
                info = engine.info
                own = draft == "auto" and info.draft_layers > 0
                if golden and (other := golden.other_weights(info.target_hash, info.content_hash if own else None)):
                    raise failure("KD_E_MODEL", f"{source}: {other}")
                engine.save(partial, progress=progress)
            _copy_side_files(source, partial, draft if info.draft_layers else None, follow_links)
            partial.chmod(0o755)
            os.rename(partial, out)
            (out / LOCK).unlink()
    except OSError as error:
        raise failure("KD_E_IO", f"{out}: {error.strerror or error}; make room or give another place") from None
    return sum(path.stat().st_size for path in out.rglob("*") if path.is_file())


def unfinished(out: str | Path) -> Path:
    """Where `out` grows until it is complete."""
    place = Path(os.path.abspath(out))
    return place.with_name(f".{place.name}.kd-partial")


@contextmanager
def _room_for(out: Path) -> Iterator[Path]:
    """A folder beside `out` to be filled and renamed to it, which goes away if that does not happen. What a conversion to `out`
    that was killed has left there is removed; one that runs still holds the lock in it. Raises KdError, OSError."""
    while True:
        if present(out):
            raise failure("KD_E_EXISTS", f"{out} is there: give the name of a folder to be made")
        partial = unfinished(out)
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            if not present(partial):
                partial.mkdir(mode=0o700)
        except FileExistsError:
            pass  # just now
        except OSError as error:
            raise failure("KD_E_IO", f"{out}: cannot be made ({error.strerror}); give another place") from None
        try:
            about = partial.lstat()
            if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
                raise failure("KD_E_IO", f"{partial} is in the way, and no folder of this user's: remove it")
            lock = os.open(partial / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # another conversion has just ended
            continue
        except OSError as error:
            raise failure(
                "KD_E_IO", f"{partial / LOCK}: cannot be opened ({error.strerror}); remove the folder"
            ) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise failure("KD_E_BUSY", f"{out} is being made by another conversion: wait for it, or end it") from None
        if _is_at(lock, partial / LOCK) and not present(out):
            break
        os.close(lock)  # of one that has ended meanwhile
    try:
        for left in partial.iterdir():
            if left.name != LOCK:
                shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
        yield partial
    finally:
        try:
            if _is_at(lock, partial / LOCK):
                shutil.rmtree(partial, ignore_errors=True)
        finally:  # a second interrupt
            os.close(lock)


def _is_at(fd: int, path: Path) -> bool:
    return present(path) and os.path.samestat(os.fstat(fd), path.lstat())


def _copy_side_files(source: Path, out: Path, draft: str | Path | None, follow_links: bool) -> None:
    """And a kd-hashes.json for them: the packed files have hashes of their own."""
    copied = {}
    for name in SIDE_FILES:
        place = source / name
        if name.startswith("draft/"):
            if draft is None:
                continue
            place = source / name if draft == "auto" else Path(draft) / name.removeprefix("draft/")
        if not present(place):
            continue
        (out / name).parent.mkdir(exist_ok=True)
        data = read_bounded(place, MAX_SIDE_BYTES, follow_links)
        if name == GOLDEN and draft not in (None, "auto"):  # it knows no drafter from elsewhere
            data = json.dumps({k: v for k, v in json.loads(data).items() if k != "content_hash"}).encode()
        (out / name).write_bytes(data)
        if name not in FOR_PEOPLE:
            copied[name] = {"pieces": digest(str(out / name), None, [], lambda n: None).pieces}
    write_hashes(out, copied)
