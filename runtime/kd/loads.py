"""How an engine gets its model."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kd import structs
from kd.handle import Handle
from kd.held import HeldModel
from kd.native import KdError, Library
from kd.structs import CODES, invalid
from kd.text_side import TextSide, read_text_side


class _Begun:
    """A load of which the library knows nothing yet, since the tokenizer is being read; or never will."""

    def __init__(self) -> None:
        self.at = time.monotonic()
        self.us: int | None = None  # what it took, when it is over
        self.cancelled = False

    def progress(self) -> dict[str, Any]:
        us = int((time.monotonic() - self.at) * 1e6) if self.us is None else self.us
        return {"phase": "open", "bytes_done": 0, "bytes_total": 0, "elapsed_us": us, "phases": {"text": us}}


class Loads(Handle):
    """The part of `Engine` that loads, saves, and says how far that is. One at a time."""

    def __init__(self, library: Library):
        super().__init__(library)
        self._loading = threading.Lock()  # by the thread that is in load() or save()
        self._begun: _Begun | None = None  # the last load, if the library does not know of it
        self._loads = 0
        self._text_us = 0  # what reading tokenizer and template took
        self._sides: dict[int, TextSide] = {}  # of the model that serves and of the one that is being loaded, by id

    def load(
        self,
        path: str | Path,
        *,
        draft: str | Path = "auto",
        wait: bool = True,
        progress: Callable[[dict], None] | None = None,
        replace: bool = False,
        follow_links: bool = False,
        check: Callable[[HeldModel], None] | None = None,
    ) -> None:
        """Load a model folder, or a packed one. draft: "auto" (<path>/draft if there is one), "none", or a folder.

        progress: called with `load_progress()` about every 50 ms while waiting, and at the end. An exception in it, or
        Ctrl-C, cancels the load and comes out of here once the memory is back. wait=False returns at once. The end
        also comes as a "load" event. replace: a loaded model serves on until this one can take its place, and finishes
        its requests. follow_links: symbolic links in the folder may lead elsewhere.

        check: called when all of the model is in memory and before anybody else can use it. What it raises ends the load
        and comes out of here; needs wait. Whatever ends a load leaves a model that was there before in its place.
        """
        if check is not None and not wait:
            raise invalid("check needs wait: it is called by the thread that waits")
        folder = structs.path(path)
        with self._one_load():
            ours = asked = False
            try:
                begun = self._begin()
                side = read_text_side(Path(path), follow_links)
                options, keep = structs.load_options(draft, side, replace, follow_links, hold=check is not None)
                with self._lock:  # who cancels finds the one or the other
                    if begun.cancelled:
                        raise structs.failure("KD_E_CANCELLED", f"the load of {path} was cancelled")
                    served = self._sides.get(self._text_id(), side)
                    self._sides[side.id] = side
                    asked, text_us = True, int((time.monotonic() - begun.at) * 1e6)
                    self._check(self._ask(self._lib.kd_load, folder, options))
                    ours = True
                    self._sides = {served.id: served, side.id: side}
                    self._text_us, self._begun = text_us, None
                del keep
                if not wait:
                    return
                self._wait_for_load(progress)
                if check is not None:
                    held = HeldModel(self, side)
                    check(held)
                    if not held.accepted:
                        held.accept()
                    self._wait_for_load(progress)
            except BaseException as error:
                # An interrupt may have come between the library's answer and the line that notes it.
                if ours or (asked and not isinstance(error, KdError)):
                    self._cancel_load()
                raise
            finally:
                if self._begun is not None:
                    self._begun.us = int((time.monotonic() - self._begun.at) * 1e6)

    def _one_load(self) -> threading.Lock:
        self._check_process()
        if self._loading.locked():
            raise structs.failure("KD_E_BUSY", "a load is under way: wait for it or cancel it with load_cancel()")
        return self._loading

    def _begin(self) -> _Begun:
        with self._lock:
            self._begun = begun = _Begun()
            self._loads += 1
        return begun

    def save(self, folder: str | Path, progress: Callable[[dict], None] | None = None) -> None:
        """Write the loaded model as packed files, one a rank, into a folder that is there. `kd.convert` makes a whole
        model folder of it. progress, exceptions and Ctrl-C as for `load()`."""
        with self._one_load():
            place = structs.path(folder)
            ours = False
            try:
                with self._lock:
                    self._begun, self._text_us, self._loads = None, 0, self._loads + 1
                    self._check(self._ask(self._lib.kd_save, place))
                    ours = True
                self._wait_for_load(progress)
            except BaseException as error:
                if ours or not isinstance(error, KdError):
                    self._cancel_load()
                raise

    def _wait_for_load(self, progress: Callable[[dict], None] | None) -> None:
        # One call of the library at a time, so that close() in another thread, or in `progress`, gets its turn.
        while not self._load_ended(50):
            if progress is not None:
                progress(self.load_progress())
        if progress is not None:
            progress(self.load_progress())

    def _load_ended(self, timeout_ms: int) -> bool:
        """Or holds its model."""
        rc = self._ask(self._lib.kd_load_wait, timeout_ms)
        if rc == CODES["KD_E_TIMEOUT"]:
            return False
        self._check(rc)
        return True

    def _cancel_load(self) -> None:
        """And wait until its memory is back."""
        try:
            self._ask(self._lib.kd_load_cancel)
            while not self._load_ended(1000):
                pass
        except KdError:
            pass  # KD_E_CANCELLED, or why it had ended before

    def _text_id(self) -> int:
        """Of the model that new requests run on."""
        info = structs.new("kd_model_info")
        rc = self._ask(self._lib.kd_info, info)
        return info.text_id if rc == CODES["KD_E_STATE"] or self._check(rc) == 0 else 0  # 0 while there is none

    def load_progress(self) -> dict[str, Any]:
        """{"phase": "open"|"read"|"prepare"|"warm"|"swap"|"done" ("write" of a save), "bytes_done", "bytes_total",
        "elapsed_us", "phases": {phase: us}, "load": how many there were} of the load under way or the last one."""
        self._check_process()
        with self._lock:
            begun, load = self._begun, self._loads
        if begun is not None:
            return begun.progress() | {"load": load}
        progress = structs.progress(self._filled("kd_progress", self._lib.kd_load_progress))
        progress["elapsed_us"] += self._text_us
        progress["phases"] = ({"text": self._text_us} if self._text_us else {}) | progress["phases"]
        return progress | {"load": load}

    def load_cancel(self) -> None:
        """Stop a load under way, wherever it is; `load()` then raises KD_E_CANCELLED. KdError KD_E_STATE if there is none, or
        if its model has taken over already."""
        self._check_process()
        with self._lock:
            if self._begun is not None and self._begun.us is None:
                self._begun.cancelled = True
                return
        self._check(self._ask(self._lib.kd_load_cancel))
