"""kd.Engine on the embedded model: loading, generating, opening and closing."""

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import fields
from pathlib import Path

import backend
import pytest
from engine_events import settled

from kd import Engine, KdError, NativeError, Sampling
from kd.engine import Completion, ModelInfo
from kd.native import ffi

ROOT = Path(__file__).resolve().parent.parent
PROMPT = "def fib(n):\n"


@pytest.fixture(scope="module")
def engine(library, nano):
    with Engine(nano, threads=2, library=library) as opened:
        yield opened


@pytest.fixture
def empty(library):
    with Engine(threads=1, library=library) as opened:
        yield opened


# ---- model -------------------------------------------------------------------------------------------------


def test_info(engine, nano):
    config = json.loads((nano / "config.json").read_text())
    info = engine.info
    assert isinstance(info, ModelInfo)
    assert (info.vocab_size, info.max_positions) == (config["vocab_size"], config["max_position_embeddings"])
    assert (info.layers, info.hidden_size) == (config["num_hidden_layers"], config["hidden_size"])
    assert (info.experts, info.experts_per_token) == (config["n_routed_experts"], config["num_experts_per_tok"])
    assert info.heads == config["num_attention_heads"]
    assert set(info.stop_ids) == {4065, 4066}
    assert info.draft_layers > 0 and info.draft_depth > 0 and info.weights_generation >= 1
    assert 0 < info.expert_bytes < info.weight_bytes and info.kv_tokens >= info.max_positions


def test_info_mirrors_the_header():
    names = [n for n, _ in ffi.typeof("kd_model_info").fields if n not in ("size", "n_stop_ids", "reserved0")]
    assert [f.name for f in fields(ModelInfo)] == names


def test_stats_has_every_field(engine):
    stats = engine.stats()
    assert set(stats) == {n for n, _ in ffi.typeof("kd_stats").fields} - {"size"}
    assert stats["state"] == "ready" == engine.state and stats["builder"]
    before = settled(engine)
    completion = engine.generate(PROMPT, max_tokens=12, cold=True)
    after = settled(engine)
    assert after["requests"] == before["requests"] + 1 and after["finished"] == before["finished"] + 1
    assert after["tokens"] - before["tokens"] == len(completion.tokens)
    assert after["round_nodes"] - before["round_nodes"] == completion.nodes
    assert after["accepted_tokens"] - before["accepted_tokens"] >= completion.accepted
    assert after["rounds"] - before["rounds"] == completion.rounds - 1  # the first token comes with the prompt


def test_idle_engine_holds_nothing(engine):
    engine.generate(PROMPT, max_tokens=4)
    stats = settled(engine)
    assert stats["streams"] == stats["waiting"] == 0
    assert stats["pages_free"] + stats["pages_cached"] == stats["pages_total"]


def test_without_a_model(empty):
    for call in (
        lambda: empty.info,
        empty.unload,
        empty.load_cancel,
        lambda: empty.score([1]),
        lambda: empty.submit([1], max_tokens=1),
        lambda: empty.generate([1]),
        lambda: empty.stream([1]),
    ):
        with pytest.raises(KdError) as error:
            call()
        assert error.value.name == "KD_E_STATE" and error.value.message
    assert empty.tokenizer is None and empty.chat is None and empty.state == "empty"
    with pytest.raises(KdError, match="no model is loaded"):
        empty.generate("text")
    assert empty.poll() == [] and empty.cancel(7) == "not_found"


