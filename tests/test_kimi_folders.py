"""Published folders, small: read, computed as transformers computes them, and refused where they say what nobody here knows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_kimi import FORMS, QUANTIZATION, VISION, add_tokenizer, publish, random_deepseek, write_drafter

from kd import Engine, KdError

torch.set_num_threads(1)
N_SHAPES = 20


def theirs(net, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(logits [n, vocab], the smallest margin of a router decision at or before each position)."""
    margins = []

    def watch(gate, inputs, output):
        logits = output[0] if isinstance(output, tuple) else output
        choice = torch.sigmoid(logits.float()).reshape(len(tokens), -1) + gate.e_score_correction_bias
        best = choice.sort(descending=True).values
        margins.append(
            (best[:, gate.config.num_experts_per_tok - 1] - best[:, gate.config.num_experts_per_tok]).numpy()
        )

    hooks = [m.register_forward_hook(watch) for n, m in net.named_modules() if n.endswith("mlp.gate")]
    for _, m in net.named_modules():
        if not hasattr(m, "config"):
            m.config = net.config
    with torch.no_grad():
        logits = net(torch.from_numpy(tokens)[None]).logits[0].double().numpy()
    for hook in hooks:
        hook.remove()
    least = np.min(margins, axis=0) if margins else np.full(len(tokens), np.inf)
    return logits, np.minimum.accumulate(least)


@pytest.mark.parametrize("i", range(N_SHAPES))
def test_logits_are_those_of_transformers(library, tmp_path, i):
    rng = np.random.default_rng(6000 + i)
    form = FORMS[i % len(FORMS)]
    weights = random_deepseek(tmp_path / "transformers", rng)
    folder = tmp_path / "transformers"
    if form != "transformers":
        folder = publish(weights, tmp_path / "published", form, shards=int(rng.integers(2, 65)))
    tokens = rng.integers(0, weights.config["vocab_size"], 96)
    want, margin = theirs(weights.net, tokens)
    with Engine(folder, threads=1, library=library) as engine:
        got = engine.score(tokens.tolist()).astype(np.float64)
        assert engine.info.skipped_tensors == (len(VISION) if form in ("k2.5", "k2.6") else 0)
    sure = margin > 1e-5
    assert sure.mean() > 0.5, "too many close router decisions: choose another seed"
    error = np.abs(got - want)[sure] / want.std()
    assert np.median(error) < 1e-5 and error.max() < 5e-4, (np.median(error), error.max())
    assert (got.argmax(1) == want.argmax(1))[sure].mean() > 0.99


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    shape = {
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "hidden_size": 64,
        "vocab_size": 4096,
        "qk_rope_head_dim": 8,
    }
    return random_deepseek(tmp_path_factory.mktemp("kimi") / "model", np.random.default_rng(26), **shape)


@pytest.fixture(scope="module", params=["k2.5", "k2.6"])
def kimi(weights, nano, tmp_path_factory, request) -> Path:
    """A whole folder: 64 shards, tokenizer, drafter."""
    folder = publish(weights, tmp_path_factory.mktemp("published") / request.param, request.param)
    add_tokenizer(folder, nano / "tiktoken.model")
    write_drafter(folder / "draft", weights, np.random.default_rng(1), request.param)
    return folder


def test_a_whole_folder_decodes_and_speculates(library, kimi):
    assert len(list(kimi.glob("model-*-of-000064.safetensors"))) == 64
    with Engine(kimi, threads=1, library=library) as engine:
        assert engine.info.stop_ids == (1, 2)  # config.json and generation_config.json disagree: both stop
        assert engine.info.draft_layers == 6 and engine.info.draft_depth == 7
        assert engine.info.skipped_tensors == len(VISION)
        prompt = engine.tokenizer.encode("def f(x):\n    return x")
        plain = engine.generate(prompt, max_tokens=24, builder="none", ignore_eos=True, hash_logits=True)
        trees = engine.generate(
            prompt, max_tokens=24, builder="heap", budget=16, ignore_eos=True, hash_logits=True, cold=True
        )
        assert (plain.tokens, plain.hashes) == (trees.tokens, trees.hashes)
        assert "<|im_end|>" in engine.tokenizer.special
        typed = engine.tokenizer.encode("<|im_end|>")
        assert engine.tokenizer.special["<|im_end|>"] not in typed


def edit(folder: Path, change, name: str = "config.json") -> None:
    value = json.loads((folder / name).read_text())
    change(value)
    (folder / name).write_text(json.dumps(value))


