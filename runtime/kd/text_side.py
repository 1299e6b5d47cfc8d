"""What of a model folder is about text: the tokenizer and the chat template."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from kd import structs
from kd.files import present

if TYPE_CHECKING:
    from kd.chat import ChatTemplate
    from kd.tokenizer import Tokenizer


def read_text_side(folder: Path, follow_links: bool = False) -> tuple[Tokenizer | None, ChatTemplate | None]:
    """Tokenizer and chat template of a folder; None where it has none. Raises KdError."""
    try:
        if not present(folder / "tiktoken.model"):
            return None, None  # of a folder that is none the library says what is wrong
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
        return tokenizer, ChatTemplate.load(folder, tokenizer, follow_links=follow_links)
    except (TokenizerError, ChatError) as error:
        raise structs.failure("KD_E_MODEL", str(error)) from None
