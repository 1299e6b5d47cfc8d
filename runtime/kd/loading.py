"""Loading a model and proving that it decodes before anyone may use it."""

from __future__ import annotations

import json
import queue
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kd import wire
from kd.wire import ProtocolError

if TYPE_CHECKING:
    from kd.server import Daemon

WARM_TOKENS = 12
WARM_TIMEOUT_S = 300
MAX_GOLDEN_BYTES = 1 << 20


def _first_difference(a: list, b: list) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class Loader:
    """Runs one load at a time on a thread of its own; `progress()` may be asked from anywhere."""

    def __init__(self, daemon: Daemon):
        self.d = daemon
        self._lock = threading.Lock()
        self._busy = False
        self._asked = False  # whether there ever was a load to report on
        self.warming = False

    @property
    def busy(self) -> bool:
        return self._busy

    def progress(self) -> dict[str, Any] | None:
        """phase, bytes_done, bytes_total, elapsed_us, percent; None if nothing was ever loaded."""
        engine = self.d.engine
        if engine is None or not self._asked:
            return None
        try:
            raw = dict(engine.load_progress())
        except Exception:
            return None
        phase = raw["phase"]
        done, total = int(raw.get("bytes_done", 0)), int(raw.get("bytes_total", 0))
        percent = 100.0 * done / total if total else (100.0 if phase == "done" else 0.0)
        return {
            "phase": "warm" if self.warming else phase,
            "bytes_done": done,
            "bytes_total": total,
            "elapsed_us": int(raw.get("elapsed_us", 0)),
            "percent": min(100.0, round(percent, 1)),
        }

    def claim(self) -> None:
        """Reserve the only place. Raises ProtocolError."""
        with self._lock:
            if self._busy:
                raise ProtocolError("BUSY", "a load is under way: wait, or cancel it with LOAD_CANCEL", retry_ms=2000)
            if self.d.model_path is not None:
                raise ProtocolError("CONFLICT", f"{self.d.model_path} is loaded: unload it first")
            self._busy = self._asked = True

    def run(self, path: str, draft: str) -> None:
        """Load and warm up; raises what went wrong, with nothing left loaded. `claim()` came before."""
        d = self.d
        began = time.monotonic()
        stall = threading.Event()
        guard = threading.Thread(target=self._guard, args=(stall,), name="kd-load-guard", daemon=True)
        try:
            d.state.enter("loading")
            d.log.info("loading", model=path)
            guard.start()
            d.engine.load(path, draft=draft)
            stall.set()
            loaded = time.monotonic()
            d.state.enter("warming")
            self.warming = True
            try:
                d.apply_builder()
                self.warm_up(Path(path))
            except Exception:
                self._undo()
                raise
            d.model_path = path
            d.log.info(
                "model ready",
                model=path,
                load_ms=int((loaded - began) * 1000),
                warm_ms=int((time.monotonic() - loaded) * 1000),
            )
        finally:
            stall.set()
            self.warming = False
            self._busy = False

    def _undo(self) -> None:
        try:
            self.d.engine.unload()
        except Exception as error:
            self.d.log.warning("unload after a failed warm-up failed", error=str(error))

    def _guard(self, done: threading.Event) -> None:
        """Cancel a load that no longer reads anything: a stall, not a total time, is the limit."""
        limit_s = self.d.config.server.load_stall_timeout_ms / 1000
        last, since = None, time.monotonic()
        while not done.wait(min(0.5, limit_s / 4)):
            now = self.progress()
            mark = now and (now["phase"], now["bytes_done"])
            if mark != last:
                last, since = mark, time.monotonic()
                self.d.load_progress(now)
            elif time.monotonic() - since > limit_s:
                self.d.log.error("load stalled", phase=now and now["phase"], limit_ms=int(limit_s * 1000))
                try:
                    self.d.engine.load_cancel()
                except Exception as error:
                    self.d.log.warning("a stalled load cannot be cancelled", error=str(error))
                return

    # ---- warm-up

    def warm_up(self, path: Path) -> None:
        """The same tokens and hashes from `none` and from the builder in force, and golden.json's if there is one.

        golden.json: {"prompt_tokens": [ids], "tokens": [ids]}, decoded greedily."""
        engine = self.d.engine
        prompt = self._prompt(engine)
        plain = self._decode(prompt, WARM_TOKENS, "none")
        built = self._decode(prompt, WARM_TOKENS, None)
        if plain != built:
            at = _first_difference(list(zip(*plain, strict=True)), list(zip(*built, strict=True)))
            raise ProtocolError(
                "MODEL",
                f"warm-up: the builder in force changed the output at token {at}: the engine "
                "is not exact on this machine; report it, and run with builder none",
            )
        golden = path / "golden.json"
        if golden.is_file():
            self._check_golden(golden)

    def _check_golden(self, golden: Path) -> None:
        try:
            with golden.open("rb") as f:
                want = json.loads(f.read(MAX_GOLDEN_BYTES))
            prompt, tokens = list(want["prompt_tokens"]), list(want["tokens"])
            if not prompt or not tokens or not all(type(t) is int for t in prompt + tokens):
                raise ValueError("needs two non-empty lists of token ids")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ProtocolError("MODEL", f"{golden} cannot be used ({error}): mend it or remove it") from None
        got = self._decode(prompt, len(tokens), None)[0]
        if got != tokens:
            at = _first_difference(got, tokens)
            raise ProtocolError(
                "MODEL",
                f"{golden}: token {at} came out otherwise: the weights are not those the file "
                "was made with, or this build computes wrongly",
            )

    def _prompt(self, engine: Any) -> list[int]:
        tokenizer = engine.tokenizer
        if tokenizer is not None:
            return list(tokenizer.encode("def greet(name):\n    return"))
        return [i % engine.info.vocab_size for i in range(1, 9)]

    def _decode(self, prompt: list[int], max_tokens: int, builder: str | None) -> tuple[list[int], list[int]]:
        """(tokens, hashes) of a cold greedy request. Its events come through the serve thread, the engine's poller."""
        user, events = self.d.hub.inner_open()
        tokens: list[int] = []
        hashes: list[int] = []
        try:
            ident = self.d.engine.submit(
                prompt,
                max_tokens=max_tokens,
                sampling=self.d.make_sampling(),
                hash_logits=True,
                cold=True,
                ignore_eos=True,
                builder=builder,
                user=user,
            )
            limit = time.monotonic() + WARM_TIMEOUT_S
            while True:
                try:
                    event = events.get(timeout=max(0.01, limit - time.monotonic()))
                except queue.Empty:
                    self.d.engine.cancel(ident)
                    raise ProtocolError("TIMEOUT", f"warm-up took longer than {WARM_TIMEOUT_S} s") from None
                if event is None:
                    raise ProtocolError("FATAL", "the engine failed during warm-up")
                tokens += event.tokens
                hashes += event.hashes
                if event.type == "end":
                    if event.status:
                        name = wire.error_of_status(event.status)
                        raise ProtocolError(name, f"warm-up ended with {name}")
                    return tokens, hashes
        finally:
            self.d.hub.inner_close(user)
