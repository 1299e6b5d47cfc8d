"""Fast batched decoding by the target, for its own text and for the evaluation, and finding loops in what it wrote."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from training.model import Experts, Target, rotate_pairs
from training.tokenizer import PAD, STOPS


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


class Decoder:
    """One token per row and step; all rows stand at the same position, so nothing is masked. The cache holds the
    latents (attention in its absorbed form): [layers, rows, length, kv_rank + rope_dim]."""

    def __init__(self, target: Target, dtype: torch.dtype):
        self.target, self.c, self.dtype = target, target.c, dtype
        self.head = target.lm_head.weight.to(dtype)
        self.layers = [self._prepare(layer) for layer in target.layers]

    def _prepare(self, layer) -> dict:
        c, dtype, attention, mlp = self.c, self.dtype, layer.self_attn, layer.mlp
        keys_values = attention.kv_b_proj.weight.view(c.heads, c.nope_dim + c.value_dim, c.kv_rank)
        out = dict(
            norm=layer.input_layernorm.weight,
            q_a=attention.q_a_proj.weight.to(dtype),
            q_norm=attention.q_a_layernorm.weight,
            q_b=attention.q_b_proj.weight.to(dtype),
            kv_a=attention.kv_a_proj_with_mqa.weight.to(dtype),
            kv_norm=attention.kv_a_layernorm.weight,
            key=keys_values[:, : c.nope_dim].to(dtype).contiguous(),
            value=keys_values[:, c.nope_dim :].mT.to(dtype).contiguous(),
            out=attention.o_proj.weight.to(dtype),
            scale=attention.scale,
            mlp_norm=layer.post_attention_layernorm.weight,
            router=mlp if isinstance(mlp, Experts) else None,
        )
        if isinstance(mlp, Experts):  # the shared expert is one more expert with gate 1
            shared = mlp.shared_experts
            gate = torch.cat([mlp.experts_gate.flatten(0, 1), shared.gate_proj.weight])
            up = torch.cat([mlp.experts_up.flatten(0, 1), shared.up_proj.weight])
            down = torch.cat([mlp.experts_down.permute(1, 0, 2).flatten(1), shared.down_proj.weight], 1)
        else:
            gate, up, down = (p.weight for p in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
        return out | dict(gate=gate.to(dtype), up=up.to(dtype), down=down.to(dtype).contiguous())

    def step(self, ids: Tensor, position: int, cache: Tensor) -> Tensor:
        """Logits [rows, vocab] fp32 after the token `ids` [rows] at `position`; fills that position of the cache."""
        c, dtype, eps = self.c, self.dtype, self.c.norm_eps
        x = self.target.embed_tokens(ids).float()
        rows = len(x)
        cos, sin = self.target.cos[position], self.target.sin[position]
        for i, w in enumerate(self.layers):
            h = _norm(x, w["norm"], eps).to(dtype)
            query = F.linear(_norm(F.linear(h, w["q_a"]), w["q_norm"], eps).to(dtype), w["q_b"]).view(rows, c.heads, -1)
            plain, turned = query.split([c.nope_dim, c.rope_dim], -1)
            latent, key = F.linear(h, w["kv_a"]).split([c.kv_rank, c.rope_dim], -1)
            cache[i, :, position, : c.kv_rank] = _norm(latent, w["kv_norm"], eps).to(dtype)
            cache[i, :, position, c.kv_rank :] = rotate_pairs(key.float(), cos, sin).to(dtype)
            absorbed = torch.bmm(plain.transpose(0, 1), w["key"]).transpose(0, 1)
            query = torch.cat([absorbed, rotate_pairs(turned.float(), cos, sin).to(dtype)], -1)
            past = cache[i, :, : position + 1]
            weights = torch.softmax(torch.bmm(query, past.mT).float() * w["scale"], -1).to(dtype)
            mixed = torch.bmm(weights, past[..., : c.kv_rank])
            heads = torch.bmm(mixed.transpose(0, 1), w["value"]).transpose(0, 1).reshape(rows, -1)
            x = x + F.linear(heads, w["out"]).float()
            h = _norm(x, w["mlp_norm"], eps).to(dtype)
            inner = F.silu(F.linear(h, w["gate"])) * F.linear(h, w["up"])
            if w["router"] is not None:
                gates, _ = w["router"].gates(h.float())
                gates = F.pad(gates, (0, 1), value=1.0).to(dtype)
                inner = (inner.view(rows, c.experts + 1, -1) * gates.unsqueeze(-1)).view(rows, -1)
            x = x + F.linear(inner, w["down"]).float()
        return F.linear(_norm(x, self.target.norm.weight, eps).to(dtype), self.head).float()

    @torch.no_grad()
    def generate(
        self, prompts: Tensor, lengths: Tensor, total: int, temperature: Tensor, noise: torch.Generator
    ) -> Tensor:
        """prompts [rows, longest] padded, their lengths [rows], temperature [rows] (0: greedy) -> ids [rows, total];
        PAD follows a stop token."""
        rows, longest = prompts.shape
        device = prompts.device
        ids = torch.full((rows, total), PAD, dtype=torch.long, device=device)
        ids[:, 0] = prompts[:, 0]
        c = self.c
        cache = torch.zeros(len(self.layers), rows, total, c.kv_rank + c.rope_dim, device=device, dtype=self.dtype)
        ended = torch.zeros(rows, dtype=torch.bool, device=device)
        sampled = bool((temperature > 0).any())
        for position in range(total - 1):
            logits = self.step(ids[:, position], position, cache)
            if sampled:  # Gumbel noise: the argmax is a sample of the softmax
                uniform = torch.rand(logits.shape, device=device, generator=noise).clamp_(1e-10, 1 - 1e-7)
                logits = logits - temperature[:, None] * torch.log(-torch.log(uniform))
            here = ids[:, position]
            ended |= ((here == STOPS[0]) | (here == STOPS[1])) & (position >= lengths)
            following = torch.where(ended, PAD, logits.argmax(-1))
            if position + 1 < longest:
                following = torch.where(position + 1 < lengths, prompts[:, position + 1], following)
            ids[:, position + 1] = following
        return ids


def padded(rows: list, device: str) -> tuple[Tensor, Tensor]:
    """Lists of ids -> [rows, longest] filled up with PAD, and the lengths."""
    out = torch.full((len(rows), max(map(len, rows))), PAD, dtype=torch.long)
    for i, row in enumerate(rows):
        out[i, : len(row)] = torch.as_tensor([int(t) for t in row])
    return out.to(device), torch.tensor([len(r) for r in rows], device=device)


def in_loop(ids: Tensor, longest_period: int = 64) -> Tensor:
    """[rows, length] bool: the text has repeated itself with some period for at least max(2 periods, 24) tokens."""
    rows, length = ids.shape
    out = torch.zeros(rows, length, dtype=torch.bool, device=ids.device)
    index = torch.arange(length, device=ids.device)
    for period in range(1, min(longest_period, length - 1) + 1):
        same = torch.zeros_like(out)
        same[:, period:] = ids[:, period:] == ids[:, :-period]
        run = index - torch.where(same, -1, index).cummax(1).values
        out |= run >= max(2 * period, 24)
    return out
