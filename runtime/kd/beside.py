"""The small files beside a model's weights, each looked at by itself: whether it is there, and whether it can be used."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from kd.chat import ChatError, ChatTemplate
from kd.files import present, read_bounded, why
from kd.golden import GOLDEN, Golden, GoldenError
from kd.hashing import HASHES, read_hashes
from kd.headers import MAX_INDEX_BYTES
from kd.shapes import BadJson, Json
from kd.tokenizer import Tokenizer, TokenizerError, added_tokens, read_ranks, read_special

VOCABULARY, TOKENIZER, CHAT = TEXT_FILES = ("tiktoken.model", "tokenizer_config.json", "chat_template.jinja")


class Unusable(Exception):
    """Why, and what to do; the file's name goes before it."""


def look_beside(
    folder: str | Path, vocab: int, positions: int, follow_links: bool = False
) -> dict[str, dict[str, Any]]:
    """file -> {"present", "usable", "about"} of golden.json, kd-hashes.json and the files of text, by what a load would say of
    them. No weights are compared. usable: None of what is not there. vocab, positions: of the model."""
    folder = Path(folder)

    def golden() -> str:
        found = Golden.read(folder, follow_links)
        assert found is not None
        if unfit := found.unfit(vocab, positions):
            raise Unusable(unfit)
        for name, what in found.other_files(follow_links):
            raise Unusable(f"names {name}, which {what}")
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

    @cache
    def ranks() -> dict[bytes, int]:
        return read_ranks(folder / VOCABULARY, follow_links)

    def needs(name: str, instead: str = "") -> None:
        if not present(folder / name):
            raise Unusable(f"is of no use without {name}, which is missing: fetch that again{instead}")

    def special() -> dict[str, int]:
        try:
            ordinary = len(ranks())
        except TokenizerError:  # told of that file
            ordinary = 0
        return read_special(folder / TOKENIZER, ordinary, follow_links)

    def vocabulary() -> str:
        needs(TOKENIZER)
        return f"{_number(len(ranks()), 'token')} of text"

    def tokenizer() -> str:
        needs(VOCABULARY, ", or send token ids")
        special()
        if not present(folder / CHAT):
            chat()  # may stand in here
        return _number(len(added_tokens(folder / TOKENIZER, follow_links)), "special token")

    def chat() -> str:
        needs(VOCABULARY, ", or send token ids")
        try:
            found = Tokenizer(ranks(), special())
        except TokenizerError:
            return "not looked at, for want of a tokenizer"
        ChatTemplate.load(folder, found, follow_links=follow_links)
        return "a chat template"

    return {
        GOLDEN: _told(folder / GOLDEN, golden),
        HASHES: _told(folder / HASHES, hashes),
        VOCABULARY: _told(folder / VOCABULARY, vocabulary),
        TOKENIZER: _told(folder / TOKENIZER, tokenizer),
        CHAT: _told(folder / CHAT, chat),
    }


def _number(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"


def _told(path: Path, look: Callable[[], str]) -> dict[str, Any]:
    try:
        if not present(path):
            return {"present": False, "usable": None, "about": "none"}
        return {"present": True, "usable": True, "about": look()}
    except (Unusable, GoldenError, TokenizerError, ChatError) as error:
        about = re.sub(r"^:(?=\d)", "line ", str(error).removeprefix(str(path))).lstrip(": ")
    except (OSError, BadJson) as error:
        about = f"cannot be used ({why(error)}): fetch it again or remove it"
    return {"present": True, "usable": False, "about": about}
