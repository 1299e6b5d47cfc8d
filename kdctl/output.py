"""How every command prints, fails and exits.

stdout carries data, stderr everything else. Exit codes: 0 ok, 1 failed, 2 usage, 3 not running, 4 not ready,
5 not found, 6 refused, 7 timeout, 8 version mismatch, 9 permission, 10 partial, 78 bad configuration,
130 interrupted, 143 terminated.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from kdctl.entry import INTERRUPTED as INTERRUPTED

if TYPE_CHECKING:
    from kd.client import Client

OK, FAILED, USAGE, NOT_RUNNING, NOT_READY, NOT_FOUND, REFUSED, TIMEOUT, VERSION, PERMISSION, PARTIAL = range(11)
TERMINATED = 143
BUDGET_HELP = "Nodes of a tree, at most the daemon's engine.max_nodes (built in: 64); 0: the builder's default"
EX_CONFIG = 78  # what the daemon itself would exit with

_EXITS = {
    "BAD_ENDPOINT": USAGE,
    "BAD_FIELD": USAGE,
    "TOKEN": USAGE,
    "SAMPLING": USAGE,
    "CONTEXT": USAGE,
    "TOO_LARGE": USAGE,
    "NOT_RUNNING": NOT_RUNNING,
    "NOT_READY": NOT_READY,
    "NOT_FOUND": NOT_FOUND,
    "BUSY": REFUSED,
    "DRAINING": REFUSED,
    "CONFLICT": REFUSED,
    "STATE": REFUSED,
    "ALREADY_DONE": REFUSED,
    "NO_ANSWER": TIMEOUT,
    "TIMEOUT": TIMEOUT,
    "UNSUPPORTED_VERSION": VERSION,
    "UNKNOWN_TYPE": VERSION,
    "MALFORMED": VERSION,
    "PERMISSION": PERMISSION,
    "WRONG_SOCKET": PERMISSION,
}
_HINTS = {  # the verb that helps or shows more
    "NOT_RUNNING": "start",
    "NOT_READY": "status",
    "NO_ANSWER": "health --live",
    "BUSY": "ps",
    "DRAINING": "undrain",
}


class Failure(click.ClickException):
    """A command that did not do what was asked: a sentence, a name and an exit code."""

    def __init__(self, message: str, exit_code: int = FAILED, name: str = "FAILED", **extra: Any):
        super().__init__(message)
        self.code, self.name, self.extra = exit_code, name, extra


def exit_of(name: str) -> int:
    """The exit code for an error name of the protocol or of the client."""
    return _EXITS.get(name, FAILED)


@dataclass
class Settings:
    """The global options; every command gets it as ctx.obj."""

    instance: str = "default"
    endpoint: str | None = None
    control: str | None = None
    curve_dir: str | None = None
    output: str = "table"
    timeout_s: float = 10.0
    quiet: bool = False
    color: bool = False
    _client: Any = field(default=None, repr=False)

    def client(self) -> Client:
        """The one connection of this command."""
        if self._client is None:
            self._client = self.new_client()
        return self._client

    def new_client(self, **options: Any) -> Client:
        from kd.client import Client

        return Client(
            self.endpoint,
            self.instance,
            control=self.control,
            curve_dir=self.curve_dir,
            **{"timeout_s": self.timeout_s, **options},
        )

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    @property
    def machine(self) -> bool:
        return self.output != "table"

    def note(self, text: str) -> None:
        """Something to know, on stderr, for people: not with -q, and not where programs read along."""
        if not self.quiet and not self.machine:
            click.echo(text, err=True)

    def emit(
        self, schema: str, data: dict[str, Any], human: Callable[[], Any] | None = None, rows: str | None = None
    ) -> None:
        """The result: one JSON document, or with ndjson one line for each of data[rows], or `human()`."""
        if self.output == "table":
            if human:
                human()
        elif self.output == "ndjson" and rows:
            for row in data[rows]:
                line({"schema": f"kdctl/{schema}.v1", **row})
        else:
            line({"schema": f"kdctl/{schema}.v1", **data})

    def command(self, verb: str) -> str:
        """`kdctl verb` as one would have to type it to reach the same daemon."""
        if self.instance != "default":
            return f"kdctl --instance {self.instance} {verb}"
        return (
            f"kdctl --endpoint {shlex.quote(self.endpoint)} {verb}"
            if self.endpoint and verb != "start"
            else f"kdctl {verb}"
        )

    def paint(self, text: str, color: str) -> str:
        return click.style(text, fg=color) if self.color else text


def plain(value: Any) -> Any:
    """What json cannot write, as text."""
    return value.hex() if isinstance(value, bytes) else str(value)


def line(document: dict[str, Any]) -> None:
    click.echo(json.dumps(document, ensure_ascii=False, default=plain))


def show_error(settings: Settings, name: str, message: str, code: int, **extra: Any) -> None:
    """One sentence on stderr, or one JSON document there."""
    if settings.machine:
        document = {
            "schema": "kdctl/error.v1",
            "code": code,
            "name": name,
            "message": message,
            "hint": settings.command(_HINTS[name]) if name in _HINTS else None,
            "request_id": extra.pop("request_id", None),
            **extra,
        }
        click.echo(json.dumps(document, ensure_ascii=False, default=plain), err=True)
    else:
        click.echo(f"kdctl: {message}", err=True)
        for one in extra.get("tail", ()):  # of a log
            settings.note(one)


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Columns; numbers to the right."""
    texts = [[*map(str, row)] for row in rows]
    widths = [max(len(h), *(len(r[i]) for r in texts)) if texts else len(h) for i, h in enumerate(header)]
    right = [bool(texts) and all(re.fullmatch(r"[-\d.,%x ]*", r[i]) for r in texts) for i in range(len(header))]

    def one(cells: Sequence[str]) -> str:
        return "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(cells, widths, right, strict=True)).rstrip()

    click.echo(one([h.upper() for h in header]))
    for row in texts:
        click.echo(one(row))


