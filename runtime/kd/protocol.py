"""How messages are written: three frames, two msgpack maps, decoded strictly. What they may say is in wire.py.

A message is three ZeroMQ frames: the tag b"KDP1", a msgpack map (the header: t, id) and a msgpack map (the body).
Everything that arrives is checked before anything else looks at it.
"""

from __future__ import annotations

import re
from typing import Any

from kd.wire import (
    ID_BYTES,
    MAX_ARRAY_ITEMS,
    MAX_BODY_BYTES,
    MAX_CONTAINERS,
    MAX_DEPTH,
    MAX_HEADER_BYTES,
    MAX_MAP_KEYS,
    REPLIES,
    REQUESTS,
    TAG,
    VERSION_MAX,
    VERSION_MIN,
    ProtocolError,
    check,
)


class _Strict:
    """Hooks of one decode: duplicate keys and too many containers end it before memory is spent."""

    def __init__(self) -> None:
        self.containers = 0

    def count(self) -> None:
        self.containers += 1
        if self.containers > MAX_CONTAINERS:
            raise ProtocolError("MALFORMED", f"a frame may hold at most {MAX_CONTAINERS} maps and arrays")

    def pairs(self, items: list[tuple[Any, Any]]) -> dict[str, Any]:
        self.count()
        out: dict[str, Any] = {}
        for key, value in items:
            if not isinstance(key, str):
                raise ProtocolError("MALFORMED", "map keys must be strings")
            if key in out:
                raise ProtocolError("MALFORMED", f"the key '{key[:40]}' stands twice in one map")
            out[key] = value
        return out

    def array(self, items: list[Any]) -> list[Any]:
        self.count()
        return items


_REASONS = {  # msgpack's own classes carry no words, or a value of the frame
    "StackError": "maps and arrays are nested too deep",
    "FormatError": "a byte begins no value",
    "ExtraData": "bytes follow after the end of the map",
    "OutOfData": "the frame ends too early",
}


def _reason(error: Exception) -> str:
    """msgpack's words in the protocol's."""
    said = str(error)
    if found := re.fullmatch(r"(\d+) exceeds max_(\w+)_len\((\d+)\)", said):
        size, kind, most = found.groups()
        return "it has an extension type" if kind == "ext" else f"{size} in one {kind}, where {most} is the most"
    if "strict_map_key" in said:
        return "a map's key is not str"
    return _REASONS.get(type(error).__name__) or said or type(error).__name__


def _no_ext(code: int, data: bytes) -> Any:
    raise ProtocolError("MALFORMED", "extension types are not part of the protocol")


def _check_depth(root: dict[str, Any]) -> None:
    level: list[Any] = [root]
    for _ in range(MAX_DEPTH):
        level = [v for c in level for v in (c.values() if isinstance(c, dict) else c) if isinstance(v, dict | list)]
        if not level:
            return
    raise ProtocolError("MALFORMED", f"maps and arrays may be nested at most {MAX_DEPTH} deep")


def decode_map(frame: bytes, limit: int) -> dict[str, Any]:
    """One msgpack map of at most `limit` bytes, strictly: no duplicates, extensions, trailing bytes or bombs."""
    import msgpack

    if len(frame) > limit:
        raise ProtocolError("TOO_LARGE", f"a frame of {len(frame)} bytes: the limit here is {limit}", limit=limit)
    strict = _Strict()
    try:
        value = msgpack.unpackb(
            frame,
            raw=False,
            strict_map_key=True,
            object_pairs_hook=strict.pairs,
            list_hook=strict.array,
            ext_hook=_no_ext,
            max_str_len=limit,
            max_bin_len=limit,
            max_array_len=MAX_ARRAY_ITEMS,
            max_map_len=MAX_MAP_KEYS,
            max_ext_len=0,
        )
    except ProtocolError:
        raise
    except Exception as error:  # msgpack raises ValueError, TypeError, its own classes and UnicodeDecodeError
        reason = _reason(error)
        raise ProtocolError("MALFORMED", f"not the msgpack allowed here: {reason}") from None
    if not isinstance(value, dict):
        raise ProtocolError("MALFORMED", "a header or body must be a msgpack map")
    _check_depth(value)
    return value


