"""What goes into an engine and comes out of it, as Python values. No library is needed to make or read them."""

from __future__ import annotations

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
    parameters: int
    draft_parameters: int
    weight_bytes: int
    expert_bytes: int
    kv_bytes_token: int
    kv_tokens: int
    content_hash: int
    weights_generation: int


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
