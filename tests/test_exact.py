"""The exactness contract on the 3-layer random model: tokens and logits are the same bits whatever the tree, the budget, the
other streams, the order they came in, the chunks of a prompt or a prefix hit. Every dimension exhaustively, then at random;
KD_EXACT_COMBINATIONS sets how many (default 2,000; `make long` runs 50,000)."""

import ctypes
import os
import random

import backend
import pytest
from exact import GREEDY, SAMPLINGS, Ask, Job, Reference, check, difference, prompts, random_job, run

import kd
from kd.native import ffi

COMBINATIONS = int(os.environ.get("KD_EXACT_COMBINATIONS", "2000"))
VOCAB = 259
OPEN = dict(threads=1, max_nodes=256, kv_bytes=64 << 20)


@pytest.fixture(scope="module")
def asks(small3):
    rng = random.Random(3)
    # Around the 16-key steps and the 64-token pages, and long enough that attention has keys below B(position).
    lengths = (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 100, 130)
    return [Ask(p, SAMPLINGS[i % len(SAMPLINGS)]) for i, p in enumerate(prompts(rng, VOCAB, lengths))]


@pytest.fixture(scope="module")
def engine(library, small3):
    with kd.Engine(small3, library=library, **OPEN) as made:
        yield made


@pytest.fixture(scope="module")
def reference(library, small3):
    """Another engine: none of the varied runs can have left anything behind in it."""
    with kd.Engine(small3, library=library, prefix_cache=False, max_streams=1, **OPEN) as made:
        yield Reference(made)


def test_the_model_is_worth_testing(engine, reference, asks):
    """Sampling changes the text, hashes differ from row to row, and trees accept something: else the rest shows nothing."""
    tokens, hashes = reference(Ask(asks[10].prompt, GREEDY))
    assert len(set(tokens)) > 1 and len(set(hashes)) == len(hashes)
    assert len({reference(Ask(asks[10].prompt, s))[0] for s in SAMPLINGS}) == len(SAMPLINGS)
    before = engine.stats()
    run(engine, [Job(a, "heap", 16) for a in asks])
    after = engine.stats()
    assert after["accepted_tokens"] - before["accepted_tokens"] > 20


@pytest.mark.parametrize("budget", range(1, 16))
def test_chain_of_every_length(engine, reference, asks, budget):
    check(engine, reference, [Job(a, "chain", budget) for a in asks])


@pytest.mark.parametrize("builder", ["heap", "device"])
@pytest.mark.parametrize("first", range(1, 257, 16))
def test_heap_of_every_budget(engine, reference, asks, builder, first):
    check(engine, reference, [Job(asks[b % len(asks)], builder, b) for b in range(first, first + 16)])


def test_device_builds_the_trees_of_heap(engine, asks):
    """Not only the same tokens: as many nodes and accepted tokens."""
    counts = {}
    for builder in ("heap", "device"):
        before = engine.stats()
        for budget in (1, 5, 16, 64):
            run(engine, [Job(a, builder, budget) for a in asks[:6]])
        after = engine.stats()
        counts[builder] = [after[k] - before[k] for k in ("round_nodes", "accepted_tokens")]
    assert counts["device"] == counts["heap"] and counts["heap"][1] > 20


def test_every_number_of_streams_in_any_order(engine, reference, asks):
    rng = random.Random(9)
    short = [Ask(a.prompt[:40], a.sampling, 6) for a in asks]
    for n in range(1, 65):
        jobs = [random_job(rng, short, 16) for _ in range(n)]
        rng.shuffle(jobs)
        check(engine, reference, jobs)


def test_a_round_of_n_streams_is_one_forward_call(test_library, small3, asks):
    """32 streams that begin together take the rounds of one of them, each a single forward call."""
    probe = ctypes.CDLL(str(test_library))
    same = Ask(asks[5].prompt, GREEDY, 20)
    with kd.Engine(small3, library=test_library, prefix_cache=False, **OPEN) as engine:
        hold = ctypes.c_int(0)  # the engine thread waits until all are submitted
        probe.kd_probe_freeze(ctypes.c_void_p(int(ffi.cast("uintptr_t", engine._handle))), ctypes.byref(hold))
        ids = {engine.submit(same.prompt, max_tokens=20, ignore_eos=True, builder="none") for _ in range(32)}
        hold.value = 1
        while ids:
            ids -= {e.id for e in engine.poll(10_000) if e.type == "end"}
        s = engine.stats()
    # 32 prompts of 31 tokens are 4 steps of 256 rows, a round after each; the last to begin has 19 rounds more to go.
    assert s["prefill_steps"] == 4 and s["rounds"] == 3 + 19
    assert s["round_streams"] == s["round_rows"] == 32 * 19
    assert s["forward_calls"] == s["prefill_steps"] + s["rounds"]


