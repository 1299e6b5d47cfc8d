"""Model folders as they are published, with small numbers in them.

    weights = random_deepseek(folder, rng)  # transformers' own save of a DeepseekV3, experts packed by compressed-tensors
    publish(weights, folder, "k2.6", shards=64)  # the same weights with the names, files and configs of a published Kimi
    write_drafter(folder / "draft", weights, rng, "k2.6")

Forms: "transformers" (what save_pretrained writes), "k2-thinking" (text only), "k2.5" and "k2.6" (text_config, a
`language_model.` prefix and a vision tower beside it). Names, types, shards, index and keys are those of the published folders;
tests/data/kimi-k2.5-config.json is such a folder's own config.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.utils.helpers import calculate_qparams
from fake_model import draft_config, draft_tensors
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from training.tokenizer import NAMES

DATA = Path(__file__).parent / "data"
PUBLISHED = json.loads((DATA / "kimi-k2.5-config.json").read_text())
QUANTIZATION = PUBLISHED["text_config"]["quantization_config"]
FORMS = ("transformers", "k2-thinking", "k2.5", "k2.6")

# Of a vision tower, as many names as show the pattern.
VISION = {
    "vision_tower.patch_embed.proj.weight": (8, 3, 2, 2),
    "vision_tower.patch_embed.proj.bias": (8,),
    "vision_tower.patch_embed.pos_emb.weight": (4, 4, 8),
    "vision_tower.encoder.blocks.0.wqkv.weight": (24, 8),
    "vision_tower.encoder.blocks.0.norm0.weight": (8,),
    "vision_tower.encoder.blocks.0.mlp.fc0.weight": (16, 8),
    "vision_tower.encoder.final_layernorm.weight": (8,),
    "mm_projector.pre_norm.weight": (8,),
    "mm_projector.proj.0.weight": (16, 8),
}


@dataclass
class Weights:
    """One random model: `config` in transformers' spelling, tensors by published names, and the network itself in float32."""

    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    net: DeepseekV3ForCausalLM


