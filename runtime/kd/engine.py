"""kd.Engine: the library as Python objects.

Every method may be called from any thread. Events are collected by whichever thread waits for some; one that belongs
to a `Stream` goes there, all others come out of `poll()`. Errors are `kd.KdError`.
"""

from __future__ import annotations

import array
import operator
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kd.native import KdError, Library, constants, ffi, load_library, status_names

if TYPE_CHECKING:
    import numpy

    from kd.chat import ChatTemplate
    from kd.tokenizer import Tokenizer

_TYPES = {
    constants["KD_EVENT_TOKENS"]: "tokens",
    constants["KD_EVENT_END"]: "end",
    constants["KD_EVENT_LOAD"]: "load",
    constants["KD_EVENT_FATAL"]: "fatal",
}
_FINISH = {
    constants["KD_FINISH_NONE"]: None,
    constants["KD_FINISH_STOP"]: "stop",
    constants["KD_FINISH_LENGTH"]: "length",
    constants["KD_FINISH_CANCELLED"]: "cancelled",
    constants["KD_FINISH_ERROR"]: "error",
}
_PHASES = {
    constants["KD_LOAD_OPEN"]: "open",
    constants["KD_LOAD_READ"]: "read",
    constants["KD_LOAD_PREPARE"]: "prepare",
    constants["KD_LOAD_DONE"]: "done",
}
_STATES = {
    constants["KD_STATE_EMPTY"]: "empty",
    constants["KD_STATE_LOADING"]: "loading",
    constants["KD_STATE_READY"]: "ready",
    constants["KD_STATE_DRAINING"]: "draining",
    constants["KD_STATE_FATAL"]: "fatal",
}
_ISA = {
    "auto": constants["KD_ISA_AUTO"],
    "plain": constants["KD_ISA_PLAIN"],
    "avx2": constants["KD_ISA_AVX2"],
    "avx512": constants["KD_ISA_AVX512"],
}
_HASH, _LOGPROBS = constants["KD_REQUEST_HASH_LOGITS"], constants["KD_REQUEST_LOGPROBS"]
_COLD, _IGNORE_EOS = constants["KD_REQUEST_COLD"], constants["KD_REQUEST_IGNORE_EOS"]
_OWN_BUILDER = constants["KD_REQUEST_OWN_BUILDER"]
_E = {name: code for code, name in status_names.items()}

_POLL_SLICE_MS = 100  # Python sees signals between two calls of the library only
_CREDIT = 256  # what the library gives a request that asks for 0

