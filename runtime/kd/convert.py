"""A model folder into a packed one: each rank's memory as it is after loading, so that the next load reads and copies.

The packed folder holds copies of the small files (configs, tokenizer, chat template) and a packed-rank-<r>.safetensors a rank. It
fits one backend, one number of ranks and one layout; another build that lays weights out differently says so and refuses it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from kd.engine import Engine
from kd.files import follow, present
from kd.structs import failure

# What is not weights: everything a loader, a tokenizer or a person reads.
SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "tiktoken.model",
    "tokenizer_config.json",
    "chat_template.jinja",
    "golden.json",
    "README.md",
    "LICENSE",
    "NOTICE",
    "draft/config.json",
)
MAX_SIDE_BYTES = 64 << 20


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
    takes. Returns the bytes written. Raises KdError."""
    source, out = Path(source), Path(out)
    if present(out):
        raise failure("KD_E_EXISTS", f"{out} is there: give the name of a folder to be made")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise failure("KD_E_IO", f"{out}: cannot be made ({error.strerror}); give another place") from None
    try:
        with Engine(device=device, tp=tp, kv_bytes=0, max_streams=1, share_devices=share_devices) as engine:
            engine.load(source, draft=draft, follow_links=follow_links, progress=progress)
            engine.save(partial, progress=progress)
            with_draft = engine.info.draft_layers > 0
        _copy_side_files(source, partial, draft if with_draft else None, follow_links)
        partial.chmod(0o755)
        os.rename(partial, out)
    except OSError as error:
        raise failure("KD_E_IO", f"{out}: {error.strerror or error}; make room or give another place") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return sum(path.stat().st_size for path in out.rglob("*") if path.is_file())


def _copy_side_files(source: Path, out: Path, draft: str | Path | None, follow_links: bool) -> None:
    for name in SIDE_FILES:
        place = source / name
        if name.startswith("draft/"):
            if draft is None:
                continue
            place = source / name if draft == "auto" else Path(draft) / name.removeprefix("draft/")
        if not present(place):
            continue
        (out / name).parent.mkdir(exist_ok=True)
        real = follow(place, follow_links)
        if os.path.getsize(real) <= MAX_SIDE_BYTES:
            shutil.copyfile(real, out / name)
