"""The distribution of chosen tokens, and what may not change a choice. tests/test_ops.py compares choices one by one."""

import numpy as np
import pytest
import ref
from probes import Device, Probes

N = 6000  # draws a distribution


@pytest.fixture(scope="module")
def probes(test_library):
    return Probes(test_library)


def prompt_view(first_position, rows, streams=1):
    """A view of `rows` rows of each stream at consecutive positions, every row chosen from."""
    n = rows * streams
    position = np.tile(np.arange(first_position, first_position + rows, dtype=np.int32), streams)
    return {"token": np.zeros(n, np.int32), "position": position, "stream": np.repeat(np.arange(streams), rows).astype(np.int32),
            "slot": np.zeros(n, np.int32), "prefix": np.zeros(n, np.int32),
            "mask": np.zeros((n, ref.MASK_WORDS), np.uint64), "page_table": np.zeros((streams, 1), np.int32),
            "out_row": np.arange(n, dtype=np.int32)}  # fmt: skip


def draw(probes, row, way, n=N, first_position=0, device=Device()):  # noqa: B008 (a tuple)
    """Tokens chosen from the same logits at n positions."""
    return probes.sample(device, logits=np.tile(row, (n, 1)), sampling=[way], v=prompt_view(first_position, n))[0]


def exact(row, way):
    """The distribution `way` describes: softmax of logit / T over the tokens that may be chosen."""
    p = np.exp((row.astype(np.float64) - row.max()) / np.float32(way.temperature)) * ref.sample.members(row, way)
    return p / p.sum()


def chi_square(tokens, p):
    """Standardised chi-square statistic of counts against p, cells of under five expected draws put together; and whether
    a token of probability 0 was drawn."""
    count, want = np.bincount(tokens, minlength=len(p)).astype(float), p * len(tokens)
    small = want < 5
    if small.any():
        count, want = np.append(count[~small], count[small].sum()), np.append(want[~small], want[small].sum())
    cells = want > 0
    statistic, freedom = ((count - want)[cells] ** 2 / want[cells]).sum(), max(cells.sum() - 1, 1)
    return (statistic - freedom) / np.sqrt(2 * freedom), np.bincount(tokens, minlength=len(p))[p == 0].sum()


@pytest.mark.parametrize("way", [
    ref.Sampling(temperature=1.0, seed=1),
    ref.Sampling(temperature=0.5, seed=2, choice=3),
    ref.Sampling(temperature=2.0, seed=2**64 - 1),
    ref.Sampling(temperature=1.0, top_k=5, seed=4),
    ref.Sampling(temperature=1.0, top_p=0.8, seed=5),
    ref.Sampling(temperature=1.2, min_p=0.05, seed=6),
    ref.Sampling(temperature=0.8, top_k=12, top_p=0.9, min_p=0.01, seed=7),
], ids=str)  # fmt: skip
def test_tokens_follow_the_distribution(way, probes):
    rng = np.random.default_rng(9)
    row = (rng.standard_normal(37) * 1.5).astype(np.float32)
    p = exact(row, way)
    deviation, impossible = chi_square(draw(probes, row, way), p)
    assert impossible == 0
    assert abs(deviation) < 5, "the draws do not follow the distribution"
    flat = np.where(p > 0, 1, 0) / (p > 0).sum()
    assert (p > 0).sum() == 1 or chi_square(draw(probes, row, way), flat)[0] > 10, (
        "the test would see another distribution"
    )


@pytest.mark.parametrize("change", [dict(seed=2), dict(seed=1 + 2**32), dict(choice=1), dict(position=1)])
def test_noise_is_independent_between_keys(change, probes):
    """Pairs drawn under two keys from a fair four-sided die fall into sixteen equal cells."""
    row = np.zeros(4, np.float32)
    change = dict(change)
    first = 1000003 * change.pop("position", 0)
    a = draw(probes, row, ref.Sampling(temperature=1.0, seed=1))
    b = draw(probes, row, ref.Sampling(**{"temperature": 1.0, "seed": 1, **change}), first_position=first)
    assert abs(chi_square(4 * a + b, np.full(16, 1 / 16))[0]) < 5


def test_noise_is_independent_between_positions(probes):
    tokens = draw(probes, np.zeros(4, np.float32), ref.Sampling(temperature=1.0, seed=3))
    assert abs(chi_square(4 * tokens[:-1] + tokens[1:], np.full(16, 1 / 16))[0]) < 5


