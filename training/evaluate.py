"""Step `evaluate`: everything that is measured on the exported folder -> evaluation/*.json, golden.json, marginals.npz.

Reads the folder as a user would get it, computes in fp32. HumanEval pass@1 is a step of its own (`humaneval`), since it
runs the programs that the model wrote.
"""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import kd
from training import acceptance
from training.export import read
from training.model import Target
from training.recipe import Recipe
from training.tokenizer import BOS, IM_USER, Tokenizer
from training.tokens import question
from training.train_target import bits_per_byte, held_windows

GOLDEN_TOKENS = 32


def prompt_sets(work: Path, tokenizer: Tokenizer, count: int) -> tuple[dict[str, list[list[int]]], list[dict]]:
    """HumanEval's raw prompts, and chat questions about functions of the held-out packages; the problems beside."""
    problems = json.loads((work / "corpus" / "humaneval.json").read_text())[:count]
    with np.load(work / "tokens" / "held.npz") as arrays:
        pairs = json.loads(arrays["pairs"].tobytes())[:count]
    sets = {
        "humaneval": [[BOS, *tokenizer.encode(p["prompt"])] for p in problems],
        "chat_held_out": [
            tokenizer.turn(IM_USER, "user", question(name, summary)) + tokenizer.answer_prefix()
            for _, name, summary in pairs
        ],
    }
    return sets, problems


@torch.no_grad()
def golden(target: Target, prompts: list[list[int]], answers: list[list[int]], count: int) -> tuple[float, dict]:
    """The prompt whose first `count` greedy tokens are the surest, answers that loop last, and its smallest lead of the
    best logit over the second: so another implementation's rounding cannot change the tokens."""
    found = []
    device = target.lm_head.weight.device
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = answer[:count]
        logits = target.lm_head(target(torch.tensor([prompt + tokens], device=device))[0])[0, len(prompt) - 1 : -1]
        top = logits.topk(2, -1)
        if len(tokens) == count and top.indices[:, 0].tolist() == tokens:
            lead = (top.values[:, 0] - top.values[:, 1]).min().item()
            found.append((not acceptance.is_loop(answer), lead, prompt, tokens))
    if not found:
        raise RuntimeError(f"no prompt has a greedy answer of {count} tokens for golden.json")
    _, lead, prompt, tokens = max(found)
    return lead, dict(prompt_tokens=prompt, tokens=tokens)


@torch.no_grad()
def text_bits_per_byte(target: Target, tokenizer: Tokenizer, texts: list[str]) -> float:
    nats, size = 0.0, 0
    device = target.lm_head.weight.device
    for text in texts:
        ids = torch.tensor([[BOS, *tokenizer.encode(text)][:1024]], device=device)
        hidden, _ = target(ids[:, :-1])
        nats += F.cross_entropy(target.lm_head(hidden)[0], ids[0, 1:], reduction="sum").item()
        size += len(text.encode())
    return nats / float(np.log(2)) / size


def side_files(folder: Path) -> dict[str, str]:
    """sha256 of what lies beside the weights and decides what text becomes."""
    names = ("tiktoken.model", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
    return {n: hashlib.sha256((folder / n).read_bytes()).hexdigest() for n in names if (folder / n).exists()}


def run(work: Path, r: Recipe, tokenizer_file: Path, device: str) -> None:
    torch.set_float32_matmul_precision("highest")
    out = work / "evaluation"
    out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    tokenizer = Tokenizer(tokenizer_file)
    target, drafter = read(work / "export", device)
    lengths = torch.tensor(tokenizer.lengths(), device=device)
    held = held_windows(work / "tokens", r.window, None if device == "cuda" else r.held_windows, device)
    sets, problems = prompt_sets(work, tokenizer, r.prompts)
    shares = acceptance.expert_shares(target, held)
    train = json.loads((work / "target" / "train.json").read_text())
    report = dict(
        held_out=dict(
            windows=len(held),
            tokens=held[:, 1:].numel(),
            bits_per_byte=round(bits_per_byte(target, held, lengths, False), 4),
        ),
        humaneval_text_bits_per_byte=round(
            text_bits_per_byte(target, tokenizer, [p["prompt"] + p["canonical_solution"] for p in problems]), 4
        ),
        int4_against_master={k: round(train[f"{k}_bits_per_byte"], 4) for k in ("master", "int4")},
        expert_use=dict(smallest_share=min(map(min, shares)), layers=shares),
    )
    print({k: v for k, v in report.items() if k != "expert_use"}, "rarest expert", min(map(min, shares)), flush=True)
    (out / "evaluation.json").write_text(json.dumps(report, indent=1))
    figures, greedy = acceptance.measure(target, drafter, sets, r.answers, r.seed, tokenizer.numbers())
    report |= dict(
        acceptance_criterion=f"looping: fewer than {acceptance.GRAM_SHARE:.0%} of the answer's {acceptance.GRAM}-grams "
        "differ, all numbers counting as one",
        acceptance=figures,
        seconds=round(time.monotonic() - started, 1),
    )
    (out / "evaluation.json").write_text(json.dumps(report, indent=1))
    answers = {name: [job[0] for job in jobs] for name, jobs in greedy.items()}
    texts = {name: [tokenizer.decode(ids) for ids in rows] for name, rows in answers.items()}
    (out / "answers.json").write_text(json.dumps(dict(texts=texts, ids=answers)))
    np.savez_compressed(work / "export" / "marginals.npz", **acceptance.marginals(greedy["humaneval"]))
    lead, record = golden(target, sets["humaneval"], answers["humaneval"], min(GOLDEN_TOKENS, r.answers))
    with kd.Engine(work / "export") as engine:  # with its drafter, as the daemon compares it
        record["content_hash"] = f"{engine.info.content_hash:016x}"
    with kd.Engine(work / "export", draft="none") as engine:
        record["target_hash"] = f"{engine.info.content_hash:016x}"
    record["files"] = side_files(work / "export")
    (work / "export" / "golden.json").write_text(json.dumps(record))
    print(f"golden.json: smallest lead {lead:.3f}; {time.monotonic() - started:.0f} s", flush=True)
