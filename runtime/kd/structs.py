"""Python values to the structs of kd.h and back. What does not fit a field is KD_E_INVALID, said here."""

from __future__ import annotations

import array
import operator
import os
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kd.native import KdError, constants, ffi, status_names
from kd.values import Event, ModelInfo, RequestOptions, Sampling

if TYPE_CHECKING:
    from kd.text_side import TextSide

CODES = {name: code for code, name in status_names.items()}
TPS = (1, 2, 4, 8)  # ranks; the library takes 0 for 1 as well, which in a caller's hands is a mistake
EVENT_BYTES = ffi.sizeof("kd_event")


def _words(prefix: str, *names: str) -> dict[int, str]:
    return {constants[prefix + name.upper()]: name for name in names}


EVENT_TYPES = _words("KD_EVENT_", "tokens", "end", "load", "fatal")
FINISH: dict[int, str | None] = {0: None, **_words("KD_FINISH_", "stop", "length", "cancelled", "error")}
PHASES = _words("KD_LOAD_", "open", "read", "prepare", "warm", "swap", "done", "write")
STATES = _words("KD_STATE_", "empty", "loading", "ready", "draining", "fatal")
ISAS = {name: code for code, name in _words("KD_ISA_", "auto", "plain", "avx2", "avx512").items()}

HASH_LOGITS, LOGPROBS = constants["KD_REQUEST_HASH_LOGITS"], constants["KD_REQUEST_LOGPROBS"]
COLD, IGNORE_EOS = constants["KD_REQUEST_COLD"], constants["KD_REQUEST_IGNORE_EOS"]
OWN_BUILDER = constants["KD_REQUEST_OWN_BUILDER"]


def failure(name: str, message: str) -> KdError:
    """A KdError made on this side, e.g. failure("KD_E_STATE", "...")."""
    return KdError(CODES[name], name, message)


def invalid(message: str) -> KdError:
    return failure("KD_E_INVALID", message)


def new(name: str) -> Any:
    """A zeroed struct with its size set."""
    struct = ffi.new(f"{name} *")
    struct.size = ffi.sizeof(name)
    return struct


def put(struct: Any, **values: Any) -> None:
    """Set fields of a struct to numbers; a bool is none, though Python takes it for 0 or 1."""
    for name, value in values.items():
        try:
            if isinstance(value, bool):
                raise TypeError
            setattr(struct, name, value)
        except (OverflowError, TypeError):
            kind = dict(ffi.typeof(struct).item.fields)[name].type.cname
            raise invalid(f"{name} is {value!r:.60}; it must fit a {kind}") from None


def integer(name: str, value: Any, low: int, high: int) -> int:
    """`value`, an int in low <= value < high."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or not low <= operator.index(value) < high:
        raise invalid(f"{name} is {value!r:.60}; it must be an integer from {low} to {high - 1}")
    return operator.index(value)


def flag(name: str, value: Any) -> bool:
    """`value`, True or False, also as 1 or 0."""
    if value not in (0, 1):
        raise invalid(f"{name} is {value!r:.60}; it must be True or False")
    return bool(value)


def request_id(value: Any) -> int:
    return integer("id", value, 0, 1 << 64)


def token_ids(name: str, values: Sequence[int]) -> array.array:
    """As int32; KD_E_INVALID for what is no list of integers, KD_E_TOKEN for one that cannot be an id."""
    if isinstance(values, (str, bytes)):
        raise invalid(f"{name} is text; give token ids")
    try:
        return array.array("i", map(operator.index, values))
    except TypeError:
        raise invalid(f"{name} must be a list of token ids") from None
    except OverflowError:
        raise failure("KD_E_TOKEN", f"{name} holds a number that is no token id") from None


def pointer(values: array.array) -> Any:
    """int32_t[] over the array's own memory; the array must outlive it."""
    return ffi.from_buffer("int32_t[]", values)


def text(value: str) -> bytes:
    """For a const char * argument."""
    if not isinstance(value, str):
        raise invalid(f"a name is {value!r:.60}; give text")
    raw = value.encode()
    if b"\0" in raw:
        raise invalid("a name holds a zero character")
    return raw


def path(value: str | Path) -> bytes:
    """For a const char * argument."""
    raw = os.fsencode(value)
    if b"\0" in raw:
        raise invalid("a path holds a zero character")
    return raw


# ---- in: (struct, what must be kept alive during the call) ------------------------------------------------------------


def options(
    *,
    tp: int,
    isa: str,
    prefix_cache: bool,
    share_devices: bool,
    record: str | Path | None = None,
    **values: int,
) -> tuple[Any, list[Any]]:
    """kd_options."""
    if isinstance(tp, bool) or tp not in TPS:
        raise invalid(f"tp is {tp!r:.60}; it must be one of {', '.join(map(str, TPS))}")
    if not isinstance(isa, str) or isa not in ISAS:
        raise invalid(f"isa is {isa!r:.60}; it must be one of {', '.join(ISAS)}")
    struct = new("kd_options")
    put(struct, tp=tp, isa=ISAS[isa], **values)
    struct.prefix_cache = not flag("prefix_cache", prefix_cache)
    struct.share_devices = flag("share_devices", share_devices)
    keep: list[Any] = []
    if record is not None:
        keep.append(ffi.new("char[]", path(record)))
        struct.record_path = keep[-1]
    return struct, keep


