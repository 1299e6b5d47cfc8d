"""Operations and whole layers at Kimi K2's widths against the specification in float64, which is asked for some of the results
only: all of them would take minutes."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import backend
import numpy as np
import pytest
import ref
from probes import Device, Probes
from ref.model import DTYPES, Layer, attention, rope_of, rope_table, target_shape
from test_ops import ROWS as INDEXED
from test_ops import assert_close, assert_same_bits, take
from wide_model import write_wide_model

import kd

CUDA = backend.DEVICE == "cuda"
ROWS = 70 if CUDA else 5
HIDDEN, Q_LORA, LATENT, NOPE, ROPE, V_HEAD = 7168, 1536, 512, 128, 64, 128
DRAFT = ref.DraftShape(hidden=HIDDEN, heads=64, heads_rank=64, kv_heads=8, kv_heads_rank=8, head_dim=128, block=8)
# fp32 sums of so many terms; otherwise the bounds of the small cases hold.
LOOSER = {"route": dict(rms=5e-6, worst=5e-5)}


@pytest.fixture(scope="module")
def probes(test_library):
    return Probes(test_library)


def tiled(rng, *shape, std=1.0):
    """Random numbers of any amount, soon: rows of one pool, each from a place of its own on."""
    count = math.prod(shape)
    pool = ref.base.rand(rng, min(count, 1 << 20) + 4099, std=std)
    return np.resize(pool, count).reshape(shape)


def matrix(rng, n, k):
    return np.resize(ref.base.rand_mat(rng, 1 << 10, 1031) if n * k > 1 << 20 else ref.base.rand_mat(rng, n, k), (n, k))


def shape(heads):
    return ref.Shape(
        heads=heads, heads_rank=heads, kv_lora=LATENT, nope=NOPE, rope=ROPE, v_head=V_HEAD, score_scale=0.07, rms_eps_lora=1e-6
    )  # fmt: skip


# Each yields (arguments of the operation, arguments of the specification, result of the operation -> what that gives).


def products(rng):
    sizes = [(512, HIDDEN), (2112, HIDDEN), (8 * 192, Q_LORA), (HIDDEN, 8 * V_HEAD), (HIDDEN, 256)]
    if CUDA:
        sizes += [(64 * 192, Q_LORA), (HIDDEN, 64 * V_HEAD), (4608, HIDDEN), (HIDDEN, 2304)]
    for n, k in sizes:
        x, w = backend.act(tiled(rng, ROWS, k)), matrix(rng, n, k)
        some = rng.permutation(n)[:24]
        yield dict(x=x, w=w), dict(x=x, w=w[some]), lambda y, some=some: y[:, some]


def head(rng):
    x, w = backend.act(tiled(rng, ROWS, HIDDEN)), matrix(rng, 20480 if CUDA else 1000, HIDDEN)
    some = rng.permutation(len(w))[:24]
    yield dict(x=x, w=w), dict(x=x, w=w[some]), lambda y: y[:, some]


def some_heads(rng, heads):
    return np.sort(rng.permutation(heads)[:2])


def of_heads(a, heads, some):
    return a.reshape(len(a), heads, -1)[:, some].reshape(len(a), -1)


def queries(rng):
    for heads in 64, 8:
        some = some_heads(rng, heads)
        v, _, _ = ref.kv.random_view(rng, [(70, ROWS, "prompt")])
        q = backend.act(tiled(rng, ROWS, heads * (NOPE + ROPE)))
        k_up = matrix(rng, heads * NOPE, LATENT)
        case = dict(q=q, k_up=k_up, rope=ref.base.rand_rope(rng, 200, ROPE // 2), v=v, s=shape(heads))
        part = {**case, "q": of_heads(q, heads, some), "s": shape(2)}
        part["k_up"] = k_up.reshape(heads, NOPE, LATENT)[some].reshape(-1, LATENT)
        yield case, part, lambda y, heads=heads, some=some: of_heads(y, heads, some)


def values(rng):
    for heads in 64, 8:
        some = some_heads(rng, heads)
        o_lat, v_up = backend.act(tiled(rng, ROWS, heads * LATENT)), matrix(rng, heads * V_HEAD, LATENT)
        part = dict(o_lat=of_heads(o_lat, heads, some), s=shape(2))
        part["v_up"] = v_up.reshape(heads, V_HEAD, LATENT)[some].reshape(-1, LATENT)
        yield (
            dict(o_lat=o_lat, v_up=v_up, s=shape(heads)),
            part,
            lambda y, heads=heads, some=some: of_heads(y, heads, some),
        )


def attentions(rng):
    near = [(300, 5, "tree")]
    for heads, streams in (
        (64, [(8180, 20, "tree"), (100, 33, "prompt")]),
        (8, [(66_000, 9, "tree"), (300, 20, "tree")]),
    ):
        some = some_heads(rng, heads)
        v, rows, spoil = ref.kv.random_view(rng, streams if CUDA else near)
        q_lat = backend.act(tiled(rng, len(v["token"]), heads * (LATENT + ROPE)))
        kv = spoil(backend.act(tiled(rng, rows, LATENT + ROPE)))
        case = dict(q_lat=q_lat, kv=kv, v=v, s=shape(heads))
        part = {**case, "q_lat": of_heads(q_lat, heads, some), "s": shape(2)}
        yield case, part, lambda y, heads=heads, some=some: of_heads(y, heads, some)


def routes(rng):
    s = ref.moe.shape(HIDDEN, 2048, 384, 8)
    router, bias = ref.base.rand(rng, 384, HIDDEN, std=HIDDEN**-0.5), ref.base.rand(rng, 384, std=0.1)
    h = backend.act(ref.base.rand(rng, 2 * ROWS, HIDDEN))
    h = h[ref.moe.route_margin(h, router, bias, s) > 1e-4][:ROWS]
    case = dict(h=h, router=router, bias=bias, s=s)
    yield case, case, lambda *y: y


def experts(rng):
    for count, inter in [(384, 256), (16, 2048)] if CUDA else [(12, 256)]:
        bits = rng.integers(0, 1 << 32, (1 << 20) + 4099, dtype=np.uint32)

        def packed(n, k, bits=bits):
            scale = ref.bf16(np.exp(rng.uniform(-1, 1, 1 << 16)) * k**-0.5 / 4.6)
            return ref.W4(np.resize(bits, (n, k // 8)), np.resize(scale, (n, k // 32)))

        w = ref.Experts(packed(count * 2 * inter, HIDDEN), packed(count * HIDDEN, inter), count)
        y, h = (backend.act(tiled(rng, ROWS, HIDDEN)) for _ in range(2))
        expert = np.stack([rng.permutation(count)[:8] for _ in range(ROWS)]).astype(np.int32)
        weight = rng.uniform(0.01, 0.5, (ROWS, 8)).astype(np.float32)
        case = dict(y=y, h=h, expert=expert, weight=weight, w=w, s=ref.moe.shape(HIDDEN, inter, count, 8))
        row = int(rng.integers(ROWS))
        own = [
            ref.W4(*(a.reshape(count, -1, a.shape[1])[expert[row]].reshape(-1, a.shape[1]) for a in part))
            for part in w[:2]
        ]
        part = dict(y=y[row : row + 1], h=h[row : row + 1], expert=np.arange(8)[None], weight=weight[row : row + 1])
        part |= dict(w=ref.Experts(*own, 8), s=case["s"])
        yield case, part, lambda y, row=row: y[row : row + 1]


def norms(rng):
    x, w = backend.act(tiled(rng, ROWS, HIDDEN)), ref.base.rand_norm(rng, HIDDEN)
    case = dict(x=x, w=w, eps=1e-5)
    yield case, case, lambda y: y


def drafts(rng):
    table, pages = ref.kv.random_page_table(rng, [1500, 70])
    v = ref.draft.block_view(DRAFT, [5, 5], [1400, 64], table)
    k_pool, v_pool = (backend.act(tiled(rng, pages * ref.PAGE, 8 * 128)) for _ in range(2))
    for window, causal in (0, False), (1024, False), (1024, True):
        qkv = backend.act(tiled(rng, len(v["token"]), (64 + 16) * 128))
        case = dict(qkv=qkv, k_pool=k_pool, v_pool=v_pool, v=v, window=window, causal=causal, d=DRAFT)
        yield case, case, lambda y: y


OPERATIONS = {
    "linear": products,
    "logits": head,
    "mla_query": queries,
    "mla_value": values,
    "mla_attention": attentions,
    "route": routes,
    "moe": experts,
    "rms_norm": norms,
    "draft_attention": drafts,
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation(name, probes):
    for case, part, pick in OPERATIONS[name](np.random.default_rng(3)):
        got = pick(*getattr(probes, name)(Device(threads=2), **case))
        want = ref.OPS[name].spec(**part)
        got, want = (a if isinstance(a, tuple) else (a,) for a in (got, want))
        for output, a, b in zip(ref.OPS[name].outputs, got, want, strict=True):
            assert_close(a, b, **{**backend.bounds(name), **LOOSER.get(name, {})}, name=output)


@pytest.mark.parametrize("name", OPERATIONS)
def test_company_changes_no_bit(name, probes):
    """Of the rows all, few, alone, in other orders: as many as choose other tiles."""
    rng = np.random.default_rng(8)
    run = getattr(probes, name)
    block = DRAFT.block if name == "draft_attention" else 1
    for case, _, _ in OPERATIONS[name](np.random.default_rng(3)):
        whole = run(Device(), **case)
        units = len(whole[0]) // block
        for n in (units, 1, 12, 30):
            pick = (rng.permutation(units)[:n, None] * block + np.arange(block)).ravel()
            part = run(Device(), **take(name, case, pick, INDEXED[name]))
            assert_same_bits(part, [a[pick] for a in whole], f"{n} of {units} rows")


# ---- a layer, through the engine -------------------------------------------------------------------------------------

SMALL = {} if CUDA else dict(hidden=256, heads=8, q_lora=96, moe_inter=64)
LAYERS = {
    "dense": dict(dense_layers=1, inter=18432 if CUDA else 512, experts=8, **SMALL),
    "routed": dict(dense_layers=0, inter=512, experts=384, **SMALL),
}
TOKENS, SAMPLED = 40, 2  # of the 40 rows, those are compared whose choice of experts is the clearest


def mapped(folder: Path) -> dict[str, np.ndarray]:
    """The tensors of a folder, read when they are looked at."""
    found = {}
    for path in folder.glob("*.safetensors"):
        raw = np.memmap(path, np.uint8, "r")
        begin = 8 + int.from_bytes(raw[:8].tobytes(), "little")
        for name, t in json.loads(raw[8:begin].tobytes()).items():
            first, end = t["data_offsets"]
            found[name] = raw[begin + first : begin + end].view(DTYPES[t["dtype"]]).reshape(t["shape"])
    return found


def sampled_logits(folder: Path, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(rows, logits after these) of a model of one layer."""
    c = json.loads((folder / "config.json").read_text())
    tensors, s, at = mapped(folder), target_shape(c), "model.layers.0."

    def w(name):
        return ref.f64(tensors[f"{at}{name}.weight"])

    kv_b = w("self_attn.kv_b_proj").reshape(s.heads, s.nope + s.v_head, s.kv_lora)
    layer = Layer(
        w("input_layernorm"), w("post_attention_layernorm"), w("self_attn.q_a_layernorm"), w("self_attn.kv_a_layernorm"),
        np.concatenate((w("self_attn.q_a_proj"), w("self_attn.kv_a_proj_with_mqa"))), w("self_attn.q_b_proj"),
        kv_b[:, : s.nope].reshape(-1, s.kv_lora), kv_b[:, s.nope :].reshape(-1, s.kv_lora), w("self_attn.o_proj"),
    )  # fmt: skip
    view = ref.kv.make_view([(0, 0, tokens, None)], [np.arange(-(-len(tokens) // ref.PAGE))])
    pool = np.full((view["page_table"].size * ref.PAGE, s.kv_row), np.nan)
    rope = rope_table(s.rope, s.max_positions, *rope_of(c))
    x = ref.f64(tensors["model.embed_tokens.weight"][tokens])
    o, _ = attention(layer, ref.rows.rms_norm(x, layer.input_norm, s.rms_eps), pool, rope, view, s, "absorbed")
    x = x + ref.linear.linear(o, layer.o)
    h = ref.rows.rms_norm(x, layer.post_norm, s.rms_eps)
    mlp, routed = "mlp", f"{at}mlp.gate.weight" in tensors
    rows = np.arange(SAMPLED)
    if routed:
        mlp, router, bias = "mlp.shared_experts", w("mlp.gate"), tensors[f"{at}mlp.gate.e_score_correction_bias"]
        rows = np.argsort(-ref.moe.route_margin(h, router, bias, s))[:SAMPLED]
    x, h = x[rows], h[rows]
    gate_up = np.concatenate((w(f"{mlp}.gate_proj"), w(f"{mlp}.up_proj")))
    y = x + ref.linear.linear(ref.linear.swiglu(ref.linear.linear(h, gate_up)), w(f"{mlp}.down_proj"))
    if routed:
        expert, weight = ref.moe.route(h, router, bias, s)

        def one(job):
            row, slot = job

            def packed(kind):
                name = f"{at}mlp.experts.{expert[row, slot]}.{kind}_proj.weight_"
                return ref.dequantise(tensors[name + "packed"].view(np.uint32), tensors[name + "scale"])

            both = np.concatenate((packed("gate"), packed("up")))[None]
            return row, ref.moe.run_experts(h[row : row + 1], np.zeros((1, 1), int), weight[row, slot].reshape(1, 1), both,
                                            packed("down")[None])  # fmt: skip

        with ThreadPoolExecutor(8) as pool_of_threads:
            for row, part in pool_of_threads.map(one, np.ndindex(expert.shape)):
                y[row] += part[0]
    last = ref.rows.rms_norm(y, ref.f64(tensors["model.norm.weight"]), s.rms_eps)
    return rows, ref.linear.linear(last, ref.f64(tensors["lm_head.weight"]))


@pytest.mark.parametrize("kind", LAYERS)
def test_layer(library, tmp_path, kind):
    folder = write_wide_model(tmp_path / kind, layers=1, **LAYERS[kind])
    tokens = np.random.default_rng(4).integers(0, 1000, TOKENS)
    rows, want = sampled_logits(folder, tokens)
    with kd.Engine(folder, library=library, prefill_chunk=24) as engine:
        got = engine.score(tokens.tolist())[rows]
    for path in folder.glob("*.safetensors"):
        path.unlink()
    bounds = dict(rms=0.012, worst=0.04, rounding=0.01) if CUDA else dict(rms=5e-6, worst=5e-5)
    assert_close(got, want, **bounds, name="logits")
