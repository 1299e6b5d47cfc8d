"""bench: speed as clients see it, over a sweep of concurrency."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

import click

from kdctl.output import BUDGET_HELP, PARTIAL, Failure, Settings, command, table

PROMPTS = (
    "def quicksort(items):\n    ",
    "import os\nimport sys\n\n\ndef main():\n    ",
    "The history of computing began",
    "class Queue:\n    def __init__(self):\n        ",
    "Explain how a hash table works.\n",
    "def is_prime(n):\n    if n < 2:\n        return False\n    ",
    "x = {}\nfor word in text.split():\n    ",
    "SELECT name, count(*) FROM users",
    "# Read a file and count its lines\n",
    "while left < right:\n    ",
)


def percentile(values: list[float], p: float) -> float:
    """Nearest rank; NaN of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(p / 100 * len(ordered)) - 1))]


class Worker(threading.Thread):
    """One client, one request after another."""

    def __init__(self, settings: Settings, jobs: list[Any], options: dict[str, Any], begin: threading.Event):
        super().__init__(daemon=True)
        self._settings, self._jobs, self._options, self._begin = settings, jobs, options, begin
        self.first_s: list[float] = []
        self.between_s: list[float] = []  # one entry a token: a round's gap is shared by its tokens
        self.tokens = self.rounds = self.nodes = 0
        self.errors: list[str] = []

    def run(self) -> None:
        from kd.client import KdClientError

        with self._settings.new_client(stream_timeout_s=600) as client:
            try:
                client.ping()
            except KdClientError as error:
                self.errors.append(error.message)
                return
            self._begin.wait()
            while True:
                try:
                    prompt = self._jobs.pop()
                except IndexError:
                    return
                try:
                    self._one(client, prompt)
                except KdClientError as error:
                    self.errors.append(f"{error.name}: {error.message}")

    def _one(self, client: Any, prompt: Any) -> None:
        began = last = time.perf_counter()
        stream = client.stream(prompt, **self._options)
        for chunk in stream:
            now = time.perf_counter()
            if not chunk.tokens:
                continue
            if last == began:
                self.first_s.append(now - began)
            else:
                self.between_s += [(now - last) / len(chunk.tokens)] * len(chunk.tokens)
            last = now
        self.tokens += len(stream.result.tokens)
        self.rounds += stream.result.rounds
        self.nodes += stream.result.nodes
        if stream.result.finish == "error":
            self.errors.append(stream.result.message or "failed")


def measure(
    settings: Settings, concurrency: int, requests: int, prompts: list[Any], options: dict[str, Any]
) -> dict[str, Any]:
    """One row of the sweep."""
    jobs = [prompts[i % len(prompts)] for i in range(requests)]
    begin = threading.Event()
    workers = [Worker(settings, jobs, options, begin) for _ in range(concurrency)]
    for worker in workers:
        worker.start()
    time.sleep(0.05)  # let them connect; nothing depends on it but the first sample
    began = time.perf_counter()
    begin.set()
    for worker in workers:
        worker.join()
    seconds = time.perf_counter() - began
    first = [v for w in workers for v in w.first_s]
    between = [v for w in workers for v in w.between_s]
    tokens, rounds = sum(w.tokens for w in workers), sum(w.rounds for w in workers)
    errors = [e for w in workers for e in w.errors]
    row: dict[str, Any] = {
        "concurrency": concurrency,
        "requests": requests,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "tokens_a_round": tokens / max(1, rounds),
        "nodes_a_round": sum(w.nodes for w in workers) / max(1, rounds),
        "errors": len(errors),
        "first_error": errors[0] if errors else None,
    }
    for p in (50, 90, 99):
        row[f"first_token_p{p}_ms"] = percentile(first, p) * 1000
        row[f"inter_token_p{p}_ms"] = percentile(between, p) * 1000
    return {
        k: (round(v, 3) if isinstance(v, float) and not math.isnan(v) else None if isinstance(v, float) else v)
        for k, v in row.items()
    }


def _numbers(ctx: Any, param: Any, value: str) -> list[int]:
    try:
        numbers = [int(word) for word in value.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(1 <= n <= 1024 for n in numbers):
        raise click.BadParameter("write numbers from 1 to 1024 with commas: 1,4,8,10")
    return numbers


@command()
@click.option("--concurrency", default="1,4,8,10", show_default=True, callback=_numbers, help="Clients at a time.")
@click.option("--requests", type=click.IntRange(1), help="Of each row (default: twice the clients, at least 4).")
@click.option("--max-tokens", type=click.IntRange(1), default=64, show_default=True, help="Of each request.")
@click.option("--prompts", type=click.Path(exists=True, dir_okay=False), help="A file of prompts, one a line.")
@click.option("--builder", help="Tree builder (default: the one in force).")
@click.option("--budget", type=click.IntRange(0), default=0, help=BUDGET_HELP + "; needs --builder.")
@click.option("--cold", is_flag=True, help="Do not use the prefix cache.")
@click.pass_obj
def bench(
    settings: Settings,
    concurrency: list[int],
    requests: int | None,
    max_tokens: int,
    prompts: str | None,
    builder: str | None,
    budget: int,
    cold: bool,
) -> None:
    """Tokens/s, time to the first token, time between tokens, acceptance, for each number of clients at a time."""
    hello = settings.client().hello()
    model = hello["model"]
    texts: list[Any] = list(PROMPTS)
    if prompts:
        with open(prompts, encoding="utf-8") as f:
            texts = [one.rstrip("\n") for one in f if one.strip()]
        if not texts:
            raise click.BadParameter(f"{prompts} is empty", param_hint="--prompts")
    elif model and not model["tokenizer"]:
        texts = [[(i * 37 + j) % model["vocab_size"] for j in range(1, 17)] for i in range(10)]
    options = {"max_tokens": max_tokens, "ignore_eos": True, "builder": builder, "budget": budget, "cold": cold}
    rows = []
    for n in concurrency:
        rows.append(measure(settings, n, requests or max(4, 2 * n), texts, options))
        settings.note(f"concurrency {n}: {rows[-1]['tokens_per_second']} tokens/s")
    data = {
        "model": model and model["name"],
        "builder": builder,
        "budget": budget,
        "max_tokens": max_tokens,
        "rows": rows,
    }
    keys = (
        "concurrency",
        "requests",
        "tokens_per_second",
        "tokens_a_round",
        "first_token_p50_ms",
        "first_token_p90_ms",
        "first_token_p99_ms",
        "inter_token_p50_ms",
        "inter_token_p90_ms",
        "inter_token_p99_ms",
        "errors",
    )
    heads = (
        "clients",
        "requests",
        "tokens/s",
        "tokens/round",
        "TTFT p50",
        "p90",
        "p99 ms",
        "ITL p50",
        "p90",
        "p99 ms",
        "errors",
    )
    settings.emit("bench", data, lambda: table(heads, [[r[k] for k in keys] for r in rows]), rows="rows")
    failed = sum(r["errors"] for r in rows)
    if failed:
        first = next(r["first_error"] for r in rows if r["errors"])
        raise Failure(f"{failed} requests failed, the first one with: {first}", PARTIAL, "PARTIAL")
