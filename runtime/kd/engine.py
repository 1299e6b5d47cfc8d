"""kd.Engine: the library as a Python object.

Every method may be called from any thread. Events are collected by whichever thread waits for some; one that belongs
to an `EventStream` goes there, all others come out of `poll()`. Errors are `kd.KdError`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kd import structs
from kd.event_stream import EventStream
from kd.native import KdError, Library, constants, ffi, find_nccl, load_library, status_names
from kd.structs import CODES, invalid
from kd.text_side import read_text_side
from kd.values import Completion, Event, ModelInfo, RequestOptions, Sampling

if TYPE_CHECKING:
    import numpy

    from kd.chat import ChatTemplate
    from kd.tokenizer import Tokenizer

__all__ = ["Completion", "Engine", "Event", "EventStream", "ModelInfo", "RequestOptions", "Sampling"]

_SLICE_S = 0.1  # Python sees signals, and close() its turn, between two calls of the library only
_NOBODY = 0  # in Engine._queues: events that belong to no EventStream, for poll()

# What a request's last event cannot say itself: it carries a status and no sentence.
_WHY = {
    "KD_E_SLOW_READER": "its events were not read for slow_reader_timeout_ms; read faster or give more credit",
    "KD_E_CANCELLED": "the model was unloaded before it began",
    "KD_E_NOMEM": "the memory for it was not there; raise kv_bytes or lower max_tokens",
    "KD_E_FATAL": "the engine has failed; close it and open it again",
}


class Engine:
    """An engine and at most one model. With `path`, the model is loaded before the constructor returns.

    Zeros mean the library's defaults (see kd_options in kd.h). device "cuda" without its library is an error. record: a
    file that tells what the ranks are at, see `kd.steps`.
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
        self._handle: Any = None
        self._library = library if isinstance(library, Library) else load_library(device, library)
        self._lib = self._library.lib
        if device == "cuda" and tp > 1:
            find_nccl()
        self._changed = threading.Condition()  # guards everything below, and is notified when any of it changes
        self._polling = False  # a thread is in kd_poll
        self._calls = 0  # threads in any call of the library
        self._closing = False
        self._flags: dict[int, int] = {}  # of running requests
        self._queues: dict[int, deque[Event]] = {_NOBODY: deque()}  # events not yet handed out, by EventStream
        self._events = ffi.NULL
        self._text_us = 0  # what reading tokenizer and template took
        self._tokenizer: Tokenizer | None = None
        self._chat: ChatTemplate | None = None
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
            share_devices=int(share_devices),
            record=record,
        )
        out = ffi.new("kd_engine **")
        self._check(self._lib.kd_open(out, options))
        del keep  # the library has copied it
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
        self._check(self._lib.kd_close(handle))

    @property
    def library(self) -> Library:
        """The loaded library: its path, version and build information."""
        return self._library

    # ---- model -------------------------------------------------------------------------------------------------------

    def load(
        self,
        path: str | Path,
        *,
        draft: str | Path = "auto",
        wait: bool = True,
        progress: Callable[[dict], None] | None = None,
        replace: bool = False,
        follow_links: bool = False,
    ) -> None:
        """Load a model folder, or a packed one. draft: "auto" (<path>/draft if there is one), "none", or a folder.

        progress: called with `load_progress()` about every 50 ms while waiting, and at the end. An exception in it, or
        Ctrl-C, cancels the load and comes out of here once the memory is back. wait=False returns at once. The end
        also comes as a "load" event. replace: a loaded model serves on until this one can take its place, and finishes
        its requests; needs wait. follow_links: symbolic links in the folder may lead elsewhere.
        """
        if replace and not wait:
            raise invalid("replace needs wait: the tokenizer changes with the model")
        folder = structs.path(path)
        began = time.monotonic()
        tokenizer, chat = read_text_side(Path(path), follow_links)
        options, keep = structs.load_options(draft, tokenizer, replace, follow_links)
        text_us = int((time.monotonic() - began) * 1e6)
        with self._call() as handle:
            self._check(self._lib.kd_load(handle, folder, options))
            self._text_us = text_us
            if not replace:
                self._tokenizer, self._chat = tokenizer, chat
        del keep
        if wait:
            self._wait_for_load(progress)
            self._tokenizer, self._chat = tokenizer, chat

    def save(self, folder: str | Path, progress: Callable[[dict], None] | None = None) -> None:
        """Write the loaded model as packed files, one a rank, into a folder that is there. `kd.convert` makes a whole
        model folder of it. progress, exceptions and Ctrl-C as for `load()`."""
        with self._call() as handle:
            self._check(self._lib.kd_save(handle, structs.path(folder)))
            self._text_us = 0
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
            if error.name not in ("KD_E_STATE", "KD_E_FORKED"):  # closed meanwhile: there is nothing to cancel
                self._cancel_load()
            raise
        except BaseException:
            self._cancel_load()
            raise

    def _load_ended(self, timeout_ms: int) -> bool:
        with self._call() as handle:
            rc = self._lib.kd_load_wait(handle, timeout_ms)
            if rc == CODES["KD_E_TIMEOUT"]:
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
        """{"phase": "open"|"read"|"prepare"|"swap"|"done" ("write" of a save), "bytes_done", "bytes_total", "elapsed_us",
        "phases": {phase: us}} of the load under way or the last one."""
        progress = structs.progress(self._filled("kd_progress", self._lib.kd_load_progress))
        progress["elapsed_us"] += self._text_us
        progress["phases"] = ({"text": self._text_us} if self._text_us else {}) | progress["phases"]
        return progress

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
        return self._tokenizer

    @property
    def chat(self) -> ChatTemplate | None:
        """The loaded folder's chat template, or None."""
        return self._chat

    # ---- requests ----------------------------------------------------------------------------------------------------

    def submit(self, tokens: Sequence[int], *, max_tokens: int, **options: Any) -> int:
        """Queue a request and return its id; its events come out of `poll()`. options: fields of `RequestOptions`."""
        return self._submit(False, tokens, max_tokens=max_tokens, **options)

    def cancel(self, id: int) -> str:
        """Returns "cancelled" (the request's last event will say so), "already_done" or "not_found"."""
        with self._call() as handle:
            rc = self._lib.kd_cancel(handle, structs.request_id(id))
            if rc in (CODES["KD_E_DONE"], CODES["KD_E_NOT_FOUND"]):
                return "already_done" if rc == CODES["KD_E_DONE"] else "not_found"
            self._check(rc)
        return "cancelled"

    def credit(self, id: int, n: int) -> None:
        """Let a request produce n more events. KdError KD_E_NOT_FOUND for one there never was."""
        with self._call() as handle:
            n = structs.integer("n", n, 0, 1 << 32)
            self._check(self._lib.kd_request_credit(handle, structs.request_id(id), n))

    def poll(self, timeout_ms: int = 0, capacity: int = 64) -> list[Event]:
        """Up to `capacity` events, oldest first; waits up to timeout_ms for the first one."""
        structs.integer("capacity", capacity, 1, 1 << 20)
        return self._wait(_NOBODY, capacity, time.monotonic() + timeout_ms / 1000)

    @property
    def event_fd(self) -> int:
        """A file descriptor that is readable while events wait in the library; never read it."""
        with self._call() as handle:
            return self._check(self._lib.kd_event_fd(handle))

    # ---- tree builders -----------------------------------------------------------------------------------------------

    def builders(self) -> list[dict[str, Any]]:
        """[{"name", "description", "in_force", "budget", "streams"}]."""
        infos = ffi.new("kd_builder_info[]", constants["KD_MAX_BUILDERS"])
        infos[0].size = ffi.sizeof("kd_builder_info")
        with self._call() as handle:
            n = self._check(self._lib.kd_builder_list(handle, infos, len(infos)))
        return [structs.builder_info(info) for info in infos[0:n]]

    def use_builder(self, name: str, budget: int = 0, id: int = 0) -> int:
        """From the next round on, build trees with `name`: for one request, or with id 0 for all. budget 0: the
        builder's default. Returns the generation that events of those rounds carry."""
        generation = ffi.new("uint64_t *")
        nodes = structs.integer("budget", budget, -(1 << 31), 1 << 31)
        with self._call() as handle:
            self._check(self._lib.kd_builder_use(handle, structs.text(name), nodes, structs.request_id(id), generation))
        return generation[0]

    # ---- conveniences ------------------------------------------------------------------------------------------------

    def score(self, ids: Sequence[int]) -> numpy.ndarray:
        """float32 logits [len(ids), vocab_size]: row i predicts the token after ids[i]. Cold, as prefill rows."""
        import numpy

        tokens = structs.token_ids("ids", ids)
        logits = numpy.empty((len(tokens), self.info.vocab_size), numpy.float32)
        out = ffi.from_buffer("float[]", logits, require_writable=True)
        with self._call() as handle:
            self._check(self._lib.kd_score(handle, structs.pointer(tokens), len(tokens), out))
        return logits

    def stream(self, prompt: str | Sequence[int], *, max_tokens: int = 128, **options: Any) -> EventStream:
        """Submit now and iterate over the request's events, the end included. Closing the iterator, or dropping it,
        cancels the request. options: as `submit()`."""
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise invalid("this model folder has no tiktoken.model; give the prompt as token ids")
            prompt = self._tokenizer.encode(prompt)
        id = self._submit(True, prompt, max_tokens=max_tokens, **options)
        return EventStream(self, id, options.get("credit", 0))

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

    def _check(self, rc: int) -> int:
        return self._library.check(rc)

    @contextmanager
    def _call(self) -> Iterator[Any]:
        """The handle, held open against close() while the caller is in the library."""
        with self._changed:
            if self._handle is None or self._closing:
                raise structs.failure("KD_E_STATE", "this engine is closed; open another one")
            self._calls += 1
            handle = self._handle
        try:
            yield handle
        finally:
            with self._changed:
                self._calls -= 1
                if self._closing:
                    self._changed.notify_all()

    def _filled(self, name: str, function: Any) -> Any:
        out = structs.new(name)
        with self._call() as handle:
            self._check(function(handle, out))
        return out

    def _submit(self, own: bool, tokens: Sequence[int], **options: Any) -> int:
        """own: the events go to an EventStream, not to poll()."""
        request, keep = structs.request(tokens, RequestOptions(**options))
        out = ffi.new("uint64_t *")
        with self._call() as handle, self._changed:  # no event is handed out before its request is known here
            self._check(self._lib.kd_submit(handle, request, out))
            self._flags[out[0]] = request.flags
            if own:
                self._queues[out[0]] = deque()
        del keep
        return out[0]

    def _forget(self, id: int) -> None:
        """Nobody will read this EventStream's queue again; what still comes is thrown away."""
        with self._changed:
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
        asked = False
        while True:
            with self._changed:
                if queue := self._queues.get(owner):
                    return [queue.popleft() for _ in range(min(most, len(queue)))]
                left = end - time.monotonic()
                if left <= 0 and (asked or self._polling):
                    return []
                if self._closing or self._handle is None:
                    raise structs.failure("KD_E_STATE", "this engine is closed; open another one")
                if self._polling:
                    self._changed.wait(min(left, _SLICE_S))
                    continue
                self._polling = True
            try:
                self._poll_library(max(0.0, min(left, _SLICE_S)), most)
            finally:
                with self._changed:
                    self._polling = False
                    self._changed.notify_all()
            asked = True

    def _poll_library(self, timeout_s: float, capacity: int) -> None:
        """Hands out what the library has. Only the thread that set `_polling` is in here."""
        capacity = max(capacity, 64)
        if self._events == ffi.NULL or len(self._events) < capacity:
            self._events = ffi.new("kd_event[]", capacity)
        events = self._events
        events[0].size = structs.EVENT_BYTES
        with self._call() as handle:
            n = self._check(self._lib.kd_poll(handle, events, capacity, int(timeout_s * 1000)))
            with self._changed:
                for i in range(n):
                    self._hand_out(structs.event(events[i], self._flags.get(events[i].id, 0)))

    def _hand_out(self, event: Event) -> None:
        queue = self._queues.get(event.id, self._queues[_NOBODY])
        queue.append(event)
        if event.type == "end":
            self._flags.pop(event.id, None)
            if queue.maxlen == 0:  # of an EventStream that is gone
                del self._queues[event.id]
        elif event.type == "fatal":
            for other in self._queues.values():
                if other is not queue:
                    other.append(event)