def test_a_low_temperature_is_the_argmax(probes):
    rng = np.random.default_rng(0)
    logits = np.round(rng.standard_normal((300, 97)) * 4, 1).astype(np.float32)  # ties: the lowest id
    logits[logits.argmax(axis=1)[:, None] == np.arange(97)] += np.float32(0.1)
    v = prompt_view(0, len(logits))
    greedy = probes.sample(Device(), logits=logits, sampling=[ref.Sampling()], v=v)[0]
    assert greedy.tolist() == logits.argmax(axis=1).tolist()
    for temperature in 1e-4, 1e-30, 1e-45:
        way = ref.Sampling(temperature=temperature, seed=5)
        assert probes.sample(Device(), logits=logits, sampling=[way], v=v)[0].tolist() == greedy.tolist()


def test_ties_of_the_argmax_go_to_the_lowest_id(probes):
    rng = np.random.default_rng(0)
    for vocab in 1, 15, 16, 17, 300:
        logits = rng.integers(-1, 2, (50, vocab)).astype(np.float32)
        for tp in 1, 2, 8:
            got = probes.sample(Device(tp=tp), logits=logits, sampling=[ref.Sampling()], v=prompt_view(3, 50))[0]
            assert got.tolist() == logits.argmax(axis=1).tolist()


@pytest.mark.parametrize("vocab, std", [(4096, 1), (4096, 8), (20011, 4), (333, 0.01)])
def test_ranks_and_threads_choose_the_same(vocab, std, probes):
    rng = np.random.default_rng(vocab)
    ways = [ref.Sampling(**{**vars(way), "want_hash": 1, "want_logprob": 1}) for way in ref.sample.WAYS]
    ways += [
        ref.Sampling(temperature=1, top_p=p, top_k=k, seed=s)
        for p in (0.3, 0.9, 0.999)
        for k in (0, 100)
        for s in (1, 2)
    ]
    logits = (rng.standard_normal((2 * len(ways), vocab)) * std).astype(np.float32)
    v = prompt_view(70, 2, len(ways))
    want = probes.sample(Device(), logits=logits, sampling=ways, v=v)
    for i, way in enumerate(ways):
        assert want[0][2 * i] == ref.sample.choose(logits[2 * i], way, 71)
    for device in Device(threads=3), Device(tp=2), Device(tp=4, threads=2), Device(tp=8):
        got = probes.sample(device, logits=logits, sampling=ways, v=v)
        assert [a.tobytes() for a in got] == [a.tobytes() for a in want], device


def test_every_token_is_weighed_against_the_best(probes):
    """A shortcut that skips hopeless candidates may skip no other: choices equal the definition over many rows."""
    rng = np.random.default_rng(5)
    logits = (rng.standard_normal((400, 259)) * rng.uniform(0.01, 5, (400, 1))).astype(np.float32)
    for way in ref.Sampling(temperature=1.0, seed=1), ref.Sampling(temperature=0.7, top_p=0.9, top_k=100, seed=2):
        got = probes.sample(Device(threads=2), logits=logits, sampling=[way], v=prompt_view(0, 400))[0]
        assert got.tolist() == [ref.sample.choose(row, way, i + 1) for i, row in enumerate(logits)]


def test_the_hash_sees_every_bit(probes):
    rng = np.random.default_rng(0)
    logits = np.tile(rng.standard_normal(301).astype(np.float32), (65, 1))
    bits = logits.view(np.uint32)
    for i in range(1, 65):
        bits[i, rng.integers(0, 301)] ^= np.uint32(1 << (i % 32))
    logits[64] = np.roll(logits[0], 1)
    hashes = probes.sample(Device(), logits=logits, sampling=[ref.Sampling(want_hash=1)], v=prompt_view(0, 65))[1]
    assert len(set(hashes.tolist())) == 65


@pytest.mark.parametrize("more, stay", [
    (dict(top_p=0.5), 32),  # the mass of the better 32 is exactly half: the 33rd does not stay
    (dict(top_k=48), 48),
    (dict(top_k=48, top_p=0.25), 12),  # of what top-k leaves, not of everything
    (dict(top_k=3, top_p=0.5), 2),
    (dict(top_p=1e-9), 1),
    (dict(min_p=1.0), 64),  # all weigh as much as the best
])  # fmt: skip
def test_filters_end_where_they_say(more, stay, probes):
    """Of 64 equal logits the lowest ids are the best."""
    way = ref.Sampling(temperature=1.0, seed=21, **more)
    for tp in 1, 4:
        tokens = draw(probes, np.full(64, -1.5, np.float32), way, n=2000, device=Device(tp=tp))
        assert set(tokens.tolist()) == set(range(stay))