def test_load_reports_progress_and_unload_frees(empty, nano):
    seen = []
    empty.load(nano, progress=seen.append)
    assert seen[-1]["phase"] == "done" and seen[-1]["bytes_done"] == seen[-1]["bytes_total"] > 10_000_000
    assert all(a["bytes_done"] <= b["bytes_done"] for a, b in zip(seen, seen[1:], strict=False))
    order = ["open", "read", "prepare", "swap", "done"]
    assert sorted(seen, key=lambda p: order.index(p["phase"])) == seen
    assert empty.load_progress()["phase"] == "done"
    (load,) = empty.poll(1000)
    assert (load.type, load.id, load.status) == ("load", 0, 0)
    with pytest.raises(KdError) as error:
        empty.load(nano)
    assert error.value.name == "KD_E_EXISTS"
    first = empty.generate(PROMPT, max_tokens=8)
    generation = empty.info.weights_generation
    assert empty.unload() > 0
    assert empty.tokenizer is None and empty.state == "empty"
    empty.load(nano)
    assert empty.info.weights_generation == generation + 1
    assert empty.generate(PROMPT, max_tokens=8).tokens == first.tokens


def test_load_without_waiting(empty, nano):
    empty.load(nano, wait=False)
    (event,) = empty.poll(60_000)
    assert (event.type, event.status, event.finish, event.tokens) == ("load", 0, None, ())
    assert empty.generate(PROMPT, max_tokens=2).tokens


@pytest.mark.parametrize(("draft", "has"), [("auto", True), ("none", False), ("path", True)])
def test_draft(empty, nano, draft, has):
    empty.load(nano, draft=nano / "draft" if draft == "path" else draft)
    assert (empty.info.draft_layers > 0) is has


def test_load_that_fails_leaves_an_engine_that_loads(empty, nano, tmp_path):
    with pytest.raises(KdError) as error:
        empty.load(tmp_path / "absent")
    assert error.value.name in ("KD_E_IO", "KD_E_MODEL") and "absent" in error.value.message
    with pytest.raises(KdError) as error:
        empty.load("zero\0inside")
    assert error.value.name == "KD_E_INVALID"
    broken = tmp_path / "broken"
    shutil.copytree(nano, broken)
    (broken / "tiktoken.model").write_text("nonsense\n")
    with pytest.raises(KdError) as error:
        empty.load(broken)
    assert error.value.name == "KD_E_MODEL" and "tiktoken.model:1" in error.value.message
    assert empty.state == "empty"
    empty.load(nano)
    assert empty.generate(PROMPT, max_tokens=2).tokens


def test_engine_that_cannot_load_closes(library, tmp_path):
    before = len(os.listdir("/proc/self/task"))
    with pytest.raises(KdError):
        Engine(tmp_path / "absent", threads=1, library=library)
    assert len(os.listdir("/proc/self/task")) == before, "its threads are still there"


def test_folder_without_tokenizer_serves_ids(empty, nano, tmp_path, engine):
    bare = tmp_path / "bare"
    shutil.copytree(nano, bare, ignore=shutil.ignore_patterns("tiktoken.model", "tokenizer_config.json", "*.jinja"))
    empty.load(bare)
    assert empty.tokenizer is None and empty.chat is None
    ids = engine.tokenizer.encode(PROMPT)
    found = empty.generate(ids, max_tokens=8)
    assert found.tokens == engine.generate(ids, max_tokens=8).tokens and found.text == ""
    with pytest.raises(KdError) as error:
        empty.submit(ids, max_tokens=4, stop_strings=["x"])
    assert error.value.name == "KD_E_STATE"


class Stop(Exception):
    pass


class SlowLoad:
    """The library, but the first wait for a load always runs out of time; keeps the names of what was called."""

    def __init__(self, lib):
        self.lib, self.called = lib, []

    def __getattr__(self, name):
        self.called.append(name)
        if name == "kd_load_wait" and self.called.count(name) == 1:
            return lambda *_: -25
        return getattr(self.lib, name)


def test_exception_in_progress_cancels_the_load(empty, nano):
    def stop(progress):
        raise Stop

    slow = empty._lib = SlowLoad(empty._lib)
    with pytest.raises(Stop):
        empty.load(nano, progress=stop)
    after = slow.called[slow.called.index("kd_load_progress") :]
    assert after[:3] == ["kd_load_progress", "kd_load_cancel", "kd_load_wait"], "cancelled, then waited for"
    # The load may have been over before it could be cancelled: then there is a model, else none.
    if empty.state == "ready":
        empty.unload()
    empty.load(nano)
    assert empty.state == "ready"


