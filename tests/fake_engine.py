"""A double of kd.Engine with the same interface and made-up tokens: slow, wedged, fatal, hard to load.

Token i after a prompt is a pure function of the prompt and i, so two runs agree, whatever the builder. One round yields
up to `per_round` tokens in one event. `gate` (a threading.Event) holds the engine thread: clear it to wedge the engine.
"""

from __future__ import annotations

import collections
import os
import threading
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

VOCAB = 512
EOS = 2


class KdError(Exception):
    def __init__(self, code: int, name: str, message: str):
        super().__init__(message)
        self.code, self.name, self.message = code, name, message


@dataclass(frozen=True)
class Event:
    type: str
    id: int = 0
    user: int = 0
    sequence: int = 0
    status: int = 0
    finish: str | None = None
    tokens: tuple = ()
    hashes: tuple = ()
    logprobs: tuple = ()
    text: bytes = b""
    nodes: int = 0
    builder_generation: int = 1
    weights_generation: int = 1
    total_tokens: int = 0
    cached_tokens: int = 0


@dataclass
class Request:
    id: int
    user: int
    tokens: list
    options: dict
    credit: int
    made: int = 0
    sequence: int = 0
    cancelled: bool = False
    starved_since: float = field(default_factory=time.monotonic)


def token_at(prompt, i: int) -> int:
    """The made-up continuation: a printable byte, never EOS."""
    value = (sum(prompt) * 2654435761 + len(prompt) * 97 + i * 40503) & 0xFFFFFFFF
    return 97 + (value >> 7) % 26


def hash_at(prompt, i: int) -> int:
    return (token_at(prompt, i) * 0x9E3779B97F4A7C15 + i) & 0xFFFFFFFFFFFFFFFF


class FakeTokenizer:
    """One token a byte."""

    n_vocab = VOCAB
    special: dict = {}
    calls = 0

    def encode(self, text, *, allow_special=False):
        FakeTokenizer.calls += 1
        return list(text.encode())

    def decode_bytes(self, ids):
        return bytes(i & 255 for i in ids)

    def decode(self, ids):
        return self.decode_bytes(ids).decode("utf-8", "replace")


class FakeChat:
    def render(self, messages, *, thinking=None, add_generation_prompt=True):
        return list("".join(f"{m['role']}:{m['content']}\n" for m in messages).encode())


class FakeHeld:
    """A double of kd.held.HeldModel."""

    tokenizer, chat = FakeTokenizer(), FakeChat()

    def __init__(self, engine):
        self.engine, self.accepted, self.info = engine, False, engine.model_info()

    def decode(self, tokens, *, max_tokens, builder="none", budget=0, hash_logits=False, ignore_eos=False):
        engine, made, began = self.engine, [], time.monotonic()
        while len(made) < max_tokens:
            if engine.cancel_load.is_set():
                raise KdError(-26, "KD_E_CANCELLED", "the load was cancelled")
            time.sleep(engine.token_delay_s + engine.tree_delay_s * (builder != "none"))
            first = not made
            if first:
                began = time.monotonic()
            n = min(1 if first or builder == "none" else engine.per_round, max_tokens - len(made))
            made += [token_at(tokens, len(made) + i) for i in range(n)]
            if builder == engine.diverge and not first:
                made[-1] = 97
        hashes = [hash_at(tokens, i) for i in range(max_tokens)] if hash_logits else []
        return SimpleNamespace(tokens=made, hashes=hashes, seconds=time.monotonic() - began)

    def accept(self, builder=None, budget=0):
        self.accepted = True
        if builder is not None:
            self.engine.use_builder(builder, budget)


