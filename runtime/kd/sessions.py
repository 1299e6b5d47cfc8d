"""Who is connected and which requests are under way: shared by the serve thread, the worker and the control thread.

Every access holds `Hub.lock`, briefly; nothing here blocks or talks to a socket.
"""

from __future__ import annotations

import collections
import hashlib
import itertools
import secrets
import threading
import time
from typing import Any

import msgpack

from kd import wire

REMEMBERED = 4096  # ended requests whose ids are still answered for


class Session:
    """One GENERATE of one client."""

    __slots__ = (
        "peer",
        "ident",
        "user",
        "body",
        "key",
        "state",
        "engine_id",
        "prompt_tokens",
        "frames",
        "engine_seq",
        "credit",
        "extra_credit",
        "token_hash",
        "total_tokens",
        "nodes",
        "rounds",
        "started",
        "first_us",
        "deadline",
        "cancelled",
        "verdict",
        "orphan",
        "cached_tokens",
        "seed",
        "text_id",
        "accepted",
    )

    def __init__(self, peer: bytes, ident: bytes, user: int, body: dict[str, Any], key: bytes):
        self.peer, self.ident, self.user, self.body, self.key = peer, ident, user, body, key
        self.state = "preparing"  # -> "running" -> gone
        self.engine_id = self.prompt_tokens = self.frames = self.total_tokens = self.nodes = self.rounds = 0
        self.cached_tokens = self.first_us = self.extra_credit = 0
        self.credit = body["credit"]  # frames it may still be sent
        self.token_hash = wire.HASH_START
        self.started = time.monotonic()
        self.deadline = self.started + body["deadline_ms"] / 1000 if body["deadline_ms"] else None
        self.text_id = 0  # TextSide.id of what its text was encoded with
        self.accepted = False  # ACCEPTED is out
        self.cancelled = self.orphan = False
        self.verdict: tuple[str, str] | None = None  # why it was cancelled: error name, sentence
        # Without a seed two equal requests differ, and the one chosen is told so that it can be repeated.
        self.seed = secrets.randbits(48) if body["seed"] is None else body["seed"]

    @property
    def name(self) -> str:
        """How logs and tables name it."""
        return self.ident.hex()

    def row(self) -> dict[str, Any]:
        now = time.monotonic()
        return {
            "request": self.name,
            "engine_id": self.engine_id,
            "state": self.state,
            "client": self.peer.hex(),
            "prompt_tokens": self.prompt_tokens,
            "tokens": self.total_tokens,
            "rounds": self.rounds,
            "credit": self.credit,
            "age_ms": int((now - self.started) * 1000),
        }


class Client:
    __slots__ = ("peer", "seen", "lease_s", "sessions", "sent_at")

    def __init__(self, peer: bytes, lease_s: float):
        self.peer, self.lease_s = peer, lease_s
        self.seen = self.sent_at = time.monotonic()
        self.sessions: dict[bytes, Session] = {}


COUNTERS = ("opened", "refused", "stop", "length", "cancelled", "error", "client_gone")  # since the start


class Hub:
    """All clients and requests of the daemon."""

    def __init__(self, max_requests_client: int, lease_ms: int):
        self.lock = threading.RLock()
        self.max_requests_client, self.lease_s = max_requests_client, lease_ms / 1000
        self.clients: dict[bytes, Client] = {}
        self.by_user: dict[int, Session] = {}
        self.ended: collections.OrderedDict[tuple[bytes, bytes], bytes] = collections.OrderedDict()
        self._users = itertools.count(1)
        self.counts = dict.fromkeys(COUNTERS, 0)

    # -- clients

    def touch(self, peer: bytes) -> None:
        client = self.clients.get(peer)
        if client:
            client.seen = time.monotonic()

    def forget_idle(self, peer: bytes) -> None:
        client = self.clients.get(peer)
        if client and not client.sessions:
            del self.clients[peer]

    # -- requests

    @staticmethod
    def key_of(body: dict[str, Any]) -> bytes:
        return hashlib.sha256(msgpack.packb(body, use_bin_type=True)).digest()

    def open(self, peer: bytes, ident: bytes, body: dict[str, Any]) -> tuple[Session | None, bool]:
        """(session, is_new). (None, False): it has ended already. Raises ProtocolError."""
        key = self.key_of(body)
        with self.lock:
            client = self.clients.get(peer)
            session = client.sessions.get(ident) if client else None
            known = session.key if session else self.ended.get((peer, ident))
            if known is not None:
                if known != key:
                    raise wire.ProtocolError("CONFLICT", "this id names another request of yours: use a fresh one")
                return session, False
            if client is None:
                client = self.clients[peer] = Client(peer, self.lease_s)
            if len(client.sessions) >= self.max_requests_client:
                raise wire.ProtocolError(
                    "BUSY",
                    f"this client has {self.max_requests_client} open requests, the most one may have",
                    retry_ms=1000,
                )
            lease = body["lease_ms"] / 1000 if body["lease_ms"] else self.lease_s
            client.lease_s = lease
            session = Session(peer, ident, next(self._users), body, key)
            client.sessions[ident] = self.by_user[session.user] = session
            self.counts["opened"] += 1
            return session, True

    def close(self, session: Session) -> None:
        with self.lock:
            self.by_user.pop(session.user, None)
            client = self.clients.get(session.peer)
            if client:
                client.sessions.pop(session.ident, None)
            self.ended[(session.peer, session.ident)] = session.key
            while len(self.ended) > REMEMBERED:
                self.ended.popitem(last=False)
            self.forget_idle(session.peer)

    def find(self, ident: bytes, peer: bytes | None = None) -> list[Session]:
        """Open requests of that id: the peer's own, or, for the operator, anybody's."""
        with self.lock:
            return [s for s in self.by_user.values() if s.ident == ident and peer in (None, s.peer)]

    def was(self, ident: bytes, peer: bytes | None = None) -> bool:
        """Whether a request of that id has ended."""
        with self.lock:
            if peer is not None:
                return (peer, ident) in self.ended
            return any(i == ident for _, i in self.ended)

    def open_sessions(self, peer: bytes | None = None) -> list[Session]:
        with self.lock:
            return [s for s in self.by_user.values() if peer in (None, s.peer)]

    @property
    def active(self) -> int:
        with self.lock:
            return len(self.by_user)

    @property
    def preparing(self) -> int:
        with self.lock:
            return sum(s.state == "preparing" for s in self.by_user.values())

    def owes_work(self) -> bool:
        """Whether the engine has something it may do now: a running request with credit left.

        One that has not begun may have to wait for pages that paused ones hold: that is no fault of the engine."""
        with self.lock:
            running = [s for s in self.by_user.values() if s.state == "running"]
            paused = any(s.credit <= 0 and not s.cancelled for s in running)
            return any(s.cancelled or (s.credit > 0 and (s.total_tokens > 0 or not paused)) for s in running)
