"""bench/rank_step.py: what a rank's share of the published model takes and must do, against counts by hand; the engine's round
on a small share, all of whose operations are told; what it refuses."""

import json
import re
import sys
from pathlib import Path

import backend
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "bench"))

import rank_needs  # noqa: E402
import rank_step as step  # noqa: E402

TP = 2
SMALL = dict(
    hidden_size=256, num_hidden_layers=5, num_attention_heads=16, num_key_value_heads=16, q_lora_rank=96, kv_lora_rank=64,
    qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32, intermediate_size=512, moe_intermediate_size=128,
    n_routed_experts=48, num_experts_per_tok=4, vocab_size=2048, max_position_embeddings=8192,
    bos_token_id=2000, eos_token_id=2001, pad_token_id=2002,
)  # fmt: skip
SMALL_DRAFT = dict(
    hidden_size=256, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4, head_dim=32, intermediate_size=512,
    vocab_size=2048, num_target_layers=5, layer_types=["sliding_attention", "full_attention"], sliding_window=64,
    max_position_embeddings=8192, dflash_config={"mask_token_id": 2046, "target_layer_ids": [0, 2, 3]},
)  # fmt: skip
LAYERS, DENSE, MOE, BLOCK = 5, 1, 4, 8
ACT_BYTES = {"cpu": 4, "cuda": 2}[backend.DEVICE]


@pytest.fixture(scope="module")
def bench(test_library):
    return step.Bench(backend.DEVICE, 1)


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    """(target, drafter) of small sizes, and the published ones with these changed."""
    folder = tmp_path_factory.mktemp("rank")
    target, draft = (json.loads(path.read_text()) for path in (step.CONFIG, step.DRAFT_CONFIG))
    for part in (target, target["text_config"]):
        part.update({k: v for k, v in SMALL.items() if part is not target or k.endswith("token_id")})
    draft.update(SMALL_DRAFT)
    made = folder / "config.json", folder / "draft.json"
    for path, config in zip(made, (target, draft), strict=True):
        path.write_text(json.dumps(config))
    return made


MOST = dict(
    streams=4, rows=80, context=300, nodes=63
)  # 80: more than the taps of 4 streams, which then are projected at once


@pytest.fixture(scope="module")
def rank(bench, configs):
    made = step.Rank(bench, *configs, tp=TP, **MOST)
    made.open()
    yield made
    made.close()


# ---- the published model -----------------------------------------------------------------------------------------------


def published(bench, **most):
    return step.Rank(
        bench, step.CONFIG, step.DRAFT_CONFIG, tp=8, **{"streams": 16, "rows": 64, "context": 8192, "nodes": 63, **most}
    )