def random_shape(rng: np.random.Generator) -> dict[str, Any]:
    """The numbers of a config.json, each possible one of its own."""
    pick = lambda *choices: choices[int(rng.integers(len(choices)))]  # noqa: E731
    experts = pick(4, 5, 8, 13)
    layers = pick(1, 2, 3, 4)
    yarn = {
        "rope_type": "yarn", "rope_theta": pick(50000.0, 10000.0), "factor": pick(2.0, 4.0, 32.0, 64.0),
        "original_max_position_embeddings": pick(16, 64), "beta_fast": pick(1.0, 32.0), "beta_slow": 1.0, "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }  # fmt: skip
    return dict(
        vocab_size=int(rng.integers(40, 300)),
        hidden_size=32 * int(rng.integers(1, 5)),
        intermediate_size=int(rng.integers(16, 200)),
        moe_intermediate_size=32 * int(rng.integers(1, 4)),
        num_hidden_layers=layers,
        first_k_dense_replace=min(pick(0, 1, 1, 2), layers),
        num_attention_heads=(heads := int(rng.integers(1, 9))),
        num_key_value_heads=heads,
        n_shared_experts=pick(1, 1, 2),
        n_routed_experts=experts,
        num_experts_per_tok=int(rng.integers(1, experts)),
        n_group=1,
        topk_group=1,
        q_lora_rank=int(rng.integers(8, 60)),
        kv_lora_rank=int(rng.integers(8, 60)),
        qk_nope_head_dim=int(rng.integers(2, 24)),
        qk_rope_head_dim=2 * int(rng.integers(1, 12)),
        v_head_dim=int(rng.integers(2, 24)),
        routed_scaling_factor=pick(2.827, 1.0),
        norm_topk_prob=pick(True, True, False),
        rms_norm_eps=pick(1e-5, 1e-6),
        max_position_embeddings=512,
        num_nextn_predict_layers=0,
        rope_parameters=pick(yarn, yarn, {"rope_type": "default", "rope_theta": 50000.0}),
    )


def random_deepseek(folder: Path, rng: np.random.Generator, **changes: Any) -> Weights:
    """Random weights, saved by transformers into `folder`, with the experts packed there by compressed-tensors."""
    config = DeepseekV3Config(**(random_shape(rng) | changes))
    config._attn_implementation = "eager"
    torch.manual_seed(int(rng.integers(1 << 31)))
    net = DeepseekV3ForCausalLM(config)
    with torch.no_grad():
        for name, p in net.named_parameters():
            if name.endswith("norm.weight"):
                p.copy_(1 + 0.1 * torch.randn_like(p))
            else:
                p.copy_(torch.randn_like(p) * p.shape[-1] ** -0.5 * 1.5)
        for name, b in net.named_buffers():
            if name.endswith("e_score_correction_bias"):
                b.copy_(0.05 * torch.randn_like(b))
    folder.mkdir(parents=True, exist_ok=True)
    net.to(torch.bfloat16).save_pretrained(folder, max_shard_size="200KB")
    biases = {n: b.float() for n, b in net.named_buffers() if n.endswith("e_score_correction_bias")}

    scheme = QuantizationScheme.model_validate(QUANTIZATION["config_groups"]["group_0"])
    tensors: dict[str, torch.Tensor] = {}
    plain: dict[str, torch.Tensor] = {}
    shards: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        packed: dict[str, torch.Tensor] = {}
        for name, t in load_file(path).items():
            if ".mlp.experts." not in name:
                packed[name] = biases.get(name, t)  # as published: float32
                plain[name] = packed[name].float()
                continue
            of_group = t.float().reshape(t.shape[0], -1, 32)
            scale, _ = calculate_qparams(of_group.amin(-1), of_group.amax(-1), scheme.weights)
            state = {"weight": t.float(), "weight_scale": scale.to(torch.bfloat16)}
            packed |= {
                f"{name}_{k.removeprefix('weight_')}": v
                for k, v in PackedQuantizationCompressor.compress(state, scheme).items()
            }
            state = {
                k: packed[f"{name}_{k.removeprefix('weight_')}"]
                for k in ("weight_packed", "weight_scale", "weight_shape")
            }
            state["weight_scale"] = state["weight_scale"].float()
            plain[name] = PackedQuantizationCompressor.decompress(state, scheme)["weight"].float()
        save_file(packed, path, metadata={"format": "pt"})
        tensors |= packed
        shards |= dict.fromkeys(packed, path.name)
    if (folder / "model.safetensors.index.json").exists():
        write_index(folder, tensors, shards)
    saved = json.loads((folder / "config.json").read_text()) | {"quantization_config": QUANTIZATION}
    (folder / "config.json").write_text(json.dumps(saved, indent=2))

    net = DeepseekV3ForCausalLM(config).float().eval()
    net.load_state_dict(fused(plain), strict=True)
    return Weights(saved, tensors, net)


def fused(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts stacked, as transformers 5 holds them."""
    out, experts = {}, {}
    for name, t in tensors.items():
        if ".experts." not in name:
            out[name] = t
            continue
        layer, rest = name.split(".experts.")
        number, kind, _ = rest.split(".")
        experts.setdefault(layer, {})[int(number), kind] = t
    for layer, w in experts.items():
        n = 1 + max(number for number, _ in w)
        out[f"{layer}.experts.gate_up_proj"] = torch.stack(
            [torch.cat((w[e, "gate_proj"], w[e, "up_proj"])) for e in range(n)]
        )
        out[f"{layer}.experts.down_proj"] = torch.stack([w[e, "down_proj"] for e in range(n)])
    return out


def write_index(folder: Path, tensors: dict[str, torch.Tensor], shards: dict[str, str]) -> None:
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(shards.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def text_config(config: dict[str, Any], form: str) -> dict[str, Any]:
    """The published text_config with this model's numbers; K2.6 files come with either spelling of the rope."""
    text = json.loads(json.dumps(PUBLISHED["text_config"]))
    text |= {
        key: value
        for key, value in config.items()
        if key in text and key not in ("architectures", "model_type", "auto_map")
    }
    rope = dict(config["rope_parameters"])
    theta, kind = rope.pop("rope_theta"), rope.pop("rope_type")
    if form == "k2.6":
        text.pop("rope_theta"), text.pop("rope_scaling")
        text["rope_parameters"] = {"rope_type": kind, "rope_theta": theta, **rope}
    else:
        text["rope_theta"], text["rope_scaling"] = theta, {"type": kind, **rope} if rope else None
    return text


def publish(weights: Weights, folder: Path, form: str, shards: int = 64) -> Path:
    """The same weights as a published folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = weights.config
    tensors = {n: t.to(torch.int32) if n.endswith("weight_shape") else t for n, t in weights.tensors.items()}
    vocab = config["vocab_size"]
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": vocab - 1}
    if form in ("k2.5", "k2.6"):
        tensors = {f"language_model.{name}": t for name, t in tensors.items()}
        for name, shape in VISION.items():
            tensors[name] = torch.randn(shape).to(torch.bfloat16)
        top = json.loads(json.dumps(PUBLISHED)) | ids
        top["text_config"] = text_config(config, form) | ids
    else:
        top = text_config(config, form) | ids
    (folder / "config.json").write_text(json.dumps(top, indent=2))
    (folder / "generation_config.json").write_text(json.dumps({"max_length": 512, "eos_token_id": 2}))
    names = list(tensors)
    shard_of = {
        name: f"model-{1 + i * shards // len(names):05}-of-{shards:06}.safetensors" for i, name in enumerate(names)
    }
    for shard in sorted(set(shard_of.values())):
        save_file(
            {n: tensors[n].contiguous() for n in names if shard_of[n] == shard},
            folder / shard,
            metadata={"format": "pt"},
        )
    write_index(folder, tensors, shard_of)
    return folder


def add_tokenizer(folder: Path, ranks: Path) -> None:
    """`ranks`, a tiktoken.model, with Kimi's special tokens behind its ordinary ones."""
    shutil.copy(ranks, folder / "tiktoken.model")
    first = sum(1 for line in ranks.read_bytes().splitlines() if line.strip())
    added = {str(first + at): {"content": name, "special": True, "lstrip": False} for at, name in NAMES.items()}
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "added_tokens_decoder": added,
                "tokenizer_class": "TikTokenTokenizer",
                "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
                "bos_token": "[BOS]",
                "eos_token": "[EOS]",
                "pad_token": "[PAD]",
                "model_max_length": 1000000000000000019884624838656,
            }
        )
    )


