"""What of a model folder is about text: the tokenizer and the chat template."""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kd import structs
from kd.files import present

if TYPE_CHECKING:
    from kd.chat import ChatTemplate
    from kd.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextSide:
    """id: the same where texts become the same tokens, and not 0; 0 without a tokenizer."""

    tokenizer: Tokenizer | None = None
    chat: ChatTemplate | None = None
    id: int = 0
    token_bytes: tuple[bytes, list[int]] = field(default=(b"", []), repr=False)  # Tokenizer.token_bytes()


def read_text_side(folder: Path, follow_links: bool = False) -> TextSide:
    """Tokenizer and chat template of a folder; None where it has none. Raises KdError."""
    try:
        if not present(folder / "tiktoken.model"):
            return TextSide()  # of a folder that is none the library says what is wrong
    except OSError as error:
        raise structs.failure(
            "KD_E_IO",
            f"{folder}: the model folder cannot be read by user {os.geteuid()} ({error.strerror}): "
            "give that user access to it and to the folders above",
        ) from None
    from kd.chat import ChatError, ChatTemplate
    from kd.tokenizer import Tokenizer, TokenizerError

    try:
        tokenizer = Tokenizer.load(folder, follow_links=follow_links)
        chat = ChatTemplate.load(folder, tokenizer, follow_links=follow_links)
    except (TokenizerError, ChatError) as error:
        raise structs.failure("KD_E_MODEL", str(error)) from None
    blob, ends = tokenizer.token_bytes()
    names = json.dumps([tokenizer.special, chat.source if chat else None], sort_keys=True).encode()
    digest = hashlib.blake2b(digest_size=8)
    for part in (len(names).to_bytes(8, "little"), names, array("I", ends).tobytes(), blob):
        digest.update(part)
    return TextSide(tokenizer, chat, int.from_bytes(digest.digest(), "little") or 1, (blob, ends))
