"""The wire format: conformance vectors, limits, bombs, mutation."""

from __future__ import annotations

import json
import random
import resource
import tracemalloc
from pathlib import Path

import msgpack
import pytest

from kd import protocol, wire
from kd.wire import ProtocolError

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
DOCUMENT = (ROOT / "docs" / "protocol.md").read_text()


def vectors(name: str) -> list[dict]:
    return json.loads((HERE / "conformance" / f"{name}.json").read_text())["vectors"]


def undo(value):
    """The JSON form of a body as the wire's types."""
    if isinstance(value, dict):
        if set(value) == {"bin"}:
            return bytes.fromhex(value["bin"])
        return {k: undo(v) for k, v in value.items()}
    return [undo(v) for v in value] if isinstance(value, list) else value


@pytest.mark.parametrize("vector", vectors("accept") + vectors("replies"), ids=lambda v: v["name"])
def test_accepts(vector):
    frames = [bytes.fromhex(f) for f in vector["frames"]]
    kind, ident, body = protocol.decode(frames, vector["socket"])
    assert (kind, ident.hex()) == (vector["type"], vector["id"])
    table = wire.REPLIES if vector["socket"] == "reply" else wire.REQUESTS[vector["socket"]]
    for name, given in undo(vector["body"]).items():
        if table[kind][name].kind == "ids":
            given = wire.unpack_ids(given)
        assert body[name] == given, name
    assert set(body) == set(table[kind])


@pytest.mark.parametrize("vector", vectors("reject"), ids=lambda v: v["name"])
def test_rejects(vector):
    with pytest.raises(ProtocolError) as caught:
        protocol.decode([bytes.fromhex(f) for f in vector["frames"]], vector["socket"])
    assert (caught.value.name, caught.value.code) == (vector["error"], vector["code"])
    assert caught.value.ident.hex() == vector["id"]
    assert caught.value.message


@pytest.mark.parametrize("vector", vectors("token_hash"), ids=lambda v: str(len(v["tokens"])))
def test_token_hash(vector):
    assert wire.hash_ids(vector["tokens"]).to_bytes(8, "little").hex() == vector["token_hash"]
    half = len(vector["tokens"]) // 2
    running = wire.hash_ids(vector["tokens"][half:], wire.hash_ids(vector["tokens"][:half]))
    assert running.to_bytes(8, "little").hex() == vector["token_hash"]


def test_encode_makes_what_the_vectors_hold():
    for vector in vectors("accept") + vectors("replies"):
        if "ignored" in vector["name"]:
            continue
        frames = protocol.encode(vector["type"], bytes.fromhex(vector["id"]), undo(vector["body"]))
        assert [f.hex() for f in frames] == vector["frames"], vector["name"]


def test_the_document_lists_every_error_type_and_field():
    for name, code in wire.ERRORS.items():
        assert f"| {code} | {name} |" in DOCUMENT
    for tables in (*wire.REQUESTS.values(), wire.REPLIES):
        for kind, fields in tables.items():
            assert kind in DOCUMENT
            for field in fields:
                assert field in DOCUMENT, f"{kind}.{field}"
    for limit in (
        wire.MAX_HEADER_BYTES,
        wire.MAX_FRAME_BYTES,
        *wire.MAX_BODY_BYTES.values(),
        wire.MAX_CONTAINERS,
        wire.MAX_ARRAY_ITEMS,
    ):
        assert f"{limit:,}" in DOCUMENT


def test_every_kd_status_has_an_error():
    import re

    header = (ROOT / "include" / "kd.h").read_text()
    statuses = {int(n) for n in re.findall(r"^    KD_E_\w+ = (-\d+)", header, re.M)}
    assert statuses == set(wire.STATUS_ERRORS)
    assert set(wire.STATUS_ERRORS.values()) <= set(wire.ERRORS)


def test_error_numbers_are_unique():
    assert len(set(wire.ERRORS.values())) == len(wire.ERRORS)


def map_frame(body: bytes) -> list[bytes]:
    return [wire.TAG, msgpack.packb({"t": "PING", "id": b"i" * 16}), body]


