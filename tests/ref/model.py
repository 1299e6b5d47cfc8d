"""The whole target model, written with the operations of this package: load a folder, run it, generate with it.

Independent of the native loader: bytes come from the `safetensors` package, numbers are float64 throughout.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors

from . import accept, draft, kv, mla, tree
from .base import PAGE, DraftShape, Rope, Sampling, Shape, dequantise, f64
from .linear import linear, swiglu
from .moe import route, route_margin, run_experts
from .rows import rms_norm
from .sample import row_hash, sample

DTYPES = {"BF16": np.uint16, "F32": np.float32, "I32": np.int32}


@dataclass
class Layer:
    """float64 weights, laid out as native/types.h Layer; experts [count][2 inter][hidden], [count][hidden][inter]."""

    input_norm: np.ndarray
    post_norm: np.ndarray
    q_a_norm: np.ndarray
    kv_a_norm: np.ndarray
    qkv_a: np.ndarray
    q_b: np.ndarray
    k_up: np.ndarray
    v_up: np.ndarray
    o: np.ndarray
    gate_up: np.ndarray = None  # dense layer, or the shared experts
    down: np.ndarray = None
    router: np.ndarray = None  # None: a dense layer
    router_bias: np.ndarray = None
    expert_gate_up: np.ndarray = None
    expert_down: np.ndarray = None


@dataclass
class Model:
    shape: Shape
    embed: np.ndarray
    lm_head: np.ndarray
    norm: np.ndarray
    rope: Rope
    layers: list
    stop_ids: tuple
    drafter: draft.Drafter = None


# ---- loading ---------------------------------------------------------------------------------------------------------


def read_tensors(folder):
    """name -> array of a folder's *.safetensors; bf16 as uint16 bits."""
    tensors = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        for name, t in safetensors.deserialize(path.read_bytes()):
            tensors[name] = np.frombuffer(t["data"], DTYPES[t["dtype"]]).reshape(t["shape"])
    return tensors


def mscale(factor, m):
    return 0.1 * m * math.log(factor) + 1 if factor > 1 else 1.0


