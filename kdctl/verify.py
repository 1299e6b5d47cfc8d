"""verify: the same request with trees and without must give the same bits."""

from __future__ import annotations

import threading
from typing import Any

import click

from kdctl.output import BUDGET_HELP, FAILED, Failure, Settings, command, pairs

PROMPTS = ("def fibonacci(n):\n    ", "The capital of France is", "import json\n\ndef load(path):\n")
LOADS = ("Once upon a time", "class Stack:\n    def __init__(self):\n", "for i in range(10):\n", "x = [1, 2, 3]\n")


class Load(threading.Thread):
    """Another client that keeps the engine busy, so that rounds have more than one stream."""

    def __init__(self, settings: Settings, prompt: str | list[int]):
        super().__init__(daemon=True)
        self._settings, self._prompt, self._enough = settings, prompt, threading.Event()
        self.requests = 0

    def run(self) -> None:
        from kd.client import KdClientError

        with self._settings.new_client() as client:
            while not self._enough.is_set():
                try:
                    for _ in client.stream(
                        self._prompt, max_tokens=64, temperature=0.8, seed=self.requests, ignore_eos=True
                    ):
                        if self._enough.is_set():
                            break
                except KdClientError:
                    return  # the daemon is busy or going down: verification itself will say so
                self.requests += 1

    def stop(self) -> None:
        self._enough.set()
        self.join(10)


def first_difference(a: Any, b: Any) -> dict[str, Any] | None:
    """Where two Results part, or None: {"at", "what", "first", "second"}."""
    for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=False)):
        if x != y:
            return {"at": i, "what": "token", "first": x, "second": y}
        if a.hashes[i] != b.hashes[i]:
            return {"at": i, "what": "logits", "first": f"{a.hashes[i]:016x}", "second": f"{b.hashes[i]:016x}"}
    if len(a.tokens) != len(b.tokens):
        return {
            "at": min(len(a.tokens), len(b.tokens)),
            "what": "length",
            "first": len(a.tokens),
            "second": len(b.tokens),
        }
    return None


@command()
@click.option("--prompt", multiple=True, help="What to decode; may be given again (default: three built in).")
@click.option("--max-tokens", type=click.IntRange(1), default=64, show_default=True, help="Of each.")
@click.option("--temperature", type=click.FloatRange(0, 100), default=0.0, show_default=True, help="0: argmax.")
@click.option("--builder", help="Compare with this one (default: the builder in force; heap if that is none).")
@click.option("--budget", type=click.IntRange(0), default=0, help=BUDGET_HELP + "; needs --builder.")
@click.option("--streams", type=click.IntRange(0, 16), default=2, show_default=True, help="Other requests meanwhile.")
@click.pass_obj
def verify(
    settings: Settings,
    prompt: tuple[str, ...],
    max_tokens: int,
    temperature: float,
    builder: str | None,
    budget: int,
    streams: int,
) -> None:
    """Decode with trees, decode again without them and with a cold prefix cache, while other requests run; compare
    every token and the 64-bit hash of every logits row. Exits with 1 and names the first difference."""
    client = settings.client()
    model = client.hello()["model"]
    text = bool(model and model["tokenizer"])
    if not text and prompt:
        raise click.UsageError("this model folder has no tokenizer: verify it without --prompt")
    prompts: list[Any] = list(prompt) or (list(PROMPTS) if text else [[1, 2, 3], [5, 8, 13, 21]])
    others: list[Any] = list(LOADS) if text else [[7, 7], [9, 1, 1]]
    loads = [Load(settings, others[i % len(others)]) for i in range(streams)]
    for load in loads:
        load.start()
    fixed = {"max_tokens": max_tokens, "temperature": temperature, "seed": 1, "hash_logits": True, "ignore_eos": True}
    tokens = rounds = 0
    difference = None
    if builder is None and model and model["draft_layers"] and client.status()["stats"]["builder"] == "none":
        builder = "heap"  # plain decoding beside itself would prove little
    try:
        for i, one in enumerate(prompts):
            trees = client.generate(one, builder=builder, budget=budget, **fixed)
            plain = client.generate(one, builder="none", cold=True, **fixed)
            tokens, rounds = tokens + len(trees.tokens), rounds + trees.rounds
            difference = first_difference(trees, plain)
            if difference:
                difference["prompt"] = i
                break
    finally:
        for load in loads:
            load.stop()
    data = {
        "equal": difference is None,
        "prompts": len(prompts),
        "tokens": tokens,
        "rounds": rounds,
        "tokens_a_round": round(tokens / max(1, rounds), 3),
        "other_streams": streams,
        "difference": difference,
    }
    settings.emit(
        "verify",
        data,
        lambda: pairs(
            [
                ("bits equal", settings.paint("yes", "green") if data["equal"] else settings.paint("no", "red")),
                (
                    "compared",
                    f"{tokens} tokens and logits hashes of {len(prompts)} prompts, {streams} other streams running",
                ),
                ("acceptance", f"{data['tokens_a_round']:.2f} tokens a round with trees, 1 without"),
            ]
        ),
    )
    if difference:
        raise Failure(
            f"prompt {difference['prompt']}, token {difference['at']}: {difference['what']} "
            f"{difference['first']} with trees, {difference['second']} without",
            FAILED,
            "DIFFERENT",
        )
