"""What a loaded folder holds on each rank, against slices made with numpy of the files read through `safetensors`."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from fake_model import SMALL3, YARN, write_model
from load_probe import DRAFT_NONE, DRAFT_PATH, KD_E_MODEL, KD_E_NOT_FOUND, Loaded, Probe, Refused
from ref import sharding
from safetensors import deserialize
from xxhash import xxh3_64_intdigest

MARGIN = 16  # rows of a rope table beyond max_positions


@pytest.fixture(scope="session")
def probe(test_library) -> Probe:
    return Probe(test_library)


# ---- the expected slices -----------------------------------------------------------------------------------------


def stored(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor of a folder, BF16 widened to float32; without a `language_model.` in front of the names."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, t in deserialize(path.read_bytes()):
            data = bytes(t["data"])
            if t["dtype"] == "BF16":
                a = (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
            else:
                a = np.frombuffer(data, {"F32": np.float32, "I32": np.int32, "I64": np.int64}[t["dtype"]])
            tensors[name.removeprefix("language_model.")] = a.reshape(t["shape"])
    return tensors


def unpacked(tensors: dict, name: str) -> np.ndarray:
    """float32 [n, k] of one INT4 matrix."""
    words = tensors[f"{name}.weight_packed"].view(np.uint32)
    nibbles = (words[:, :, None] >> (4 * np.arange(8, dtype=np.uint32))) & 15
    values = nibbles.reshape(len(words), -1).astype(np.float32) - 8
    return values * np.repeat(tensors[f"{name}.weight_scale"], 32, axis=1)


def mlp(get, name: str) -> tuple[np.ndarray, np.ndarray]:
    """[gate; up] and down of what get() has of them."""
    return np.concatenate([get(f"{name}.{proj}_proj") for proj in ("gate", "up")]), get(f"{name}.down_proj")


def expected(folder: Path, shape: dict, draft: dict, tp: int, rank: int) -> dict[str, np.ndarray]:
    """Every weight of one rank by the probe's names, float32."""
    t = stored(folder)
    want = {}

    def weight(name: str) -> np.ndarray:
        return sharding.share(f"{name}.weight", t[f"{name}.weight"], tp, rank)

    def expert(name: str) -> np.ndarray:
        return sharding.share(f"{name}.weight_packed", unpacked(t, name), tp, rank)

    want["embed"], want["lm_head"] = weight("model.embed_tokens"), weight("lm_head")
    want["norm"] = weight("model.norm")[None]
    for i in range(shape["layers"]):
        layer, to = f"model.layers.{i}", f"layers.{i}"
        attn = f"{layer}.self_attn"
        for name, norm in (
            ("input_norm", "input_layernorm"),
            ("post_norm", "post_attention_layernorm"),
            ("q_a_norm", "self_attn.q_a_layernorm"),
            ("kv_a_norm", "self_attn.kv_a_layernorm"),
        ):
            want[f"{to}.{name}"] = weight(f"{layer}.{norm}")[None]
        want[f"{to}.qkv_a"] = np.concatenate([weight(f"{attn}.q_a_proj"), weight(f"{attn}.kv_a_proj_with_mqa")])
        want[f"{to}.q_b"] = weight(f"{attn}.q_b_proj")
        mine = weight(f"{attn}.kv_b_proj").reshape(-1, shape["nope"] + shape["v_head"], shape["kv_lora"])
        want[f"{to}.k_up"] = mine[:, : shape["nope"]].reshape(-1, shape["kv_lora"])
        want[f"{to}.v_up"] = mine[:, shape["nope"] :].reshape(-1, shape["kv_lora"])
        want[f"{to}.o"] = weight(f"{attn}.o_proj")
        if i < shape["dense_layers"]:
            want[f"{to}.gate_up"], want[f"{to}.down"] = mlp(weight, f"{layer}.mlp")
            continue
        want[f"{to}.router"] = weight(f"{layer}.mlp.gate")
        want[f"{to}.router_bias"] = t[f"{layer}.mlp.gate.e_score_correction_bias"][None]
        experts = [mlp(expert, f"{layer}.mlp.experts.{e}") for e in range(shape["experts"])]
        want[f"{to}.experts.gate_up"] = np.concatenate([gate_up for gate_up, _ in experts])
        want[f"{to}.experts.down"] = np.concatenate([down for _, down in experts])
        shared = mlp(weight, f"{layer}.mlp.shared_experts")
        want[f"{to}.shared_gate_up"], want[f"{to}.shared_down"] = shared
    if draft["layers"]:
        d = {
            name.removeprefix("model."): sharding.share(name, a, tp, rank)
            for name, a in stored(folder / "draft").items()
        }
        want |= {"fc": d["fc.weight"], "draft_norm": d["norm.weight"][None]}
        want["draft_hidden_norm"] = d["hidden_norm.weight"][None]
        for i in range(draft["layers"]):
            layer, to = f"layers.{i}", f"draft_layers.{i}"
            want[f"{to}.input_norm"] = d[f"{layer}.input_layernorm.weight"][None]
            want[f"{to}.post_norm"] = d[f"{layer}.post_attention_layernorm.weight"][None]
            for name in ("q_norm", "k_norm"):
                want[f"{to}.{name}"] = d[f"{layer}.self_attn.{name}.weight"][None]
            want[f"{to}.qkv"] = np.concatenate([d[f"{layer}.self_attn.{x}_proj.weight"] for x in "qkv"])
            want[f"{to}.o"] = d[f"{layer}.self_attn.o_proj.weight"]
            want[f"{to}.gate_up"], want[f"{to}.down"] = mlp(lambda name: d[f"{name}.weight"], f"{layer}.mlp")
    return want


