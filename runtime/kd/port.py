"""A ROUTER socket that never blocks on a peer: what cannot be sent at once waits in a bounded box of that peer."""

from __future__ import annotations

import collections
import errno
import os
from collections.abc import Callable
from typing import Any

import zmq

from kd import protocol, wire

MAX_WAITING = 8192  # frames of one peer; credit keeps an honest one far below
SEND_HWM = 512
LINGER_MS = 500


class Wake:
    """An eventfd another thread rings to end a poller's wait. [any thread]"""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def ring(self) -> None:
        try:
            os.eventfd_write(self.fd, 1)
        except (BlockingIOError, OSError):
            pass  # already ringing, or closed on the way out

    def clear(self) -> None:
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            pass

    def close(self) -> None:
        os.close(self.fd)
        self.fd = -1


class Port:
    """One bound ROUTER. [the thread that owns it]

    gone(peer) is called when a peer has vanished or its box has overflown; nothing is sent to it afterwards."""

    def __init__(
        self,
        context: zmq.Context,
        endpoint: str,
        gone: Callable[[bytes], None],
        prepare: Callable[[zmq.Socket], None] | None = None,
    ):
        self.endpoint, self._gone = endpoint, gone
        self._boxes: dict[bytes, collections.deque[list[bytes]]] = {}
        self.sent = 0
        self.socket = context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.SNDHWM, SEND_HWM),
            (zmq.RCVHWM, SEND_HWM),
            (zmq.LINGER, LINGER_MS),
            (zmq.MAXMSGSIZE, wire.MAX_FRAME_BYTES),
            (zmq.HEARTBEAT_IVL, 2000),
            (zmq.HEARTBEAT_TIMEOUT, 6000),
            (zmq.HEARTBEAT_TTL, 10_000),
            (zmq.HANDSHAKE_IVL, 5000),
        ):
            self.socket.setsockopt(option, value)
        if prepare:
            prepare(self.socket)
        self.socket.bind(endpoint)

    @property
    def backlog(self) -> int:
        """Peers whose messages wait."""
        return len(self._boxes)

    def receive(self) -> list[bytes] | None:
        """[peer, frames...], or None if nothing waits."""
        try:
            return self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def send(self, peer: bytes, kind: str, ident: bytes, body: dict[str, Any], *, optional: bool = False) -> bool:
        """Send or keep for later; False if the peer is gone. optional: drop it instead of keeping it."""
        return self._put(peer, [peer, *protocol.encode(kind, ident, body)], optional)

    def _put(self, peer: bytes, message: list[bytes], optional: bool) -> bool:
        box = self._boxes.get(peer)
        if box is None:
            done = self._try(peer, message)
            if done is not None:
                return done
            if optional:
                return True
            box = self._boxes[peer] = collections.deque()
        elif optional:
            return True
        if len(box) >= MAX_WAITING:
            self.forget(peer)
            self._gone(peer)
            return False
        box.append(message)
        return True

    def _try(self, peer: bytes, message: list[bytes]) -> bool | None:
        """True: sent. False: the peer is gone. None: its pipe is full."""
        try:
            self.socket.send_multipart(message, zmq.NOBLOCK)
            self.sent += 1
            return True
        except zmq.Again:
            return None
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, errno.ECONNRESET, errno.EPIPE):
                raise
            self.forget(peer)
            self._gone(peer)
            return False

    def flush(self) -> None:
        """Try again for every peer with waiting messages."""
        for peer in list(self._boxes):
            box = self._boxes.get(peer)
            while box:
                done = self._try(peer, box[0])
                if not done:
                    break
                box.popleft()
            if box is not None and not box:
                self._boxes.pop(peer, None)

    def forget(self, peer: bytes) -> None:
        self._boxes.pop(peer, None)

    def close(self) -> None:
        self.socket.close(LINGER_MS)
