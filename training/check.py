"""Step `check`: the exported folder against implementations that nobody here wrote.

transformers' DeepseekV3 for the target, the published dflash package for the drafter, compressed-tensors for the
packing. Raises AssertionError with the difference seen.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from training import int4
from training.export import read
from training.tokenizer import MASK

LARGEST_DIFFERENCE = 2e-3  # of logits whose spread is about 5, both in fp32


def _plain(folder: Path) -> dict[str, torch.Tensor]:
    """The folder's tensors, the experts dequantised."""
    files = set(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].values())
    stored = {}
    for file in sorted(files):
        stored |= load_file(folder / file)
    plain = {}
    for name, value in stored.items():
        if name.endswith("weight_packed"):
            scale = stored[name.replace("weight_packed", "weight_scale")]
            plain[name.replace("weight_packed", "weight")] = int4.dequantise(int4.unpack(value), scale)
        elif not name.endswith(("weight_scale", "weight_shape")):
            plain[name] = value.float()
    return plain


def packing(folder: Path) -> int:
    """Every packed matrix unpacked by compressed-tensors; returns how many there are."""
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    count = 0
    for file in sorted(set(index.values())):
        stored = load_file(folder / file)
        for name in (n for n in stored if n.endswith("weight_packed")):
            shape = torch.Size(stored[name.replace("weight_packed", "weight_shape")].tolist())
            assert torch.equal(unpack_from_int32(stored[name], 4, shape).to(torch.int8), int4.unpack(stored[name])), (
                name
            )
            count += 1
    return count


@torch.no_grad()
def target(folder: Path, length: int = 700) -> float:
    """Largest difference of the logits for random tokens, past the YaRN origin."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = json.loads((folder / "config.json").read_text())
    for name in ("quantization_config", "architectures", "model_type", "dtype"):
        config.pop(name, None)
    theirs_config = DeepseekV3Config(**{k: v for k, v in config.items() if v is not None})
    theirs_config._attn_implementation = "eager"
    theirs = DeepseekV3ForCausalLM(theirs_config).eval().float()
    weights, experts = _plain(folder), config["n_routed_experts"]
    for name in theirs.state_dict():
        base, fused, tensor = name.partition(".experts.")
        if fused and name not in weights:  # transformers 5 stacks a layer's experts
            names = ("gate_proj", "up_proj") if tensor == "gate_up_proj" else (tensor.removesuffix(".weight"),)
            weights[name] = torch.stack(
                [torch.cat([weights[f"{base}.experts.{e}.{n}.weight"] for n in names]) for e in range(experts)]
            )
    theirs.load_state_dict({k: v for k, v in weights.items() if k in theirs.state_dict()}, strict=True)
    ours, _ = read(folder)
    ids = torch.randint(0, 4064, (1, length), generator=torch.Generator().manual_seed(0))
    a, b = theirs(ids).logits[0], ours.lm_head(ours(ids)[0])[0]
    difference = (a - b).abs().max().item()
    assert difference < LARGEST_DIFFERENCE, f"transformers differs by {difference}"
    assert torch.equal(a.argmax(-1), b.argmax(-1)) or difference < 1e-4, "transformers has other best tokens"
    return difference


@torch.no_grad()
def drafter(folder: Path, context: int = 60) -> float:
    """Largest difference of the drafter's output states for one block."""
    from dflash.model import DFlashDraftModel

    theirs, info = DFlashDraftModel.from_pretrained(folder / "draft", dtype=torch.float32, output_loading_info=True)
    bad = {k: v for k, v in info.items() if v}
    assert not bad, f"dflash could not load every tensor: {bad}"
    ours_target, ours = read(folder)
    ids = torch.randint(0, 4064, (1, context), generator=torch.Generator().manual_seed(0))
    _, taps = ours_target(ids, ours.c.taps)
    block = ours_target.embed_tokens(torch.tensor([[17] + [MASK] * (ours.c.block - 1)]))
    positions = torch.arange(context + ours.c.block)[None]
    a = theirs.eval()(position_ids=positions, noise_embedding=block, target_hidden=taps)
    b = ours(block, taps, positions[:, context:], positions[:, :context], None)
    difference = (a - b).abs().max().item()
    assert difference < LARGEST_DIFFERENCE, f"dflash differs by {difference}"
    return difference


def run(work: Path) -> dict:
    folder = work / "export"
    report = dict(packed_matrices=packing(folder), transformers=target(folder), dflash=drafter(folder))
    (work / "evaluation").mkdir(parents=True, exist_ok=True)
    (work / "evaluation" / "check.json").write_text(json.dumps(report, indent=1))
    print(report, flush=True)
    return report
