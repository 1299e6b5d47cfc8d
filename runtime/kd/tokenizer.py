"""Kimi's tokenizer: byte-level BPE from `tiktoken.model`, special tokens from `tokenizer_config.json`.

Text from users is encoded with special tokens disabled: "<|im_end|>" typed by a user is eight ordinary characters'
worth of tokens, never the end of a message.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from kd.files import TooLarge, read_bounded
from kd.shapes import BadJson, Json, spelled

# Kimi K2's published split pattern, tried in this order: runs of Han; words with case split and an English
# contraction; words that start in capitals; up to three digits; punctuation; line ends; spaces. `&&[^\p{Han}]` is set
# intersection, which tiktoken's regex engine has and most do not.
PATTERN = "|".join(
    [
        r"""[\p{Han}]+""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""\p{N}{1,3}""",
        r""" ?[^\s\p{L}\p{N}]+[\r\n]*""",
        r"""\s*[\r\n]+""",
        r"""\s+(?!\S)""",
        r"""\s+""",
    ]
)

PIECE_CHARS = 400_000  # Kimi's reference encodes longer text in pieces of this many characters
RUN_CHARS = 25_000  # and cuts longer runs of whitespace or of anything else

RESERVED_SLOTS = 4096
MAX_RANKS = 1_000_000
MAX_MODEL_BYTES = 64 << 20
MAX_CONFIG_BYTES = 16 << 20
MAX_TOKEN_BYTES = 256  # KD_MAX_TOKEN_BYTES

_RUN = re.compile(r"\s+|\S+")


class TokenizerError(ValueError):
    """A tokenizer file that cannot be used, or an id that is no token. The message says which and what to do."""


class Tokenizer:
    """encode and decode for one model folder; safe to use from several threads.

    special: name -> id. n_vocab: one more than the largest id (ids between may be unused).
    """

    def __init__(self, ranks: dict[bytes, int], special: dict[str, int], *, name: str = "kimi"):
        import tiktoken

        self.special = dict(special)
        self.n_ranks = len(ranks)
        self._bytes: dict[int, bytes] = {rank: token for token, rank in ranks.items()}
        self._special_bytes = {i: text.encode() for text, i in special.items()}
        self.n_vocab = max([*self._bytes, *self._special_bytes]) + 1
        self._encoding = tiktoken.Encoding(name, pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=self.special)

    @classmethod
    def load(cls, folder: str | Path, *, follow_links: bool = False) -> Tokenizer:
        """Read `tiktoken.model` and `tokenizer_config.json` of a model folder. Raises TokenizerError."""
        folder = Path(folder)
        ranks = read_ranks(folder / "tiktoken.model", follow_links)
        special = read_special(folder / "tokenizer_config.json", len(ranks), follow_links)
        return cls(ranks, special, name=folder.name or "kimi")

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Ids of `text`. allow_special: special-token text becomes special tokens; only for text that is ours. Raises
        TokenizerError for surrogates, which are no text: what they were meant to be is not guessed."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TokenizerError(
                f"character {error.start} is U+{ord(text[error.start]):04X}, a surrogate, which no Unicode text holds; decode "
                "the bytes it came from as what they are"
            ) from None
        ids: list[int] = []
        for start in range(0, len(text), PIECE_CHARS):
            for piece in _cut_runs(text[start : start + PIECE_CHARS]):
                if allow_special:
                    ids += self._encoding.encode(piece, allowed_special="all", disallowed_special=())
                else:
                    ids += self._encoding.encode_ordinary(piece)
        return ids

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of `ids`, special tokens as their names; raises TokenizerError for an id that is no token."""
        parts = []
        for i in ids:
            part = self._bytes.get(i)
            if part is None:
                part = self._special_bytes.get(i)
            if part is None:
                raise TokenizerError(f"{i!r} is no token of this vocabulary; ids go from 0 to {self.n_vocab - 1}")
            parts.append(part)
        return b"".join(parts)

    def decode(self, ids: Iterable[int]) -> str:
        """As text; bytes that are no UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def token_bytes(self) -> tuple[bytes, list[int]]:
        """(all tokens' bytes back to back, end of token i in them): kd_load_options.token_bytes and token_ends.

        Special and unused ids have no bytes: they are never part of a text that the engine sends."""
        parts = [self._bytes.get(i, b"") for i in range(self.n_vocab)]
        ends, end = [], 0
        for part in parts:
            end += len(part)
            ends.append(end)
        return b"".join(parts), ends


def _cut_runs(text: str) -> Iterable[str]:
    """`text` in pieces within which no run of whitespace or of non-whitespace is longer than RUN_CHARS."""
    if len(text) <= RUN_CHARS:
        yield text
        return
    start = 0
    for run in _RUN.finditer(text):
        # A cut falls after every RUN_CHARS characters of a run, as in Kimi's reference, if more of the run follows.
        for cut in range(run.start() + RUN_CHARS, run.end(), RUN_CHARS):
            yield text[start:cut]
            start = cut
    yield text[start:]


def read_ranks(path: str | Path, follow_links: bool = False) -> dict[bytes, int]:
    """token bytes -> rank from a `tiktoken.model`: lines "base64 rank", every rank from 0 on once.

    Written out here because tiktoken's own reader caches files by their path. Raises TokenizerError.
    """
    path = Path(path)
    ranks: dict[bytes, int] = {}
    seen: set[int] = set()
    for number, line in enumerate(_read(path, MAX_MODEL_BYTES, follow_links).split(b"\n"), 1):
        if not line.strip():
            continue
        at = f"{path}:{number}"
        parts = line.rstrip(b"\r").split(b" ")
        if len(parts) != 2 or not parts[1].isdigit() or len(parts[1]) > 9:
            raise TokenizerError(f"{at}: is not a base64 token, a space and a rank; the file is damaged")
        try:
            token = base64.b64decode(parts[0], validate=True)
        except binascii.Error as error:
            raise TokenizerError(f"{at}: the token is not base64 ({error}); the file is damaged") from None
        rank = int(parts[1])
        if not 1 <= len(token) <= MAX_TOKEN_BYTES:
            raise TokenizerError(f"{at}: a token of {len(token)} bytes; tokens have 1 to {MAX_TOKEN_BYTES}")
        if token in ranks:
            raise TokenizerError(f"{at}: the token is the one of rank {ranks[token]} again; the file is damaged")
        if rank >= MAX_RANKS:
            raise TokenizerError(f"{at}: rank {rank}; a vocabulary has at most {MAX_RANKS} tokens")
        if rank in seen:
            raise TokenizerError(f"{at}: rank {rank} appears twice; the file is damaged")
        seen.add(rank)
        ranks[token] = rank
    if seen and max(seen) != len(seen) - 1:
        gap = min(set(range(len(seen))) - seen)
        raise TokenizerError(f"{path}: rank {gap} is missing; the file is damaged")
    missing = [b for b in range(256) if bytes([b]) not in ranks]
    if missing:
        raise TokenizerError(
            f"{path}: {len(missing)} of the 256 single bytes are no tokens (first: {missing[0]}); "
            "some text could not be encoded: the file is damaged or cut short"
        )
    return ranks


def added_tokens(path: Path, follow_links: bool = False) -> list[tuple[int, str]]:
    """(id, name) of each that `tokenizer_config.json` describes. Raises TokenizerError."""
    raw = _read(path, MAX_CONFIG_BYTES, follow_links)
    try:
        return list(_added(Json.parse(raw)))
    except BadJson as error:
        raise TokenizerError(f"{path}: {error}; the file is damaged, fetch it again") from None


def read_special(path: str | Path, n_ranks: int, follow_links: bool = False) -> dict[str, int]:
    """name -> id from `tokenizer_config.json`'s added_tokens_decoder. Raises TokenizerError."""
    path = Path(path)
    special: dict[str, int] = {}
    seen: dict[int, str] = {}
    for i, name in added_tokens(path, follow_links):
        if i < n_ranks:
            raise TokenizerError(
                f"{path}: special token {name!r} has id {i}, which tiktoken.model uses for ordinary "
                f"text (ids below {n_ranks}); the two files do not belong together"
            )
        if i >= MAX_RANKS:
            raise TokenizerError(f"{path}: special token {name!r} has id {i}; ids are below {MAX_RANKS}")
        if name in special or i in seen:
            raise TokenizerError(f"{path}: special token {name!r} (id {i}) appears twice")
        special[name] = i
        seen[i] = name
    # Kimi names the slots between that no entry describes; a model can still choose one.
    last = max(seen, default=n_ranks)
    if last - n_ranks <= RESERVED_SLOTS:
        for i in range(n_ranks, last):
            if i not in seen:
                special.setdefault(f"<|reserved_token_{i}|>", i)
    return special


def _added(config: Json) -> Iterator[tuple[int, str]]:
    """(id, name) of each special token. Raises BadJson."""
    for key, entry in config.need("added_tokens_decoder").members():
        if not (key.isascii() and key.isdigit() and len(key) <= 9):
            raise BadJson(f"added_tokens_decoder has the key {spelled(key)}, which is no token id")
        content = entry.need("content")
        if not 1 <= len(content.text().encode()) <= MAX_TOKEN_BYTES:
            raise content.wrong(f"a string of 1 to {MAX_TOKEN_BYTES} bytes")
        yield int(key), content.text()


def _read(path: Path, limit: int, follow_links: bool) -> bytes:
    try:
        return read_bounded(path, limit, follow_links)
    except TooLarge:
        raise TokenizerError(f"{path}: is larger than {limit} bytes; this is no tokenizer file") from None
    except OSError as error:
        raise TokenizerError(
            f"{path}: cannot be read ({error.strerror}); a model folder needs it to serve text"
        ) from None