@pytest.mark.parametrize("first", range(1, 513, 64))
def test_every_prefill_chunk(library, small3, reference, first):
    rng = random.Random(first)
    for chunk in range(first, first + 64):
        ask = Ask(tuple(rng.randrange(VOCAB - 6) for _ in range(chunk + rng.randrange(1, 9))), SAMPLINGS[chunk % 4], 3)
        short = Ask(ask.prompt[: rng.randrange(1, 20)], GREEDY, 3)
        with kd.Engine(small3, library=library, prefill_chunk=chunk, **OPEN) as engine:
            check(engine, reference, [Job(ask, "heap", 8), Job(short, "chain", 4)])


def test_cold_and_cached_prefix(engine, reference, asks):
    """The same prompt again, prompts that share a beginning, whole pages and parts of one."""
    stem = asks[11].prompt  # 130 tokens
    family = [
        Ask(stem[:n] + tail, SAMPLINGS[n % 4], 8)
        for n in (1, 15, 63, 64, 65, 127, 128, 129, 130)
        for tail in ((), (5,), (7, 8, 9))
    ]
    for cold in (True, False, False):
        before = engine.stats()["cached_tokens"]
        check(engine, reference, [Job(family[-1], "heap", 8, cold)])  # is in the cache when the others come
        check(engine, reference, [Job(a, "heap", 8, cold) for a in family])
        hit = engine.stats()["cached_tokens"] - before
        assert (hit == 0) if cold else (hit > 0)
    for a in family:  # alone too, each on what the others left
        check(engine, reference, [Job(a, "chain", 6, False)])


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_tensor_parallel_within_itself(library, small3, asks, tp):
    """Each degree against its own plain decoding (a sum over ranks is another sum than one rank's)."""
    rng = random.Random(tp)
    few = [Ask(a.prompt, a.sampling, 10) for a in asks]
    with (
        kd.Engine(small3, library=library, tp=tp, max_streams=1, prefix_cache=False, **OPEN) as plain,
        kd.Engine(small3, library=library, tp=tp, prefill_chunk=48, **OPEN) as engine,
    ):
        reference = Reference(plain)
        check(engine, reference, [Job(a, "chain", 15) for a in few])
        check(engine, reference, [Job(few[b % len(few)], "heap", b) for b in (1, 4, 7, 16, 33, 64, 128, 256)])
        for n in (1, 3, 8, 17):
            check(engine, reference, [random_job(rng, few, 64) for _ in range(n)])


@pytest.mark.parametrize("isa", backend.engine_isas())
def test_every_instruction_set_within_itself(library, small3, asks, isa):
    try:
        plain = kd.Engine(small3, library=library, isa=isa, max_streams=1, prefix_cache=False, **OPEN)
    except kd.KdError as e:
        assert e.name == "KD_E_DEVICE"
        pytest.skip(f"this machine has no {isa}")
    few = [Ask(a.prompt, a.sampling, 8) for a in asks]
    with plain, kd.Engine(small3, library=library, isa=isa, threads=2, max_nodes=64, prefill_chunk=33) as engine:
        check(engine, Reference(plain), [Job(a, "heap", 5 + i, False) for i, a in enumerate(few)])


def test_threads_do_not_matter(library, small3, reference, asks):
    for threads in (2, 3, 5):
        with kd.Engine(small3, library=library, max_nodes=64, threads=threads) as engine:
            check(engine, reference, [Job(a, "heap", 12) for a in asks])