def check_weights(folder: Path, loaded: Loaded) -> None:
    for rank in range(loaded.tp):
        info = loaded.info(rank)
        want = expected(folder, info["shape"], info["draft"], loaded.tp, rank)
        for name, a in want.items():
            got = loaded.weight(rank, name)
            assert got.shape == a.shape, f"rank {rank}, {name}: shape {got.shape}, want {a.shape}"
            assert np.array_equal(got, a), f"rank {rank}, {name}: {np.count_nonzero(got != a)} elements differ"


# ---- folders -------------------------------------------------------------------------------------------------------

WIDE = {**SMALL3, "hidden": 96, "shared": 2, "vocab": 261, "shards": 3, "prefix": "language_model."}
ODD = {
    **SMALL3, "seed": 5, "hidden": 32, "layers": 4, "dense_layers": 2, "heads": 3, "q_lora": 17, "kv_lora": 7,
    "nope": 5, "rope": 6, "v_head": 9, "inter": 11, "moe_inter": 32, "experts": 5, "topk": 3, "shared": 2, "vocab": 37,
    "yarn": None, "max_positions": 100,
    "draft": {
        "layers": 3, "heads": 3, "kv_heads": 1, "head_dim": 10, "inter": 7, "block": 3, "taps": [0, 3],
        "window": [8, 0, 8], "yarn": {**YARN, "rope_type": "deepseek_yarn", "type": "deepseek_yarn"},
    },
}  # fmt: skip
BARE = {**SMALL3, "layers": 2, "dense_layers": 0, "vocab": 9, "draft": None}
FOLDERS = {
    "small3": (SMALL3, [1, 2, 4, 8]),
    "wide": (WIDE, [1, 2, 4, 8]),
    "odd": (ODD, [1]),
    "bare": (BARE, [1, 8]),
}


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("folders")
    return {name: write_model(base / name, **kind) for name, (kind, _) in FOLDERS.items()}


@pytest.mark.parametrize(("name", "tp"), [(name, tp) for name, (_, tps) in FOLDERS.items() for tp in tps])
def test_every_rank_holds_its_slices(probe, folders, name, tp):
    with probe.load(folders[name], tp=tp) as loaded:
        check_weights(folders[name], loaded)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_every_rank_holds_its_slices_of_nano(probe, nano, tp):
    with probe.load(nano, tp=tp) as loaded:
        check_weights(nano, loaded)


