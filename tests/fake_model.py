"""Random checkpoint folders with Kimi's names, types and quantisation, small enough to write in a test.

    write_model(folder, **SMALL3)            # the three-layer model of the exactness tests, with a drafter
    write_model(folder, **{**SMALL3, "seed": 7, "shards": 2})

Every embedding shares a component with the head rows of a few popular tokens. So greedy text moves among these, decided
by the context, and a random drafter, which sees that component too, is right now and then: on SMALL3 a chain keeps 1.3
rows a round, a heap of 60 nodes 2.2.
"""

import json
from pathlib import Path

import numpy as np
from ref.base import bf16, pack4

YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}

SMALL3 = {
    "seed": 1,
    "hidden": 64,
    "layers": 3,
    "dense_layers": 1,
    "heads": 8,
    "q_lora": 48,
    "kv_lora": 32,
    "nope": 16,
    "rope": 8,
    "v_head": 16,
    "inter": 256,
    "moe_inter": 256,
    "experts": 8,
    "topk": 2,
    "shared": 1,
    "vocab": 259,
    "max_positions": 1024,
    "yarn": YARN,
    "draft": {
        "layers": 1,
        "heads": 8,
        "kv_heads": 8,
        "head_dim": 16,
        "inter": 256,
        "block": 16,
        "taps": [0, 1, 2],
        "window": None,
    },
}

POPULAR = 8  # tokens the head favours, spread over the vocabulary

QUANTIZATION = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": 32,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "strategy": "group",
                "symmetric": True,
                "type": "int",
            },
        }
    },
    "format": "pack-quantized",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}

DTYPE = {"uint16": "BF16", "int32": "I32", "float32": "F32"}


