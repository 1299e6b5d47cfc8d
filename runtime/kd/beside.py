"""The small files beside a model's weights, each looked at by itself: whether it is there, and whether it can be used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kd.files import present, read_bounded, why
from kd.golden import GOLDEN, Golden, GoldenError
from kd.hashing import HASHES, read_hashes
from kd.headers import MAX_INDEX_BYTES
from kd.shapes import BadJson, Json

TOKENIZER = "tokenizer_config.json"


class Unusable(Exception):
    """Why, and what to do; the file's name goes before it."""


def look_beside(
    folder: str | Path, vocab: int, positions: int, follow_links: bool = False
) -> dict[str, dict[str, Any]]:
    """file -> {"present", "usable", "about"} of golden.json, kd-hashes.json and tokenizer_config.json. Nothing else is read, and
    no weights are compared. usable: None of what is not there. vocab, positions: of the model."""
    folder = Path(folder)

    def golden() -> str:
        try:
            found = Golden.read(folder, follow_links)
        except GoldenError as error:
            raise Unusable(str(error).removeprefix(f"{folder / GOLDEN} ")) from None
        assert found is not None
        if unfit := found.unfit(vocab, positions):
            raise Unusable(unfit)
        hashes = [key for key in ("content_hash", "target_hash") if getattr(found, key)]
        also = [*hashes, f"sha256 of {_number(len(found.files), 'file')}"] if found.files else hashes
        gives = f"{_number(len(found.prompt_tokens), 'token')} that give {len(found.tokens)}"
        return ", ".join([gives, *also])

    def hashes() -> str:
        files = read_hashes(Json.parse(read_bounded(folder / HASHES, MAX_INDEX_BYTES, follow_links)))
        for name in files:
            if not present(folder / name):
                raise Unusable(f"names {name}, which is missing: fetch that again, or write it again with --write")
        return f"hashes of {_number(len(files), 'file')}, for verify-checkpoint"

    def tokenizer() -> str:
        from kd.tokenizer import TokenizerError, added_tokens, read_special

        try:
            read_special(folder / TOKENIZER, 0, follow_links)
            special = added_tokens(folder / TOKENIZER, follow_links)
        except TokenizerError as error:
            raise Unusable(str(error).removeprefix(f"{folder / TOKENIZER}: ")) from None
        if not present(folder / "tiktoken.model"):
            raise Unusable("is of no use without tiktoken.model, which is missing: fetch that again, or send token ids")
        return f"{_number(len(special), 'special token')}"

    return {
        GOLDEN: _told(folder / GOLDEN, golden),
        HASHES: _told(folder / HASHES, hashes),
        TOKENIZER: _told(folder / TOKENIZER, tokenizer),
    }


def _number(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"


def _told(path: Path, look: Callable[[], str]) -> dict[str, Any]:
    try:
        if not present(path):
            return {"present": False, "usable": None, "about": "none"}
        return {"present": True, "usable": True, "about": look()}
    except Unusable as error:
        about = str(error)
    except (OSError, BadJson) as error:
        about = f"cannot be used ({why(error)}): fetch it again or remove it"
    return {"present": True, "usable": False, "about": about}