def test_vocabulary_slices_may_be_short_or_empty(probe, folders):
    with probe.load(folders["bare"], tp=8) as loaded:  # 9 ids, 2 a rank
        slices = [(s["vocab_begin"], s["vocab_rank"]) for s in (loaded.info(r)["shape"] for r in range(8))]
    assert slices == [(0, 2), (2, 2), (4, 2), (6, 2), (8, 1), (9, 0), (9, 0), (9, 0)]


def test_small_reads_and_large_give_the_same(probe, tmp_path):
    """A matrix of more than one chunk (4 MiB): vocabulary rows, columns and rows by head cross the borders."""
    kind = {**SMALL3, "layers": 1, "dense_layers": 1, "hidden": 512, "vocab": 4501, "inter": 4400, "draft": None}
    kind |= {"kv_lora": 600, "nope": 300, "v_head": 260}
    folder = write_model(tmp_path / "model", **kind)
    for tp in (1, 2, 8):
        with probe.load(folder, tp=tp) as loaded:
            check_weights(folder, loaded)


def test_shapes_of_ranks(probe, nano):
    with probe.load(nano, tp=4) as loaded:
        info = loaded.info(3)
    shape, draft = info["shape"], info["draft"]
    assert (shape["tp"], shape["rank"], shape["heads_rank"], shape["inter_rank"]) == (4, 3, 2, 192)
    assert (shape["moe_inter_rank"], shape["shared_inter_rank"]) == (64, 64)
    assert (shape["vocab_begin"], shape["vocab_rank"]) == (3072, 1024)
    assert (draft["heads_rank"], draft["kv_heads_rank"], draft["inter_rank"]) == (2, 2, 192)
    assert (draft["block"], draft["mask_token"], draft["taps"], draft["window"]) == (16, 4094, [1, 2, 4], [0, 0, 0])


TP_CASES = [
    ({"heads": 6}, 4, "6 attention heads"),
    ({"inter": 130}, 4, "130 rows of a dense layer's intermediate_size"),
    ({"moe_inter": 96}, 2, "3 INT4 groups (of 32) of an expert's moe_intermediate_size"),
    ({"draft": {**SMALL3["draft"], "heads": 6, "kv_heads": 6}}, 4, "6 attention heads of the drafter"),
    ({"draft": {**SMALL3["draft"], "kv_heads": 2}}, 4, "2 key-value heads of the drafter"),
    ({"draft": {**SMALL3["draft"], "inter": 130}}, 4, "130 rows of the drafter's intermediate_size"),
]


@pytest.mark.parametrize("case", TP_CASES, ids=lambda c: c[2])
def test_a_tp_that_does_not_divide_is_refused_with_the_number(probe, tmp_path, case):
    change, tp, words = case
    folder = write_model(tmp_path / "model", **{**SMALL3, "heads": 8, **change})
    with probe.load(folder):
        pass
    with pytest.raises(Refused) as caught:
        probe.load(folder, tp=tp)
    assert caught.value.status == KD_E_MODEL
    assert words in caught.value.sentence and f"parallelism of {tp}" in caught.value.sentence
    assert ("--draft none" in caught.value.sentence) == ("drafter" in words)


def test_drafter_choices(probe, folders, tmp_path):
    model = folders["small3"]
    with probe.load(model, draft=DRAFT_NONE) as loaded:
        info = loaded.info()
        assert info["draft"]["layers"] == info["draft_parameters"] == 0
        with pytest.raises(Refused) as caught:
            loaded.weight(0, "draft_layers.0")
        assert caught.value.status == KD_E_NOT_FOUND
    elsewhere = Path(shutil.copytree(model / "draft", tmp_path / "another"))
    bare = Path(shutil.copytree(model, tmp_path / "bare"))
    shutil.rmtree(bare / "draft")
    with probe.load(bare) as loaded:
        assert loaded.info()["draft"]["layers"] == 0
    with probe.load(bare, draft=DRAFT_PATH, draft_path=elsewhere) as loaded:
        assert loaded.info()["draft"]["layers"] == 1
        assert np.array_equal(loaded.weight(0, "fc"), stored(elsewhere)["fc.weight"])


