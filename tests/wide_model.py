"""A random checkpoint with the widths of Kimi K2, few layers and fewer experts: for measuring where memory bandwidth rules.

    python tests/wide_model.py FOLDER [--layers 3] [--experts 48] [--inter 18432]

Gigabytes, so it is written where you say and never committed. Weights are stretches of one random pool: nothing that
they compute means anything, but no product is trivial and no value overflows.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from fake_model import DTYPE, target_config, write_json
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

Tensor = tuple[str, tuple[int, ...], np.dtype, np.ndarray]  # name, shape, type, pool


class Pools:
    """Random values to cut tensors from, one pool a kind."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.normal = rng.standard_normal(POOL, np.float32)
        # nibbles near the middle, as trained weights have; 8 is zero
        nibbles = np.clip(np.round(rng.standard_normal((POOL, 8)) * 2.5), -8, 7).astype(np.int64) + 8
        self.packed = (nibbles << np.arange(0, 32, 4)).sum(1).astype(np.uint32).view(np.int32)
        self.cut: dict[int, np.ndarray] = {}

    def scaled(self, k: int) -> np.ndarray:
        if k not in self.cut:
            self.cut[k] = bf16(self.normal * k**-0.5)
        return self.cut[k]


def tensors(pools: Pools, layer: int, c: dict) -> Iterator[Tensor]:
    """Of one layer, or with layer == c["layers"] of what stands around them."""
    half = np.dtype(np.uint16)

    def matrix(name: str, n: int, k: int) -> Tensor:
        return name + ".weight", (n, k), half, pools.scaled(k)

    def norm(name: str, width: int) -> Tensor:
        return name + ".weight", (width,), half, bf16(np.ones(width))

    def mlp(name: str, inter: int) -> Iterator[Tensor]:
        yield matrix(f"{name}.gate_proj", inter, c["hidden"])
        yield matrix(f"{name}.up_proj", inter, c["hidden"])
        yield matrix(f"{name}.down_proj", c["hidden"], inter)

    def packed(name: str, n: int, k: int) -> Iterator[Tensor]:
        scale = bf16(np.exp(pools.normal[: 1 << 16] * 0.1) / 2.5 * k**-0.5)
        yield name + ".weight_packed", (n, k // 8), np.dtype(np.int32), pools.packed
        yield name + ".weight_scale", (n, k // 32), half, scale
        yield name + ".weight_shape", (2,), np.dtype(np.int32), np.array([n, k], np.int32)

    if layer == c["layers"]:
        yield matrix("model.embed_tokens", c["vocab"], c["hidden"])
        yield norm("model.norm", c["hidden"])
        yield matrix("lm_head", c["vocab"], c["hidden"])
        return
    here = f"model.layers.{layer}"
    yield norm(f"{here}.input_layernorm", c["hidden"])
    yield norm(f"{here}.post_attention_layernorm", c["hidden"])
    attn = f"{here}.self_attn"
    yield matrix(f"{attn}.q_a_proj", c["q_lora"], c["hidden"])
    yield norm(f"{attn}.q_a_layernorm", c["q_lora"])
    yield matrix(f"{attn}.q_b_proj", c["heads"] * (c["nope"] + c["rope"]), c["q_lora"])
    yield matrix(f"{attn}.kv_a_proj_with_mqa", c["kv_lora"] + c["rope"], c["hidden"])
    yield norm(f"{attn}.kv_a_layernorm", c["kv_lora"])
    yield matrix(f"{attn}.kv_b_proj", c["heads"] * (c["nope"] + c["v_head"]), c["kv_lora"])
    yield matrix(f"{attn}.o_proj", c["hidden"], c["heads"] * c["v_head"])
    if layer < c["dense_layers"]:
        yield from mlp(f"{here}.mlp", c["inter"])
        return
    yield matrix(f"{here}.mlp.gate", c["experts"], c["hidden"])
    yield f"{here}.mlp.gate.e_score_correction_bias", (c["experts"],), np.dtype(np.float32), pools.normal * 0.05
    for e in range(c["experts"]):
        expert = f"{here}.mlp.experts.{e}"
        yield from packed(f"{expert}.gate_proj", c["moe_inter"], c["hidden"])
        yield from packed(f"{expert}.up_proj", c["moe_inter"], c["hidden"])
        yield from packed(f"{expert}.down_proj", c["hidden"], c["moe_inter"])
    yield from mlp(f"{here}.mlp.shared_experts", c["moe_inter"] * c["shared"])


def write_shard(path: Path, parts: list[Tensor], rng: np.random.Generator) -> None:
    header, at = {}, 0
    for name, shape, kind, _ in parts:
        size = int(np.prod(shape)) * kind.itemsize
        header[name] = {"dtype": DTYPE[str(kind)], "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with open(path, "wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for _, shape, _, pool in parts:
            left = int(np.prod(shape))
            if left == pool.size:
                file.write(pool.tobytes())
                continue
            while left:  # stretches from random places on, so that no two rows of a matrix are alike
                begin = int(rng.integers(pool.size // 2))
                some = min(left, pool.size - begin)
                file.write(pool[begin : begin + some].data)
                left -= some


def write_wide_model(folder: Path, *, layers: int = 3, experts: int = 48, inter: int = 18432, **other: int) -> Path:
    """Write the folder, one shard a layer, and return its path. other: entries of K2 to replace."""
    c = K2 | {"layers": layers, "experts": experts, "inter": inter} | other
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    pools, rng, weight_map = Pools(0), np.random.default_rng(1), {}
    for layer in range(layers + 1):
        parts = list(tensors(pools, layer, c))
        file = f"model-{layer + 1:05}-of-{layers + 1:05}.safetensors"
        weight_map |= dict.fromkeys((part[0] for part in parts), file)
        write_shard(folder / file, parts, rng)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": weight_map})
    write_json(folder / "config.json", target_config(c))
    vocab = c["vocab"]
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