def refused(library, folder: Path, *words: str) -> None:
    with pytest.raises(KdError) as caught, Engine(folder, threads=1, library=library):
        pass
    assert caught.value.name == "KD_E_MODEL"
    for word in words:
        assert word in caught.value.message, caught.value.message


@pytest.fixture
def folder(weights, tmp_path) -> Path:
    """To damage: two shards."""
    folder = publish(weights, tmp_path / "k2.6", "k2.6", shards=2)
    write_drafter(folder / "draft", weights, np.random.default_rng(1), "k2.6")
    return folder


DRAFTER_KEYS = {
    "causal_head": True,
    "sample_from_anchor": True,
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 256,
    "selector_top_k": 16,
    "output_multiplier": 2.0,
    "final_logit_softcapping": 30.0,
    "input_embedding_scale": 2.0,
    "sliding_window_non_causal": True,
    "shift_label": True,
    "pure_draft_prefix_len": 1,
}


@pytest.mark.parametrize("key", DRAFTER_KEYS)
def test_keys_of_other_drafters_are_refused_by_name(library, folder, key):
    edit(folder, lambda c: c["dflash_config"].update({key: DRAFTER_KEYS[key]}), "draft/config.json")
    refused(library, folder, f"dflash_config.{key}", "draft/config.json")


TARGET_KEYS = {
    "kda_layers": [1],
    "attn_res_block_size": 4,
    "qk_clip": True,
    "swiglu_limit": 7.0,
    "sliding_window": 128,
    "index_topk": 2048,
    "hash_layers": 3,
    "rope_interleave": False,
    "scoring_func": "softmax",
}


@pytest.mark.parametrize("key", TARGET_KEYS)
def test_keys_of_other_targets_are_refused_by_name(library, folder, key):
    edit(folder, lambda c: c["text_config"].update({key: TARGET_KEYS[key]}))
    refused(library, folder, f"text_config.{key}")


def test_fp8_checkpoints_are_told_how(library, folder):
    fp8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
    edit(folder, lambda c: c["text_config"].update(quantization_config=fp8))
    refused(library, folder, "quantization_config.quant_method", '"fp8"', "llm-compressor", "W4A16", "group size 32")


def test_bf16_checkpoints_are_told_how(library, folder):
    edit(folder, lambda c: c["text_config"].pop("quantization_config"))
    refused(library, folder, "quantization_config", "is missing", "llm-compressor")


QUANTIZATIONS = {
    "num_bits": lambda w: w.update(num_bits=8),
    "group_size": lambda w: w.update(group_size=128),
    "symmetric": lambda w: w.update(symmetric=False),
    "actorder": lambda w: w.update(actorder="group"),
    "type": lambda w: w.update(type="float"),
}


@pytest.mark.parametrize("key", QUANTIZATIONS)
def test_other_quantisations_are_refused_by_name(library, folder, key):
    def change(config):
        config["text_config"]["quantization_config"] = value = json.loads(json.dumps(QUANTIZATION))
        QUANTIZATIONS[key](value["config_groups"]["group_0"]["weights"])

    edit(folder, change)
    refused(library, folder, f"weights.{key}")


def test_links_out_of_the_folder_need_leave(library, kimi, tmp_path):
    folder = Path(shutil.copytree(kimi, tmp_path / "linked"))
    for name in ("model-00007-of-000064.safetensors", "tiktoken.model"):
        shutil.move(folder / name, tmp_path / name)
        (folder / name).symlink_to(tmp_path / name)
    refused(library, folder, "symbolic link", "tiktoken.model")
    (folder / "tiktoken.model").unlink()
    shutil.copy(tmp_path / "tiktoken.model", folder)
    refused(library, folder, "symbolic link", "model-00007")
    with Engine(threads=1, library=library) as engine:
        engine.load(folder, follow_links=True)
        assert engine.info.layers == 3


def test_the_download_cache_of_hugging_face_is_read(library, kimi, tmp_path):
    """snapshots/<revision>/<file> are links to ../../blobs/<hash>."""
    snapshot, blobs = tmp_path / "snapshots" / "0123abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for i, path in enumerate(sorted(p for p in kimi.iterdir() if p.is_file())):
        blob = blobs / f"{i:040x}"
        shutil.copy(path, blob)
        (snapshot / path.name).symlink_to(f"../../blobs/{blob.name}")
    with Engine(snapshot, threads=1, library=library) as engine:
        assert engine.info.layers == 3 and engine.tokenizer is not None