def rewrite(folder: Path, change) -> None:
    """Rename tensors of a single file and its index: change(name) -> name. Offsets stay."""
    for path in folder.glob("*.safetensors"):
        data = path.read_bytes()
        n = int.from_bytes(data[:8], "little")
        header = {change(name): t for name, t in json.loads(data[8 : 8 + n]).items()}
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + n :])


def test_a_drafter_with_prefixed_names(probe, folders, tmp_path):
    folder = Path(shutil.copytree(folders["small3"], tmp_path / "model"))
    rewrite(folder / "draft", lambda name: "model." + name)
    with probe.load(folder) as loaded:
        check_weights(folder, loaded)


def test_prediction_layers_are_skipped(probe, tmp_path):
    """num_nextn_predict_layers: their tensors come after the last layer and are not loaded."""
    folder = write_model(tmp_path / "model", **{**SMALL3, "layers": 4, "draft": None})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3, "num_nextn_predict_layers": 1}))
    with probe.load(folder) as loaded:
        assert loaded.info()["shape"]["layers"] == 3
        check_weights(folder, loaded)


def test_files_of_hugging_faces_cache(probe, folders, tmp_path):
    """snapshots/<revision>/<file> -> ../../blobs/<hash>, as its download cache has it."""
    (tmp_path / "blobs").mkdir()
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for i, path in enumerate(sorted(p for p in folders["bare"].iterdir() if p.is_file())):
        shutil.copy(path, tmp_path / "blobs" / f"{i:040x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{i:040x}")
    with probe.load(snapshot) as loaded:
        check_weights(folders["bare"], loaded)


# ---- numbers -------------------------------------------------------------------------------------------------------


def test_sizes_and_stop_ids(probe, nano):
    tensors, draft = stored(nano), stored(nano / "draft")
    packed = sum(a.size for name, a in tensors.items() if name.endswith("weight_packed"))
    scales = sum(a.size for name, a in tensors.items() if name.endswith("weight_scale"))
    rest = sum(a.size for name, a in tensors.items() if not name.endswith(("_packed", "_scale", "_shape")))
    for tp in (1, 2):
        with probe.load(nano, tp=tp) as loaded:
            info = loaded.info()
            assert info["parameters"] == 8 * packed + rest
            assert info["draft_parameters"] == sum(a.size for a in draft.values())
            assert info["expert_bytes"] == 4 * packed + 2 * scales
            assert info["stop_ids"] == [4065, 4066]
            assert info["expert_bytes"] < info["weight_bytes"] < 1.5 * loaded.read_bytes
            files = sum(p.stat().st_size for p in [*nano.glob("*.safetensors"), *nano.glob("draft/*.safetensors")])
            assert 0.97 * files < loaded.read_bytes < files


def test_content_hash_depends_on_content_only(probe, tmp_path):
    kind = {**SMALL3, "layers": 2, "draft": {**SMALL3["draft"], "taps": [0, 1]}}
    one = write_model(tmp_path / "one", **kind)
    three = write_model(tmp_path / "three", **kind, shards=3)

    def content_hash(folder: Path, tp: int = 1) -> int:
        with probe.load(folder, tp=tp) as loaded:
            return loaded.info()["content_hash"]

    first = content_hash(one)
    assert first == content_hash(one, tp=4) == content_hash(three)
    seen = {first}
    for name in ("model.safetensors", "draft/model.safetensors"):
        data = bytearray((one / name).read_bytes())
        data[-1] ^= 1  # the lowest bit of the last tensor's upper byte: a finite number stays one
        (one / name).write_bytes(data)
        seen.add(content_hash(one))
    config = json.loads((one / "config.json").read_text())
    (one / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 2e-5}))
    seen.add(content_hash(one))
    assert len(seen) == 4


def test_hash_is_xxh3(probe):
    """What the xxhash package gives, for every length that is treated in a way of its own, and whatever pieces it comes in."""
    data = bytes(np.random.default_rng(0).integers(0, 256, 5000, np.uint8))
    for n in (*range(520), 1023, 1024, 1025, 1087, 1088, 1089, 2048, 2112, 5000):
        assert {probe.hash(data[:n], piece) for piece in (1, 63, 64, 65, 255, 256, 257, 1000, 5000)} == {
            xxh3_64_intdigest(data[:n])
        }, n