def test_close_inside_progress(library, nano):
    engine = Engine(threads=1, library=library)
    with pytest.raises(KdError) as error:
        engine.load(nano, progress=lambda p: engine.close())
        engine.info  # noqa: B018  the load was over before the first report: then this is the call that is refused
    assert error.value.name == "KD_E_STATE"


def test_ctrl_c_cancels_a_load(library, nano):
    """A real SIGINT while load() waits: KeyboardInterrupt comes out, and the engine can be used again."""
    code = f"""if True:
        import kd, os, signal, sys, threading
        engine = kd.Engine(threads=1, library={str(library)!r})
        sent = threading.Event()
        def progress(p):
            if not sent.is_set():
                sent.set()
                os.kill(os.getpid(), signal.SIGINT)
        try:
            engine.load({str(nano)!r}, progress=progress)
        except KeyboardInterrupt:
            print("interrupted", engine.state)
        if engine.state == "ready":
            engine.unload()
        engine.load({str(nano)!r})
        print(engine.state)
        engine.close()
    """
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT / "runtime")},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == "interrupted" and done.stdout.split()[-1] == "ready" and done.stderr == ""


# ---- generate ----------------------------------------------------------------------------------------------


def test_generate(engine):
    found = engine.generate(PROMPT, max_tokens=40, hash_logits=True, logprobs=True, ignore_eos=True)
    assert isinstance(found, Completion)
    assert len(found.tokens) == len(found.hashes) == len(found.logprobs) == 40 and found.finish == "length"
    assert all(h for h in found.hashes) and all(p <= 0 for p in found.logprobs)
    assert found.text == engine.tokenizer.decode(found.tokens)
    assert found.accepted == 40 - found.rounds and found.nodes > 0 and found.seconds > 0
    again = engine.generate(engine.tokenizer.encode(PROMPT), max_tokens=40, hash_logits=True, ignore_eos=True)
    assert (again.tokens, again.hashes) == (found.tokens, found.hashes) and again.logprobs == []
    assert engine.generate(PROMPT, max_tokens=4).hashes == []


def test_every_builder_gives_the_same_bits(engine):
    want = engine.generate(PROMPT, max_tokens=32, builder="none", hash_logits=True, cold=True)
    assert want.nodes == 0 and want.rounds == len(want.tokens) and want.accepted == 0
    for b in engine.builders():
        found = engine.generate(PROMPT, max_tokens=32, builder=b["name"], budget=8, hash_logits=True, cold=True)
        assert (found.tokens, found.hashes) == (want.tokens, want.hashes), b["name"]


def test_score_agrees_with_generate(engine):
    import numpy

    ids = engine.tokenizer.encode("import os\n\n\ndef main():\n    ")
    logits = engine.score(ids)
    assert logits.shape == (len(ids), engine.info.vocab_size) and logits.dtype == numpy.float32
    assert numpy.isfinite(logits).all()
    assert numpy.array_equal(logits, engine.score(ids)), "the same call gave other bits"
    assert numpy.array_equal(engine.score(ids[:5]), logits[:5]), "a row depends on rows behind it"
    assert engine.generate(ids, max_tokens=1, ignore_eos=True).tokens == [int(logits[-1].argmax())]
    for bad in ([], [1, -1], [1, 4096]):
        with pytest.raises(KdError) as error:
            engine.score(bad)
        assert error.value.name in ("KD_E_INVALID", "KD_E_TOKEN")


