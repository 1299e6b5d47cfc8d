"""Step `drafter`: trains the DFlash drafter on the target's own text, by the clock.

The target's tapped states are computed once and kept on the device. A training row has many blocks, each with its own
anchor; a block sees the tapped states before its anchor and itself. Anchors inside loops are left out, so that
acceptance is not bought with repetition. Resumes from drafter/checkpoint.pt; writes drafter/weights.pt (bf16).
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from training import ranks
from training.model import Drafter, Target
from training.muon import Muon
from training.recipe import Recipe
from training.tokenizer import MASK, PAD, STOPS
from training.tokens import load_streams
from training.train_target import Compiled, rate, set_rate

LOG_STEPS, SAVE_SECONDS = 250, 60.0
FIRST_ANCHOR = 16  # of a corpus row, which has no prompt


class Pool:
    """Rows of text with the target's states. ids [n, length]; taps [n, length, taps * hidden] and final [n, length,
    hidden] in bf16 on an accelerator; allowed [n, length]: where a block may start."""

    def __init__(self, work: Path, r: Recipe, target: Target, device: str):
        mine = sorted((work / "own").glob("*.npz"))[ranks.rank() :: ranks.size()]
        parts = [dict(np.load(path)) for path in mine]
        ids, prompt, loops = (np.concatenate([part[k] for part in parts]) for k in ("ids", "prompt", "loops"))
        loops = np.unpackbits(loops, axis=1, count=ids.shape[1]).astype(bool)
        rows, length = ids.shape
        room = max(1, r.cache_positions // length)
        from_corpus = int(min(rows, room) * r.corpus_share)
        rows = min(rows, room - from_corpus)
        code = np.concatenate([load_streams(p)[0] for p in sorted((work / "tokens").glob("*-*.npz"))[-2:]])
        starts = np.random.default_rng(r.seed + 3 + 1000 * ranks.rank()).integers(0, len(code) - length, from_corpus)
        extra = code[starts[:, None] + np.arange(length)] if from_corpus else np.zeros((0, length), np.uint16)
        position = np.arange(length)
        own = ids[:rows]
        allowed = (position >= prompt[:rows, None]) & ~loops[:rows]
        allowed = np.concatenate([allowed, np.broadcast_to(position >= FIRST_ANCHOR, extra.shape)])
        every = np.concatenate([own, extra])
        allowed &= (position < length - 2) & (every != PAD) & ~np.isin(every, STOPS)
        keep = allowed.any(1)
        self.ids = torch.from_numpy(every[keep].astype(np.int16)).to(device)
        self.allowed = torch.from_numpy(allowed[keep]).to(device)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        n, hidden = len(self.ids), target.c.hidden
        self.taps = torch.empty(n, length, len(r.drafter.taps) * hidden, dtype=dtype, device=device)
        self.final = torch.empty(n, length, hidden, dtype=dtype, device=device)
        with torch.no_grad(), torch.autocast(device, dtype, enabled=device == "cuda"):
            for i in range(0, n, 128):
                final, taps = target(self.ids[i : i + 128].long(), r.drafter.taps)
                self.taps[i : i + 128], self.final[i : i + 128] = taps, final

    def draw(self, rows: int, anchors: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """ids, taps, final states of random rows, and anchors [rows, anchors]."""
        index = torch.randint(0, len(self.ids), (rows,), device=self.ids.device)
        anchor = torch.multinomial(self.allowed[index].float(), anchors, replacement=True)
        return self.ids[index].long(), self.taps[index], self.final[index], anchor


def draft_blocks(drafter: Drafter, target: Target, ids: Tensor, taps: Tensor, anchor: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks of one batch of rows. Returns the drafter's states [B, anchors, block - 1, hidden] and the position each
    of them predicts [B, anchors, block - 1] (it may lie behind the end of the row)."""
    batch, length = ids.shape
    count, size = anchor.shape[1], drafter.c.block
    device = ids.device
    positions = (anchor.unsqueeze(-1) + torch.arange(size, device=device)).flatten(1)
    block = torch.full((batch, count, size), MASK, device=device)
    block[..., 0] = ids.gather(1, anchor)
    context = torch.arange(length, device=device)
    owner = torch.arange(count, device=device).repeat_interleave(size)
    sees_context = context < anchor.repeat_interleave(size, 1).unsqueeze(-1)
    sees_block = (owner[:, None] == owner).expand(batch, -1, -1)
    mask = torch.cat([sees_context, sees_block], -1).unsqueeze(1)
    states = drafter(target.embed_tokens(block.flatten(1)), taps, positions, context.expand(batch, -1), mask)
    return states.view(batch, count, size, -1)[:, :, 1:], positions.view(batch, count, size)[:, :, 1:]


def block_loss(states: Tensor, teacher: Tensor, head: Tensor, labels: Tensor, weights: Tensor, soft: float) -> tuple:
    """Weighted cross-entropy of a mix of the token that came and the target's distribution, and the hits per slot.

    states, teacher [..., hidden]: the drafter's and the target's states for the same token; labels, weights [...].
    """
    logits = F.linear(states, head).float()
    wanted = torch.softmax(F.linear(teacher, head).float(), -1)
    came = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    likely = (wanted * logits).sum(-1)
    loss = torch.logsumexp(logits, -1) - (1 - soft) * came - soft * likely
    return (loss * weights).sum() / weights.sum().clamp_min(1e-6), logits.argmax(-1) == labels


