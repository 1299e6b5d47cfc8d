"""The exactness contract where it is meant to hold: Kimi K2's widths on CUDA, random weights. On the CPU twin the same tests on
the same kind of model with small widths.

`whole` has every head and the full width of the experts; `rank` is what one rank of eight holds of each. Both have 384
experts of which a token is sent to 8, a drafter and its taps."""

from __future__ import annotations

import random
import shutil

import backend
import pytest
from exact import GREEDY, SAMPLINGS, Ask, Job, Reference, check, difference, prompts, run
from wide_model import write_wide_model

import kd

DRAFT = dict(layers=2, heads=64, kv_heads=8, head_dim=128, inter=2048, block=8, taps=[0, 1, 2], window=[2048, 0])
SMALL_DRAFT = dict(layers=2, heads=4, kv_heads=2, head_dim=32, inter=128, block=8, taps=[0, 1, 2], window=[64, 0])
SMALL = dict(hidden=128, q_lora=64, kv_lora=64, nope=32, rope=16, v_head=32, experts=24, draft=SMALL_DRAFT)
MODELS = {
    "cuda": {  # 17 GB and 4 GB
        "whole": dict(experts=384, dense_layers=2, vocab=163840, max_positions=16384, draft=DRAFT),
        "rank": dict(experts=384, heads=8, inter=2304, moe_inter=256, vocab=20480, max_positions=16384,
                     draft={**DRAFT, "heads": 8, "kv_heads": 1, "inter": 256}),
    },
    "cpu": {
        "whole": {**SMALL, **dict(dense_layers=2, heads=8, inter=256, moe_inter=64, vocab=4096)},
        "rank": {**SMALL, **dict(heads=1, inter=64, moe_inter=32, vocab=512)},
    },
}  # fmt: skip
# Prompts around pages and prefill chunks; the last but one decodes over 8,192, where attention takes larger groups.
LENGTHS = {"cuda": (1, 16, 63, 64, 130, 257, 300, 650), "cpu": (1, 16, 63, 64, 130)}
LONG = {"cuda": 8180, "cpu": 300}
CHUNKS = {"whole": (), "rank": (1, 100, 640)}  # beside 256
REPEATS = {"cuda": 100, "cpu": 10}
OPEN = dict(max_nodes=256, kv_bytes=1 << 30)


@pytest.fixture(scope="module", params=MODELS["cpu"])
def folder(request, tmp_path_factory):
    made = write_wide_model(tmp_path_factory.mktemp(request.param), **MODELS[backend.DEVICE][request.param])
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def engine(library, folder):
    with kd.Engine(folder, library=library, **OPEN) as made:
        yield made


@pytest.fixture(scope="module")
def asks(engine):
    rng = random.Random(5)
    lengths = LENGTHS[backend.DEVICE] * 2
    made = prompts(rng, engine.info.vocab_size, lengths)
    return [Ask(p, SAMPLINGS[i * 3 % 4 if i < len(lengths) // 2 else 0], 16) for i, p in enumerate(made)]


@pytest.fixture(scope="module")
def long(engine):
    (prompt,) = prompts(random.Random(6), engine.info.vocab_size, [LONG[backend.DEVICE]])
    return Ask(prompt, GREEDY, 24)


@pytest.fixture(scope="module")
def reference(engine, asks, long):
    """Plain decoding, each alone and cold, in an engine that has done nothing else yet."""
    made = Reference(engine)
    for ask in [*asks, long]:
        made(ask)
    return made


def test_the_model_is_worth_testing(engine, reference, asks):
    """Texts and hashes differ, and trees are right now and then."""
    results = [reference(a) for a in asks]
    assert len({t for t, _ in results}) > len(asks) / 2
    assert len({t for tokens, _ in results for t in tokens}) > len(asks)
    for _, hashes in results:
        assert len(set(hashes)) == len(hashes)
    before = engine.stats()
    run(engine, [Job(a, "heap", 64) for a in asks])
    assert engine.stats()["accepted_tokens"] - before["accepted_tokens"] > len(asks)


@pytest.mark.parametrize("builder", ["none", "chain", "heap", "device"])
def test_budgets(engine, reference, asks, builder):
    trees = (4, 7, 16, 33, 64, 128, 256) if backend.DEVICE == "cuda" else (4, 33, 200)
    budgets = {"none": (0,), "chain": (1, 3, 7)}.get(builder, trees)
    for i, budget in enumerate(budgets):
        check(engine, reference, [Job(asks[(i * 5 + j) % len(asks)], builder, budget) for j in range(5)])


def test_streams_in_any_order(engine, reference, asks):
    rng = random.Random(7)
    for n in (1, 2, 3, 7, 8, 16, 33, 64) if backend.DEVICE == "cuda" else (2, 7, 33):
        ways = (("none", 0), ("chain", 7), ("heap", 4), ("heap", 16), ("device", 8), ("device", 64))
        check(engine, reference, [Job(rng.choice(asks), *rng.choice(ways), rng.random() < 0.5) for _ in range(n)])


def test_a_long_context_and_its_company(engine, reference, asks, long):
    for cold, builder, budget in ((True, "device", 32), (False, "chain", 7), (False, "heap", 255)):
        check(engine, reference, [Job(long, builder, budget, cold), *(Job(a, "device", 8) for a in asks[:4])])


def test_cold_and_cached_prefix(engine, reference, asks):
    for cold in (True, False, False):
        before = engine.stats()["cached_tokens"]
        check(engine, reference, [Job(a, "device", 8, cold) for a in asks])
        hit = engine.stats()["cached_tokens"] - before
        assert (hit == 0) if cold else (hit > 0)


def test_repeats(engine, reference, asks):
    jobs = [Job(a, "device", 12) for a in asks[:4]]
    check(engine, reference, jobs)
    first = run(engine, jobs)
    for i in range(1, REPEATS[backend.DEVICE]):
        for got, want in zip(run(engine, jobs), first, strict=True):
            assert difference(got, want) is None, f"repeat {i}"


def test_prefill_chunks(library, folder, reference, asks, long):
    """In engines of their own, one of which gives what it is compared with another look."""
    for chunk in CHUNKS[folder.name.rstrip("0123456789")]:
        with kd.Engine(folder, library=library, prefill_chunk=chunk, **OPEN) as engine:
            check(engine, reference, [Job(a, "device", 8) for a in asks])
            check(engine, reference, [Job(long if chunk > 1 else asks[0], "none"), Job(asks[1], "heap", 64)])
