"""kdctl: every verb, its exit codes, its JSON, on the real engine with the embedded model."""

from __future__ import annotations

import json
import re
import sys
import threading
from types import SimpleNamespace

import pytest
from daemons import ROOT, Daemon, until
from kdctl_calls import caller, place_of

from kdctl import output
from kdctl.bench import percentile
from kdctl.verify import first_difference

kdctl = pytest.fixture(caller)
place = pytest.fixture(place_of)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory, library, nano):
    made = Daemon(
        tmp_path_factory.mktemp("real"), "--tp", "2", "--set", "server.publish_interval_ms=200", model=nano, fake=None
    ).wait(timeout_s=120)
    yield made
    made.kill()


@pytest.fixture
def on(kdctl, daemon):
    """kdctl, with the module's daemon."""
    return lambda *words, code=0: kdctl(*words, code=code, endpoint=daemon.serve)


# ---- looking


def test_status(on):
    data = on("status", "-o", "json").json
    assert data["state"] == "ready" and data["ready"] and data["model"]["name"] == "nano"
    assert data["stats"]["pages_total"] > 0
    assert (data["daemon"]["device"], data["daemon"]["tp"]) == ("cpu", 2)
    text = on("status").out
    assert re.search(r"^device +cpu, tp 2$", text, re.M)
    assert re.search(r"^state +ready$", text, re.M) and "nano" in text and "heap" in text
    assert on("-o", "json", "status").json["state"] == "ready"  # before the verb as well


@pytest.mark.parametrize("probe", ["--live", "--ready", "--startup"])
def test_health(on, probe):
    assert on("health", probe, "-o", "json").json["ok"] is True
    assert "yes" in on("health", probe).out


def test_health_asks_nothing_of_the_engine(on):
    before = on("status", "-o", "json").json["stats"]
    for _ in range(50):
        on("health", "--ready")
    after = on("status", "-o", "json").json["stats"]
    assert (before["forward_calls"], before["requests"]) == (after["forward_calls"], after["requests"])


def test_version(on, kdctl, place):
    data = on("version", "-o", "json").json
    assert data["daemon"] == data["client"] and data["abi"] == 1 and data["protocol_max"] == 1
    assert "none" in kdctl("version").out
    assert kdctl("version", "-o", "json").json["daemon"] is None


def test_events(on):
    data = on("events", "-o", "json").json
    assert {e["topic"] for e in data["events"]} == {"state", "metrics"}
    assert all(json.loads(one)["schema"] == "kdctl/event.v1" for one in on("events", "-o", "ndjson").out.splitlines())
    assert "state=ready" in on("events", "--topic", "state").out
    on("events", "-f", "-o", "json", code=2)


def test_builders(on):
    data = on("builders", "list", "-o", "json").json
    assert {"none", "chain", "heap"} <= {b["name"] for b in data["builders"]}
    assert re.search(r"^heap +yes", on("builders", "list").out, re.M)
    try:
        assert on("builders", "use", "chain", "--budget", "5", "-o", "json").json["generation"] > 0
        assert on("status", "-o", "json").json["stats"]["builder"] == "chain"
    finally:
        on("builders", "use", "heap")
    assert "oak" in on("builders", "use", "oak", code=5).err
    on("builders", "use", "none", "--stream", "12", code=2)
    on("builders", "use", "none", "--stream", "0" * 32, code=5)


def test_builders_check(kdctl, library, tmp_path):
    import numpy as np

    vectors = ROOT / "tests" / "data" / "ddtree_vectors.npz"
    data = kdctl("builders", "check", "heap", "--vectors", vectors, "-o", "json").json
    assert data["equal"] and data["checked"] == 120
    wrong = dict(np.load(vectors))
    wrong["003/tokens"] = wrong["003/tokens"].copy()
    wrong["003/tokens"][2] += 1
    np.savez(tmp_path / "wrong.npz", **wrong)
    data = kdctl("builders", "check", "heap", "--vectors", tmp_path / "wrong.npz", "-o", "json", code=1).json
    assert data["checked"] == 3 and "case 003, node 3: token" in data["difference"]
    (tmp_path / "no.npz").write_bytes(b"PK nothing")
    assert (
        "not a file of tree vectors" in kdctl("builders", "check", "heap", "--vectors", tmp_path / "no.npz", code=1).err
    )
    kdctl("builders", "check", "oak", "--vectors", vectors, code=5)


