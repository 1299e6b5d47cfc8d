"""An engine of the library: opened once, called from any thread, closed once nobody is in a call."""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager, nullcontext
from queue import Empty, SimpleQueue
from typing import Any, Self

from kd import structs
from kd.native import Library, ffi


class Calls:
    """`with calls.mine():` around every call of the library, `calls.wait_for_others()` before the last one.

    Ctrl-C may raise anywhere in Python code, so nothing is counted here: a count that an interrupted call never took back
    would be waited for for ever. Each thread has a lock of its own instead. A `with` statement takes and gives back a lock
    in single steps of the interpreter; a signal comes before or after them and never leaves it taken."""

    def __init__(self) -> None:
        self._adding = threading.Lock()
        self._locks: dict[
            int, threading.Lock
        ] = {}  # by thread; one that has ended leaves a free lock for its successor

    def mine(self) -> AbstractContextManager:
        """This thread's lock. A signal handler that calls while this thread is in a call finds it taken: nothing to take."""
        me = threading.get_ident()
        lock = self._locks.get(me)
        if lock is None:
            with self._adding:
                lock = self._locks[me] = threading.Lock()
        return nullcontext() if lock.locked() else lock

    def busy(self, thread: int) -> bool:
        """Whether a thread is in a call."""
        lock = self._locks.get(thread)
        return lock is not None and lock.locked()

    def wait_for_others(self) -> None:
        """Until the calls that other threads are in have ended."""
        with self._adding:
            locks = dict(self._locks)
        locks.pop(threading.get_ident(), None)
        for lock in locks.values():
            with lock:
                pass


class Bells:
    """Wakes threads that wait: a queue for each, which waits in C. threading.Condition waits in Python, and an interrupt
    there may find the lock given back and leave it so."""

    def __init__(self) -> None:
        self._of: dict[int, SimpleQueue[None]] = {}

    def mine(self) -> SimpleQueue[None]:
        """The calling thread's. Who asks for it under the lock that ring() is called under misses no ring before it waits."""
        return self._of.setdefault(threading.get_ident(), SimpleQueue())

    def wait(self, bell: SimpleQueue[None], timeout_s: float) -> None:
        """Until it was rung since mine()."""
        try:
            bell.get(timeout=timeout_s)
        except Empty:
            pass
        finally:
            self._of.pop(threading.get_ident(), None)

    def ring(self) -> None:
        for bell in list(self._of.values()):
            if bell.empty():  # one that an interrupt has left is rung once
                bell.put(None)


class Handle:
    """What `Engine` is made on."""

    def __init__(self, library: Library):
        self._handle: Any = None
        self._library, self._lib = library, library.lib
        self._calls = Calls()
        self._closer = threading.RLock()
        self._closing = False
        self._pid = os.getpid()
        self._lock = threading.RLock()  # guards what the classes made on this one hold
        self._bells = Bells()  # rung when some of it is not as it was

    def _open(self, options: Any) -> None:
        out = ffi.new("kd_engine **")
        self._check(self._lib.kd_open(out, options))
        self._handle = out[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            try:
                self.close()
            except Exception:  # an object that is going away has nobody to tell
                pass

    def close(self) -> None:
        """Cancel everything and free it. Waits for other threads' calls to end (a load is cancelled). Idempotent."""
        if self._handle is not None:
            self._check_process()
        with self._closer:
            if self._handle is None:
                return
            self._closing = True
            with self._lock:
                self._bells.ring()
            self._lib.kd_load_cancel(self._handle)
            self._calls.wait_for_others()
            handle, self._handle = self._handle, None
            self._check(self._lib.kd_close(handle))

    @property
    def library(self) -> Library:
        """The loaded library: its path, version and build information."""
        return self._library

    def _check(self, rc: int) -> int:
        return self._library.check(rc)

    def _ask(self, function: Any, *arguments: Any) -> int:
        """What the library's function gives, called with the handle, which close() does not take away meanwhile."""
        with self._calls.mine():
            self._check_open()
            return function(self._handle, *arguments)

    def _check_process(self) -> None:
        """Before a lock is taken: in a forked child the thread that had it at the fork is not there to give it back."""
        if os.getpid() != self._pid:
            raise structs.failure(
                "KD_E_FORKED",
                f"this engine was opened in process {self._pid} and cannot be used in its child; open one there",
            )

    def _check_open(self) -> None:
        self._check_process()
        if self._handle is None or self._closing:
            raise structs.failure("KD_E_STATE", "this engine is closed; open another one")

    def _filled(self, name: str, function: Any) -> Any:
        out = structs.new(name)
        self._check(self._ask(function, out))
        return out
