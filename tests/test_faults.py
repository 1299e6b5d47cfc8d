"""What happens when something breaks inside: the first fatal cause is kept, every request ends with it, nothing hangs."""

import ctypes
import threading
import time

import pytest

import kd
from kd.native import ffi


@pytest.fixture(scope="module")
def probe(test_library):
    return ctypes.CDLL(str(test_library))


def pointer(engine):
    return ctypes.c_void_p(int(ffi.cast("uintptr_t", engine._handle)))


@pytest.mark.parametrize("tp, rank", [(1, 0), (2, 1), (4, 0), (4, 3), (8, 5)])
def test_a_failing_rank_ends_everything_with_its_cause(probe, test_library, small3, tp, rank):
    """The others wait for it in a collective: they are woken, and the sentence is the failing rank's, not theirs."""
    with kd.Engine(small3, library=test_library, tp=tp, threads=tp) as engine:
        ids = {engine.submit([1, 2, 3], max_tokens=800, ignore_eos=True, credit=1 << 20) for _ in range(3)}
        assert engine.poll(10_000)
        began = time.monotonic()
        probe.kd_probe_break_rank(pointer(engine), rank, 0)
        ended, fatal = {}, 0
        while len(ended) < 3 or not fatal:
            events = engine.poll(10_000)
            assert events, "the engine hangs"
            for e in events:
                if e.type == "end":
                    ended[e.id] = e
                fatal += e.type == "fatal"
        assert time.monotonic() - began < 5
        assert set(ended) == ids
        names = {kd.native.status_names[e.status] for e in ended.values()}
        assert names == {"KD_E_FATAL"} and {e.finish for e in ended.values()} == {"error"}
        for call in (
            engine.unload,
            lambda: engine.submit([1], max_tokens=1),
            lambda: engine.cancel(1),
            engine.builders,
        ):
            named = rf"rank {rank} failed in step \d+ \(verify\): planted failure of rank {rank}"
            with pytest.raises(kd.KdError, match=named) as caught:
                call()
            assert caught.value.name == "KD_E_FATAL"
        assert engine.stats()["state"] == "fatal"
    # close() came back: no thread is stuck in a collective


def test_a_frozen_engine_still_answers(probe, test_library, small3):
    """Status is read without the engine thread, so a wedged step can be seen from outside; it goes on afterwards."""
    go = ctypes.c_int(0)
    with kd.Engine(small3, library=test_library) as engine:
        assert [e.type for e in engine.poll(1000)] == ["load"]
        probe.kd_probe_freeze(pointer(engine), ctypes.byref(go))
        try:
            id = engine.submit([1, 2, 3], max_tokens=3, ignore_eos=True)
            before = engine.stats()
            assert engine.poll(100) == []
            after = engine.stats()
            assert after["waiting"] == 1 and after["turns"] == before["turns"]
            assert engine.info.vocab_size == 259
        finally:
            go.value = 1
        events = []
        while not events or events[-1].type != "end":
            events += engine.poll(10_000)
        assert {e.id for e in events} == {id} and events[-1].finish == "length"


def test_cancelling_waits_for_no_round(probe, test_library, small3):
    """A server's thread that waited would answer nobody else meanwhile. What was told stays true."""
    go = ctypes.c_int(0)
    with kd.Engine(small3, library=test_library) as engine:
        assert [e.type for e in engine.poll(1000)] == ["load"]
        probe.kd_probe_freeze(pointer(engine), ctypes.byref(go))
        told: list[str] = []
        try:
            ids = [engine.submit([1, 2, 3], max_tokens=3, ignore_eos=True) for _ in range(3)]
            thread = threading.Thread(
                target=lambda: told.extend(engine.cancel(id) for id in (ids[0], ids[0], ids[2], 0, 99)), daemon=True
            )
            thread.start()
            thread.join(10)
            assert told == ["cancelled", "already_done", "cancelled", "not_found", "not_found"]
        finally:
            go.value = 1
        ended = {}
        while len(ended) < 3:
            ended |= {e.id: e for e in engine.poll(10_000) if e.type == "end"}
        assert [ended[id].finish for id in ids] == ["cancelled", "length", "cancelled"]
        assert [kd.native.status_names[ended[id].status] for id in ids] == ["KD_E_CANCELLED", "KD_OK", "KD_E_CANCELLED"]
        assert engine.stats()["cancelled"] == 2 and engine.stats()["finished"] == 1


@pytest.mark.parametrize("what", ["fails", "cycle", "token", "siblings", "too many", "elsewhere"])
def test_a_bad_builder_costs_speed_only(library, small3, what):
    """Whatever a builder returns is checked; the round goes on without a tree, the failure is counted, no bit changes."""
    from exact import Ask, Job, run

    native = ffi

    @native.callback("void *(int32_t)")
    def create(max_nodes):
        return native.cast("void *", 8)

    @native.callback("int32_t(void *, const kd_tree_in *, kd_tree_out *)")
    def build(self, given, out):
        n = min(given.budget, 4)
        for i in range(n):
            out.token[i], out.parent[i] = 10 + i, i
        out.n = n
        if what == "fails":
            return -64
        if what == "cycle":
            out.parent[0] = 1
        if what == "token":
            out.token[n - 1] = 1 << 30
        if what == "siblings":
            out.parent[1], out.token[1] = 0, out.token[0]
        if what == "elsewhere":
            out.token = native.NULL
        if what == "too many":
            out.n = given.budget + 1
        return 0

    @native.callback("void(void *)")
    def destroy(self):
        pass

    name, text = native.new("char[]", b"bad"), native.new("char[]", b"returns no tree")
    builder = native.new("kd_tree_builder *", dict(size=native.sizeof("kd_tree_builder"), abi=1, name=name, description=text,
                                                   create=create, build=build, destroy=destroy))  # fmt: skip
    with kd.Engine(small3, library=library) as engine:
        assert engine._lib.kd_builder_register(engine._handle, builder) == 0
        ask = Ask((1, 2, 3, 4, 5), max_tokens=12)
        want = run(engine, [Job(ask)])
        assert run(engine, [Job(ask, "bad", 4)]) == want
        s = engine.stats()
        assert s["builder_failures"] == 10  # every round that could draft: the last token needs none
        assert run(engine, [Job(ask, "heap", 4)]) == want


def test_who_polls_just_as_a_stream_sits_out_wakes_the_engine(probe, test_library, small3):
    """A stream with 17 unpolled events sits out. Polled between the engine's last look at it and its sleep, it was waited for by
    both sides for ever; poll_when_full() comes a little earlier and later than that, again and again."""
    with kd.Engine(small3, library=test_library, threads=1) as engine:
        for _ in range(12):
            request = engine.submit([1, 2, 3], max_tokens=400, ignore_eos=True, credit=1 << 20, builder="none")
            assert probe.kd_probe_poll_when_full(pointer(engine), 20)
            engine.cancel(request)
            while any(event.id == request for event in engine.poll(200)):
                pass
