"""Step `target`: trains the target, by the clock: warm-up, constant rate, then decay with INT4 rounding of the experts.

Muon for matrices, AdamW for the rest, bf16 autocast over fp32 masters. Resumes from target/checkpoint.pt. Writes
target/weights.pt (what ships, see model.exported) and target/train.json (curve and held-out bits per byte).
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from training import ranks
from training.model import Target, exported, loaded
from training.muon import Muon
from training.recipe import STREAMS, Recipe
from training.tokenizer import Tokenizer
from training.tokens import load_streams

LOG_STEPS = 100
VALIDATE_SECONDS, SAVE_SECONDS, LOOK_SECONDS = 60.0, 120.0, 10.0


class Corpus:
    """The token streams on the device. Random windows, mixed by weight; takes in shards that appear later."""

    def __init__(self, folder: Path, recipe: Recipe, device: str):
        self.folder, self.window, self.rows, self.device = folder, recipe.window, recipe.rows, device
        self.parts: dict[str, list[np.ndarray]] = {}
        self.look()
        if not self.parts:
            raise FileNotFoundError(f"{folder} holds no tokenised training shard; run the step `tokens` first")

    def look(self) -> bool:
        """Reads shards that are new; True when there were any."""
        fresh = [p for p in sorted(self.folder.glob("*-*.npz")) if p.stem not in self.parts]
        for path in fresh:
            self.parts[path.stem] = load_streams(path)
        if fresh:
            streams = [np.concatenate([part[i] for part in self.parts.values()]) for i in range(len(STREAMS))]
            shortest = self.window + 2  # an empty or tiny stream repeats itself until one window fits
            streams = [s if len(s) >= shortest else np.resize(s if len(s) else streams[0], shortest) for s in streams]
            ends = np.cumsum([len(s) for s in streams])
            self.sizes = dict(zip(STREAMS, map(len, streams), strict=True))
            self.starts = torch.tensor(ends - [len(s) for s in streams], device=self.device)
            self.spans = torch.tensor([len(s) - self.window - 1 for s in streams], device=self.device)
            # int16: torch has no uint16 gather on every device, and ids stay below 2**15
            self.flat = torch.from_numpy(np.concatenate(streams).astype(np.int16)).to(self.device)
        return bool(fresh)

    def batch(self, mix: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and next tokens [rows, window] as int64."""
        stream = torch.multinomial(mix, self.rows, replacement=True)
        draw = torch.rand(self.rows, device=self.device, dtype=torch.float64)
        start = self.starts[stream] + (draw * self.spans[stream]).long()
        ids = self.flat[start[:, None] + torch.arange(self.window + 1, device=self.device)].long()
        return ids[:, :-1], ids[:, 1:]


def held_windows(folder: Path, window: int, count: int | None, device: str) -> Tensor:
    """[n, window + 1] of the held-out packages: all of them side by side, or `count` spread evenly."""
    ids = torch.from_numpy(load_streams(folder / "held.npz")[0].astype(np.int64)).to(device)
    n = max(1, (len(ids) - 1) // window)
    starts = torch.arange(n, device=device) * window
    if count and count < n:
        starts = torch.linspace(0, len(ids) - window - 1, count, device=device).long()
    return ids[(starts[:, None] + torch.arange(window + 1, device=device)).clamp_max(len(ids) - 1)]


@torch.no_grad()
def bits_per_byte(target: Target, windows: Tensor, lengths: Tensor, autocast: bool, rows: int = 16) -> float:
    """Bits of the ordinary tokens over their bytes. lengths: bytes of every id, 0 for special tokens."""
    was_training = target.training
    target.eval()
    nats = torch.zeros((), dtype=torch.float64, device=windows.device)
    size = 0
    for part in windows.split(rows):
        with torch.autocast(windows.device.type, torch.bfloat16, enabled=autocast):
            hidden, _ = target(part[:, :-1])
            logits = target.lm_head(hidden).float()
        loss = F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="none")
        ordinary = lengths[part[:, 1:].flatten()]
        nats += (loss * (ordinary > 0)).sum().double()
        size += int(ordinary.sum())
    target.train(was_training)
    return nats.item() / math.log(2) / max(size, 1)


