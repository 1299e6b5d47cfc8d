"""Reading what a model folder holds: regular files only, at most so many bytes, never waiting for a writer."""

from __future__ import annotations

import errno
import os
import re
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


def follow(path: str | Path, anywhere: bool = False) -> str:
    """`path`, or where a link there leads if it is one that Hugging Face's download cache is made of, or any may be followed.
    Raises OSError for other links."""
    path = str(path)
    try:
        link = os.readlink(path)
    except OSError:  # no link
        return path
    if anywhere:
        return path
    if re.fullmatch(r"\.\./\.\./blobs/[0-9a-f]+", link):
        return os.path.join(os.path.dirname(path), link)
    raise OSError(
        errno.ELOOP,
        "it is a symbolic link that leads elsewhere; kd follows only those of Hugging Face's own cache: put the file itself "
        "there, or ask for links to be followed",
        path,
    )


def read_bounded(path: str | Path, limit: int, follow_links: bool = False) -> bytes:
    """All of a regular file of at most `limit` bytes. Raises OSError, also for a FIFO, a device or a folder (which a
    plain open would wait for, or read for ever) and a link that leads elsewhere (see `follow`), and TooLarge."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    fd = os.open(follow(path, follow_links), flags if follow_links else flags | os.O_NOFOLLOW)
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
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} is no UTF-8"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
