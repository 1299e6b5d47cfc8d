"""The target (DeepSeek-V3 text architecture as Kimi K2 uses it) and the DFlash drafter, in plain torch.

Parameter names are the published ones, except that a layer's experts are stacked in three tensors.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training import int4
from training.recipe import DrafterShape, TargetShape

EXPERT_TENSORS = {"experts_gate": "gate_proj", "experts_up": "up_proj", "experts_down": "down_proj"}


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def yarn_scale(factor: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0


def yarn_frequencies(c: TargetShape) -> Tensor:
    """[rope_dim/2]: low frequencies divided by the factor, high ones kept, a ramp between (beta 32 and 1)."""
    plain = 1.0 / c.rope_theta ** (torch.arange(0, c.rope_dim, 2).float() / c.rope_dim)

    def dimension(turns: float) -> float:
        return c.rope_dim * math.log(c.yarn_original / (turns * 2 * math.pi)) / (2 * math.log(c.rope_theta))

    low, high = max(math.floor(dimension(32)), 0), min(math.ceil(dimension(1)), c.rope_dim - 1)
    ramp = ((torch.arange(c.rope_dim // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain * (1 - ramp) + plain / c.yarn_factor * ramp


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding over neighbouring pairs (the target's layout). x [..., T, d], cos and sin [T, d/2]."""
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding over the two halves (the drafter's layout)."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class RmsNorm(nn.Module):
    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight.to(x.dtype)


class Mlp(nn.Module):
    def __init__(self, hidden: int, intermediate: int):
        super().__init__()
        self.gate_proj = linear(hidden, intermediate)
        self.up_proj = linear(hidden, intermediate)
        self.down_proj = linear(intermediate, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Attention(nn.Module):
    """Multi-head latent attention. `past`: a list [latents, rotated keys] that grows, or None."""

    def __init__(self, c: TargetShape):
        super().__init__()
        self.c = c
        head = c.nope_dim + c.rope_dim
        self.q_a_proj = linear(c.hidden, c.q_rank)
        self.q_a_layernorm = RmsNorm(c.q_rank, c.norm_eps)
        self.q_b_proj = linear(c.q_rank, c.heads * head)
        self.kv_a_proj_with_mqa = linear(c.hidden, c.kv_rank + c.rope_dim)
        self.kv_a_layernorm = RmsNorm(c.kv_rank, c.norm_eps)
        self.kv_b_proj = linear(c.kv_rank, c.heads * (c.nope_dim + c.value_dim))
        self.o_proj = linear(c.heads * c.value_dim, c.hidden)
        self.scale = head**-0.5 * yarn_scale(c.yarn_factor) ** 2

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, past: list | None) -> Tensor:
        c = self.c
        batch, rows, _ = x.shape
        query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).view(batch, rows, c.heads, -1).transpose(1, 2)
        plain, turned = query.split([c.nope_dim, c.rope_dim], -1)
        latent, key = self.kv_a_proj_with_mqa(x).split([c.kv_rank, c.rope_dim], -1)
        latent, key = self.kv_a_layernorm(latent), rotate_pairs(key, cos, sin)
        if past is not None:
            if past:
                latent, key = torch.cat([past[0], latent], 1), torch.cat([past[1], key], 1)
            past[:] = [latent, key]
        keys_values = self.kv_b_proj(latent).view(batch, -1, c.heads, c.nope_dim + c.value_dim).transpose(1, 2)
        key_plain, value = keys_values.split([c.nope_dim, c.value_dim], -1)
        query = torch.cat([plain, rotate_pairs(turned, cos, sin)], -1)
        keys = torch.cat([key_plain, key.unsqueeze(1).expand(-1, c.heads, -1, -1)], -1)
        if x.is_cuda:  # equal head sizes let the flash kernel run
            value = F.pad(value, (0, c.nope_dim + c.rope_dim - c.value_dim))
        causal = mask is None and rows > 1
        out = F.scaled_dot_product_attention(query, keys, value, attn_mask=mask, is_causal=causal, scale=self.scale)
        return self.o_proj(out[..., : c.value_dim].transpose(1, 2).reshape(batch, rows, -1))


