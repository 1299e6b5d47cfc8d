"""A synchronous client of the daemon. Needs pyzmq and msgpack, never the native library.

    with kd.Client() as client:
        print(client.generate("def fib(n):", max_tokens=64).text)
        for chunk in client.stream("Once"):
            print(chunk.text, end="", flush=True)

One Client belongs to one thread. Every call has a timeout; what goes wrong is a KdClientError with a remedy.
"""

from __future__ import annotations

import os
import re
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kd import config as configuration
from kd import protocol, wire
from kd.stream import Chunk, KdClientError, Result, Stream

__all__ = ["Chunk", "Client", "KdClientError", "Result", "Stream"]

LEASE_MS = 30_000  # what this client promises to be heard within, unless it is told another lease_ms
LOOK_S = 1.0  # while waiting for an answer it looks this often whether there still is a daemon
PING_S = 2.0  # while waiting for a stream it says that it lives this often, or three times a lease


def _ids(name: str, ids: Any) -> bytes:
    try:
        return wire.pack_ids(ids)
    except (struct.error, TypeError) as error:
        raise KdClientError(
            "BAD_FIELD", f"{name} holds something that is no token id, 0 .. 2^32 - 1: {error}"
        ) from None


class Client:
    """A connection to the daemon `instance`, or to explicit endpoints. Connects on first use.

    endpoint: "ipc:///path/serve.sock" or "tcp://host:port" of the serve socket; control: that of the control socket.
    curve_dir: folder with server.key and client.key_secret, for tcp. timeout_s: for one answer; a stream may wait
    stream_timeout_s between two signs of life of the daemon."""

    def __init__(
        self,
        endpoint: str | None = None,
        instance: str = "default",
        *,
        control: str | None = None,
        timeout_s: float = 10.0,
        stream_timeout_s: float = 30.0,
        curve_dir: str | None = None,
    ):
        self.instance, self.timeout_s, self.stream_timeout_s = instance, timeout_s, stream_timeout_s
        self._curve_dir = curve_dir
        where = configuration.find(instance)
        beside = endpoint.removesuffix("serve.sock") if endpoint and endpoint.endswith("serve.sock") else None
        # With an endpoint of its own a client never falls back to the instance of this machine: that is another daemon.
        self.endpoints: dict[str, str | None] = {
            "serve": endpoint or f"ipc://{where.serve}",
            "control": control or (f"ipc://{where.control}" if not endpoint else beside and beside + "control.sock"),
            "events": f"ipc://{where.events}" if not endpoint else beside and beside + "events.sock",
        }
        for given in (endpoint, control):
            if given is not None and not re.fullmatch(
                r"ipc:///.+|tcp://[^/:]+:\d{1,5}|tcp://\[[0-9a-fA-F:]+\]:\d{1,5}", given
            ):
                raise KdClientError(
                    "BAD_ENDPOINT", f"{given!r} is no endpoint: write ipc:///PATH/serve.sock or tcp://HOST:PORT"
                )
        self._context: Any = None
        self._sockets: dict[str, Any] = {}
        self._streams: dict[bytes, list[tuple[str, dict[str, Any]]]] = {}  # what has arrived for each
        self._pinged_at, self._ping_s = 0.0, PING_S
        self._pid = os.getpid()

    # ---- connection

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave. The daemon cancels what is still open."""
        self._streams.clear()
        for socket in self._sockets.values():
            socket.close(200)
        self._sockets.clear()
        if self._context is not None:
            self._context.term()
            self._context = None

    def _endpoint(self, name: str) -> str:
        endpoint = self.endpoints[name]
        if endpoint is None:
            raise KdClientError(
                "BAD_ENDPOINT",
                f"the {name} endpoint of the daemon at {self.endpoints['serve']} is not known: "
                + (
                    "give it with control= (kdctl --control-endpoint URL)"
                    if name == "control"
                    else "use its ipc endpoint"
                ),
            )
        return endpoint

    def _check_there(self, name: str) -> None:
        """Asked where nothing is left to read."""
        try:
            self._look_there(name)
        except KdClientError:  # what waits to be sent is not for its successor
            if socket := self._sockets.pop(name, None):
                socket.close(0)
            raise

    def _look_there(self, name: str) -> None:
        endpoint = self._endpoint(name)
        if not endpoint.startswith("ipc://"):
            return
        path = Path(endpoint[6:])
        start = "kdctl start" if self.instance == "default" else f"kdctl --instance {self.instance} start"
        try:
            there = path.exists()
        except PermissionError:
            there = True
        if not there:
            raise KdClientError("NOT_RUNNING", f"no daemon answers at {path}: start it with `{start}`")
        if not os.access(path, os.W_OK):
            raise KdClientError(
                "PERMISSION",
                f"{path} may not be used by this user: ask for membership of its group, "
                "or use the user that runs the daemon",
            )
        import socket as sockets

        with sockets.socket(sockets.AF_UNIX) as probe:  # a file can outlive its daemon
            probe.settimeout(2)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                raise KdClientError("NOT_RUNNING", f"the daemon of {path} is gone: start it with `{start}`") from None
            except OSError:
                pass

    def _socket(self, name: str) -> Any:
        if os.getpid() != self._pid:
            raise KdClientError("LOST", "this Client was made in another process: make one after the fork")
        if name not in self._sockets:
            self._check_there(name)
            self._sockets[name] = self._connect(name)
        return self._sockets[name]

    def _connect(self, name: str) -> Any:
        import zmq

        endpoint = self._endpoint(name)
        if self._context is None:
            self._context = zmq.Context()
        socket = self._context.socket(zmq.SUB if name == "events" else zmq.DEALER)
        try:
            for option, value in (
                (zmq.LINGER, 200),
                (zmq.SNDHWM, 1024),
                (zmq.RCVHWM, 1024),
                (zmq.MAXMSGSIZE, wire.MAX_FRAME_BYTES),
                (zmq.HANDSHAKE_IVL, 5000),
            ):
                socket.setsockopt(option, value)
            if self._curve_dir:
                from kd import curve

                curve.client_side(socket, Path(self._curve_dir))
            # Not IMMEDIATE: with that ZeroMQ drops what has come in and was not read yet when the other end goes.
            socket.connect(endpoint)
        except BaseException as error:
            socket.close(0)  # a socket left open would make the context's end wait for ever
            if isinstance(error, zmq.ZMQError):
                raise KdClientError("BAD_ENDPOINT", f"{endpoint} cannot be connected to: {error}") from None
            raise
        return socket

    def _send(self, kind: str, ident: bytes, body: dict[str, Any], name: str, *, wait: bool = True) -> bool:
        """Whether it is on its way. wait: for up to timeout_s; then an error."""
        import zmq

        socket = self._socket(name)
        try:
            frames = protocol.encode(kind, ident, body)
        except (ValueError, OverflowError, TypeError, struct.error) as error:
            what = "a text holds bytes that are no UTF-8" if isinstance(error, UnicodeError) else str(error)
            raise KdClientError("BAD_FIELD", f"the {kind} message cannot be written: {what}") from None
        limit = wire.MAX_BODY_BYTES[name]
        if len(frames[2]) > limit:
            raise KdClientError(
                "TOO_LARGE",
                f"the {kind} message has {len(frames[2])} bytes, more than the {limit} a daemon takes: shorten it",
            )
        socket.setsockopt(zmq.SNDTIMEO, int(self.timeout_s * 1000) if wait else 0)
        try:
            socket.send_multipart(frames)
            return True
        except zmq.Again:
            if not wait:
                return False
            raise KdClientError(
                "NO_ANSWER",
                f"{self.endpoints[name]} takes no message within {self.timeout_s:g} s: is "
                "the daemon alive? see `kdctl health`",
            ) from None

    def _receive(self, name: str, timeout_s: float) -> tuple[str, bytes, dict[str, Any]] | None:
        """The next message, or None after timeout_s."""
        import zmq

        socket = self._socket(name)
        if not socket.poll(max(0, int(timeout_s * 1000)), zmq.POLLIN):
            return None
        frames = socket.recv_multipart()
        try:
            return protocol.decode(frames, "reply")
        except wire.ProtocolError as error:
            if error.name == "UNKNOWN_TYPE":
                return "", error.ident, {}
            raise KdClientError(error.name, f"the daemon's answer breaks the protocol: {error.message}") from None

    def _call(
        self,
        kind: str,
        body: dict[str, Any],
        name: str,
        until: Sequence[str],
        timeout_s: float | None = None,
        progress: Any = None,
        ident: bytes | None = None,
    ) -> dict[str, Any]:
        """Send and wait for one of the types `until`; ERROR raises. Messages of open streams are kept for them.

        timeout_s counts from the last message about this call."""
        ident = ident or os.urandom(16)
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        self._send(kind, ident, body, name)
        limit = time.monotonic() + timeout_s
        while True:
            left = limit - time.monotonic()
            message = self._receive(name, min(LOOK_S, left))
            if message is None:
                self._check_there(name)
                if left > LOOK_S:
                    continue
                raise KdClientError(
                    "NO_ANSWER",
                    f"no answer to {kind} from {self.endpoints[name]} within {timeout_s:g} s: see `kdctl health`, or "
                    "give a longer --timeout",
                )
            got, about, answer = message
            if about != ident and (got != "ERROR" or about != protocol.NO_ID):
                self._keep(got, about, answer)
                continue
            if got == "ERROR":
                raise KdClientError(answer["name"], answer["message"], answer)
            if got in until:
                return answer
            if got == "PROGRESS" and progress:
                progress(answer)
            limit = time.monotonic() + timeout_s

    def _keep(self, kind: str, about: bytes, body: dict[str, Any]) -> None:
        if about in self._streams:
            self._streams[about].append((kind, body))

    def _next_of(self, ident: bytes, timeout_s: float) -> tuple[str, dict[str, Any]]:
        """The next message of a stream. Anything heard from the daemon shows that it lives."""
        waiting = self._streams.get(ident)
        if waiting:
            return waiting.pop(0)
        limit = time.monotonic() + timeout_s
        while True:
            now = time.monotonic()
            if now >= limit:
                raise KdClientError(
                    "NO_ANSWER",
                    f"no sign of this request from {self.endpoints['serve']} for "
                    f"{timeout_s:g} s: the daemon hangs or was started anew; see `kdctl health`",
                )
            if now - self._pinged_at > self._ping_s:
                self._pinged_at = now
                self._send("PING", os.urandom(16), {}, "serve", wait=False)
            message = self._receive("serve", min(self._ping_s, limit - now))
            if message is None:  # only then: what a daemon said before it left is still to be read
                self._check_there("serve")
                continue
            kind, about, body = message
            if about == ident:
                return kind, body
            if about == protocol.NO_ID and kind == "ERROR":
                raise KdClientError(body["name"], body["message"], body)
            if kind == "BEAT":  # only who has open requests gets it; a PONG would come from a new daemon too
                limit = time.monotonic() + timeout_s
            self._keep(kind, about, body)

    # ---- requests

    def stream(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: list[dict[str, str]] | None = None,
        max_tokens: int = 128,
        credit: int = wire.DEFAULT_CREDIT,
        **options: Any,
    ) -> Stream:
        """Start a request. prompt: text or token ids; or messages: a chat. options: the fields of GENERATE in
        docs/protocol.md (temperature, top_p, min_p, top_k, seed, stop, stop_ids, builder, budget, hash_logits,
        logprobs, cold, ignore_eos, thinking, lease_ms, deadline_ms)."""
        if (prompt is None) == (messages is None):
            raise ValueError("give either a prompt or messages")
        body: dict[str, Any] = {"max_tokens": max_tokens, "credit": credit, **options}
        if messages is not None:
            body["messages"] = messages
        elif isinstance(prompt, str):
            body["prompt"] = prompt
        else:
            body["tokens"] = _ids("prompt", prompt)
        if body.get("stop_ids") is not None:
            body["stop_ids"] = _ids("stop_ids", body["stop_ids"])
        if isinstance(body.get("stop"), str):
            body["stop"] = [body["stop"]]
        elif body.get("stop") is not None:
            body["stop"] = list(body["stop"])
        unknown = set(body) - set(wire.GENERATE)
        if unknown:
            known = ", ".join(sorted(wire.GENERATE))
            raise ValueError(f"unknown option {sorted(unknown)[0]!r}; there are: {known}")
        body.setdefault("lease_ms", LEASE_MS)
        self._ping_s = min(self._ping_s, body["lease_ms"] / 3000)
        ident = os.urandom(16)
        self._streams[ident] = []
        self._pinged_at = time.monotonic()
        try:
            self._send("GENERATE", ident, body, "serve")
        except KdClientError:
            del self._streams[ident]
            raise
        return Stream(self, ident, credit, self.stream_timeout_s)

    def generate(self, prompt: str | Sequence[int] | None = None, **options: Any) -> Result:
        """The whole completion. Options as in stream(). A request that ended with an error raises."""
        result = self.stream(prompt, **options).read()
        if result.finish == "error":
            raise KdClientError(result.error or "INTERNAL", result.message or "the request failed")
        return result

    def chat(self, messages: list[dict[str, str]] | str, **options: Any) -> Result:
        """Answer a conversation: [{"role": "user", "content": "..."}], or one user message as a string."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return self.generate(messages=messages, **options)

    def cancel(self, request: str | bytes, *, operator: bool = False) -> str:
        """cancelled, already_done or not_found. operator: any client's request, through the control socket."""
        ident = bytes.fromhex(request) if isinstance(request, str) else request
        return self._call("CANCEL", {"request": ident}, "control" if operator else "serve", ["CANCELLED"])["result"]

    def cancel_all(self, *, operator: bool = False) -> int:
        """Cancel all requests of this client, or, as operator, of everybody. Returns how many."""
        return self._call("CANCEL", {"all": True}, "control" if operator else "serve", ["CANCELLED"])["count"]

    # ---- questions; they go to the control socket if this user may use it

    def _any(self) -> str:
        if self._sockets.get("control"):
            return "control"
        control = self.endpoints["control"] or ""
        return "control" if control.startswith("ipc://") and os.access(control[6:], os.W_OK) else "serve"

    def hello(self) -> dict[str, Any]:
        return self._call("HELLO", {"client": f"kd python {os.getpid()}"}, self._any(), ["WELCOME"])

    def ping(self) -> dict[str, Any]:
        return self._call("PING", {}, self._any(), ["PONG"])

    def status(self) -> dict[str, Any]:
        return self._call("STATUS", {}, self._any(), ["STATUS"])

    def ps(self, *, own: bool = False) -> list[dict[str, Any]]:
        return self._call("PS", {}, "serve" if own else self._any(), ["REQUESTS"])["requests"]

    def builders(self) -> list[dict[str, Any]]:
        return self._call("BUILDERS", {}, self._any(), ["BUILDERS"])["builders"]

    def tokenize(self, text: str | None = None, *, messages: list[dict[str, str]] | None = None) -> list[int]:
        return self._call("TOKENIZE", {"text": text, "messages": messages}, "serve", ["TOKENS"])["tokens"]

    def detokenize(self, tokens: Sequence[int]) -> str:
        return self._call("DETOKENIZE", {"tokens": _ids("tokens", tokens)}, "serve", ["TEXT"])["text"]

    # ---- the operator's

    def load(
        self,
        path: str,
        *,
        draft: str = "auto",
        replace: bool = False,
        follow_links: bool = False,
        progress: Any = None,
        timeout_s: float = 120.0,
        wait: bool = True,
        ident: bytes | None = None,
    ) -> dict[str, Any]:
        """Load a model folder of the daemon's machine. replace: in place of a loaded one, which serves until then and finishes
        its requests. timeout_s: without any progress message. wait: until it is ready, else until it has begun; then the
        answer may be its first progress. ident: what `load_cancel()` may name."""
        draft = (
            draft if draft in ("auto", "none", "") else os.path.abspath(draft)
        )  # the daemon's current folder is another
        body: dict[str, Any] = {"path": os.path.abspath(path), "draft": draft}
        body |= {key: True for key, on in (("replace", replace), ("follow_links", follow_links)) if on}
        until = ["DONE"] if wait else ["DONE", "PROGRESS"]
        return self._call("LOAD", body, "control", until, timeout_s, progress, ident)

    def load_cancel(self, load: bytes | None = None) -> None:
        """The load under way, or only the one with that `ident`, ends with CANCELLED, and a model that was to be replaced serves
        on. STATE: there is none, or its model has taken over."""
        self._call("LOAD_CANCEL", {"load": load} if load else {}, "control", ["DONE"])

    def unload(self, timeout_s: float = 60.0) -> int:
        """Bytes of memory given back."""
        return self._call("UNLOAD", {}, "control", ["DONE"], timeout_s)["freed_bytes"]

    def use_builder(self, name: str, budget: int = 0, request: str | None = None) -> int:
        """From the next round on. Returns the generation that later frames carry."""
        body = {"name": name, "budget": budget, "request": bytes.fromhex(request) if request else None}
        return self._call("USE_BUILDER", body, "control", ["DONE"])["generation"]

    def drain(self, on: bool = True) -> str:
        return self._call("DRAIN", {"on": on}, "control", ["DONE"])["state"]

    def stop(self, *, now: bool = False, deadline_ms: int = 0) -> None:
        """Returns when the daemon has said yes, or has gone; running requests may still be finishing."""
        self.ping()  # is there one to stop?
        body = {"mode": "now" if now else "drain", "deadline_ms": deadline_ms}
        for last in (False, True):  # saying it twice does no harm, and the answer may be lost with the daemon
            try:
                self._call("STOP", body, "control", ["DONE"])
                return
            except KdClientError as error:
                if error.name == "NOT_RUNNING":
                    return
                if error.name != "NO_ANSWER" or last:
                    raise

    def events(self, topics: Sequence[str] = ("",), timeout_s: float | None = None) -> Iterator[dict[str, Any]]:
        """What the daemon publishes: maps with topic, seq, time_ms. Ends after timeout_s without one."""
        import zmq

        socket = self._socket("events")
        for topic in topics:
            socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
        while socket.poll(None if timeout_s is None else int(timeout_s * 1000), zmq.POLLIN):
            frames = socket.recv_multipart()
            if len(frames) == 3 and frames[1] == wire.TAG:
                body = protocol.decode_map(frames[2], wire.MAX_BODY_BYTES["reply"])
                yield {"topic": frames[0].decode("utf-8", "replace"), **body}