def encode(kind: str, ident: bytes, body: dict[str, Any]) -> list[bytes]:
    """The three frames of a message. Fields that are None are left out: absent and null are not the same."""
    import msgpack

    header = msgpack.packb({"t": kind, "id": ident}, use_bin_type=True)
    return [TAG, header, msgpack.packb({k: v for k, v in body.items() if v is not None}, use_bin_type=True)]


NO_ID = bytes(ID_BYTES)


def decode(frames: list[bytes], socket: str, limit: int = 0) -> tuple[str, bytes, dict[str, Any]]:
    """(type, id, checked body) of a message that arrived on `socket`: "serve", "control" or, at a client, "reply".

    limit: bytes of the body; 0: the socket's default.
    ProtocolError carries `ident`, the id an answer should bear (zeros where none could be read)."""
    ident = NO_ID
    try:
        if not frames or frames[0] != TAG:
            first = frames[0][:8] if frames else b""
            if len(first) == 4 and first[:3] == TAG[:3] and first[3:].isdigit():
                raise ProtocolError(
                    "UNSUPPORTED_VERSION",
                    f"version {first[3:].decode()} is not spoken here, only {VERSION_MIN} to {VERSION_MAX}",
                    version_min=VERSION_MIN,
                    version_max=VERSION_MAX,
                )
            raise ProtocolError(
                "MALFORMED",
                "the first frame must be the four bytes KDP1: use a DEALER socket and send tag, header, body",
                version_min=VERSION_MIN,
                version_max=VERSION_MAX,
            )
        if len(frames) != 3:
            raise ProtocolError("MALFORMED", f"a message has three frames (tag, header, body), not {len(frames)}")
        header = decode_map(frames[1], MAX_HEADER_BYTES)
        given = header.get("id")
        if not isinstance(given, bytes) or len(given) != ID_BYTES:
            raise ProtocolError("MALFORMED", f"the header needs 'id', {ID_BYTES} bytes of binary")
        ident = given
        kind = header.get("t")
        if not isinstance(kind, str) or not 1 <= len(kind) <= 32:
            raise ProtocolError("MALFORMED", "the header needs 't', a string of 1 to 32 characters")
        body = decode_map(frames[2], limit or MAX_BODY_BYTES[socket])
        if socket == "reply":
            fields = REPLIES.get(kind)
        else:
            fields = REQUESTS[socket].get(kind)
            if fields is None and any(kind in table for table in REQUESTS.values()):
                other = "control" if socket == "serve" else "serve"
                raise ProtocolError("WRONG_SOCKET", f"{kind} belongs on the {other} socket")
        if fields is None:
            raise ProtocolError("UNKNOWN_TYPE", f"the message type '{kind}' is not known here")
        if kind == "GENERATE" and ident == NO_ID:  # BEATs bear it
            raise ProtocolError("MALFORMED", f"an id of zeros is reserved: choose {ID_BYTES} random bytes")
        checked = check(fields, body)
        if kind == "GENERATE" and sum(checked[k] is not None for k in ("prompt", "messages", "tokens")) != 1:
            raise ProtocolError("BAD_FIELD", "GENERATE needs exactly one of 'prompt', 'messages' and 'tokens'")
        if kind == "TOKENIZE" and (checked["text"] is None) == (checked["messages"] is None):
            raise ProtocolError("BAD_FIELD", "TOKENIZE needs exactly one of 'text' and 'messages'")
        if kind == "CANCEL" and (checked["request"] is None) == (not checked["all"]):
            raise ProtocolError("BAD_FIELD", "CANCEL needs either 'request' or 'all': true")
        return kind, ident, checked
    except ProtocolError as error:
        error.ident = ident
        raise
