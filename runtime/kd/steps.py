"""What the engine's ranks are at, read from the file of kd_options.record_path: which one keeps the others waiting now,
and what a process that died was doing."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import mmap
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kd.native import Library, constants, ffi

_SIZE = ffi.sizeof("kd_step_record")
_STAGES = {value: name[len("KD_STAGE_") :].lower() for value, name in ffi.typeof("kd_stage").elements.items()}
_IDLE = constants["KD_STAGE_IDLE"]
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


@dataclass(frozen=True)
class RankAt:
    """Where one rank is. Two that are equal at two times: it has not moved."""

    rank: int
    step: int
    meetings: int
    stage: int
    waiting: bool
    thread: int

    @property
    def at_work(self) -> bool:
        return self.stage != _IDLE and not self.waiting

    def __str__(self) -> str:
        return f"rank {self.rank} in step {self.step} ({_STAGES.get(self.stage, '?')})"


def _ranks(record: Any) -> tuple[RankAt, ...]:
    return tuple(
        RankAt(i, r.step, r.meetings, r.stage, r.waiting != 0, r.thread)
        for i, r in enumerate(record.ranks[0 : max(0, min(record.tp, constants["KD_MAX_TP"]))])
    )


class Ranks:
    """The ranks of the engine that runs."""

    def __init__(self, path: Path):
        with path.open("rb") as file:
            self._memory = mmap.mmap(file.fileno(), _SIZE, prot=mmap.PROT_READ)
        self._record = ffi.from_buffer("kd_step_record *", self._memory)
        self._seen: tuple[RankAt, ...] = ()
        self._looks = 0

    def die_if_told(self) -> None:
        """A signal that was noted and that another process had sent: it does not recur, as a fault does, when its handler
        returns, but it is to end this process all the same."""
        if self._record.signal:
            os.kill(os.getpid(), self._record.signal)  # its action is the default by now

    def look(self) -> tuple[RankAt | None, int]:
        """The rank that keeps the others waiting, if nobody has moved since the last look, and how many looks that has
        been so. Looks are counted, not time: a machine that was stopped for a while has no hung rank."""
        now = _ranks(self._record)
        late = [r for r in now if r.at_work]
        if now == self._seen and late and len(late) < len(now):
            self._looks += 1
            return late[0], self._looks
        self._seen, self._looks = now, 0
        return None, 0


def take_last_words(path: Path) -> str | None:
    """As `last_words()` for the daemon that comes next. Removes the file."""
    try:
        words = last_words(path, "the daemon before this one")
        path.unlink(missing_ok=True)
        return words
    except OSError as error:
        return (
            f"{path}, the record of steps of the daemon before this one, cannot be read and removed ({error.strerror})"
        )


def last_words(path: Path, who: str) -> str | None:
    """What the process that left the file was at, in one sentence about `who`; None if there is no file. Raises OSError."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return None
    if len(raw) != _SIZE or (record := ffi.from_buffer("kd_step_record *", raw)).size != _SIZE:
        return f"{who} did not close; its record of steps is of another version"
    ranks = _ranks(record)
    busy = [r for r in ranks if r.stage != _IDLE]
    before = f"{who} (process {record.pid})"
    if not record.signal:
        late = [r for r in busy if not r.waiting] or busy
        at = f"with {', '.join(map(str, late))}" if busy else "between two steps"
        return f"{before} ended without closing, {at}: it was killed, or the machine stopped"
    try:
        name = signal.Signals(record.signal).name
    except ValueError:
        name = f"signal {record.signal}"
    thread = ffi.string(record.thread_name).decode("utf-8", "replace")
    mine = [r for r in ranks if r.thread == record.signal_thread]
    at = ", ".join(map(str, mine or busy)) or "between two steps"
    return f"{before} died of {name} in thread {thread}, {at}: report it with the traceback in the log"


def note_crashes(library: Library) -> None:
    """A signal that kills the process is noted in the record, after faulthandler has told what it knows."""
    faulthandler.disable()  # its handler is to come before ours, and hands on to the one it found
    libc = ctypes.CDLL(None)
    libc.sysv_signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.sysv_signal.restype = ctypes.c_void_p
    note = int(ffi.cast("uintptr_t", library.lib.kd_note_signal))
    for number in _CRASHES:
        libc.sysv_signal(number, note)  # is reset by its first use: when the fault recurs it ends the process
    faulthandler.enable(2)


def forget(path: Path) -> None:
    """The end has been told otherwise; what cannot be removed the next start tells of, and it may not hide how this one ends."""
    with contextlib.suppress(OSError):
        os.unlink(path)
