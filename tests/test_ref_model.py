"""The specification against itself: two forms of attention, ways to generate, and numbers worked out by hand."""

import numpy as np
import pytest
import ref
from ref import Sampling, kv, model

KIMI_YARN = {
    "factor": 64.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


@pytest.fixture(scope="module")
def tiny(small3):
    return model.load(small3)


@pytest.fixture(scope="module")
def nano_model(nano):
    return model.load(nano)


def prompt_of(m, n, seed=0):
    return np.random.default_rng(seed).integers(0, m.shape.vocab - 40, n)


def test_every_op_of_the_header_is_specified():
    import re
    from pathlib import Path

    header = (Path(__file__).resolve().parent.parent / "native" / "ops.h").read_text()
    # What pack_experts does is the backend's own layout: test_experts.py has it. side_by_side computes nothing.
    assert set(re.findall(r"^void (\w+)\(", header, re.M)) - {"pack_experts", "side_by_side"} == set(ref.OPS)


@pytest.mark.parametrize("name", ref.OPS)
def test_cases_are_repeatable_and_leave_their_arguments_alone(name):
    op = ref.OPS[name]
    rng = [np.random.default_rng(0), np.random.default_rng(0)]
    n = 0
    for case, again in zip(op.cases(rng[0]), op.cases(rng[1]), strict=True):
        first = op.spec(**case)
        second = op.spec(**again)
        together = zip(first, second, strict=True) if isinstance(first, tuple) else [(first, second)]
        assert all(np.array_equal(a, b, equal_nan=np.asarray(a).dtype.kind == "f") for a, b in together)
        third = op.spec(**case)  # from the same arguments
        together = zip(first, third, strict=True) if isinstance(first, tuple) else [(first, third)]
        assert all(np.array_equal(a, b, equal_nan=np.asarray(a).dtype.kind == "f") for a, b in together)
        n += 1
    assert n >= 2


def test_kimis_rope_and_scale():
    """Figures derived by hand from the published config."""
    rope = model.rope_table(64, 3, 50000.0, KIMI_YARN)
    frequency = np.arctan2(rope.sin[1], rope.cos[1])
    plain = 50000.0 ** (-np.arange(32) / 32)
    assert np.allclose(frequency[:9], plain[:9]) and np.allclose(frequency[20:], plain[20:] / 64)
    assert np.allclose(frequency[14], plain[14] / 64 * 0.5 + plain[14] * 0.5)
    assert np.allclose(rope.cos**2 + rope.sin**2, 1)
    assert model.mscale(64, 1) == pytest.approx(1.41588831, abs=1e-8)
    assert 192**-0.5 * model.mscale(64, 1) ** 2 == pytest.approx(0.14467963, abs=1e-8)


def test_drafters_rope_of_k26():
    frequency = np.arctan2(
        *(model.rope_table(128, 2, 50000.0, {**KIMI_YARN, "rope_type": "deepseek_yarn"})[i][1] for i in (1, 0))
    )
    plain = 50000.0 ** (-np.arange(64) / 64)
    assert np.allclose(frequency[:18], plain[:18]) and np.allclose(frequency[39:], plain[39:] / 64)
    assert frequency[18] < plain[18] and frequency[38] > plain[38] / 64
    ignored = model.rope_table(128, 2, 50000.0, {k: v for k, v in KIMI_YARN.items() if k != "mscale_all_dim"})
    assert np.allclose(np.hypot(*ignored), 1.41588831)


@pytest.mark.parametrize("name", ["tiny", "nano_model"])
def test_absorbed_and_expanded_attention_agree(request, name):
    m = request.getfixturevalue(name)
    tokens = prompt_of(m, 150)
    absorbed, expanded = model.score(m, tokens), model.score(m, tokens, "expanded")
    assert np.abs(absorbed - expanded).max() < 1e-10 * absorbed.std()


def test_logits_are_worth_choosing_from(tiny):
    assert 3 < model.score(tiny, prompt_of(tiny, 100)).std() < 5


def test_chunks_pages_and_company_do_not_matter(tiny):
    tokens, other = prompt_of(tiny, 100), prompt_of(tiny, 70, seed=1)
    whole = model.score(tiny, tokens)
    table, pages = kv.random_page_table(np.random.default_rng(3), [100, 70])
    pools, got = model.new_kv(tiny, pages * 64), []
    for a, b in [(0, 1), (1, 30), (30, 64), (64, 100)]:
        beside = [(1, a, other[a:b], None)] if b <= 70 else []
        view = kv.make_view([*beside, (0, a, tokens[a:b], None)], table)
        logits, _, pools = model.forward(tiny, view, pools)
        got.append(logits[view["stream"] == 0])
    assert np.abs(np.concatenate(got) - whole).max() < 1e-10


@pytest.mark.parametrize("name", ["tiny", "nano_model"])
@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0.8, top_p=0.95, seed=11)], ids=["greedy", "sampled"]
)
def test_speculation_changes_nothing(request, name, sampling):
    m = request.getfixturevalue(name)
    prompt, n = prompt_of(m, 61), 14
    plain = model.generate(m, prompt, n, sampling=sampling)
    assert plain.accepted == [1] * (n - 1) and plain.nodes == [0] * (n - 1)
    kept = []
    for builder, budget in [("chain", 15), ("heap", 5), ("heap", 48)]:
        got = model.generate(m, prompt, n, builder, budget, sampling, page_seed=budget)
        assert got.tokens == plain.tokens, (builder, budget)
        assert np.abs(got.logits - plain.logits).max() < 1e-10 * plain.logits.std()
        assert max(got.nodes) == budget
        kept += got.accepted
    assert max(kept) >= 2, "no drafted token was ever accepted: this compared nothing"


def test_generate_is_what_scoring_says(tiny):
    prompt = prompt_of(tiny, 40)
    out = model.generate(tiny, prompt, 12, "heap", 12)
    scored = model.score(tiny, [*prompt, *out.tokens])
    assert scored[39:-1].argmax(axis=1).tolist() == out.tokens
    assert len(set(out.hashes)) == 12


def test_a_wrong_commit_is_noticed(tiny, monkeypatch):
    """Rows kept in place instead of moved: the tree's text must then differ from plain decoding's."""
    prompt = prompt_of(tiny, 61)
    plain = model.generate(tiny, prompt, 24)
    monkeypatch.setattr(model.accept, "kv_commit", lambda kv, kept, trees, v: kv)
    broken = model.generate(tiny, prompt, 24, "heap", 48)
    assert np.abs(broken.logits - plain.logits).max() > 1e-3
