"""The specification's target model against Hugging Face transformers' DeepseekV3, on nano and on random folders."""

import json

import fake_model
import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from ref import model
from safetensors.torch import load_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

torch.set_num_threads(1)


def dequantised(tensors, prefix):
    """Their names and float32 values: experts unpacked by compressed-tensors and stacked as transformers 5 does."""
    out, experts = {}, {}
    for name, t in tensors.items():
        name = name.removeprefix(prefix)
        if name.startswith("vision_tower") or name.endswith(("weight_scale", "weight_shape")):
            continue
        if not name.endswith("weight_packed"):
            out[name] = t.float()
            continue
        stem = prefix + name.removesuffix("packed")
        q = unpack_from_int32(t, 4, torch.Size(tensors[stem + "shape"].tolist())).float()
        scale = tensors[stem + "scale"].float().repeat_interleave(32, dim=1)
        layer, rest = name.split(".experts.")
        e, kind, _ = rest.split(".")
        experts.setdefault(layer, {})[int(e), kind] = q * scale
    for layer, w in experts.items():
        n = 1 + max(e for e, _ in w)
        gate_up = [torch.cat((w[e, "gate_proj"], w[e, "up_proj"])) for e in range(n)]
        out[f"{layer}.experts.gate_up_proj"] = torch.stack(gate_up)
        out[f"{layer}.experts.down_proj"] = torch.stack([w[e, "down_proj"] for e in range(n)])
    return out


def hugging_face(folder):
    config = json.loads((folder / "config.json").read_text())
    prefix = "language_model." if "text_config" in config else ""
    config = config.get("text_config", config)
    for key in ("quantization_config", "architectures", "model_type", "dtype"):
        config.pop(key)
    config = DeepseekV3Config(**{key: value for key, value in config.items() if value is not None})
    config._attn_implementation = "eager"
    net = DeepseekV3ForCausalLM(config).float().eval()
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(path))
    net.load_state_dict(dequantised(tensors, prefix), strict=True)
    return net


def compare(folder, tokens):
    """Logits and taps agree as float32 with float64 does, wherever no router decision is within rounding."""
    m = model.load(folder)
    margins = []
    pages = -(-len(tokens) // 64)
    view = model.kv.make_view([(0, 0, tokens, None)], [np.arange(pages)])
    ours, taps, _ = model.forward(m, view, model.new_kv(m, pages * 64), margins=margins)
    with torch.no_grad():
        out = hugging_face(folder)(torch.from_numpy(tokens)[None], output_hidden_states=True)
    theirs = out.logits[0].double().numpy()
    close = np.min(margins, axis=0) < 1e-5 if margins else np.zeros(len(tokens), bool)
    sure = np.cumsum(close) == 0
    assert sure.mean() > 0.5, "too many close decisions: choose another seed"
    error = np.abs(ours - theirs)[sure] / ours.std()
    assert np.median(error) < 5e-6 and error.max() < 3e-4, (np.median(error), error.max())
    assert (ours.argmax(1) == theirs.argmax(1))[sure].mean() > 0.99
    if m.drafter:  # layer i's output is their hidden_states[i + 1]; the last of those is normed
        ids = [i for i in m.drafter.shape.taps if i < m.shape.layers - 1]
        want = torch.cat([out.hidden_states[i + 1][0] for i in ids], dim=1).double().numpy()
        assert ids and np.abs(taps[:, : want.shape[1]] - want)[sure].max() < 3e-4 * want.std()


def test_nano(nano):
    rng = np.random.default_rng(4)
    compare(nano, np.concatenate(([4064], rng.integers(0, 4064, 599))))  # past YaRN's original length


YARN = fake_model.YARN
DRAFT = {**fake_model.SMALL3["draft"], "taps": [0, 1]}
RANDOM = [
    {},
    {"yarn": None, "heads": 3, "q_lora": 17, "kv_lora": 13, "nope": 5, "rope": 2, "v_head": 7},
    {"heads": 5, "shared": 2, "q_lora": 33, "kv_lora": 20, "rope": 6, "dense_layers": 0},
    {
        "dense_layers": 2,
        "heads": 1,
        "topk": 8,
        "yarn": {**YARN, "factor": 64.0, "original_max_position_embeddings": 16},
    },
    {"dense_layers": 3, "yarn": None, "prefix": "language_model.", "shards": 2},
    {"hidden": 96, "moe_inter": 32, "experts": 5, "topk": 1, "rope": 16, "yarn": {**YARN, "mscale": 0.7}},
    {
        "hidden": 32,
        "heads": 7,
        "rope": 4,
        "nope": 9,
        "shared": 3,
        "yarn": {**YARN, "beta_fast": 1.0, "mscale_all_dim": 0.4},
    },
    {"vocab": 101, "v_head": 24, "nope": 8, "yarn": {**YARN, "factor": 2.0, "mscale_all_dim": 0.0, "mscale": 0.0}},
    {"layers": 1, "dense_layers": 0, "topk": 3, "experts": 12, "inter": 96},
    {"layers": 4, "dense_layers": 2, "moe_inter": 64, "shared": 2, "q_lora": 5, "prefix": "language_model."},
    {"rope": 32, "yarn": {**YARN, "beta_fast": 8.0, "beta_slow": 2.0, "factor": 10.0}, "shards": 3},
    {"kv_lora": 100, "q_lora": 100, "heads": 9, "v_head": 3, "yarn": None, "experts": 16, "topk": 5},
]


@pytest.mark.parametrize("i", range(len(RANDOM)))
def test_random_folder(tmp_path, i):
    folder = fake_model.write_model(
        tmp_path, **{**fake_model.SMALL3, "seed": 100 + i, "draft": DRAFT if i < 3 else None, **RANDOM[i]}
    )
    vocab = {**fake_model.SMALL3, **RANDOM[i]}["vocab"]
    compare(folder, np.random.default_rng(i).integers(0, vocab, 90))
