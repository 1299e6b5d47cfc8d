"""Step `export`: the trained weights -> a model folder in the published form, and reading such a folder back.

The folder's fixed parts (chat template, token names, the fields of config.json that do not depend on the size) are
taken from models/nano.
"""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from training import int4
from training.model import EXPERT_TENSORS, Drafter, Target, loaded
from training.recipe import SHIPPED, DrafterShape, Recipe, TargetShape
from training.tokenizer import MASK

SHARDS = 2
COPIED = ("chat_template.jinja", "generation_config.json", "tokenizer_config.json")
RENAMED = {"mlp.gate": "mlp.gate.weight", "mlp.bias": "mlp.gate.e_score_correction_bias"}

# config.json fields <-> TargetShape, draft/config.json fields <-> DrafterShape
TARGET_FIELDS = dict(
    vocab_size="vocab", hidden_size="hidden", num_hidden_layers="layers", first_k_dense_replace="dense_layers",
    intermediate_size="intermediate", n_routed_experts="experts", num_experts_per_tok="experts_per_token",
    moe_intermediate_size="expert_intermediate", num_attention_heads="heads", q_lora_rank="q_rank",
    kv_lora_rank="kv_rank", qk_nope_head_dim="nope_dim", qk_rope_head_dim="rope_dim", v_head_dim="value_dim",
    rope_theta="rope_theta", rms_norm_eps="norm_eps", routed_scaling_factor="routed_scale",
    max_position_embeddings="positions",
)  # fmt: skip
DRAFTER_FIELDS = dict(
    num_hidden_layers="layers", intermediate_size="intermediate", num_attention_heads="heads",
    num_key_value_heads="kv_heads", head_dim="head_dim", block_size="block", rope_theta="rope_theta",
)  # fmt: skip


def published(weights: dict[str, Tensor], shape: TargetShape) -> dict[str, Tensor]:
    """model.exported() under the published names: one packed matrix, scales and shape per expert projection."""
    out = {}
    for name, value in weights.items():
        if name.endswith(".scales"):
            continue
        if name == "lm_head.weight":
            out[name] = value
            continue
        if name.endswith(".values"):
            layer, tensor = name[: -len(".values")].rsplit(".", 1)
            scales = weights[f"{layer}.{tensor}.scales"]
            for e in range(shape.experts):
                base = f"model.{layer}.experts.{e}.{EXPERT_TENSORS[tensor]}"
                out[f"{base}.weight_packed"] = int4.pack(value[e])
                out[f"{base}.weight_scale"] = scales[e].contiguous()
                out[f"{base}.weight_shape"] = torch.tensor(value[e].shape, dtype=torch.int32)
            continue
        for ours, theirs in RENAMED.items():
            if name.endswith(ours):
                name = name[: -len(ours)] + theirs
        out[f"model.{name}"] = value
    return out


def unpublished(tensors: dict[str, Tensor], shape: TargetShape) -> dict[str, Tensor]:
    """The inverse of `published`."""
    out = {}
    for name, value in tensors.items():
        if ".experts." in name:
            continue
        name = name.removeprefix("model.")
        for ours, theirs in RENAMED.items():
            if name.endswith(theirs):
                name = name[: -len(theirs)] + ours
        out[name] = value
    for i in range(shape.dense_layers, shape.layers):
        for tensor, projection in EXPERT_TENSORS.items():
            bases = [f"model.layers.{i}.mlp.experts.{e}.{projection}" for e in range(shape.experts)]
            out[f"layers.{i}.mlp.{tensor}.values"] = torch.stack(
                [int4.unpack(tensors[f"{b}.weight_packed"]) for b in bases]
            )
            out[f"layers.{i}.mlp.{tensor}.scales"] = torch.stack([tensors[f"{b}.weight_scale"] for b in bases])
    return out