def run(work: Path, r: Recipe, target: Target, device: str) -> None:
    torch.manual_seed(r.seed + 4)
    torch.set_float32_matmul_precision("high")
    out = work / "drafter"
    out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    pool = Pool(work, r, target, device)
    print(f"{len(pool.ids)} rows, {int(pool.allowed.sum()) / 1e6:.2f} M anchors, states in "
          f"{time.monotonic() - began:.0f} s", flush=True)  # fmt: skip
    drafter = Drafter(r.drafter, r.target).to(device)
    torch.manual_seed(r.seed + 5 + 1000 * ranks.rank())  # the same weights on every rank, other rows
    matrices = [p for p in drafter.parameters() if p.dim() > 1]
    vectors = [p for p in drafter.parameters() if p.dim() == 1]
    both = [
        Muon(matrices, r.drafter_rate, weight_decay=0.05),
        torch.optim.AdamW(vectors, lr=r.drafter_rate / 2, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    for optimiser in both:
        for group in optimiser.param_groups:
            group["full_lr"] = group["lr"]
    step, used, curve = 0, 0.0, []
    checkpoint = out / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, map_location=device, weights_only=False)
        drafter.load_state_dict(saved["drafter"])
        for optimiser, state in zip(both, saved["optimisers"], strict=True):
            optimiser.load_state_dict(state)
        step, used, curve = saved["step"], saved["used"], saved["curve"]
        print(f"resumed at step {step}, {used:.0f} s", flush=True)
    slots = r.drafter.block - 1
    by_depth = torch.exp(-torch.arange(slots, device=device).float() / r.depth_scale)

    def save() -> None:
        if ranks.rank():
            return
        state = dict(
            drafter=drafter.state_dict(), optimisers=[o.state_dict() for o in both], step=step, used=used, curve=curve
        )
        part = checkpoint.with_suffix(".part")
        torch.save(state, part)
        part.replace(checkpoint)

    def one() -> tuple[Tensor, Tensor, Tensor]:
        """Loss, hits and validity [.., slots] of one batch."""
        ids, taps, final, anchor = pool.draw(r.drafter_rows, r.anchors)
        length = ids.shape[1]
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            states, positions = draft_blocks(drafter, target, ids, taps, anchor)
            inside = positions < length
            at = positions.clamp_max(length - 1).flatten(1)
            labels = torch.where(inside, ids.gather(1, at).view_as(positions), PAD)
            valid = labels != PAD
            teacher = final.gather(1, (at - 1).unsqueeze(-1).expand(-1, -1, final.shape[-1])).view_as(states)
            head = target.lm_head.weight.to(states.dtype)
            loss, hit = compiled.loss(states, teacher.to(states.dtype), head, labels, by_depth * valid, r.soft_share)
        return loss, hit, valid

    compiled = Compiled(list(drafter.layers), block_loss, r.compile)
    if compiled.on:
        began = time.monotonic()
        try:
            one()[0].backward()
            print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
        except Exception as error:  # uncompiled training is slower and right
            print(f"torch.compile failed, going on without it: {error!r:.500}", flush=True)
            compiled.off()
        drafter.zero_grad(set_to_none=True)

    started = time.monotonic() - used
    saved_at, losses = time.monotonic(), []
    hits, tried = torch.zeros(slots, device=device), torch.zeros(slots, device=device)
    done = 0.0
    while True:
        if step % ranks.AGREE_STEPS == 0:
            if device == "cuda":
                torch.cuda.synchronize()  # the clock decides, so the queue must not run ahead of it
            used = ranks.agreed(time.monotonic() - started, device)
            done = max(used / r.drafter_seconds, step / r.drafter_steps)
        if done >= 1:
            break
        set_rate(both, rate(step, done, r.drafter_warmup_steps, r.drafter_decay_share, r.final_rate))
        loss, hit, valid = one()
        loss.backward()
        ranks.average([p.grad for p in drafter.parameters()])
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        for optimiser in both:
            optimiser.step()
        drafter.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        hits += (hit & valid).sum((0, 1))
        tried += valid.sum((0, 1))
        step += 1
        if step % LOG_STEPS == 0 and not ranks.rank():
            slot_hits = [round(x, 3) for x in (hits / tried.clamp_min(1)).tolist()]
            mean = torch.stack(losses).mean().item()
            curve.append(dict(step=step, seconds=round(used, 1), loss=round(mean, 4), hits=slot_hits))
            print(curve[-1], f"{step / used:.1f} steps/s", flush=True)
            losses, hits, tried = [], torch.zeros_like(hits), torch.zeros_like(tried)
        if time.monotonic() - saved_at > SAVE_SECONDS:
            save()
            saved_at = time.monotonic()
    save()
    if ranks.rank():
        return
    torch.save({k: v.detach().to(torch.bfloat16).cpu() for k, v in drafter.state_dict().items()}, out / "weights.pt")
    blocks = step * r.drafter_rows * r.anchors * ranks.size()
    report = dict(
        steps=step, seconds=round(used, 1), ranks=ranks.size(), blocks=blocks, rows=len(pool.ids), curve=curve
    )
    (out / "drafter.json").write_text(json.dumps(report, indent=1))
