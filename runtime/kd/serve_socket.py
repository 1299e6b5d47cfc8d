"""The serve thread: one ROUTER for clients, the engine's event descriptor, and nothing that can block.

It is the engine's only poller. Slow work (encoding text, submitting) happens on one worker thread.
"""

from __future__ import annotations

import collections
import queue
import threading
import time
from typing import TYPE_CHECKING, Any

import zmq

from kd import protocol, verbs, wire
from kd.port import Port, Wake
from kd.sessions import Session
from kd.state import EX_SOFTWARE, why_latched
from kd.wire import ProtocolError

if TYPE_CHECKING:
    from kd.server import Daemon

BEAT_S = 0.5  # a client with open requests hears from us so often; that also finds the vanished
STUCK_S = 10.0  # a turn of the loop takes milliseconds
BATCH = 64
MAX_WORKER_QUEUE = 1024

CLIENT_GONE = "the client is gone"  # it closed its connection, or was killed

_STATUS_WORDS = {
    "CANCELLED": "the model was unloaded before the request had come to its end",  # where nobody asked to end this one
    "SLOW_READER": "the client granted no credit for slow_reader_timeout_ms",
    "CONTEXT": "prompt and max_tokens do not fit the model's context or the KV cache",
}


class ServeThread(threading.Thread):
    def __init__(self, daemon: Daemon, port: Port):
        super().__init__(name="kd-serve", daemon=True)
        self.d, self.port, self.hub, self.log = daemon, port, daemon.hub, daemon.log
        self.wake = Wake()
        self._calls: collections.deque[tuple[Any, ...]] = collections.deque()  # from other threads
        self._jobs: queue.Queue[tuple[Any, ...] | None] = queue.Queue(MAX_WORKER_QUEUE)
        self.worker = threading.Thread(target=self._work, name="kd-encode", daemon=True)
        self._leaving = False
        self._tick_at = 0.0
        self._beat_at = time.monotonic()

    # ---- from other threads

    @property
    def beating(self) -> bool:
        """Whether this thread goes round. True before it was started."""
        return not self.ident or (self.is_alive() and time.monotonic() - self._beat_at < STUCK_S)

    def call(self, method: Any, *args: Any) -> None:
        """Run `method(*args)` on the serve thread soon."""
        self._calls.append((method, *args))
        self.wake.ring()

    def leave(self) -> None:
        """End the thread after what waits has been sent."""
        self._leaving = True
        self.wake.ring()

    # ---- the loop

    def run(self) -> None:
        self.worker.start()
        try:
            self._loop()
        except Exception as error:
            self.log.error("serve thread failed", error=repr(error))
            self.d.fail(f"the serve thread failed: {error!r}", 70)
        finally:
            self._jobs.put(None)
            self.port.close()

    def _loop(self) -> None:
        poller = zmq.Poller()
        poller.register(self.port.socket, zmq.POLLIN)
        poller.register(self.wake.fd, zmq.POLLIN)
        watched = None
        while not self._leaving:
            self._beat_at = time.monotonic()
            engine = self.d.engine
            if engine is not watched:
                watched = engine
                poller.register(engine.event_fd, zmq.POLLIN)
            for fd, _ in poller.poll(self._wait_ms()):
                if fd == self.wake.fd:
                    self.wake.clear()
            while self._calls:
                method, *args = self._calls.popleft()
                method(*args)
            if watched is not None:
                self._drain_engine(watched)
            for _ in range(BATCH):
                message = self.port.receive()
                if message is None:
                    break
                self._receive(message[0], message[1:])
            self.port.flush()
            now = time.monotonic()
            if now >= self._tick_at:
                self._tick(now)
        self.port.flush()

    def _wait_ms(self) -> int:
        if self.port.backlog:
            return 10
        return 200 if self.hub.clients else 1000

    # ---- messages

    def _receive(self, peer: bytes, frames: list[bytes]) -> None:
        self.hub.touch(peer)
        try:
            kind, ident, body = protocol.decode(frames, "serve", self.d.body_limit("serve"))
        except ProtocolError as error:
            self._send(peer, "ERROR", error.ident, error.body())
            return
        try:
            reply = self._answer(peer, kind, ident, body)
        except Exception as error:
            told = verbs.wire_error(error)
            if told.name in ("INTERNAL", "FATAL"):
                self.log.error("request failed", type=kind, request=ident.hex(), error=told.message)
            if told.name == "FATAL":
                self.d.fail(told.message, 70)
            reply = "ERROR", told.body()
        if reply is not None:
            self._send(peer, reply[0], ident, reply[1])

    def _answer(self, peer: bytes, kind: str, ident: bytes, body: dict[str, Any]) -> verbs.Reply | None:
        if kind == "GENERATE":
            return self._generate(peer, ident, body)
        if kind == "CREDIT":
            self._credit(peer, body["request"], body["frames"])
            return None
        if kind == "CANCEL":
            return self.cancel(body["request"], peer)
        if kind == "PS":
            return verbs.rows_of(self.hub.open_sessions(peer))
        if kind == "TOKENIZE":
            self._enqueue((self._tokenize, peer, ident, body))
            return None
        return verbs.common(self.d, "serve", kind, body)

    def _enqueue(self, job: tuple[Any, ...]) -> None:
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            raise ProtocolError("BUSY", "too many requests wait to be encoded", retry_ms=500) from None

    def _generate(self, peer: bytes, ident: bytes, body: dict[str, Any]) -> verbs.Reply | None:
        self.d.admit(body)
        session, new = self.hub.open(peer, ident, body)
        if session is None:
            raise ProtocolError("ALREADY_DONE", "this request has ended: its FINAL was sent")
        if not new:
            if session.state == "preparing":
                return None  # the first ACCEPTED is still to come
            return "ACCEPTED", self._accepted(session, duplicate=True)
        try:
            self._enqueue((self._prepare, session))
        except ProtocolError:
            self.hub.close(session)
            raise
        return None

    def _credit(self, peer: bytes, ident: bytes, frames: int) -> None:
        """Unknown and ended requests are ignored: the grant and the end may have crossed."""
        for session in self.hub.find(ident, peer):
            with self.hub.lock:
                frames = min(frames, wire.MAX_CREDIT - session.credit)
                if frames <= 0:
                    return
                session.credit += frames
                if session.state == "preparing":
                    session.extra_credit += frames
                    return
            self._grant(session, frames)

    def _grant(self, session: Session, frames: int) -> None:
        try:
            self.d.engine.credit(session.engine_id, frames)
        except Exception as error:
            if verbs.wire_error(error).name not in ("NOT_FOUND", "ALREADY_DONE"):
                raise

    def cancel(self, ident: bytes | None, peer: bytes | None) -> verbs.Reply:
        """Cancel the request `ident`, or all, of `peer`, or of everybody if that is None. [any thread]"""
        sessions = self.hub.open_sessions(peer) if ident is None else self.hub.find(ident, peer)
        who = "operator" if peer is None else "client"
        results = [self.end_early(s, ("CANCELLED", f"the {who} cancelled the request")) for s in sessions]
        count = results.count("cancelled")
        if count:
            result = "cancelled"
        elif results or (ident is not None and self.hub.was(ident, peer)):
            result = "already_done"
        else:
            result = "not_found"
        return "CANCELLED", {"result": result, "count": count}

    def end_early(self, session: Session, verdict: tuple[str, str] | None = None) -> str:
        """Ask the engine to end it; verdict: (error name, sentence), if it is not asked again. [any thread]"""
        with self.hub.lock:
            if verdict and not session.cancelled:  # the first reason is the true one
                session.verdict = verdict
            session.cancelled = True
            if session.state == "preparing":
                return "cancelled"
        try:
            return self.d.engine.cancel(session.engine_id)
        except Exception as error:
            if verbs.wire_error(error).name == "FATAL":
                return "already_done"
            raise

    # ---- the worker

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            method, *args = job
            method(*args)

    def _tokenize(self, peer: bytes, ident: bytes, body: dict[str, Any]) -> None:
        try:
            reply = verbs.tokenize(self.d, body)
        except Exception as error:
            reply = "ERROR", verbs.wire_error(error).body()
        self.call(self._send, peer, reply[0], ident, reply[1])

    def _prepare(self, session: Session) -> None:
        """Encode and submit; the outcome goes back to the serve thread."""
        body = session.body
        try:
            if session.verdict:
                raise ProtocolError(*session.verdict)
            tokens, session.text_id = body["tokens"], 0
            if tokens is None:
                tokens, session.text_id = verbs.encode(self.d, body["prompt"], body["messages"], body["thinking"])
            if not tokens:
                raise ProtocolError("BAD_FIELD", "the prompt is empty: it must give at least one token")
            session.prompt_tokens = len(tokens)
            sampling = self.d.make_sampling(
                temperature=body["temperature"],
                top_p=body["top_p"],
                min_p=body["min_p"],
                top_k=body["top_k"],
                seed=session.seed,
                choice=body["choice"],
            )
            ident = self.d.engine.submit(
                tokens,
                max_tokens=body["max_tokens"],
                sampling=sampling,
                stop_ids=tuple(body["stop_ids"] or ()),
                stop_strings=tuple(body["stop"] or ()),
                credit=session.credit - session.extra_credit,
                hash_logits=body["hash_logits"],
                logprobs=body["logprobs"],
                cold=body["cold"],
                ignore_eos=body["ignore_eos"],
                builder=body["builder"],
                budget=body["budget"],
                user=session.user,
                text_id=session.text_id,
            )
        except Exception as error:
            if self._outdated(session):
                self._prepare(session)
            else:
                self.call(self._refused, session, verbs.wire_error(error))
            return
        self.call(self._submitted, session, ident)

    def _outdated(self, session: Session) -> bool:
        """Whether its text was encoded for a model that is no longer the one new requests run on, with other tokens."""
        try:
            return session.text_id not in (0, self.d.engine.text_side().id)
        except Exception:
            return False

    def _refused(self, session: Session, error: ProtocolError) -> None:
        if session.accepted:  # and prepared again, for another model
            chunk = {"seq": session.frames, "tokens": b"", "text": ""}
            self._finish(session, chunk, "cancelled" if session.cancelled else "error", error.name, error.message)
            return
        self.hub.close(session)
        self.hub.counts["refused"] += 1
        level = "error" if error.name in ("INTERNAL", "FATAL") else "info"
        self.log.write(
            level,
            "request refused",
            request=session.name,
            error=_blame(error.name, error.message),
            reason=error.message,
        )
        if error.name == "FATAL":
            self.d.fail(error.message, 70)
        if not session.orphan:
            self._send(session.peer, "ERROR", session.ident, error.body())

    def _submitted(self, session: Session, engine_id: int) -> None:
        """After submit(), or at the first event, which may come sooner."""
        with self.hub.lock:
            if session.state != "preparing" or session.user not in self.hub.by_user:
                return
            session.state, session.engine_id = "running", engine_id
            extra, session.extra_credit = session.extra_credit, 0
        if not session.accepted:
            session.accepted = True
            self.log.info(
                "request accepted",
                request=session.name,
                engine_id=engine_id,
                client=session.peer.hex(),
                prompt_tokens=session.prompt_tokens,
                max_tokens=session.body["max_tokens"],
            )
            self._send(session.peer, "ACCEPTED", session.ident, self._accepted(session))
        if extra:
            self._grant(session, extra)
        if session.cancelled:
            self.end_early(session)

    @staticmethod
    def _accepted(session: Session, duplicate: bool = False) -> dict[str, Any]:
        return {
            "prompt_tokens": session.prompt_tokens,
            "engine_id": session.engine_id,
            "seed": session.seed,
            "duplicate": duplicate,
        }

    # ---- events

    def _drain_engine(self, engine: Any) -> None:
        for _ in range(64):
            try:
                events = engine.poll(0, BATCH)
            except Exception as error:
                self.d.fail(f"the engine cannot be polled: {error}", 70)
                return
            for event in events:
                self._event(event)
            if len(events) < BATCH:
                return

    def _event(self, event: Any) -> None:
        if event.type == "fatal":
            self.d.fail(why_latched(self.d.engine), EX_SOFTWARE)
            return
        if event.type not in ("tokens", "end"):
            return
        session = self.hub.by_user.get(event.user)
        if session is None:
            return
        if session.state == "preparing":
            self._submitted(session, event.id)
        with self.hub.lock:
            session.token_hash = wire.hash_ids(event.tokens, session.token_hash)
            session.total_tokens += len(event.tokens)
            session.nodes += event.nodes
            session.rounds += bool(event.tokens)
            session.cached_tokens = event.cached_tokens
            if event.tokens and not session.first_us:
                session.first_us = int((time.monotonic() - session.started) * 1e6)
        if event.type == "end":
            failed = event.status and wire.error_of_status(event.status) != "CANCELLED"
            if failed and not session.total_tokens and self._outdated(session):
                self._again(session)
            else:
                self._final(session, event)
            return
        self._send(session.peer, "PARTIAL", session.ident, self._chunk(session, event))
        with self.hub.lock:
            session.frames += 1
            session.credit -= 1

    def _again(self, session: Session) -> None:
        """It waited for a model that did not come, or that has been replaced: its text becomes the tokens of the one there is."""
        with self.hub.lock:
            session.state = "preparing"
        try:
            self._enqueue((self._prepare, session))
        except ProtocolError as error:
            self._refused(session, error)

    @staticmethod
    def _chunk(session: Session, event: Any) -> dict[str, Any]:
        return {
            "seq": session.frames,
            "tokens": wire.pack_ids(event.tokens),
            **verbs.text_fields(event.text),
            "hashes": wire.pack_u64(event.hashes) if session.body["hash_logits"] else None,
            "logprobs": wire.pack_f32(event.logprobs) if session.body["logprobs"] else None,
            "nodes": event.nodes,
            "builder_generation": event.builder_generation,
            "weights_generation": event.weights_generation,
        }

    def _final(self, session: Session, event: Any) -> None:
        name, message = None, None
        if event.status:
            name = wire.error_of_status(event.status)
            words = _STATUS_WORDS.get(name, f"the request ended with {name}")
            message = why_latched(self.d.engine) if name == "FATAL" else words
            if name == "CANCELLED" and session.verdict:
                name, message = session.verdict
        self._finish(session, self._chunk(session, event), event.finish or "error", name, message)

    def _finish(
        self, session: Session, chunk: dict[str, Any], finish: str, name: str | None, message: str | None
    ) -> None:
        total_us = int((time.monotonic() - session.started) * 1e6)
        self.hub.close(session)
        self.hub.counts[finish] += 1
        self.log.info(
            "request ended",
            request=session.name,
            finish=finish,
            error=_blame(name, message),
            reason=message,
            tokens=session.total_tokens,
            rounds=session.rounds,
            ms=total_us // 1000,
        )
        if session.orphan:
            return
        self._send(
            session.peer,
            "FINAL",
            session.ident,
            {
                **chunk,
                "finish": finish,
                "code": wire.ERRORS[name] if name else 0,
                "name": name,
                "message": message,
                "prompt_tokens": session.prompt_tokens,
                "cached_tokens": session.cached_tokens,
                "total_tokens": session.total_tokens,
                "frames": session.frames + 1,
                "token_hash": session.token_hash.to_bytes(8, "little"),
                "rounds": session.rounds,
                "total_nodes": session.nodes,
                "accepted": max(0, session.total_tokens - session.rounds),
                "first_token_us": session.first_us,
                "total_us": total_us,
            },
        )

    def fail_all(self, name: str, message: str) -> None:
        """End every open request with an error, without the engine: it is dead."""
        for session in self.hub.open_sessions():
            if session.state == "preparing":
                self._refused(session, ProtocolError(name, message))
            else:
                chunk = {"seq": session.frames, "tokens": b"", "text": ""}
                self._finish(session, chunk, "error", name, message)

    # ---- clients

    def _send(self, peer: bytes, kind: str, ident: bytes, body: dict[str, Any], optional: bool = False) -> None:
        if self.port.send(peer, kind, ident, body, optional=optional):
            client = self.hub.clients.get(peer)
            if client:
                client.sent_at = time.monotonic()

    def gone(self, peer: bytes) -> None:
        """A client has vanished, or let too much pile up: nobody waits for its requests any more."""
        for session in self.hub.open_sessions(peer):
            if not session.orphan:
                session.orphan = True
                self.log.info("client gone", request=session.name, client=peer.hex())
                self.hub.counts["client_gone"] += 1
                self.end_early(session, ("LEASE_EXPIRED", CLIENT_GONE))

    def _tick(self, now: float) -> None:
        self._tick_at = now + BEAT_S / 2
        for client in list(self.hub.clients.values()):
            late = now - client.seen > client.lease_s
            for session in list(client.sessions.values()):
                if late:
                    self.end_early(session, ("LEASE_EXPIRED", "nothing was heard from the client for its lease"))
                elif session.deadline and now > session.deadline:
                    self.end_early(session, ("TIMEOUT", "deadline_ms has passed"))
            if client.sessions and now - client.sent_at >= BEAT_S:
                turns = self.d.watch.stats.get("turns", 0)
                self._send(client.peer, "BEAT", protocol.NO_ID, {"turns": turns}, optional=True)


def _blame(name: str | None, message: str | None) -> str | None:
    """The error a log names. To cancel or to leave is a client's right; a lease that ran out is told."""
    return None if name == "CANCELLED" or message == CLIENT_GONE else name
