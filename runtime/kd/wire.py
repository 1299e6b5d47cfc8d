"""What may be said on the wire: limits, errors, the fields of every message, numbers. docs/protocol.md is the authority.

Nothing here needs the native library or numpy, so the command line starts fast.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

TAG = b"KDP1"
VERSION_MIN = 1
VERSION_MAX = 1

# ---- limits ----

MAX_HEADER_BYTES = 1024
MAX_BODY_BYTES = {"serve": 8 << 20, "control": 64 << 10, "reply": 16 << 20}
MAX_FRAME_BYTES = 32 << 20  # the transport drops the connection beyond this, without an answer
MAX_MAP_KEYS = 64
MAX_ARRAY_ITEMS = 1024
MAX_CONTAINERS = 2048  # maps and arrays of one frame together
MAX_DEPTH = 8
MAX_INT = 2**53 - 1  # what every language's number type holds exactly
ID_BYTES = 16
MAX_CREDIT = 4096  # frames a request may be ahead of its reader
DEFAULT_CREDIT = 256
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 256
MAX_STOP_IDS = 16
MAX_DETOKENIZE = 65_536  # ids of one DETOKENIZE
MAX_TEXT_BYTES = 8 << 20

# ---- errors ----

# Numbers are never changed or reused; new ones are appended.
ERRORS = {
    "MALFORMED": 1,
    "UNSUPPORTED_VERSION": 2,
    "UNKNOWN_TYPE": 3,
    "BAD_FIELD": 4,
    "TOO_LARGE": 5,
    "WRONG_SOCKET": 6,
    "NOT_READY": 10,
    "DRAINING": 11,
    "BUSY": 12,
    "NOT_FOUND": 13,
    "ALREADY_DONE": 14,
    "CONFLICT": 15,
    "TIMEOUT": 16,
    "CANCELLED": 17,
    "LEASE_EXPIRED": 18,
    "STATE": 19,
    "CONTEXT": 20,
    "TOKEN": 21,
    "SAMPLING": 22,
    "SLOW_READER": 23,
    "NO_TOKENIZER": 24,
    "NOMEM": 30,
    "IO": 31,
    "MODEL": 32,
    "DEVICE": 33,
    "BUILDER": 34,
    "FATAL": 40,
    "INTERNAL": 41,
}

# kd_status of include/kd.h -> error name on the wire.
STATUS_ERRORS = {
    -1: "BAD_FIELD",
    -2: "INTERNAL",
    -3: "INTERNAL",
    -4: "INTERNAL",
    -20: "STATE",
    -21: "NOT_FOUND",
    -22: "ALREADY_DONE",
    -23: "BUSY",
    -24: "DRAINING",
    -25: "TIMEOUT",
    -26: "CANCELLED",
    -27: "CONFLICT",
    -40: "CONTEXT",
    -41: "TOKEN",
    -42: "SAMPLING",
    -43: "SLOW_READER",
    -60: "NOMEM",
    -61: "IO",
    -62: "MODEL",
    -63: "DEVICE",
    -64: "BUILDER",
    -90: "FATAL",
}


class ProtocolError(Exception):
    """A message that breaks the protocol, or an ERROR to be sent. name: a key of ERRORS; extra: more body fields."""

    ident = bytes(16)  # of the message it answers

    def __init__(self, name: str, message: str, **extra: Any):
        super().__init__(message)
        self.name, self.code, self.message, self.extra = name, ERRORS[name], message, extra

    def body(self) -> dict[str, Any]:
        return {"code": self.code, "name": self.name, "message": self.message[:2000], **self.extra}


def error_of_status(status: int) -> str:
    """The error name for a kd_status; INTERNAL for a number this table does not have."""
    return STATUS_ERRORS.get(status, "INTERNAL")


# ---- numbers ----


def pack_ids(ids: Any) -> bytes:
    """Token ids as little-endian u32, back to back."""
    return struct.pack(f"<{len(ids)}I", *ids)


def unpack_ids(data: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(data) // 4}I", data))


def pack_u64(values: Any) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def unpack_u64(data: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(data) // 8}Q", data))


def pack_f32(values: Any) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def unpack_f32(data: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(data) // 4}f", data))


HASH_START = 0xCBF29CE484222325


def hash_ids(ids: Any, start: int = HASH_START) -> int:
    """FNV-1a, 64 bits, over the little-endian bytes of the ids: the running hash that FINAL repeats."""
    value = start
    for byte in pack_ids(ids):
        value = ((value ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return value


# ---- message fields ----


@dataclass(frozen=True)
class Field:
    """One field of a body. kind: int float bool str bin ids (bin of u32) strs ints bins messages map maps."""

    kind: str
    required: bool = False
    default: Any = None
    low: float = 0
    high: float = MAX_INT
    choices: tuple[str, ...] = ()
    setting: str = ""  # of the daemon, which may set a lower limit than `high`


def _id_field(required: bool = True) -> Field:
    return Field("bin", required, low=ID_BYTES, high=ID_BYTES)


_TEXT = Field("str", high=MAX_TEXT_BYTES)
_NAME = Field("str", low=1, high=31)
_MESSAGES = Field("messages", high=1024)
_BUDGET = Field("int", default=0, high=256, setting="engine.max_nodes")

GENERATE = {
    "prompt": _TEXT,
    "messages": _MESSAGES,
    "tokens": Field("ids", low=1, high=1 << 20),
    "thinking": Field("bool"),
    "max_tokens": Field("int", default=128, low=1, high=1 << 20),
    "temperature": Field("float", default=0.0, low=0, high=100),
    "top_p": Field("float", default=1.0, low=0, high=1),
    "min_p": Field("float", default=0.0, low=0, high=1),
    "top_k": Field("int", default=0, high=1 << 30),
    "seed": Field("int"),
    "choice": Field("int", default=0, high=(1 << 32) - 1),
    "stop": Field("strs", low=1, high=MAX_STOP_BYTES),
    "stop_ids": Field("ids", high=MAX_STOP_IDS),
    "credit": Field("int", default=DEFAULT_CREDIT, low=1, high=MAX_CREDIT),
    "hash_logits": Field("bool", default=False),
    "logprobs": Field("bool", default=False),
    "cold": Field("bool", default=False),
    "ignore_eos": Field("bool", default=False),
    "builder": _NAME,
    "budget": _BUDGET,
    "lease_ms": Field("int", low=1000, high=600_000),
    "deadline_ms": Field("int", default=0, high=86_400_000),
}

# What a client may send, by socket. A type that both sockets know means the same on both.
_BOTH: dict[str, dict[str, Field]] = {
    "HELLO": {"client": Field("str", default="", high=128)},
    "PING": {},
    "STATUS": {},
    "TOKENIZE": {"text": _TEXT, "messages": _MESSAGES, "thinking": Field("bool")},
    "DETOKENIZE": {"tokens": Field("ids", True, high=MAX_DETOKENIZE)},
    "BUILDERS": {},
}
REQUESTS: dict[str, dict[str, dict[str, Field]]] = {
    "serve": {
        **_BOTH,
        "GENERATE": GENERATE,
        "CREDIT": {"request": _id_field(), "frames": Field("int", True, low=1, high=MAX_CREDIT)},
        "CANCEL": {"request": _id_field(False), "all": Field("bool", default=False)},
        "PS": {},
    },
    "control": {
        **_BOTH,
        "CANCEL": {"request": _id_field(False), "all": Field("bool", default=False)},
        "PS": {},
        "LOAD": {
            "path": Field("str", True, low=1, high=4096),
            "draft": Field("str", default="auto", low=1, high=4096),
            "replace": Field("bool", default=False),
            "follow_links": Field("bool", default=False),
        },
        "LOAD_CANCEL": {"load": _id_field(False)},
        "UNLOAD": {},
        "USE_BUILDER": {
            "name": Field("str", True, low=1, high=31),
            "budget": _BUDGET,
            "request": _id_field(False),
        },
        "DRAIN": {"on": Field("bool", default=True)},
        "STOP": {
            "mode": Field("str", default="drain", choices=("drain", "now")),
            "deadline_ms": Field("int", default=0, high=3_600_000),
        },
    },
}

_ERROR = {
    "code": Field("int", True),
    "name": Field("str", True, high=64),
    "message": Field("str", True, high=8192),
    "retry_ms": Field("int"),
    "version_min": Field("int"),
    "version_max": Field("int"),
}
_CHUNK = {
    "seq": Field("int", True),
    "tokens": Field("ids", True, high=1024),
    "text": Field("str", True, high=1 << 20),
    "raw": Field("bin", high=1 << 20),
    "hashes": Field("bin", high=8192),
    "logprobs": Field("bin", high=4096),
    "nodes": Field("int", default=0),
    "builder_generation": Field("int", default=0),
    "weights_generation": Field("int", default=0),
}
# What a daemon may send.
REPLIES: dict[str, dict[str, Field]] = {
    "WELCOME": {
        "version_min": Field("int", True),
        "version_max": Field("int", True),
        "daemon": Field("str", True, high=64),
        "boot": Field("bin", True, low=16, high=16),
        "abi": Field("int", True),
        "pid": Field("int", True),
        "instance": Field("str", True, high=64),
        "socket": Field("str", True, high=16),
        "state": Field("str", True, high=16),
        "limits": Field("map", True),
        "model": Field("map"),
    },
    "PONG": {
        "turns": Field("int", True),
        "turn_age_us": Field("int", True),
        "state": Field("str", True, high=16),
        "live": Field("bool", True),
        "ready": Field("bool", True),
        "streams": Field("int", True),
        "waiting": Field("int", True),
    },
    "STATUS": {
        "state": Field("str", True, high=16),
        "live": Field("bool", True),
        "ready": Field("bool", True),
        "started": Field("bool", True),
        "reason": Field("str", high=8192),
        "daemon": Field("map", True),
        "model": Field("map"),
        "load": Field("map"),
        "stats": Field("map"),
        "timings": Field("map"),
    },
    "TOKENS": {"tokens": Field("ids", True, high=1 << 20)},
    "TEXT": {"text": Field("str", True, high=MAX_TEXT_BYTES), "raw": Field("bin", high=MAX_TEXT_BYTES)},
    "BUILDERS": {"builders": Field("maps", True)},
    "REQUESTS": {"requests": Field("maps", True), "more": Field("int", default=0)},
    "ACCEPTED": {
        "prompt_tokens": Field("int", True),
        "engine_id": Field("int", True),
        "seed": Field("int", True),
        "duplicate": Field("bool", default=False),
    },
    "PARTIAL": _CHUNK,
    "FINAL": {
        **_CHUNK,
        "finish": Field("str", True, choices=("stop", "length", "cancelled", "error")),
        "code": Field("int", default=0),
        "name": Field("str", high=64),
        "message": Field("str", high=8192),
        "prompt_tokens": Field("int", True),
        "cached_tokens": Field("int", True),
        "total_tokens": Field("int", True),
        "frames": Field("int", True),
        "token_hash": Field("bin", True, low=8, high=8),
        "rounds": Field("int", default=0),
        "total_nodes": Field("int", default=0),
        "accepted": Field("int", default=0),
        "first_token_us": Field("int", default=0),
        "total_us": Field("int", default=0),
    },
    "CANCELLED": {
        "result": Field("str", True, choices=("cancelled", "already_done", "not_found")),
        "count": Field("int", default=0),
    },
    "BEAT": {"turns": Field("int", default=0)},
    "PROGRESS": {
        "phase": Field("str", True, high=16),
        "bytes_done": Field("int", True),
        "bytes_total": Field("int", True),
        "elapsed_us": Field("int", True),
        "percent": Field("float", True, high=100),
        "rate_bytes_s": Field("int", default=0),
        "eta_ms": Field("int", default=None),
        "phases": Field("map", default=None),
        "under_way": Field("bool", default=None),
    },
    "DONE": {"freed_bytes": Field("int"), "generation": Field("int"), "model": Field("map"), "state": Field("str")},
    "ERROR": _ERROR,
}


def _fail(name: str, why: str) -> ProtocolError:
    return ProtocolError("BAD_FIELD", f"field '{name}' {why}", field=name)


def _bytes(field: Field) -> str:
    return str(field.low) if field.low == field.high else f"{field.low} to {int(field.high)}"


def _check_messages(name: str, value: Any) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise _fail(name, "must be a non-empty array of maps with 'role' and 'content'")
    out = []
    for i, item in enumerate(value):
        if not isinstance(item, dict):
            raise _fail(name, f"item {i} must be a map")
        clean = {}
        for key, need in (("role", True), ("content", True), ("name", False)):
            if key not in item and not need:
                continue
            part = item.get(key)
            if not isinstance(part, str):
                raise _fail(name, f"item {i}: '{key}' must be a string")
            if key != "content" and not 1 <= len(part) <= 64:
                raise _fail(name, f"item {i}: '{key}' must have 1 to 64 characters")
            clean[key] = part
        out.append(clean)
    return out


def _check_value(name: str, field: Field, value: Any) -> Any:
    kind = field.kind
    if kind == "bool":
        if not isinstance(value, bool):
            raise _fail(name, "must be a boolean")
    elif kind == "int":
        if isinstance(value, bool) or not isinstance(value, int):
            raise _fail(name, "must be an integer")
        if not field.low <= value <= field.high:
            which = f" and at most the daemon's {field.setting}" if field.setting else ""
            raise _fail(name, f"must be between {field.low} and {int(field.high)}{which}, not {value}")
    elif kind == "float":
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _fail(name, "must be a number")
        value = float(value)
        if not math.isfinite(value) or not field.low <= value <= field.high:
            raise _fail(name, f"must be a finite number between {field.low:g} and {field.high:g}")
    elif kind == "str":
        if not isinstance(value, str):
            raise _fail(name, "must be a string")
        size = len(value.encode()) if len(value) * 4 > field.high else len(value)
        if not field.low <= size <= field.high:
            raise _fail(name, f"must have {_bytes(field)} bytes")
        if field.choices and value not in field.choices:
            raise _fail(name, f"must be one of {', '.join(field.choices)}")
    elif kind == "bin":
        if not isinstance(value, bytes):
            raise _fail(name, "must be binary")
        if not field.low <= len(value) <= field.high:
            raise _fail(name, f"must have {_bytes(field)} bytes")
    elif kind == "ids":
        if not isinstance(value, bytes) or len(value) % 4:
            raise _fail(name, "must be binary, four bytes (little-endian unsigned) a token id")
        if not field.low <= len(value) // 4 <= field.high:
            raise _fail(name, f"must hold {field.low} to {int(field.high)} token ids")
        value = unpack_ids(value)
        if any(v >= 1 << 31 for v in value):
            raise _fail(name, "holds an id over 2147483647")
    elif kind == "strs":
        if not isinstance(value, list) or len(value) > MAX_STOP_STRINGS:
            raise _fail(name, f"must be an array of at most {MAX_STOP_STRINGS} strings")
        if not all(isinstance(v, str) and field.low <= len(v.encode()) <= field.high for v in value):
            raise _fail(name, f"must hold strings of {field.low} to {int(field.high)} bytes")
    elif kind == "messages":
        value = _check_messages(name, value)
    elif kind == "map":
        if not isinstance(value, dict):
            raise _fail(name, "must be a map")
    elif kind == "maps":
        if not isinstance(value, list) or not all(isinstance(v, dict) for v in value):
            raise _fail(name, "must be an array of maps")
    return value


def check(fields: dict[str, Field], body: dict[str, Any]) -> dict[str, Any]:
    """The known fields of `body`, checked, defaults filled in; unknown ones are dropped. Raises ProtocolError."""
    out: dict[str, Any] = {}
    for name, field in fields.items():
        if name in body:
            out[name] = _check_value(name, field, body[name])
        elif field.required:
            raise _fail(name, "is required")
        else:
            out[name] = field.default
    return out
