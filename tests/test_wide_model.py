"""The wide random model of the bandwidth bench, in small: it loads, decodes, and its active bytes are counted rightly."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from wide_model import K2, write_wide_model

import kd

ROOT = Path(__file__).resolve().parent.parent
SMALL = {
    "hidden": 64, "heads": 4, "q_lora": 32, "kv_lora": 32, "nope": 16, "rope": 8, "v_head": 16, "moe_inter": 32,
    "topk": 2, "vocab": 256,
}  # fmt: skip


@pytest.fixture(scope="module")
def bandwidth():
    sys.path.insert(0, str(ROOT / "bench"))
    try:
        spec = importlib.util.spec_from_file_location("bandwidth", ROOT / "bench" / "bandwidth.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_wide_model(tmp_path_factory.mktemp("wide"), layers=3, experts=4, inter=96, **SMALL)


def test_it_decodes_and_chunks_of_the_prompt_do_not_matter(folder):
    outs = []
    for chunk in (1, 16):
        with kd.Engine(str(folder), prefix_cache=False, prefill_chunk=chunk, threads=2) as engine:
            assert (engine.info.experts, engine.info.layers) == (4, 3)
            done = engine.generate(list(range(20)), max_tokens=24, ignore_eos=True, hash_logits=True)
            outs.append((done.tokens, done.hashes))
    assert outs[0] == outs[1] and len(set(outs[0][0])) > 2


def test_active_bytes_are_the_weights_one_token_reads(folder, bandwidth):
    attention = 32 * 64 + 4 * 24 * 32 + (32 + 8) * 64 + 4 * 32 * 32 + 64 * 64  # q_a, q_b, kv_a, kv_b, o
    norms = 2 * 64 + 32 + 32
    bf16 = 3 * (attention + norms) + 3 * 96 * 64 + 2 * 3 * 32 * 64 + 64 + 256 * 64  # dense, shared, last norm, head
    router = 2 * 4 * 64
    expert = 3 * 32 * 64
    assert bandwidth.active_bytes(folder) == {
        "bf16": 2 * bf16 + 4 * router + 2 * 4 * 4,  # the router and its bias in fp32
        "int4": 2 * 2 * (expert // 2 + expert // 32 * 2),  # layers, experts of a token, nibbles and scales
    }


def test_the_default_widths_are_those_of_kimi_k2():
    config = {"hidden": 7168, "heads": 64, "q_lora": 1536, "kv_lora": 512, "moe_inter": 2048, "topk": 8}
    assert config.items() <= K2.items()


def test_reading_is_measured(bandwidth, tmp_path):
    read = bandwidth.reader(tmp_path)
    for threads in (1, 3):
        assert read(1 << 20, 1 << 16, 12, 4, threads, 2) > 0  # fixed bytes; of 12 pieces four a pass
