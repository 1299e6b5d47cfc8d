"""What a request gives back: chunks while it runs, a Result at its end."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kd import wire

if TYPE_CHECKING:
    from kd.client import Client


class KdClientError(Exception):
    """name: an error name of docs/protocol.md, or NOT_RUNNING, PERMISSION, NO_ANSWER, LOST, BAD_ENDPOINT. body: the ERROR's."""

    def __init__(self, name: str, message: str, body: dict[str, Any] | None = None):
        super().__init__(message)
        self.name, self.message, self.body = name, message, body or {}


@dataclass(frozen=True)
class Chunk:
    """What one round gave: tokens and the text that became certain."""

    tokens: tuple[int, ...]
    text: str
    raw: bytes
    hashes: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    nodes: int = 0
    builder_generation: int = 0
    weights_generation: int = 0


@dataclass
class Result:
    """A whole request. finish: stop, length, cancelled or error; `error` names why for the last two."""

    text: str = ""
    raw: bytes = b""
    tokens: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str = ""
    error: str | None = None
    message: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    rounds: int = 0
    nodes: int = 0
    accepted: int = 0
    seed: int = 0
    request: str = ""
    first_token_s: float = 0.0
    seconds: float = 0.0

    def add(self, chunk: Chunk) -> None:
        self.text += chunk.text
        self.raw += chunk.raw
        self.tokens += chunk.tokens
        self.hashes += chunk.hashes
        self.logprobs += chunk.logprobs


class Stream:
    """The chunks of one request; `result` is complete when iteration has ended. Closing it early cancels it."""

    def __init__(self, client: Client, ident: bytes, credit: int, timeout_s: float):
        self._client, self.ident, self._window, self._timeout_s = client, ident, credit, timeout_s
        self._unpaid = 0  # frames received for which no credit was given back yet
        self._hash, self._frames, self._done = wire.HASH_START, 0, False
        self._text: list[Chunk] = []
        self.result = Result(request=ident.hex())
        self.accepted = False

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Chunk:
        try:
            while not self._done:
                chunk = self._step()
                if chunk is not None:
                    return chunk
        except BaseException:
            self.close()
            raise
        self.close()
        raise StopIteration

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter may be on its way out
            self.close()

    def close(self) -> None:
        """Cancel the request unless it has ended. Dropping the stream does the same."""
        if self._client._streams.pop(self.ident, None) is not None and not self._done:
            self._client._send("CANCEL", os.urandom(16), {"request": self.ident}, "serve", wait=False)
        self._done = True

    def read(self) -> Result:
        """The rest of the request at once."""
        for _ in self:
            pass
        return self.result

    def _step(self) -> Chunk | None:
        kind, body = self._client._next_of(self.ident, self._timeout_s)
        if kind == "ERROR":
            self._done = True
            raise KdClientError(body["name"], body["message"], body)
        if kind == "ACCEPTED":
            self.accepted = True
            self.result.seed, self.result.prompt_tokens = body["seed"], body["prompt_tokens"]
            return None
        if kind not in ("PARTIAL", "FINAL"):
            return None
        if body["seq"] != self._frames:
            raise KdClientError("LOST", f"frame {self._frames} of request {self.ident.hex()} is missing")
        self._frames += 1
        chunk = Chunk(
            tuple(body["tokens"]),
            body["text"],
            body["raw"] if body["raw"] is not None else body["text"].encode(),
            tuple(wire.unpack_u64(body["hashes"] or b"")),
            tuple(wire.unpack_f32(body["logprobs"] or b"")),
            body["nodes"],
            body["builder_generation"],
            body["weights_generation"],
        )
        self._hash = wire.hash_ids(chunk.tokens, self._hash)
        self.result.add(chunk)
        if kind == "FINAL":
            self._final(body)
            return chunk if chunk.tokens or chunk.text else None
        self._unpaid += 1
        if self._unpaid * 2 >= self._window:
            grant = {"request": self.ident, "frames": self._unpaid}
            if self._client._send("CREDIT", os.urandom(16), grant, "serve", wait=False):
                self._unpaid = 0
        return chunk

    def _final(self, body: dict[str, Any]) -> None:
        self._done = True
        r = self.result
        r.finish, r.error, r.message = body["finish"], body["name"], body["message"]
        r.prompt_tokens, r.cached_tokens, r.rounds = body["prompt_tokens"], body["cached_tokens"], body["rounds"]
        r.nodes, r.accepted = body["total_nodes"], body["accepted"]
        r.first_token_s, r.seconds = body["first_token_us"] / 1e6, body["total_us"] / 1e6
        if (len(r.tokens), self._frames, self._hash.to_bytes(8, "little")) != (
            body["total_tokens"],
            body["frames"],
            body["token_hash"],
        ):
            raise KdClientError("LOST", f"request {self.ident.hex()}: what arrived is not what its end says was sent")
