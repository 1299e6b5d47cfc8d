"""Running requests and comparing their bits. A request's tokens and logit hashes may depend on its prompt, sampling and
length only; every other circumstance (`Job`) is varied by the tests."""

import random
import zlib
from dataclasses import dataclass, field

import kd

GREEDY = kd.Sampling()
SAMPLINGS = (
    GREEDY,
    kd.Sampling(temperature=0.8, seed=7),
    kd.Sampling(temperature=1.3, top_k=20, top_p=0.9, seed=11, choice=2),
    kd.Sampling(temperature=1.0, min_p=0.02, top_p=0.97, seed=2**63 + 5),
)


@dataclass(frozen=True)
class Ask:
    """What determines the bits."""

    prompt: tuple[int, ...]
    sampling: kd.Sampling = field(default_factory=kd.Sampling)
    max_tokens: int = 24


@dataclass(frozen=True)
class Job:
    """One run of an Ask, and what may not matter."""

    ask: Ask
    builder: str = "none"
    budget: int = 0
    cold: bool = True


def prompts(rng: random.Random, vocab: int, lengths) -> list[tuple[int, ...]]:
    return [tuple(rng.randrange(vocab - 6) for _ in range(n)) for n in lengths]


def run(engine: kd.Engine, jobs: list[Job], on_event=None) -> list[tuple]:
    """All jobs at once; returns (tokens, hashes) of each. `on_event(event)` is called for every event."""
    at, tokens, hashes = {}, [[] for _ in jobs], [[] for _ in jobs]
    for i, job in enumerate(jobs):
        a = job.ask
        id = engine.submit(
            a.prompt, max_tokens=a.max_tokens, sampling=a.sampling, hash_logits=True, cold=job.cold, credit=1 << 20,
            ignore_eos=True, builder=job.builder, budget=job.budget,
        )  # fmt: skip
        at[id] = i
    open_ = set(at)
    while open_:
        events = engine.poll(60_000)
        assert events, f"no event for 60 s; waiting for {sorted(open_)}"
        for e in events:
            if e.id not in at:
                continue
            tokens[at[e.id]] += e.tokens
            hashes[at[e.id]] += e.hashes
            if e.type == "end":
                assert e.finish == "length" and e.status == 0, e
                open_.discard(e.id)
            if on_event:
                on_event(e)
    return [(tuple(t), tuple(h)) for t, h in zip(tokens, hashes, strict=True)]


class Reference:
    """The bits of each Ask: plain decoding, alone, cold, in an engine of its own."""

    def __init__(self, engine: kd.Engine):
        self.engine, self.known = engine, {}

    def __call__(self, ask: Ask) -> tuple:
        key = (ask.prompt, repr(ask.sampling), ask.max_tokens)
        if key not in self.known:
            self.known[key] = run(self.engine, [Job(ask)])[0]
        return self.known[key]


def difference(got: tuple, want: tuple) -> str | None:
    """The first place where two runs differ, or None."""
    for what, a, b in zip(("token", "logit hash"), got, want, strict=True):
        for i, (x, y) in enumerate(zip(a, b, strict=False)):
            if x != y:
                return f"{what} {i}: {x}, plain decoding has {y}"
        if len(a) != len(b):
            return f"{len(a)} {what}s, plain decoding has {len(b)}"
    return None


def check(engine: kd.Engine, reference: Reference, jobs: list[Job]) -> None:
    for job, got in zip(jobs, run(engine, jobs), strict=True):
        problem = difference(got, reference(job.ask))
        assert problem is None, f"{job.builder} budget {job.budget}, cold {job.cold}, {job.ask}: {problem}"


def random_job(rng: random.Random, asks: list[Ask], max_nodes: int) -> Job:
    builder = rng.choice(("none", "chain", "heap", "heap", "device", "device"))
    budget = rng.choice((1, 2, 3, 5, 8, 15, 16, 17, 31, 64, 65, 128, 256)) if builder != "none" else 0
    if builder == "chain":
        budget = min(budget, 15)
    return Job(rng.choice(asks), builder, min(budget, max_nodes), rng.random() < 0.4)


def digest(result: tuple) -> int:
    return zlib.crc32(repr(result).encode())