def write_safetensors(path, tensors):
    """tensors: name -> uint16 (bf16 bits), int32 or float32 array."""
    header, at = {}, 0
    for name, a in tensors.items():
        header[name] = {"dtype": DTYPE[str(a.dtype)], "shape": list(a.shape), "data_offsets": [at, at + a.nbytes]}
        at += a.nbytes
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with open(path, "wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for a in tensors.values():
            file.write(np.ascontiguousarray(a).tobytes())


class Maker:
    """Tensors in the order they are asked for, from one generator."""

    def __init__(self, rng):
        self.rng = rng
        self.tensors = {}

    def matrix(self, name, n, k, gain=1.0):
        self.tensors[name + ".weight"] = bf16(self.rng.standard_normal((n, k)) * gain * k**-0.5)

    def norm(self, name, width):
        self.tensors[name + ".weight"] = bf16(1 + 0.1 * self.rng.standard_normal(width))

    def packed(self, name, n, k, gain=1.0):
        q = np.clip(np.round(self.rng.standard_normal((n, k)) * 2.5), -8, 7).astype(np.int64)
        scale = np.exp(self.rng.uniform(-0.3, 0.3, (n, k // 32))) * gain / 2.5 * k**-0.5
        self.tensors[name + ".weight_packed"] = pack4(q).view(np.int32)
        self.tensors[name + ".weight_scale"] = bf16(scale)
        self.tensors[name + ".weight_shape"] = np.array([n, k], np.int32)

    def mlp(self, name, hidden, inter, matrix=None):
        matrix = matrix or self.matrix
        matrix(f"{name}.gate_proj", inter, hidden)
        matrix(f"{name}.up_proj", inter, hidden)
        matrix(f"{name}.down_proj", hidden, inter, gain=1.5)


def target_tensors(rng, c):
    make = Maker(rng)
    hidden, vocab = c["hidden"], c["vocab"]
    shared_part = rng.choice([-1.0, 1.0], hidden)  # what all embeddings have in common
    embed = 0.8 * shared_part + 0.6 * rng.standard_normal((vocab, hidden))
    embed[vocab - 2] = 0.8 * shared_part  # the mask says nothing but that it is a token
    favour = np.zeros(vocab)
    favour[np.linspace(1, vocab - 6, POPULAR).astype(int)] = np.linspace(1, 0.55, POPULAR)
    head = 3 * rng.standard_normal((vocab, hidden)) + favour[:, None] * shared_part * 2 * np.sqrt(2 * np.log(vocab))

    make.tensors["model.embed_tokens.weight"] = bf16(embed)
    make.tensors["lm_head.weight"] = bf16(head * hidden**-0.5)
    make.norm("model.norm", hidden)
    for i in range(c["layers"]):
        layer = f"model.layers.{i}"
        make.norm(f"{layer}.input_layernorm", hidden)
        make.norm(f"{layer}.post_attention_layernorm", hidden)
        attn = f"{layer}.self_attn"
        make.matrix(f"{attn}.q_a_proj", c["q_lora"], hidden)
        make.norm(f"{attn}.q_a_layernorm", c["q_lora"])
        make.matrix(f"{attn}.q_b_proj", c["heads"] * (c["nope"] + c["rope"]), c["q_lora"], gain=1.5)
        make.matrix(f"{attn}.kv_a_proj_with_mqa", c["kv_lora"] + c["rope"], hidden)
        make.norm(f"{attn}.kv_a_layernorm", c["kv_lora"])
        make.matrix(f"{attn}.kv_b_proj", c["heads"] * (c["nope"] + c["v_head"]), c["kv_lora"])
        make.matrix(f"{attn}.o_proj", hidden, c["heads"] * c["v_head"], gain=1.5)
        if i < c["dense_layers"]:
            make.mlp(f"{layer}.mlp", hidden, c["inter"])
            continue
        make.matrix(f"{layer}.mlp.gate", c["experts"], hidden, gain=1.5)
        make.tensors[f"{layer}.mlp.gate.e_score_correction_bias"] = (0.05 * rng.standard_normal(c["experts"])).astype(
            np.float32
        )
        for e in range(c["experts"]):
            make.mlp(f"{layer}.mlp.experts.{e}", hidden, c["moe_inter"], make.packed)
        if c["shared"]:
            make.mlp(f"{layer}.mlp.shared_experts", hidden, c["moe_inter"] * c["shared"])
    return make.tensors


def draft_tensors(rng, c, d):
    make = Maker(rng)
    hidden, width = c["hidden"], d["head_dim"]
    make.matrix("fc", hidden, len(d["taps"]) * hidden)
    make.norm("hidden_norm", hidden)
    make.tensors["norm.weight"] = bf16(np.full(hidden, 0.35))  # unsure of itself: trees grow wide as well as deep
    for i in range(d["layers"]):
        layer = f"layers.{i}"
        make.norm(f"{layer}.input_layernorm", hidden)
        make.norm(f"{layer}.post_attention_layernorm", hidden)
        make.matrix(f"{layer}.self_attn.q_proj", d["heads"] * width, hidden)
        make.matrix(f"{layer}.self_attn.k_proj", d["kv_heads"] * width, hidden)
        make.matrix(f"{layer}.self_attn.v_proj", d["kv_heads"] * width, hidden)
        make.matrix(f"{layer}.self_attn.o_proj", hidden, d["heads"] * width, gain=0.3)
        make.norm(f"{layer}.self_attn.q_norm", width)
        make.norm(f"{layer}.self_attn.k_norm", width)
        make.mlp(f"{layer}.mlp", hidden, d["inter"])
    return make.tensors


def target_config(c):
    special = {"bos_token_id": c["vocab"] - 4, "eos_token_id": c["vocab"] - 3, "pad_token_id": c["vocab"] - 1}
    text = dict(
        architectures=["DeepseekV3ForCausalLM"],
        model_type="kimi_k2",
        dtype="bfloat16",
        hidden_act="silu",
        hidden_size=c["hidden"],
        num_hidden_layers=c["layers"],
        first_k_dense_replace=c["dense_layers"],
        moe_layer_freq=1,
        num_attention_heads=c["heads"],
        num_key_value_heads=c["heads"],
        q_lora_rank=c["q_lora"],
        kv_lora_rank=c["kv_lora"],
        qk_nope_head_dim=c["nope"],
        qk_rope_head_dim=c["rope"],
        v_head_dim=c["v_head"],
        intermediate_size=c["inter"],
        moe_intermediate_size=c["moe_inter"],
        n_routed_experts=c["experts"],
        num_experts_per_tok=c["topk"],
        n_shared_experts=c["shared"],
        n_group=1,
        topk_group=1,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        norm_topk_prob=True,
        routed_scaling_factor=2.827,
        vocab_size=c["vocab"],
        max_position_embeddings=c["max_positions"],
        rope_theta=50000.0,
        rope_scaling=c["yarn"],
        rms_norm_eps=1e-5,
        attention_bias=False,
        attention_dropout=0.0,
        num_nextn_predict_layers=0,
        tie_word_embeddings=False,
        use_cache=True,
        quantization_config=QUANTIZATION,
        **special,
    )
    if not c["prefix"]:
        return text
    return dict(
        architectures=["KimiK25ForConditionalGeneration"],
        model_type="kimi_k25",
        dtype="bfloat16",
        tie_word_embeddings=False,
        text_config=text,
        vision_config={"hidden_size": 8},
        **special,
    )


def draft_config(c, d):
    window = d.get("window") or [0] * d["layers"]
    window = (
        [window] * (d["layers"] - 1) + [0] if isinstance(window, int) else window
    )  # the published: all but the last
    sizes = set(window) - {0}
    assert len(sizes) <= 1, "a drafter's config has one sliding_window"
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_size": c["hidden"],
        "num_hidden_layers": d["layers"],
        "num_target_layers": c["layers"],
        "num_attention_heads": d["heads"],
        "num_key_value_heads": d["kv_heads"],
        "head_dim": d["head_dim"],
        "intermediate_size": d["inter"],
        "vocab_size": c["vocab"],
        "block_size": d["block"],
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": c["max_positions"],
        "rope_theta": 50000.0,
        "rope_scaling": d.get("yarn"),
        "dflash_config": {"mask_token_id": c["vocab"] - 2, "target_layer_ids": list(d["taps"])},
        "is_causal": False,
        "layer_types": ["sliding_attention" if w else "full_attention" for w in window],
        "max_window_layers": d["layers"],
        "sliding_window": sizes.pop() if sizes else None,
        "use_sliding_window": any(window),
        "tie_word_embeddings": False,
        "bos_token_id": c["vocab"] - 4,
        "eos_token_id": c["vocab"] - 3,
        "pad_token_id": c["vocab"] - 1,
        "use_cache": True,
    } | d.get("config", {})


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2))


def write_model(
    folder,
    *,
    seed,
    hidden,
    layers,
    dense_layers,
    heads,
    q_lora,
    kv_lora,
    nope,
    rope,
    v_head,
    inter,
    moe_inter,
    experts,
    topk,
    shared,
    vocab,
    max_positions,
    yarn=None,
    draft=None,
    shards=1,
    prefix="",
):
    """Write a checkpoint folder and return its path.

    yarn: the config's rope_scaling, or None. draft: None, or dict(layers, heads, kv_heads, head_dim, inter, block, taps,
    window, yarn), written to <folder>/draft; its window is None, one int (all layers but the last slide), or a list with
    0 for full attention. prefix "language_model." nests the config and adds a vision tensor, as Kimi K2.5 does. hidden
    and moe_inter are multiples of 32. The mask token is vocab - 2; end of sequence is vocab - 3.
    """
    c = {
        "hidden": hidden,
        "layers": layers,
        "dense_layers": dense_layers,
        "heads": heads,
        "q_lora": q_lora,
        "kv_lora": kv_lora,
        "nope": nope,
        "rope": rope,
        "v_head": v_head,
        "inter": inter,
        "moe_inter": moe_inter,
        "experts": experts,
        "topk": topk,
        "shared": shared,
        "vocab": vocab,
        "max_positions": max_positions,
        "yarn": yarn,
        "prefix": prefix,
    }
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {prefix + name: a for name, a in target_tensors(np.random.default_rng(seed), c).items()}
    if prefix:
        tensors["vision_tower.patch_embed.weight"] = bf16(np.ones((8, 8)))
    write_json(folder / "config.json", target_config(c))
    write_json(
        folder / "generation_config.json",
        {"bos_token_id": vocab - 4, "eos_token_id": [vocab - 3], "pad_token_id": vocab - 1},
    )
    names = sorted(tensors)
    files = (
        ["model.safetensors"]
        if shards == 1
        else [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    )
    weight_map = {name: files[i * shards // len(names)] for i, name in enumerate(names)}
    for file in files:
        write_safetensors(folder / file, {name: tensors[name] for name in names if weight_map[name] == file})
    if shards > 1:
        total = sum(a.nbytes for a in tensors.values())
        write_json(
            folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map}
        )
    if draft:
        (folder / "draft").mkdir(exist_ok=True)
        write_json(folder / "draft" / "config.json", draft_config(c, draft))
        write_safetensors(
            folder / "draft" / "model.safetensors", draft_tensors(np.random.default_rng([seed, 1]), c, draft)
        )
    return folder
