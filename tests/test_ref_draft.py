"""The specification's drafter against the published code (PyPI `dflash`), on nano's drafter and on random ones."""

import json
import shutil

import fake_model
import numpy as np
import pytest
import torch
from dflash.model import DFlashDraftModel
from ref import draft, kv, model
from safetensors.torch import load_file
from transformers import Qwen3Config

import kd
from kd.tokenizer import Tokenizer

torch.set_num_threads(1)


def published(folder):
    config = json.loads((folder / "config.json").read_text())
    net = DFlashDraftModel(Qwen3Config(**config)).float().eval()
    net.load_state_dict({name: t.float() for name, t in load_file(folder / "model.safetensors").items()}, strict=True)
    return net


def compare(folder, n_context, seed):
    """One block after n_context tokens; the target's taps are the real ones, our context is written in odd portions."""
    rng = np.random.default_rng(seed)
    m = model.load(folder)
    d = m.drafter.shape
    tokens = rng.integers(0, m.shape.vocab, n_context)
    table, pages = kv.random_page_table(rng, [n_context + d.block])
    prompt = kv.make_view([(0, 0, tokens, None)], table)
    taps = model.forward(m, prompt, model.new_kv(m, pages * 64))[1]
    pools = draft.new_pools(d, pages * 64)
    for part in np.array_split(np.arange(n_context), 3):
        if len(part):
            view = kv.make_view([(0, part[0], tokens[part], None)], table)
            pools = draft.append_context(m.drafter, pools, taps[part], view)
    view = draft.block_view(d, [17], [n_context], table)
    ours = draft.block_forward(m.drafter, m.embed[view["token"]], pools, view)
    with torch.no_grad():
        theirs = (
            published(folder / "draft")(
                position_ids=torch.arange(n_context + d.block)[None],
                noise_embedding=torch.from_numpy(m.embed[[17] + [d.mask_token] * (d.block - 1)]).float()[None],
                target_hidden=torch.from_numpy(taps).float()[None],
            )[0]
            .double()
            .numpy()
        )
    assert np.abs(ours - theirs).max() < 6e-5 * theirs.std()


@pytest.mark.parametrize("n_context", [1, 60, 700])
def test_nano(nano, n_context):
    compare(nano, n_context, n_context)


PLAIN = {
    "layers": 2,
    "heads": 6,
    "kv_heads": 2,
    "head_dim": 10,
    "inter": 96,
    "block": 8,
    "taps": [0, 2],
    "window": None,
}
RANDOM = [
    PLAIN,
    {**PLAIN, "layers": 3, "window": 12, "kv_heads": 1, "heads": 3},
    {**PLAIN, "window": [0, 5], "block": 16, "taps": [1], "head_dim": 16},
    {**PLAIN, "layers": 1, "kv_heads": 6, "yarn": {**fake_model.YARN}, "taps": [0, 1, 2]},
    {**PLAIN, "yarn": {k: v for k, v in fake_model.YARN.items() if k != "mscale_all_dim"}, "head_dim": 64},
    {**PLAIN, "layers": 3, "window": 12, "config": {"is_causal": True}},
    {**PLAIN, "config": {"is_causal": True}},
    # Published code without is_causal: the sliding layers are causal. We need to be told.
    {**PLAIN, "layers": 3, "window": 5, "config": {"is_causal": None, "sliding_window_non_causal": False}},
]


@pytest.mark.parametrize("i", range(len(RANDOM)))
def test_random_drafter(tmp_path, i):
    folder = fake_model.write_model(tmp_path, **{**fake_model.SMALL3, "seed": 200 + i, "draft": RANDOM[i]})
    compare(folder, 75 + i, i)


def test_a_causal_drafter_drafts_in_the_engine_as_in_the_specification(library, nano, tmp_path):
    """Seen by what the target takes of its drafts, round by round: nano's own drafter, and made causal."""
    prompt = Tokenizer.load(nano).encode("def is_prime(n):\n    if n < 2:\n        return")
    found = {}
    for causal in (False, True):
        folder = shutil.copytree(nano, tmp_path / str(causal))
        config = json.loads((folder / "draft/config.json").read_text())
        (folder / "draft/config.json").write_text(json.dumps(config | {"is_causal": causal}))
        want = model.generate(model.load(folder), prompt, 48, "chain", 7)
        with kd.Engine(folder, library=library, threads=1) as engine:
            got = engine.generate(prompt, max_tokens=48, builder="chain", budget=7, ignore_eos=True)
        assert list(got.tokens) == want.tokens and got.rounds == 1 + len(want.accepted)  # the first is the prompt's
        found[causal] = want.accepted
    assert found[False] != found[True]
