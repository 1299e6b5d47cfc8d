"""Loading a model and proving that it decodes before anyone may use it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from kd import choose
from kd.golden import Golden, GoldenError
from kd.wire import ProtocolError

if TYPE_CHECKING:
    from kd.held import HeldModel, Trial
    from kd.server import Daemon

WARM_TOKENS = 12
WARM_TIMEOUT_S = 300  # of one request of the warm-up
CANCEL_S = 5.0  # a cancelled load is gone by then, or by the stall limit if that is shorter, or something in it hangs


def _first_difference(a: list, b: list) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class Company(Exception):
    """Requests run beside a measurement: it means nothing."""


class Source(NamedTuple):
    """What a model was loaded from: the arguments of LOAD."""

    path: str
    draft: str
    follow_links: bool


class Loader:
    """Runs one load at a time on a thread of its own; `progress()` may be asked from anywhere.

    Everything that can go wrong with a model goes wrong while the engine holds it (kd.held): before it takes its place. Until
    then a cancel ends the load and the model before serves on; afterwards nothing can end it any more."""

    def __init__(self, daemon: Daemon):
        self.d = daemon
        self._lock = threading.Lock()
        self._busy = self._unloading = False
        self._asked = False  # whether there ever was a load to report on
        self._seen = 0  # how many loads the engine knew of when this one was asked for
        self._left_behind = ""  # the folder of a stalled load that could not be cancelled and has not ended
        self._cancelled = False
        self._accepted = False  # the model is on its way to its place: from now on the engine says what a cancel can do
        self._decoded = 0  # requests that the held model has answered
        self.choosing = threading.Lock()  # held by who says which builder is in force, of this model or of the next
        self.choice: choose.Choice | None = None  # of the builder, where none is configured
        self.sources: dict[int, Source] = {}  # by weights_generation: of the model that serves and of the one that will

    @property
    def busy(self) -> bool:
        return self._busy

    def progress(self) -> dict[str, Any] | None:
        """phase, bytes_done, bytes_total, elapsed_us, percent, rate_bytes_s, eta_ms, phases, under_way; None if nothing was ever
        loaded.

        phases: microseconds of each so far; their sum is elapsed_us."""
        engine = self.d.engine
        if engine is None or not self._asked:
            return None
        try:
            raw = dict(engine.load_progress())
        except Exception:
            return None
        if self._busy and raw["load"] == self._seen:  # the one before: this one has not come to the engine yet
            raw = {"phase": "open", "bytes_done": 0, "bytes_total": 0, "elapsed_us": 0, "phases": {}}
        phase, phases = raw["phase"], raw["phases"]
        done, total = int(raw["bytes_done"]), int(raw["bytes_total"])
        percent = 100.0 * done / total if total else (100.0 if phase == "done" else 0.0)
        reading = phases.get("read", 0)
        rate = int(done * 1e6 / reading) if reading else 0
        return {
            "phase": phase,
            "bytes_done": done,
            "bytes_total": total,
            "elapsed_us": int(raw["elapsed_us"]),
            "percent": min(100.0, round(percent, 1)),
            "rate_bytes_s": rate,
            "eta_ms": int((total - done) * 1000 / rate) if rate and phase == "read" else None,
            "phases": phases,
            "under_way": self._busy,
        }

    def claim(self, replace: bool = False) -> None:
        """Reserve the only place. Raises ProtocolError."""
        with self._lock:
            if self._busy:
                raise ProtocolError(
                    "BUSY", "a load is under way: wait, or cancel it (LOAD_CANCEL, kdctl load --cancel)", retry_ms=2000
                )
            if self._left_behind:
                raise ProtocolError(
                    "BUSY",
                    f"the stalled load of {self._left_behind} could not be cancelled and still hangs: mend its disk, or "
                    "restart the daemon",
                )
            if self._unloading:
                raise ProtocolError("BUSY", "the model before is being unloaded", retry_ms=1000)
            if self.d.model_path is not None and not replace:
                raise ProtocolError("CONFLICT", f"{self.d.model_path} is loaded: unload it first, or replace it")
            self._seen = self.d.engine.load_progress()["load"]
            self._busy = self._asked = True
            self._cancelled = self._accepted = False

    @contextmanager
    def no_load(self) -> Iterator[None]:
        """For what must not meet a load. Raises ProtocolError."""
        with self._lock:
            if self._busy:
                raise ProtocolError(
                    "BUSY",
                    "a load is under way: wait, or cancel it first (LOAD_CANCEL, kdctl load --cancel)",
                    retry_ms=1000,
                )
            self._unloading = True
        try:
            yield
        finally:
            self._unloading = False

    def cancel(self) -> None:
        """The load under way ends with CANCELLED, and its model does not take over. Raises ProtocolError if there is none, or if
        it is too late for that."""
        with self._lock:
            if not self._busy:
                raise ProtocolError("STATE", "no load is under way")
            self._cancelled = self._cancelled or not self._accepted
        try:
            self.d.engine.load_cancel()
        except Exception as error:
            if not self._cancelled:  # otherwise the engine has not begun, and _go_on() will see it
                raise ProtocolError("STATE", "it is too late to cancel: the new model has just taken over") from error

    def _go_on(self) -> None:
        if self._cancelled:
            raise ProtocolError("CANCELLED", "the load was cancelled")

    def run(self, path: str, draft: str, replace: bool = False, follow_links: bool = False) -> None:
        """Load, check and put in place; raises what went wrong, and then everything is as it was. `claim()` came before."""
        d, source = self.d, Source(path, draft, follow_links)
        began = time.monotonic()
        choice: list[choose.Choice | None] = [None]

        def check(held: HeldModel) -> None:
            if d.model_path is None:
                d.state.enter("warming")
            choice[0] = self._check(held, source)

        try:
            if d.model_path is None:
                d.state.enter("loading")
            d.log.info("loading", model=path, replaces=d.model_path)
            self._go_on()
            self._load(path, {"draft": draft, "replace": replace, "follow_links": follow_links, "check": check})
            with self.choosing:
                d.model_path, self.choice = path, None if d.wanted_builder[0] else choice[0]
            info = d.engine.info
            self.sources = {info.weights_generation: source}
            spent_us = int((time.monotonic() - began) * 1e6)
            phases = d.engine.load_progress()["phases"]
            warm_us = phases.get("warm", 0)
            d.log.info("model ready", model=path, load_ms=(spent_us - warm_us) // 1000, warm_ms=warm_us // 1000)
            if info.skipped_tensors:
                d.log.info(
                    "tensors that text does not need were skipped: no images are understood",
                    tensors=info.skipped_tensors,
                )
        finally:
            self._busy = False

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
            if self._cancelled:  # perhaps before the engine had begun
                self._quietly(self.d.engine.load_cancel)
            now = self.progress()
            phase = now["phase"] if now else "open"
            mark = now and (phase, now["bytes_done"], self._decoded)
            if mark != last:
                last, since = mark, time.monotonic()
                self.d.load_progress(now)
            most_ms = max(limit_ms, WARM_TIMEOUT_S * 1000) if phase == "warm" else limit_ms
            if time.monotonic() - since <= most_ms / 1000:
                continue
            with self._lock:
                if self._accepted:  # requests of the model before are waited for, as long as they take
                    continue
                self._cancelled = True
            self.d.log.error("load stalled", phase=phase, limit_ms=most_ms)
            self._quietly(self.d.engine.load_cancel)
            return (
                f"the load stalled in phase {phase}, without progress for {most_ms} ms: see whether its disk answers, "
                "or raise server.load_stall_timeout_ms"
            )
        return ""

    def _quietly(self, method: Callable[[], None]) -> None:
        try:
            method()
        except Exception as error:
            self.d.log.debug("no load to cancel", error=str(error))

    # ---- while the engine holds the model

    def _check(self, held: HeldModel, source: Source) -> choose.Choice | None:
        """Prove that it decodes, choose its builder, let it go to its place. Returns what was measured."""
        d, info = self.d, held.info
        name, budget = d.builder_for(info)
        self.warm_up(held, source, name, budget)
        choice = None if d.wanted_builder[0] else self.choose_builder(held)
        with self.choosing:  # who names a builder now has named it before, or finds the model in its place
            if d.wanted_builder[0]:
                name, budget, choice = *d.builder_for(info), None
            elif choice:
                name, budget = choice.builder, choice.budget
            with self._lock:
                self._go_on()
                self._accepted = True
            self.sources[info.weights_generation] = source
            held.accept(None if d.builder_told else name, budget)
        wanted = d.wanted_builder[0]
        if wanted not in ("", "none") and not info.draft_layers:
            d.log.warning("the model has no drafter: builder none is in force", wanted=wanted)
        if choice:
            d.log.info("builder chosen", builder=choice.builder, budget=choice.budget, why=choice.reason)
        return choice

    def warm_up(self, held: HeldModel, source: Source, builder: str, budget: int) -> None:
        """The same tokens and hashes from `none` and from the builder, and golden.json's if there is one: its tokens show that
        this build computes rightly, its hashes that no byte has changed."""
        golden = self._read_golden(source, held.info)
        room = held.info.max_positions
        prompt = self._prompt(held)[: max(1, room // 2)]
        most = max(1, min(WARM_TOKENS, room - len(prompt)))
        plain = self._decode(held, prompt, most, "none", 0, hash_logits=True)
        built = self._decode(held, prompt, most, builder, budget, hash_logits=True)
        ways = [list(zip(trial.tokens, trial.hashes, strict=True)) for trial in (plain, built)]
        if ways[0] != ways[1]:
            raise ProtocolError(
                "MODEL",
                f"warm-up: the builder in force changed the output at token {_first_difference(*ways)}: the engine "
                "is not exact on this machine; report it, and run with builder none",
            )
        if golden is None:
            return
        got = self._decode(held, golden.prompt_tokens, len(golden.tokens), builder, budget).tokens
        if got != golden.tokens:
            at = _first_difference(got, golden.tokens)
            raise ProtocolError(
                "MODEL",
                f"{golden.path}: token {at} came out otherwise: the weights are not those the file "
                "was made with, or this build computes wrongly",
            )

    def choose_builder(self, held: HeldModel) -> choose.Choice:
        """Where no builder is configured: measure which is the fastest here. In company nothing is measured, and what is in
        force stays."""
        d = self.d
        info, tokenizer = held.info, held.tokenizer
        longest = max(1, min(info.max_positions, info.kv_tokens) // 2)
        texts = choose.prompts(tokenizer.encode if tokenizer else None, info.vocab_size, longest)
        among = choose.candidates(d.max_nodes, bool(info.draft_layers), d.config.engine.device)
        quiet = self._turns()

        def timed(prompt: list[int], max_tokens: int, builder: str, budget: int) -> tuple[list[int], int, float]:
            if quiet is None or self._turns() != quiet:
                raise Company
            trial = self._decode(held, prompt, max_tokens, builder, budget)
            return trial.tokens, len(trial.tokens) - 1, trial.seconds

        try:
            choice = choose.choose(timed, texts, among, longest)
            if choice.measured and self._turns() != quiet:
                raise Company
            return choice
        except Company:
            return self._kept(info)
        except choose.Inexact as error:
            name, budget, at = error.args
            raise ProtocolError(
                "MODEL",
                f"warm-up: builder {name} with budget {budget} changed the output at token {at}: the engine is not exact on "
                "this machine; report it, and run with builder none",
            ) from None

    def _turns(self) -> int | None:
        """What the engine has done so far; None while it has something to do."""
        stats = self.d.engine.stats()
        return None if stats["streams"] or stats["waiting"] else stats["turns"]

    def _kept(self, info: Any) -> choose.Choice:
        d = self.d
        name, budget, why = *d.builder_for(info), "trees as they are built in"
        if d.model_path is not None and d.engine.info.draft_layers:
            stats = d.engine.stats()
            name, budget, why = stats["builder"], stats["builder_budget"], "what was in force stays"
        return choose.Choice(
            name, budget, f"requests ran while the model was loaded, so that nothing was measured: {why}"
        )

    def _read_golden(self, source: Source, info: Any) -> Golden | None:
        """Everything in it but the tokens is compared here."""
        try:
            golden = Golden.read(source.path, source.follow_links)
        except GoldenError as error:
            raise ProtocolError("MODEL", str(error)) from None
        if golden is None:
            return None
        own = source.draft == "auto" and info.draft_layers > 0
        if source.draft not in ("auto", "none"):
            self.d.log.warning(
                "golden.json knows no drafter from elsewhere: only the target is compared", draft=source.draft
            )
        what = golden.unfit(info.vocab_size, info.max_positions)
        if what:
            raise ProtocolError("MODEL", f"{golden.path}: {what}")
        what = golden.other_weights(info.target_hash, info.content_hash if own else None)
        if what:
            raise ProtocolError("MODEL", f"{golden.path.parent}: {what}")
        for name, what in golden.other_files(source.follow_links):
            raise ProtocolError("MODEL", f"{golden.path.parent / name} {what}")
        return golden

    @staticmethod
    def _prompt(held: HeldModel) -> list[int]:
        if held.tokenizer is not None:
            return list(held.tokenizer.encode("def greet(name):\n    return"))
        return [i % held.info.vocab_size for i in range(1, 9)]

    def _decode(
        self, held: HeldModel, prompt: list[int], max_tokens: int, builder: str, budget: int, hash_logits: bool = False
    ) -> Trial:
        """Greedily, whatever the model's stop ids."""
        self._go_on()
        trial = held.decode(
            prompt, max_tokens=max_tokens, builder=builder, budget=budget, hash_logits=hash_logits, ignore_eos=True
        )
        self._decoded += 1
        return trial
