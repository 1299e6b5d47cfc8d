"""Whole models of odd shapes: the engine's logits are the specification's, and trees change no bit."""

import random

import backend
import numpy as np
import pytest
from exact import SAMPLINGS, Ask, Job, Reference, check, prompts
from fake_model import SMALL3, YARN, write_model
from ref import model as ref

import kd

DRAFT = dict(layers=1, heads=3, kv_heads=1, head_dim=10, inter=96, block=7, taps=[0, 1], window=None)
ODD = {
    "odd heads": dict(heads=3, q_lora=37, kv_lora=21, nope=7, rope=6, v_head=9, vocab=517, draft=DRAFT),
    "two shared experts": dict(heads=5, shared=2, experts=7, topk=3, moe_inter=96, vocab=1001, draft=None),
    "all layers routed": dict(dense_layers=0, experts=5, topk=5, yarn=None, draft={**DRAFT, "window": [24]}),
    "mostly dense": dict(dense_layers=2, hidden=96, inter=77, vocab=64, draft={**DRAFT, "block": 16, "layers": 2}),
    "as Kimi K2.5 nests it": dict(prefix="language_model.", shards=3, yarn={**YARN, "factor": 8.0}),
    "causal drafter": dict(experts=5, draft={**DRAFT, "config": {"is_causal": True}}),
    "one head": dict(heads=1, kv_lora=64, rope=2, vocab=33, draft=None),
}


@pytest.fixture(scope="module", params=ODD, ids=lambda name: name.replace(" ", "-"))
def folder(request, tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("odd"), **{**SMALL3, "seed": 5, **ODD[request.param]})


def test_logits_are_the_specifications(library, folder):
    spec = ref.load(folder, with_draft=False)
    rng = random.Random(1)
    tokens = [rng.randrange(spec.shape.vocab) for _ in range(150)]
    want = ref.score(spec, tokens)
    with kd.Engine(folder, library=library, draft="none", prefill_chunk=40) as engine:
        got = engine.score(tokens)
    assert got.shape == want.shape and got.dtype == np.float32
    backend.assert_logits(got, want)


def test_trees_change_no_bit(library, folder):
    rng = random.Random(2)
    has_draft = (folder / "draft").exists()
    with (
        kd.Engine(folder, library=library, max_streams=1, prefix_cache=False) as plain,
        kd.Engine(folder, library=library, prefill_chunk=24, max_nodes=128) as engine,
    ):
        assert engine.stats()["builder"] == (backend.DEFAULT_BUILDER[backend.DEVICE] if has_draft else "none")
        asks = [
            Ask(p, SAMPLINGS[i % 4], 14)
            for i, p in enumerate(prompts(rng, engine.info.vocab_size, (1, 16, 33, 70, 90)))
        ]
        builders = [("chain", 5), ("heap", 9), ("heap", 100), ("none", 0)] if has_draft else [("none", 0)]
        for cold in (True, False):
            check(engine, Reference(plain), [Job(a, *rng.choice(builders), cold) for a in asks * 2])


def test_degrees_that_do_not_divide_are_refused(library, tmp_path):
    path = write_model(tmp_path, **{**SMALL3, **ODD["odd heads"]})
    with pytest.raises(kd.KdError, match="3") as caught:
        kd.Engine(path, library=library, tp=2)
    assert caught.value.name == "KD_E_MODEL"
