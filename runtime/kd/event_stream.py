"""The events of one request of an Engine, to iterate over."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kd.native import KdError
from kd.values import Event

if TYPE_CHECKING:
    from kd.engine import Engine

LOOK_S = 0.5  # an interrupt may have taken the end that is waited for
CREDIT = 256  # what the library gives a request that asks for 0


class EventStream:
    """An iterator over a request's events, the end included, and a context manager. Credit is given back as events are
    read. `close()` cancels what is still running; so does dropping the object."""

    def __init__(self, engine: Engine, id: int, credit: int):
        self.id = id
        self._engine = engine
        self._portion = max(1, min(64, (credit or CREDIT) // 2))  # of credit, given back after so many events
        self._read = 0
        self._ended = False

    def __iter__(self) -> EventStream:
        return self

    def __next__(self) -> Event:
        if self._ended:
            raise StopIteration
        while not (found := self._engine._wait(self.id, 1, time.monotonic() + LOOK_S)):
            if self._engine._has_ended(self.id):
                self._forget()
                raise StopIteration
        event = found[0]
        if event.type in ("end", "fatal"):
            self._forget()
            return event
        self._read += 1
        if self._read % self._portion == 0:
            self._engine.credit(self.id, self._portion)
        return event

    def _forget(self) -> None:
        self._ended = True
        self._engine._forget(self.id)

    def close(self) -> None:
        """Cancel the request if it runs, and read its events to the end, so that nothing of it is left."""
        if self._ended:
            return
        try:
            self._engine.cancel(self.id)
            for _ in self:
                pass
        except KdError as error:
            self._forget()
            if error.name not in ("KD_E_STATE", "KD_E_FATAL"):  # closed or failed: nothing runs any more
                raise

    def __enter__(self) -> EventStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # The collector may be at work inside the engine's own poll: nothing here may wait for events.
        if not getattr(self, "_ended", True):
            try:
                self._engine._abandon(self.id)
            except Exception:  # an object that is going away has nobody to tell
                pass
