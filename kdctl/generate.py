"""generate, chat, cancel, tokenize, detokenize."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable
from typing import Any

import click

from kdctl.output import BUDGET_HELP, NOT_FOUND, Failure, Settings, command, is_terminal, line, read_text

_OPTIONS = [
    click.option("--max-tokens", type=click.IntRange(1), default=256, show_default=True, help="At most so many."),
    click.option(
        "--temperature",
        type=click.FloatRange(0, 100),
        default=0.0,
        show_default=True,
        help="0: always the most likely token.",
    ),
    click.option("--top-p", type=click.FloatRange(0, 1), default=1.0, show_default=True, help="Nucleus mass."),
    click.option("--min-p", type=click.FloatRange(0, 1), default=0.0, show_default=True, help="Of the best's chance."),
    click.option("--top-k", type=click.IntRange(0), default=0, show_default=True, help="Of the k best; 0: of all."),
    click.option("--seed", type=click.IntRange(0, 2**53 - 1), help="Repeats a sampled text; default: a new one."),
    click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; may be given again."),
    click.option("--builder", help="This request's tree builder, e.g. none."),
    click.option("--budget", type=click.IntRange(0), default=0, help=BUDGET_HELP + "; needs --builder."),
    click.option("--deadline", type=click.IntRange(0), default=0, metavar="MS", help="Cancel after so long; 0: never."),
    click.option("--stats", is_flag=True, help="Speed and acceptance on stderr."),
    click.option("--echo-ids", is_flag=True, help="Print token ids instead of text."),
]


def with_options(function: Callable) -> Callable:
    """The options of a request."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def fields_of(options: dict[str, Any]) -> dict[str, Any]:
    """Fields of GENERATE from the command line's options."""
    fields = {
        key: options[key]
        for key in ("max_tokens", "temperature", "top_p", "min_p", "top_k", "seed", "builder", "budget")
    }
    fields["thinking"] = options.get("thinking")
    fields.update(stop=list(options["stop"]) or None, deadline_ms=options["deadline"])
    if options["budget"] and not options["builder"]:
        raise click.UsageError("--budget needs --builder")
    return fields


def stats_text(result: Any) -> str:
    decode_s = max(result.seconds - result.first_token_s, 1e-9)
    rate = (len(result.tokens) - 1) / decode_s if len(result.tokens) > 1 else 0.0
    return (
        f"{len(result.tokens)} tokens in {result.seconds:.2f} s: {rate:.1f} tokens/s, first after "
        f"{result.first_token_s * 1000:.0f} ms; {result.rounds} rounds, "
        f"{len(result.tokens) / max(1, result.rounds):.2f} tokens a round, {result.nodes} nodes verified; prompt "
        f"{result.prompt_tokens} ({result.cached_tokens} cached); {result.finish}"
        + (f"; seed {result.seed}" if result.seed else "")
    )


def document(result: Any) -> dict[str, Any]:
    """A Result for JSON."""
    data = dataclasses.asdict(result)
    data.pop("raw")
    data["hashes"] = [f"{h:016x}" for h in data["hashes"]]
    return {k: v for k, v in data.items() if k not in ("hashes", "logprobs") or v}


def run(settings: Settings, schema: str, options: dict[str, Any], prompt: Any = None, messages: Any = None) -> Any:
    """Stream one request to stdout. Returns its Result; an error of the request ends the command."""
    stream = settings.client().stream(prompt, messages=messages, **fields_of(options))
    shown = False
    for chunk in stream:
        if settings.output == "ndjson":
            line(
                {
                    "schema": f"kdctl/{schema}_chunk.v1",
                    "text": chunk.text,
                    "tokens": list(chunk.tokens),
                    "nodes": chunk.nodes,
                }
            )
        elif settings.output == "table":
            text = "".join(f"{t} " for t in chunk.tokens) if options["echo_ids"] else chunk.text
            shown = shown or bool(text)
            click.echo(text, nl=False)
            sys.stdout.flush()
    result = stream.result
    if settings.output == "table":
        if shown and not result.text.endswith("\n"):
            click.echo()
    else:
        line({"schema": f"kdctl/{schema}.v1", **document(result)})
    if options["stats"] and not settings.machine:  # a document has them all
        click.echo(stats_text(result), err=True)
    if result.finish in ("error", "cancelled"):  # somebody else has cut it short: who has asked here waits for its end
        from kdctl.output import exit_of

        raise Failure(
            result.message or "the request failed",
            exit_of(result.error or ""),
            result.error or "INTERNAL",
            request_id=result.request,
        )
    return result