def head_loss(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, head).float().flatten(0, 1), labels.flatten())


class Compiled:
    """Layers and loss through torch.compile, or as they are when it fails or is not wanted."""

    def __init__(self, layers: list, loss, wanted: bool):
        self.layers, self.plain, self.loss, self.on = layers, loss, loss, wanted
        if wanted:
            for layer in layers:
                layer.compile(dynamic=False)
            self.loss = torch.compile(loss, dynamic=False)

    def off(self) -> None:
        for layer in self.layers:
            layer._compiled_call_impl = None
        self.loss, self.on = self.plain, False

    @contextlib.contextmanager
    def paused(self):
        """Evaluation has other shapes: it runs uncompiled instead of compiling again."""
        kept = [layer._compiled_call_impl for layer in self.layers]
        for layer in self.layers:
            layer._compiled_call_impl = None
        yield
        for layer, call in zip(self.layers, kept, strict=True):
            layer._compiled_call_impl = call


def optimisers(target: Target, r: Recipe) -> list[torch.optim.Optimizer]:
    matrices, tables, others = [], [], []
    for name, p in target.named_parameters():
        if name.endswith("mlp.gate") or p.dim() == 1:
            others.append(p)
        else:
            (tables if "embed" in name or "lm_head" in name else matrices).append(p)
    groups = [
        dict(params=tables, lr=r.table_rate, weight_decay=0.01),
        dict(params=others, lr=r.table_rate / 2, weight_decay=0.0),
    ]
    adam = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-10, fused=matrices[0].is_cuda)
    both = [Muon(matrices, r.matrix_rate, weight_decay=0.1), adam]
    for optimiser in both:
        for group in optimiser.param_groups:
            group["full_lr"] = group["lr"]
    return both


def set_rate(all_optimisers: list[torch.optim.Optimizer], factor: float) -> None:
    for optimiser in all_optimisers:
        for group in optimiser.param_groups:
            group["lr"] = group["full_lr"] * factor


def rate(step: int, done: float, warmup_steps: int, decay_share: float, final: float) -> float:
    """Share of the full learning rate. done: share of the budget used, 0 to 1."""
    warm = min(1.0, (step + 1) / warmup_steps)
    return warm * (1.0 if done < 1 - decay_share else max(final, (1 - done) / decay_share))