# What a request's last event cannot say itself: it carries a status and no sentence.
_WHY = {
    "KD_E_SLOW_READER": "its events were not read for slow_reader_timeout_ms; read faster or give more credit",
    "KD_E_CANCELLED": "it was cancelled",
    "KD_E_NOMEM": "the memory for it was not there; raise kv_bytes or lower max_tokens",
    "KD_E_FATAL": "the engine has failed and must be opened again",
}


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a request, or of the engine (id 0). `hashes` and `logprobs` are empty unless asked for."""

    type: str  # "tokens" | "end" | "load" | "fatal"
    id: int
    user: int
    sequence: int
    status: int
    finish: str | None  # "stop" | "length" | "cancelled" | "error"
    tokens: tuple[int, ...]
    hashes: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: bytes  # cut at UTF-8 boundaries; empty without a tokenizer
    nodes: int
    builder_generation: int
    weights_generation: int
    total_tokens: int
    cached_tokens: int


@dataclass(slots=True)
class Sampling:
    """How tokens are chosen; the defaults take the most probable one. seed and choice: same values, same text."""

    temperature: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    seed: int = 0
    choice: int = 0


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """kd_model_info: what is loaded. Sizes in bytes; `stop_ids` from the folder's two config files together."""

    vocab_size: int
    max_positions: int
    layers: int
    hidden_size: int
    heads: int
    experts: int
    experts_per_token: int
    draft_layers: int
    draft_depth: int
    stop_ids: tuple[int, ...]
    parameters: int
    draft_parameters: int
    weight_bytes: int
    expert_bytes: int
    kv_bytes_token: int
    kv_tokens: int
    content_hash: int
    weights_generation: int


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request. rounds: events that brought tokens (the one of the prompt included); nodes: drafted nodes
    verified; accepted: drafted tokens kept, len(tokens) - rounds."""

    tokens: list[int]
    text: str
    hashes: list[int]
    logprobs: list[float]
    finish: str  # "stop" | "length" | "cancelled"
    rounds: int
    nodes: int
    accepted: int
    seconds: float
    cached_tokens: int


class Engine:
    """An engine and at most one model. With `path`, the model is loaded before the constructor returns.

    Zeros mean the library's defaults (see kd_options in kd.h). device "cuda" without its library is an error.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        device: str = "cpu",
        tp: int = 1,
        threads: int = 0,
        isa: str = "auto",
        max_streams: int = 0,
        max_queue: int = 0,
        max_rows: int = 0,
        max_nodes: int = 0,
        prefill_chunk: int = 0,
        prefix_cache: bool = True,
        kv_bytes: int = 0,
        slow_reader_timeout_ms: int = 0,
        draft: str | Path = "auto",
        library: str | Path | Library | None = None,
    ):
        self._handle: Any = None
        self._library = library if isinstance(library, Library) else load_library(device, library)
        self._lib = self._library.lib
        self._changed = threading.Condition()  # guards everything below, and is notified when any of it changes
        self._polling = False  # a thread is in kd_poll
        self._calls = 0  # threads in any call
        self._closing = False
        self._flags: dict[int, int] = {}  # of running requests
        self._streams: dict[int, deque[Event]] = {}
        self._backlog: deque[Event] = deque()  # events that no Stream owns
        self._capacity = 0
        self._tokenizer: Tokenizer | None = None
        self._chat: ChatTemplate | None = None
        if isa not in _ISA:
            raise _invalid(f"isa is {isa!r}; it must be one of {', '.join(_ISA)}")
        options = _struct("kd_options")
        for name, value in {
            "tp": tp,
            "threads": threads,
            "isa": _ISA[isa],
            "max_streams": max_streams,
            "max_queue": max_queue,
            "max_rows": max_rows,
            "max_nodes": max_nodes,
            "prefill_chunk": prefill_chunk,
            "prefix_cache": 0 if prefix_cache else 1,
            "kv_bytes": kv_bytes,
            "slow_reader_timeout_ms": slow_reader_timeout_ms,
        }.items():
            _put(options, name, value)
        out = ffi.new("kd_engine **")
        self._library.check(self._lib.kd_open(out, options))
        self._handle = out[0]
        if path is not None:
            try:
                self.load(path, draft=draft)
            except BaseException:
                self.close()
                raise

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            try:
                self.close()
            except Exception:  # an object that is going away has nobody to tell
                pass

    def __repr__(self) -> str:
        return f"<kd.Engine {self._library.path.name} {'closed' if self._handle is None else 'open'}>"

    def close(self) -> None:
        """Cancel everything and free it. Waits for other threads' calls to end (a load is cancelled). Idempotent."""
        with self._changed:
            if self._handle is None or self._closing:
                return
            self._closing = True
            self._lib.kd_load_cancel(self._handle)
            while self._calls:
                self._changed.wait()
            handle, self._handle = self._handle, None
            self._changed.notify_all()
        self._library.check(self._lib.kd_close(handle))

    @property
    def library(self) -> Library:
        """The loaded library: its path, version and build information."""
        return self._library

    # ---- model ----------------------------------------------------------------------------------------------------

    def load(
        self,
        path: str | Path,
        *,
        draft: str | Path = "auto",
        wait: bool = True,
        progress: Callable[[dict], None] | None = None,
    ) -> None:
        """Load a model folder. draft: "auto" (<path>/draft if there is one), "none", or a folder.

        progress: called with `load_progress()` about every 50 ms while waiting, and at the end. An exception in it, or
        Ctrl-C, cancels the load and comes out of here once the memory is back. wait=False returns at once; the end
        comes as a "load" event.
        """
        tokenizer, chat = _read_text_side(Path(path))
        options = _struct("kd_load_options")
        keep: list[Any] = []
        if draft == "none":
            options.draft = 1
        elif draft != "auto":
            options.draft = 2
            keep.append(ffi.new("char[]", _path_bytes(draft)))
            options.draft_path = keep[-1]
        if tokenizer is not None:
            blob, ends = tokenizer.token_bytes()
            keep += [ffi.new("uint8_t[]", blob or b"\0"), ffi.new("uint32_t[]", ends)]
            options.token_bytes, options.token_ends, options.n_tokens = keep[-2], keep[-1], len(ends)
        with self._call() as handle:
            self._check(self._lib.kd_load(handle, _path_bytes(path), options))
            self._tokenizer, self._chat = tokenizer, chat
        if wait:
            self._wait_for_load(progress)

    def _wait_for_load(self, progress: Callable[[dict], None] | None) -> None:
        # One call of the library at a time, so that close() in another thread, or in `progress`, gets its turn.
        try:
            while not self._load_ended(50):
                if progress is not None:
                    progress(self.load_progress())
            if progress is not None:
                progress(self.load_progress())
        except KdError as error:
            if error.name in ("KD_E_STATE", "KD_E_FORKED"):
                raise  # closed meanwhile: there is nothing to cancel
            self._cancel_load()
            raise
        except BaseException:
            self._cancel_load()
            raise

    def _load_ended(self, timeout_ms: int) -> bool:
        with self._call() as handle:
            rc = self._lib.kd_load_wait(handle, timeout_ms)
            if rc == _E["KD_E_TIMEOUT"]:
                return False
            self._check(rc)
            return True

    def _cancel_load(self) -> None:
        """And wait until its memory is back."""
        try:
            with self._call() as handle:
                self._lib.kd_load_cancel(handle)
            while not self._load_ended(1000):
                pass
        except KdError:
            pass  # KD_E_CANCELLED, or why it had ended before

    def load_progress(self) -> dict[str, Any]:
        """{"phase": "open"|"read"|"prepare"|"done", "bytes_done", "bytes_total", "elapsed_us"} of the load under way or
        the last one."""
        out = _struct("kd_progress")
        with self._call() as handle:
            self._check(self._lib.kd_load_progress(handle, out))
        return {
            "phase": _PHASES.get(out.phase, str(out.phase)),
            "bytes_done": out.bytes_done,
            "bytes_total": out.bytes_total,
            "elapsed_us": out.elapsed_us,
        }

    def load_cancel(self) -> None:
        """Stop a load under way; `load()` then raises KD_E_CANCELLED."""
        with self._call() as handle:
            self._check(self._lib.kd_load_cancel(handle))

    def unload(self) -> int:
        """Cancel all requests and free the model. Returns the bytes that the process gave back."""
        freed = ffi.new("uint64_t *")
        with self._call() as handle:
            self._check(self._lib.kd_unload(handle, freed))
        self._tokenizer = self._chat = None
        return freed[0]

    def drain(self, on: bool = True) -> None:
        """Refuse new requests, or admit them again; running and waiting ones go on."""
        with self._call() as handle:
            self._check(self._lib.kd_drain(handle, 1 if on else 0))

    @property
    def info(self) -> ModelInfo:
        """The model's facts; KdError KD_E_STATE while none is loaded."""
        out = _struct("kd_model_info")
        with self._call() as handle:
            self._check(self._lib.kd_info(handle, out))
        values = {f.name: getattr(out, f.name) for f in fields(ModelInfo) if f.name != "stop_ids"}
        return ModelInfo(stop_ids=tuple(out.stop_ids[0 : out.n_stop_ids]), **values)

    def stats(self) -> dict[str, Any]:
        """Every field of kd_stats; `state` as a word."""
        out = _struct("kd_stats")
        with self._call() as handle:
            self._check(self._lib.kd_stats_get(handle, out))
        values: dict[str, Any] = {}
        for name, _ in ffi.typeof("kd_stats").fields:
            if name != "size" and not name.startswith("reserved"):
                value = getattr(out, name)
                values[name] = ffi.string(value).decode() if name == "builder" else value
        values["state"] = _STATES.get(values["state"], str(values["state"]))
        return values

    @property
    def state(self) -> str:
        """ "empty", "loading", "ready", "draining" or "fatal"."""
        return self.stats()["state"]

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Of the loaded folder; None if that has no tiktoken.model: then requests are token ids only."""
        return self._tokenizer

    @property
    def chat(self) -> ChatTemplate | None:
        """The loaded folder's chat template, or None."""
        return self._chat

    # ---- requests -------------------------------------------------------------------------------------------------

    def submit(
        self,
        tokens: Sequence[int],
        *,
        max_tokens: int,
        sampling: Sampling | None = None,
        stop_ids: Sequence[int] = (),
        stop_strings: Sequence[str | bytes] = (),
        credit: int = 0,
        hash_logits: bool = False,
        logprobs: bool = False,
        cold: bool = False,
        ignore_eos: bool = False,
        builder: str | None = None,
        budget: int = 0,
        user: int = 0,
    ) -> int:
        """Queue a request and return its id; its events come out of `poll()`.

        stop_ids: beside the model's own. stop_strings: the text ends before the first one found. credit: events it
        may produce before `credit()`; 0 = 256. builder, budget: this request's own tree builder.
        """
        return self._submit(
            False,
            tokens,
            max_tokens=max_tokens,
            sampling=sampling,
            stop_ids=stop_ids,
            stop_strings=stop_strings,
            credit=credit,
            hash_logits=hash_logits,
            logprobs=logprobs,
            cold=cold,
            ignore_eos=ignore_eos,
            builder=builder,
            budget=budget,
            user=user,
        )

    def cancel(self, id: int) -> str:
        """ "cancelled" (its last event will say so), "already_done" or "not_found"."""
        with self._call() as handle:
            rc = self._lib.kd_cancel(handle, _id(id))
            if rc in (_E["KD_E_DONE"], _E["KD_E_NOT_FOUND"]):
                return "already_done" if rc == _E["KD_E_DONE"] else "not_found"
            self._check(rc)
        return "cancelled"

    def credit(self, id: int, n: int) -> None:
        """Let a request produce n more events. KdError KD_E_NOT_FOUND for one there never was."""
        with self._call() as handle:
            self._check(self._lib.kd_request_credit(handle, _id(id), _u32("n", n)))

    def poll(self, timeout_ms: int = 0, capacity: int = 64) -> list[Event]:
        """Up to `capacity` events, oldest first; waits up to timeout_ms for the first one."""
        if capacity < 1:
            raise _invalid("capacity must be at least 1")
        end = time.monotonic() + timeout_ms / 1000
        found = self._wait(lambda: self._backlog, end, capacity)
        if not found:
            return []
        with self._changed:
            return [self._backlog.popleft() for _ in range(min(capacity, len(self._backlog)))]

    @property
    def event_fd(self) -> int:
        """A file descriptor that is readable while events wait in the library; never read it."""
        with self._call() as handle:
            return self._check(self._lib.kd_event_fd(handle))

    # ---- tree builders --------------------------------------------------------------------------------------------

    def builders(self) -> list[dict[str, Any]]:
        """[{"name", "description", "in_force", "budget", "streams"}]."""
        infos = ffi.new("kd_builder_info[]", constants["KD_MAX_BUILDERS"])
        infos[0].size = ffi.sizeof("kd_builder_info")
        with self._call() as handle:
            n = self._check(self._lib.kd_builder_list(handle, infos, len(infos)))
        return [
            {
                "name": ffi.string(b.name).decode(),
                "description": ffi.string(b.description).decode(),
                "in_force": bool(b.in_force),
                "budget": b.budget,
                "streams": b.streams,
            }
            for b in infos[0:n]
        ]

    def use_builder(self, name: str, budget: int = 0, id: int = 0) -> int:
        """From the next round on, build trees with `name`: for one request, or with id 0 for all. budget 0: the
        builder's default. Returns the generation that events of those rounds carry."""
        generation = ffi.new("uint64_t *")
        with self._call() as handle:
            self._check(self._lib.kd_builder_use(handle, _text(name), _i32("budget", budget), _id(id), generation))
        return generation[0]

    # ---- conveniences ---------------------------------------------------------------------------------------------

    def score(self, ids: Sequence[int]) -> numpy.ndarray:
        """float32 logits [len(ids), vocab_size]: row i predicts the token after ids[i]. Cold, as prefill rows."""
        import numpy

        tokens = _ids("ids", ids)
        logits = numpy.empty((len(tokens), self.info.vocab_size), numpy.float32)
        with self._call() as handle:
            self._check(
                self._lib.kd_score(
                    handle, _ints(tokens), len(tokens), ffi.from_buffer("float[]", logits, require_writable=True)
                )
            )
        return logits

    def stream(self, prompt: str | Sequence[int], *, max_tokens: int = 128, **options: Any) -> Stream:
        """Submit now and iterate over the request's events, the end included. Closing the iterator, or dropping it,
        cancels the request. options: as `submit()`."""
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise _invalid("this model folder has no tiktoken.model; give the prompt as token ids")
            prompt = self._tokenizer.encode(prompt)
        id = self._submit(True, prompt, max_tokens=max_tokens, **options)
        return Stream(self, id, options.get("credit") or _CREDIT)

    def generate(self, prompt: str | Sequence[int], *, max_tokens: int = 128, **options: Any) -> Completion:
        """Run one request to its end. options: as `submit()`. A request that ends in an error raises KdError."""
        start = time.monotonic()
        tokens: list[int] = []
        hashes: list[int] = []
        logprobs: list[float] = []
        text: list[bytes] = []
        rounds = nodes = 0
        with self.stream(prompt, max_tokens=max_tokens, **options) as events:
            for event in events:
                tokens += event.tokens
                hashes += event.hashes
                logprobs += event.logprobs
                text.append(event.text)
                rounds += bool(event.tokens)
                nodes += event.nodes
        if event.finish == "error" or event.type == "fatal":
            name = status_names.get(event.status, "KD_E_UNKNOWN")
            raise KdError(
                event.status,
                name,
                f"request {event.id} failed after {len(tokens)} tokens: {_WHY.get(name, 'see its status')}",
            )
        return Completion(
            tokens=tokens,
            text=b"".join(text).decode("utf-8", "replace"),
            hashes=hashes,
            logprobs=logprobs,
            finish=event.finish or "",
            rounds=rounds,
            nodes=nodes,
            accepted=len(tokens) - rounds,
            seconds=time.monotonic() - start,
            cached_tokens=event.cached_tokens,
        )

    # ---- inside ---------------------------------------------------------------------------------------------------

    def _check(self, rc: int) -> int:
        return self._library.check(rc)

    @contextmanager
    def _call(self) -> Iterator[Any]:
        """The handle, held open against close() while the caller is in the library."""
        with self._changed:
            if self._handle is None or self._closing:
                raise KdError(_E["KD_E_STATE"], "KD_E_STATE", "this engine is closed; open another one")
            self._calls += 1
            handle = self._handle
        try:
            yield handle
        finally:
            with self._changed:
                self._calls -= 1
                if self._closing:
                    self._changed.notify_all()

    def _submit(
        self,
        own: bool,
        tokens: Sequence[int],
        *,
        max_tokens: int,
        sampling: Sampling | None = None,
        stop_ids: Sequence[int] = (),
        stop_strings: Sequence[str | bytes] = (),
        credit: int = 0,
        hash_logits: bool = False,
        logprobs: bool = False,
        cold: bool = False,
        ignore_eos: bool = False,
        builder: str | None = None,
        budget: int = 0,
        user: int = 0,
    ) -> int:
        """own: the events go to a Stream, not to poll()."""
        sampling = sampling or Sampling()
        flags = (hash_logits and _HASH) | (logprobs and _LOGPROBS) | (cold and _COLD) | (ignore_eos and _IGNORE_EOS)
        prompt, stops = _ids("tokens", tokens), _ids("stop_ids", stop_ids)
        if isinstance(stop_strings, (str, bytes)):
            raise _invalid("stop_strings is one text; give a list of texts")
        strings = [s.encode() if isinstance(s, str) else bytes(s) for s in stop_strings]
        keep = [ffi.new("char[]", s + b"\0") for s in strings]
        request = _struct("kd_request")
        request.tokens, request.n_tokens = _ints(prompt), len(prompt)
        for name, value in {
            "max_tokens": max_tokens,
            "credit": credit,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "top_k": sampling.top_k,
            "choice": sampling.choice,
            "seed": sampling.seed,
            "user": user,
            "budget": budget,
        }.items():
            _put(request, name, value)
        if stops:
            request.stop_ids, request.n_stop_ids = _ints(stops), len(stops)
        if strings:
            entries = ffi.new("kd_stop_string[]", len(strings))
            for entry, kept, s in zip(entries, keep, strings, strict=True):
                entry.bytes, entry.length = kept, len(s)
            request.stop_strings, request.n_stop_strings = entries, len(strings)
            keep.append(entries)
        if builder is not None:
            flags |= _OWN_BUILDER
            keep.append(ffi.new("char[]", _text(builder)))
            request.builder = keep[-1]
        elif budget:
            raise _invalid(f"budget = {budget} without a builder; name one, or call use_builder")
        request.flags = flags
        out = ffi.new("uint64_t *")
        with self._call() as handle, self._changed:  # no event is handed out before its request is known here
            self._check(self._lib.kd_submit(handle, request, out))
            self._flags[out[0]] = flags
            if own:
                self._streams[out[0]] = deque()
        return out[0]

    def _wait(self, mine: Callable[[], Any], end: float, capacity: int = 64) -> bool:
        """Until mine() is not empty or monotonic time `end`; polls the library unless another thread does already.
        With `end` in the past the library is still asked once."""
        first = True
        while True:
            with self._changed:
                if mine():
                    return True
                left = end - time.monotonic()
                if left <= 0 and not first:
                    return False
                if self._polling:
                    if left <= 0:
                        return False
                    self._changed.wait(min(left, _POLL_SLICE_MS / 1000))
                    if self._closing:
                        raise KdError(_E["KD_E_STATE"], "KD_E_STATE", "this engine is closed; open another one")
                    continue
                self._polling = True
            try:
                found = self._poll_library(max(0, min(left, _POLL_SLICE_MS / 1000)), capacity)
            except BaseException:
                with self._changed:
                    self._polling = False
                    self._changed.notify_all()
                raise
            with self._changed:
                for event in found:
                    self._streams.get(event.id, self._backlog).append(event)
                    if event.type == "fatal":
                        for queue in self._streams.values():
                            queue.append(event)
                self._polling = False
                self._changed.notify_all()
            first = False

    def _poll_library(self, timeout_s: float, capacity: int) -> list[Event]:
        """Only the thread that set `_polling` is in here."""
        if capacity > self._capacity:
            self._events, self._capacity = ffi.new("kd_event[]", capacity), capacity
        events = self._events
        events[0].size = ffi.sizeof("kd_event")
        with self._call() as handle:
            n = self._check(self._lib.kd_poll(handle, events, capacity, int(timeout_s * 1000)))
            with self._changed:
                return [self._event(events[i]) for i in range(n)]

    def _event(self, e: Any) -> Event:
        kind, n = _TYPES.get(e.type, str(e.type)), e.n_tokens
        flags = self._flags.get(e.id, 0)
        if kind == "end":
            self._flags.pop(e.id, None)
        return Event(
            kind,
            e.id,
            e.user,
            e.sequence,
            e.status,
            _FINISH.get(e.finish),
            tuple(e.tokens[0:n]),
            tuple(e.hashes[0:n]) if flags & _HASH else (),
            tuple(e.logprobs[0:n]) if flags & _LOGPROBS else (),
            bytes(ffi.buffer(e.text, e.text_length)) if e.text_length else b"",
            e.nodes,
            e.builder_generation,
            e.weights_generation,
            e.total_tokens,
            e.cached_tokens,
        )


