"""The verbs both sockets answer: HELLO, PING, STATUS, TOKENIZE, DETOKENIZE, BUILDERS."""

from __future__ import annotations

import dataclasses
import os
import time
from typing import TYPE_CHECKING, Any

from kd import wire
from kd.loading import Source
from kd.wire import ProtocolError

if TYPE_CHECKING:
    from kd.server import Daemon
    from kd.sessions import Session

Reply = tuple[str, dict[str, Any]]


def wire_error(error: Exception) -> ProtocolError:
    """Whatever was raised, as an error of the protocol. KdError carries its kd_status."""
    if isinstance(error, ProtocolError):
        return error
    code = getattr(error, "code", None)
    if isinstance(code, int):
        name = wire.error_of_status(code)
        extra = {"retry_ms": 1000} if name == "BUSY" else {}
        return ProtocolError(name, getattr(error, "message", str(error)), **extra)
    return ProtocolError("INTERNAL", f"{type(error).__name__}: {error}")


def plain(value: Any) -> Any:
    """A dataclass or namespace of the engine as a map the wire carries; numbers beyond 2^53 as hex strings."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    elif hasattr(value, "__dict__"):
        value = vars(value)
    out = {}
    for key, item in value.items():
        if isinstance(item, tuple | list):
            item = list(item)
        elif isinstance(item, int) and not -wire.MAX_INT <= item <= wire.MAX_INT:
            item = f"{item:016x}"
        out[key] = item
    for key in ("content_hash", "target_hash"):
        if isinstance(out.get(key), int):
            out[key] = f"{out[key]:016x}"
    return out


def model_of(daemon: Daemon) -> dict[str, Any] | None:
    engine = daemon.engine
    if engine is None or daemon.model_path is None:
        return None
    try:
        info = plain(engine.info)
    except Exception:
        return None  # unloaded in between
    # While a replacement waits for the last requests of the model before, new ones are already its own.
    source = daemon.loader.sources.get(info["weights_generation"]) or Source(daemon.model_path, "auto", False)
    side = engine.text_side()
    info.pop("text_id", None)  # the daemon's own affair
    return {
        **source._asdict(),
        "name": os.path.basename(source.path.rstrip("/")),
        "tokenizer": side.tokenizer is not None,
        "chat": side.chat is not None,
        **info,
    }


def hello(daemon: Daemon, socket: str) -> Reply:
    server = daemon.config.server
    limits = {
        "body_bytes": daemon.body_limit(socket),
        "header_bytes": wire.MAX_HEADER_BYTES,
        "credit": wire.MAX_CREDIT,
        "requests": server.max_requests_client,
        "lease_ms": server.client_timeout_ms,
        "stop_strings": wire.MAX_STOP_STRINGS,
        "slow_reader_ms": daemon.config.engine.slow_reader_timeout_ms or 30_000,
    }
    return "WELCOME", {
        "version_min": wire.VERSION_MIN,
        "version_max": wire.VERSION_MAX,
        "daemon": daemon.version,
        "boot": daemon.boot,
        "abi": daemon.abi,
        "pid": os.getpid(),
        "instance": server.instance,
        "socket": socket,
        "state": daemon.state.name,
        "limits": limits,
        "model": model_of(daemon),
    }


def ping(daemon: Daemon) -> Reply:
    stats = daemon.fresh_stats() or {}
    return "PONG", {
        "turns": stats.get("turns", 0),
        "turn_age_us": daemon.watch.age_us,
        "state": daemon.state.name,
        "live": daemon.live,
        "ready": daemon.ready,
        "streams": stats.get("streams", 0),
        "waiting": stats.get("waiting", 0),
    }


def status(daemon: Daemon) -> Reply:
    state = daemon.state
    about = {
        "version": daemon.version,
        "abi": daemon.abi,
        "protocol": wire.VERSION_MAX,
        "pid": os.getpid(),
        "instance": daemon.config.server.instance,
        "uptime_ms": int((time.monotonic() - daemon.started_at) * 1000),
        "open_requests": daemon.hub.active,
        "clients": len(daemon.hub.clients),
        "log_dropped": daemon.log.dropped,
        "device": daemon.config.engine.device,
        "tp": daemon.config.engine.tp,
        "library": daemon.library,
        "builder_told": dict(zip(("builder", "budget"), daemon.wanted_builder, strict=True))
        if daemon.builder_told
        else None,
        "builder_choice": daemon.loader.choice and daemon.loader.choice.as_dict(),
        **daemon.endpoints,
    }
    return "STATUS", {
        "state": state.name,
        "live": daemon.live,
        "ready": daemon.ready,
        "started": state.started,
        "reason": state.reason or None,
        "daemon": about,
        "model": model_of(daemon),
        "load": daemon.loader.progress(),
        "stats": daemon.fresh_stats(),
        "timings": state.timings(),
    }


def text_side_of(daemon: Daemon, chat: bool) -> Any:
    """kd.text_side.TextSide of the model, with a tokenizer or, for a chat, a template in it. Raises ProtocolError."""
    nothing = ProtocolError("NOT_READY", "no model is loaded", retry_ms=1000)
    engine = daemon.engine
    if engine is None or daemon.model_path is None:
        raise nothing
    side = engine.text_side()
    if (side.chat if chat else side.tokenizer) is None:
        if daemon.model_path is None:  # unloaded in between
            raise nothing
        what = "chat template" if chat else "tiktoken.model"
        raise ProtocolError("NO_TOKENIZER", f"the model folder has no {what}: send token ids")
    return side


def encode(
    daemon: Daemon, text: str | None, messages: list[dict] | None, thinking: bool | None
) -> tuple[list[int], int]:
    """Token ids of a prompt or of a chat, and TextSide.id. Slow for long texts: never on the serve thread."""
    side = text_side_of(daemon, messages is not None)
    try:
        if messages is not None:
            return list(side.chat.render(messages, thinking=thinking)), side.id
        return list(side.tokenizer.encode(text)), side.id
    except Exception as error:
        if hasattr(error, "code"):
            raise
        raise ProtocolError("BAD_FIELD", f"the text could not be encoded: {error}") from error


def tokenize(daemon: Daemon, body: dict[str, Any]) -> Reply:
    tokens, _ = encode(daemon, body["text"], body["messages"], body["thinking"])
    return "TOKENS", {"tokens": wire.pack_ids(tokens)}


def detokenize(daemon: Daemon, body: dict[str, Any]) -> Reply:
    tool = text_side_of(daemon, False).tokenizer
    size = tool.n_vocab
    for token in body["tokens"]:
        if token >= size:
            raise ProtocolError("TOKEN", f"token id {token} is outside the vocabulary of {size}")
    reply = text_fields(tool.decode_bytes(body["tokens"]))
    sizes = len(reply["text"].encode()), len(reply["raw"] or b"")
    if max(sizes) > wire.MAX_TEXT_BYTES or sum(sizes) > wire.MAX_BODY_BYTES["reply"] - 4096:  # the rest of the message
        raise ProtocolError("TOO_LARGE", f"the text has {sizes[0]} bytes, more than a reply holds: send fewer tokens")
    return "TEXT", reply


def text_fields(raw: bytes) -> dict[str, Any]:
    """`text`, and `raw` where the bytes are not valid UTF-8."""
    text = raw.decode("utf-8", "replace")
    return {"text": text, "raw": raw if text.encode() != raw else None}


def builders(daemon: Daemon) -> Reply:
    if daemon.engine is None:
        raise ProtocolError("NOT_READY", "the engine is not open yet", retry_ms=500)
    return "BUILDERS", {"builders": [plain(b) if not isinstance(b, dict) else b for b in daemon.engine.builders()]}


def rows_of(sessions: list[Session]) -> Reply:
    """A REQUESTS body: as many rows as a message may hold."""
    most = wire.MAX_ARRAY_ITEMS
    return "REQUESTS", {"requests": [s.row() for s in sessions[:most]], "more": max(0, len(sessions) - most)}


def common(daemon: Daemon, socket: str, kind: str, body: dict[str, Any]) -> Reply | None:
    """Answer a verb both sockets share, or None."""
    if kind == "HELLO":
        return hello(daemon, socket)
    if kind == "PING":
        return ping(daemon)
    if kind == "STATUS":
        return status(daemon)
    if kind == "BUILDERS":
        return builders(daemon)
    if kind == "TOKENIZE":
        return tokenize(daemon, body)
    if kind == "DETOKENIZE":
        return detokenize(daemon, body)
    return None
