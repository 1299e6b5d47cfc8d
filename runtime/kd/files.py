"""Reading what a model folder holds: regular files only, at most so many bytes, never waiting for a writer."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


class TooLarge(OSError):
    """The file has more bytes than asked for at most."""


def present(path: str | Path) -> bool:
    """Whether the folder lists `path`; also for a link to nowhere, which is damage and not absence. Raises OSError."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def read_bounded(path: str | Path, limit: int) -> bytes:
    """All of a regular file of at most `limit` bytes. Raises OSError, also for a FIFO, a device or a folder (which a
    plain open would wait for, or read for ever), and TooLarge."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        with open(fd, "rb", closefd=False) as file:
            raw = file.read(limit + 1)
    finally:
        os.close(fd)
    if len(raw) > limit:
        raise TooLarge(errno.EFBIG, f"it is larger than {limit} bytes", str(path))
    return raw


def why(error: Exception) -> str:
    """What is wrong, without the path that the sentence around it names already."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