# ---- generating


def test_generate(on):
    data = on("generate", "def f(x):\n", "--max-tokens", "12", "-o", "json").json
    assert len(data["tokens"]) == 12 and data["finish"] == "length" and data["text"]
    done = on("generate", "def f(x):\n", "--max-tokens", "12", "--stats")
    assert done.out.rstrip("\n") == data["text"].rstrip("\n") and "tokens a round" in done.err
    chunks = [
        json.loads(one) for one in on("generate", "def f(x):\n", "--max-tokens", "12", "-o", "ndjson").out.splitlines()
    ]
    assert "".join(c["text"] for c in chunks[:-1]) == chunks[-1]["text"] == data["text"]
    ids = on(
        "generate",
        "--ids",
        " ".join(map(str, on("tokenize", "def f(x):\n", "-o", "json").json["tokens"])),
        "--max-tokens",
        "12",
        "--echo-ids",
    ).out
    assert [int(word) for word in ids.split()] == data["tokens"]
    plain = on("generate", "def f(x):\n", "--max-tokens", "12", "--builder", "none", "-o", "json").json
    assert plain["tokens"] == data["tokens"] and plain["rounds"] == 12


def test_generate_samples_by_seed(on):
    def text(seed):
        return on("generate", "x = ", "--temperature", "1", "--seed", seed, "--max-tokens", "30", "-o", "json").json[
            "tokens"
        ]

    assert text(1) == text(1) != text(2)


def test_generate_reads_standard_input(on, monkeypatch):
    import io

    monkeypatch.setattr(sys, "stdin", io.StringIO("def f(x):\n"))
    data = on("generate", "-", "--max-tokens", "5", "-o", "json").json
    assert data["tokens"] == on("generate", "def f(x):\n", "--max-tokens", "5", "-o", "json").json["tokens"]


def test_generate_says_what_is_wrong(on):
    error = json.loads(on("generate", "x", "--max-tokens", "100000", "-o", "json", code=2).err)
    assert error["schema"] == "kdctl/error.v1" and error["name"] == "CONTEXT" and "2048" in error["message"]
    assert "oak" in on("generate", "x", "--builder", "oak", code=5).err
    on("generate", "x", "--budget", "4", code=2)
    on("generate", "1 two", "--ids", code=2)
    on("generate", "x", "--temperature", "-1", code=2)


def test_chat(on):
    data = on("chat", "Hello!", "--max-tokens", "8", "-o", "json").json
    assert data["prompt_tokens"] == len(on("tokenize", "--chat", "Hello!", "-o", "json").json["tokens"])
    more = on("chat", "Hello!", "--system", "Be brief.", "--max-tokens", "8", "-o", "json").json
    assert more["prompt_tokens"] > data["prompt_tokens"]


def test_tokenize_and_back(on):
    text = "naïve 🎉 def f():"
    ids = on("tokenize", text, "-o", "json").json["tokens"]
    assert on("detokenize", *ids, "-o", "json").json["text"] == text
    assert on("detokenize", *ids).out == text + "\n"
    assert [int(w) for w in on("tokenize", text).out.split()] == ids
    assert on("detokenize", "99999999", code=2).err


