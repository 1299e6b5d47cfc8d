"""What can be known of a configuration before a daemon that serves is stopped for it."""

from __future__ import annotations

import os
from typing import Any

from kdctl.output import FAILED, Failure


def look_first(config: Any, cwd: str, builders: list[str] | None) -> None:
    """An error where a daemon of this configuration, started in `cwd`, could not serve, as far as that is known without a model's
    weights. builders: those that there are, as far as they are known."""
    from kd.beside import GOLDEN, TEXT_FILES, VOCABULARY, look_beside
    from kd.checkpoint import inspect
    from kd.native import KdError, NativeError, find_library, whole
    from kdctl.checkpoint import gpus

    try:
        whole(find_library(config.engine.device))
    except NativeError as error:
        raise Failure(f"{error.message}; nothing was stopped", FAILED, error.name) from None
    if config.engine.device == "cuda" and not gpus() and not os.path.exists("/dev/nvidiactl"):
        raise Failure(
            "device cuda needs an NVIDIA GPU, and nvidia-smi shows none here; nothing was stopped",
            FAILED,
            "KD_E_DEVICE",
        )
    name = config.builder.name
    if builders is not None and name and name not in builders:
        raise Failure(
            f"there is no builder {name!r}: one of {', '.join(builders)}; nothing was stopped", FAILED, "NOT_FOUND"
        )
    if not config.model.path:
        return
    folder, draft, follow_links = os.path.join(cwd, config.model.path), config.model.draft, config.model.follow_links
    tp = config.engine.tp
    try:
        about = inspect(
            folder, draft=draft if draft in ("auto", "none") else os.path.join(cwd, draft), follow_links=follow_links
        )
    except NativeError:
        return  # there is nothing to look with: the start will tell
    except KdError as error:
        raise Failure(f"{error.message}; nothing was stopped", FAILED, error.name) from None
    refused = next((rank.get("refused") for rank in about["ranks"] if rank["tp"] == tp), None)
    if about.get("packed_tp", tp) != tp:
        refused = f"{folder}: was packed for a tp of {about['packed_tp']}, not {tp}"
    if refused:
        raise Failure(f"{refused}; nothing was stopped", FAILED, "KD_E_MODEL")
    target = about["target"]
    for name, file in look_beside(folder, target["vocab"], target["max_positions"], follow_links).items():
        needed = name == GOLDEN or (name in TEXT_FILES and os.path.exists(os.path.join(folder, VOCABULARY)))
        if needed and file["usable"] is False:
            raise Failure(f"{os.path.join(folder, name)} {file['about']}; nothing was stopped", FAILED, "KD_E_MODEL")