def rope_table(dims, positions, theta, scaling):
    """cos and sin [positions][dims / 2]; scaling is None or a YaRN dict of the config."""
    extra = theta ** (-np.arange(0, dims, 2) / dims)
    frequency, amplitude = extra, 1.0
    if scaling:
        factor = scaling["factor"]

        def pair_that_turns(times):
            reach = scaling["original_max_position_embeddings"] / (times * 2 * math.pi)
            return dims * math.log(reach) / (2 * math.log(theta))

        low = max(math.floor(pair_that_turns(scaling.get("beta_fast") or 32)), 0)
        high = min(math.ceil(pair_that_turns(scaling.get("beta_slow") or 1)), dims - 1)
        ramp = np.clip((np.arange(dims // 2) - low) / max(high - low, 0.001), 0, 1)
        frequency = extra / factor * ramp + extra * (1 - ramp)
        m, m_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
        amplitude = mscale(factor, m) / mscale(factor, m_all) if m and m_all else mscale(factor, 1)
    angle = np.arange(positions)[:, None] * frequency
    return Rope(amplitude * np.cos(angle), amplitude * np.sin(angle))


def rope_of(config):
    """(theta, scaling dict or None), from either way of writing it."""
    nested = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or nested
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    assert kind in ("default", "yarn", "deepseek_yarn"), kind
    return nested.get("rope_theta") or config["rope_theta"], None if kind == "default" else scaling


def target_shape(c):
    """Shape of one rank that holds everything."""
    _, scaling = rope_of(c)
    nope, rope = c["qk_nope_head_dim"], c["qk_rope_head_dim"]
    m = mscale(scaling["factor"], scaling.get("mscale_all_dim") or 0) if scaling else 1.0
    inter, shared = c["moe_intermediate_size"], c["moe_intermediate_size"] * (c.get("n_shared_experts") or 0)
    return Shape(
        hidden=c["hidden_size"],
        layers=c["num_hidden_layers"],
        dense_layers=c["first_k_dense_replace"],
        heads=c["num_attention_heads"],
        heads_rank=c["num_attention_heads"],
        q_lora=c["q_lora_rank"],
        kv_lora=c["kv_lora_rank"],
        nope=nope,
        rope=rope,
        v_head=c["v_head_dim"],
        inter=c["intermediate_size"],
        inter_rank=c["intermediate_size"],
        moe_inter=inter,
        moe_inter_rank=inter,
        shared_inter=shared,
        shared_inter_rank=shared,
        experts=c["n_routed_experts"],
        experts_per_token=c["num_experts_per_tok"],
        vocab=c["vocab_size"],
        vocab_rank=c["vocab_size"],
        max_positions=c["max_position_embeddings"],
        rms_eps=c["rms_norm_eps"],
        score_scale=(nope + rope) ** -0.5 * m**2,
        routed_scale=c["routed_scaling_factor"],
        norm_topk=c["norm_topk_prob"],
    )


def load_layer(tensors, i, s):
    at = f"model.layers.{i}."

    def w(name):
        return f64(tensors[f"{at}{name}.weight"])

    def gate_up(name):
        return np.concatenate((w(f"{name}.gate_proj"), w(f"{name}.up_proj")))

    def expert(e, kind):
        name = f"{at}mlp.experts.{e}.{kind}_proj."
        return dequantise(tensors[name + "weight_packed"].view(np.uint32), tensors[name + "weight_scale"])

    kv_b = w("self_attn.kv_b_proj").reshape(s.heads, s.nope + s.v_head, s.kv_lora)
    layer = Layer(
        input_norm=w("input_layernorm"),
        post_norm=w("post_attention_layernorm"),
        q_a_norm=w("self_attn.q_a_layernorm"),
        kv_a_norm=w("self_attn.kv_a_layernorm"),
        q_b=w("self_attn.q_b_proj"),
        o=w("self_attn.o_proj"),
        qkv_a=np.concatenate((w("self_attn.q_a_proj"), w("self_attn.kv_a_proj_with_mqa"))),
        k_up=kv_b[:, : s.nope].reshape(-1, s.kv_lora),
        v_up=kv_b[:, s.nope :].reshape(-1, s.kv_lora),
    )
    if i < s.dense_layers:
        layer.gate_up, layer.down = gate_up("mlp"), w("mlp.down_proj")
        return layer
    layer.router, layer.router_bias = w("mlp.gate"), f64(tensors[f"{at}mlp.gate.e_score_correction_bias"])
    layer.expert_gate_up = np.stack([np.concatenate((expert(e, "gate"), expert(e, "up"))) for e in range(s.experts)])
    layer.expert_down = np.stack([expert(e, "down") for e in range(s.experts)])
    if s.shared_inter:
        layer.gate_up, layer.down = gate_up("mlp.shared_experts"), w("mlp.shared_experts.down_proj")
    return layer


def causal_layers(c, slides):
    """Whether a block's rows see none of its later rows, a layer: is_causal or dflash_config.causal, of all layers; or
    sliding_window_non_causal, false where the sliding ones are causal."""
    whole = c.get("is_causal")
    whole = c["dflash_config"].get("causal") if whole is None else whole
    sliding = not c.get("sliding_window_non_causal", True)
    return tuple(bool(whole) if whole is not None else sliding and slide for slide in slides)


def load_drafter(folder):
    c = json.loads((Path(folder) / "config.json").read_text())
    tensors = {name.removeprefix("model."): a for name, a in read_tensors(folder).items()}
    layers, heads, kv_heads = c["num_hidden_layers"], c["num_attention_heads"], c["num_key_value_heads"]
    slides = [kind == "sliding_attention" for kind in c.get("layer_types") or ["full_attention"] * layers]
    shape = DraftShape(
        layers=layers,
        hidden=c["hidden_size"],
        heads=heads,
        heads_rank=heads,
        kv_heads=kv_heads,
        kv_heads_rank=kv_heads,
        head_dim=c["head_dim"],
        inter=c["intermediate_size"],
        inter_rank=c["intermediate_size"],
        block=c["block_size"],
        mask_token=c["dflash_config"]["mask_token_id"],
        rms_eps=c["rms_norm_eps"],
        taps=tuple(c["dflash_config"]["target_layer_ids"]),
        window=tuple(c["sliding_window"] if slide else 0 for slide in slides),
        causal=causal_layers(c, slides),
    )

    def w(name):
        return f64(tensors[name + ".weight"])

    def layer(at):
        return draft.DraftLayer(
            input_norm=w(at + "input_layernorm"),
            post_norm=w(at + "post_attention_layernorm"),
            q_norm=w(at + "self_attn.q_norm"),
            k_norm=w(at + "self_attn.k_norm"),
            o=w(at + "self_attn.o_proj"),
            qkv=np.concatenate([w(f"{at}self_attn.{x}_proj") for x in "qkv"]),
            gate_up=np.concatenate((w(at + "mlp.gate_proj"), w(at + "mlp.up_proj"))),
            down=w(at + "mlp.down_proj"),
        )

    return draft.Drafter(
        shape,
        w("fc"),
        w("hidden_norm"),
        w("norm"),
        rope_table(shape.head_dim, c["max_position_embeddings"], *rope_of(c)),
        [layer(f"layers.{i}.") for i in range(layers)],
    )


def load(folder, with_draft=True):
    """A model folder -> Model; its draft/ too, if there is one."""
    folder = Path(folder)
    whole = json.loads((folder / "config.json").read_text())
    c = whole.get("text_config", whole)
    tensors = {name.removeprefix("language_model."): a for name, a in read_tensors(folder).items()}
    s = target_shape(c)
    generation = folder / "generation_config.json"
    stop = json.loads(generation.read_text()).get("eos_token_id", []) if generation.exists() else []
    return Model(
        shape=s,
        embed=f64(tensors["model.embed_tokens.weight"]),
        lm_head=f64(tensors["lm_head.weight"]),
        norm=f64(tensors["model.norm.weight"]),
        rope=rope_table(s.rope, s.max_positions, *rope_of(c)),
        layers=[load_layer(tensors, i, s) for i in range(s.layers)],
        stop_ids=tuple(stop) if isinstance(stop, list) else (stop,),
        drafter=load_drafter(folder / "draft") if with_draft and (folder / "draft").exists() else None,
    )


# ---- running ---------------------------------------------------------------------------------------------------------


def new_kv(m, pool_rows):
    """Empty pools, one a layer; what was never written is NaN."""
    return [np.full((pool_rows, m.shape.kv_row), np.nan) for _ in m.layers]


def attention(layer, h, pool, rope, view, s, form):
    """h [n][hidden] -> (o [n][heads * v_head], pool)"""
    q, pool = mla.mla_latent(pool, linear(h, layer.qkv_a), layer.q_a_norm, layer.q_b, layer.kv_a_norm, rope, view, s)
    if form == "expanded":
        return mla.expanded_attention(q, pool, layer.k_up, layer.v_up, rope, view, s), pool
    o_lat = mla.mla_attention(mla.mla_query(q, layer.k_up, rope, view, s), pool, view, s)
    return mla.mla_value(o_lat, layer.v_up, s), pool


def mlp(layer, h, s):
    y = linear(swiglu(linear(h, layer.gate_up)), layer.down) if layer.gate_up is not None else np.zeros_like(h)
    if layer.router is None:
        return y
    expert, weight = route(h, layer.router, layer.router_bias, s)
    return y + run_experts(h, expert, weight, layer.expert_gate_up, layer.expert_down)


def forward(m, view, pools, form="absorbed", margins=None):
    """Run a view's rows. -> (logits [n_out][vocab], taps [n][taps * hidden], pools)

    form: "absorbed" as the engine computes it, or "expanded" as the textbook does. margins: a list that receives, per
    routed layer, by how much each row's last chosen expert beat the next [n].
    """
    s = m.shape
    x = m.embed[view["token"]]
    pools, taps = list(pools), []
    for i, layer in enumerate(m.layers):
        o, pools[i] = attention(layer, rms_norm(x, layer.input_norm, s.rms_eps), pools[i], m.rope, view, s, form)
        x = x + linear(o, layer.o)
        h = rms_norm(x, layer.post_norm, s.rms_eps)
        if margins is not None and layer.router is not None:
            margins.append(route_margin(h, layer.router, layer.router_bias, s))
        x = x + mlp(layer, h, s)
        if m.drafter and i in m.drafter.shape.taps:
            taps.append(x)
    logits = linear(rms_norm(x[view["out_row"]], m.norm, s.rms_eps), m.lm_head)
    return logits, np.concatenate(taps, axis=1) if taps else np.zeros((len(x), 0)), pools


def score(m, tokens, form="absorbed"):
    """Logits after every token of one sequence, float64 [n][vocab]."""
    pages = -(-len(tokens) // PAGE)
    view = kv.make_view([(0, 0, np.asarray(tokens), None)], [np.arange(pages)])
    return forward(m, view, new_kv(m, pages * PAGE), form)[0]


# ---- generating ------------------------------------------------------------------------------------------------------


@dataclass
class Generated:
    tokens: list
    hashes: list  # of the fp32 logits row each token was chosen from
    logits: np.ndarray  # float64 [tokens][vocab], the rows themselves
    accepted: list  # per round: rows kept, the root included
    nodes: list  # per round: nodes of the tree


def draft_table(m, pools, anchor, start, page_table, k):
    """(topid, logprob) [block - 1][k]: what the drafter expects after `anchor` at position `start`."""
    d = m.drafter.shape
    view = draft.block_view(d, [anchor], [start], page_table)
    hidden = draft.block_forward(m.drafter, m.embed[view["token"]], pools, view)
    ids, logprob = draft.top_logprobs(linear(hidden[1:], m.lm_head).astype(np.float32), k, m.shape)
    return ids, logprob.astype(np.float32)


def generate(m, prompt, max_tokens, builder="none", budget=0, sampling=None, page_seed=0):
    """Rounds of draft, build, verify, accept and commit for one stream; budget 0 is plain decoding."""
    sampling = [sampling or Sampling()]
    table, pages = kv.random_page_table(np.random.default_rng(page_seed), [len(prompt) + max_tokens + budget + PAGE])
    pools = new_kv(m, pages * PAGE)
    drafting = m.drafter is not None and builder != "none" and budget > 0
    context = draft.new_pools(m.drafter.shape, pages * PAGE) if drafting else None

    def keep(start, tokens, taps):
        if drafting:
            context[:] = draft.append_context(m.drafter, context, taps, kv.make_view([(0, start, tokens, None)], table))

    def verify(view):
        logits, taps, pools[:] = forward(m, view, pools)
        return logits, taps, sample(logits.astype(np.float32), sampling, view, m.shape)[0]

    logits, taps, chosen = verify(kv.make_view([(0, 0, prompt, None)], table, out_row=[len(prompt) - 1]))
    keep(0, prompt, taps)
    out, rows, accepted, nodes = [int(chosen[0])], [logits[0]], [], []
    start = len(prompt)
    while len(out) < max_tokens:
        anchor, grown = out[-1], tree.none(None, None, 0)
        if drafting:
            ids, logprob = draft_table(m, context, anchor, start, table, min(budget, m.shape.vocab))
            grown = tree.BUILDERS[builder](ids, logprob, budget)
        view = kv.make_view([(0, start, [anchor, *grown.token], grown.parent)], table)
        logits, taps, chosen = verify(view)
        trees = {"first_row": np.array([0, len(grown.parent)]), "parent": np.array(grown.parent)}
        n, node = accept.tree_accept(trees, {"token": chosen}, view)
        path = node[0, : n[0]]
        pools = list(accept.kv_commit(pools, {"n": n, "node": node}, trees, view))
        keep(start, view["token"][path], taps[path])
        out += [int(t) for t in chosen[path]]
        rows += list(logits[path])
        accepted.append(len(path))
        nodes.append(len(grown.token))
        start += len(path)
    out, rows = out[:max_tokens], rows[:max_tokens]
    return Generated(out, [int(row_hash(row)) for row in rows], np.array(rows), accepted, nodes)