def test_sampling(engine):
    hot = Sampling(temperature=1.0, top_p=0.95, seed=7)
    first = engine.generate(PROMPT, max_tokens=24, sampling=hot)
    assert engine.generate(PROMPT, max_tokens=24, sampling=hot).tokens == first.tokens
    assert engine.generate(PROMPT, max_tokens=24, sampling=hot, builder="none").tokens == first.tokens
    others = [
        engine.generate(PROMPT, max_tokens=24, sampling=s).tokens
        for s in (
            Sampling(temperature=1.0, top_p=0.95, seed=8),
            Sampling(temperature=1.0, top_p=0.95, seed=7, choice=1),
        )
    ]
    assert first.tokens not in others and others[0] != others[1]
    one = Sampling(temperature=1.0, top_k=1, seed=3)
    assert engine.generate(PROMPT, max_tokens=12, sampling=one).tokens == engine.generate(PROMPT, max_tokens=12).tokens


def test_stops(engine):
    free = engine.generate(PROMPT, max_tokens=60, ignore_eos=True)
    at = next(i for i in range(5, 60) if free.tokens[i] not in free.tokens[:i])
    found = engine.generate(PROMPT, max_tokens=60, ignore_eos=True, stop_ids=[free.tokens[at]])
    assert found.tokens == free.tokens[: at + 1] and found.finish == "stop"
    # A stop string whose beginning stands in the text before it does.
    text = free.text
    start = next(i for i in range(10, 200) if text[i] in text[:i] and text.index(text[i : i + 2]) == i)
    found = engine.generate(PROMPT, max_tokens=60, ignore_eos=True, stop_strings=["\x00never", text[start : start + 2]])
    assert found.text == text[:start] and found.finish == "stop"
    assert found.tokens == free.tokens[: len(found.tokens)]


def test_prefix_cache(engine):
    ids = engine.tokenizer.encode("# a prompt that nobody else uses here\n" * 20)
    first = engine.generate(ids, max_tokens=6, hash_logits=True)
    second = engine.generate(ids, max_tokens=6, hash_logits=True)
    cold = engine.generate(ids, max_tokens=6, hash_logits=True, cold=True)
    assert (first.cached_tokens, cold.cached_tokens) == (0, 0) and 0 < second.cached_tokens < len(ids)
    assert first.tokens == second.tokens == cold.tokens and first.hashes == second.hashes == cold.hashes


def test_chat(engine):
    ids = engine.chat.render([{"role": "user", "content": "def f"}])
    assert engine.generate(ids, max_tokens=8).tokens


# ---- opening and closing -----------------------------------------------------------------------------------


def test_closed_engine(library, nano):
    engine = Engine(nano, threads=1, library=library)
    stream = engine.stream(PROMPT, max_tokens=1500, ignore_eos=True)
    engine.close()
    engine.close()
    assert "closed" in repr(engine)
    for call in (
        lambda: engine.info,
        engine.stats,
        lambda: engine.submit([1], max_tokens=1),
        engine.poll,
        lambda: engine.event_fd,
        lambda: engine.load(nano),
        engine.unload,
        lambda: next(stream),
    ):
        with pytest.raises(KdError) as error:
            call()
        assert error.value.name == "KD_E_STATE" and "closed" in error.value.message
    stream.close()


def test_close_while_others_wait(library, nano):
    engine = Engine(nano, threads=1, library=library)
    engine.poll(1000)  # the end of the load
    outcomes = []

    def poll():
        try:
            engine.poll(60_000)
        except KdError as error:
            outcomes.append(error.name)

    def generate():
        try:
            outcomes.append(engine.generate(PROMPT, max_tokens=1800, ignore_eos=True).finish)
        except KdError as error:
            outcomes.append(error.name)

    threads = [threading.Thread(target=t) for t in (poll, generate, generate)]
    for t in threads:
        t.start()
    while engine.stats()["streams"] < 2:
        time.sleep(0.001)
    engine.close()
    for t in threads:
        t.join(10)
    assert not any(t.is_alive() for t in threads)
    assert outcomes == ["KD_E_STATE"] * 3