BOMBS = {
    "empty maps in arrays": b"\x81\xa1x\xdc\x04\x00" + (b"\xdc\x04\x00" + b"\x80" * 1024) * 1024,
    "empty arrays": b"\x81\xa1x\xdd\x00\x40\x00\x00" + b"\x90" * (4 << 20),
    "nested 100,000 deep": b"\x81\xa1x" + b"\x91" * 100_000 + b"\xc0",
    "nested maps": b"\x81\xa1x" * 50_000 + b"\xc0",
    "claims 4 GiB of text": b"\x81\xa1x\xdb\xff\xff\xff\xff",
    "claims 4 GiB of bytes": b"\x81\xa1x\xc6\xff\xff\xff\xff",
    "claims a 4 GiB extension": b"\x81\xa1x\xc9\xff\xff\xff\xff\x05",
    "many keys": b"\xde\xff\xff" + b"\xa1a\xc0" * 65535,
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_cost_little(name):
    tracemalloc.start()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    with pytest.raises(ProtocolError) as caught:
        protocol.decode(map_frame(BOMBS[name]), "serve")
    assert caught.value.name == "MALFORMED"
    seconds = resource.getrusage(resource.RUSAGE_SELF).ru_utime - before
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20, f"{peak} bytes"
    assert seconds < 0.5


def test_oversized_is_refused_before_decoding():
    with pytest.raises(ProtocolError) as caught:
        protocol.decode(map_frame(b"\x80" * (wire.MAX_BODY_BYTES["serve"] + 1)), "serve")
    assert caught.value.name == "TOO_LARGE"
    with pytest.raises(ProtocolError) as caught:
        protocol.decode(map_frame(msgpack.packb({"x": "y" * 5000})), "serve", limit=4096)
    assert caught.value.name == "TOO_LARGE" and caught.value.extra["limit"] == 4096


def mutate(rng: random.Random, frames: list[bytes]) -> list[bytes]:
    """A few random bytes flipped, cut, doubled or inserted; now and then a frame lost or added."""
    frames = list(frames)
    for _ in range(rng.randint(1, 4)):
        i = rng.randrange(len(frames))
        data = bytearray(frames[i])
        how = rng.randrange(6)
        if how == 0 and data:
            data[rng.randrange(len(data))] = rng.randrange(256)
        elif how == 1 and data:
            del data[rng.randrange(len(data)) :]
        elif how == 2:
            data[rng.randrange(len(data) + 1) : 0] = rng.randbytes(rng.randint(1, 8))
        elif how == 3 and data:
            at = rng.randrange(len(data))
            data[at:at] = data[at : at + rng.randint(1, 16)]
        elif how == 4 and data:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif how == 5:
            frames.insert(i, bytes(data)) if rng.random() < 0.2 else None
        frames[i] = bytes(data)
    return frames


def test_mutated_messages_are_decoded_or_refused_never_worse():
    rng = random.Random(1)
    seeds = [([bytes.fromhex(f) for f in v["frames"]], v["socket"]) for v in vectors("accept") + vectors("replies")]
    refused = accepted = 0
    for _ in range(30_000):
        frames, socket = rng.choice(seeds)
        try:
            kind, ident, body = protocol.decode(mutate(rng, frames), socket)
        except ProtocolError as error:
            assert error.name in wire.ERRORS and error.message and len(error.ident) == 16
            refused += 1
        else:
            assert isinstance(kind, str) and len(ident) == 16 and isinstance(body, dict)
            accepted += 1
    assert refused > 10_000 and accepted > 1000  # otherwise the mutations tell nothing


def test_error_bodies_fit_a_reply():
    error = ProtocolError("BAD_FIELD", "x" * 100_000)
    frames = protocol.encode("ERROR", bytes(16), error.body())
    assert protocol.decode(frames, "reply")[2]["code"] == 4


@pytest.mark.parametrize(
    "body, words",
    [
        (b"\x81\xa1x" + b"\x91" * 2000 + b"\xc0", "nested"),
        (b"\xc1", "begins no value"),
        (b"\x80\x80", "after the end"),
        (b"\x81\xa1x", "incomplete"),
        (b"\x81\x01\x02", "a map's key is not str"),
        (b"\x81\xa1x\xdc\xff\xff", "65535 in one array, where 1024 is the most"),
        (b"\x81\xa1x\xd5\x01\x00\x00", "an extension type"),
        (b"\x81\xa1x\xa1\xff", "utf-8"),
        (b"", "incomplete"),
    ],
)
def test_malformed_says_why(body, words):
    with pytest.raises(ProtocolError) as caught:
        protocol.decode(map_frame(body), "serve")
    assert caught.value.name == "MALFORMED"
    assert words in caught.value.message, caught.value.message


def test_an_id_of_zeros_names_no_request():
    frames = protocol.encode("GENERATE", bytes(16), {"prompt": "x"})
    with pytest.raises(ProtocolError, match="an id of zeros is reserved") as caught:
        protocol.decode(frames, "serve")
    assert caught.value.name == "MALFORMED" and caught.value.ident == bytes(16)
    assert protocol.decode(protocol.encode("BEAT", bytes(16), {}), "reply")[0] == "BEAT"