def write(folder: Path, weights: dict[str, Tensor], drafter: dict[str, Tensor], r: Recipe, tokenizer: Path) -> None:
    (folder / "draft").mkdir(parents=True, exist_ok=True)
    tensors = published(weights, r.target)
    order = sorted(tensors, key=_layer_order)
    half = sum(tensors[n].numel() * tensors[n].element_size() for n in order) / SHARDS
    shards: list[dict] = [{} for _ in range(SHARDS)]
    size = 0
    for _, names in itertools.groupby(order, key=lambda n: _layer_order(n)[:2]):  # a layer stays in one file
        shard = shards[min(int(size / half), SHARDS - 1)]
        for name in names:
            shard[name] = tensors[name].contiguous()
            size += tensors[name].numel() * tensors[name].element_size()
    where = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05}-of-{SHARDS:05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(shard, file)
    index = dict(metadata=dict(total_size=size), weight_map=dict(sorted(where.items())))
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    save_file(
        {k: v.contiguous() for k, v in drafter.items()},
        folder / "draft" / "model.safetensors",
        metadata={"format": "pt"},
    )
    for path in folder.rglob("*.safetensors"):
        path.chmod(0o644)  # save_file leaves them to their owner alone

    config = json.loads((SHIPPED / "config.json").read_text())
    config |= {field: getattr(r.target, ours) for field, ours in TARGET_FIELDS.items()}
    config["num_key_value_heads"] = r.target.heads
    config["rope_scaling"] |= dict(factor=r.target.yarn_factor, original_max_position_embeddings=r.target.yarn_original)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    config = json.loads((SHIPPED / "draft" / "config.json").read_text())
    config |= {field: getattr(r.drafter, ours) for field, ours in DRAFTER_FIELDS.items()}
    config |= dict(
        dflash_config=dict(mask_token_id=MASK, target_layer_ids=list(r.drafter.taps)), hidden_size=r.target.hidden,
        layer_types=["full_attention"] * r.drafter.layers, max_position_embeddings=r.target.positions,
        max_window_layers=r.drafter.layers, num_target_layers=r.target.layers, rms_norm_eps=r.target.norm_eps,
        vocab_size=r.target.vocab,
    )  # fmt: skip
    (folder / "draft" / "config.json").write_text(json.dumps(config, indent=2))
    for name in COPIED:
        shutil.copy(SHIPPED / name, folder / name)
    shutil.copy(tokenizer, folder / "tiktoken.model")


def _layer_order(name: str) -> tuple:
    """Embedding first, then layer by layer, then the final norm and the head."""
    words = name.split(".")
    if words[1:2] == ["layers"]:
        return (1, int(words[2]), name)
    return (0 if "embed" in name else 2, 0, name)


def read(folder: Path, device: str = "cpu") -> tuple[Target, Drafter]:
    """Both models of a folder, frozen, fp32, with exactly the weights that it holds."""
    config = json.loads((folder / "config.json").read_text())
    shape = TargetShape(
        **{ours: config[field] for field, ours in TARGET_FIELDS.items()},
        yarn_factor=config["rope_scaling"]["factor"],
        yarn_original=config["rope_scaling"]["original_max_position_embeddings"],
    )
    files = set(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].values())
    tensors: dict[str, Tensor] = {}
    for file in sorted(files):
        tensors |= load_file(folder / file)
    target = loaded(unpublished(tensors, shape), shape, device)
    config = json.loads((folder / "draft" / "config.json").read_text())
    draft_shape = DrafterShape(
        **{ours: config[field] for field, ours in DRAFTER_FIELDS.items()},
        taps=tuple(config["dflash_config"]["target_layer_ids"]),
    )
    drafter = Drafter(draft_shape, shape)
    drafter.load_state_dict({k: v.float() for k, v in load_file(folder / "draft" / "model.safetensors").items()})
    return target, drafter.to(device).eval().requires_grad_(False)


def run(work: Path, r: Recipe, tokenizer: Path) -> None:
    weights = torch.load(work / "target" / "weights.pt")
    drafter = torch.load(work / "drafter" / "weights.pt")
    folder = work / "export"
    write(folder, weights, drafter, r, tokenizer)
    if (work / "NOTICE").exists():
        shutil.copy(work / "NOTICE", folder / "NOTICE")
    size = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    print(f"{folder}: {size / 2**20:.2f} MiB", flush=True)
