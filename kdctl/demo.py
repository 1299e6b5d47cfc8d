"""demo: the whole system in one command, with the embedded model, on any machine."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from kdctl import daemon
from kdctl.ended import exit_words
from kdctl.output import BUDGET_HELP, FAILED, Failure, Settings, command, pairs, table
from kdctl.verify import first_difference

PROMPT = "def fibonacci(n):\n"
OTHERS = ("def is_prime(n):\n", "class Stack:\n    def __init__(self):\n", "def read_lines(path):\n")


def embedded_model() -> Path:
    """models/nano of the checkout, or the one installed with the package. Raises Failure."""
    import kd

    here = Path(kd.__file__).resolve().parent
    for path in (here / "models" / "nano", here.parents[1] / "models" / "nano", Path.cwd() / "models" / "nano"):
        if (path / "config.json").is_file():
            return path
    raise Failure("models/nano is not here: run this in a checkout of kd, or give --model")


def measure(client: Any, builder: str, budget: int, max_tokens: int) -> dict[str, Any]:
    """All prompts, one after another, with one builder; cold, so that both runs do the same work."""
    results = [
        client.generate(
            p, max_tokens=max_tokens, builder=builder, budget=budget, cold=True, hash_logits=True, ignore_eos=True
        )
        for p in (PROMPT, *OTHERS)
    ]
    tokens, rounds = sum(len(r.tokens) for r in results), sum(r.rounds for r in results)
    decode_s = sum(r.seconds - r.first_token_s for r in results)
    return {
        "builder": builder,
        "results": results,
        "tokens": tokens,
        "rounds": rounds,
        "tokens_per_second": round((tokens - len(results)) / max(decode_s, 1e-9), 1),
        "tokens_a_round": round(tokens / max(1, rounds), 2),
        "rows_a_round": round((sum(r.nodes for r in results) + rounds) / max(1, rounds), 1),
    }


@command()
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, resolve_path=True),
    help="Another model folder than the embedded one.",
)
@click.option("--max-tokens", type=click.IntRange(8), default=96, show_default=True, help="Of each prompt.")
@click.option("--budget", type=click.IntRange(0), default=0, help=BUDGET_HELP + ".")
@click.pass_obj
def demo(settings: Settings, model: str | None, max_tokens: int, budget: int) -> None:
    """Start a private daemon on the embedded model, stream a completion, then compare plain decoding with tree
    speculation: speed, acceptance, bits. Exits with 1 if one bit differs."""
    folder = Path(model) if model else embedded_model()
    with tempfile.TemporaryDirectory(prefix="kd-demo-") as place:
        own = Settings(
            instance="demo",
            endpoint=f"ipc://{place}/demo/serve.sock",
            output=settings.output,
            timeout_s=30,
            quiet=settings.quiet,
            color=settings.color,
        )
        (Path(place) / "demo").mkdir(mode=0o700)
        log = Path(place) / "demo" / "daemon.log"
        settings.note(f"Starting a daemon with {folder.name} ...")
        child = daemon.spawn(
            own,
            [
                "--instance",
                "demo",
                "--model",
                str(folder),
                "--log-format",
                "json",
                "--set",
                f"server.runtime_dir={place}",
            ],
            log,
        )
        try:
            daemon.wait_until(own, child, log, "ready", 300)
            data = _show(own, max_tokens, budget)
            own.client().stop()
            own.close()
            data["exit_status"] = child.wait(40)
        finally:
            own.close()
            if child.poll() is None:
                child.kill()
                child.wait()
    settings.emit("demo", data)
    if not data["bits_equal"]:
        d = data["difference"]
        raise Failure(
            f"trees changed the output: prompt {d['prompt']}, token {d['at']}, {d['what']} {d['first']} "
            f"instead of {d['second']}",
            FAILED,
            "DIFFERENT",
        )
    if data["exit_status"]:
        raise Failure(f"the daemon ended with {exit_words(data['exit_status'])}", FAILED)


def _show(settings: Settings, max_tokens: int, budget: int) -> dict[str, Any]:
    client = settings.client()
    human = settings.output == "table"
    info = client.hello()["model"]
    choice = client.status()["daemon"]["builder_choice"]
    trees = ("heap", budget)
    if not budget and choice and choice["builder"] != "none":
        trees = (choice["builder"], choice["budget"])
    stream = client.stream(PROMPT, max_tokens=max_tokens)  # with the builder that was chosen
    if human:
        click.echo(f"\n{PROMPT}", nl=False)
    for chunk in stream:
        if human:
            click.echo(chunk.text, nl=False)
            sys.stdout.flush()
    if human:
        click.echo("\n")
    runs = [measure(client, "none", 0, max_tokens), measure(client, *trees, max_tokens)]
    difference = None
    for i, (plain, drafted) in enumerate(zip(runs[0]["results"], runs[1]["results"], strict=True)):
        difference = difference or first_difference(drafted, plain)
        if difference and "prompt" not in difference:
            difference["prompt"] = i
    for run in runs:
        del run["results"]
    if human:
        _report(settings, info, runs, choice, difference)
    return {
        "model": info["name"],
        "text": PROMPT + stream.result.text,
        "runs": runs,
        "builder_choice": choice,
        "bits_equal": difference is None,
        "difference": difference,
        "device": "cpu",
    }


def _chosen(choice: dict[str, Any] | None) -> str:
    """Which builder the daemon uses when nobody names one, and the figures it knows that from."""
    if not choice:
        return "as configured"
    label = f"{choice['builder']} {choice['budget'] or ''}".strip()
    if not choice["measured"]:
        return f"{label}: {choice['reason']}"
    rates = sorted(choice["measured"], key=lambda m: -m["tokens_per_s"])
    said = ", ".join(f"{m['builder']} {m['budget'] or ''}".strip() + f" {m['tokens_per_s']:.0f}" for m in rates)
    return f"{label}, the fastest at warm-up (tokens/s: {said})"


def _report(
    settings: Settings, info: dict[str, Any], runs: list[dict[str, Any]], choice: dict[str, Any] | None, difference: Any
) -> None:
    names = {"none": "plain (none)", "chain": "chain", "heap": "DDTree (heap)"}
    table(
        ("decoding", "tokens/s", "tokens/round", "rows/round", "rounds"),
        [
            [names[r["builder"]], r["tokens_per_second"], r["tokens_a_round"], r["rows_a_round"], r["rounds"]]
            for r in runs
        ],
    )
    click.echo()
    pairs(
        [
            (
                "bits equal",
                settings.paint("yes", "green") + f": {runs[1]['tokens']} tokens and the hash of every logits row"
                if difference is None
                else settings.paint("NO", "red"),
            ),
            ("chosen", _chosen(choice)),
            ("model", f"{info['name']}, {info['parameters'] / 1e6:.1f} M parameters, INT4 experts"),
            ("machine", "the CPU twin: no GPU is used and none is needed for this"),
        ]
    )
    click.echo(
        "\nOn the CPU a row costs its arithmetic, so verifying a tree of rows can eat what acceptance gains. A "
        "GPU reads the\nweights once for all rows of a round: there tokens/round, the same number as here, is "
        "what becomes speed."
    )
