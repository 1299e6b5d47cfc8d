"""What goes into an engine and comes out of it, as Python values. No library is needed to make or read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a request, or of the engine (id 0). `hashes` and `logprobs` are empty unless asked for."""

    type: str  # "tokens" | "end" | "load" | "fatal"
    id: int
    user: int
    sequence: int  # 0, 1, 2, ... of this request
    status: int  # kd_status: why a request, a load or the engine ended
    finish: str | None  # "stop" | "length" | "cancelled" | "error"
    tokens: tuple[int, ...]
    hashes: tuple[int, ...]  # of the logits row each token was chosen from
    logprobs: tuple[float, ...]
    text: bytes  # cut at UTF-8 boundaries; empty without a tokenizer
    nodes: int  # drafted nodes of the round
    builder_generation: int
    weights_generation: int
    total_tokens: int
    cached_tokens: int


@dataclass(slots=True)
class Sampling:
    """How tokens are chosen; the defaults take the most probable one. seed and choice: same values, same text."""

    temperature: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    seed: int = 0
    choice: int = 0


@dataclass(slots=True, kw_only=True)
class RequestOptions:
    """What a request may say beside its prompt: the keyword arguments of `Engine.submit()`, `stream()`, `generate()`."""

    max_tokens: int
    sampling: Sampling | None = None  # None: Sampling()
    stop_ids: Sequence[int] = ()  # beside the model's own
    stop_strings: Sequence[str | bytes] = ()  # the text ends before the first one found
    credit: int = 0  # events it may produce before `Engine.credit()`; 0 = 256
    hash_logits: bool = False  # fill Event.hashes
    logprobs: bool = False  # fill Event.logprobs
    cold: bool = False  # do not use pages of earlier prompts
    ignore_eos: bool = False  # the model's own stop ids do not end it
    builder: str | None = None  # its own tree builder, and
    budget: int = 0  # that one's budget; 0 = the builder's default
    user: int = 0  # comes back in every event
    text_id: int = 0  # `Engine.text_side().id` of when the tokens were made: no other vocabulary gets them; 0: any may


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """kd_model_info: what is loaded. Sizes in bytes; `stop_ids` from the folder's two config files together."""

    vocab_size: int
    max_positions: int
    layers: int
    hidden_size: int
    heads: int
    experts: int
    experts_per_token: int
    draft_layers: int
    draft_depth: int
    stop_ids: tuple[int, ...]
    skipped_tensors: int  # of the folder that text does not need: vision tower, prediction layers
    parameters: int
    draft_parameters: int
    weight_bytes: int
    expert_bytes: int
    kv_bytes_token: int
    kv_tokens: int
    content_hash: int
    weights_generation: int
    target_hash: int  # content_hash without the drafter
    text_id: int


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request. rounds: events that brought tokens (the one of the prompt included); nodes: drafted nodes
    verified; accepted: drafted tokens kept, len(tokens) - rounds."""

    tokens: list[int]
    text: str
    hashes: list[int]
    logprobs: list[float]
    finish: str  # "stop" | "length" | "cancelled"
    rounds: int
    nodes: int
    accepted: int
    seconds: float
    cached_tokens: int