# ---- rope ------------------------------------------------------------------------------------------------------------


def config_of(nano: Path) -> dict:
    return json.loads((nano / "config.json").read_text())


def draft_of(nano: Path) -> dict:
    return json.loads((nano / "draft/config.json").read_text())


def test_numbers_of_the_published_kimi(probe, nano):
    """K2.5's own config.json, and the figures that its scale, frequencies and yarn borders must have."""
    config = json.loads((Path(__file__).parent / "data/kimi-k2.5-config.json").read_text())
    draft = {
        **draft_of(nano), "hidden_size": 7168, "vocab_size": 163840, "num_hidden_layers": 6, "num_target_layers": 61,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 18432,
        "block_size": 8, "layer_types": ["sliding_attention"] * 5 + ["full_attention"], "sliding_window": 2048,
        "dflash_config": {"mask_token_id": 163838, "target_layer_ids": [1, 12, 24, 35, 47, 58]},
        "rope_scaling": {**config["text_config"]["rope_scaling"], "type": "deepseek_yarn"},
    }  # fmt: skip
    got = probe.config(config, None, draft)
    shape = got["shape"]
    assert (shape["hidden"], shape["layers"], shape["dense_layers"], shape["heads"]) == (7168, 61, 1, 64)
    assert (shape["q_lora"], shape["kv_lora"]) == (1536, 512)
    assert (shape["nope"], shape["rope"], shape["v_head"]) == (128, 64, 128)
    assert (shape["inter"], shape["moe_inter"], shape["shared_inter"]) == (18432, 2048, 2048)
    assert (shape["experts"], shape["experts_per_token"], shape["vocab"]) == (384, 8, 163840)
    assert shape["score_scale"] == pytest.approx(0.14467963, rel=1e-6)
    assert (shape["rms_eps"], shape["rms_eps_lora"]) == (np.float32(1e-5), np.float32(1e-6))
    assert got["stop_ids"] == [163585] and got["nextn_layers"] == 0
    plain = 50000.0 ** (-2 * np.arange(32) / 64)
    ramp = np.clip((np.arange(32) - 8) / (20 - 8), 0, 1)
    np.testing.assert_allclose(got["rope"]["frequencies"], plain / 64 * ramp + plain * (1 - ramp), rtol=1e-14)
    assert got["rope"]["amplitude"] == got["draft_rope"]["amplitude"] == 1
    assert got["draft"]["window"] == [2048] * 5 + [0]
    plain = 50000.0 ** (-2 * np.arange(64) / 128)
    ramp = np.clip((np.arange(64) - 17) / (39 - 17), 0, 1)
    np.testing.assert_allclose(got["draft_rope"]["frequencies"], plain / 64 * ramp + plain * (1 - ramp), rtol=1e-14)


YARNS = {
    "none": None,
    "default": {"rope_type": "default"},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    "ratio": {
        "type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "mscale": 0.7, "mscale_all_dim": 1.3,
    },
    "one mscale": {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256, "mscale": 0.7},
    "given": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256, "attention_factor": 1.25},
    "betas": {
        "rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 100, "beta_fast": 4.0, "beta_slow": 4.0,
    },
    "no rounding": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "truncate": False},
    "factor 1": {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 512},
}  # fmt: skip


@pytest.mark.parametrize("name", YARNS)
def test_rope_is_that_of_transformers(probe, nano, name):
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = YARNS[name]
    draft = {**draft_of(nano), "rope_theta": 10000.0, "rope_scaling": scaling}
    got = probe.config(config_of(nano), None, draft)["draft_rope"]
    scaling = scaling or {"rope_type": "default"}
    parameters = {**scaling, "rope_type": scaling.get("rope_type") or scaling["type"], "rope_theta": 10000.0}
    config = transformers.Qwen3Config(
        hidden_size=256, num_attention_heads=8, head_dim=32, max_position_embeddings=2048, rope_parameters=parameters
    )
    if parameters["rope_type"] == "default":
        frequencies, amplitude = 10000.0 ** (-2 * np.arange(16) / 32), 1.0
    else:
        frequencies, amplitude = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    np.testing.assert_allclose(got["frequencies"], np.asarray(frequencies), rtol=2e-6)
    assert got["amplitude"] == pytest.approx(amplitude, rel=1e-12)