def test_bytes_of_a_rank_of_kimi(bench):
    """61 layers, 384 experts of 2048 / 8, hidden 7168, 64 / 8 heads: by hand."""
    h, inter, experts = 7168, 256, 384
    expert = 3 * inter * h // 2 + 3 * inter * h // 32 * 2  # words and scales
    assert expert == 3_096_576
    attention = 2 * ((1536 + 576) * h + 8 * 192 * 1536 + 2 * 8 * 128 * 512 + h * 8 * 128)
    norms = 4 * (2 * h + 1536 + 512)
    router = 4 * (experts * h + experts)  # kept as fp32
    moe_layer = attention + norms + router + experts * expert + 2 * 3 * inter * h
    dense_layer = attention + norms + 2 * 3 * (18432 // 8) * h
    rope = 4 * 2 * (262144 + 16) * 32
    target = 60 * moe_layer + dense_layer + 2 * 2 * (163840 // 8) * h + 4 * h + rope
    draft_layer = 2 * ((8 + 2) * 128 * h + h * 8 * 128 + 3 * (18432 // 8) * h) + 4 * (2 * h + 2 * 128)
    draft = 6 * draft_layer + 2 * 6 * h * h + 4 * 2 * h + 4 * 2 * (262144 + 16) * 64
    account = published(bench).account()
    assert account["expert_bytes"] == 60 * experts * expert
    slack = 64 * 61 * 30  # every matrix begins at a multiple of 64 bytes
    assert 0 <= account["draft_bytes"] - draft < slack
    assert 0 <= account["shard_bytes"] - draft - target < slack
    as_stored = target - rope - 60 * experts * h * 2  # routers in bf16
    assert round(as_stored / 1e9, 1) == 76.2
    kv = (61 * 576 + 6 * 2 * 128) * ACT_BYTES
    assert account["kv_bytes_token"] == kv
    tokens = account["kv_bytes"] / kv
    assert tokens % (16 * 64) == 0 and 16 * 8192 <= tokens <= 16 * (8192 + 2000)


def test_other_degrees_take_other_shares(bench):
    whole = [
        step.Rank(bench, step.CONFIG, None, tp=tp, streams=1, rows=1, context=100, nodes=0).account() for tp in (1, 4)
    ]
    assert whole[0]["expert_bytes"] == 4 * whole[1]["expert_bytes"] == 60 * 384 * 8 * 3_096_576
    assert whole[0]["draft_bytes"] == whole[1]["draft_bytes"] == 0


def test_what_does_not_fit_is_refused_with_the_numbers(bench):
    many = dict(streams=64, context=200_000)
    account = published(bench, **many).account()
    with pytest.raises(SystemExit) as caught:
        published(bench, **many).open()
    sentence = str(caught.value)
    assert (
        sentence.startswith("rank_step: one rank of 8 takes ")
        and "give a larger tp, fewer streams or a shorter context" in sentence
    )
    told = {int(n) for n in re.findall(r"\d+", sentence)}
    for name in ("shard_bytes", "expert_bytes", "draft_bytes", "kv_bytes"):
        assert int(account[name]) >> 20 in told, name


# ---- whom rows are sent to -----------------------------------------------------------------------------------------------


def test_chances_are_those_of_drawing_without_putting_back():
    """Kimi's 384 experts, 8 a token; distinct ones that 45 and 64 rows reach, as drawn ones do (mean of 200 draws)."""
    rng = np.random.default_rng(0)
    for routing in "uniform", "zipf0.8", "zipf1.2":
        exponent = 0.0 if routing == "uniform" else float(routing[4:])
        shares = np.arange(1, 385) ** -exponent
        keys = rng.gumbel(size=(200, 64, 384)) + np.log(shares)
        drawn = np.argsort(-keys, axis=2)[:, :, :8]
        wanted = rank_needs.chances_of(routing, 1, 384, 8)[0]
        assert wanted.sum() == pytest.approx(8)
        for rows in 45, 64:
            distinct = np.mean([len(np.unique(draw[:rows])) for draw in drawn])
            assert (1 - (1 - wanted) ** rows).sum() == pytest.approx(distinct, rel=0.02), (routing, rows)


@pytest.mark.parametrize("routing", ["uniform", "zipf0.8", "zipf1.2", "nano"])
def test_biases_route_rows_as_wanted(rank, routing):
    bias, wanted = rank_needs.bias_of(routing, MOE, 48, 4), rank_needs.chances_of(routing, MOE, 48, 4)
    rank.route(bias)
    works = [step.Work(4, 64, context) for context in range(60, 300, 30)]
    sent = np.concatenate([rank.sent(work) for work in works], axis=1)
    assert sent.shape == (MOE, 64 * len(works), 4)
    got = np.stack([np.bincount(layer.ravel(), minlength=48) for layer in sent]) / sent.shape[1]
    if routing == "uniform":
        assert abs(got - 4 / 48).max() < 0.12
    else:
        favoured = np.take_along_axis(got, np.argsort(-bias, axis=1, kind="stable"), axis=1)
        assert abs(favoured.mean(axis=0) - wanted.mean(axis=0)).max() < 0.05
        assert np.corrcoef(favoured.mean(axis=0), wanted.mean(axis=0))[0, 1] > 0.97
    eights = [len(np.unique(layer[i : i + 8])) for layer in sent for i in range(0, sent.shape[1], 8)]
    assert np.mean(eights) == pytest.approx((1 - (1 - wanted) ** 8).sum(axis=1).mean(), rel=0.08)
    rank.route(np.zeros((MOE, 48), np.float32))


def test_an_unknown_routing_is_refused():
    with pytest.raises(SystemExit, match="no routing 'even'"):
        rank_needs.bias_of("even", 1, 48, 4)


def test_recorded_routing_is_nanos(bench, nano, tmp_path):
    step.record(bench, nano, tmp_path / "again.json")
    again, kept = (json.loads(path.read_text()) for path in (tmp_path / "again.json", step.RECORDED))
    counts = np.array(again["counts"])
    assert counts.shape == (5, 16) and (counts.sum(axis=1) == again["tokens"] * again["slots"]).all()
    # README.md may have changed since
    for a, b in zip(counts / again["tokens"], np.array(kept["counts"]) / kept["tokens"], strict=True):
        assert np.corrcoef(a, b)[0, 1] > 0.95


# ---- stages ----------------------------------------------------------------------------------------------------------------

ATTENTION = ["linear qkv_a", "mla_latent q_b", "mla_query k_up", "mla_attention",
             "mla_value v_up", "linear o", "add_norm post_norm"]  # fmt: skip
DENSE_MLP = ["linear gate_up", "swiglu gate_up", "linear down"]
MOE_MLP = ["route router", "linear shared_gate_up", "swiglu shared_gate_up", "linear shared_down", "moe experts"]
VERIFY = ["plan_verify", "zero", "embed embed", "add_norm input_norm",
          *ATTENTION, *DENSE_MLP, "add_norm input_norm", "keep_tap",
          *ATTENTION, *MOE_MLP, "add_norm input_norm", *ATTENTION, *MOE_MLP, "add_norm input_norm", "keep_tap",
          *ATTENTION, *MOE_MLP, "add_norm input_norm", "keep_tap", *ATTENTION, *MOE_MLP, "add_norm norm",
          "copy_rows", "logits lm_head", "sample", "tree_accept", "kv_commit", "keep_taps", "end_round"]  # fmt: skip
CONTEXT = ["plan_context", "copy_rows", "linear fc", "rms_norm draft_hidden_norm",
           *["linear draft kv", "head_norm_rope draft k_norm", "draft_append"] * 2]  # fmt: skip
DRAFT_LAYER = ["linear draft qkv", "head_norm_rope draft q_norm", "head_norm_rope draft k_norm", "draft_attention",
               "linear draft o", "add_norm draft post_norm", "linear draft gate_up", "swiglu draft gate_up",
               "linear draft down"]  # fmt: skip
DRAFT = ["plan_draft", "zero", "embed embed", "add_norm draft input_norm", *DRAFT_LAYER, "add_norm draft input_norm",
         *DRAFT_LAYER, "add_norm draft_norm", "copy_rows", "logits lm_head", "top_logprobs"]  # fmt: skip


def names_of(calls):
    return rank_needs.stage_names(calls)


def test_every_operation_of_the_pages_is_a_stage(rank):
    """In the pages' order, with the weights it reads."""
    work = step.Work(2, 16, 200)
    (verify,) = rank.stages(work, "verify", 2)
    assert (verify["part"], names_of(verify["calls"])) == ("verify", VERIFY)
    context, draft = rank.stages(work, "draft", 2)
    assert (context["part"], names_of(context["calls"])) == ("context", CONTEXT)
    assert (draft["part"], names_of(draft["calls"])) == ("draft", DRAFT)
    (whole,) = rank.stages(work, "round", 2)
    assert (whole["part"], names_of(whole["calls"])) == ("round", [*CONTEXT, *DRAFT, "tree_build", *VERIFY])


def test_every_operation_the_pages_call_is_staged():
    """One that is not would be missing at the link; this says it where it is read."""
    pages = "".join((ROOT / "native" / f"{page}.cpp").read_text() for page in ("forward", "drafter", "round"))
    staged = set(re.findall(r'stage\("(\w+)"', (ROOT / "native" / "stages.cpp").read_text()))
    assert set(re.findall(r"\bops::(\w+)\(", pages)) == {
        *staged,
        "side_by_side",
    }  # which is in stages.cpp, without a stamp
    for name in staged:
        assert re.search(rf"^void {name}\(", (ROOT / "native" / "stages.cpp").read_text(), re.M)


@pytest.mark.parametrize("what", ["verify", "draft", "round"])
def test_stages_add_up_to_the_whole(rank, what):
    work, info = step.Work(3, 17, 100), rank.info()
    for part in rank.stages(work, what, 5):
        plays = np.array([call["ns"] for call in part["calls"]])
        assert plays.shape[1] == len(part["ns"]) >= 5 and (plays > 0).any(axis=1).all()
        assert plays.sum(axis=0).tolist() == part["ns"]
        table = rank_needs.stage_table(part, work, info, [10.0] * MOE, 100.0, 0.0)
        assert sum(stage["calls"] for stage in table) == len(part["calls"])
        part["calls"][3]["ns"][-1] += 1
        with pytest.raises(ValueError, match="do not add up"):
            rank_needs.stage_table(part, work, info, [10.0] * MOE, 100.0, 0.0)


def test_stamps_change_no_token(rank):
    work = step.Work(2, 16, 200)
    plain = rank.rounds(work, 4)[2]
    rank.stages(work, "round", 4)
    assert rank.rounds(work, 4)[2] == plain


def test_a_round_without_room_for_its_stamps_is_not_told_in_part(rank):
    work = step.Work(2, 16, 200)
    rank.stages(work, "verify", 2, room=len(VERIFY) + 1)
    with pytest.raises(SystemExit, match=f"the stages of verify take more room than {len(VERIFY)} stamps"):
        rank.stages(work, "verify", 2, room=len(VERIFY))


# ---- what operations must do -----------------------------------------------------------------------------------------------


def test_needs_against_counts_by_hand(rank):
    """Rank 0 of 2 of the small model: 8 heads, experts of 64, 1,024 tokens of the vocabulary."""
    work, info, distinct = step.Work(2, 16, 200), rank.info(), [20.0, 21.0, 22.0, 23.0]
    (part,) = rank.stages(work, "verify", 1)
    needs = dict[str, list]()
    for name, need in zip(names_of(part["calls"]), rank_needs.needs(part["calls"], work, info, distinct), strict=True):
        needs.setdefault(name, []).append(need)
    one = {name: found[0] for name, found in needs.items()}
    h, rows, keys = 256, 16, 2 * 200
    assert one["linear qkv_a"] == (2 * (96 + 80) * h, rows * 2 * (96 + 80) * h)
    assert one["mla_latent q_b"] == (2 * 8 * 48 * 96 + 4 * (96 + 64), rows * 2 * 8 * 48 * 96)
    assert one["mla_query k_up"] == one["mla_value v_up"] == (2 * 8 * 32 * 64, rows * 2 * 8 * 32 * 64)
    assert one["linear o"] == (2 * h * 8 * 32, rows * 2 * h * 8 * 32)
    assert one["mla_attention"] == (keys * 80 * ACT_BYTES, rows * 200 * 2 * 8 * (80 + 64))
    assert one["route router"] == (2 * 48 * h + 4 * 48, rows * 2 * 48 * h)
    expert = 3 * 64 * h
    assert [n.bytes for n in needs["moe experts"]] == [d * (expert / 2 + expert / 32 * 2) for d in distinct]
    assert one["moe experts"].ops == rows * 4 * 2 * expert
    assert one["linear shared_gate_up"] == (2 * 2 * 64 * h, rows * 2 * 2 * 64 * h)
    assert one["linear gate_up"] == (2 * 2 * 256 * h, rows * 2 * 2 * 256 * h)
    assert one["logits lm_head"] == (2 * 1024 * h, rows * 2 * 1024 * h)
    assert one["embed embed"] == (rows * 2 * h, 0)
    assert one["add_norm post_norm"] == (4 * h, 0)
    assert len(needs["linear qkv_a"]) == LAYERS and len(needs["moe experts"]) == MOE

    _, part = rank.stages(work, "draft", 1)
    needs.clear()
    for name, need in zip(names_of(part["calls"]), rank_needs.needs(part["calls"], work, info, []), strict=True):
        needs.setdefault(name, []).append(need)
    assert needs["linear draft qkv"][0] == (2 * (4 + 4) * 32 * h, 2 * BLOCK * 2 * (4 + 4) * 32 * h)
    window, full = needs["draft_attention"]
    assert window == (2 * 64 * 2 * 2 * 32 * ACT_BYTES, 2 * BLOCK * 64 * 4 * 4 * 32)
    assert full == (2 * 200 * 2 * 2 * 32 * ACT_BYTES, 2 * BLOCK * 200 * 4 * 4 * 32)
    assert needs["logits lm_head"][0] == (2 * 1024 * h, 2 * (BLOCK - 1) * 2 * 1024 * h)


def test_streams_without_a_tree_do_not_draft(rank):
    """17 rows of 16 streams: one has a node."""
    _, part = rank.stages(step.Work(2, 16, 200), "draft", 1)
    call = next(c for c in part["calls"] if c["op"] == "draft_attention")
    assert rank_needs.need_of("draft", call, step.Work(16, 17, 200), BLOCK, 0) == rank_needs.need_of(
        "draft", call, step.Work(1, 2, 200), BLOCK, 0
    )


def test_a_floor_is_of_reading_or_of_computing():
    need = rank_needs.Need(4e9, 8e12)
    assert need.floor_us(4000, 0) == 1000 and need.floor_us(4000, 785) == pytest.approx(8e12 / 785e6)


def test_floor_of_a_step_of_kimi(bench, tmp_path):
    """The floors that public kernels were measured against: a step of 1 and 8 rows at a context of 8,192, 4,709 GB/s."""
    config = json.loads(step.CONFIG.read_text())
    # a dense layer and one with experts, as the others are, and a tenth of the vocabulary
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
    config["text_config"] |= {"num_hidden_layers": 2, "n_routed_experts": 16, "vocab_size": 16384, **ends}
    config |= ends
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    small = step.Rank(bench, path, None, tp=8, streams=1, rows=1, context=64, nodes=0)
    small.open()
    try:
        info = small.info()
        (part,) = small.stages(step.Work(1, 1, 64), "verify", 1)
    finally:
        small.close()
    names = names_of(part["calls"])
    begin = names.index("linear qkv_a", names.index("linear qkv_a") + 1)
    layer = part["calls"][begin : names.index("copy_rows")]
    for call in part["calls"]:
        call["key_bytes"] *= 2 / ACT_BYTES
        call["weights"] *= 10 if call["op"] == "logits" else 1
    router = 2 * (384 - 16) * 7168
    for rows, distinct, ms in ((1, 8.0, 1.40), (8, 60.5, 3.47)):
        work = step.Work(1, rows, 8192)
        size = sum(rank_needs.need_of("verify", c, work, 8, distinct).bytes for c in part["calls"])
        size += 59 * sum(rank_needs.need_of("verify", c, work, 8, distinct).bytes for c in layer) + 60 * router
        assert size / 4709e6 == pytest.approx(ms, abs=0.01), rows
    assert info["heads_rank"] == 8 and info["vocab_rank"] == 2048


# ---- the command -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(configs, monkeypatch, tmp_path):
    monkeypatch.setattr(step, "CEILING", 64 << 20)

    def go(*more, rows="2,9"):
        target, draft = configs
        return step.main([
            "--device", backend.DEVICE, "--threads", "1", "--config", str(target), "--draft-config", str(draft), "--tp", "2",
            "--rows", rows, "--contexts", "100,200", "--streams", "1,2", "--stages", "9", "--plays", "2", *more,
        ])  # fmt: skip

    return go


def test_figures_have_a_form(run, tmp_path, capsys):
    file = tmp_path / "out.json"
    made = run("--json", str(file), "--routing", "uniform,zipf1.2")
    assert json.loads(file.read_text()) == made
    assert made["schema"] == "kd rank_step 1" and made["tp"] == 2 and made["read_gb_s"] > 0
    works = {(w["part"], w["routing"], w["streams"], w["rows"], w["context"]) for w in made["works"]}
    sizes = [(s, r, c) for s in (1, 2) for r in (2, 9) for c in (100, 200)]
    for routing in "uniform", "zipf1.2":
        assert {w[2:] for w in works if w[:2] == ("verify", routing)} == set(sizes)
        drafts = [w for w in works if w[:2] == ("draft", routing)]
        assert {w[2:] for w in drafts} == {s for s in sizes if s[1] > s[0]}
        assert len([w for w in works if w[0].startswith("round") and w[1] == routing]) == len(sizes)
    for w in made["works"]:
        assert len(w["plays_us"]) == 2 and w["us"] > 0 and w["floor_us"] > 0 and w["bytes"] > 0
        assert w["ratio"] == pytest.approx(w["us"] / w["floor_us"])
        if w["part"].startswith("round"):
            assert w["tokens"] >= w["streams"]
    stages = {(s["part"], s["routing"], s["streams"], s["context"]) for s in made["stages"]}
    assert len(stages) == 4 * 2 * 2 * 2
    for s in made["stages"]:
        assert sum(stage["calls"] for stage in s["stages"]) == s["calls"]
        assert {stage["stage"] for stage in s["stages"] if stage["collective"]} == {
            stage["stage"] for stage in s["stages"] if stage["stage"].startswith("add_norm")
        }
    out = capsys.readouterr().out
    assert "one rank of 2: weights" in out and "collectives of these" in out and "recordings and scratch memory" in out


def test_without_a_drafter_there_is_verification(run):
    made = run("--no-draft", "--parts", "verify", "--stages", "")
    assert {w["part"] for w in made["works"]} == {"verify"} and made["draft_config"] is None


def test_account_opens_nothing(capsys):
    account = step.main(
        [
            "--device",
            backend.DEVICE,
            "--account",
            "--streams",
            "16",
            "--rows",
            "64",
            "--contexts",
            "8192",
            "--stages",
            "",
        ]
    )
    assert account["shard_bytes"] > 76e9 and "one rank of 8" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--parts", "verify,train"], "no part train"),
        (["--plays", "61"], "61 plays: give 1 .. 60"),
        (["--tp", "3"], "tp"),
        (["--contexts", "9000"], "a context of 9000 tokens"),
        (["--config", "pyproject.toml"], "the config"),
        (["--streams", "65", "--rows", "65"], "65 streams: give 1 .. 64"),
    ],
)
def test_refusals(run, capsys, more, sentence):
    with pytest.raises(SystemExit) as caught:
        run(*more)
    told = capsys.readouterr().err + str(caught.value)
    assert sentence in told


@pytest.mark.parametrize(
    ("work", "sentence"),
    [
        ((5, 8, 100, 0), "8 rows of 5 streams: opened for 80 rows and 4 streams"),
        ((4, 3, 100, 0), "3 rows of 4 streams"),
        ((1, 65, 100, 0), "65 rows of 1 streams: a tree has 63 nodes at most"),
        ((1, 8, 3000, 0), "a context of 3000 tokens: opened for less"),
        ((1, 8, 100, 7), "recorded for 7 rows: give 8 .. 80"),
    ],
)
def test_work_that_was_not_opened_for_is_refused(rank, work, sentence):
    with pytest.raises(SystemExit) as caught:
        rank.verify(step.Work(*work), 1)
    assert sentence in str(caught.value)


def test_drafts_need_a_tree_and_a_drafter(rank, bench, configs):
    with pytest.raises(SystemExit, match="nothing to draft for"):
        rank.draft(step.Work(2, 2, 100), 1)
    bare = step.Rank(bench, configs[0], None, tp=TP, streams=1, rows=8, context=100, nodes=7)
    bare.open()
    try:
        with pytest.raises(SystemExit, match="there is no drafter"):
            bare.draft(step.Work(1, 8, 100), 1)
        with pytest.raises(SystemExit, match="no drafter to make trees"):
            bare.rounds(step.Work(1, 8, 100), 1)
        assert min(bare.rounds(step.Work(1, 1, 100), 2)[2]) == 1
    finally:
        bare.close()