def test_generate_that_somebody_else_ends_has_failed(on, daemon):
    with daemon.client() as other:
        thread = threading.Thread(target=lambda: until(lambda: other.cancel_all(operator=True)))
        thread.start()
        done = on("generate", "def f():", "--max-tokens", "1500", "-o", "json", code=1)
        thread.join()
    assert done.json["finish"] == "cancelled"
    error = json.loads(done.err)
    assert (error["name"], error["message"]) == ("CANCELLED", "the operator cancelled the request")


def test_ps_and_cancel(on, daemon):
    with daemon.client() as client:
        stream = client.stream("def f():", max_tokens=1500, ignore_eos=True)
        next(stream)
        rows = on("ps", "-o", "json").json["requests"]
        assert [r["request"] for r in rows] == [stream.ident.hex()] and rows[0]["prompt_tokens"] > 0
        assert stream.ident.hex() in on("ps").out
        assert on("ps", "--own", "-o", "json").json["requests"] == []  # another connection's
        data = on("cancel", stream.ident.hex(), "-o", "json").json
        assert data["results"] == [{"request": stream.ident.hex(), "result": "cancelled"}]
        assert stream.read().finish == "cancelled"
        on("cancel", stream.ident.hex(), code=6)
        on("cancel", "ab" * 16, code=5)
        on("cancel", stream.ident.hex(), "ab" * 16, code=10)
        stream = client.stream("def f():", max_tokens=1500, ignore_eos=True)
        next(stream)
        assert on("cancel", "--all", "-o", "json").json["cancelled"] == 1
    on("cancel", code=2)
    on("cancel", "xyz", code=2)


# ---- verify and bench


def test_verify(on):
    data = on("verify", "--max-tokens", "24", "-o", "json").json
    assert data["equal"] and data["tokens"] == 72 and data["rounds"] < 72 and data["difference"] is None
    assert (
        "bits equal"
        in on("verify", "--prompt", "a = ", "--max-tokens", "8", "--streams", "0", "--temperature", "0.7").out
    )


def test_verify_names_the_first_difference(kdctl, tmp_path):
    """With an engine whose heap trees change tokens after the warm-up has passed."""
    daemon = Daemon(tmp_path, "--builder", "chain", fake={"diverge": "heap", "token_delay_s": 0.001}).wait()
    try:
        kdctl("verify", "--max-tokens", "10", endpoint=daemon.serve)
        data = kdctl("verify", "--max-tokens", "10", "--builder", "heap", "-o", "json", code=1, endpoint=daemon.serve)
        assert data.json["difference"]["at"] == 3 and data.json["difference"]["what"] == "token"
        assert "token 3" in data.err
    finally:
        daemon.kill()


def test_first_difference():
    def result(tokens, hashes):
        return SimpleNamespace(tokens=tokens, hashes=hashes)

    assert first_difference(result([1, 2], [5, 6]), result([1, 2], [5, 6])) is None
    assert first_difference(result([1, 2], [5, 6]), result([1, 2], [5, 7]))["what"] == "logits"
    assert first_difference(result([1, 2], [5, 6]), result([1], [5]))["what"] == "length"


def test_bench(on):
    data = on("bench", "--concurrency", "1,3", "--requests", "3", "--max-tokens", "16", "-o", "json", "-q").json
    assert [r["concurrency"] for r in data["rows"]] == [1, 3]
    for row in data["rows"]:
        assert row["tokens"] == 48 and row["errors"] == 0 and row["tokens_per_second"] > 0
        assert row["first_token_p50_ms"] <= row["first_token_p99_ms"] and row["tokens_a_round"] > 1
    assert "TOKENS/S" in on("bench", "--concurrency", "1", "--requests", "1", "--max-tokens", "8").out
    on("bench", "--concurrency", "1,x", code=2)


def test_percentile():
    assert [percentile([3, 1, 2], p) for p in (50, 90, 99)] == [2, 3, 3]
    assert percentile([], 50) != percentile([], 50)


def test_no_color_and_no_terminal_are_plain(on):
    assert "\x1b" not in on("status").out
    assert not output.wants_color(no_color=True)
