"""tests/partings.py against the specification."""

from __future__ import annotations

import backend
import numpy as np
import pytest
from partings import Routers, nearest, rounding
from ref import model as spec

import kd

MARGIN = {"cpu": 1e-5, "cuda": 2e-2}[backend.DEVICE]  # of nine in ten; they are 0.06 in the middle


@pytest.fixture(scope="module")
def routers(test_library, small3):
    with kd.Engine(small3, library=test_library, threads=2, prefill_chunk=32) as engine:
        yield Routers(engine, test_library, small3)


@pytest.fixture(scope="module")
def ids():
    return np.random.default_rng(4).integers(0, 250, 75).tolist()  # over two chunks of prefill, and some


@pytest.fixture(scope="module")
def wanted(small3, ids):
    """[layers with experts][positions], as the specification has them."""
    model, pages = spec.load(small3, with_draft=False), -(-len(ids) // spec.PAGE)
    view = spec.kv.make_view([(0, 0, np.asarray(ids), None)], [np.arange(pages)])
    margins: list = []
    spec.forward(model, view, spec.new_kv(model, pages * spec.PAGE), margins=margins)
    return np.array(margins)


def test_margins_are_those_of_the_specification(routers, ids, wanted):
    logits, rows = routers.look(ids)
    margins = routers.margins(rows)
    assert margins.shape == wanted.shape == (2, len(ids)) and (margins >= 0).all()
    assert np.quantile(abs(margins - wanted), 0.9) < MARGIN
    assert np.array_equal(logits, routers.engine.score(ids))


def test_an_engine_that_was_watched_says_the_same(routers, ids):
    before = routers.engine.generate(ids, max_tokens=20, hash_logits=True)
    routers.look(ids)
    after = routers.engine.generate(ids, max_tokens=20, hash_logits=True)
    assert (after.tokens, after.hashes) == (before.tokens, before.hashes)


def test_texts_that_part(routers, ids, wanted):
    text = tuple(ids[60:])
    assert routers.parting(routers, tuple(ids[:60]), text, text) is None
    other = (*text[:9], text[9] + 1, *text[10:])
    parting = routers.parting(routers, tuple(ids[:60]), text, other)
    second, first = np.sort(routers.engine.score(ids[:69])[-1])[-2:]
    assert parting[:3] == (60, 9, pytest.approx(first - second))
    if backend.DEVICE == "cpu":
        margin, position = nearest(wanted[:, :69])
        assert parting[3:5] == (pytest.approx(margin, abs=MARGIN), position)
    assert not parting.moved and parting.shift == 0  # an engine and itself


def test_another_expert_taken_is_seen_where_it_bears_on_the_logits(routers, test_library, small3, ids, monkeypatch):
    """What a router is given is turned round in the second look, at a position whose keys later ones read."""
    text, other = tuple(ids[60:]), (*ids[60:69], ids[69] + 1, *ids[70:])
    seen = Routers(routers.engine, test_library, small3)
    for layer, position, moved in ((0, 30, True), (0, 68, True), (1, 30, False), (1, 68, True)):

        def turned(ids, layer=layer, position=position):
            logits, rows = routers.look(ids)
            rows[layer, position] *= -1
            return logits, rows

        monkeypatch.setattr(seen, "look", turned)
        parting = routers.parting(seen, tuple(ids[:60]), text, other)
        assert parting is not None and parting.moved == moved and (parting.shift > 0.1) == moved


def test_what_bears_on_the_last_position():
    margins = np.full((2, 5), 0.5)
    assert nearest(margins)[0] == 0.5
    margins[1, 2] = 0.1  # of the last layer: nobody reads it
    assert nearest(margins)[0] == 0.5
    margins[0, 3] = 0.3  # is in a key
    assert nearest(margins) == (0.3, 3)
    margins[1, 4] = 0.2  # the position itself
    assert nearest(margins) == (0.2, 4)
    assert nearest(margins[1:]) == (0.2, 4)


def test_what_other_experts_give_is_no_rounding():
    differences = np.array([1e-4, 3e-3, 0.5, 0.9])
    assert rounding(differences, np.array([False, True, True, True])) == 3e-3
    assert rounding(differences, np.zeros(4, bool)) == 0.9
    assert rounding(differences, np.array([True, False, False, False])) == 1e-4
