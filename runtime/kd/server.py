"""The daemon: one engine, a serve thread for clients, a control loop for operators. `Daemon.run()` is its life."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

import kd
from kd import config as configuration
from kd import notify, steps, verbs, wire
from kd.control_socket import ControlLoop
from kd.loading import Loader
from kd.logs import Log
from kd.port import LINGER_MS, SEND_HWM, Port
from kd.serve_socket import ServeThread
from kd.sessions import Hub
from kd.state import EX_DATA, EX_OS, EX_RUNNING, EX_SOFTWARE, DaemonState, Watch
from kd.wire import ProtocolError

STOP_GRACE_S = 5.0  # beyond the drain time; then the process ends whatever its threads do
FAILED_GRACE_S = 1.0  # after a fatal failure: for what clients are still to be told
JOIN_S = 2.0
MAX_NODES = 64  # what engine.max_nodes = 0 means
MAX_TOKEN_BYTES = 256  # KD_MAX_TOKEN_BYTES: a prompt of n tokens has at most n times so many bytes

_EXIT = {
    "MODEL": EX_DATA,
    "IO": EX_DATA,
    "NO_TOKENIZER": EX_DATA,
    "NOMEM": EX_OS,
    "DEVICE": EX_OS,
    "NOT_FOUND": 78,
}  # the last: a builder


class AlreadyRunning(Exception):
    """Another process holds the instance. `exit_status` is 69."""

    exit_status = EX_RUNNING


class Lock:
    """A locked file beside the sockets: ZeroMQ itself would let a second daemon take an ipc endpoint silently.

    The kernel gives the lock back when the process ends, however it ends; the file stays."""

    def __init__(self, path: Path, what: str):
        self.path = path
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.pread(self.fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(self.fd)
            raise AlreadyRunning(
                f"{what} is served by process {owner} already (lock {path}): stop that one first, "
                "or choose another instance"
            ) from None
        os.ftruncate(self.fd, 0)
        os.pwrite(self.fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Daemon:
    """open_engine() makes a kd.Engine-like object, make_sampling(**values) a kd.Sampling-like one, describe() gives
    (ABI version, library name)."""

    def __init__(
        self,
        config: configuration.Config,
        log: Log,
        open_engine: Callable[[], Any],
        make_sampling: Callable[..., Any],
        describe: Callable[[], tuple[int, str]] = lambda: (0, ""),
    ):
        self.config, self.log = config, log
        self._open_engine, self.make_sampling = open_engine, make_sampling
        self._describe, self.abi, self.library, self.version = describe, 0, "", kd.__version__
        self.boot = secrets.token_bytes(16)
        self.started_at = time.monotonic()
        self.engine: Any = None
        self.model_path: str | None = None
        self.wanted_builder = (config.builder.name, config.builder.budget)
        self.builder_told = False  # the engine knows of it: USE_BUILDER
        self.stopping = False
        server = config.server
        self.state = DaemonState(self._state_changed)
        self.hub = Hub(server.max_requests_client, server.client_timeout_ms)
        self.watch = Watch(
            server.round_stall_timeout_ms, self.hub.owes_work, rank_limit_ms=server.rank_stall_timeout_ms
        )
        self.watch.on_fatal, self.watch.on_alive = self.fail, self._feed_watchdog
        self.loader = Loader(self)
        self._fed_at = 0.0
        self._hard_exit_at: float | None = None
        self._locks: list[Lock] = []
        self._context = zmq.Context(io_threads=1)
        self._curve: Any = None
        self.control: ControlLoop
        self.serve: ServeThread
        self._open_sockets()

    # ---- sockets

    def _open_sockets(self) -> None:
        """Locks first, then binds. Raises AlreadyRunning, ConfigError or OSError, with everything closed again."""
        server = self.config.server
        where = configuration.paths(server.instance, runtime_dir=server.runtime_dir)
        self._steps = where.steps
        configuration.make_dirs(where, group=server.serve_group)
        self.endpoints = {
            name: getattr(server, name) or f"ipc://{getattr(where, name)}" for name in ("control", "serve", "events")
        }
        try:
            self._locks.append(Lock(where.lock, f"instance '{server.instance}'"))
            for name, endpoint in self.endpoints.items():
                if getattr(server, name).startswith("ipc://"):
                    self._locks.append(Lock(Path(endpoint[6:] + ".lock"), endpoint))
            self._curve = self._security()
            # The file mode of an ipc socket follows the umask: the operator's own, and group for the rest.
            control = self._bind(
                "control", 0o177, lambda e: Port(self._context, e, lambda peer: None, self._prepare("control"))
            )
            gone: list[ServeThread] = []
            serve = self._bind(
                "serve",
                0o117,
                lambda e: Port(self._context, e, lambda peer: gone[0].gone(peer), self._prepare("serve")),
            )
            events = self._bind("events", 0o117, self._event_socket)
            self._give_group(server.serve_group)
        except BaseException:
            self._context.destroy(linger=0)
            for lock in self._locks:
                lock.release()
            raise
        self.serve = ServeThread(self, serve)
        gone.append(self.serve)
        self.control = ControlLoop(self, control, events)

    def _bind(self, name: str, umask: int, make: Callable[[str], Any]) -> Any:
        endpoint = self.endpoints[name]
        old = os.umask(umask)
        try:
            return make(endpoint)
        except zmq.ZMQError as error:
            if error.errno == errno.EADDRINUSE:
                raise AlreadyRunning(
                    f"{endpoint} is in use by another process: stop it, or choose another server.{name}"
                ) from None
            raise configuration.ConfigError(f"server.{name} = {endpoint}: cannot be bound ({error})") from None
        finally:
            os.umask(old)

    def _event_socket(self, endpoint: str) -> zmq.Socket:
        socket = self._context.socket(zmq.XPUB)
        for option, value in (
            (zmq.SNDHWM, SEND_HWM),
            (zmq.RCVHWM, SEND_HWM),
            (zmq.LINGER, LINGER_MS),
            (zmq.MAXMSGSIZE, 4096),
            (zmq.HANDSHAKE_IVL, 5000),
        ):
            socket.setsockopt(option, value)
        self._prepare("events")(socket)
        socket.bind(endpoint)
        return socket

    def _security(self) -> Any:
        """CURVE for the tcp endpoints, if there is a key folder. config.load() refuses tcp without that or insecure."""
        if not any(e.startswith("tcp://") for e in self.endpoints.values()) or not self.config.server.curve_dir:
            return None
        from kd import curve

        return curve.server_side(self._context, Path(self.config.server.curve_dir))

    def _prepare(self, name: str) -> Callable[[zmq.Socket], None]:
        def prepare(socket: zmq.Socket) -> None:
            if self._curve and self.endpoints[name].startswith("tcp://"):
                self._curve(name, socket)

        return prepare

    def _give_group(self, group: str) -> None:
        if not group:
            return
        import grp

        gid = grp.getgrnam(group).gr_gid  # make_dirs has looked it up before
        for name in ("serve", "events"):
            if self.endpoints[name].startswith("ipc://"):
                os.chown(self.endpoints[name][6:], -1, gid)

    def body_limit(self, socket: str) -> int:
        return self.config.server.max_message_bytes if socket == "serve" else wire.MAX_BODY_BYTES["control"]

    # ---- state

    @property
    def live(self) -> bool:
        return not self.state.failed and self.watch.live and self.serve.beating

    @property
    def ready(self) -> bool:
        return self.state.ready and self.live and self.model_path is not None

    def fresh_stats(self) -> dict[str, Any] | None:
        if self.engine is None:
            return None
        stats = self.watch.stats
        if self.watch.live:  # a wedged engine is not asked: it might not answer
            try:
                stats = self.engine.stats()
            except Exception as error:
                self.log.debug("no stats", error=str(error))
        return verbs.plain(stats) if not isinstance(stats, dict) else dict(stats)

    def _state_changed(self, name: str, reason: str) -> None:
        fields = {"reason": reason} if reason else {}
        self.log.write("error" if name == "failed" else "info", f"state {name}", **fields)
        notify.status(name + (f": {reason}" if reason else ""))
        self.control.call(self.control.publish, "state", {"state": name, "reason": reason})

    def fail(self, reason: str, exit_status: int) -> None:
        """Latch a fatal failure: the daemon ends with this status whatever comes later. [any thread]"""
        if self.state.fail(reason, exit_status):
            self.arm_hard_exit(FAILED_GRACE_S - STOP_GRACE_S)
            self.control.wake.ring()

    def _feed_watchdog(self) -> None:
        interval_us = notify.watchdog_interval_us()
        now = time.monotonic()
        if interval_us and self.state.started and now - self._fed_at >= interval_us / 4e6 and self.live:
            self._fed_at = now
            notify.watchdog()

    def load_progress(self, now: dict[str, Any] | None) -> None:
        """Called when a load has moved on."""
        if now is None:
            return
        if not self.state.started:
            notify.extend_timeout(self.config.server.load_stall_timeout_ms * 2000)
        notify.status(f"loading: {now['phase']} {now['percent']:.0f} %")
        self.control.call(self.control.publish, "load", now)

    # ---- what the sockets ask for

    def admit(self, body: dict[str, Any]) -> None:
        """The cheap checks, before any text is encoded. Raises ProtocolError."""
        state = self.state
        if state.failed:
            raise ProtocolError("FATAL", state.reason)
        if self.stopping or state.draining:
            raise ProtocolError("DRAINING", "the daemon is draining: it takes no new requests")
        if state.name == "empty" or (state.ready and self.model_path is None):
            raise ProtocolError("NOT_READY", "no model is loaded: load one with `kdctl load PATH`")
        if not state.ready:
            raise ProtocolError(
                "NOT_READY", f"the daemon is {state.name}: retry, or wait for state ready", retry_ms=1000
            )
        if not self.watch.live:
            idle_s = self.watch.age_us // 1_000_000
            raise ProtocolError("NOT_READY", f"the engine has made no progress for {idle_s} s: retry", retry_ms=1000)
        engine = self.config.engine
        most = (engine.max_streams or 64) + (engine.max_queue or 512)
        if self.hub.active >= most:
            raise ProtocolError("BUSY", f"{most} requests are open, the most this daemon takes", retry_ms=1000)
        if body["budget"] and not body["builder"]:
            raise ProtocolError("BAD_FIELD", "'budget' needs 'builder'", field="budget")
        self.check_budget(body["budget"])
        info = self.engine.info
        for token in body["stop_ids"] or ():
            if token >= info.vocab_size:
                raise ProtocolError(
                    "BAD_FIELD",
                    f"stop id {token} is outside the vocabulary of {info.vocab_size}: leave it out",
                    field="stop_ids",
                    limit=info.vocab_size,
                )
        positions = info.max_positions
        if body["tokens"] is not None:
            size, unit = len(body["tokens"]), "tokens"
        else:
            texts = [body["prompt"]] if body["prompt"] is not None else [m["content"] for m in body["messages"]]
            size, unit = -(-sum(len(t.encode()) for t in texts) // MAX_TOKEN_BYTES), "or more tokens"
        if size + body["max_tokens"] > positions:
            raise ProtocolError(
                "CONTEXT",
                f"a prompt of {size} {unit} and max_tokens {body['max_tokens']} do not fit "
                f"the context of {positions}: shorten one of them",
                limit=positions,
            )

    @property
    def max_nodes(self) -> int:
        return self.config.engine.max_nodes or MAX_NODES

    def check_budget(self, budget: int) -> None:
        """Raises ProtocolError, in the words of the configuration: the library knows its options by other names."""
        most = self.max_nodes
        if budget > most:
            raise ProtocolError(
                "BAD_FIELD",
                f"a budget of {budget} is more than engine.max_nodes = {most}: lower it, or raise that setting",
                field="budget",
                limit=most,
            )

    def builder_for(self, info: Any) -> tuple[str, int]:
        """The configured builder with its budget, or, until one is chosen, trees, which the warm-up is to prove; a model
        without a drafter has none. Raises ProtocolError."""
        name, budget = self.wanted_builder
        known = [row["name"] for row in self.engine.builders()]
        if name and name not in known:
            raise ProtocolError("NOT_FOUND", f"there is no builder {name!r}: one of {', '.join(known)}")
        if not info.draft_layers:
            return "none", 0
        return (name, budget) if name else ("heap" if self.config.engine.device == "cpu" else "device", 0)

    def use_builder(self, name: str, budget: int, engine_id: int) -> int:
        """Put a builder in force, for one request or, with 0, for all and for models to come. Returns its generation."""
        self.check_budget(budget)
        with self.loader.choosing:
            generation = self.engine.use_builder(name, budget, engine_id)
            if not engine_id:
                self.wanted_builder, self.builder_told = (name, budget), True
                self.loader.choice = None
        return generation

    def unload(self) -> int:
        """Free the model. Returns the bytes freed."""
        with self.loader.no_load():
            if self.model_path is None:
                raise ProtocolError("STATE", "no model is loaded")
            path, self.model_path = self.model_path, None  # first: who asks meanwhile finds no model, not half of one
            try:
                freed = self.engine.unload()
            except BaseException:
                self.model_path = path
                raise
            self.loader.choice = None
            self.state.enter("empty")
        self.log.info("model unloaded", model=path, freed_bytes=freed)
        return freed

    def set_drain(self, on: bool) -> None:
        if self.stopping and not on:
            raise ProtocolError("DRAINING", "the daemon is stopping: this cannot be taken back")
        if on and self.model_path is None:
            raise ProtocolError("STATE", "no model is loaded: there is nothing to drain")
        self.engine.drain(on)
        self.state.drain(on, "ready" if self.model_path is not None else "empty")

    def cease(self) -> None:
        """Before leaving: no new work in the engine, no load. [operations thread]"""
        try:
            self.loader.cancel()
        except Exception as error:
            self.log.debug("no load to cancel", error=str(error))
        if self.engine is not None and not self.state.failed:
            self.engine.drain(True)

    # ---- life

    def run(self) -> int:
        """Serve until stopped; returns the exit status."""
        self.log.info(
            "starting", version=self.version, instance=self.config.server.instance, pid=os.getpid(), **self.endpoints
        )
        if told := steps.take_last_words(self._steps):
            self.log.warning(told)
        self.serve.start()
        self.watch.start()
        starter = threading.Thread(target=self._start, name="kd-start", daemon=True)
        starter.start()
        try:
            self.control.run()
        except Exception as error:
            self.log.error("control loop failed", error=repr(error))
            self.state.fail(f"the control loop failed: {error!r}", EX_SOFTWARE)
        return self._leave()

    def _start(self) -> None:
        """Open the engine and load the configured model."""
        try:
            engine = self._open_engine()
            self.abi, self.library = self._describe()
            self.engine = engine
            self.watch.attach(self.engine, steps.Ranks(self._steps) if self._steps.exists() else None)
            self.serve.wake.ring()
            path = self.config.model.path
            if path and not self.stopping:
                self.loader.claim()
                model = self.config.model
                self.loader.run(os.path.abspath(path), model.draft, follow_links=model.follow_links)
            if self.stopping:
                return
            self.state.enter("ready" if path else "empty", started=True)
            notify.ready("ready" if path else "no model loaded")
        except Exception as error:
            told = verbs.wire_error(error)
            if self.stopping:
                return
            opening = self.engine is None  # what it cannot write then is no model's
            self.fail(told.message, EX_OS if opening and told.name == "IO" else _EXIT.get(told.name, EX_SOFTWARE))

    def arm_hard_exit(self, after_s: float) -> None:
        """Whatever hangs: the process is gone that many seconds from now, plus the grace. The earliest time wins."""
        at = time.monotonic() + after_s + STOP_GRACE_S
        if self._hard_exit_at is None or at < self._hard_exit_at:
            first, self._hard_exit_at = self._hard_exit_at is None, at
            if first:
                threading.Thread(target=self._hard_exit, name="kd-hard-exit", daemon=True).start()

    def _hard_exit(self) -> None:
        while self._hard_exit_at is not None:
            left = self._hard_exit_at - time.monotonic()
            if left <= 0:
                if self.state.failed:  # which has been told: nothing waits for a device or for other ranks
                    steps.forget(self._steps)
                else:
                    self.log.error("a thread did not end in time: leaving without it")  # never waits
                self.exit_now(self.state.exit_status if self.state.failed else EX_SOFTWARE)
            time.sleep(min(0.2, max(0.01, left)))

    exit_now: Callable[[int], Any] = staticmethod(os._exit)  # the double of the tests records instead

    def _leave(self) -> int:
        """Close everything in order, within bounds."""
        self.arm_hard_exit(0)
        status = self.state.exit_status
        self.serve.leave()
        self.watch.stop()
        # An operation or a submission that still runs must not find the engine closed under its feet.
        limit = time.monotonic() + JOIN_S
        threads = (self.serve, self.serve.worker, self.control.operations)
        for thread in threads:
            if thread.ident:
                thread.join(max(0.0, limit - time.monotonic()))
        stuck = [t.name for t in threads if t.is_alive()]
        if not self.watch.join(JOIN_S):
            stuck.append("kd-watch")
        if not self.state.failed and not stuck and self.engine is not None:
            closer = threading.Thread(target=self._close_engine, name="kd-close", daemon=True)
            closer.start()
            closer.join(JOIN_S)
            if closer.is_alive():
                stuck.append(closer.name)
        self.state.enter("stopped")
        self.control.publish("state", {"state": self.state.name, "reason": self.state.reason})
        self.control.close()
        for endpoint in self.endpoints.values():
            if endpoint.startswith("ipc://"):
                try:
                    os.unlink(endpoint[6:])
                except OSError:
                    pass  # ZeroMQ removes it itself when it comes to it
        if self._curve:
            self._curve.authenticator.stop()
        # term() returns when the last answers are out, or never if a stuck thread holds a socket.
        ender = threading.Thread(target=self._context.term, name="kd-term", daemon=True)
        ender.start()
        ender.join(LINGER_MS / 1000 + 0.5)
        steps.forget(self._steps)
        for lock in self._locks:
            lock.release()
        self._hard_exit_at = None
        self.log.info("stopped", status=status, stuck=stuck or None)
        return status

    def _close_engine(self) -> None:
        try:
            self.engine.close()
        except Exception as error:
            self.log.warning("the engine did not close cleanly", error=str(error))
