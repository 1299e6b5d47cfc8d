"""The control loop, on the daemon's main thread: the operator's ROUTER, the events XPUB, and signals.

Verbs that call into the engine run on one operations thread, so that status answers while a model loads or leaves.
"""

from __future__ import annotations

import collections
import os
import queue
import threading
import time
from typing import TYPE_CHECKING, Any

import zmq

from kd import notify, protocol, verbs, wire
from kd.port import LINGER_MS, Port, Wake
from kd.wire import ProtocolError

if TYPE_CHECKING:
    from kd.server import Daemon

BATCH = 64
FLUSH_S = 1.0  # for the last messages of requests that were ended by a stop
_SLOW = frozenset({"UNLOAD", "USE_BUILDER", "BUILDERS", "TOKENIZE", "DETOKENIZE", "DRAIN", "LOAD_CANCEL"})


class ControlLoop:
    def __init__(self, daemon: Daemon, port: Port, events: zmq.Socket):
        self.d, self.port, self.events, self.log = daemon, port, events, daemon.log
        self.wake = Wake()
        self._calls: collections.deque[tuple[Any, ...]] = collections.deque()
        self._ops: queue.Queue[tuple[Any, ...] | None] = queue.Queue(256)
        self.operations = threading.Thread(target=self._operate, name="kd-operations", daemon=True)
        self._topics: set[bytes] = set()
        self._sequence = 0
        self._metrics_at = 0.0
        self._loads: list[tuple[bytes, bytes]] = []  # who is told how the load goes
        self._progress: dict[str, Any] | None = None  # what they were told last
        self._signals: list[int] = []
        self._signal_fd = -1
        self._stop_at: float | None = None  # when running requests have had their time
        self._end_at: float | None = None  # when their last messages have had theirs

    # ---- from other threads and from signal handlers

    def call(self, method: Any, *args: Any) -> None:
        self._calls.append((method, *args))
        self.wake.ring()

    def signal(self, number: int) -> None:
        self._signals.append(number)
        self.wake.ring()

    def watch_fd(self, fd: int) -> None:
        """Also end a wait when `fd`, a pipe that signals write to, is readable."""
        self._signal_fd = fd

    # ---- the loop

    def run(self) -> None:
        """Until the daemon has to go."""
        self.operations.start()
        poller = zmq.Poller()
        for item in (self.port.socket, self.events, self.wake.fd):
            poller.register(item, zmq.POLLIN)
        if self._signal_fd >= 0:
            poller.register(self._signal_fd, zmq.POLLIN)
        while not self._over():
            for fd, _ in poller.poll(self._wait_ms()):
                if fd == self.wake.fd:
                    self.wake.clear()
                elif fd == self._signal_fd:
                    os.read(self._signal_fd, 64)
            while self._signals:
                self._on_signal(self._signals.pop(0))
            while self._calls:
                method, *args = self._calls.popleft()
                method(*args)
            for _ in range(BATCH):
                message = self.port.receive()
                if message is None:
                    break
                self._receive(message[0], message[1:])
            self._subscriptions()
            self._tick(time.monotonic())
            self.port.flush()
        self._ops.put(None)

    def _wait_ms(self) -> int:
        if self.port.backlog:
            return 10
        if self._stop_at is not None or self._loads:
            return 50
        if self._topics:
            return min(1000, self.d.config.server.publish_interval_ms)
        return 1000 if self.d.state.started else 200

    def _tick(self, now: float) -> None:
        if self._topics and now >= self._metrics_at:
            self._metrics_at = now + self.d.config.server.publish_interval_ms / 1000
            body = {
                "state": self.d.state.name,
                "live": self.d.live,
                "ready": self.d.ready,
                "open_requests": self.d.hub.active,
                "stats": self.d.fresh_stats(),
                **self.d.hub.counts,
            }
            self.publish("metrics", body)
        if self._loads:
            progress = self.d.loader.progress()
            if progress and progress != self._progress:
                self._progress = progress
                for peer, ident in self._loads:
                    self.port.send(peer, "PROGRESS", ident, progress, optional=True)

    # ---- stopping

    def _on_signal(self, number: int) -> None:
        if self._stop_at is None:
            self.log.info("signal: draining", signal=number, open_requests=self.d.hub.active)
            self.stop(self.d.config.server.drain_timeout_ms)
        else:
            self.log.warning("second signal: stopping now", signal=number)
            self.stop(0)

    def stop(self, deadline_ms: int) -> None:
        """Refuse new work, let running requests finish for so long, then end them and leave. May be called again."""
        at = time.monotonic() + deadline_ms / 1000
        self._stop_at = at if self._stop_at is None else min(at, self._stop_at)
        self.d.stopping = True
        self.d.arm_hard_exit(deadline_ms / 1000)
        self.d.state.drain(True)
        notify.stopping("draining")
        self._ops_put((self._quietly, self.d.cease))

    def _over(self) -> bool:
        now = time.monotonic()
        if self.d.state.failed:
            if self._end_at is None:
                self._end_at = now + FLUSH_S
                notify.stopping(f"failed: {self.d.state.reason}")
                self.d.serve.call(self.d.serve.fail_all, "FATAL", self.d.state.reason)
                self._end_loads(ProtocolError("FATAL", self.d.state.reason))
            return now >= self._end_at or (self.d.hub.active == 0 and now >= self._end_at - FLUSH_S / 2)
        if self._stop_at is None:
            return False
        if self.d.hub.active == 0 and not self.d.loader.busy:
            return True
        if self._end_at is None and now >= self._stop_at:
            self._end_at = now + FLUSH_S
            self.d.serve.call(self._end_requests)
        return self._end_at is not None and now >= self._end_at

    def _end_requests(self) -> None:
        for session in self.d.hub.open_sessions():
            self.d.serve.end_early(session, ("CANCELLED", "the daemon is stopping and the drain time is over"))

    # ---- messages

    def _receive(self, peer: bytes, frames: list[bytes]) -> None:
        ident = protocol.NO_ID
        try:
            kind, ident, body = protocol.decode(frames, "control", wire.MAX_BODY_BYTES["control"])
            if kind in _SLOW:
                self._ops_put((self._operation, peer, ident, kind, body))
                return
            reply = self._answer(peer, ident, kind, body)
        except Exception as error:
            told = verbs.wire_error(error)
            if isinstance(error, ProtocolError) and error.ident != protocol.NO_ID:
                ident = error.ident
            reply = self._error(told)
        if reply is not None:
            self.port.send(peer, reply[0], ident, reply[1])

    def _error(self, told: ProtocolError) -> verbs.Reply:
        if told.name in ("INTERNAL", "FATAL"):
            self.log.error("operation failed", error=told.message)
        if told.name == "FATAL":
            self.d.fail(told.message, 70)
        return "ERROR", told.body()

    def _answer(self, peer: bytes, ident: bytes, kind: str, body: dict[str, Any]) -> verbs.Reply | None:
        if kind == "CANCEL":
            return self.d.serve.cancel(body["request"], None)
        if kind == "PS":
            return verbs.rows_of(self.d.hub.open_sessions())
        if kind == "LOAD":
            self._load(peer, ident, body)
            return None
        if kind == "STOP":
            self.log.info("stop asked for", mode=body["mode"])
            drain_ms = body["deadline_ms"] or self.d.config.server.drain_timeout_ms
            self.stop(drain_ms if body["mode"] == "drain" else 0)
            return "DONE", {"state": self.d.state.name}
        return verbs.common(self.d, "control", kind, body)

    def _load(self, peer: bytes, ident: bytes, body: dict[str, Any]) -> None:
        if self.d.stopping or self.d.state.draining:
            raise ProtocolError("DRAINING", "the daemon is draining")
        if self.d.engine is None or not self.d.state.started:
            raise ProtocolError("NOT_READY", "the daemon is still starting", retry_ms=500)
        self.d.loader.claim(body["replace"])
        self._loads.append((peer, ident))
        self._progress = None
        how = (os.path.abspath(body["path"]), body["draft"], body["replace"], body["follow_links"])
        threading.Thread(target=self._run_load, args=how, name="kd-load", daemon=True).start()

    def _run_load(self, path: str, draft: str, replace: bool, follow_links: bool) -> None:
        error = None
        try:
            self.d.loader.run(path, draft, replace, follow_links)
            self.d.state.enter("ready")
        except Exception as caught:
            error = verbs.wire_error(caught)
            self.log.error("load failed", model=path, error=error.name, reason=error.message)
            self.d.state.enter("empty" if self.d.model_path is None else "ready")
            if error.name == "FATAL":
                self.d.fail(error.message, 70)
        self.call(self._end_loads, error)

    def _end_loads(self, error: ProtocolError | None) -> None:
        body = error.body() if error else {"model": verbs.model_of(self.d), "state": self.d.state.name}
        for peer, ident in self._loads:
            self.port.send(peer, "ERROR" if error else "DONE", ident, body)
        self._loads.clear()

    # ---- the operations thread

    def _ops_put(self, job: tuple[Any, ...]) -> None:
        try:
            self._ops.put_nowait(job)
        except queue.Full:
            raise ProtocolError("BUSY", "too many operations wait", retry_ms=1000) from None

    def _operate(self) -> None:
        while (job := self._ops.get()) is not None:
            method, *args = job
            method(*args)

    def _quietly(self, method: Any) -> None:
        try:
            method()
        except Exception as error:
            self.log.warning("operation failed", error=str(error))

    def _operation(self, peer: bytes, ident: bytes, kind: str, body: dict[str, Any]) -> None:
        try:
            reply = self._operation_reply(kind, body)
        except Exception as error:
            reply = self._error(verbs.wire_error(error))
        self.call(self.port.send, peer, reply[0], ident, reply[1])

    def _operation_reply(self, kind: str, body: dict[str, Any]) -> verbs.Reply:
        d = self.d
        if d.engine is None:
            raise ProtocolError("NOT_READY", "the daemon is still starting", retry_ms=500)
        if kind == "UNLOAD":
            return "DONE", {"freed_bytes": max(0, int(d.unload())), "state": d.state.name}
        if kind == "LOAD_CANCEL":
            if body["load"] is not None and body["load"] not in [ident for _, ident in self._loads]:
                raise ProtocolError("STATE", "no load with this id is under way")
            d.loader.cancel()
            return "DONE", {"state": d.state.name}
        if kind == "DRAIN":
            d.set_drain(body["on"])
            return "DONE", {"state": d.state.name}
        if kind == "USE_BUILDER":
            engine_id = 0
            if body["request"] is not None:
                found = [s for s in d.hub.find(body["request"]) if s.state == "running"]
                if not found:
                    raise ProtocolError("NOT_FOUND", "no running request has this id")
                engine_id = found[0].engine_id
            generation = d.use_builder(body["name"], body["budget"], engine_id)
            self.log.info(
                "builder in force",
                builder=body["name"],
                budget=body["budget"],
                engine_id=engine_id,
                generation=generation,
            )
            if not engine_id:
                self.call(self.publish, "state", {"builder": body["name"], "generation": generation})
            return "DONE", {"generation": generation}
        reply = verbs.common(d, "control", kind, body)
        assert reply is not None
        return reply

    # ---- events

    def publish(self, topic: str, body: dict[str, Any]) -> None:
        """One message to whoever listens; lossy by design, numbered so that a gap shows. [control thread]"""
        import msgpack

        self._sequence += 1
        full = {"seq": self._sequence, "time_ms": int(time.time() * 1000), "boot": self.d.boot, **body}
        try:
            self.events.send_multipart([topic.encode(), wire.TAG, msgpack.packb(full, use_bin_type=True)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self.log.debug("event lost", error=str(error))

    def _subscriptions(self) -> None:
        for _ in range(BATCH):
            try:
                data = self.events.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            if data[:1] == b"\x01" and len(self._topics) < 64:
                self._topics.add(data[1:])
                self.publish("state", {"state": self.d.state.name, "reason": self.d.state.reason})
                self._metrics_at = 0.0
            elif data[:1] == b"\x00":
                self._topics.discard(data[1:])

    def close(self) -> None:
        self.port.close()
        self.events.close(LINGER_MS)
