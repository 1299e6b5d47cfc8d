"""Step `own-text`: the target writes the text that the drafter learns from, half of it greedy, half sampled.

Writes own/<rank>.npz: ids [rows, length] uint16, prompt (lengths [rows]) and loops (packed bits: inside a loop).
HumanEval takes no part: prompts are heads of functions, chat questions and openings of files of the training text.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import torch

from training import ranks
from training.decode import Decoder, in_loop, padded
from training.model import Target
from training.recipe import Recipe
from training.tokenizer import BOS, PAD
from training.tokens import PROMPTS, load_prompts, load_streams

# Where the prompts come from. Heads of stand-alone functions look most like what people try: they weigh most.
SHARES = dict(alone=0.45, head=0.20, chat=0.20, file=0.10, middle=0.05)


class Prompts:
    def __init__(self, tokens: Path, seed: int, longest: int):
        self.rng, self.longest = np.random.default_rng(seed), longest
        self.lists = {kind: load_prompts(tokens, kind) for kind in PROMPTS}
        self.code = np.concatenate([load_streams(path)[0] for path in sorted(tokens.glob("*-*.npz"))[:2]])
        self.starts = np.flatnonzero(self.code == BOS)

    def draw(self, count: int) -> list[np.ndarray]:
        rows = []
        for kind in self.rng.choice(list(SHARES), count, p=list(SHARES.values())):
            if kind in self.lists:
                rows.append(self.lists[kind][self.rng.integers(len(self.lists[kind]))][: self.longest])
                continue
            start = self.rng.choice(self.starts) if kind == "file" else self.rng.integers(len(self.code) - self.longest)
            rows.append(self.code[start : start + self.rng.integers(16, self.longest)])
        return rows


def run(work: Path, r: Recipe, target: Target, device: str) -> None:
    out = work / "own"
    out.mkdir(parents=True, exist_ok=True)
    prompts = Prompts(work / "tokens", r.seed + 1 + 1000 * ranks.rank(), r.own_length // 2)
    decoder = Decoder(target, torch.bfloat16 if device == "cuda" else torch.float32)
    noise = torch.Generator(decoder.head.device).manual_seed(r.seed + 2 + 1000 * ranks.rank())
    cycle = torch.tensor(r.temperatures, device=device)
    temperature = cycle[torch.arange(r.own_batch, device=device) % len(cycle)]
    ids, lengths, loops, written = [], [], [], 0
    share = dict(greedy=[0, 0], sampled=[0, 0])
    started = time.monotonic()
    while True:
        began = time.monotonic()
        rows, prompt = padded(prompts.draw(r.own_batch), device)
        text = decoder.generate(rows, prompt, r.own_length, temperature, noise)
        loop = in_loop(text)
        new = (torch.arange(r.own_length, device=device) >= prompt[:, None]) & (text != PAD)
        for kind, picked in (("greedy", temperature == 0), ("sampled", temperature > 0)):
            share[kind][0] += int((loop & new)[picked].sum())
            share[kind][1] += int(new[picked].sum())
        written += int(new.sum())
        ids.append(text.to(torch.int16).cpu().numpy().view(np.uint16))
        lengths.append(prompt.cpu().numpy().astype(np.uint16))
        loops.append(np.packbits(loop.cpu().numpy(), axis=1))
        used, last = time.monotonic() - started, time.monotonic() - began
        print(f"{len(ids) * r.own_batch} texts, {written / 1e6:.2f} M new tokens, {used:.0f} s", flush=True)
        if written * ranks.size() >= r.own_tokens or used + last > r.own_seconds:
            break
    np.savez(
        out / f"{ranks.rank()}.npz",
        ids=np.concatenate(ids),
        prompt=np.concatenate(lengths),
        loops=np.concatenate(loops),
    )
    in_loops = {kind: looped / max(new, 1) for kind, (looped, new) in share.items()}
    report = dict(texts=len(ids) * r.own_batch, new_tokens=written, seconds=round(used, 1), share_in_loops=in_loops)
    (out / f"{ranks.rank()}.json").write_text(json.dumps(report, indent=1))
    print(report, flush=True)
