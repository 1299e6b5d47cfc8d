"""The specification's sampling: known answers of its parts, and the distribution that comes out."""

import numpy as np
import pytest
from ref import Sampling
from ref.sample import choose, gumbel, members, mix64, philox, row_hash

U64 = 2**64


def test_philox_known_answers():
    """From the authors' own test vectors (Random123)."""
    zero = philox(np.zeros(4), (0, 0))
    assert [hex(int(x)) for x in zero] == ["0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8"]
    ones = philox(np.full(4, 0xFFFFFFFF, np.uint64), (0xFFFFFFFF, 0xFFFFFFFF))
    assert [hex(int(x)) for x in ones] == ["0x408f276d", "0x41c83b0e", "0xa20bc7c6", "0x6d5451fd"]
    pi = philox(np.array([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], np.uint64), (0xA4093822, 0x299F31D0))
    assert [hex(int(x)) for x in pi] == ["0xd16cfe09", "0x94fdcceb", "0x5001e420", "0x24126ea1"]


def test_splitmix_known_answers():
    """The first outputs of the published generator with seed 1234567."""
    seeds = np.array([(1234567 + i * 0x9E3779B97F4A7C15) % U64 for i in range(3)], np.uint64)
    assert mix64(seeds).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_noise_depends_on_everything_in_its_key_and_on_nothing_else():
    base = gumbel(7, 0, 100, 50)
    assert np.array_equal(base, gumbel(7, 0, 100, 50)) and np.array_equal(base[:33], gumbel(7, 0, 100, 33))
    for other in (gumbel(8, 0, 100, 50), gumbel(7 + 2**32, 0, 100, 50), gumbel(7, 1, 100, 50), gumbel(7, 0, 101, 50)):
        assert not np.isclose(base, other).any()
    assert np.isfinite(gumbel(2**64 - 1, 2**32 - 1, 2**31 - 1, 4096)).all()
    many = np.concatenate([gumbel(1, 0, p, 1000) for p in range(100)])
    assert many.mean() == pytest.approx(np.euler_gamma, abs=0.02) and many.var() == pytest.approx(
        np.pi**2 / 6, rel=0.03
    )


@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 1.0},
        {"temperature": 0.7},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.2},
        {"temperature": 0.9, "top_k": 4, "top_p": 0.85, "min_p": 0.05},
    ],
)
def test_frequencies_are_the_filtered_softmax(how):
    logits = np.array([1.0, 2.0, 0.5, 2.0, -1.0, 0.0, 1.5], np.float32)
    p = np.exp(logits.astype(float) / np.float32(how["temperature"]))
    p[~members(logits, Sampling(**how))] = 0
    p /= p.sum()
    n = 3000
    count = np.bincount([choose(logits, Sampling(**how, seed=3), position) for position in range(n)], minlength=7)
    assert not count[p == 0].any()
    chi2 = ((count - n * p)[p > 0] ** 2 / (n * p[p > 0])).sum()
    assert chi2 < 25  # 6 degrees of freedom: one in 3,000


def by_definition(logits, how):
    """The filters as a textbook has them: sort, cut, renormalise, cut."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[: how.top_k or None]
    p = np.exp((logits[order].astype(float) - logits.max()) / how.temperature)
    before = np.cumsum(p / p.sum()) - p / p.sum()
    return {i for j, i in enumerate(order) if j == 0 or (before[j] < how.top_p and p[j] >= how.min_p)}


@pytest.mark.parametrize("seed", range(30))
def test_members_are_the_textbooks(seed):
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal(rng.integers(1, 60)) * 3).astype(np.float32)
    if seed % 3 == 0:
        logits = np.round(logits)
    how = Sampling(
        temperature=float(np.float32(rng.uniform(0.3, 2))),
        top_p=float(np.float32(rng.uniform(0.1, 1))),
        min_p=float(np.float32(rng.uniform(0, 0.3))),
        top_k=int(rng.integers(0, 20)),
    )
    assert set(np.flatnonzero(members(logits, how))) == by_definition(logits, how)


def test_ties_go_to_the_lowest_id():
    logits = np.array([0, 5, 1, 5, 5], np.float32)
    assert choose(logits, Sampling(), 0) == 1
    assert members(logits, Sampling(temperature=1, top_k=2)).nonzero()[0].tolist() == [1, 3]
    assert members(logits, Sampling(temperature=1, top_p=1e-9)).nonzero()[0].tolist() == [1]
    assert members(logits, Sampling(temperature=1, min_p=1.0)).nonzero()[0].tolist() == [1, 3, 4]


def test_the_best_token_always_stays():
    logits = np.array([0, 5, 1], np.float32)
    for how in (Sampling(temperature=1, top_p=0.0), Sampling(temperature=1, min_p=2.0)):  # no request may ask for these
        assert members(logits, how).tolist() == [False, True, False]


def test_a_low_temperature_is_the_argmax():
    rng = np.random.default_rng(0)
    for position in range(50):
        logits = rng.standard_normal(100).astype(np.float32)
        assert choose(logits, Sampling(temperature=1e-4), position) == choose(logits, Sampling(), position)


def test_hash_sees_every_bit_and_can_be_shared_out():
    rng = np.random.default_rng(1)
    logits = rng.standard_normal(259).astype(np.float32)
    whole = row_hash(logits)
    for i in (0, 1, 130, 258):
        other = logits.copy()
        other.view(np.uint32)[i] ^= 1
        assert row_hash(other) != whole
    swapped = logits.copy()
    swapped[[3, 4]] = swapped[[4, 3]]
    assert row_hash(swapped) != whole
    parts = [
        mix64((np.arange(a, b, dtype=np.uint64) << np.uint64(32)) | logits[a:b].view(np.uint32)).sum(dtype=np.uint64)
        for a, b in ((0, 100), (100, 259))
    ]
    assert (int(parts[0]) + int(parts[1])) % U64 == int(whole)
