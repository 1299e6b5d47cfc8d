"""What the daemon is doing, and whether its engine still makes progress."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kd.steps import Ranks

STATES = ("starting", "empty", "loading", "warming", "ready", "draining", "stopped", "failed")

EX_DATA, EX_RUNNING, EX_SOFTWARE, EX_OS, EX_CONFIG = 65, 69, 70, 71, 78


class DaemonState:
    """The state machine. [any thread] The first failure is latched: nothing changes the state or exit status after."""

    def __init__(self, changed: Callable[[str, str], None]):
        self._lock = threading.Lock()
        self._changed = changed
        self.name, self.reason, self.exit_status = "starting", "", 0
        self.started = False  # start-up, the configured load included, is over
        self.draining = False
        self.at = {"starting": time.monotonic()}  # when each state was last entered

    def enter(self, name: str, started: bool = False) -> bool:
        """Go to `name`; False if that is not possible any more. started: start-up ends with it, and whoever sees it may load."""
        assert name in STATES and name != "failed"
        with self._lock:
            self.started = self.started or started
            if self.name in ("failed", "stopped") or (self.draining and name not in ("draining", "stopped")):
                return False
            if name == self.name:
                return True
            self.name = name
            self.at[name] = time.monotonic()
        self._changed(name, "")
        return True

    def drain(self, on: bool, back: str = "ready") -> None:
        """Draining overlays ready: turning it off goes `back`, to empty if the model has gone meanwhile."""
        with self._lock:
            if self.name in ("failed", "stopped"):
                return
            self.draining = on
        self.enter("draining" if on else back)

    def fail(self, reason: str, exit_status: int) -> bool:
        """Latch a failure; False if there was one before."""
        with self._lock:
            if self.name == "failed":
                return False
            self.name, self.reason, self.exit_status = "failed", reason, exit_status
            self.at["failed"] = time.monotonic()
        self._changed("failed", reason)
        return True

    @property
    def failed(self) -> bool:
        return self.name == "failed"

    @property
    def ready(self) -> bool:
        return self.name == "ready"

    def timings(self) -> dict[str, int]:
        """Milliseconds from start to the last entry of each state."""
        first = self.at["starting"]
        return {f"{name}_ms": int((when - first) * 1000) for name, when in self.at.items()}


def why_latched(engine: Any) -> str:
    """What a latched engine answers everyone, but for its advice to whoever embeds it: a daemon ends."""
    try:
        engine.builders()
    except Exception as error:
        return str(getattr(error, "message", error)).removesuffix("; close it and open it again")
    return "the engine is latched: a broken invariant or a lost device"


class Watch:
    """Samples the engine's turn counter; an idle engine counts as alive.

    The sampling runs on its own thread, so that an engine that does not even answer is seen from outside it."""

    def __init__(
        self, limit_ms: int, owes_work: Callable[[], bool], interval_s: float = 0.5, rank_limit_ms: int = 1 << 62
    ):
        self._limit_s, self._owes_work, self._interval_s = limit_ms / 1000, owes_work, interval_s
        self._rank_limit_s = rank_limit_ms / 1000
        self._ranks: Ranks | None = None
        self._engine: Any = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kd-watch", daemon=True)
        self._alive_at = time.monotonic()
        self.stats: dict[str, Any] = {}
        self.on_fatal: Callable[[str, int], None] = lambda reason, status: None
        self.on_alive: Callable[[], None] = lambda: None

    def start(self) -> None:
        self._thread.start()

    def attach(self, engine: Any, ranks: Ranks | None = None) -> None:
        self._ranks = ranks
        self._alive_at = time.monotonic()
        self._engine = engine

    def stop(self) -> None:
        self._stop.set()
        self._engine = None

    def join(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def age_us(self) -> int:
        """Microseconds since the engine was last seen to make progress or to be idle."""
        if self._engine is None:
            return 0
        return max(0, int((time.monotonic() - self._alive_at - self._interval_s) * 1e6))

    @property
    def live(self) -> bool:
        return self.age_us < self._limit_s * 1e6

    def sample(self) -> None:
        """Look once. Raises what the engine raises."""
        engine = self._engine
        if engine is None:
            self.on_alive()
            return
        before = self.stats.get("turns")
        stats = engine.stats()
        self.stats = stats
        if stats.get("state") == "fatal":
            self.on_fatal(why_latched(engine), EX_SOFTWARE)
            return
        if self._ranks is not None:
            self._ranks.die_if_told()
            late, looks = self._ranks.look()
            if late is not None and looks * self._interval_s >= self._rank_limit_s:
                self.on_fatal(
                    f"{late} has kept the other ranks waiting for {self._rank_limit_s:g} s "
                    "(server.rank_stall_timeout_ms)",
                    EX_SOFTWARE,
                )
                return
        if stats.get("turns") != before or not self._owes_work():
            self._alive_at = time.monotonic()
            self.on_alive()

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            try:
                self.sample()
            except Exception as error:
                if not self._stop.is_set() and self._engine is not None:
                    self.on_fatal(f"the engine does not tell its state: {error}", EX_SOFTWARE)
                continue
            if self.age_us > 2 * self._limit_s * 1e6:
                self.on_fatal(
                    f"the engine made no progress for {self.age_us // 1_000_000} s although requests run "
                    "(server.round_stall_timeout_ms)",
                    EX_SOFTWARE,
                )