def test_cut_budgets_change_nothing(library, small3, reference, asks):
    """64 trees of 64 nodes do not fit 100 rows: they are cut, and no bit moves."""
    with kd.Engine(small3, library=library, max_rows=100, max_nodes=64, kv_bytes=128 << 20, threads=1) as engine:
        jobs = [Job(Ask(asks[i % 12].prompt, asks[i % 12].sampling, 6), "heap", 64) for i in range(64)]
        check(engine, reference, jobs)
        s = engine.stats()
        assert s["round_rows"] <= s["rounds"] * 100 and s["round_nodes"] > 0


def test_a_thousand_swaps_under_16_streams(engine, reference, asks):
    """Builders are swapped between rounds, for all streams or one; nothing drops, stalls or moves, and events repeat the
    generation of the swap."""
    rng = random.Random(1)
    long = [Ask(a.prompt, a.sampling, 120) for a in asks]
    wanted = [reference(a) for a in long]
    swaps, generations = 0, set()
    for _ in range(20):
        if swaps >= 1000:
            break
        live, tokens, hashes = {}, {}, {}
        for i in range(16):
            a = long[i % len(long)]
            id = engine.submit(a.prompt, max_tokens=a.max_tokens, sampling=a.sampling, hash_logits=True, ignore_eos=True,
                               credit=1 << 20)  # fmt: skip
            live[id], tokens[id], hashes[id] = wanted[i % len(long)], [], []
        open_ = set(live)
        given = set()
        while open_:
            name = rng.choice(("none", "chain", "heap"))
            budget = 0 if name == "none" else rng.randrange(1, 16)
            one = rng.choice(sorted(open_)) if rng.random() < 0.3 else 0
            try:
                given.add(engine.use_builder(name, budget, one))
                swaps += 1
            except kd.KdError as e:
                assert e.name == "KD_E_DONE" and one  # it ended meanwhile
            for e in engine.poll(0):
                if e.id not in live:
                    continue
                tokens[e.id] += e.tokens
                hashes[e.id] += e.hashes
                if e.tokens:
                    generations.add(e.builder_generation)
                if e.type == "end":
                    assert e.finish == "length"
                    open_.discard(e.id)
        assert len(given) == len(set(given))
        for id, want in live.items():
            assert difference((tuple(tokens[id]), tuple(hashes[id])), want) is None
    assert swaps >= 1000
    assert len(generations) > 20  # rounds really ran under many of them


def test_random_combinations(library, small3, asks):
    """Builder, budget, streams, chunk, prefix, sampling, TP and rows drawn together."""
    rng = random.Random(20)
    shapes = [
        dict(tp=1, prefill_chunk=256, max_rows=1024), dict(tp=1, prefill_chunk=1, max_rows=1024),
        dict(tp=1, prefill_chunk=7, max_rows=300), dict(tp=1, prefill_chunk=64, max_rows=128, max_streams=16),
        dict(tp=2, prefill_chunk=50, max_rows=512),
    ]  # fmt: skip
    few = [Ask(a.prompt, s, 10) for a in asks for s in SAMPLINGS]
    engines = [kd.Engine(small3, library=library, **{**OPEN, **shape}) for shape in shapes]
    plain = {tp: kd.Engine(small3, library=library, tp=tp, max_streams=1, prefix_cache=False, **OPEN) for tp in (1, 2)}
    references = {tp: Reference(e) for tp, e in plain.items()}
    done = 0
    try:
        while done < COMBINATIONS:
            i = rng.choices(range(len(shapes)), weights=(4, 2, 3, 3, 1))[0]
            jobs = [random_job(rng, few, 256) for _ in range(rng.choice((1, 2, 3, 5, 8, 16, 24)))]
            check(engines[i], references[shapes[i]["tp"]], jobs)
            done += len(jobs)
        for e in engines:
            s = e.stats()
            assert s["builder_failures"] == 0 and s["streams"] == 0
            assert s["pages_free"] + s["pages_cached"] == s["pages_total"]
    finally:
        for e in [*engines, *plain.values()]:
            e.close()


def test_a_flipped_bit_is_named(reference, asks):
    tokens, hashes = reference(asks[0])
    flipped = hashes[:7] + (hashes[7] ^ 1,) + hashes[8:]
    assert "logit hash 7" in difference((tokens, flipped), (tokens, hashes))