def pairs(items: Iterable[tuple[str, Any]]) -> None:
    """Label and value, one a line; None is left out."""
    shown = [(k, v) for k, v in items if v is not None]
    width = max((len(k) for k, _ in shown), default=0)
    for key, value in shown:
        click.echo(f"{key.ljust(width)}  {value}")


def bytes_text(n: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(n) < 1024 or unit == "TiB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    raise AssertionError


class Duration(click.ParamType):
    """10, 10s, 500ms, 2m: seconds as a float."""

    name = "duration"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        if isinstance(value, int | float):
            return float(value)  # a default of our own
        found = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h)?", value.strip())
        if not found:
            self.fail(f"{value!r} is no duration: write 10s, 500ms or 2m", param, ctx)
        seconds = float(found[1]) * {"ms": 0.001, None: 1, "s": 1, "m": 60, "h": 3600}[found[2]]
        if seconds < 0.001:
            self.fail(f"{value!r} is too short: 1ms is the shortest", param, ctx)
        return seconds


DURATION = Duration()


def _not_empty(ctx: click.Context, param: click.Parameter, value: str) -> str:
    if not value:
        raise click.BadParameter("it is empty: give auto, none, or the drafter's folder")
    return value


DRAFT = click.option(
    "--draft",
    default="auto",
    show_default=True,
    callback=_not_empty,
    help="Drafter: auto (PATH/draft), none, or a folder.",
)


def _set_quiet(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        ctx.ensure_object(Settings).quiet = True


def _set_output(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    if value:
        ctx.ensure_object(Settings).output = value


class Command(click.Command):
    """A command that also takes -o and -q after its name."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.params.append(
            click.Option(
                ["-o", "--output"],
                type=click.Choice(["table", "json", "ndjson"]),
                expose_value=False,
                callback=_set_output,
                is_eager=True,
                help="How to print: for people, one JSON document, or one a line.",
            )
        )
        self.params.append(
            click.Option(
                ["-q", "--quiet"],
                is_flag=True,
                expose_value=False,
                callback=_set_quiet,
                is_eager=True,
                help="No progress and no notes on stderr.",
            )
        )


def command(*args: Any, **kwargs: Any) -> Any:
    return click.command(*args, cls=Command, **kwargs)


def read_text(value: str | None) -> str:
    """An argument, or standard input for `-`."""
    if value == "-" or value is None:
        if sys.stdin is None or (value is None and sys.stdin.isatty()):
            raise click.UsageError("give the text as an argument, or - to read standard input")
        return sys.stdin.read()
    return value


def is_terminal(stream: Any) -> bool:
    """Whether people look at it. A stream that was closed before we began is None."""
    return stream is not None and stream.isatty()


def wants_color(no_color: bool) -> bool:
    return not no_color and not os.environ.get("NO_COLOR") and is_terminal(sys.stdout)
