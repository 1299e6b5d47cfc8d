"""The daemon's log: one record a line on a file descriptor, as JSON or text. Never holds prompts or completions.

A log that cannot be written (disk full, closed pipe, a pipe that nobody reads) is counted and otherwise ignored: it must
not stop the daemon.
"""

from __future__ import annotations

import json
import os
import select
import threading
import time
from typing import Any

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


class Log:
    """[any thread] `log.info("request accepted", request="ab12", prompt_tokens=9)`."""

    def __init__(self, fd: int = 2, level: str = "info", form: str = "json"):
        self._fd, self._level, self._json = fd, LEVELS[level], form == "json"
        self._lock = threading.Lock()
        self.dropped = 0  # records that could not be written

    def write(self, level: str, message: str, **fields: Any) -> None:
        if LEVELS[level] < self._level:
            return
        fields = {key: value for key, value in fields.items() if value is not None}
        now = time.time()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z"
        if self._json:
            record = {"time": stamp, "level": level, "message": message, **fields}
            line = json.dumps(record, ensure_ascii=False, default=str)
        else:
            line = f"{stamp} {level:7} {message}" + "".join(f" {k}={v}" for k, v in fields.items())
        data = (line.replace("\n", " ") + "\n").encode("utf-8", "backslashreplace")
        with self._lock:
            try:
                complete = self._put(data)
            except OSError:
                complete = False
            if not complete:
                self.dropped += 1

    def _put(self, data: bytes) -> bool:
        """Whether all of it is written. Never waits: what is writable takes PIPE_BUF bytes at once. The descriptor is
        others' too (a terminal, the journal), so it is not made non-blocking."""
        for at in range(0, len(data), select.PIPE_BUF):
            part = data[at : at + select.PIPE_BUF]
            poller = select.poll()
            poller.register(self._fd, select.POLLOUT)
            if not poller.poll(0) or os.write(self._fd, part) != len(part):
                return False
        return True

    def debug(self, message: str, **fields: Any) -> None:
        self.write("debug", message, **fields)

    def info(self, message: str, **fields: Any) -> None:
        self.write("info", message, **fields)

    def warning(self, message: str, **fields: Any) -> None:
        self.write("warning", message, **fields)

    def error(self, message: str, **fields: Any) -> None:
        self.write("error", message, **fields)