DRAFTER = {"layers": 6, "heads": 4, "kv_heads": 2, "head_dim": 16, "inter": 96, "block": 8}


def drafter_config(config: dict[str, Any], form: str, taps: list[int]) -> dict[str, Any]:
    """As z-lab/Kimi-K2.5-DFlash and -K2.6-DFlash have it: six layers, all but the last one sliding."""
    names = {
        "hidden": "hidden_size",
        "layers": "num_hidden_layers",
        "vocab": "vocab_size",
        "max_positions": "max_position_embeddings",
    }
    c = {ours: config[theirs] for ours, theirs in names.items()}
    value = draft_config(c, {**DRAFTER, "taps": taps, "window": 2048 if form == "k2.6" else None})
    yarn = {
        "rope_type": "deepseek_yarn" if form == "k2.6" else "yarn", "factor": 64.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 1.0,
    }  # fmt: skip
    value.pop("rope_theta"), value.pop("rope_scaling"), value.pop("is_causal")
    if form == "k2.6":
        return value | {"rope_parameters": {"rope_theta": 50000.0, **yarn}}
    return value | {"rope_theta": 50000.0, "rope_scaling": yarn}


def write_drafter(folder: Path, weights: Weights, rng: np.random.Generator, form: str) -> Path:
    """A DFlash drafter as published: no embeddings of its own, one file."""
    config = weights.config
    taps = list(range(min(2, config["num_hidden_layers"])))
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(drafter_config(config, form, taps), indent=2))
    tensors = draft_tensors(rng, {"hidden": config["hidden_size"]}, {**DRAFTER, "taps": taps})
    as_torch = {n: torch.from_numpy(a.view(np.int16).copy()).view(torch.bfloat16) for n, a in tensors.items()}
    save_file(as_torch, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
