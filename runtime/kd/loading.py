"""Loading a model and proving that it decodes before anyone may use it."""

from __future__ import annotations

import queue
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kd import choose, wire
from kd.golden import Golden, GoldenError
from kd.wire import ProtocolError

if TYPE_CHECKING:
    from kd.server import Daemon

WARM_TOKENS = 12
WARM_TIMEOUT_S = 300
CANCEL_S = 5.0  # a cancelled load is gone by then, or by the stall limit if that is shorter, or something in it hangs


def _first_difference(a: list, b: list) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class Loader:
    """Runs one load at a time on a thread of its own; `progress()` may be asked from anywhere."""

    def __init__(self, daemon: Daemon):
        self.d = daemon
        self._lock = threading.Lock()
        self._busy = False
        self._asked = False  # whether there ever was a load to report on
        self._left_behind = ""  # the folder of a stalled load that could not be cancelled and has not ended
        self._cancelled = False
        self.warming = False
        self._warm = (0.0, 0.0)  # when the warm-up began and ended; 0: not yet
        self.choice: choose.Choice | None = None  # of the builder, where none is configured

    @property
    def busy(self) -> bool:
        return self._busy

    def progress(self) -> dict[str, Any] | None:
        """phase, bytes_done, bytes_total, elapsed_us, percent, rate_bytes_s, eta_ms, phases; None if nothing was ever loaded.

        phases: microseconds of each so far; their sum is elapsed_us."""
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
        phases = dict(raw.get("phases", {}))
        reading = phases.get("read", 0)
        rate = int(done * 1e6 / reading) if reading else 0
        warm_us = self._warm_us()
        if warm_us:
            phases["warm"] = warm_us
        return {
            "phase": "warm" if self.warming else phase,
            "bytes_done": done,
            "bytes_total": total,
            "elapsed_us": int(raw.get("elapsed_us", 0)) + warm_us,
            "percent": min(100.0, round(percent, 1)),
            "rate_bytes_s": rate,
            "eta_ms": int((total - done) * 1000 / rate) if rate and phase == "read" else None,
            "phases": phases,
        }

    def _warm_us(self) -> int:
        began, ended = self._warm
        return int(((ended or time.monotonic()) - began) * 1e6) if began else 0

    def claim(self, replace: bool = False) -> None:
        """Reserve the only place. Raises ProtocolError."""
        with self._lock:
            if self._busy:
                raise ProtocolError("BUSY", "a load is under way: wait, or cancel it with LOAD_CANCEL", retry_ms=2000)
            if self._left_behind:
                raise ProtocolError(
                    "BUSY",
                    f"the stalled load of {self._left_behind} could not be cancelled and still hangs: mend its disk, or "
                    "restart the daemon",
                )
            if self.d.model_path is not None and not replace:
                raise ProtocolError("CONFLICT", f"{self.d.model_path} is loaded: unload it first, or replace it")
            self._busy = self._asked = True
            self._cancelled = False
            self._warm = (0.0, 0.0)

    def cancel(self) -> None:
        """The load under way ends with CANCELLED at its next step, wherever it is. Raises ProtocolError if there is none."""
        if not self._busy:
            raise ProtocolError("STATE", "no load is under way")
        self._cancelled = True
        try:
            self.d.engine.load_cancel()
        except Exception:  # the library is not reading yet, or no longer
            pass

    def _go_on(self) -> None:
        if self._cancelled:
            raise ProtocolError("CANCELLED", "the load was cancelled")

    def run(self, path: str, draft: str, replace: bool = False, follow_links: bool = False) -> None:
        """Load and warm up; raises what went wrong, with nothing left loaded, or with the model that was to be replaced if it
        has not left yet. `claim()` came before."""
        d = self.d
        began = time.monotonic()
        replace = replace and d.model_path is not None
        try:
            if not replace:
                d.state.enter("loading")
            d.log.info("loading", model=path, replaces=d.model_path)
            self._go_on()
            self._load(path, {"draft": draft, "replace": replace, "follow_links": follow_links})
            loaded = time.monotonic()
            d.model_path = self.choice = None
            d.state.enter("warming")
            self.warming, self._warm = True, (loaded, 0.0)
            try:
                d.apply_builder()
                self.warm_up(Path(path), draft)
                self.choose_builder()
                self._go_on()
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
            skipped = getattr(d.engine.info, "skipped_tensors", 0)
            if skipped:
                d.log.info("tensors that text does not need were skipped: no images are understood", tensors=skipped)
        finally:
            self._warm = (self._warm[0], time.monotonic() if self.warming else 0.0)
            self.warming = False
            self._busy = False

    def _undo(self) -> None:
        try:
            self.d.engine.unload()
        except Exception as error:
            self.d.log.warning("unload after a failed warm-up failed", error=str(error))

    def _load(self, path: str, options: dict[str, Any]) -> None:
        """engine.load(), ended when it no longer reads anything: a stall, not a total time, is the limit. Raises what that
        raises, or TIMEOUT. The work is on a thread of its own, which is left behind if it cannot even be cancelled."""
        ended = threading.Event()
        outcome: list[Exception | None] = []

        def work() -> None:
            error = None
            try:
                self.d.engine.load(path, **options)
            except Exception as caught:
                error = caught
            with self._lock:
                outcome.append(error)
                ended.set()
                if not self._left_behind:
                    return
            if error is None:  # long after everybody was told that it failed
                self._undo()
            self._left_behind = ""
            self.d.log.warning("the stalled load has ended after all", model=path, error=error and str(error))

        threading.Thread(target=work, name="kd-loading", daemon=True).start()
        stalled = self._guard(ended)
        if stalled and not ended.wait(min(CANCEL_S, self.d.config.server.load_stall_timeout_ms / 1000)):
            with self._lock:
                self._left_behind = "" if outcome else path
        failure = outcome[0] if outcome else None
        if stalled and not (outcome and failure is None):
            raise ProtocolError("TIMEOUT", f"{path}: {stalled}")
        if failure is not None:
            raise failure

    def _guard(self, ended: threading.Event) -> str:
        """Waits for a load and tells how it goes. Returns "", or why it was cancelled."""
        limit_ms = self.d.config.server.load_stall_timeout_ms
        last, since = None, time.monotonic()
        while not ended.wait(min(0.5, limit_ms / 4000)):
            now = self.progress()
            mark = now and (now["phase"], now["bytes_done"])
            if mark != last:
                last, since = mark, time.monotonic()
                self.d.load_progress(now)
            elif now and now["phase"] == "swap":  # requests of the model before are waited for, as long as they take
                since = time.monotonic()
            elif time.monotonic() - since > limit_ms / 1000:
                phase = now["phase"] if now else "open"
                self.d.log.error("load stalled", phase=phase, limit_ms=limit_ms)
                try:
                    self.d.engine.load_cancel()
                except Exception as error:
                    self.d.log.warning("a stalled load cannot be cancelled", error=str(error))
                return (
                    f"the load stalled in phase {phase}, without progress for {limit_ms} ms: see whether its disk answers, "
                    "or raise server.load_stall_timeout_ms"
                )
        return ""

    # ---- warm-up

    def warm_up(self, path: Path, draft: str) -> None:
        """The same tokens and hashes from `none` and from the builder in force, and golden.json's if there is one: its tokens
        show that this build computes rightly, its hashes that no byte has changed."""
        engine = self.d.engine
        room = engine.info.max_positions
        prompt = self._prompt(engine)[: max(1, room // 2)]
        most = max(1, min(WARM_TOKENS, room - len(prompt)))
        plain = self._decode(prompt, most, "none")
        built = self._decode(prompt, most, None)
        if plain != built:
            at = _first_difference(list(zip(*plain, strict=True)), list(zip(*built, strict=True)))
            raise ProtocolError(
                "MODEL",
                f"warm-up: the builder in force changed the output at token {at}: the engine "
                "is not exact on this machine; report it, and run with builder none",
            )
        try:
            golden = Golden.read(path)
        except GoldenError as error:
            raise ProtocolError("MODEL", str(error)) from None
        if golden is not None:
            self._check_golden(golden, draft)

    def choose_builder(self) -> None:
        """Where no builder is configured: measure which is the fastest here, and put it in force."""
        self.choice = None
        d, engine = self.d, self.d.engine
        if d.wanted_builder[0]:
            return
        info, tokenizer = engine.info, engine.tokenizer
        longest = max(1, min(info.max_positions, info.kv_tokens) // 2)
        texts = choose.prompts(tokenizer.encode if tokenizer else None, info.vocab_size, longest)
        among = choose.candidates(d.max_nodes, bool(info.draft_layers), d.config.engine.device)
        try:
            choice = choose.choose(self._timed, texts, among, longest)
        except choose.Inexact as error:
            name, budget, at = error.args
            raise ProtocolError(
                "MODEL",
                f"warm-up: builder {name} with budget {budget} changed the output at token {at}: the engine is not exact on "
                "this machine; report it, and run with builder none",
            ) from None
        if d.wanted_builder[0]:  # somebody has named one meanwhile
            return
        engine.use_builder(choice.builder, choice.budget)
        self.choice = choice
        d.log.info("builder chosen", builder=choice.builder, budget=choice.budget, why=choice.reason)

    def _check_golden(self, golden: Golden, draft: str) -> None:
        info = self.d.engine.info
        own = draft == "auto" and info.draft_layers > 0
        if draft not in ("auto", "none"):
            self.d.log.warning("golden.json knows no drafter from elsewhere: only the target is compared", draft=draft)
        what = golden.other_weights(info.target_hash, info.content_hash if own else None)
        if what:
            raise ProtocolError("MODEL", f"{golden.path.parent}: {what}")
        for name, what in golden.other_files():
            raise ProtocolError("MODEL", f"{golden.path.parent / name} {what}")
        got = self._decode(golden.prompt_tokens, len(golden.tokens), None)[0]
        if got != golden.tokens:
            at = _first_difference(got, golden.tokens)
            raise ProtocolError(
                "MODEL",
                f"{golden.path}: token {at} came out otherwise: the weights are not those the file "
                "was made with, or this build computes wrongly",
            )

    def _prompt(self, engine: Any) -> list[int]:
        tokenizer = engine.tokenizer
        if tokenizer is not None:
            return list(tokenizer.encode("def greet(name):\n    return"))
        return [i % engine.info.vocab_size for i in range(1, 9)]

    def _timed(self, prompt: list[int], max_tokens: int, builder: str, budget: int) -> tuple[list[int], int, float]:
        """As choose.Run wants it: the first event is the prefill's, time runs from there."""
        marks: list[tuple[float, int]] = []
        tokens, _ = self._decode(prompt, max_tokens, builder, budget, marks)
        return tokens, sum(n for _, n in marks[1:]), marks[-1][0] - marks[0][0]

    def _decode(
        self,
        prompt: list[int],
        max_tokens: int,
        builder: str | None,
        budget: int = 0,
        marks: list[tuple[float, int]] | None = None,
    ) -> tuple[list[int], list[int]]:
        """(tokens, hashes) of a cold greedy request. Its events come through the serve thread, the engine's poller.

        marks: gets when each event came and how many tokens it brought; then there are no hashes."""
        self._go_on()
        user, events = self.d.hub.inner_open()
        tokens: list[int] = []
        hashes: list[int] = []
        try:
            ident = self.d.engine.submit(
                prompt,
                max_tokens=max_tokens,
                sampling=self.d.make_sampling(),
                hash_logits=marks is None,
                cold=True,
                ignore_eos=True,
                builder=builder,
                budget=budget,
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
                if marks is not None and event.tokens:
                    marks.append((time.monotonic(), len(event.tokens)))
                hashes += event.hashes
                if event.type == "end":
                    if event.status:
                        name = wire.error_of_status(event.status)
                        raise ProtocolError(name, f"warm-up ended with {name}")
                    return tokens, hashes
        finally:
            self.d.hub.inner_close(user)