def load_options(
    draft: str | Path, side: TextSide | None, replace: bool = False, follow_links: bool = False, hold: bool = False
) -> tuple[Any, list[Any]]:
    """kd_load_options."""
    struct = new("kd_load_options")
    struct.flags = constants["KD_LOAD_REPLACE"] * replace | constants["KD_LOAD_FOLLOW_LINKS"] * follow_links
    struct.flags |= constants["KD_LOAD_HOLD"] * hold
    keep: list[Any] = []
    if draft == "none":
        struct.draft = 1
    elif draft != "auto":
        struct.draft = 2
        keep.append(ffi.new("char[]", path(draft)))
        struct.draft_path = keep[-1]
    struct.text_id = side.id if side else 0
    if side and side.tokenizer is not None:
        blob, ends = side.token_bytes
        keep += [ffi.new("uint8_t[]", blob or b"\0"), ffi.new("uint32_t[]", ends)]
        struct.token_bytes, struct.token_ends, struct.n_tokens = keep[-2], keep[-1], len(ends)
    return struct, keep


def request(tokens: Sequence[int], o: RequestOptions) -> tuple[Any, list[Any]]:
    """kd_request."""
    sampling = Sampling() if o.sampling is None else o.sampling
    if not isinstance(sampling, Sampling):
        raise invalid(f"sampling is {sampling!r:.60}; give a kd.Sampling")
    prompt, stops = token_ids("tokens", tokens), token_ids("stop_ids", o.stop_ids)
    keep: list[Any] = [prompt, stops]
    struct = new("kd_request")
    struct.tokens, struct.n_tokens = pointer(prompt), len(prompt)
    put(struct, max_tokens=o.max_tokens, credit=o.credit, user=o.user, budget=o.budget, text_id=o.text_id)
    for name in ("temperature", "top_p", "min_p", "top_k", "seed", "choice"):
        put(struct, **{name: getattr(sampling, name)})
    flags = HASH_LOGITS * flag("hash_logits", o.hash_logits) | LOGPROBS * flag("logprobs", o.logprobs)
    flags |= COLD * flag("cold", o.cold) | IGNORE_EOS * flag("ignore_eos", o.ignore_eos)
    flags |= OWN_BUILDER * (o.builder is not None)
    struct.flags = flags
    if stops:
        struct.stop_ids, struct.n_stop_ids = pointer(stops), len(stops)
    if isinstance(o.stop_strings, (str, bytes)) or not isinstance(o.stop_strings, Sequence):
        raise invalid(f"stop_strings is {o.stop_strings!r:.60}; give a list of texts")
    if o.stop_strings:
        if wrong := [stop for stop in o.stop_strings if not isinstance(stop, (str, bytes))]:
            raise invalid(f"stop_strings holds {wrong[0]!r:.60}; give texts")
        entries = ffi.new("kd_stop_string[]", len(o.stop_strings))
        for entry, stop in zip(entries, o.stop_strings, strict=True):
            raw = stop.encode() if isinstance(stop, str) else stop
            keep.append(ffi.new("char[]", raw + b"\0"))
            entry.bytes, entry.length = keep[-1], len(raw)
        struct.stop_strings, struct.n_stop_strings = entries, len(o.stop_strings)
        keep.append(entries)
    if o.builder is not None:
        keep.append(ffi.new("char[]", text(o.builder)))
        struct.builder = keep[-1]
    elif o.budget:
        raise invalid(f"budget = {o.budget} without a builder; name one, or call use_builder")
    return struct, keep


# ---- out ---------------------------------------------------------------------------------------------------------------


def event(e: Any, flags: int) -> Event:
    """From a kd_event; its text is copied. flags: the request's, they say which arrays mean something."""
    n = e.n_tokens
    return Event(
        type=EVENT_TYPES.get(e.type, str(e.type)),
        id=e.id,
        user=e.user,
        sequence=e.sequence,
        status=e.status,
        finish=FINISH.get(e.finish, str(e.finish)),
        tokens=tuple(e.tokens[0:n]),
        hashes=tuple(e.hashes[0:n]) if flags & HASH_LOGITS else (),
        logprobs=tuple(e.logprobs[0:n]) if flags & LOGPROBS else (),
        text=bytes(ffi.buffer(e.text, e.text_length)) if e.text_length else b"",
        nodes=e.nodes,
        builder_generation=e.builder_generation,
        weights_generation=e.weights_generation,
        total_tokens=e.total_tokens,
        cached_tokens=e.cached_tokens,
    )


def model_info(struct: Any) -> ModelInfo:
    values = {f.name: getattr(struct, f.name) for f in fields(ModelInfo) if f.name != "stop_ids"}
    return ModelInfo(stop_ids=tuple(struct.stop_ids[0 : struct.n_stop_ids]), **values)


def progress(struct: Any) -> dict[str, Any]:
    return {
        "phase": PHASES.get(struct.phase, str(struct.phase)),
        "bytes_done": struct.bytes_done,
        "bytes_total": struct.bytes_total,
        "elapsed_us": struct.elapsed_us,
        "phases": {name: struct.phase_us[i] for i, name in PHASES.items() if struct.phase_us[i]},
    }


def stats(struct: Any) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, _ in ffi.typeof("kd_stats").fields:
        if name != "size" and not name.startswith("reserved"):
            values[name] = getattr(struct, name)
    values["builder"] = ffi.string(struct.builder).decode()
    values["state"] = STATES.get(struct.state, str(struct.state))
    return values


def builder_info(struct: Any) -> dict[str, Any]:
    return {
        "name": ffi.string(struct.name).decode(),
        "description": ffi.string(struct.description).decode(),
        "in_force": bool(struct.in_force),
        "budget": struct.budget,
        "streams": struct.streams,
    }
