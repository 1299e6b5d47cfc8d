"""Choosing a token: native/ops.h "sampling", docs/design.md "Sampling".

The noise of a candidate is a pure function of (seed, choice, absolute position, token id), so the text does not depend
on speculation, on other requests or on restarts.
"""

import numpy as np

from .base import Op, Sampling, Shape, f64, rand
from .draft import log_softmax
from .kv import random_view

PURPOSE = 0x6B640001  # last word of the counter
ONE = 2.0**40  # weight of the best token


def philox(counter, key):
    """Philox4x32-10 (Salmon et al. 2011): counter [..][4], key [2], 32-bit words in uint64 -> uint64 [..][4]"""
    c = np.asarray(counter, np.uint64)
    k0, k1 = (int(k) for k in key)
    low = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        p0, p1 = c[..., 0] * np.uint64(0xD2511F53), c[..., 2] * np.uint64(0xCD9E8D57)
        c = np.stack(
            (
                (p1 >> np.uint64(32)) ^ c[..., 1] ^ np.uint64(k0),
                p1 & low,
                (p0 >> np.uint64(32)) ^ c[..., 3] ^ np.uint64(k1),
                p0 & low,
            ),
            axis=-1,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c


def gumbel(seed, choice, position, vocab):
    """Noise of every token, float64 [vocab]. position: that of the token to be chosen."""
    n = -(-vocab // 4)
    counter = np.stack((np.arange(n), np.full(n, position), np.full(n, choice), np.full(n, PURPOSE)), axis=-1)
    bits = philox(counter, (seed & 0xFFFFFFFF, seed >> 32)).reshape(-1)[:vocab]
    return -np.log(-np.log((bits.astype(np.float64) + 0.5) * 2.0**-32))


def members(logits, sampling):
    """bool [vocab]: the tokens that may be chosen at temperature > 0."""
    logits = f64(logits)
    temperature, top_p, min_p = (float(np.float32(x)) for x in (sampling.temperature, sampling.top_p, sampling.min_p))
    order = np.argsort(-logits, kind="stable")  # better first: larger logit, then lower id
    if 0 < sampling.top_k < len(order):
        order = order[: sampling.top_k]
    weight = np.floor(np.exp((logits[order] - logits.max()) / temperature) * ONE).astype(np.uint64)
    total = weight.sum()
    better = np.concatenate((np.zeros(1, np.uint64), np.cumsum(weight)[:-1]))
    stays = weight.astype(np.float64) >= min_p * ONE
    if top_p < 1:
        stays &= better.astype(np.float64) < top_p * float(total)
    stays[0] = True
    allowed = np.zeros(len(logits), bool)
    allowed[order[stays]] = True
    return allowed


def choose(logits, sampling, position):
    """The token at `position`, given the fp32 logits of one row."""
    logits = np.asarray(logits, np.float32)
    if sampling.temperature == 0:
        return int(np.argmax(logits))
    score = f64(logits) / float(np.float32(sampling.temperature))
    score += gumbel(sampling.seed, sampling.choice, position, len(logits))
    return int(np.argmax(np.where(members(logits, sampling), score, -np.inf)))


def mix64(x):
    """splitmix64: uint64 [..] -> uint64 [..]"""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def row_hash(logits):
    """64-bit hash of an fp32 logits row; a sum over ids, so ranks can add their shares."""
    logits = np.ascontiguousarray(logits, np.float32)
    ids = np.arange(len(logits), dtype=np.uint64)
    return np.uint64(mix64((ids << np.uint64(32)) | logits.view(np.uint32)).sum(dtype=np.uint64))


def sample(logits, sampling, v, s):
    """logits fp32 [n_out][vocab], sampling: one a stream -> (token, hash, logprob) [n_out]"""
    token = np.zeros(len(logits), np.int32)
    hashes = np.zeros(len(logits), np.uint64)
    logprob = np.zeros(len(logits))
    for i, row in enumerate(v["out_row"]):
        how = sampling[v["stream"][row]]
        token[i] = choose(logits[i], how, int(v["position"][row]) + 1)
        if how.want_hash:
            hashes[i] = row_hash(logits[i])
        if how.want_logprob:
            logprob[i] = log_softmax(logits[i])[token[i]]
    return token, hashes, logprob


# ---- cases -----------------------------------------------------------------------------------------------------------

WAYS = [
    Sampling(),
    Sampling(temperature=1.0, seed=7),
    Sampling(temperature=0.6, top_p=0.95, seed=2**63 + 5),
    Sampling(temperature=1.7, top_k=5, seed=2**32),
    Sampling(temperature=1.0, min_p=0.1, seed=3, choice=2),
    Sampling(temperature=0.9, top_k=20, top_p=0.5, min_p=0.02, seed=2**64 - 1, choice=2**32 - 1),
    Sampling(temperature=1.3, top_p=1e-6, seed=1),
    Sampling(temperature=0.01, seed=11),
    Sampling(temperature=50.0, top_p=0.99, seed=12),
    Sampling(temperature=1.0, top_k=1, seed=13),
    Sampling(temperature=1.0, top_k=100000, min_p=1.0, seed=14),
]


def sample_cases(rng):
    for vocab, kind in [
        (259, "plain"),
        (4096, "plain"),
        (1, "plain"),
        (7, "ties"),
        (1001, "ties"),
        (64, "equal"),
        (1000, "peak"),
    ]:
        ways = [
            Sampling(**{**vars(way), "want_hash": i % 3 != 1, "want_logprob": i % 3 != 2}) for i, way in enumerate(WAYS)
        ]
        v, _, _ = random_view(rng, [(int(rng.integers(0, 200)), 1 + i % 4, "tree") for i in range(len(ways))])
        v["position"] += np.int32(100000)
        n_rows = len(v["token"])
        v["out_row"] = np.sort(rng.permutation(n_rows)[: n_rows - 3]).astype(np.int32)
        logits = rand(rng, len(v["out_row"]), vocab, std=3)
        if kind == "ties":
            logits = np.round(logits)
        if kind == "equal":
            logits[:] = -2.5
        if kind == "peak":
            logits[:, rng.integers(0, vocab)] = 80
        yield {"logits": logits, "sampling": ways, "v": v, "s": Shape(vocab=vocab, vocab_rank=vocab)}


OPS = {"sample": Op(sample, sample_cases, {"rms": 1e-6, "worst": 1e-5}, ("token", "hash", "logprob"))}
