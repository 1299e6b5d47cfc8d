"""Tell systemd how the daemon is doing: the sd_notify datagram, without libsystemd.

Every function returns whether a datagram was sent. Without $NOTIFY_SOCKET, or when nobody listens on it any more, that
is False and nothing else: a supervisor that is not there must never stop the daemon.
"""

from __future__ import annotations

import os
import socket
import time


def send(*lines: str) -> bool:
    """Send "KEY=value" lines in one datagram. Newlines inside a value become spaces: they would start a new key."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if len(address) < 2 or address[0] not in "/@":
        return False
    if address[0] == "@":  # the abstract namespace is spelled with a leading zero byte
        address = "\0" + address[1:]
    text = "\n".join(line.replace("\n", " ") for line in lines)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as s:
            s.setblocking(False)  # a stuck supervisor must not stop the thread that feeds its watchdog
            s.sendto(text.encode("utf-8", "replace"), address)
    except (OSError, ValueError):
        return False
    return True


def ready(status: str = "") -> bool:
    """Start-up, or a reload, is complete."""
    return send("READY=1", *([f"STATUS={status}"] if status else []))


def status(text: str) -> bool:
    """One line for `systemctl status`, e.g. "loading nano: read 61 %"."""
    return send(f"STATUS={text}")


def stopping(status: str = "") -> bool:
    """The daemon is on its way out."""
    return send("STOPPING=1", *([f"STATUS={status}"] if status else []))


def reloading() -> bool:
    """A reload begins; `ready()` ends it. systemd 253 and later insist on the time stamp, older ones ignore it."""
    return send("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")


def watchdog() -> bool:
    """The engine made progress, or is idle. Send it from the progress check, never from a timer alone."""
    return send("WATCHDOG=1")


def extend_timeout(us: int) -> bool:
    """Ask for `us` more microseconds to start or stop; repeat it before they are over."""
    return send(f"EXTEND_TIMEOUT_USEC={us}")


def mainpid(pid: int | None = None) -> bool:
    """Name the process to watch: this one unless given."""
    return send(f"MAINPID={os.getpid() if pid is None else pid}")


def watchdog_interval_us() -> int:
    """How often systemd wants `watchdog()` at the least ($WATCHDOG_USEC); 0: not at all. Send twice as often."""
    if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return 0
    try:
        return max(0, int(os.environ.get("WATCHDOG_USEC", "0")))
    except ValueError:
        return 0