class FakeEngine:
    def __init__(
        self,
        path=None,
        *,
        token_delay_s=0.0,
        tree_delay_s=0.0,
        load_s=0.0,
        next_load_s=None,
        load_error=None,
        hang_file="",
        per_round=2,
        diverge="",
        slow_reader_timeout_ms=0,
        max_queue=0,
        max_streams=0,
        **options,
    ):
        self.options = options
        self.token_delay_s, self.load_s, self.load_error, self.per_round = token_delay_s, load_s, load_error, per_round
        self.next_load_s = next_load_s  # what a load takes after the first
        self.tree_delay_s = tree_delay_s  # what a round with trees takes longer
        self.hang_file = hang_file  # while it exists a load hangs and cannot be cancelled
        self.diverge = diverge  # a builder that is not lossless
        self.slow_reader_s = (slow_reader_timeout_ms or 30_000) / 1000
        self.max_queue, self.max_streams = max_queue or 512, max_streams or 64
        self.gate = threading.Event()
        self.gate.set()
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.lock = threading.Condition()
        self.requests: dict[int, Request] = {}
        self.ended: set[int] = set()
        self.events: collections.deque[Event] = collections.deque()
        self.next_id, self.state, self.model, self.drained, self.fatal_status = 0, 0, None, False, 0
        self.builder, self.budget, self.generation = "heap", 8, 1
        self.counts = collections.Counter()
        self.turns, self.last_turn_us, self.loading, self.loads = 0, 0, None, 0
        self.cancel_load, self.closed = threading.Event(), False
        self.thread = threading.Thread(target=self._run, name="fake-engine", daemon=True)
        self.thread.start()
        if path:
            self.load(path)

    # -- life
    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        with self.lock:
            self.closed = True
            self.lock.notify_all()
        if self.gate.is_set():
            self.thread.join(5)

    def fatal(self, why="injected fault"):
        with self.lock:
            self.fatal_status, self.fatal_why, self.state = -90, why, 4
            self._post(Event("fatal", status=-90))

    def _check(self):
        if self.fatal_status:
            raise KdError(-90, "KD_E_FATAL", self.fatal_why)

    # -- model
    def load(self, path, *, draft="auto", wait=True, progress=None, replace=False, follow_links=False, check=None):
        self._check()
        self.loads += 1
        if self.model and not replace:
            raise KdError(-27, "KD_E_EXISTS", "a model is loaded: unload it first")
        while os.path.exists(self.hang_file):
            time.sleep(0.01)
        self.state, self.loading, self.path = 1, time.monotonic(), str(path)
        self.cancel_load.clear()
        end = self.loading + self.load_s
        while time.monotonic() < end:
            if self.cancel_load.wait(0.01):
                self.state, self.loading = 2 if self.model else 0, None
                raise KdError(-26, "KD_E_CANCELLED", "the load was cancelled")
            if progress:
                progress(self.load_progress())
        if self.load_error or str(path).endswith("missing"):
            self.state, self.loading = 2 if self.model else 0, None
            raise self.load_error or KdError(-61, "KD_E_IO", f"{path}: no such model folder")
        if check:
            try:
                held = FakeHeld(self)
                check(held)
                if not held.accepted:
                    held.accept()
            except BaseException:
                self.state, self.loading = 2 if self.model else 0, None
                raise
        self.counts["loads"] += 1
        if self.next_load_s is not None:
            self.load_s = self.next_load_s
        self.model, self.state = str(path), 2

    def load_progress(self):
        total = 1000
        if self.model and self.state != 1:
            us = int(self.load_s * 1e6)
            about = {"phase": "done", "bytes_done": total, "bytes_total": total, "elapsed_us": us}
            return about | {"phases": {"read": us}, "load": self.loads}
        elapsed = time.monotonic() - self.loading if self.loading else 0.0
        done = int(total * min(1.0, elapsed / self.load_s)) if self.load_s and self.loading else 0
        return {
            "phase": "read" if done else "open",
            "bytes_done": done,
            "bytes_total": total,
            "elapsed_us": int(elapsed * 1e6),
            "phases": {"read": int(elapsed * 1e6)},
            "load": self.loads,
        }

    def load_cancel(self):
        if self.state != 1:
            raise KdError(-20, "KD_E_STATE", "no load is under way")
        self.cancel_load.set()

    def unload(self):
        self._check()
        if not self.model:
            raise KdError(-20, "KD_E_STATE", "no model is loaded")
        with self.lock:
            for r in list(self.requests.values()):
                self._end(r, "cancelled", -26)
        self.model, self.state, self.loading = None, 0, None
        return 1 << 20

    def drain(self, on=True):
        self._check()
        self.drained = on

    @property
    def info(self):
        if not self.model:
            raise KdError(-20, "KD_E_STATE", "no model is loaded")
        return self.model_info()

    @staticmethod
    def model_info():
        return SimpleNamespace(
            vocab_size=VOCAB,
            max_positions=4096,
            layers=2,
            hidden_size=8,
            heads=2,
            experts=4,
            experts_per_token=2,
            draft_layers=1,
            draft_depth=7,
            stop_ids=(EOS,),
            parameters=1000,
            draft_parameters=100,
            weight_bytes=2000,
            expert_bytes=1000,
            kv_bytes_token=64,
            kv_tokens=8192,
            content_hash=0xABCDEF,
            target_hash=0xABCDEF,
            skipped_tensors=0,
            weights_generation=1,
        )

    def stats(self):
        with self.lock:
            streams = len(self.requests)
            c = self.counts
            words = ("empty", "loading", "ready", "draining", "fatal")
            return {
                "state": words[3 if self.drained and self.state == 2 else self.state],
                "streams": streams,
                "waiting": 0,
                "pages_total": 64,
                "pages_free": 64 - streams,
                "pages_cached": 0,
                "builder_budget": self.budget,
                "builder": self.builder,
                "builder_generation": self.generation,
                "weights_generation": 1,
                "turns": self.turns,
                "last_turn_us": self.last_turn_us,
                "requests": c["requests"],
                "finished": c["finished"],
                "cancelled": c["cancelled"],
                "failed": c["failed"],
                "tokens": c["tokens"],
                "prompt_tokens": c["prompt"],
                "cached_tokens": 0,
                "rounds": c["rounds"],
                "round_streams": c["rounds"],
                "encoded": FakeTokenizer.calls,
                "round_rows": c["rows"],
                "round_nodes": c["nodes"],
                "accepted_tokens": c["accepted"],
                "forward_calls": c["rounds"],
                "verify_us": 0,
            }

    @property
    def tokenizer(self):
        return FakeTokenizer() if self.model else None

    @property
    def chat(self):
        return FakeChat() if self.model else None

    def text_side(self):
        return SimpleNamespace(tokenizer=self.tokenizer, chat=self.chat, id=1 if self.model else 0)

    # -- requests
    def submit(
        self,
        tokens,
        *,
        max_tokens,
        sampling=None,
        stop_ids=(),
        stop_strings=(),
        credit=0,
        hash_logits=False,
        logprobs=False,
        cold=False,
        ignore_eos=False,
        builder=None,
        budget=0,
        user=0,
        text_id=0,
    ):
        self._check()
        if not self.model:
            raise KdError(-20, "KD_E_STATE", "no model is loaded")
        if self.drained:
            raise KdError(-24, "KD_E_DRAINING", "the engine is draining")
        if any(not 0 <= t < VOCAB for t in tokens):
            raise KdError(-41, "KD_E_TOKEN", f"a token id is outside the vocabulary of {VOCAB}")
        if builder is not None and builder not in ("none", "chain", "heap"):
            raise KdError(-21, "KD_E_NOT_FOUND", f"there is no builder '{builder}'")
        with self.lock:
            if len(self.requests) >= self.max_streams + self.max_queue:
                raise KdError(-23, "KD_E_BUSY", "the queue is full")
            self.next_id += 1
            options = {"max_tokens": max_tokens, "hash_logits": hash_logits, "logprobs": logprobs, "builder": builder}
            self.requests[self.next_id] = Request(self.next_id, user, list(tokens), options, credit or 256)
            self.counts["requests"] += 1
            self.lock.notify_all()
            return self.next_id

    def cancel(self, ident):
        with self.lock:
            if ident in self.requests:
                self.requests[ident].cancelled = True
                self.lock.notify_all()
                return "cancelled"
            return "already_done" if ident in self.ended else "not_found"

    def credit(self, ident, n):
        with self.lock:
            if ident not in self.requests:
                raise KdError(-21, "KD_E_NOT_FOUND", "no such request")
            self.requests[ident].credit += n
            self.lock.notify_all()

    @property
    def event_fd(self):
        return self.fd

    def poll(self, timeout_ms=0, capacity=64):
        with self.lock:
            out = [self.events.popleft() for _ in range(min(capacity, len(self.events)))]
            if not self.events:
                try:
                    os.eventfd_read(self.fd)
                except BlockingIOError:
                    pass
            return out

    def builders(self):
        self._check()
        return [
            {"name": n, "description": f"fake {n}", "in_force": n == self.builder, "budget": self.budget, "streams": 0}
            for n in ("none", "chain", "heap")
        ]

    def use_builder(self, name, budget=0, id=0):
        if name not in ("none", "chain", "heap"):
            raise KdError(-21, "KD_E_NOT_FOUND", f"there is no builder '{name}'")
        if id and id not in self.requests:
            raise KdError(-21, "KD_E_NOT_FOUND", "no such request")
        if not id:
            self.builder, self.budget = name, budget or 8
        self.generation += 1
        return self.generation

    # -- the engine thread
    def _post(self, event):
        self.events.append(event)
        os.eventfd_write(self.fd, 1)

    def _end(self, r, finish, status, tokens=()):
        del self.requests[r.id]
        self.ended.add(r.id)
        self.counts[{"stop": "finished", "length": "finished", "cancelled": "cancelled"}.get(finish, "failed")] += 1
        self._emit(r, "end", tokens, finish, status)

    def _emit(self, r, kind, tokens, finish=None, status=0):
        first = r.made - len(tokens)
        hashes = tuple(hash_at(r.tokens, first + i) for i in range(len(tokens))) if r.options["hash_logits"] else ()
        logprobs = tuple(-0.5 for _ in tokens) if r.options["logprobs"] else ()
        self._post(
            Event(
                kind,
                r.id,
                r.user,
                r.sequence,
                status,
                finish,
                tuple(tokens),
                hashes,
                logprobs,
                bytes(tokens),
                3,
                self.generation,
                1,
                r.made,
                0,
            )
        )
        r.sequence += 1

    def _run(self):
        while True:
            with self.lock:
                while not self.closed and not any(
                    r.cancelled or r.credit or time.monotonic() - r.starved_since > self.slow_reader_s
                    for r in self.requests.values()
                ):
                    self.lock.wait(0.05 if self.requests else None)
                if self.closed:
                    return
            trees = any((r.options["builder"] or self.builder) != "none" for r in list(self.requests.values()))
            delay_s = self.token_delay_s + self.tree_delay_s * trees
            if delay_s:
                time.sleep(delay_s)
            self.gate.wait()
            with self.lock:
                if self.fatal_status:
                    for r in list(self.requests.values()):
                        self._end(r, "error", -90)
                    continue
                self.counts["rounds"] += bool(self.requests)
                for r in list(self.requests.values()):
                    self._turn(r)
                self.turns += 1
                self.last_turn_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000

    def _turn(self, r):
        if r.cancelled:
            return self._end(r, "cancelled", -26)
        if not r.credit:
            if time.monotonic() - r.starved_since > self.slow_reader_s:
                self._end(r, "error", -43)
            return None
        builder = r.options["builder"] or self.builder
        n = min(1 if builder == "none" else self.per_round, r.options["max_tokens"] - r.made)
        tokens = [token_at(r.tokens, r.made + i) for i in range(n)]
        if builder == self.diverge and r.made:
            tokens[-1] = 97
        r.made += n
        r.credit -= 1
        r.starved_since = time.monotonic()
        self.counts.update(tokens=n, rows=4, nodes=3, accepted=n - 1)
        if r.made >= r.options["max_tokens"]:
            return self._end(r, "length", 0, tokens)
        return self._emit(r, "tokens", tokens)
