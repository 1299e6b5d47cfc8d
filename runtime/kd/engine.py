"""kd.Engine: the library as a Python object.

Every method may be called from any thread. Events are collected by whichever thread waits for some; one that belongs
to an `EventStream` goes there, all others come out of `poll()`. Errors are `kd.KdError`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kd import structs
from kd.event_stream import EventStream
from kd.loads import Loads
from kd.native import KdError, Library, constants, ffi, find_nccl, load_library, status_names
from kd.structs import CODES, invalid
from kd.text_side import TextSide
from kd.values import Completion, Event, ModelInfo, RequestOptions, Sampling

if TYPE_CHECKING:
    import numpy

    from kd.chat import ChatTemplate
    from kd.tokenizer import Tokenizer

__all__ = ["Completion", "Engine", "Event", "EventStream", "ModelInfo", "RequestOptions", "Sampling"]

_SLICE_S = 0.1  # Python sees signals, and close() its turn, between two calls of the library only
_DROPPED: deque[Event] = deque(maxlen=0)
_NOBODY = 0  # in Engine._queues: events that belong to no EventStream, for poll()

# What a request's last event cannot say itself: it carries a status and no sentence.
_WHY = {
    "KD_E_SLOW_READER": "its events were not read for slow_reader_timeout_ms; read faster or give more credit",
    "KD_E_NOMEM": "the memory for it was not there; raise kv_bytes or lower max_tokens",
    "KD_E_FATAL": "the engine has failed; close it and open it again",
}


class Engine(Loads):
    """An engine and at most one model. With `path`, the model is loaded before the constructor returns.

    tp is 1, 2, 4 or 8; zeros of the others mean the library's defaults (see kd_options in kd.h). device "cuda" without its
    library is an error. record: a file that tells what the ranks are at, see `kd.steps`.
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
        share_devices: bool = False,
        record: str | Path | None = None,
        draft: str | Path = "auto",
        library: str | Path | Library | None = None,
    ):
        super().__init__(library if isinstance(library, Library) else load_library(device, library))
        self._polling: int | None = None  # the thread that polls, while it is in a call
        self._flags: dict[int, int] = {}  # of running requests
        self._queues: dict[int, deque[Event]] = {_NOBODY: deque()}  # events not yet handed out, by EventStream
        self._events = ffi.new("kd_event[]", 64)
        self._batch: list[tuple[int, bool, Iterator[Event]]] = []  # read and not all handed out; see _hand_out()
        self._ended: set[int] = set()  # requests whose end is in it
        options, keep = structs.options(
            tp=tp,
            threads=threads,
            isa=isa,
            max_streams=max_streams,
            max_queue=max_queue,
            max_rows=max_rows,
            max_nodes=max_nodes,
            prefill_chunk=prefill_chunk,
            prefix_cache=prefix_cache,
            kv_bytes=kv_bytes,
            slow_reader_timeout_ms=slow_reader_timeout_ms,
            share_devices=share_devices,
            record=record,
        )
        if device == "cuda" and tp > 1:
            find_nccl()
        self._open(options)
        del keep  # the library has copied it
        if path is not None:
            try:
                self.load(path, draft=draft)
            except BaseException:
                self.close()
                raise

    def __repr__(self) -> str:
        return f"<kd.Engine {self._library.path.name} {'closed' if self._handle is None else 'open'}>"

    # ---- model -------------------------------------------------------------------------------------------------------

    def unload(self) -> int:
        """Cancel all requests and free the model. Returns the bytes that the process gave back."""
        freed = ffi.new("uint64_t *")
        self._check(self._ask(self._lib.kd_unload, freed))
        return freed[0]

    def drain(self, on: bool = True) -> None:
        """Refuse new requests, or admit them again; running and waiting ones go on."""
        self._check(self._ask(self._lib.kd_drain, structs.flag("on", on)))

    @property
    def info(self) -> ModelInfo:
        """The model's facts; KdError KD_E_STATE while none is loaded."""
        return structs.model_info(self._filled("kd_model_info", self._lib.kd_info))

    def stats(self) -> dict[str, Any]:
        """Every field of kd_stats; `state` as a word."""
        return structs.stats(self._filled("kd_stats", self._lib.kd_stats_get))

    @property
    def state(self) -> str:
        """One of "empty", "loading", "ready", "draining" and "fatal"."""
        return self.stats()["state"]

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Of the loaded folder; None if that has no tiktoken.model: then requests are token ids only."""
        return self.text_side().tokenizer

    @property
    def chat(self) -> ChatTemplate | None:
        """The loaded folder's chat template, or None."""
        return self.text_side().chat

    def text_side(self) -> TextSide:
        """Tokenizer and chat template together, of the model that new requests run on, with an id for `text_id`: a model may
        be replaced between encoding and `submit()`."""
        self._check_process()
        with self._lock:  # no load begins between the id and what it stands for
            return self._sides.get(self._text_id(), TextSide())

    # ---- requests ----------------------------------------------------------------------------------------------------

    def submit(self, tokens: Sequence[int], *, max_tokens: int, **options: Any) -> int:
        """Queue a request and return its id; its events come out of `poll()`. options: fields of `RequestOptions`."""
        out = ffi.new("uint64_t *")
        self._submit(out, False, tokens, max_tokens=max_tokens, **options)
        return out[0]

    def cancel(self, id: int) -> str:
        """Returns "cancelled" (the request's last event will say so), "already_done" or "not_found"."""
        rc = self._ask(self._lib.kd_cancel, structs.request_id(id))
        if rc in (CODES["KD_E_DONE"], CODES["KD_E_NOT_FOUND"]):
            return "already_done" if rc == CODES["KD_E_DONE"] else "not_found"
        self._check(rc)
        return "cancelled"

    def credit(self, id: int, n: int) -> None:
        """Let a request produce n more events. KdError KD_E_NOT_FOUND for one there never was."""
        n = structs.integer("n", n, 0, 1 << 32)
        self._check(self._ask(self._lib.kd_request_credit, structs.request_id(id), n))

    def poll(self, timeout_ms: int = 0, capacity: int = 64) -> list[Event]:
        """Up to `capacity` events, oldest first; waits up to timeout_ms for the first one."""
        structs.integer("capacity", capacity, 1, 1 << 20)
        structs.integer("timeout_ms", timeout_ms, 0, 1 << 53)
        return self._wait(_NOBODY, capacity, time.monotonic() + timeout_ms / 1000)

    @property
    def event_fd(self) -> int:
        """A file descriptor that is readable while events wait in the library; never read it."""
        return self._check(self._ask(self._lib.kd_event_fd))

    # ---- tree builders -----------------------------------------------------------------------------------------------

    def builders(self) -> list[dict[str, Any]]:
        """[{"name", "description", "in_force", "budget", "streams"}]."""
        infos = ffi.new("kd_builder_info[]", constants["KD_MAX_BUILDERS"])
        infos[0].size = ffi.sizeof("kd_builder_info")
        n = self._check(self._ask(self._lib.kd_builder_list, infos, len(infos)))
        return [structs.builder_info(info) for info in infos[0:n]]

    def use_builder(self, name: str, budget: int = 0, id: int = 0) -> int:
        """From the next round on, build trees with `name`: for one request, or with id 0 for all. budget 0: the
        builder's default. Returns the generation that events of those rounds carry."""
        generation = ffi.new("uint64_t *")
        nodes = structs.integer("budget", budget, -(1 << 31), 1 << 31)
        self._check(self._ask(self._lib.kd_builder_use, structs.text(name), nodes, structs.request_id(id), generation))
        return generation[0]

    # ---- conveniences ------------------------------------------------------------------------------------------------

    def score(self, ids: Sequence[int]) -> numpy.ndarray:
        """float32 logits [len(ids), vocab_size]: row i predicts the token after ids[i]. Cold, as prefill rows."""
        import numpy

        tokens = structs.token_ids("ids", ids)
        logits = numpy.empty((len(tokens), self.info.vocab_size), numpy.float32)
        out = ffi.from_buffer("float[]", logits, require_writable=True)
        self._check(self._ask(self._lib.kd_score, structs.pointer(tokens), len(tokens), out))
        return logits

    def stream(self, prompt: str | Sequence[int], *, max_tokens: int = 128, **options: Any) -> EventStream:
        """Submit now and iterate over the request's events, the end included. Closing the iterator, or dropping it,
        cancels the request. options: as `submit()`."""
        if isinstance(prompt, str):
            side = self.text_side()
            if side.tokenizer is None:
                self._check(self._ask(self._lib.kd_info, structs.new("kd_model_info")))  # there is no model at all
                raise invalid("this model folder has no tiktoken.model; give the prompt as token ids")
            prompt = side.tokenizer.encode(prompt)
            options = {"text_id": side.id} | options
        out = ffi.new("uint64_t *")
        try:
            self._submit(out, True, prompt, max_tokens=max_tokens, **options)
            return EventStream(self, out[0], options.get("credit", 0))
        except BaseException:
            if out[0]:
                self._abandon(out[0])
            raise

    def generate(self, prompt: str | Sequence[int], *, max_tokens: int = 128, **options: Any) -> Completion:
        """Run one request to its end. options: as `submit()`. A request that ends in an error raises KdError."""
        start = time.monotonic()
        with self.stream(prompt, max_tokens=max_tokens, **options) as stream:
            events = list(stream)
        last = events[-1]
        tokens = [t for e in events for t in e.tokens]
        if last.finish == "error" or last.type == "fatal":
            name = status_names.get(last.status, "KD_E_UNKNOWN")
            why = _WHY.get(name, "the model's files or this build are at fault")
            raise KdError(last.status, name, f"request {stream.id} failed after {len(tokens)} tokens: {why}")
        rounds = sum(1 for e in events if e.tokens)
        return Completion(
            tokens=tokens,
            text=b"".join(e.text for e in events).decode("utf-8", "replace"),
            hashes=[h for e in events for h in e.hashes],
            logprobs=[p for e in events for p in e.logprobs],
            finish=last.finish or "",
            rounds=rounds,
            nodes=sum(e.nodes for e in events),
            accepted=len(tokens) - rounds,
            seconds=time.monotonic() - start,
            cached_tokens=last.cached_tokens,
        )

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _submit(self, out: Any, own: bool, tokens: Sequence[int], **options: Any) -> None:
        """out: gets the id. own: the events go to an EventStream, not to poll()."""
        self._check_process()
        request, keep = structs.request(tokens, RequestOptions(**options))
        with self._calls.mine(), self._lock:  # no event is handed out before its request is known here
            self._check(self._ask(self._lib.kd_submit, request, out))
            self._flags[out[0]] = request.flags
            if own:
                self._queues[out[0]] = deque()
        del keep

    def _forget(self, id: int) -> None:
        """Nobody will read this EventStream's queue again; what still comes is thrown away."""
        self._check_process()
        with self._lock:
            if id in self._flags:  # its end has not come yet
                self._queues[id] = deque(maxlen=0)
            else:
                self._queues.pop(id, None)

    def _abandon(self, id: int) -> None:
        """The EventStream is gone: cancel its request. Waits for no event."""
        self._forget(id)
        self.cancel(id)

    def _wait(self, owner: int, most: int, end: float) -> list[Event]:
        """Up to `most` events of a queue; waits for the first one until monotonic time `end`. Polls the library unless
        another thread does. With `end` in the past the library is still asked once."""
        self._check_process()
        asked = False
        me = threading.get_ident()
        within = self._calls.busy(
            me
        )  # in a signal handler that came while this thread was in a call: that one is to end
        while True:
            with self._calls.mine():
                with self._lock:
                    if queue := self._queues.get(owner):
                        return [queue.popleft() for _ in range(min(most, len(queue)))]
                    left = end - time.monotonic()
                    # A thread that an interrupt took away before it could say so polls no more: it is in no call.
                    polled = within or (self._polling not in (None, me) and self._calls.busy(self._polling))
                    if left <= 0 and (asked or polled):
                        return []
                    self._check_open()
                    if polled:
                        bell = self._bells.mine()
                    else:
                        self._polling = me
                if polled:
                    self._bells.wait(bell, max(0.0, min(left, _SLICE_S)))
                    continue
                try:
                    self._poll_library(max(0.0, min(left, _SLICE_S)), most)
                finally:
                    with self._lock:
                        self._polling = None
                        self._bells.ring()
            asked = True

    def _poll_library(self, timeout_s: float, capacity: int) -> None:
        """Hands out what the library has. Only the thread that set `_polling` is in here."""
        with self._lock:
            self._hand_out()  # what an interrupt has left
        capacity = max(capacity, 64)
        if len(self._events) < capacity:
            self._events = ffi.new("kd_event[]", capacity)
        self._events[0].size = structs.EVENT_BYTES
        if self._check(self._ask(self._lib.kd_poll, self._events, capacity, int(timeout_s * 1000))):
            with self._lock:
                self._hand_out()

    def _hand_out(self) -> None:
        """The events of the array to their queues. An interrupt may come between any two lines: what was done can then be seen,
        and the rest is done the next time. An event stays in the array (type 0: none) until it is in `_batch`, and an
        iterator gives it to its queue once, in one step of the interpreter."""
        if not self._batch:
            found: dict[int, list[Event]] = {}
            for i in range(len(self._events)):
                if self._events[i].type == 0:
                    break
                event = structs.event(self._events[i], self._flags.get(self._events[i].id, 0))
                own = event.id if event.id in self._queues else _NOBODY
                for owner in self._queues if event.type == "fatal" else [own]:
                    found.setdefault(owner, []).append(event)
            self._batch = [(owner, of[-1].type == "end", iter(of)) for owner, of in found.items()]
            self._ended = {event.id for of in found.values() for event in of if event.type == "end"}
        ffi.memmove(self._events, bytes(ffi.sizeof(self._events)), ffi.sizeof(self._events))
        for owner, last, events in self._batch:
            self._queues.get(owner, _DROPPED).extend(events)
            if last and self._queues.get(owner, _DROPPED).maxlen == 0:  # of an EventStream that is gone
                self._queues.pop(owner, None)
        for id in self._ended:
            self._flags.pop(id, None)
        self._batch = []

    def _has_ended(self, id: int) -> bool:
        """Whether nothing is left to be read of an EventStream's request, even if an interrupt took its end away."""
        self._check_process()
        with self._lock:
            return id not in self._flags and not self._queues.get(id)
