"""A Kimi-K2-family folder with INT4 experts as a GGUF file of architecture deepseek2.

    python gguf_folder.py FOLDER OUT.gguf [--experts q4_0|f32] [--dense bf16|f32]

compressed-tensors' INT4 in groups of 32 and GGUF's Q4_0 are the same numbers in another order: (nibble - 8) * scale. The
scale is bf16 there and fp16 here; one that fp16 cannot hold is an error, so a Q4_0 file holds the weights exactly. No
tokenizer is written: both engines are given token ids. Needs gguf and numpy.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np

GROUP = 32
Type = gguf.GGMLQuantizationType


def widen(bits: np.ndarray) -> np.ndarray:
    """bf16 bits -> float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


class Folder:
    """The tensors of a folder of safetensors files, read when asked for."""

    dtypes = {"BF16": np.uint16, "F32": np.float32, "I32": np.int32}

    def __init__(self, path: Path) -> None:
        self.config: dict[str, Any] = json.loads((path / "config.json").read_text())
        self.where: dict[str, tuple[Path, int, dict[str, Any]]] = {}
        for file in sorted(path.glob("*.safetensors")):
            with file.open("rb") as f:
                size = int.from_bytes(f.read(8), "little")
                for name, entry in json.loads(f.read(size)).items():
                    if name != "__metadata__":
                        self.where[name] = (file, 8 + size, entry)

    def raw(self, name: str) -> np.ndarray:
        file, start, entry = self.where[name]
        begin, end = entry["data_offsets"]
        with file.open("rb") as f:
            f.seek(start + begin)
            return np.frombuffer(f.read(end - begin), self.dtypes[entry["dtype"]]).reshape(entry["shape"])

    def floats(self, name: str) -> np.ndarray:
        raw = self.raw(name)
        return widen(raw) if raw.dtype == np.uint16 else raw.astype(np.float32)

    def int4(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Nibbles 0 .. 15 [rows, groups, 32] and float32 scales [rows, groups]."""
        words = self.raw(name + ".weight_packed").view(np.uint32)
        nibbles = (words[..., None] >> (4 * np.arange(8, dtype=np.uint32)) & 15).astype(np.uint8)
        return nibbles.reshape(words.shape[0], -1, GROUP), self.floats(name + ".weight_scale")


def q4_0(nibbles: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Bytes of Q4_0 rows: per group an fp16 scale, then byte i holds elements i and i + 16."""
    half = scales.astype(np.float16)
    if not np.array_equal(half.astype(np.float32), scales):
        raise ValueError("a scale does not fit fp16: this folder has no exact Q4_0 form")
    pairs = nibbles[..., : GROUP // 2] | nibbles[..., GROUP // 2 :] << 4
    return np.concatenate([half[..., None].view(np.uint8), pairs], -1).reshape(nibbles.shape[0], -1)


def write_keys(w: gguf.GGUFWriter, c: dict[str, Any]) -> None:
    w.add_block_count(c["num_hidden_layers"])
    w.add_context_length(c["max_position_embeddings"])
    w.add_embedding_length(c["hidden_size"])
    w.add_feed_forward_length(c["intermediate_size"])
    w.add_head_count(c["num_attention_heads"])
    w.add_head_count_kv(1)  # the latent is the only KV head
    w.add_layer_norm_rms_eps(c["rms_norm_eps"])
    w.add_vocab_size(c["vocab_size"])
    w.add_leading_dense_block_count(c["first_k_dense_replace"])
    w.add_q_lora_rank(c["q_lora_rank"])
    w.add_kv_lora_rank(c["kv_lora_rank"])
    w.add_key_length(c["kv_lora_rank"] + c["qk_rope_head_dim"])
    w.add_value_length(c["kv_lora_rank"])
    w.add_key_length_mla(c["qk_nope_head_dim"] + c["qk_rope_head_dim"])
    w.add_value_length_mla(c["v_head_dim"])
    w.add_expert_feed_forward_length(c["moe_intermediate_size"])
    w.add_expert_count(c["n_routed_experts"])
    w.add_expert_used_count(c["num_experts_per_tok"])
    w.add_expert_shared_count(c["n_shared_experts"])
    w.add_expert_weights_scale(c["routed_scaling_factor"])
    w.add_expert_weights_norm(c["norm_topk_prob"])
    w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    w.add_rope_dimension_count(c["qk_rope_head_dim"])
    w.add_rope_freq_base(c["rope_theta"])
    scaling = c.get("rope_scaling")
    if scaling:
        w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        w.add_rope_scaling_factor(scaling["factor"])
        w.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
        w.add_rope_scaling_yarn_log_mul(0.1 * scaling["mscale_all_dim"])
    w.add_tokenizer_model("none")


def convert(folder: Path, out: Path, experts: str = "q4_0", dense: str = "bf16") -> None:
    f = Folder(folder)
    c = f.config
    w = gguf.GGUFWriter(out, "deepseek2")
    w.add_name(folder.name)
    write_keys(w, c)

    def vector(to: str, name: str) -> None:
        w.add_tensor(to, f.floats(name))

    def matrix(to: str, values: np.ndarray) -> None:
        values = np.ascontiguousarray(values, np.float32)
        if dense == "bf16":  # the values are bf16 already, so cutting the low half off is exact
            high = (values.view(np.uint32) >> 16).astype(np.uint16)
            w.add_tensor(to, high.view(np.uint8), raw_dtype=Type.BF16)
        else:
            w.add_tensor(to, values)

    matrix("token_embd.weight", f.floats("model.embed_tokens.weight"))
    matrix("output.weight", f.floats("lm_head.weight"))
    vector("output_norm.weight", "model.norm.weight")
    for i in range(c["num_hidden_layers"]):
        to, of = f"blk.{i}.", f"model.layers.{i}."
        vector(to + "attn_norm.weight", of + "input_layernorm.weight")
        vector(to + "ffn_norm.weight", of + "post_attention_layernorm.weight")
        vector(to + "attn_q_a_norm.weight", of + "self_attn.q_a_layernorm.weight")
        vector(to + "attn_kv_a_norm.weight", of + "self_attn.kv_a_layernorm.weight")
        for theirs, ours in (
            ("attn_q_a", "q_a_proj"),
            ("attn_q_b", "q_b_proj"),
            ("attn_kv_a_mqa", "kv_a_proj_with_mqa"),
            ("attn_output", "o_proj"),
        ):
            matrix(f"{to}{theirs}.weight", f.floats(f"{of}self_attn.{ours}.weight"))
        kv_b = f.floats(of + "self_attn.kv_b_proj.weight").reshape(
            c["num_attention_heads"], c["qk_nope_head_dim"] + c["v_head_dim"], c["kv_lora_rank"]
        )
        matrix(to + "attn_k_b.weight", kv_b[:, : c["qk_nope_head_dim"]].transpose(0, 2, 1))
        matrix(to + "attn_v_b.weight", kv_b[:, c["qk_nope_head_dim"] :])
        if i < c["first_k_dense_replace"]:
            for kind in ("gate", "up", "down"):
                matrix(f"{to}ffn_{kind}.weight", f.floats(f"{of}mlp.{kind}_proj.weight"))
            continue
        w.add_tensor(to + "ffn_gate_inp.weight", f.floats(of + "mlp.gate.weight"))
        vector(to + "exp_probs_b.bias", of + "mlp.gate.e_score_correction_bias")
        for kind in ("gate", "up", "down"):
            matrix(f"{to}ffn_{kind}_shexp.weight", f.floats(f"{of}mlp.shared_experts.{kind}_proj.weight"))
            each = [f.int4(f"{of}mlp.experts.{e}.{kind}_proj") for e in range(c["n_routed_experts"])]
            if experts == "q4_0":
                packed = np.stack([q4_0(*e) for e in each])
                w.add_tensor(f"{to}ffn_{kind}_exps.weight", packed, raw_dtype=Type.Q4_0)
            else:
                values = [((n.astype(np.float32) - 8) * s[..., None]).reshape(n.shape[0], -1) for n, s in each]
                w.add_tensor(f"{to}ffn_{kind}_exps.weight", np.stack(values))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--experts", choices=("q4_0", "f32"), default="q4_0")
    parser.add_argument("--dense", choices=("bf16", "f32"), default="bf16")
    options = parser.parse_args()
    convert(options.folder, options.out, options.experts, options.dense)


if __name__ == "__main__":
    main()
