"""Tokens: Kimi's split pattern and special-token offsets over a small vocabulary. Also the step that trains one."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import tiktoken

from kd.tokenizer import PATTERN

VOCAB = 4096
SPECIALS = 32
RANKS = VOCAB - SPECIALS  # ordinary tokens; the special ones follow
BOS, EOS, IM_END, IM_USER, IM_ASSISTANT, IM_SYSTEM, IM_MIDDLE, THINK, END_THINK, MASK, PAD = (
    RANKS + offset for offset in (0, 1, 2, 3, 4, 10, 17, 22, 23, 30, 31)
)
STOPS = (EOS, IM_END)
NAMES = {
    0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 4: "<|im_assistant|>", 6: "<|start_header_id|>",
    7: "<|end_header_id|>", 9: "[EOT]", 10: "<|im_system|>", 11: "<|tool_calls_section_begin|>",
    12: "<|tool_calls_section_end|>", 13: "<|tool_call_begin|>", 14: "<|tool_call_argument_begin|>",
    15: "<|tool_call_end|>", 17: "<|im_middle|>", 18: "<|media_begin|>", 19: "<|media_content|>", 20: "<|media_end|>",
    21: "<|media_pad|>", 22: "<think>", 23: "</think>", 30: "[UNK]", 31: "[PAD]",
}  # fmt: skip
ORDINARY = {11, 12, 13, 14, 15, 22, 23}  # written as text by a decoder, unlike the other specials


class Tokenizer:
    def __init__(self, path: Path):
        os.environ["TIKTOKEN_CACHE_DIR"] = ""  # tiktoken caches local files by path: a rewritten one would not be read
        self.ranks = {
            base64.b64decode(word): int(rank)
            for word, rank in (line.split() for line in open(path, "rb") if line.strip())
        }
        if len(self.ranks) != RANKS:
            raise ValueError(
                f"{path} holds {len(self.ranks)} tokens, the recipe needs {RANKS}; train one with `tokenizer`"
            )
        special = {NAMES.get(k, f"<|reserved_token_{RANKS + k}|>"): RANKS + k for k in range(SPECIALS)}
        self._encoding = tiktoken.Encoding("nano", pat_str=PATTERN, mergeable_ranks=self.ranks, special_tokens=special)

    def encode(self, text: str) -> list[int]:
        return self._encoding.encode_ordinary(text)

    def decode(self, ids) -> str:
        return self._encoding.decode([i for i in ids if i < RANKS])

    def lengths(self) -> list[int]:
        """Bytes of every id; 0 for the special ones."""
        lengths = [0] * VOCAB
        for word, rank in self.ranks.items():
            lengths[rank] = len(word)
        return lengths

    def numbers(self) -> frozenset[int]:
        """Ids of numbers."""
        return frozenset(rank for word, rank in self.ranks.items() if word.strip().isdigit())

    def turn(self, role: int, name: str, text: str) -> list[int]:
        """One message of a conversation, as chat_template.jinja writes it."""
        return [role, *self.encode(name), IM_MIDDLE, *self.encode(text), IM_END]

    def answer_prefix(self) -> list[int]:
        return [IM_ASSISTANT, *self.encode("assistant"), IM_MIDDLE]


def train(texts, path: Path) -> None:
    """Learns the byte pairs of `texts` and writes them in tiktoken's format, best merge first after the 256 bytes."""
    from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Learner

    learner = Learner(models.BPE())
    split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    learner.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    learner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    learner.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=RANKS, initial_alphabet=alphabet, special_tokens=[], show_progress=False)
    )
    to_byte = _bytes_of_alphabet()
    vocabulary = sorted(learner.get_vocab().items(), key=lambda item: item[1])
    with open(path, "wb") as out:
        for word, rank in vocabulary:
            out.write(base64.b64encode(bytes(to_byte[c] for c in word)) + f" {rank}\n".encode())


def _bytes_of_alphabet() -> dict[str, int]:
    """GPT-2's printable character for every byte, reversed."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}
