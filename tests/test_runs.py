"""Runs: rounds that follow one another on the device, as long as nothing else is to be done. What a client sees of them is what
it sees of single rounds: the same tokens, the same events, its credit, its stops."""

import ctypes
import random

import backend
import exact
import pytest
from exact import SAMPLINGS, Ask, Job

import kd
from kd.native import ffi

AT_ONCE = (1, 2, 7, 64)
BUILDERS = [("none", 0), ("chain", 3), ("chain", 16), ("device", 1), ("device", 16), ("device", 64), ("heap", 16)]


@pytest.fixture(scope="module")
def probe(test_library):
    return ctypes.CDLL(str(test_library))


# Ranks that share a GPU meet on the host, which makes no runs.
RANKS = [1, 2] if backend.DEVICE == "cpu" or backend.gpus() > 1 else [1]


@pytest.fixture(scope="module", params=RANKS, ids=lambda tp: f"tp{tp}")
def engine(request, test_library, small3):
    with kd.Engine(small3, library=test_library, tp=request.param, threads=2, max_nodes=64) as opened:
        # Whichever test comes first finds events of requests alone.
        assert [e.type for e in opened.poll(60_000)] == ["load"]
        yield opened


@pytest.fixture(scope="module")
def at_once(probe, engine):
    """Sets how many rounds may follow one another before the engine looks."""

    def set_(rounds):
        probe.kd_probe_rounds_at_once(ctypes.c_void_p(int(ffi.cast("uintptr_t", engine._handle))), rounds)

    return set_


def events_of(engine, prompt=(3, 4, 5), max_tokens=100, credit=1 << 20, **asked):
    """Every event of one request."""
    id = engine.submit(prompt, max_tokens=max_tokens, ignore_eos=True, hash_logits=True, cold=True, credit=credit,
                       **asked)  # fmt: skip
    seen = []
    while not seen or seen[-1].type != "end":
        new = engine.poll(60_000)
        assert new, "no event for 60 s"
        seen += [e for e in new if e.id == id]
    return seen


def told(events):
    """What of events may not depend on how rounds were run."""
    return [(e.type, e.sequence, e.tokens, e.hashes, e.nodes, e.finish, e.total_tokens) for e in events]


@pytest.mark.parametrize("builder, budget", BUILDERS)
@pytest.mark.parametrize("sampling", SAMPLINGS[:2])
def test_events_are_those_of_single_rounds(engine, at_once, builder, budget, sampling):
    """Each round's tokens and trees, so also the drafts, whose taps must have been projected in time."""
    seen = []
    for rounds in AT_ONCE:
        at_once(rounds)
        before = engine.stats()
        seen.append(told(events_of(engine, builder=builder, budget=budget, sampling=sampling)))
        after = engine.stats()
        assert after["rounds"] - before["rounds"] == len(seen[-1]) - 1  # the first event is the prompt's
        assert after["device_ns"] > before["device_ns"]
        assert sum(after[k] - before[k] for k in ("gaps", "launch_gaps")) == len(seen[-1]) - 2
        if rounds > 1 and builder != "heap":
            assert after["gaps"] > before["gaps"]
    assert all(s == seen[0] for s in seen[1:])


@pytest.mark.parametrize("builder, budget", BUILDERS[1:])
@pytest.mark.parametrize("tokens", [8, 24])
def test_rounds_looked_at_one_by_one(engine, at_once, tokens, builder, budget):
    """Each its own record, no loop: trees give the bits of plain decoding."""
    at_once(1)

    def bits(**asked):
        seen = events_of(engine, max_tokens=tokens, **asked)
        return [t for e in seen for t in e.tokens], [h for e in seen for h in e.hashes]

    plain = bits(builder="none", budget=0)
    assert len(plain[0]) == tokens
    assert bits(builder=builder, budget=budget) == plain


def test_taps_wait_in_their_ring_and_are_not_lost(engine, at_once):
    """80 tokens without drafts, more than a ring holds, then trees: as good as when the engine looked at each round.

    Where the host is the device nobody polls during a run, so it ends after 17 events: only on a GPU can one be long enough
    to matter."""
    seen = []
    for rounds in AT_ONCE:
        at_once(rounds)
        id = engine.submit((9, 8, 7), max_tokens=160, ignore_eos=True, cold=True, credit=80, builder="none")
        events = []
        while len(events) < 80:
            events += engine.poll(60_000)
        engine.use_builder("device", 16, id)
        engine.credit(id, 1 << 20)
        while events[-1].type != "end":
            events += engine.poll(60_000)
        seen.append(told(events))
    assert all(s == seen[0] for s in seen[1:]) and any(e[4] for e in seen[0])