class Stream:
    """The events of one request. An iterator and a context manager; `close()` cancels what is still running."""

    def __init__(self, engine: Engine, id: int, credit: int):
        self.id = id
        self._portion = max(1, min(64, credit // 2))  # of credit, given back when so many events have been read
        self._engine = engine
        self._queue = engine._streams[id]
        self._read = 0
        self._ended = False

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Event:
        if self._ended:
            raise StopIteration
        while not self._engine._wait(lambda: self._queue, time.monotonic() + 3600):
            pass
        event = self._queue.popleft()
        if event.type in ("end", "fatal"):
            self._forget()
            return event
        self._read += 1
        if self._read % self._portion == 0:
            self._give(self._portion)
        return event

    def _give(self, n: int) -> None:
        try:
            self._engine.credit(self.id, n)
        except KdError as error:
            if error.name not in ("KD_E_DONE", "KD_E_NOT_FOUND"):
                raise

    def _forget(self) -> None:
        self._ended = True
        with self._engine._changed:
            self._engine._streams.pop(self.id, None)

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

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_ended", True):
            try:
                self.close()
            except Exception:  # an object that is going away has nobody to tell
                pass


def _read_text_side(folder: Path) -> tuple[Tokenizer | None, ChatTemplate | None]:
    """Tokenizer and chat template of a folder; None where it has none."""
    if not (folder / "tiktoken.model").exists():
        return None, None
    from kd.chat import ChatError, ChatTemplate
    from kd.tokenizer import Tokenizer, TokenizerError

    try:
        tokenizer = Tokenizer.load(folder)
        return tokenizer, ChatTemplate.load(folder, tokenizer)
    except (TokenizerError, ChatError) as error:
        raise KdError(_E["KD_E_MODEL"], "KD_E_MODEL", str(error)) from None


def _struct(name: str) -> Any:
    struct = ffi.new(f"{name} *")
    struct.size = ffi.sizeof(name)
    return struct


def _invalid(message: str) -> KdError:
    return KdError(_E["KD_E_INVALID"], "KD_E_INVALID", message)


def _put(struct: Any, name: str, value: Any) -> None:
    try:
        setattr(struct, name, value)
    except (OverflowError, TypeError):
        kind = dict(ffi.typeof(struct).item.fields)[name].type.cname
        raise _invalid(f"{name} is {value!r:.60}; it must fit a {kind}") from None


def _i32(name: str, value: Any) -> int:
    if not isinstance(value, int) or not -(1 << 31) <= value < 1 << 31:
        raise _invalid(f"{name} is {value!r:.60}; it must fit an int32_t")
    return value


def _u32(name: str, value: Any) -> int:
    if not isinstance(value, int) or not 0 <= value < 1 << 32:
        raise _invalid(f"{name} is {value!r:.60}; it must fit a uint32_t")
    return value


def _id(value: Any) -> int:
    if not isinstance(value, int) or not 0 <= value < 1 << 64:
        raise _invalid(f"id is {value!r:.60}; it must be a request's id")
    return value


def _ids(name: str, values: Sequence[int]) -> array.array:
    """As int32; KD_E_INVALID for what is no list of integers, KD_E_TOKEN for one that cannot be an id."""
    if isinstance(values, (str, bytes)):
        raise _invalid(f"{name} is text; give token ids")
    try:
        return array.array("i", map(operator.index, values))
    except TypeError:
        raise _invalid(f"{name} must be a list of token ids") from None
    except OverflowError:
        raise KdError(_E["KD_E_TOKEN"], "KD_E_TOKEN", f"{name} holds a number that is no token id") from None


def _ints(values: array.array) -> Any:
    """int32_t[] over the array's own memory, which it keeps alive."""
    return ffi.from_buffer("int32_t[]", values)


def _text(value: str) -> bytes:
    raw = value.encode()
    if b"\0" in raw:
        raise _invalid("a name holds a zero character")
    return raw


def _path_bytes(path: str | Path) -> bytes:
    import os

    raw = os.fsencode(path)
    if b"\0" in raw:
        raise _invalid("a path holds a zero character")
    return raw
