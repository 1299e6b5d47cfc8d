"""golden.json: what a model folder is to give, and what it is made of.

{"prompt_tokens": [ids], "tokens": [ids], "content_hash", "target_hash": 16 hex digits, "files": {name: sha256}}: what the prompt
gives greedily; and, where they are there, kd_model_info.content_hash and target_hash of the folder, and hashes of small files
beside the weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kd.files import present, read_bounded, why
from kd.shapes import BadJson, Json, is_file_name

GOLDEN = "golden.json"
MAX_GOLDEN_BYTES = 1 << 20
MAX_SIDE_FILE_BYTES = 64 << 20  # a tokenizer
MAX_ID = 2**31 - 1


class GoldenError(ValueError):
    """A golden.json that cannot be used. The message says why and what to do."""


@dataclass(frozen=True)
class Golden:
    path: Path
    prompt_tokens: list[int]
    tokens: list[int]
    content_hash: str | None
    target_hash: str | None
    files: dict[str, str]

    @classmethod
    def read(cls, folder: str | Path, follow_links: bool = False) -> Golden | None:
        """Of a model folder; None if it has none. Raises GoldenError."""
        path = Path(folder) / GOLDEN
        try:
            if not present(path):
                return None
            value = Json.parse(read_bounded(path, MAX_GOLDEN_BYTES, follow_links))
            prompt, tokens = (_ids(value.need(key)) for key in ("prompt_tokens", "tokens"))
            content, target = _hash(value.get("content_hash")), _hash(value.get("target_hash"))
            files = value.get("files")
            return cls(path, prompt, tokens, content, target, dict(map(_file, files.members())) if files else {})
        except (OSError, BadJson) as error:
            raise GoldenError(f"{path} cannot be used ({why(error)}): mend it or remove it") from None

    def unfit(self, vocab: int, positions: int) -> str | None:
        """Why a model of so many ids and positions cannot give it, or None."""
        for key, ids in (("prompt_tokens", self.prompt_tokens), ("tokens", self.tokens)):
            for at, id in enumerate(ids):
                if id >= vocab:
                    return (
                        f"{key}[{at}] is {id}, the model's ids are 0 .. {vocab - 1}: it is damaged or another model's, copy it "
                        "again"
                    )
        if len(self.prompt_tokens) + len(self.tokens) > positions:
            return (
                f"prompt_tokens and tokens are {len(self.prompt_tokens)} and {len(self.tokens)} ids, more than the model's "
                f"context of {positions}: it is damaged or another model's, copy it again"
            )
        return None

    def other_files(self, follow_links: bool = False) -> Iterator[tuple[str, str]]:
        """(name, what is wrong) of the files beside it that are not those it was made with."""
        for name, expected in self.files.items():
            place = self.path.parent / name
            try:
                found = hashlib.sha256(read_bounded(place, MAX_SIDE_FILE_BYTES, follow_links)).hexdigest()
            except OSError as error:
                yield place.name, f"cannot be read ({why(error)}), and golden.json names it"
                continue
            if found != expected:
                yield (
                    place.name,
                    "is not the file golden.json was made with (sha256): it is damaged or another, copy it again",
                )

    def other_weights(self, target: int, content: int | None) -> str | None:
        """Why the folder's weights are not its own, or None. content: with the folder's own drafter, None without it."""
        for name, found, expected in (
            ("target_hash", target, self.target_hash),
            ("content_hash", content, self.content_hash),
        ):
            if found is not None and expected is not None and f"{found:016x}" != expected:
                return (
                    f"config or tensors have the content hash {found:016x}, golden.json was made with {expected} ({name}): "
                    "the files are damaged or not those, copy the folder again"
                )
        return None


def _ids(value: Json) -> list[int]:
    ids = [one.integer(0, MAX_ID) for one in value.elements()]
    if not ids:
        raise value.wrong("a list of token ids")
    return ids


def _hash(value: Json | None) -> str | None:
    return value.hex(16) if value else None


def _file(member: tuple[str, Json]) -> tuple[str, str]:
    name, value = member
    if not is_file_name(name):
        raise BadJson(f"{value.place} is no name of a file beside it")
    return name, value.hex(64)