class Experts(nn.Module):
    """Sigmoid router with a correction bias, top-k of the experts, one shared expert.

    All experts are computed as one matrix product and the gates zero the others: at this size that is the fast way.
    """

    def __init__(self, c: TargetShape):
        super().__init__()
        self.c = c
        self.gate = nn.Parameter(torch.empty(c.experts, c.hidden))
        self.register_buffer("bias", torch.zeros(c.experts))
        self.experts_gate = nn.Parameter(torch.empty(c.experts, c.expert_intermediate, c.hidden))
        self.experts_up = nn.Parameter(torch.empty(c.experts, c.expert_intermediate, c.hidden))
        self.experts_down = nn.Parameter(torch.empty(c.experts, c.hidden, c.expert_intermediate))
        self.shared_experts = Mlp(c.hidden, c.expert_intermediate)
        self.register_buffer("rounding", torch.zeros(()), persistent=False)
        self.register_buffer("order", torch.arange(c.experts), persistent=False)
        self.load: Tensor | None = None  # [experts], share of the last rows that used each

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights [N, experts] (zero where not chosen) and the choice as 0/1, by rank instead of a top-k kernel."""
        scores = torch.sigmoid(F.linear(x.float(), self.gate.float()))
        biased, order = scores + self.bias, self.order
        ahead = (biased.unsqueeze(-2) > biased.unsqueeze(-1)) | (
            (biased.unsqueeze(-2) == biased.unsqueeze(-1)) & (order.unsqueeze(0) < order.unsqueeze(1))
        )
        chosen = (ahead.sum(-1) < self.c.experts_per_token).float()
        weights = scores * chosen
        return weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.c.routed_scale, chosen

    def forward(self, x: Tensor) -> Tensor:
        c, shape = self.c, x.shape
        x = x.reshape(-1, c.hidden)
        with torch.autocast(x.device.type, enabled=False):
            weights, chosen = self.gates(x)
        self.load = chosen.detach().mean(0)
        gate, up, down = self.experts_gate, self.experts_up, self.experts_down
        if self.training:
            gate, up, down = (int4.fake_quantised(w, self.rounding) for w in (gate, up, down))
        inner = F.silu(F.linear(x, gate.reshape(-1, c.hidden))) * F.linear(x, up.reshape(-1, c.hidden))
        inner = inner.view(-1, c.experts, c.expert_intermediate) * weights.to(inner.dtype).unsqueeze(-1)
        out = F.linear(inner.flatten(1), down.permute(1, 0, 2).reshape(c.hidden, -1))
        return (out + self.shared_experts(x)).view(shape)


class Layer(nn.Module):
    def __init__(self, c: TargetShape, index: int):
        super().__init__()
        self.input_layernorm = RmsNorm(c.hidden, c.norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RmsNorm(c.hidden, c.norm_eps)
        self.mlp = Mlp(c.hidden, c.intermediate) if index < c.dense_layers else Experts(c)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None, past: list | None = None
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask, past)
        return x + self.mlp(self.post_attention_layernorm(x))


class Target(nn.Module):
    """ids [B, T] -> final hidden states [B, T, hidden] and, for the layers in `taps`, their outputs side by side."""

    def __init__(self, c: TargetShape):
        super().__init__()
        self.c = c
        self.embed_tokens = nn.Embedding(c.vocab, c.hidden)
        self.layers = nn.ModuleList(Layer(c, i) for i in range(c.layers))
        self.norm = RmsNorm(c.hidden, c.norm_eps)
        self.lm_head = linear(c.hidden, c.vocab)
        for name, p in self.named_parameters():
            if p.dim() > 1:
                nn.init.normal_(p, 0, 0.02 if "embed" in name else 0.5 * p.shape[-1] ** -0.5)
            if name.endswith(("o_proj.weight", "down_proj.weight", "experts_down")):
                p.data.mul_((2 * c.layers) ** -0.5)
        angles = torch.outer(torch.arange(c.positions).float(), yarn_frequencies(c))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(
        self,
        ids: Tensor,
        taps: tuple[int, ...] = (),
        *,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        past: list[list] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.embed_tokens(ids)
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        cos, sin = self.cos[positions].to(dtype), self.sin[positions].to(dtype)
        tapped = []
        for i, layer in enumerate(self.layers):
            x = layer(x, cos, sin, mask, None if past is None else past[i])
            if i in taps:
                tapped.append(x)
        return self.norm(x), torch.cat(tapped, -1) if tapped else None

    def experts(self) -> list[Experts]:
        return [layer.mlp for layer in self.layers if isinstance(layer.mlp, Experts)]

    def set_rounding(self, on: bool) -> None:
        for experts in self.experts():
            experts.rounding.fill_(float(on))

    @torch.no_grad()
    def balance(self, rate: float) -> None:
        """Moves each expert's bias towards an equal share of the last batch (no auxiliary loss)."""
        for experts in self.experts():
            experts.bias += rate * torch.sign(self.c.experts_per_token / self.c.experts - experts.load)


