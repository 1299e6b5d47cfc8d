"""What the ranks hold of a folder, put together again by the one table of shards, is the folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fake_model import SMALL3, write_model
from load_probe import Loaded, Probe
from ref import sharding
from test_checkpoint import stored, unpacked

# Every dimension that is not shared out is odd, and so is each rank's share of most that are; 37 ids of the vocabulary leave
# the last of eight ranks two.
UNEVEN = {
    **SMALL3, "seed": 9, "hidden": 32, "layers": 3, "dense_layers": 1, "heads": 8, "q_lora": 17, "kv_lora": 7, "nope": 5,
    "rope": 6, "v_head": 9, "inter": 88, "moe_inter": 256, "experts": 5, "topk": 3, "shared": 3, "vocab": 37,
    "draft": {**SMALL3["draft"], "heads": 24, "kv_heads": 8, "head_dim": 10, "inter": 56},
}  # fmt: skip
FOLDERS = {"small3": SMALL3, "uneven": UNEVEN}


@pytest.fixture(scope="session")
def probe(test_library) -> Probe:
    return Probe(test_library)


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("shards")
    return {name: write_model(base / name, **kind) for name, kind in FOLDERS.items()}


def held(loaded: Loaded, rank: int) -> dict[str, np.ndarray]:
    """Shares of one rank under the names of the stored tensors; 4-bit matrices by the name of their packed words."""
    info = loaded.info(rank)
    s, d = info["shape"], info["draft"]
    out: dict[str, np.ndarray] = {}

    def weight(name: str) -> np.ndarray:
        return loaded.weight(rank, name)

    def mlp(name: str, gate_up: np.ndarray, down: np.ndarray, kind: str = "weight") -> None:
        half = len(gate_up) // 2
        out[f"{name}.gate_proj.{kind}"], out[f"{name}.up_proj.{kind}"] = gate_up[:half], gate_up[half:]
        out[f"{name}.down_proj.{kind}"] = down

    out["model.embed_tokens.weight"], out["lm_head.weight"] = weight("embed"), weight("lm_head")
    for i in range(s["layers"]):
        layer, at = f"model.layers.{i}", f"layers.{i}"
        attn = f"{layer}.self_attn"
        q_a, kv_a = np.split(weight(f"{at}.qkv_a"), [s["q_lora"]])
        out[f"{attn}.q_a_proj.weight"], out[f"{attn}.kv_a_proj_with_mqa.weight"] = q_a, kv_a
        out[f"{attn}.q_b_proj.weight"] = weight(f"{at}.q_b")
        k_up = weight(f"{at}.k_up").reshape(s["heads_rank"], s["nope"], s["kv_lora"])
        v_up = weight(f"{at}.v_up").reshape(s["heads_rank"], s["v_head"], s["kv_lora"])
        out[f"{attn}.kv_b_proj.weight"] = np.concatenate([k_up, v_up], 1).reshape(-1, s["kv_lora"])
        out[f"{attn}.o_proj.weight"] = weight(f"{at}.o")
        if i < s["dense_layers"]:
            mlp(f"{layer}.mlp", weight(f"{at}.gate_up"), weight(f"{at}.down"))
            continue
        out[f"{layer}.mlp.gate.weight"] = weight(f"{at}.router")
        mlp(f"{layer}.mlp.shared_experts", weight(f"{at}.shared_gate_up"), weight(f"{at}.shared_down"))
        gate_up, down = weight(f"{at}.experts.gate_up"), weight(f"{at}.experts.down")
        for e, (g, w) in enumerate(zip(*(np.split(a, s["experts"]) for a in (gate_up, down)), strict=True)):
            mlp(f"{layer}.mlp.experts.{e}", g, w, "weight_packed")
    if d["layers"]:
        out["fc.weight"] = weight("fc")
    for i in range(d["layers"]):
        layer, at = f"layers.{i}", f"draft_layers.{i}"
        rows = [d["heads_rank"] * d["head_dim"], (d["heads_rank"] + d["kv_heads_rank"]) * d["head_dim"]]
        for x, a in zip("qkv", np.split(weight(f"{at}.qkv"), rows), strict=True):
            out[f"{layer}.self_attn.{x}_proj.weight"] = a
        out[f"{layer}.self_attn.o_proj.weight"] = weight(f"{at}.o")
        mlp(f"{layer}.mlp", weight(f"{at}.gate_up"), weight(f"{at}.down"))
    return out


def matrices(folder: Path) -> dict[str, np.ndarray]:
    """Every stored matrix; 4-bit ones with their scales, by the name of their packed words."""
    target = stored(folder)
    found = {name: a for name, a in target.items() if name.endswith(".weight") and a.ndim == 2}
    found |= {n: unpacked(target, n.removesuffix(".weight_packed")) for n in target if n.endswith(".weight_packed")}
    draft = {name.removeprefix("model."): a for name, a in stored(folder / "draft").items()}
    return found | {name: a for name, a in draft.items() if a.ndim == 2}


@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("name", FOLDERS)
def test_the_shares_of_all_ranks_make_every_tensor_again(probe, folders, name, tp):
    want = matrices(folders[name])
    with probe.load(folders[name], tp=tp) as loaded:
        ranks = [held(loaded, rank) for rank in range(tp)]
    assert set(ranks[0]) == set(want)
    for tensor, whole in want.items():
        shares = [rank[tensor] for rank in ranks]
        assert np.array_equal(sharding.join(tensor, shares), whole), tensor
        for rank, got in enumerate(shares):
            assert np.array_equal(sharding.share(tensor, whole, tp, rank), got), f"{tensor}, rank {rank}"


def test_every_stored_tensor_has_one_line_in_the_table(folders, nano):
    for folder in (*folders.values(), nano):
        names = [*stored(folder), *stored(folder / "draft")]
        used = {sharding.split_of(name) for name in names if not name.endswith(".weight_shape")}
        assert used == {"whole", *sharding.AXIS}


def test_scales_are_cut_where_their_weights_are():
    """Else a rank would take its groups for others of another size."""
    for name, split in sharding.TABLE.items():
        if name.endswith("_packed"):
            assert sharding.TABLE[name.replace("_packed", "_scale")] == split
    assert sharding.TABLE["down_proj.weight_packed"] == "cols" and sharding.TABLE["gate_proj.weight_packed"] == "rows"
