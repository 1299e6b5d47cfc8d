"""The choice of the tree builder at warm-up: what is measured, what is chosen, what is refused."""

from __future__ import annotations

import pytest

from kd import choose
from kd.choose import Inexact, Speed

AMONG = choose.candidates(64, True)


class Machine:
    """Decodes made-up tokens at a given speed for each candidate; `slower` names (run, factor) that a busy machine took."""

    def __init__(self, speeds, slower=None):
        self.speeds, self.slower, self.runs = speeds, slower or {}, []

    def __call__(self, prompt, max_tokens, builder, budget):
        self.runs.append((tuple(prompt), max_tokens, builder, budget))
        n = max_tokens - 1
        seconds = n / self.speeds[builder, budget] * self.slower.get(len(self.runs), 1)
        return [sum(prompt) + i for i in range(max_tokens)], n, seconds


def speeds(**other):
    return dict.fromkeys(AMONG, 100.0) | {
        (k.partition("_")[0], int(k.partition("_")[2] or 0)): v for k, v in other.items()
    }


def test_candidates_are_those_the_engine_takes():
    assert AMONG[0] == ("none", 0) and ("heap", 64) in AMONG
    assert choose.candidates(10, True) == (("none", 0), ("chain", 7), ("heap", 4), ("heap", 8))
    assert choose.candidates(64, False) == (("none", 0),)
    assert choose.candidates(8, True, "cuda") == (("none", 0), ("chain", 7), ("device", 4), ("device", 8))


@pytest.mark.parametrize("best", [("none", 0), ("chain", 7), ("heap", 4), ("heap", 64)])
def test_the_fastest_is_chosen_and_the_figures_are_kept(best):
    machine = Machine(speeds() | {best: 250.0})
    choice = choose.choose(machine, [[1, 2], [3]], AMONG, 1000, seconds=0.05)
    assert (choice.builder, choice.budget) == best
    assert [(s.builder, s.budget) for s in choice.measured] == list(AMONG)
    assert [s.tokens_per_s for s in choice.measured] == [250.0 if c == best else 100.0 for c in AMONG]
    assert choice.reason.startswith("the fastest") and f": {Speed(*best, 250.0)}, " in choice.reason
    assert choice.as_dict()["measured"][0] == {
        "builder": "none",
        "budget": 0,
        "tokens_per_s": choice.measured[0].tokens_per_s,
    }


def test_every_candidate_gets_the_same_prompts_in_turn():
    machine = Machine(speeds())
    choose.measure(machine, [[1, 2], [3]], AMONG, 1000, seconds=0.05)
    runs = machine.runs[1:]  # after the one that finds out how long to measure
    for i in range(0, len(runs), len(AMONG)):
        turn = runs[i : i + len(AMONG)]
        assert [run[2:] for run in turn] == list(AMONG)
        assert len({run[:2] for run in turn}) == 1  # one prompt and length
    assert {run[0] for run in runs} == {(1, 2), (3,)}


def test_a_moment_of_a_busy_machine_does_not_decide():
    """heap 8 is the fastest; its first measurement took ten times as long, its second did not."""
    first = 2 + AMONG.index(("heap", 8))
    machine = Machine(speeds(heap_8=300.0), slower={first: 10})
    choice = choose.choose(machine, [[1, 2]], AMONG, 1000, seconds=0.05)
    assert len(machine.runs) > 2 * len(AMONG) and (choice.builder, choice.budget) == ("heap", 8)


def test_a_slow_model_is_measured_with_one_prompt_and_few_tokens():
    machine = Machine(speeds() | {("none", 0): 5.0})
    choose.measure(machine, [[1, 2], [3], [4]], AMONG, 1000, seconds=0)
    assert {run[:2] for run in machine.runs} == {((1, 2), choose.FEWEST)}
    assert len(machine.runs) == 1 + len(AMONG)


def test_a_fast_model_decodes_longer_but_never_beyond_the_context():
    for room, want in ((1000, choose.MOST), (20, 20)):
        machine = Machine(dict.fromkeys(AMONG, 1000000.0))
        choose.measure(machine, [[1]], AMONG, room, seconds=0.01)
        assert {run[1] for run in machine.runs[1:]} == {want}


def test_a_builder_that_changes_a_token_is_refused():
    machine = Machine(speeds())

    def run(prompt, max_tokens, builder, budget):
        tokens, n, seconds = machine(prompt, max_tokens, builder, budget)
        return [*tokens[:5], -1, *tokens[6:]] if (builder, budget) == ("heap", 16) else tokens, n, seconds

    with pytest.raises(Inexact) as error:
        choose.choose(run, [[1]], AMONG, 1000, seconds=0.05)
    assert error.value.args == ("heap", 16, 5)


def test_without_a_drafter_or_room_nothing_is_measured():
    def never(*_):
        raise AssertionError("nothing to measure")

    choice = choose.choose(never, [[1]], choose.candidates(64, False), 1000)
    assert (choice.builder, choice.budget, choice.measured) == ("none", 0, ()) and "no drafter" in choice.reason
    choice = choose.choose(never, [[1]], AMONG, choose.FEWEST - 1)
    assert (choice.builder, choice.measured) == ("none", ()) and "context" in choice.reason


def test_prompts_fit_and_differ_with_and_without_a_tokenizer():
    for encode in (None, lambda text: [ord(c) for c in text]):
        cut = choose.prompts(encode, 500, 7)
        assert len(cut) == len(choose.PROMPTS) and all(len(p) == 7 for p in cut)
        assert len(set(map(tuple, cut))) == len(cut) and all(0 <= t < 500 for p in cut for t in p)
