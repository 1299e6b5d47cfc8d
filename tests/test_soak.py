"""Many requests of mixed sizes that end in every way; afterwards everything is back where it was. KD_SOAK_REQUESTS sets how
many (default 600; `make long` runs 20,000)."""

import os
import random
import threading

import psutil
import pytest

import kd

REQUESTS = int(os.environ.get("KD_SOAK_REQUESTS", "600"))


def baseline(engine):
    s = engine.stats()
    assert s["streams"] == 0 and s["waiting"] == 0, s
    assert s["pages_free"] + s["pages_cached"] == s["pages_total"], s
    assert s["requests"] == s["finished"] + s["cancelled"] + s["failed"], s
    return s


def test_requests_that_end_in_every_way(library, small3):
    """Queued, in prefill, in mid-round, in the last round, starved of credit, under swaps: every request has exactly one end,
    its events have no gaps, and pages, places and counters are back at the baseline."""
    rng = random.Random(6)
    with kd.Engine(small3, library=library, max_streams=12, max_queue=64, kv_bytes=8 << 20, prefill_chunk=40,
                   slow_reader_timeout_ms=150, max_nodes=32) as engine:  # fmt: skip
        next_sequence, live, ends, submitted = {}, set(), {}, 0
        while submitted < REQUESTS or live:
            if submitted < REQUESTS and rng.random() < 0.6:
                prompt = [rng.choice((3, 4))] * rng.randrange(0, 150) + [
                    rng.randrange(250) for _ in range(rng.randrange(1, 9))
                ]
                builder = rng.choice((None, "none", "chain", "heap"))
                try:
                    id = engine.submit(
                        prompt, max_tokens=rng.choice((1, 2, 17, 60)), ignore_eos=rng.random() < 0.5,
                        credit=rng.choice((1, 3, 256)), cold=rng.random() < 0.3, builder=builder,
                        budget=0 if builder in (None, "none") else rng.randrange(1, 33),
                        stop_ids=(rng.randrange(250),) if rng.random() < 0.2 else (),
                        sampling=kd.Sampling(temperature=rng.choice((0.0, 1.0)), seed=rng.randrange(99)),
                    )  # fmt: skip
                    next_sequence[id] = 0
                    live.add(id)
                    submitted += 1
                except kd.KdError as e:
                    assert e.name == "KD_E_BUSY"
            if live and rng.random() < 0.15:
                engine.cancel(rng.choice(sorted(live)))
            if live and rng.random() < 0.3:
                engine.credit(rng.choice(sorted(live)), rng.randrange(1, 5))
            if rng.random() < 0.05:
                engine.use_builder(rng.choice(("none", "chain", "heap")))
            for e in engine.poll(0 if submitted < REQUESTS else 1000):
                if e.type == "load":
                    continue
                assert e.sequence == next_sequence[e.id], e
                next_sequence[e.id] += 1
                assert e.id in live, "an event after the end"
                if e.type == "end":
                    live.discard(e.id)
                    ends[e.id] = (e.finish, kd.native.status_names[e.status])
        s = baseline(engine)
        assert s["requests"] == REQUESTS == len(ends)
        kinds = set(ends.values())
        assert {("length", "KD_OK"), ("cancelled", "KD_E_CANCELLED"), ("error", "KD_E_SLOW_READER")} <= kinds, kinds


def test_load_and_unload_give_everything_back(library, nano):
    """Ten loads: threads, files and memory do not grow; unload reports what it freed. One model kept would be seen: it is more
    than twice the bound."""
    process = psutil.Process()
    with kd.Engine(library=library, kv_bytes=16 << 20) as engine:
        sizes = []
        for i in range(10):
            engine.load(nano)
            weights = engine.info.weight_bytes
            assert engine.info.weights_generation == i + 1
            assert engine.generate([1, 2, 3], max_tokens=5, ignore_eos=True).finish == "length"
            assert engine.unload() > weights // 2
            sizes.append((process.memory_info().rss, process.num_threads(), process.num_fds()))
        assert sizes[-1][1:] == sizes[1][1:]
        assert sizes[-1][0] - sizes[1][0] < weights // 2, sizes


def test_weights_generation_keeps_prefixes_apart(library, small3):
    """A prompt cached under one load is not found under the next."""
    with kd.Engine(small3, library=library) as engine:
        prompt = list(range(100))
        first = engine.generate(prompt, max_tokens=4, ignore_eos=True)
        assert engine.generate(prompt, max_tokens=4, ignore_eos=True).cached_tokens == 99
        engine.unload()
        engine.load(small3)
        again = engine.generate(prompt, max_tokens=4, ignore_eos=True)
        assert again.cached_tokens == 0 and again.tokens == first.tokens


def test_submitting_from_many_threads(library, small3):
    """Submit and cancel from eight threads while one polls: ids are distinct, every request ends once."""
    with kd.Engine(small3, library=library, max_queue=4096) as engine:
        ids, lock = [], threading.Lock()

        def client(seed):
            rng = random.Random(seed)
            for _ in range(25):
                id = engine.submit([rng.randrange(200)], max_tokens=rng.randrange(1, 8), ignore_eos=True)
                if rng.random() < 0.3:
                    engine.cancel(id)
                with lock:
                    ids.append(id)

        threads = [threading.Thread(target=client, args=(i,)) for i in range(8)]
        for t in threads:
            t.start()
        ended = []
        while len(ended) < 200:
            events = engine.poll(10_000)
            assert events
            ended += [e.id for e in events if e.type == "end"]
        for t in threads:
            t.join()
        assert sorted(ended) == sorted(ids) and len(set(ids)) == 200
        baseline(engine)


@pytest.mark.parametrize("chunk", [16, 256])
def test_a_full_cache_makes_requests_wait_not_fail(library, small3, chunk):
    with kd.Engine(small3, library=library, kv_bytes=1 << 20, prefill_chunk=chunk, max_nodes=16) as engine:
        pages = engine.stats()["pages_total"]
        ids = {
            engine.submit([i] * 100, max_tokens=20, ignore_eos=True, builder="heap", budget=8) for i in range(4 * pages)
        }
        most, ended = 0, set()
        while ended != ids:
            events = engine.poll(10_000)
            assert events
            most = max(most, engine.stats()["streams"])
            for e in events:
                if e.type == "end":
                    assert e.finish == "length"
                    ended.add(e.id)
        assert 1 <= most <= pages // 3
        baseline(engine)
