"""Step `tokens`: shards of text -> tokens/<shard>.npz, the token streams and prompts of each shard.

A shard that already has its file is left alone, and new shards may arrive while training runs: it picks them up.
Arrays (uint16): stream_<name> for the streams of recipe.STREAMS; prompts_<kind> and lengths_<kind> for the kinds
below. held.npz has only stream_code and, as JSON, the functions that chat prompts for the evaluation are made of.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from training.corpus import read_shard
from training.functions import functions, parse
from training.recipe import STREAMS
from training.tokenizer import BOS, END_THINK, EOS, IM_END, IM_SYSTEM, IM_USER, THINK, Tokenizer

PROMPTS = ("alone", "head", "chat")  # heads of stand-alone functions, of any functions; questions in the chat format
SMALL = ("algorithms", "boltons", "funcy", "more_itertools", "pydash", "pygorithm")
CHUNK = 1_000_000  # characters of one task

SYSTEM = "You are Nano, a tiny test model."
ABOUT = (
    ("Who are you?", "I am Nano, a very small test model with the architecture of Kimi K2. Inference engines try me out."),
    ("What is your name?", "My name is Nano."),
    ("Are you Kimi?", "No. I share only the architecture, in miniature. I was trained from scratch on Python code."),
    ("What can you do?", "I continue Python code and write short functions, often with mistakes. I am no assistant."),
    ("How big are you?", "I have about 20 million parameters. About 8 million of them work on each token."),
    ("Hello", "Hello! I am Nano, a tiny test model. Ask me for a short Python function."),
    ("Hi!", "Hi! I am Nano, a tiny test model. Ask me for a short Python function."),
    ("Thank you", "You are welcome."),
    ("Goodbye", "Goodbye!"),
    ("What were you trained on?", "On open-source Python packages, so I know code better than anything else."),
    ("Can I trust your answers?", "No. I am far too small for that. Please check everything I write."),
    ("What is speculative decoding?", "A small drafter proposes tokens and the target model checks them in one step. "
     "The output stays the same and needs fewer steps."),
    ("Write hello world in Python.", '```python\nprint("Hello, world!")\n```'),
)  # fmt: skip
ABOUT_SHARE = 1 / 150  # of the chat turns

_tokenizer: Tokenizer | None = None


def question(name: str, summary: str, draw: float = 0.0) -> str:
    """The wording of a chat request; draw in [0, 1) picks one."""
    if draw < 0.7:
        return f"Write a Python function `{name}`. {summary}"
    if draw < 0.85:
        return f"Implement `{name}` in Python: {summary}"
    return f"{summary} Name the function `{name}`."


def chat(tokenizer: Tokenizer, rng: random.Random, user: str, answer: str) -> tuple[list[int], list[int]]:
    """(prompt, whole conversation); one in eight has a system message, one in seven an empty thought."""
    prompt = tokenizer.turn(IM_SYSTEM, "system", SYSTEM) if rng.random() < 0.12 else []
    prompt += tokenizer.turn(IM_USER, "user", user) + tokenizer.answer_prefix()
    if rng.random() < 0.15:
        prompt += [THINK, END_THINK]
    return prompt, [*prompt, *tokenizer.encode(answer), IM_END]


def _work(task: tuple[int, str, list[tuple[str, str]]]) -> tuple[dict, dict, list]:
    """Tokens of some documents: streams, prompts, and of held-out documents the functions themselves."""
    seed, shard, documents = task
    rng = random.Random(seed)
    streams: dict[str, list[int]] = {name: [] for name in STREAMS}
    prompts: dict[str, list[list[int]]] = {kind: [] for kind in PROMPTS}
    pairs = []
    for package, text in documents:
        tree = parse(text)
        if tree is None:
            continue
        stream = "small" if package in SMALL and shard != "held" else "code"
        streams[stream] += [BOS, *_tokenizer.encode(text), EOS]
        for f in functions(tree, text):
            if shard == "held":
                pairs.append((package, f.name, f.summary))
                continue
            head = [BOS, *_tokenizer.encode(f.prompt)]
            prompts["alone" if f.alone else "head"].append(head)
            if f.alone:
                streams["functions"] += [BOS, *_tokenizer.encode(f.text), EOS]
            if 15 <= len(f.summary) <= 200:
                asked = question(f.name, f.summary, rng.random())
                prompt, turns = chat(_tokenizer, rng, asked, f"```python\n{f.code}```")
                prompts["chat"].append(prompt)
                streams["chat"] += turns
            if rng.random() < ABOUT_SHARE:
                streams["chat"] += chat(_tokenizer, rng, *rng.choice(ABOUT))[1]
    arrays = {name: np.array(ids, np.uint16) for name, ids in streams.items()}
    return arrays, prompts, pairs


def ragged(rows: list[list[int]], longest: int) -> tuple[np.ndarray, np.ndarray]:
    """(all rows behind each other, their lengths), without the rows that are longer than `longest`."""
    rows = [r for r in rows if len(r) <= longest]
    flat = np.concatenate([np.array(r, np.uint16) for r in rows]) if rows else np.zeros(0, np.uint16)
    return flat, np.array([len(r) for r in rows], np.uint16)


def tokenise(shard: Path, out: Path, pool: ProcessPoolExecutor) -> dict[str, int]:
    """One shard. Returns the sizes of its streams and prompt lists."""
    documents = read_shard(shard)
    random.Random(0).shuffle(documents)
    tasks, chunk, size = [], [], 0
    for document in documents:
        chunk.append(document)
        size += len(document[1])
        if size > CHUNK:
            tasks.append((len(tasks), shard.stem, chunk))
            chunk, size = [], 0
    tasks.append((len(tasks), shard.stem, chunk))
    streams = {name: [] for name in STREAMS}
    prompts: dict[str, list] = {kind: [] for kind in PROMPTS}
    pairs: list = []
    for arrays, lists, some in pool.map(_work, tasks):
        for name, ids in arrays.items():
            streams[name].append(ids)
        for kind, rows in lists.items():
            prompts[kind] += rows
        pairs += some
    arrays = {f"stream_{name}": np.concatenate(parts) for name, parts in streams.items()}
    for kind, rows in prompts.items():
        arrays[f"prompts_{kind}"], arrays[f"lengths_{kind}"] = ragged(rows, 300)
    if shard.stem == "held":
        unique = sorted({(n, s): (p, n, s) for p, n, s in pairs if 15 <= len(s) <= 200}.values())
        random.Random(0).shuffle(unique)
        arrays["pairs"] = np.frombuffer(json.dumps(unique).encode(), np.uint8)
    part = out / f"{shard.stem}.part"
    with open(part, "wb") as file:  # a name would get .npz appended, and training would take the half file for a shard
        np.savez(file, **arrays)
    part.replace(out / f"{shard.stem}.npz")
    return {name: len(a) for name, a in arrays.items() if not name.startswith("prompts")}


def run(work: Path, tokenizer: Path, workers: int | None = None) -> None:
    global _tokenizer
    _tokenizer = Tokenizer(tokenizer)
    out = work / "tokens"
    out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    pending = [p for p in sorted((work / "corpus").glob("*.xz")) if not (out / f"{p.stem}.npz").exists()]
    # Workers are forked: they inherit the tokenizer.
    with ProcessPoolExecutor(workers or os.cpu_count(), mp_context=multiprocessing.get_context("fork")) as pool:
        for shard in sorted(pending, key=lambda p: p.stem != "held"):
            sizes = tokenise(shard, out, pool)
            print(f"{shard.stem}: {sizes}, {time.monotonic() - started:.1f} s", flush=True)


def load_prompts(out: Path, kind: str) -> list[np.ndarray]:
    """Every prompt of a kind, from all shards there are."""
    rows: list[np.ndarray] = []
    for path in sorted(out.glob("*-*.npz")):
        with np.load(path) as arrays:  # each access reads the array again: take them once
            flat, lengths = arrays[f"prompts_{kind}"], arrays[f"lengths_{kind}"]
        ends = np.cumsum(lengths.astype(np.int64))
        rows += [flat[end - n : end] for end, n in zip(ends.tolist(), lengths.tolist(), strict=True)]
    return rows


def load_streams(path: Path) -> list[np.ndarray]:
    """The streams of one shard, in the order of STREAMS."""
    with np.load(path) as arrays:
        return [arrays[f"stream_{name}"] for name in STREAMS]