def test_dropped_engine_frees_its_threads(library):
    before = len(os.listdir("/proc/self/task"))
    engine = Engine(threads=2, library=library)
    assert len(os.listdir("/proc/self/task")) > before
    del engine
    gc.collect()
    assert len(os.listdir("/proc/self/task")) == before


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"tp": 3}, "KD_E_INVALID"),
        *(({"tp": tp}, "KD_E_INVALID") for tp in (0, -1, True, "2", 2.5, None)),
        *(({name: True}, "KD_E_INVALID") for name in ("threads", "max_streams", "max_queue", "max_rows", "kv_bytes")),
        ({"share_devices": "no"}, "KD_E_INVALID"),
        ({"prefix_cache": "no"}, "KD_E_INVALID"),
        ({"isa": "mmx"}, "KD_E_INVALID"),
        ({"isa": []}, "KD_E_INVALID"),
        ({"tp": 1 << 40}, "KD_E_INVALID"),
        ({"kv_bytes": -1}, "KD_E_INVALID"),
        ({"threads": "many"}, "KD_E_INVALID"),
        ({"max_nodes": 257}, "KD_E_INVALID"),
    ],
)
def test_bad_options(library, options, name):
    with pytest.raises(KdError) as error:
        Engine(library=library, **options)
    assert error.value.name == name and next(iter(options)) in error.value.message


def test_numbers_that_are_none(empty):
    import numpy

    calls = [lambda v: empty.cancel(v), lambda v: empty.credit(1, v), lambda v: empty.use_builder("heap", v)]
    for call in calls:
        for value in (True, "1"):
            with pytest.raises(KdError, match="must be an integer"):
                call(value)
    with pytest.raises(KdError, match="must be True or False"):
        empty.drain("off")
    assert empty.cancel(numpy.uint64(7)) == "not_found" and empty.poll(numpy.int64(0)) == []


def test_no_cuda_here_is_said(monkeypatch, tmp_path):
    from kd import native

    monkeypatch.setattr(native, "_HERE", tmp_path)
    monkeypatch.setattr(native, "_ROOT", tmp_path)
    with pytest.raises(NativeError, match='no library for device "cuda"'):
        Engine(device="cuda")


def test_options_reach_the_engine(library, nano):
    with Engine(
        nano,
        tp=2,
        threads=2,
        isa=backend.engine_isas()[0],
        max_streams=2,
        max_nodes=8,
        prefill_chunk=16,
        prefix_cache=False,
        kv_bytes=8 << 20,
        library=library,
    ) as engine:
        ids = engine.tokenizer.encode(PROMPT * 10)
        assert engine.generate(ids, max_tokens=4).cached_tokens == engine.generate(ids, max_tokens=4).cached_tokens == 0
        stats = settled(engine)
        assert stats["prefill_steps"] == 2 * -(-len(ids) // 16) and stats["builder_budget"] <= 8
        with pytest.raises(KdError):
            engine.use_builder("heap", 9)


def test_interrupt_while_waiting(library, nano):
    """Ctrl-C during generate(): the request is cancelled, nothing is left behind."""
    code = f"""if True:
        import kd, os, signal, threading, time
        engine = kd.Engine({str(nano)!r}, threads=1, library={str(library)!r})
        def interrupt():
            while not engine.stats()["tokens"]:
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGINT)
        threading.Thread(target=interrupt).start()
        try:
            engine.generate([1, 2, 3], max_tokens=2000, ignore_eos=True)
        except KeyboardInterrupt:
            while engine.stats()["streams"]:
                time.sleep(0.001)
            print("interrupted", engine.stats()["cancelled"], len(engine._queues))
        engine.close()
    """
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT / "runtime")},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["interrupted", "1", "1"] and done.stderr == ""


def test_interpreter_exit_with_an_open_engine(library, nano):
    """No crash, no hang, when a program ends without closing."""
    code = f"import kd; e = kd.Engine({str(nano)!r}, threads=2, library={str(library)!r}); s = e.stream('x')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT / "runtime")},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "the library changed a signal handler"
