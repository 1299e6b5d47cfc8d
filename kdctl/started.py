"""Daemons that `kdctl start` has made: what they were told, and whether they still run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kdctl.output import Settings


def born(pid: int) -> int | None:
    """When the process began, in clock ticks since the boot: with it a pid names one process for ever. None: there is none,
    or only what is left of one for its parent."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            state, *rest = f.read().rpartition(b")")[2].split()
    except (ProcessLookupError, FileNotFoundError):
        return None
    return None if state == b"Z" else int(rest[18])


def alive(pid: int, endpoint: str) -> bool:
    """Whether the process still runs. A pid we may not signal is alive; a zombie is not."""
    try:
        os.kill(pid, 0)
        return born(pid) is not None
    except ProcessLookupError:
        return False
    except PermissionError:
        return endpoint.startswith("ipc://") and os.path.exists(endpoint[6:])


@contextlib.contextmanager
def held_back(number: int) -> Iterator[None]:
    """What the signal does comes after the block: for what must not be done by half. A child that is made meanwhile finds it as
    it would have."""
    former = signal.getsignal(number)
    if former in (signal.SIG_IGN, None) or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    signal.signal(number, lambda n, _: came.append(n))
    try:
        yield
    finally:
        signal.signal(number, former)
        if came:
            signal.raise_signal(number)


def remember(path: Path, pid: int, **told: Any) -> None:
    """For `restart`, and for `stop` while it does not answer yet. Replaced as a whole, and readable by its owner alone, as a
    log is."""
    new = path.with_suffix(".new")
    try:
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "w") as f:
            json.dump({"pid": pid, "born": born(pid), **told}, f)
        new.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink()
        raise


def remembered(path: Path, pid: int | None) -> dict[str, Any]:
    """What the daemon that runs as `pid`, or else the last one, was started with; empty if that was not by `kdctl`."""
    try:
        told = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return told if _whole(told) and pid in (None, told["pid"]) else {}


def _whole(told: Any) -> bool:
    """Whether that is what remember() writes: the file may be damaged."""
    if not isinstance(told, dict) or not isinstance(told.get("pid"), int):
        return False
    settings = told.get("set", [])
    words = [told.get(name) for name in ("config", "model", "cwd", "endpoint")]
    return (
        isinstance(settings, list)
        and all(isinstance(item, str) for item in settings)
        and all(word is None or isinstance(word, str) for word in words)
    )


def on_its_way(settings: Settings) -> int | None:
    """The pid of a daemon that `kdctl start` has made and that has no socket yet (its first second or two), or None."""
    from kd import config as configuration

    places = [configuration.find(settings.instance).started]
    if settings.endpoint and settings.endpoint.startswith("ipc://"):  # with server.runtime_dir it is beside its socket
        places.append(Path(settings.endpoint[6:]).with_name(places[0].name))
    for place in places:
        told = remembered(place, None)
        pid = told.get("pid")
        if isinstance(pid, int) and told.get("endpoint") == settings.endpoint:
            if told.get("born") == born(pid) is not None:
                return pid
    return None
