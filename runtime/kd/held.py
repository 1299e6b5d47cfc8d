"""A model that is loaded and not yet used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kd import structs
from kd.native import ffi
from kd.text_side import TextSide
from kd.values import ModelInfo, RequestOptions

if TYPE_CHECKING:
    from kd.handle import Handle


@dataclass(frozen=True, slots=True)
class Trial:
    """What a held model decoded. hashes: empty unless asked for; seconds: from the first token to the last."""

    tokens: list[int]
    hashes: list[int]
    seconds: float


class HeldModel:
    """What `check` of `Engine.load()` is given: all of the model is in memory, and nobody else sees it. A model that serves
    goes on serving. Errors are `kd.KdError`; KD_E_CANCELLED once the load is cancelled."""

    def __init__(self, engine: Handle, side: TextSide):
        self._engine = engine
        self.tokenizer, self.chat = side.tokenizer, side.chat
        self.accepted = False

    @property
    def info(self) -> ModelInfo:
        """As `Engine.info` will say it."""
        return structs.model_info(self._engine._filled("kd_model_info", self._engine._lib.kd_load_info))

    def decode(self, tokens: Sequence[int], *, max_tokens: int, **options: Any) -> Trial:
        """Decode alone and cold, to the end. options: fields of `RequestOptions`; without a builder there are no trees."""
        request, keep = structs.request(tokens, RequestOptions(max_tokens=max_tokens, **options))
        out = structs.new("kd_trial")
        made, hashes = ffi.new("int32_t[]", max_tokens), ffi.new("uint64_t[]", max_tokens)
        out.tokens, out.hashes = made, hashes
        self._engine._check(self._engine._ask(self._engine._lib.kd_load_try, request, out))
        del keep
        n = out.n_tokens
        hashed = list(hashes[0:n]) if request.flags & structs.HASH_LOGITS else []
        return Trial(list(made[0:n]), hashed, out.decode_us / 1e6)

    def accept(self, builder: str | None = None, budget: int = 0) -> None:
        """Let it take its place. builder: in force from then on; None: what was chosen before, or is built in. What `check`
        does not accept itself is accepted when it returns."""
        name = ffi.NULL if builder is None else structs.text(builder)
        nodes = structs.integer("budget", budget, -(1 << 31), 1 << 31)
        self._engine._check(self._engine._ask(self._engine._lib.kd_load_accept, name, nodes))
        self.accepted = True
