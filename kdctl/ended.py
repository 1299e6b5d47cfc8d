"""Why a daemon ended, as far as its log and its record of steps tell."""

from __future__ import annotations

import collections
import json
import re
import signal
from pathlib import Path
from typing import Any

from kdctl.output import Settings
from kdctl.started import born, on_its_way

LOOK_LINES = 400  # of a log's end: what a daemon says last


def tail(path: Path, lines: int, since: int = 0) -> list[str]:
    """The last lines of what a file has from byte `since` on."""
    try:
        with path.open("rb") as f:
            f.seek(since)
            return [one.decode("utf-8", "replace").rstrip("\n") for one in collections.deque(f, maxlen=lines)]
    except OSError:
        return []


def _record(one: str) -> dict[str, Any]:
    """level, message, reason and pid of a line of a log, JSON or text, or of what was said before there was one."""
    if one.startswith("kd: "):
        return {"level": "error", "message": one[4:]}
    if found := re.match(r"\S+Z (\w+) +(state failed|starting|stopped|)(?: (?:reason|version|status)=)?(.*)", one):
        level, message, rest = found.groups()
        pid = re.search(r" pid=(\d+)", rest)
        return {"level": level, "message": message or rest, "reason": rest, "pid": int(pid[1]) if pid else None}
    try:
        record = json.loads(one)
        return record if isinstance(record, dict) else {}
    except ValueError:
        return {}


def reason(lines: list[str]) -> str:
    """Why a daemon ended, in its own words; "" if it said nothing."""
    for record in map(_record, lines):
        if record.get("level") == "error":
            return str(record.get("reason") or record.get("message"))
    return ""


def exit_words(code: int) -> str:
    """What a child's exit status says."""
    if code >= 0:
        return f"exit status {code}"
    return signal.Signals(-code).name if -code in {*signal.Signals} else f"signal {-code}"


def _said(lines: list[str], pid: int) -> tuple[str, bool]:
    """(why process `pid` failed, whether it said that it ended) by the end of a log, which may be another's."""
    why, ended, its = "", True, False
    for record in map(_record, lines):
        message = record.get("message")
        if message == "starting":
            its = record.get("pid") == pid
            why, ended = "", not its
        elif its and message == "state failed":
            why = str(record.get("reason"))
        elif its and message == "stopped":
            ended = True
    return why, ended


def why_gone(settings: Settings) -> str:
    """How the daemon ended that would answer here, in one sentence; "" for one that was stopped or never was, or if nothing here
    tells."""
    from kd import config as configuration

    where = configuration.find(settings.instance)
    if settings.endpoint:
        if not settings.endpoint.startswith("ipc://"):
            return ""
        where = configuration.Paths(Path(settings.endpoint[6:]).parent)
    try:
        pid = int(where.lock.read_text())
    except (OSError, ValueError):
        return ""
    if born(pid) is not None or on_its_way(settings) is not None:  # it has no socket yet, or no more
        return ""
    why, ended = _said(tail(where.log, LOOK_LINES), pid)
    if why:
        return f"the last one (process {pid}) failed: {why}"
    if where.steps.exists():
        from kd.native import KdError

        try:
            from kd.steps import last_words

            return last_words(where.steps, "the last one") or ""
        except (OSError, KdError):
            pass
    return "" if ended else f"the last one (process {pid}) ended without closing: it was killed, or the machine stopped"
