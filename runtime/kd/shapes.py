"""JSON that others wrote, read key by key: what stands where something else should is said in one sentence of JSON's words."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

MAX_SHOWN_CHARS = 60
_SURROGATE = re.compile("[\ud800-\udfff]")


class BadJson(ValueError):
    """Which key holds what, and what should stand there; the file is for the caller to name."""


def printable(text: str) -> str:
    """As it can be shown anywhere: no control characters and no surrogates, at most MAX_SHOWN_CHARS."""
    shown = "".join(c if c.isprintable() else "?" for c in text[: MAX_SHOWN_CHARS + 1])
    return shown if len(shown) <= MAX_SHOWN_CHARS else shown[: MAX_SHOWN_CHARS - 3] + "..."


def spelled(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{printable(value)}"'
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return "an object" if isinstance(value, dict) else printable(str(value))


def is_file_name(text: str) -> bool:
    """Of a file in the same folder, and one that a system call takes."""
    plain = re.fullmatch(r"[^/\\\x00-\x1f\x7f\ud800-\udfff]+", text) and text not in (".", "..")
    return bool(plain) and len(text.encode()) <= 255


class Json:
    """A value and its place. Its methods raise BadJson where something else stands than they name."""

    __slots__ = ("_key", "_parent", "value")

    def __init__(self, value: Any, parent: Json | None = None, key: str | int = ""):
        self.value, self._parent, self._key = value, parent, key

    @classmethod
    def parse(cls, raw: bytes) -> Json:
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            raise BadJson(f"it is no JSON: byte {error.start} is no UTF-8") from None
        try:
            return cls(json.loads(text.removeprefix("\ufeff"), object_pairs_hook=_unique, parse_constant=_constant))
        except json.JSONDecodeError as error:
            what = error.msg[:1].lower() + error.msg[1:]
            raise BadJson(f"it is no JSON: {what}, line {error.lineno}, column {error.colno}") from None
        except RecursionError:
            raise BadJson("it is no JSON that can be read: lists or objects are nested too deeply") from None
        except BadJson:
            raise
        except ValueError:  # Python's limit, told in Python's words
            raise BadJson("it is no JSON that can be read: a number has thousands of digits") from None

    @property
    def place(self) -> str:
        if self._parent is None:
            return "the file"
        before = self._parent.place if self._parent._parent is not None else ""
        if isinstance(self._key, int):
            return f"{before}[{self._key}]"
        return f"{before}{'.' * bool(before)}{printable(self._key) or chr(34) * 2}"

    def wrong(self, expected: str) -> BadJson:
        return BadJson(f"{self.place} is {spelled(self.value)}, {expected} should stand there")

    def get(self, key: str) -> Json | None:
        """None: no such key, or null."""
        found = self.object().get(key)
        return None if found is None else Json(found, self, key)

    def need(self, key: str) -> Json:
        if key not in self.object():
            raise BadJson(f"{Json(None, self, key).place} is missing")
        return Json(self.value[key], self, key)

    def object(self) -> dict[str, Any]:
        if not isinstance(self.value, dict):
            raise self.wrong("an object")
        return self.value

    def members(self) -> Iterator[tuple[str, Json]]:
        for key, value in self.object().items():
            yield key, Json(value, self, key)

    def elements(self) -> list[Json]:
        if not isinstance(self.value, list):
            raise self.wrong("a list")
        return [Json(value, self, i) for i, value in enumerate(self.value)]

    def pair(self) -> list[Json]:
        if not isinstance(self.value, list) or len(self.value) != 2:
            raise self.wrong("a list of 2")
        return self.elements()

    def text(self) -> str:
        if not isinstance(self.value, str):
            raise self.wrong("a string")
        if _SURROGATE.search(self.value):
            raise self.wrong("Unicode text")
        return self.value

    def integer(self, least: int, most: int) -> int:
        if type(self.value) is not int or not least <= self.value <= most:
            raise self.wrong(f"an integer from {least} to {most}")
        return self.value

    def hex(self, digits: int) -> str:
        if not isinstance(self.value, str) or not re.fullmatch(f"[0-9a-f]{{{digits}}}", self.value):
            raise self.wrong(f"a string of {digits} hexadecimal digits")
        return self.value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if _SURROGATE.search(key):
            raise BadJson(f'the key "{printable(key)}" holds half a surrogate pair, which no Unicode text does')
        if key in found:
            raise BadJson(f'the key "{printable(key)}" appears twice')
        found[key] = value
    return found


def _constant(text: str) -> Any:
    raise BadJson(f"it is no JSON: {text} is no number there")