@command()
@click.argument("prompt", required=False)
@click.option("--ids", is_flag=True, help="PROMPT is token ids, separated by blanks or commas.")
@with_options
@click.pass_obj
def generate(settings: Settings, prompt: str | None, ids: bool, **options: Any) -> None:
    """Complete PROMPT (`-`: standard input) and stream the text as it is decoded."""
    text = read_text(prompt)
    if ids and not options["echo_ids"]:
        model = settings.client().hello()["model"]
        options["echo_ids"] = bool(model and not model["tokenizer"])  # there is no text to print
    run(settings, "generate", options, parse_ids(text) if ids else text)


def parse_ids(text: str) -> list[int]:
    words = re.split(r"[\s,]+", text.strip().strip("[]"))
    if not all(re.fullmatch(r"\d{1,9}", word) for word in words):
        raise click.UsageError("not token ids: give decimal numbers separated by blanks or commas")
    return [int(word) for word in words]


@command()
@click.argument("message", required=False)
@click.option("--system", help="A system message in front.")
@click.option("--think/--no-think", default=None, help="Let a thinking model think, or not.")
@with_options
@click.pass_obj
def chat(settings: Settings, message: str | None, system: str | None, think: bool | None, **options: Any) -> None:
    """Answer MESSAGE, or talk until end of input (or an empty line) without one."""
    messages = [{"role": "system", "content": system}] if system else []
    fixed = {"thinking": think} if think is not None else {}
    if message is not None or not is_terminal(sys.stdin):
        messages.append({"role": "user", "content": read_text(message)})
        run_chat(settings, messages, options, fixed)
        return
    while True:
        try:
            text = click.prompt("you", prompt_suffix="> ", default="", show_default=False, err=True)
        except click.Abort:
            return
        if not text:
            return
        messages.append({"role": "user", "content": text})
        result = run_chat(settings, messages, options, fixed)
        messages.append({"role": "assistant", "content": result.text})


def run_chat(settings: Settings, messages: list[dict[str, str]], options: dict[str, Any], fixed: dict) -> Any:
    return run(settings, "chat", {**options, **fixed}, messages=messages)


@command()
@click.argument("requests", nargs=-1, metavar="ID...")
@click.option("--all", "everything", is_flag=True, help="Every request of every client.")
@click.pass_obj
def cancel(settings: Settings, requests: tuple[str, ...], everything: bool) -> None:
    """Cancel requests by id (see `kdctl ps`). Exits with 5 if one is unknown, 6 if one had ended, 10 if it is mixed."""
    if bool(requests) == everything:
        raise click.UsageError("give request ids, or --all")
    for ident in requests:
        if not re.fullmatch(r"[0-9a-fA-F]{32}", ident):
            raise click.BadParameter(f"{ident}: a request id has 32 hex digits: see `kdctl ps`", param_hint="ID")
    client = settings.client()
    if everything:
        count = client.cancel_all(operator=True)
        settings.emit("cancel", {"cancelled": count, "results": []}, lambda: click.echo(f"{count} cancelled"))
        return
    results = [{"request": ident, "result": client.cancel(ident, operator=True)} for ident in requests]
    settings.emit(
        "cancel",
        {"cancelled": sum(r["result"] == "cancelled" for r in results), "results": results},
        lambda: click.echo("\n".join(f"{r['request']} {r['result']}" for r in results)),
        rows="results",
    )
    kinds = {r["result"] for r in results}
    if kinds != {"cancelled"}:
        raise click.exceptions.Exit(10 if len(kinds) > 1 else {"not_found": NOT_FOUND}.get(kinds.pop(), 6))


@command()
@click.argument("text", required=False)
@click.option("--chat", "as_chat", is_flag=True, help="As a user's message, through the chat template.")
@click.pass_obj
def tokenize(settings: Settings, text: str | None, as_chat: bool) -> None:
    """Token ids of TEXT (`-`: standard input)."""
    text = read_text(text)
    client = settings.client()
    ids = client.tokenize(messages=[{"role": "user", "content": text}]) if as_chat else client.tokenize(text)
    settings.emit("tokenize", {"tokens": ids, "count": len(ids)}, lambda: click.echo(" ".join(map(str, ids))))


@command()
@click.argument("ids", nargs=-1)
@click.pass_obj
def detokenize(settings: Settings, ids: tuple[str, ...]) -> None:
    """Text of token IDS (none: from standard input)."""
    words = parse_ids(" ".join(ids) if ids else read_text(None))
    text = settings.client().detokenize(words)
    settings.emit("detokenize", {"text": text}, lambda: click.echo(text))
