"""The recipe of models/nano: its parts against hand-made cases, and the whole of it in small."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import kd

torch = pytest.importorskip("torch")

from training import acceptance, corpus, export, humaneval, int4, tiny, tokens, train_target  # noqa: E402
from training.decode import Decoder, in_loop, padded  # noqa: E402
from training.model import Drafter, Target, exported, loaded  # noqa: E402
from training.muon import orthogonal  # noqa: E402
from training.recipe import FULL, ROOT, SHIPPED, TINY  # noqa: E402
from training.tokenizer import BOS, EOS, IM_END, PAD  # noqa: E402
from training.train_drafter import block_loss, draft_blocks  # noqa: E402

CODE = "def add(a, b):\n    return a + b\n\n\n" * 8


# ---- arithmetic


def test_int4_packing_agrees_with_compressed_tensors():
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    values = torch.randint(-8, 8, (24, 64), dtype=torch.int8)
    words = int4.pack(values)
    assert torch.equal(words, pack_to_int32(values, 4)) and torch.equal(int4.unpack(words), values)


def test_int4_rounds_to_its_own_grid():
    weight = torch.randn(3, 16, 64)
    weight[0, 0] = 0
    values, scales = int4.quantise(weight)
    back = int4.dequantise(values, scales)
    assert scales.shape == (3, 16, 2) and values.amin() >= -8 and values.amax() <= 7
    step = scales.float().repeat_interleave(32, -1)
    assert ((back - weight).abs() <= step * 0.54).all()  # the largest of a group lies half a step beyond the grid
    assert torch.equal(int4.fake_quantised(weight, torch.tensor(0.0)), weight)
    leaf = weight.clone().requires_grad_()
    rounded = int4.fake_quantised(leaf, torch.tensor(1.0))
    assert torch.allclose(rounded, back, atol=1e-7)
    rounded.sum().backward()
    assert torch.equal(leaf.grad, torch.ones_like(leaf))


@pytest.mark.parametrize("shape", [(2, 48, 24), (2, 24, 48)])
def test_muon_makes_matrices_nearly_orthogonal(shape):
    torch.manual_seed(0)
    singular = torch.linalg.svdvals(orthogonal(torch.randn(shape) * 100))
    assert singular.min() > 0.5 and singular.max() < 1.4


def test_learning_rate_warms_up_and_decays():
    rates = [
        train_target.rate(step, done, 10, 0.5, 0.01)
        for step, done in ((0, 0), (9, 0.1), (99, 0.5), (99, 0.75), (99, 1))
    ]
    assert rates == pytest.approx([0.1, 1.0, 1.0, 0.5, 0.01])


@pytest.fixture(scope="module")
def models():
    torch.manual_seed(1)
    target = Target(TINY.target)
    for experts in target.experts():
        experts.bias.copy_(torch.randn(TINY.target.experts) * 0.1)
    return loaded(exported(target), TINY.target, "cpu"), Drafter(TINY.drafter, TINY.target).eval().requires_grad_(False)


def test_router_takes_the_best_and_weighs_by_score(models):
    experts = models[0].experts()[0]
    x = torch.randn(50, TINY.target.hidden)
    weights, chosen = experts.gates(x)
    scores = torch.sigmoid(x @ experts.gate.T)
    best = (scores + experts.bias).topk(TINY.target.experts_per_token, -1).indices
    assert torch.equal(torch.zeros_like(scores).scatter(-1, best, 1.0), chosen)
    assert torch.allclose(weights.sum(-1), torch.full((50,), TINY.target.routed_scale), atol=1e-5)


def test_decoder_writes_what_the_model_predicts(models):
    target, _ = models
    rows, lengths = padded([[BOS, 5, 6, 7], [BOS, 9], [BOS, 300, 301, 302, 303, 304]], "cpu")
    ids = Decoder(target, torch.float32).generate(rows, lengths, 24, torch.zeros(3), torch.Generator())
    logits = target.lm_head(target(ids)[0])
    for row, n in enumerate(lengths.tolist()):
        assert ids[row, :n].tolist() == rows[row, :n].tolist()
        written = ids[row, n:]
        end = next((i + 1 for i, t in enumerate(written.tolist()) if t in (EOS, IM_END)), len(written))
        assert logits[row, n - 1 : n - 1 + end].argmax(-1).tolist() == written[:end].tolist()
        assert (written[end:] == PAD).all()


def test_cached_forward_equals_the_whole(models):
    target, _ = models
    ids = torch.randint(0, 4000, (2, 40))
    whole, taps = target(ids, (0, 2))
    past: list[list] = [[] for _ in target.layers]
    first, _ = target(ids[:, :25], past=past)
    position = torch.arange(25, 40)
    mask = (torch.arange(40) <= position[:, None])[None, None]
    second, _ = target(ids[:, 25:], positions=position, mask=mask, past=past)
    assert torch.allclose(torch.cat([first, second], 1), whole, atol=1e-5)
    assert taps.shape == (2, 40, 2 * TINY.target.hidden)


def test_blocks_see_nothing_at_or_after_their_anchor(models):
    target, drafter = models
    ids = torch.randint(0, 4000, (1, 60))
    _, taps = target(ids, TINY.drafter.taps)
    anchor = torch.tensor([[20, 35]])
    states, positions = draft_blocks(drafter, target, ids, taps, anchor)
    assert positions[0, :, 0].tolist() == [21, 36] and states.shape[:3] == (1, 2, TINY.drafter.block - 1)
    spoiled = taps.clone()
    spoiled[:, 20:] = float("inf")
    other, _ = draft_blocks(drafter, target, ids, torch.where(spoiled.isinf(), 1e3, spoiled), anchor)
    assert torch.equal(other[:, 0], states[:, 0]) and not torch.equal(other[:, 1], states[:, 1])
    alone, _ = draft_blocks(drafter, target, ids, taps, anchor[:, 1:])
    assert torch.allclose(alone[:, 0], states[:, 1], atol=1e-5)


def test_block_loss_mixes_token_and_distribution():
    states, teacher, head = torch.randn(6, 8), torch.randn(6, 8), torch.randn(50, 8)
    labels, weights = torch.randint(0, 50, (6,)), torch.tensor([1.0, 0, 1, 1, 0, 1])
    scores = (states @ head.T).log_softmax(-1)
    wanted = 0.7 * torch.nn.functional.one_hot(labels, 50) + 0.3 * (teacher @ head.T).softmax(-1)
    expected = (-(wanted * scores).sum(-1) * weights).sum() / weights.sum()
    loss, hit = block_loss(states, teacher, head, labels, weights, 0.3)
    assert torch.allclose(loss, expected, atol=1e-5) and torch.equal(hit, scores.argmax(-1) == labels)


def test_loops_are_found_once_they_have_gone_on():
    fresh = torch.randperm(400)[:200]
    looping = torch.cat([fresh[:50], fresh[50:60].repeat(10), fresh[60:110]])[:200]
    found = in_loop(torch.stack([fresh, looping]))
    assert not found[0].any()
    assert not found[1, :83].any() and found[1, 83:150].all() and not found[1, 150:].any()


# ---- acceptance


def test_heap_tree_takes_the_most_probable_nodes():
    rng = np.random.default_rng(0)
    scores = -np.sort(rng.exponential(2.0, (3, 4)), axis=1)
    ids = np.arange(12).reshape(3, 4)
    made, parents = acceptance.heap_tree(scores.tolist(), ids.tolist(), 20)
    paths = []
    for token, parent in zip(made, parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    every = [p for depth in (1, 2, 3) for p in itertools.product(*(ids[d].tolist() for d in range(depth)))]

    def probability(path):
        return sum(scores[d, token - 4 * d] for d, token in enumerate(path))

    assert len(set(paths)) == 20
    assert set(paths) == set(sorted(every, key=probability, reverse=True)[:20])


def test_replay_counts_rounds():
    answer = [10, 11, 12, 13, 14, EOS]
    scores = np.log(np.tile([0.6, 0.3], (6, 15, 1))).astype(np.float32)
    ids = np.zeros((6, 15, 2), np.int32)
    for at in range(6):
        for slot in range(15):
            right = answer[at + 1 + slot] if at + 1 + slot < 6 else 1
            ids[at, slot] = (right, 99) if slot != 1 else (99, right)  # the second slot's best is wrong
    histograms = acceptance.replay((answer, scores, ids, 5))
    chain, tree = histograms[0], histograms[acceptance.BUILDERS.index(("heap", 64))]
    assert chain[2] == 2 and chain[1] == 1 and sum(chain) == 3  # 11 12 | 13 14 | the end
    assert tree[5] == 1 and sum(tree) == 1
    report = acceptance.summary([histograms])
    assert report["chain-7"]["rounds"] == 3 and report["chain-7"]["tokens"] == 5
    assert report["chain-7"]["accepted_by_depth"][:2] == [pytest.approx(2 / 3, abs=1e-4), 0]
    assert acceptance.summary([]) == {}
    counting = list(itertools.chain.from_iterable((1, 2, n, 3) for n in range(100, 130)))
    assert acceptance.is_loop(counting, frozenset(range(100, 130))) and not acceptance.is_loop(counting)
    assert acceptance.is_loop([1, 2, 3] * 30) and not acceptance.is_loop(list(range(90)))


def test_answers_are_run_under_limits(tmp_path):
    command, _ = humaneval._cage()
    problem = tiny.PROBLEMS[0]
    outcome = {
        "right": problem["canonical_solution"] + "\nprint('more text that is no part of it'\n",
        "wrong": "    return 0\n",
        "broken": "    return (\n",
        "writes": "    with open('x', 'w') as out:\n        out.write('x')\n    return 5\n",
        "leaves": "    import os\n    os._exit(0)\n",
    }
    results = {name: humaneval.passes(problem, text, command, str(tmp_path)) for name, text in outcome.items()}
    assert results["right"] == "passed" and results["wrong"] == "AssertionError" and results["broken"] == "syntax"
    assert "passed" not in (results["writes"], results["leaves"])


# ---- the whole recipe in small


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory, library):
    work = tmp_path_factory.mktemp("training")

    def run(*steps: str) -> str:
        command = [sys.executable, "-m", "training", *steps, "--tiny", "--work", str(work)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return work, run, run("all")


def test_tiny_run_makes_a_folder_like_the_shipped_one(tiny_run):
    work, _, _ = tiny_run
    folder = work / "export"
    made = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    shipped = {str(p.relative_to(SHIPPED)) for p in SHIPPED.rglob("*") if p.is_file()}
    assert shipped - {"MODEL_CARD.md"} <= made | {"evaluation.json", "humaneval.json", "HumanEval.jsonl.gz"}
    for name in ("config.json", "draft/config.json"):
        ours, theirs = (json.loads((f / name).read_text()) for f in (folder, SHIPPED))
        assert ours.keys() == theirs.keys()
        assert ours["hidden_size"] == TINY.target.hidden
    assert json.loads((folder / "draft/config.json").read_text())["num_hidden_layers"] == TINY.drafter.layers
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == export.SHARDS


def test_tiny_run_learned_and_rounding_costs_nothing(tiny_run):
    work, _, _ = tiny_run
    train = json.loads((work / "target" / "train.json").read_text())
    assert train["steps"] == TINY.target_steps or train["seconds"] >= TINY.target_seconds
    assert train["int4_bits_per_byte"] < 12 / 3.3 + 2  # untrained: 12 bits for tokens of about 3.3 bytes
    assert abs(train["int4_bits_per_byte"] - train["master_bits_per_byte"]) < 0.05
    weights = torch.load(work / "target" / "weights.pt")
    target, drafter = export.read(work / "export")
    again = loaded(weights, TINY.target, "cpu").state_dict()
    assert all(torch.equal(value, again[name]) for name, value in target.state_dict().items())
    saved = torch.load(work / "drafter" / "weights.pt")
    assert all(torch.equal(value, saved[name].float()) for name, value in drafter.state_dict().items())


def test_tiny_run_agrees_with_other_implementations(tiny_run):
    check = json.loads((tiny_run[0] / "evaluation" / "check.json").read_text())
    c = TINY.target
    assert check["packed_matrices"] == 3 * c.experts * (c.layers - c.dense_layers)
    assert check["transformers"] < 2e-3 and check["dflash"] < 1e-4


def test_tiny_run_measures_everything(tiny_run, library):
    work, _, _ = tiny_run
    report = json.loads((work / "evaluation" / "evaluation.json").read_text())
    assert 0 < report["held_out"]["bits_per_byte"] < 12
    for layer in report["expert_use"]["layers"]:
        assert math.isclose(sum(layer), TINY.target.experts_per_token, abs_tol=1e-3)
    rows = {(r["set"], r["temperature"], r["looping"]): r for r in report["acceptance"]}
    assert len(rows) == 8
    for (name, temperature, _), row in rows.items():
        other = rows[name, temperature, not row["looping"]]
        assert row["answers"] + other["answers"] == TINY.prompts * (1 if temperature == 0 else 2)
        for figures in row["builders"].values():
            assert sum(figures["yielded"]) == figures["rounds"]
            assert 1 <= figures["tokens_per_round"] <= TINY.drafter.block
            assert figures["accepted_by_depth"] == sorted(figures["accepted_by_depth"], reverse=True)
    run = json.loads((work / "evaluation" / "humaneval.json").read_text())
    assert run["problems"] == run["reference_solutions_passed"] == TINY.prompts
    golden = json.loads((work / "export" / "golden.json").read_text())
    with kd.Engine(work / "export", library=library) as engine:
        assert golden["content_hash"] == f"{engine.info.content_hash:016x}"
    target, _ = export.read(work / "export")
    ids = torch.tensor([golden["prompt_tokens"] + golden["tokens"]])
    n = len(golden["prompt_tokens"])
    assert target.lm_head(target(ids)[0])[0, n - 1 : -1].argmax(-1).tolist() == golden["tokens"]


def test_tiny_run_never_saw_the_held_out_package(tiny_run):
    work, _, _ = tiny_run
    report = json.loads((work / "corpus" / "corpus.json").read_text())
    assert report["packages"]["tinyheld"]["role"] == "held" and report["packages"]["tinyheld"]["files"] > 3
    trained = [p for shard in (work / "corpus").glob("*-*.xz") for p, _ in corpus.read_shard(shard)]
    assert set(trained) == {"tinyjson", "tinynet", "boltons"}
    notice = (work / "export" / "NOTICE").read_text()
    for name, row in report["packages"].items():
        assert name in notice and row["version"] in notice and row["licence"] in notice


def test_tiny_run_can_be_started_again(tiny_run):
    work, run, _ = tiny_run
    shard = work / "tokens" / "a-0.npz"
    before = shard.stat().st_mtime_ns
    weights = torch.load(work / "target" / "weights.pt")
    (work / "target" / "weights.pt").unlink()
    (work / "tokens" / "b-0.npz").unlink()
    out = run("tokens", "target", "drafter")
    assert shard.stat().st_mtime_ns == before and "b-0: " in out and "a-0: " not in out
    assert out.count("resumed at step") == 2
    again = torch.load(work / "target" / "weights.pt")
    assert all(torch.equal(value, again[name]) for name, value in weights.items())


def test_training_takes_in_text_that_arrives_later(tiny_run, tmp_path):
    work, _, _ = tiny_run
    first, second = sorted((work / "tokens").glob("*-0.npz"))
    (tmp_path / first.name).symlink_to(first)
    text = train_target.Corpus(tmp_path, TINY, "cpu")
    size = text.sizes["code"]
    assert not text.look()
    (tmp_path / "c-0.part").write_bytes(b"half a file")
    assert not text.look()
    (tmp_path / second.name).symlink_to(second)
    assert text.look() and text.sizes["code"] == size + len(tokens.load_streams(second)[0])
    inputs, following = text.batch(torch.tensor([0.0, 0.0, 1.0, 0.0]))
    assert inputs.shape == (TINY.rows, TINY.window) and torch.equal(inputs[:, 1:], following[:, :-1])
    with pytest.raises(FileNotFoundError, match="run the step `tokens`"):
        train_target.Corpus(tmp_path / "nothing", TINY, "cpu")


def test_full_recipe_fits_the_budgets():
    target = sum(p.numel() for p in Target(FULL.target).parameters())
    experts = 3 * FULL.target.experts * FULL.target.expert_intermediate * FULL.target.hidden
    experts *= FULL.target.layers - FULL.target.dense_layers
    drafter = sum(p.numel() for p in Drafter(FULL.drafter, FULL.target).parameters())
    size = experts * (0.5 + 2 / int4.GROUP) + (target - experts + drafter) * 2
    assert size < 23.6 * 2**20
    assert sum(FULL.mix) == pytest.approx(1) and sum(FULL.decay_mix) == pytest.approx(1)
    shipped = json.loads((SHIPPED / "config.json").read_text())
    assert all(shipped[field] == getattr(FULL.target, ours) for field, ours in export.TARGET_FIELDS.items())


def test_no_path_of_this_machine_is_in_the_recipe():
    for path in Path(ROOT / "training").glob("*"):
        if path.is_file():
            assert "/tmp" not in path.read_text() and "/home" not in path.read_text()
