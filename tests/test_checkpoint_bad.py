"""JSON, safetensors headers, indexes and configs nobody should trust: each is refused with a sentence saying why."""

from __future__ import annotations

import copy
import json
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from load_probe import Probe, refused


@pytest.fixture(scope="session")
def probe(test_library) -> Probe:
    return Probe(test_library)


# ---- JSON ----------------------------------------------------------------------------------------------------

BAD_JSON = {
    b"": "byte 0",
    b"  ": "byte 2",
    b"\xef\xbb\xbf{}": "a byte order mark",
    b"{": "'}' is missing",
    b"[1": "']' is missing",
    b"[1,]": "comma",
    b'{"a":1,}': "comma",
    b"[,1]": "no value can start",
    b"[1 2]": "',' or ']'",
    b"{1:2}": "a number stands where a string should",
    b'{"a" 1}': "':' is missing",
    b'{"a":1,"a":2}': "key 'a' appears twice at byte 7",
    b'{"a":1,"\\u0061":2}': "appears twice",
    b'{"x":{"b":1,"c":2,"b":3}}': "key 'b' appears twice",
    b"{} x": "something follows",
    b"nul": "misspelt null",
    b"True": "no value can start",
    b"NaN": "no value can start",
    b"-Infinity": "digit is missing",
    b"01": "starts with a zero",
    b"-": "digit is missing",
    b"1.": "digit is missing",
    b".5": "no value can start",
    b"+1": "no value can start",
    b"1e": "digit is missing",
    b"0x10": "something follows",
    b"1e999": "does not fit a double",
    b"9223372036854775808": "does not fit 64 bits",
    b"-9223372036854775809": "does not fit 64 bits",
    b"0." + b"1" * 80: "too many digits",
    b'"abc': "no end",
    b'"a\nb"': "control character",
    b'"\\x"': "no such escape",
    b'"\\u12g4"': "four hexadecimal digits",
    b'"\\u12': "four hexadecimal digits",
    b'"\\u0000"': "zero character",
    b'"\\ud800"': "surrogate",
    b'"\\udc00"': "surrogate",
    b'"\\ud800\\u0041"': "surrogate",
    b'"\x80"': "not UTF-8",
    b'"\xc0\xaf"': "not UTF-8",
    b'"\xe0\x80\xaf"': "not UTF-8",
    b'"\xed\xa0\x80"': "not UTF-8",
    b'"\xf4\x90\x80\x80"': "not UTF-8",
    b'"\xf8\x88\x80\x80\x80"': "not UTF-8",
    b'"\xe2\x82': "not UTF-8",
    b"[" * 33: "nested too deeply",
    b'{"a":' * 33: "nested too deeply",
    b"[" * 1_000_000: "nested too deeply",
}


@pytest.mark.parametrize("text", BAD_JSON, ids=range(len(BAD_JSON)))
def test_bad_json_is_refused(probe, text):
    refused(lambda: probe.json(text), BAD_JSON[text], "byte")


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(value=JSON, escaped=st.booleans(), indent=st.sampled_from([None, 1]))
def test_json_reads_what_python_writes(probe, value, escaped, indent):
    assert probe.json(json.dumps(value, ensure_ascii=escaped, indent=indent).encode()) == value


def test_json_reads_32_levels(probe):
    assert probe.json(b"[" * 32 + b"]" * 32) == json.loads("[" * 32 + "]" * 32)


# ---- safetensors headers -----------------------------------------------------------------------------------------


