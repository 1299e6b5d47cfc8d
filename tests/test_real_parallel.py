"""Two ranks on Kimi K2's widths (`whole` of test_real_sizes.py), each on a GPU of its own: the exactness contract, rounds
by the thousand, and how far one rank and two agree. On the CPU twin the same with small widths and two threads. KD_LAYERS in
the environment makes the model deeper: 8 layers are 62 GB."""

from __future__ import annotations

import os
import random
import shutil

import backend
import pytest
from exact import GREEDY, SAMPLINGS, Ask, Job, Reference, check, difference, prompts, run
from partings import Routers
from test_real_sizes import LENGTHS, MODELS, OPEN
from wide_model import write_wide_model

import kd

CUDA = backend.DEVICE == "cuda"
ROUNDS = 1000 if CUDA else 60
GAP = 1e-2  # between the best logits: below it a rounding may choose
MARGIN = 1e-3  # between the last expert taken and the next: the same
SHIFT = 1e-2  # of a router's score from one degree of parallelism to the other: what roundings do

pytestmark = pytest.mark.skipif(CUDA and backend.gpus() < 2, reason="two ranks at full width need a second GPU")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    layers = int(os.environ.get("KD_LAYERS", "3"))
    made = write_wide_model(tmp_path_factory.mktemp("whole"), **MODELS[backend.DEVICE]["whole"], layers=layers)
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def engine(test_library, folder):
    with kd.Engine(folder, library=test_library, tp=2, **OPEN) as made:
        yield made


@pytest.fixture(scope="module")
def asks(engine):
    made = prompts(random.Random(11), engine.info.vocab_size, LENGTHS[backend.DEVICE])
    return [Ask(p, SAMPLINGS[i % 4], 16) for i, p in enumerate(made)]


@pytest.fixture(scope="module")
def reference(engine, asks):
    made = Reference(engine)
    for ask in asks:
        made(ask)
    return made


@pytest.mark.parametrize("builder, budget", [("none", 0), ("chain", 7), ("heap", 16), ("device", 8), ("device", 64)])
def test_contract(engine, reference, asks, builder, budget):
    check(engine, reference, [Job(ask, builder, budget) for ask in asks])
    for ask in asks[:3]:
        check(engine, reference, [Job(ask, builder, budget, True)])


def test_rounds_by_the_thousand(engine, asks):
    """The same again and again: every step's logits have the same hashes, and no rank falls behind."""
    jobs = [Job(Ask(a.prompt, a.sampling, 48), "device", 8) for a in asks[:5]]
    first = run(engine, jobs)
    began = engine.stats()["rounds"]
    while engine.stats()["rounds"] - began < ROUNDS:
        for got, want in zip(run(engine, jobs), first, strict=True):
            assert difference(got, want) is None


def test_one_rank_says_the_same_but_where_it_is_close(engine, test_library, folder, asks):
    """Other sums of partial sums, so other bits. Greedy texts part only where the two best logits are nearly equal, or where a
    router nearly took another expert, or did: at that position, or at an earlier one in a layer that later ones read
    (partings.py)."""
    jobs = [Job(Ask(a.prompt, GREEDY, 16), "none") for a in asks]
    two = run(engine, jobs)
    with kd.Engine(folder, library=test_library, tp=1, **OPEN) as alone:
        one = run(alone, jobs)
        routers, others = Routers(alone, test_library, folder), Routers(engine, test_library, folder)
        told = [
            routers.parting(others, job.ask.prompt, a, b) for job, (a, _), (b, _) in zip(jobs, one, two, strict=True)
        ]
    parted = [parting for parting in told if parting]
    print("parted:", *parted, sep="\n")
    assert all(p.gap < GAP or p.margin < MARGIN or p.moved for p in parted), parted
    assert all(p.shift < SHIFT for p in parted), parted
    assert len(parted) < len(jobs)