def test_many_streams_that_end_one_after_the_other(engine, at_once):
    rng = random.Random(5)
    asks = [Ask(p, SAMPLINGS[i % 4], 3 + 7 * i % 60) for i, p in enumerate(exact.prompts(rng, 256, range(2, 26)))]
    at_once(1)
    reference = exact.Reference(engine)
    jobs = [Job(a, *rng.choice((("none", 0), ("chain", 7), ("device", 8), ("device", 31)))) for a in asks]
    for rounds in AT_ONCE:
        at_once(rounds)
        exact.check(engine, reference, jobs)
    s = engine.stats()
    assert s["streams"] == 0 and s["pages_free"] + s["pages_cached"] == s["pages_total"]


@pytest.mark.parametrize("builder, budget", [("none", 0), ("device", 31)])
def test_a_stop_id_ends_the_stream_where_it_comes(engine, at_once, builder, budget):
    at_once(1)
    tokens = [t for e in events_of(engine, builder="none") for t in e.tokens]
    for at in (1, 2, 20, 21, 22, 23, 55):
        stop, cut = tokens[at], tokens.index(tokens[at])
        others = [t for t in range(256) if t not in tokens][:15]
        for rounds in AT_ONCE:
            at_once(rounds)
            got = events_of(engine, builder=builder, budget=budget, stop_ids=[*others, stop])
            assert [t for e in got for t in e.tokens] == tokens[: cut + 1] and got[-1].finish == "stop"
    s = engine.stats()
    assert s["streams"] == 0 and s["pages_free"] + s["pages_cached"] == s["pages_total"]


@pytest.mark.parametrize("rounds", AT_ONCE)
def test_credit_is_kept(engine, at_once, rounds):
    at_once(rounds)
    for builder, budget in (("none", 0), ("device", 8)):
        id = engine.submit((3, 4, 5), max_tokens=120, ignore_eos=True, credit=5, builder=builder, budget=budget)
        other = engine.submit((3, 4), max_tokens=120, ignore_eos=True, credit=1 << 20, builder=builder, budget=budget)
        seen = {id: [], other: []}
        while not seen[other] or seen[other][-1].type != "end":
            for e in engine.poll(60_000):
                seen[e.id].append(e)
        seen[id] += engine.poll(50)
        assert len(seen[id]) == 5 and seen[id][-1].type == "tokens"
        engine.credit(id, 3)
        while len(seen[id]) < 8:
            seen[id] += engine.poll(60_000)
        assert engine.poll(50) == []
        engine.cancel(id)
        assert [e.finish for e in engine.poll(60_000)] == ["cancelled"]


@pytest.mark.parametrize("rounds", AT_ONCE)
def test_who_does_not_poll_is_not_run_over(engine, at_once, rounds):
    """17 events may be unpolled; the stream then sits out and goes on where it was."""
    at_once(rounds)
    whole = told(events_of(engine, builder="none"))
    id = engine.submit((3, 4, 5), max_tokens=100, ignore_eos=True, hash_logits=True, cold=True, credit=1 << 20,
                       builder="none")  # fmt: skip
    other = engine.submit((1,), max_tokens=1)
    seen = []
    while not any(e.id == other for e in seen):
        seen += engine.poll(60_000, capacity=1)
    while seen[-1].type != "end" or seen[-1].id != id:
        seen += engine.poll(60_000, capacity=3)
    assert told([e for e in seen if e.id == id]) == whole


@pytest.mark.parametrize("rounds", AT_ONCE)
def test_commands_come_between_rounds(engine, at_once, rounds):
    """A run ends for whoever wants the engine: it is not 1,000 tokens later that a request is cancelled or a builder swapped."""
    at_once(rounds)
    ids = [
        engine.submit((i + 1,), max_tokens=900, ignore_eos=True, credit=1 << 20, builder="none", budget=0)
        for i in range(3)
    ]
    assert engine.poll(60_000)
    engine.use_builder("device", 8, ids[1])
    seen = {i: [] for i in ids}
    while not any(e.nodes for e in seen[ids[1]]):
        for e in engine.poll(60_000):
            seen[e.id].append(e)
    assert engine.cancel(ids[0]) == "cancelled"
    late = engine.submit((7,), max_tokens=2, ignore_eos=True)
    seen[late] = []
    while not seen[late] or seen[late][-1].type != "end":
        for e in engine.poll(60_000):
            seen[e.id].append(e)
    assert seen[ids[0]][-1].finish == "cancelled"
    for i in ids[1:]:
        assert seen[i][-1].type == "tokens", "the newcomer came only after the others had ended"
        engine.cancel(i)
    while engine.stats()["streams"]:
        engine.poll(1000)
    engine.poll(50)