def run(work: Path, r: Recipe, tokenizer: Path, device: str) -> None:
    torch.manual_seed(r.seed)
    torch.set_float32_matmul_precision("high")
    out = work / "target"
    out.mkdir(parents=True, exist_ok=True)
    corpus = Corpus(work / "tokens", r, device)
    lengths = torch.tensor(Tokenizer(tokenizer).lengths(), device=device)
    held = held_windows(work / "tokens", r.window, r.held_windows, device)
    mixes = [torch.tensor(m, device=device) for m in (r.mix, r.decay_mix)]
    target = Target(r.target).to(device)
    torch.manual_seed(r.seed + 1000 * ranks.rank())  # the same weights on every rank, other windows
    both = optimisers(target, r)
    step, tokens, used, curve = 0, 0, 0.0, []
    checkpoint = out / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, map_location=device, weights_only=False)
        target.load_state_dict(saved["target"])
        for optimiser, state in zip(both, saved["optimisers"], strict=True):
            optimiser.load_state_dict(state)
        step, tokens, used, curve = saved["step"], saved["tokens"], saved["used"], saved["curve"]
        print(f"resumed at step {step}, {used:.0f} s", flush=True)
    print(f"{sum(p.numel() for p in target.parameters()) / 1e6:.2f} M parameters, tokens {corpus.sizes}", flush=True)

    def save() -> None:
        if ranks.rank():
            return
        part = checkpoint.with_suffix(".part")
        state = dict(
            target=target.state_dict(), optimisers=[o.state_dict() for o in both],
            step=step, tokens=tokens, used=used, curve=curve,
        )  # fmt: skip
        torch.save(state, part)
        part.replace(checkpoint)

    def loss_of(batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            hidden, _ = target(batch[0])
            return compiled.loss(hidden, target.lm_head.weight, batch[1])

    target.train()
    compiled = Compiled(list(target.layers), head_loss, r.compile)
    if compiled.on:
        began = time.monotonic()
        try:
            loss_of(corpus.batch(mixes[0])).backward()
            print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
        except Exception as error:  # whatever the compiler trips over, uncompiled training is slower and right
            print(f"torch.compile failed, going on without it: {error!r:.500}", flush=True)
            compiled.off()
        target.zero_grad(set_to_none=True)

    started = time.monotonic() - used
    saved_at = validated_at = looked_at = logged_at = time.monotonic()
    logged_tokens, losses, rounding, done = tokens, [], False, 0.0
    while True:
        if step % ranks.AGREE_STEPS == 0:
            if device == "cuda":
                torch.cuda.synchronize()  # the clock decides, so the queue must not run ahead of it
            used = ranks.agreed(time.monotonic() - started, device)
            done = max(used / r.target_seconds, step / r.target_steps)
        if done >= 1:
            break
        factor = rate(step, done, r.warmup_steps, r.decay_share, r.final_rate)
        set_rate(both, factor)
        if not rounding and done >= 1 - r.decay_share:
            rounding = True
            target.set_rounding(True)
            print(f"decay and INT4 rounding from step {step}, {used:.0f} s", flush=True)
        loss = loss_of(corpus.batch(mixes[rounding]))
        loss.backward()
        ranks.average([p.grad for p in target.parameters()] + [e.load for e in target.experts()])
        torch.nn.utils.clip_grad_norm_(target.parameters(), 1.0)
        for optimiser in both:
            optimiser.step()
        target.zero_grad(set_to_none=True)
        target.balance(1e-3 * factor)
        losses.append(loss.detach())
        step, tokens = step + 1, tokens + r.rows * r.window * ranks.size()
        now = time.monotonic()
        if step % LOG_STEPS == 0 and not ranks.rank():
            mean = torch.stack(losses).mean().item()
            if not math.isfinite(mean):
                raise RuntimeError(f"the loss is {mean} at step {step}; lower the learning rates in recipe.py")
            speed = (tokens - logged_tokens) / (now - logged_at) / 1e6
            losses, logged_at, logged_tokens = [], now, tokens
            row = dict(step=step, tokens=tokens, seconds=round(used, 1), loss=round(mean, 4))
            if now - validated_at > VALIDATE_SECONDS:
                with compiled.paused():
                    row["held_bits_per_byte"] = round(bits_per_byte(target, held[:64], lengths, device == "cuda"), 4)
                validated_at = time.monotonic()
            curve.append(row)
            print(row, f"{speed:.2f} M tokens/s", flush=True)
        if now - looked_at > LOOK_SECONDS:
            if corpus.look():
                print(f"more text: {corpus.sizes}", flush=True)
            looked_at = now
        if now - saved_at > SAVE_SECONDS:
            save()
            saved_at = now
    save()
    if ranks.rank():
        return
    compiled.off()
    target.eval()
    autocast = device == "cuda"
    master = bits_per_byte(target, held, lengths, autocast)
    weights = exported(target)
    rounded = bits_per_byte(loaded(weights, r.target, device), held, lengths, autocast)
    torch.save(weights, out / "weights.pt")
    report = dict(
        steps=step, tokens=tokens, seconds=round(used, 1), ranks=ranks.size(), compiled=r.compile, corpus_tokens=corpus.sizes,
        held_windows=len(held), master_bits_per_byte=master, int4_bits_per_byte=rounded, curve=curve,
    )  # fmt: skip
    (out / "train.json").write_text(json.dumps(report, indent=1))
    print(f"held-out bits per byte: master {master:.4f}, INT4 {rounded:.4f}; {tokens / 1e6:.0f} M tokens", flush=True)