def framed(header: bytes | dict, data: int = 0, length: int | None = None) -> tuple[bytes, int]:
    """(prefix and header, size of a file with `data` bytes behind them)."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text, 8 + len(text) + data


def tensor(begin: int, end: int, shape=None, dtype="U8", **more) -> dict:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end], **more}


BAD_HEADERS = [
    (framed(b"{}", length=2**63), "truncated"),
    (framed(b"{}", length=2**64 - 1), "truncated"),
    (framed(b"{}", length=3), "truncated"),
    (framed(b"", length=0), "2 to 100000000"),
    ((struct.pack("<Q", 100_000_001) + b"{}", 1 << 40), "2 to 100000000"),
    (framed(b"[]"), "does not start with '{'"),
    (framed(b" {}"), "does not start with '{'"),
    (framed(b"{} x"), "something follows"),
    (framed(b"{}", data=1), "1 bytes follow the last tensor"),
    (framed({"a": tensor(0, 8)}, data=7), "truncated: tensor 'a' ends at byte"),
    (framed({"a": tensor(0, 8)}, data=9), "1 bytes follow"),
    (framed({"a": tensor(0, 8), "b": tensor(4, 12)}, data=12), "'b' overlaps"),
    (framed({"a": tensor(0, 8), "b": tensor(0, 8)}, data=8), "'b' overlaps"),
    (framed({"a": tensor(0, 8), "b": tensor(9, 12)}, data=12), "hole before"),
    (framed({"a": tensor(1, 8)}, data=8), "hole before"),
    (framed(b'{"a":%s,"a":%s}' % (json.dumps(tensor(0, 8)).encode(), json.dumps(tensor(8, 16)).encode()), 16), "twice"),
    (framed({"a": tensor(8, 0, shape=[8])}, data=8), "ends before it begins"),
    (framed({"a": tensor(0, 8, shape=[-8])}, data=8), "negative dimension"),
    (framed({"a": tensor(-8, 0, shape=[8])}, data=8), "negative offset"),
    (framed({"a": tensor(0, 8, shape=[7])}, data=8), "do not match its shape"),
    (framed({"a": tensor(0, 8, shape=[2**62, 2, 8])}, data=8), "overflows"),
    (framed({"a": tensor(0, 8, shape=[2**32, 2**32, 8])}, data=8), "overflows"),
    (framed({"a": tensor(0, 8, shape=[2**63])}, data=8), "does not fit 64 bits"),
    (framed({"a": tensor(0, 8, shape=[2.0, 4])}, data=8), "fraction"),
    (framed({"a": tensor(0, 1, shape=[1] * 9)}, data=1), "more than 8 dimensions"),
    (framed({"a": tensor(0, 8, dtype="Q4")}, data=8), "unknown dtype 'Q4'"),
    (framed({"a": tensor(0, 8, dtype="F64", shape=[2])}, data=8), "do not match"),
    (framed({"a": tensor(0, 8, extra=1)}, data=8), "unknown key 'extra'"),
    (framed({"a": {"dtype": "U8", "shape": [8]}}, data=8), "no data_offsets"),
    (framed({"a": {"dtype": "U8", "data_offsets": [0, 8]}}, data=8), "no shape"),
    (framed({"a": {"shape": [8], "data_offsets": [0, 8]}}, data=8), "no dtype"),
    (framed({"a": {"dtype": "U8", "shape": [8], "data_offsets": [0]}}, data=8), "fewer than two"),
    (framed({"a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8, 8]}}, data=8), "more than two"),
    (framed({"a": 3}, data=8), "a number stands where an object should"),
    (framed({"__metadata__": {"format": 1}}), "a number stands where a string should"),
    (framed({"__metadata__": []}), "an array stands where an object should"),
    (framed({"": tensor(0, 8)}, data=8), "a tensor name has 0 bytes"),
    (framed({"n" * 1025: tensor(0, 8)}, data=8), "1025 bytes"),
    (framed({"a\nb": tensor(0, 8)}, data=8), "control character"),
    (framed({"a": tensor(2**62, 2**62 + 8)}, data=8), "hole before"),
]


@pytest.mark.parametrize("case", range(len(BAD_HEADERS)))
def test_bad_header_is_refused(probe, case):
    (data, size), words = BAD_HEADERS[case]
    refused(lambda: probe.safetensors(data, size), words)


def test_good_header_is_read(probe):
    header = {
        "__metadata__": {"format": "pt"},
        "b": tensor(6, 14, shape=[2, 2], dtype="I16"),
        "empty": tensor(6, 6, shape=[0, 5]),
        "a": tensor(0, 6, shape=[3, 1, 1], dtype="BF16"),
        "scalar": tensor(14, 18, shape=[], dtype="F32"),
    }
    data, size = framed(json.dumps(header).encode() + b"   ", data=18)
    base = size - 18
    assert probe.safetensors(data, size) == [
        {"name": "a", "dtype": "BF16", "shape": [3, 1, 1], "begin": base, "end": base + 6},
        {"name": "empty", "dtype": "U8", "shape": [0, 5], "begin": base + 6, "end": base + 6},
        {"name": "b", "dtype": "I16", "shape": [2, 2], "begin": base + 6, "end": base + 14},
        {"name": "scalar", "dtype": "F32", "shape": [], "begin": base + 14, "end": base + 18},
    ]


BAD_INDEXES = {
    b"{}": "no weight_map",
    b'{"weight_map": {}}': "no weight_map in it, or an empty one",
    b'{"weight_map": []}': "an array stands where an object should at byte 15, in weight_map;",
    b'{"weight_map": {"a": 1}}': "a number stands where a string should at byte 21, in weight_map.a;",
    b'{"weight_map": {"a": "m.safetensors", "a": "m.safetensors"}}': "twice",
    b'{"weight_map": {"a": "../m.safetensors"}}': "only plain names",
    b'{"weight_map": {"a": "..\\\\m.safetensors"}}': "only plain names",
    b'{"weight_map": {"a": "/etc/m.safetensors"}}': "only plain names",
    b'{"weight_map": {"a": "sub/m.safetensors"}}': "only plain names",
    b'{"weight_map": {"a": ".."}}': "only plain names",
    b'{"weight_map": {"a": ""}}': "only plain names",
    b'{"weight_map": {"a": ".safetensors"}}': "only plain names",
    b'{"weight_map": {"a": ".m.safetensors"}}': "only plain names",
    b'{"weight_map": {"a": "m.bin"}}': "only plain names",
    b'{"weight_map": {"a": "m\\n.safetensors"}}': "only plain names",
    b'{"weight_map": {"a": "%s.safetensors"}}' % (b"m" * 250): "only plain names",
    json.dumps({"weight_map": {f"t{i}": f"{i}.safetensors" for i in range(513)}}).encode(): "more than 512 files",
}


@pytest.mark.parametrize("text", BAD_INDEXES, ids=range(len(BAD_INDEXES)))
def test_bad_index_is_refused(probe, text):
    refused(lambda: probe.index(text), BAD_INDEXES[text])


# ---- config.json -------------------------------------------------------------------------------------------------

GONE = object()


def changed(config: dict, path: str, value) -> dict:
    """A copy of `config` with the member at `path` ("a.b") set, or taken out if `value` is GONE."""
    config = copy.deepcopy(config)
    *parents, key = path.split("/")
    inner = config
    for parent in parents:
        inner = inner[parent]
    if value is GONE:
        del inner[key]
    else:
        inner[key] = value
    return config


Q = "quantization_config"
WEIGHTS = f"{Q}/config_groups/group_0/weights"
BAD_CONFIGS = [
    ("architectures", ["LlamaForCausalLM"], "architectures", "LlamaForCausalLM"),
    ("architectures", ["DeepseekV3ForCausalLM", "X"], "architectures", "one name"),
    ("architectures", "DeepseekV3ForCausalLM", "architectures"),
    ("model_type", "kimi_k3", "model_type", "kimi_k3"),
    ("model_type", GONE, "model_type is missing"),
    ("hidden_size", GONE, "hidden_size is missing"),
    ("hidden_size", 0, "hidden_size is 0"),
    ("hidden_size", -256, "hidden_size is -256"),
    ("hidden_size", 65568, "hidden_size is 65568", "65536"),
    ("hidden_size", 2**62, "hidden_size"),
    ("hidden_size", 256.5, "hidden_size is 256.5"),
    ("hidden_size", "256", "hidden_size", "integer"),
    ("hidden_size", 250, "hidden_size is 250", "multiple of 32"),
    ("moe_intermediate_size", 48, "moe_intermediate_size is 48", "multiple of 32"),
    ("num_hidden_layers", 0, "num_hidden_layers is 0"),
    ("num_hidden_layers", 1025, "num_hidden_layers is 1025"),
    ("first_k_dense_replace", 7, "first_k_dense_replace is 7", "0 to 6"),
    ("num_attention_heads", 1025, "num_attention_heads"),
    ("num_key_value_heads", 4, "num_key_value_heads is 4", "8 only"),
    ("q_lora_rank", None, "q_lora_rank is missing or null"),
    ("kv_lora_rank", True, "kv_lora_rank is true", "integer"),
    ("qk_rope_head_dim", 15, "qk_rope_head_dim is odd"),
    ("qk_rope_head_dim", 2048, "qk_rope_head_dim"),
    ("n_routed_experts", 5000, "n_routed_experts"),
    ("num_experts_per_tok", 17, "num_experts_per_tok is 17", "1 to 16"),
    ("n_shared_experts", 17, "n_shared_experts"),
    ("n_shared_experts", 0, "n_shared_experts is 0"),
    ("n_shared_experts", None, "n_shared_experts is missing"),
    ("vocab_size", 2**21, "vocab_size"),
    ("max_position_embeddings", 2**22, "max_position_embeddings"),
    ("rms_norm_eps", 0, "rms_norm_eps"),
    ("rms_norm_eps", "1e-5", "rms_norm_eps", "a number"),
    ("routed_scaling_factor", -1, "routed_scaling_factor"),
    ("norm_topk_prob", 1, "norm_topk_prob is 1", "true or false"),
    ("n_group", 8, "n_group is 8"),
    ("n_group", GONE, "n_group is missing"),
    ("topk_group", 4, "topk_group is 4"),
    ("scoring_func", "softmax", 'scoring_func is "softmax"'),
    ("topk_method", "greedy", 'topk_method is "greedy"'),
    ("attention_bias", True, "attention_bias is true"),
    ("tie_word_embeddings", True, "tie_word_embeddings is true"),
    ("hidden_act", "gelu", 'hidden_act is "gelu"'),
    ("moe_layer_freq", 2, "moe_layer_freq is 2"),
    ("rope_interleave", False, "rope_interleave is false"),
    ("num_nextn_predict_layers", 17, "num_nextn_predict_layers"),
    ("sliding_window", 512, "sliding_window is 512"),
    ("eos_token_id", 4096, "eos_token_id is 4096"),
    ("eos_token_id", [1, -1], "eos_token_id[1] is -1"),
    ("eos_token_id", list(range(17)), "17 stop ids"),
    ("eos_token_id", "x", "eos_token_id"),
    ("rope_theta", GONE, "rope_theta is missing"),
    ("rope_theta", 0, "rope_theta is 0"),
    ("rope_scaling/type", "linear", 'rope_scaling.type is "linear"'),
    ("rope_scaling/type", "deepseek_yarn", "deepseek_yarn"),
    ("rope_scaling/rope_type", "llama3", "rope_scaling"),
    ("rope_scaling/factor", 0.5, "rope_scaling.factor is 0.5"),
    ("rope_scaling/factor", GONE, "rope_scaling.factor is missing"),
    ("rope_scaling/original_max_position_embeddings", GONE, "original_max_position_embeddings is missing"),
    ("rope_scaling/attn_factor", 2.0, "rope_scaling.attn_factor", "does not know that key"),
    ("rope_scaling", [1], "rope_scaling", "an object"),
    ("rope_parameters", {"rope_theta": 5e4, "rope_type": "default"}, "stands beside rope_scaling"),
    ("partial_rotary_factor", 0.5, "partial_rotary_factor"),
    # keys from other models that change the arithmetic
    ("mlp_bias", True, "mlp_bias is true"),
    ("qkv_bias", True, "qkv_bias is true", "does not know that key"),
    ("attn_logit_softcapping", 50.0, "attn_logit_softcapping"),
    ("final_logit_softcapping", 30.0, "final_logit_softcapping"),
    ("embedding_multiplier", 12.0, "embedding_multiplier"),
    ("residual_scale", 0.5, "residual_scale"),
    ("index_topk", 2048, "index_topk"),
    ("conv_kernel_size", 2, "conv_kernel_size"),
    ("layer_types", ["kda"], "layer_types"),
    ("use_qk_norm", True, "use_qk_norm"),
    ("swiglu_limit", 7.0, "swiglu_limit"),
    # quantisation
    (Q, GONE, "quantization_config is missing"),
    (f"{Q}/quant_method", "fp8", 'quant_method is "fp8"', "compressed-tensors"),
    (f"{Q}/quant_method", "gptq", 'quant_method is "gptq"'),
    (f"{Q}/format", "nvfp4-pack-quantized", "quantization_config.format"),
    (f"{Q}/quantization_status", "frozen", "quantization_status"),
    (f"{Q}/kv_cache_scheme", {"num_bits": 8}, "kv_cache_scheme"),
    (f"{Q}/sparsity_config", {"format": "sparse-24"}, "sparsity_config"),
    (f"{Q}/config_groups", {}, "holds 0 groups"),
    (f"{Q}/config_groups/group_1", {}, "holds 2 groups"),
    (f"{Q}/config_groups/group_0/input_activations", {"num_bits": 8}, "input_activations"),
    (f"{Q}/weight_block_size", [128, 128], "quantization_config.weight_block_size", "does not know that key"),
    (f"{Q}/config_groups/group_0/extra", 1, "group_0.extra", "does not know that key"),
    (f"{WEIGHTS}/num_bits", 8, "num_bits is 8"),
    (f"{WEIGHTS}/group_size", 128, "group_size is 128"),
    (f"{WEIGHTS}/symmetric", False, "symmetric is false"),
    (f"{WEIGHTS}/symmetric", GONE, "symmetric is missing"),
    (f"{WEIGHTS}/type", "float", 'type is "float"'),
    (f"{WEIGHTS}/strategy", "channel", 'strategy is "channel"'),
    (f"{WEIGHTS}/actorder", "group", "actorder"),
    (f"{WEIGHTS}/dynamic", True, "dynamic"),
    (f"{WEIGHTS}/zero_point", 3, "zero_point", "does not know that key"),
]
D = "dflash_config"
BAD_DRAFTS = [
    ("architectures", ["DFlash2DraftModel"], "DFlash2DraftModel"),
    ("model_type", "llama", 'model_type is "llama"'),
    ("hidden_size", 128, "hidden_size is 128", "the target's is 256"),
    ("vocab_size", 4097, "vocab_size is 4097", "the target's is 4096"),
    ("num_target_layers", 61, "num_target_layers is 61"),
    ("num_hidden_layers", 0, "num_hidden_layers"),
    ("num_key_value_heads", 3, "num_key_value_heads is 3", "draft 'none'"),
    ("head_dim", 31, "head_dim is 31"),
    ("block_size", GONE, "block_size is missing"),
    ("block_size", 1, "block_size is 1"),
    ("block_size", 18, "block_size is 18", "2 to 17"),
    (f"{D}/block_size", 8, "dflash_config.block_size differs"),
    (D, GONE, "dflash_config is missing"),
    (f"{D}/mask_token_id", 4096, "mask_token_id is 4096"),
    (f"{D}/mask_token_id", GONE, "mask_token_id is missing"),
    (f"{D}/target_layer_ids", [], "target_layer_ids"),
    (f"{D}/target_layer_ids", [1, 6], "target_layer_ids[1] is 6", "0 to 5"),
    (f"{D}/target_layer_ids", [2, 1], "not ascending"),
    (f"{D}/target_layer_ids", [1, 1], "not ascending"),
    (f"{D}/causal_head", True, "dflash_config.causal_head"),
    (f"{D}/sample_from_anchor", True, "dflash_config.sample_from_anchor"),
    (f"{D}/conv_kernel_size", 2, "dflash_config.conv_kernel_size"),
    (f"{D}/selector_rank", 256, "dflash_config.selector_rank"),
    (f"{D}/output_multiplier", 2.0, "dflash_config.output_multiplier"),
    (f"{D}/something_new", 1, "dflash_config.something_new"),
    (f"{D}/is_causal", True, "dflash_config.is_causal is true"),
    ("is_causal", 1, "is_causal is 1", "true or false"),
    (f"{D}/causal", "yes", 'dflash_config.causal is "yes"'),
    ("sliding_window_non_causal", "no", 'sliding_window_non_causal is "no"'),
    ("layer_types", ["full_attention"], "layer_types", "a list of 3"),
    ("layer_types", ["full_attention", "full_attention", "linear_attention"], "linear_attention"),
    ("layer_types", ["full_attention", "full_attention", "sliding_attention"], "sliding_window is missing"),
    ("hidden_act", "gelu", "hidden_act"),
    ("attention_bias", True, "attention_bias"),
    ("quantization_config", {"quant_method": "fp8"}, "quantization_config"),
    ("rope_theta", GONE, "rope_theta is missing"),
    ("rope_scaling", {"rope_type": "dynamic", "factor": 2.0}, '"dynamic"'),
    ("rope_scaling", {"rope_type": "yarn", "type": "default", "factor": 2.0}, "differ"),
]


@pytest.fixture(scope="module")
def configs(nano) -> tuple[dict, dict]:
    return json.loads((nano / "config.json").read_text()), json.loads((nano / "draft/config.json").read_text())


def case_id(case: tuple) -> str:
    return f"{case[0]} gone" if case[1] is GONE else f"{case[0]}={case[1]}"[:60]


@pytest.mark.parametrize("case", BAD_CONFIGS, ids=case_id)
def test_bad_config_is_refused(probe, configs, case):
    path, value, *words = case
    refused(lambda: probe.config(changed(configs[0], path, value)), "config.json", *words)


@pytest.mark.parametrize("case", BAD_DRAFTS, ids=case_id)
def test_bad_draft_config_is_refused(probe, configs, case):
    path, value, *words = case
    refused(lambda: probe.config(configs[0], draft=changed(configs[1], path, value)), "draft/config.json", *words)


CAUSAL = [  # is_causal, dflash_config.causal, sliding_window_non_causal -> layers (sliding, full, sliding), or a sentence
    (None, None, None, [0, 0, 0]),
    (False, None, None, [0, 0, 0]),
    (True, None, None, [1, 1, 1]),
    (None, True, None, [1, 1, 1]),
    (None, False, None, [0, 0, 0]),
    (True, True, None, [1, 1, 1]),
    (None, None, False, [1, 0, 1]),
    (None, None, True, [0, 0, 0]),
    (True, False, None, "dflash_config.causal differs from is_causal"),
    (False, True, None, "dflash_config.causal differs from is_causal"),
    (True, None, False, "sliding_window_non_causal stands beside is_causal or dflash_config.causal"),
    (None, False, False, "sliding_window_non_causal stands beside"),
]


@pytest.mark.parametrize("case", CAUSAL, ids=str)
def test_whether_a_block_is_causal_is_a_setting(probe, configs, case):
    whole, nested, non_causal, want = case
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    draft = configs[1] | {"layer_types": kinds, "sliding_window": 24}
    draft |= {"is_causal": whole, "sliding_window_non_causal": non_causal}
    draft["dflash_config"] = draft["dflash_config"] | {"causal": nested}
    if isinstance(want, str):
        refused(lambda: probe.config(configs[0], draft=draft), "draft/config.json", want)
    else:
        assert probe.config(configs[0], draft=draft)["draft"]["causal"] == want


HARMLESS = [
    ("some_future_note", "text"),
    ("transformers_version", "9.9"),
    ("qkv_bias", False),
    ("sliding_window", None),
    ("use_cache", False),
    ("moe_layer_freq", 1.0),
    ("image_token_index", 7),
    ("num_nextn_predict_layers", 1),
    ("architectures", GONE),
]


@pytest.mark.parametrize("case", HARMLESS, ids=lambda c: c[0])
def test_harmless_keys_change_nothing(probe, configs, case):
    got = probe.config(changed(configs[0], *case))
    want = probe.config(configs[0])
    assert {**got, "nextn_layers": 0} == {**want, "nextn_layers": 0}


def test_a_nested_text_config_is_checked_too(probe, configs):
    nested = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": configs[0]}
    assert probe.config(nested)["shape"] == probe.config(configs[0])["shape"]
    refused(lambda: probe.config(changed(nested, "text_config/n_group", 8)), "text_config.n_group is 8")
    refused(lambda: probe.config(changed(nested, f"text_config/{Q}", GONE)), f"{Q} is missing")
    refused(lambda: probe.config(changed(nested, "tie_word_embeddings", True)), "tie_word_embeddings is true")
    refused(lambda: probe.config(changed(nested, f"text_config/{WEIGHTS}/num_bits", 8)), f"text_config.{Q}")
    refused(lambda: probe.config({**nested, "model_type": "kimi_k2"}), "model_type")


def test_generation_config_is_checked(probe, configs):
    refused(
        lambda: probe.config(configs[0], {"eos_token_id": [4096]}), "generation_config.json", "eos_token_id[0] is 4096"
    )
    refused(lambda: probe.config(configs[0], {"eos_token_id": list(range(16))}), "17 stop ids")
