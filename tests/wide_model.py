"""A random checkpoint with the widths of Kimi K2, few layers and fewer experts: for measuring where memory bandwidth rules,
and for the exactness contract at real sizes.

    python tests/wide_model.py FOLDER [--layers 3] [--experts 48] [--inter 18432]

Gigabytes, so it is written where you say and never committed. Weights are stretches of one random pool: nothing that
they compute means anything, but no product is trivial and no value overflows. As in fake_model.py, embeddings share a
component with the head rows of a few popular tokens, so that a random drafter is right now and then.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from fake_model import DTYPE, POPULAR, draft_config, target_config, write_json
from ref.base import bf16

K2 = {
    "hidden": 7168, "heads": 64, "q_lora": 1536, "kv_lora": 512, "nope": 128, "rope": 64, "v_head": 128,
    "moe_inter": 2048, "topk": 8, "shared": 1, "dense_layers": 1, "vocab": 1024, "max_positions": 4096,
    "yarn": {
        "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "beta_fast": 32.0, "beta_slow": 1.0,
        "mscale": 1.0, "mscale_all_dim": 1.0,
    },
    "prefix": "",
}  # fmt: skip
POOL = 1 << 22
SHARD_BYTES = 1 << 30  # of a file, about: files are written side by side


class Tensor(NamedTuple):
    name: str
    shape: tuple[int, ...]
    kind: np.dtype
    pool: np.ndarray
    step: int = 1  # stretches of the pool begin at multiples of it
    rows: dict[int, np.ndarray] = {}  # these rows are not the pool's

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.kind.itemsize


HALF, WORD = np.dtype(np.uint16), np.dtype(np.int32)


class Pools:
    """Random values to cut tensors from, one pool a kind."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.normal = rng.standard_normal(POOL, np.float32)
        # nibbles near the middle, as trained weights have; 8 is zero
        nibbles = np.clip(np.round(self.normal.reshape(-1, 8) * 2.5), -8, 7).astype(np.int64) + 8
        packed = (nibbles << np.arange(0, 32, 4)).sum(1).astype(np.uint32).view(np.int32)
        self.packed = np.concatenate([packed ^ WORD.type(word) for word in rng.integers(0, 1 << 31, 8)])
        self.scale = np.exp(self.normal[: 1 << 16] * 0.1) / 2.5
        self.cut: dict[float, np.ndarray] = {}

    def scaled(self, by: float) -> np.ndarray:
        if by not in self.cut:
            self.cut[by] = bf16(self.normal * by)
        return self.cut[by]

    def matrix(self, name: str, n: int, k: int, gain: float = 1) -> Tensor:
        return Tensor(name + ".weight", (n, k), HALF, self.scaled(gain * k**-0.5))

    def norm(self, name: str, width: int, value: float = 1) -> Tensor:
        return Tensor(name + ".weight", (width,), HALF, bf16(np.full(width, value)))

    def mlp(self, name: str, hidden: int, inter: int) -> Iterator[Tensor]:
        yield self.matrix(f"{name}.gate_proj", inter, hidden)
        yield self.matrix(f"{name}.up_proj", inter, hidden)
        yield self.matrix(f"{name}.down_proj", hidden, inter, 1.5)

    def experts(self, name: str, hidden: int, inter: int) -> Iterator[Tensor]:
        for part, n, k in (("gate_proj", inter, hidden), ("up_proj", inter, hidden), ("down_proj", hidden, inter)):
            scale = self.cut.setdefault(-k, bf16(self.scale * k**-0.5))
            yield Tensor(f"{name}.{part}.weight_packed", (n, k // 8), WORD, self.packed)
            yield Tensor(f"{name}.{part}.weight_scale", (n, k // 32), HALF, scale)
            yield Tensor(f"{name}.{part}.weight_shape", (2,), WORD, np.array([n, k], np.int32))


def ends(pools: Pools, c: dict) -> Iterator[Tensor]:
    """Embedding, last norm and head."""
    hidden, vocab = c["hidden"], c["vocab"]
    rng = np.random.default_rng(2)
    shared = rng.choice(np.array([-1, 1], np.float32), hidden)  # what all embeddings have in common
    rows = POOL // hidden
    embed = bf16(0.8 * shared + 0.6 * pools.normal[: rows * hidden].reshape(rows, hidden)).ravel()
    mask = {vocab - 2: bf16(0.8 * shared)}  # the mask says nothing but that it is a token
    yield Tensor("model.embed_tokens.weight", (vocab, hidden), HALF, embed, hidden, mask)
    yield pools.norm("model.norm", hidden)
    popular = {}
    for token, favour in zip(
        np.linspace(1, vocab - 6, POPULAR).astype(int), np.linspace(1, 0.55, POPULAR), strict=True
    ):
        own = 3 * rng.standard_normal(hidden) + favour * 16 * hidden**-0.5 * math.sqrt(2 * math.log(vocab)) * shared
        popular[int(token)] = bf16(own * hidden**-0.5)
    yield pools.matrix("lm_head", vocab, hidden, 3)._replace(rows=popular)


def tensors(pools: Pools, layer: int, c: dict) -> Iterator[Tensor]:
    """Of one layer, or with layer == c["layers"] of what stands around them."""
    if layer == c["layers"]:
        yield from ends(pools, c)
        return
    hidden, heads = c["hidden"], c["heads"]
    here = f"model.layers.{layer}"
    yield pools.norm(f"{here}.input_layernorm", hidden)
    yield pools.norm(f"{here}.post_attention_layernorm", hidden)
    attn = f"{here}.self_attn"
    yield pools.matrix(f"{attn}.q_a_proj", c["q_lora"], hidden)
    yield pools.norm(f"{attn}.q_a_layernorm", c["q_lora"])
    yield pools.matrix(f"{attn}.q_b_proj", heads * (c["nope"] + c["rope"]), c["q_lora"], 1.5)
    yield pools.matrix(f"{attn}.kv_a_proj_with_mqa", c["kv_lora"] + c["rope"], hidden)
    yield pools.norm(f"{attn}.kv_a_layernorm", c["kv_lora"])
    yield pools.matrix(f"{attn}.kv_b_proj", heads * (c["nope"] + c["v_head"]), c["kv_lora"])
    yield pools.matrix(f"{attn}.o_proj", hidden, heads * c["v_head"], 1.5)
    if layer < c["dense_layers"]:
        yield from pools.mlp(f"{here}.mlp", hidden, c["inter"])
        return
    yield pools.matrix(f"{here}.mlp.gate", c["experts"], hidden, 1.5)
    bias = pools.normal * np.float32(0.05)
    yield Tensor(f"{here}.mlp.gate.e_score_correction_bias", (c["experts"],), np.dtype(np.float32), bias)
    for e in range(c["experts"]):
        yield from pools.experts(f"{here}.mlp.experts.{e}", hidden, c["moe_inter"])
    yield from pools.mlp(f"{here}.mlp.shared_experts", hidden, c["moe_inter"] * c["shared"])


def draft_tensors(pools: Pools, c: dict, d: dict) -> Iterator[Tensor]:
    hidden, width = c["hidden"], d["head_dim"]
    yield pools.matrix("fc", hidden, len(d["taps"]) * hidden)
    yield pools.norm("hidden_norm", hidden)
    yield pools.norm("norm", hidden, 0.35)  # unsure of itself: trees grow wide as well as deep
    for i in range(d["layers"]):
        layer = f"layers.{i}"
        yield pools.norm(f"{layer}.input_layernorm", hidden)
        yield pools.norm(f"{layer}.post_attention_layernorm", hidden)
        for part, heads in (("q", d["heads"]), ("k", d["kv_heads"]), ("v", d["kv_heads"])):
            yield pools.matrix(f"{layer}.self_attn.{part}_proj", heads * width, hidden)
        yield pools.matrix(f"{layer}.self_attn.o_proj", hidden, d["heads"] * width, 0.3)
        yield pools.norm(f"{layer}.self_attn.q_norm", width)
        yield pools.norm(f"{layer}.self_attn.k_norm", width)
        yield from pools.mlp(f"{layer}.mlp", hidden, d["inter"])


def write_tensor(file, t: Tensor, rng: np.random.Generator) -> None:
    begin, left = file.tell(), math.prod(t.shape)
    if left == t.pool.size and not t.rows:
        file.write(t.pool.data)
        return
    while left:  # stretches from random places on, so that no two rows of a matrix are alike
        first = int(rng.integers(t.pool.size // t.step // 2)) * t.step
        some = min(left, (t.pool.size - first) // t.step * t.step)
        file.write(t.pool[first : first + some].data)
        left -= some
    end, row_bytes = file.tell(), t.bytes // t.shape[0]
    for row, values in t.rows.items():
        file.seek(begin + row * row_bytes)
        file.write(values.data)
    file.seek(end)


def write_shard(path: Path, parts: list[Tensor], seed: int) -> None:
    header, at = {}, 0
    for t in parts:
        header[t.name] = {"dtype": DTYPE[str(t.kind)], "shape": list(t.shape), "data_offsets": [at, at + t.bytes]}
        at += t.bytes
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    rng = np.random.default_rng([1, seed])
    with open(path, "wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for t in parts:
            write_tensor(file, t, rng)


def shards(parts: Iterator[Tensor]) -> Iterator[list[Tensor]]:
    held: list[Tensor] = []
    for t in parts:
        held.append(t)
        if sum(h.bytes for h in held) >= SHARD_BYTES:
            yield held
            held = []
    if held:
        yield held


def write_wide_model(
    folder: Path, *, layers: int = 3, experts: int = 48, inter: int = 18432, draft: dict | None = None, **other: int
) -> Path:
    """Write the folder and return its path. other: entries of K2 to replace; draft: as for fake_model.write_model."""
    c = K2 | {"layers": layers, "experts": experts, "inter": inter} | other
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    pools, vocab = Pools(0), c["vocab"]
    files = [part for layer in range(layers + 1) for part in shards(tensors(pools, layer, c))]
    names = [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    work = [(folder / name, parts, i) for i, (name, parts) in enumerate(zip(names, files, strict=True))]
    if draft:
        (folder / "draft").mkdir(exist_ok=True)
        write_json(folder / "draft" / "config.json", draft_config(c, draft))
        work.append((folder / "draft" / "model.safetensors", list(draft_tensors(pools, c, draft)), len(files)))
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        list(pool.map(lambda job: write_shard(*job), work))
    weight_map = {t.name: name for name, parts in zip(names, files, strict=True) for t in parts}
    size = sum(t.bytes for parts in files for t in parts)
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": weight_map})
    write_json(folder / "config.json", target_config(c))
    write_json(
        folder / "generation_config.json",
        {"bos_token_id": vocab - 4, "eos_token_id": [vocab - 3], "pad_token_id": vocab - 1},
    )
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    for name, default in (("layers", 3), ("experts", 48), ("inter", 18432)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    write_wide_model(options.folder, layers=options.layers, experts=options.experts, inter=options.inter)


if __name__ == "__main__":
    main()
