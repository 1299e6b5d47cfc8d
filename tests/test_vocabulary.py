"""top_logprobs and sample on rows where shortcuts give out: many equal logits, long rows, all that is good in one place."""

import numpy as np
import pytest
import ref
from probes import Device, Probes
from test_ops import assert_matches, assert_same_bits
from test_sampling import prompt_view


@pytest.fixture(scope="module")
def probes(test_library):
    return Probes(test_library)


def rows(vocab):
    """Logits [n][vocab] that are hard to choose the best of."""
    rng = np.random.default_rng(vocab)
    place = np.arange(vocab)
    made = [
        np.zeros(vocab),
        np.where(place % 3 == 0, 1.0, 0.0),  # many equals, and they are the best
        np.where(place % 512 == 7, place / vocab, -5.0),  # far apart: all in one thread of a block that strides
        np.where(place < 4000, 2 - place * 1e-4, -3.0),  # side by side
        place * 1e-3,  # rising
        -place * 1e-3,
        rng.standard_normal(vocab) * 3,
        np.round(rng.standard_normal(vocab)),
        np.where(place < vocab - 2, -np.inf, 1.5),  # fewer possible ones than are asked for
        np.where(place % 2 == 0, np.nan, rng.standard_normal(vocab)),
        np.where(rng.random(vocab) < 0.5, 0.0, -0.0),
        np.full(vocab, -np.inf),
    ]
    return np.array(made, np.float32)


@pytest.mark.parametrize("vocab, k", [(9001, 256), (9001, 64), (40000, 33), (20480, 1), (600, 600 // 3)])
def test_the_best_of_hard_rows(vocab, k, probes):
    logits = rows(vocab)
    known = np.where(np.isnan(logits), np.float32(-np.inf), logits)
    order = np.argsort(-known, axis=1, kind="stable")[:, :k]
    got = probes.top_logprobs(Device(threads=2), logits=logits, k=k)
    assert got[0].tolist() == order.tolist()
    best = np.take_along_axis(known, order, axis=1).astype(np.float64)
    with np.errstate(all="ignore"):
        most = known.max(axis=1, keepdims=True).astype(np.float64)
        want = best - most - np.log(np.exp(known - most).sum(axis=1, keepdims=True))
    want[-1] = -np.inf
    np.testing.assert_allclose(got[1], want, rtol=3e-6, atol=3e-6)
    for tp in 2, 8:
        assert_same_bits(probes.top_logprobs(Device(tp=tp), logits=logits, k=k), got, f"{tp} ranks")


def test_rows_of_a_batch_are_as_alone(probes):
    """A large batch is cut into other parts than a small one."""
    rng = np.random.default_rng(0)
    logits = (rng.standard_normal((150, 20011)) * 3).astype(np.float32)
    whole = probes.top_logprobs(Device(threads=2), logits=logits, k=64)
    way = ref.Sampling(temperature=1.0, top_p=0.9, seed=3, want_hash=1, want_logprob=1)
    chosen = probes.sample(Device(threads=2), logits=logits, sampling=[way], v=prompt_view(5, 150))
    for i in 0, 77, 149:
        assert_same_bits(
            probes.top_logprobs(Device(), logits=logits[i : i + 1], k=64), [a[i : i + 1] for a in whole], i
        )
        alone = probes.sample(Device(), logits=logits[i : i + 1], sampling=[way], v=prompt_view(5 + i, 1))
        assert_same_bits(alone, [a[i : i + 1] for a in chosen], i)


WAYS = [dict(), dict(top_k=1), dict(top_k=2500), dict(top_k=5000, top_p=0.5), dict(top_p=0.3), dict(top_p=0.9999),
        dict(top_p=0.7, min_p=0.5), dict(top_k=3, top_p=0.5), dict(top_p=1e-9), dict(min_p=1.0)]  # fmt: skip


@pytest.mark.parametrize("tp", [1, 3])
@pytest.mark.parametrize("temperature", [1.0, 0.05, 3.0])
def test_choices_from_hard_rows(temperature, tp, probes):
    vocab = 9001
    logits = np.nan_to_num(rows(vocab)[:-1], nan=-np.inf, posinf=np.inf, neginf=-np.inf)
    ways = [
        ref.Sampling(temperature=temperature, seed=i, want_hash=1, want_logprob=1, **more)
        for i, more in enumerate(WAYS)
    ]
    n = len(logits)
    v = prompt_view(3, n, len(ways))
    case = {
        "logits": np.tile(logits, (len(ways), 1)),
        "sampling": ways,
        "v": v,
        "s": ref.Shape(vocab=vocab, vocab_rank=vocab),
    }
    assert_matches("sample", probes.sample(Device(tp=tp), **case), ref.sample.sample(**case))


def test_what_is_unlikely_adds_up(probes):
    """Tokens far below the best weigh nothing each; all together they are where top-p ends."""
    vocab, n = 40000, 60
    logits = np.full((1, vocab), -13.0, np.float32)
    logits[0, 777] = 0
    ways = [ref.Sampling(temperature=1.0, top_p=0.99, seed=i) for i in range(n)]
    case = {
        "logits": np.tile(logits, (n, 1)),
        "sampling": ways,
        "v": prompt_view(3, 1, n),
        "s": ref.Shape(vocab=vocab, vocab_rank=vocab),
    }
    want = ref.sample.sample(**case)
    assert 0 < (want[0] != 777).sum() < n // 2
    assert_matches("sample", probes.sample(Device(), **case), want)