def test_deepseek_yarn_amplitude(probe, nano):
    """A missing mscale is 1 and a missing mscale_all_dim is 0 there."""
    base = {"rope_type": "deepseek_yarn", "factor": 64.0, "original_max_position_embeddings": 4096}

    def amplitude(**more) -> float:
        draft = {**draft_of(nano), "rope_scaling": {**base, **more}}
        return probe.config(config_of(nano), None, draft)["draft_rope"]["amplitude"]

    full = 0.1 * math.log(64) + 1
    assert amplitude() == pytest.approx(full)
    assert amplitude(mscale=1.0) == pytest.approx(full)
    assert amplitude(mscale=1.0, mscale_all_dim=1.0) == 1
    assert amplitude(mscale_all_dim=0.5) == pytest.approx(full / (0.05 * math.log(64) + 1))


def test_score_scale_follows_mscale_all_dim(probe, nano):
    config = config_of(nano)
    plain = 48**-0.5

    def scale(**more) -> float:
        rope = {**config["rope_scaling"], **more}
        return probe.config({**config, "rope_scaling": rope})["shape"]["score_scale"]

    assert scale() == pytest.approx(plain * (0.1 * math.log(4) + 1) ** 2, rel=1e-6)
    assert scale(mscale_all_dim=0.5) == pytest.approx(plain * (0.05 * math.log(4) + 1) ** 2, rel=1e-6)
    assert scale(mscale_all_dim=None) == pytest.approx(plain, rel=1e-6)
    without = probe.config({**config, "rope_scaling": None})
    assert without["shape"]["score_scale"] == pytest.approx(plain, rel=1e-6) and without["rope"]["amplitude"] == 1


def test_both_spellings_of_rope_mean_the_same(probe, nano):
    config = config_of(nano)
    new = {k: v for k, v in config.items() if k not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = {**config["rope_scaling"], "rope_theta": 50000.0, "rope_type": "yarn"}
    assert probe.config(new) == probe.config(config)


def test_rope_tables(probe, nano, folders):
    """cos and sin of position x frequency, in double, times the amplitude, for max_positions + 16 positions."""
    for folder in (nano, folders["odd"]):
        config, draft = config_of(folder), draft_of(folder)
        read = probe.config(config, None, draft)
        positions = np.arange(config["max_position_embeddings"] + MARGIN)[:, None]
        with probe.load(folder) as loaded:
            for prefix, rope in (("", read["rope"]), ("draft_", read["draft_rope"])):
                angles = positions * np.array(rope["frequencies"])
                for name, table in (("cos", np.cos(angles)), ("sin", np.sin(angles))):
                    got = loaded.weight(0, prefix + name)
                    want = rope["amplitude"] * table
                    assert got.shape == want.shape
                    assert np.abs(got - want).max() <= 2**-24 * max(1, rope["amplitude"]) * 1.001


def test_rope_tables_are_on_every_rank(probe, nano):
    with probe.load(nano, tp=2) as loaded:
        for name in ("cos", "sin", "draft_cos", "draft_sin"):
            assert np.array_equal(loaded.weight(0, name), loaded.weight(1, name))


def test_stop_ids_of_both_files(probe, nano):
    config = config_of(nano)
    assert probe.config(config)["stop_ids"] == [4065]
    assert probe.config(config, {"eos_token_id": 4066})["stop_ids"] == [4065, 4066]
    assert probe.config(config, {"eos_token_id": [7, 4065, 3]})["stop_ids"] == [3, 7, 4065]
    assert probe.config({**config, "eos_token_id": None}, {"temperature": 0.6})["stop_ids"] == []