def exported(target: Target) -> dict[str, Tensor]:
    """The weights as they ship: experts as int8 `.values` and bf16 `.scales`, the router bias fp32, the rest bf16."""
    out = {}
    for name, value in target.state_dict().items():
        if name.rsplit(".", 1)[-1] in EXPERT_TENSORS:
            out[f"{name}.values"], out[f"{name}.scales"] = int4.quantise(value)
        else:
            out[name] = value.float() if name.endswith("mlp.bias") else value.to(torch.bfloat16)
    return {name: value.cpu().contiguous() for name, value in out.items()}


def loaded(weights: dict[str, Tensor], shape: TargetShape, device: str) -> Target:
    """A frozen fp32 target that computes with exactly the weights of `exported`."""
    state = {}
    for name, value in weights.items():
        if name.endswith(".values"):
            state[name[: -len(".values")]] = int4.dequantise(value, weights[name[: -len("values")] + "scales"])
        elif not name.endswith(".scales"):
            state[name] = value.float()
    target = Target(shape)
    target.load_state_dict(state)
    return target.to(device).eval().requires_grad_(False)


class DrafterLayer(nn.Module):
    def __init__(self, c: DrafterShape, hidden: int, eps: float):
        super().__init__()
        self.c = c
        self.input_layernorm = RmsNorm(hidden, eps)
        self.post_attention_layernorm = RmsNorm(hidden, eps)
        self.mlp = Mlp(hidden, c.intermediate)
        attention = self.self_attn = nn.Module()
        attention.q_proj = linear(hidden, c.heads * c.head_dim)
        attention.k_proj = linear(hidden, c.kv_heads * c.head_dim)
        attention.v_proj = linear(hidden, c.kv_heads * c.head_dim)
        attention.o_proj = linear(c.heads * c.head_dim, hidden)
        attention.q_norm = RmsNorm(c.head_dim, eps)
        attention.k_norm = RmsNorm(c.head_dim, eps)

    def forward(self, x: Tensor, context: Tensor, turn_q: tuple, turn_k: tuple, mask: Tensor | None) -> Tensor:
        c, attention = self.c, self.self_attn
        normed = self.input_layernorm(x)
        rows = torch.cat([context, normed], 1)

        def heads(y: Tensor, n: int) -> Tensor:
            return y.view(*y.shape[:2], n, c.head_dim)

        query = attention.q_norm(heads(attention.q_proj(normed), c.heads)).transpose(1, 2)
        key = attention.k_norm(heads(attention.k_proj(rows), c.kv_heads)).transpose(1, 2)
        value = heads(attention.v_proj(rows), c.kv_heads).transpose(1, 2)
        out = F.scaled_dot_product_attention(
            rotate_halves(query, *turn_q),
            rotate_halves(key, *turn_k),
            value,
            attn_mask=mask,
            enable_gqa=c.kv_heads != c.heads,
        )
        x = x + attention.o_proj(out.transpose(1, 2).flatten(2))
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """A DFlash block drafter. A block is the anchor token and block - 1 masks, embedded with the target's table; its
    rows attend to each other, both ways, and to the target's tapped states of the positions before the anchor."""

    def __init__(self, c: DrafterShape, target: TargetShape):
        super().__init__()
        self.c = c
        self.fc = linear(len(c.taps) * target.hidden, target.hidden)
        self.hidden_norm = RmsNorm(target.hidden, target.norm_eps)
        self.layers = nn.ModuleList(DrafterLayer(c, target.hidden, target.norm_eps) for _ in range(c.layers))
        self.norm = RmsNorm(target.hidden, target.norm_eps)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, 0, 0.5 * p.shape[-1] ** -0.5)
        frequencies = c.rope_theta ** (-torch.arange(0, c.head_dim, 2).float() / c.head_dim)
        angles = torch.outer(torch.arange(target.positions).float(), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(
        self, embedded: Tensor, tapped: Tensor, block_positions: Tensor, tap_positions: Tensor, mask: Tensor | None
    ) -> Tensor:
        """embedded [B, Q, hidden], tapped [B, C, taps * hidden], positions [B, Q] and [B, C], mask [B, 1, Q, C + Q]
        (True: may attend) -> [B, Q, hidden], ready for the target's head."""
        context = self.hidden_norm(self.fc(tapped))

        def turns(positions: Tensor) -> tuple[Tensor, Tensor]:
            return tuple(t[positions].unsqueeze(1).to(context.dtype) for t in (self.cos, self.sin))

        turn_q, turn_k = turns(block_positions), turns(torch.cat([tap_positions, block_positions], 1))
        x = embedded
        for layer in self.layers:
            x = layer(x, context, turn_q, turn_k, mask)
        return self.norm(x)
