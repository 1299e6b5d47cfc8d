"""The entry point of `kdctl`. Commands live in their own files and are imported when they are called."""

from __future__ import annotations

from kdctl import entry

if __name__ == "__main__":  # `python -m kdctl`: before what takes time
    entry.end_quietly()

import importlib
import os
import signal
import sys
from typing import Any

import click

from kdctl.output import (
    DURATION,
    EX_CONFIG,
    FAILED,
    INTERRUPTED,
    TERMINATED,
    USAGE,
    Failure,
    Settings,
    exit_of,
    show_error,
    wants_color,
)

# name: (file, help); the help stands here so that `kdctl --help` imports nothing.
COMMANDS = {
    "start": ("daemon", "Start the daemon and wait until it is ready."),
    "stop": ("daemon", "Stop the daemon; running requests finish first."),
    "restart": ("daemon", "Stop, then start as before: same model, same settings."),
    "drain": ("daemon", "Refuse new requests; running ones go on."),
    "undrain": ("daemon", "Take new requests again."),
    "logs": ("daemon", "Show the daemon's log."),
    "status": ("look", "What the daemon is doing."),
    "health": ("look", "Is it live, started, ready? Answers with the exit code."),
    "ps": ("look", "Requests under way."),
    "events": ("look", "State changes and metrics as they come."),
    "version": ("look", "Versions of client, daemon, protocol and ABI."),
    "load": ("model", "Load a model folder."),
    "unload": ("model", "Unload the model and say how much memory came back."),
    "inspect": ("checkpoint", "What a model folder holds and what it takes to serve it."),
    "verify-checkpoint": ("checkpoint", "Is a model folder whole? Names every fault."),
    "convert": ("checkpoint", "Write a packed folder that loads by reading alone."),
    "builders": ("builders", "Tree builders: list, use, check."),
    "generate": ("generate", "Complete a prompt and stream the text."),
    "chat": ("generate", "Talk to the model."),
    "cancel": ("generate", "Cancel requests."),
    "tokenize": ("generate", "Text to token ids."),
    "detokenize": ("generate", "Token ids to text."),
    "verify": ("verify", "Prove that speculation changes nothing: decode again without it and compare bits."),
    "bench": ("bench", "Measure speed over a sweep of concurrency."),
    "config": ("settings", "Settings in force and where they come from; check a file."),
    "completion": ("completion", "Print the completion script of a shell."),
    "demo": ("demo", "Start the embedded model, decode plainly and with trees, compare."),
}


class Group(click.Group):
    """Imports a command's file when the command is called, not before."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        return getattr(importlib.import_module(f"kdctl.{COMMANDS[name][0]}"), name.replace("-", "_"))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


def _instance(ctx: click.Context, param: click.Parameter, value: str) -> str:
    if value != "default":
        from kd.instance import INSTANCE, INSTANCE_ALLOWED

        if not INSTANCE.fullmatch(value):
            raise click.BadParameter(f"{value!r} is no name of a daemon: {INSTANCE_ALLOWED}")
    return value


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "KDCTL"})
@click.option(
    "--instance", default="default", show_default=True, metavar="NAME", callback=_instance, help="Which daemon."
)
@click.option(
    "--endpoint", metavar="URL", help="Its serve endpoint, e.g. ipc:///run/kd/a/serve.sock or tcp://host:port."
)
@click.option("--control-endpoint", metavar="URL", help="Its control endpoint, where that is not beside the other.")
@click.option("--curve-dir", metavar="DIR", help="Keys for a tcp endpoint: server.key and client.key_secret.")
@click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "json", "ndjson"]),
    default="table",
    show_default=True,
    help="How to print: for people, one JSON document, or one a line.",
)
@click.option("--timeout", type=DURATION, default="10s", show_default=True, help="For one answer of the daemon.")
@click.option("-q", "--quiet", is_flag=True, help="No progress and no notes on stderr.")
@click.option("--no-color", is_flag=True, help="No colors; NO_COLOR=1 does the same.")
@click.pass_context
def cli(
    ctx: click.Context,
    instance: str,
    endpoint: str | None,
    control_endpoint: str | None,
    curve_dir: str | None,
    output: str,
    timeout: float,
    quiet: bool,
    no_color: bool,
) -> None:
    """Drive the kd inference daemon.

    \b
    Exit codes: 0 ok, 1 failed, 2 usage, 3 not running, 4 not ready, 5 not found, 6 refused, 7 timeout,
    8 version mismatch, 9 permission, 10 partial, 78 bad configuration, 130 interrupted, 143 terminated.
    """
    settings = ctx.ensure_object(Settings)  # run()'s own, if it was there before: its errors need to know all this
    settings.instance, settings.endpoint, settings.control = instance, endpoint, control_endpoint
    settings.curve_dir, settings.output, settings.timeout_s = curve_dir, output, timeout
    settings.quiet, settings.color = quiet, wants_color(no_color)
    ctx.call_on_close(ctx.obj.close)


def run(arguments: list[str] | None = None) -> int:
    """One command, with its errors shown; returns the exit code."""
    from kd.client import KdClientError
    from kd.config import ConfigError

    settings = Settings(output=_output_of(sys.argv[1:] if arguments is None else arguments))
    if sys.stdout is None:  # refused before anything is done whose result nobody could see
        show_error(settings, "IO", "standard output is closed: give a file or /dev/null", FAILED)
        return FAILED
    try:
        words = list(sys.argv[1:] if arguments is None else arguments)
        with cli.make_context("kdctl", words, obj=settings) as ctx:
            result = cli.invoke(ctx)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.Abort:
        return INTERRUPTED
    except KeyboardInterrupt:
        return INTERRUPTED
    except Failure as error:
        show_error(settings, error.name, error.message, error.code, **error.extra)
        return error.code
    except click.ClickException as error:
        if settings.machine:
            show_error(settings, "USAGE", error.format_message(), USAGE)
        else:
            error.show()
        return USAGE
    except KdClientError as error:
        keys = ("retry_ms", "version_min", "version_max")
        extra = {key: error.body[key] for key in keys if error.body.get(key) is not None}
        message = error.message
        if error.name == "NOT_RUNNING":
            from kdctl.ended import why_gone

            message = "; ".join(filter(None, [message, why_gone(settings)]))
        show_error(settings, error.name, message, exit_of(error.name), **extra)
        return exit_of(error.name)
    except ConfigError as error:
        show_error(settings, "CONFIG", str(error), EX_CONFIG)
        return EX_CONFIG
    except UnicodeError:
        show_error(settings, "USAGE", "the input holds bytes that are no UTF-8: give text", USAGE)
        return USAGE
    except OSError as error:
        what = error.filename or "standard output cannot be written"
        show_error(settings, "IO", f"{what}: {error.strerror or error}", FAILED)
        return FAILED
    except Exception as error:
        if not settings.machine:
            raise
        show_error(settings, "INTERNAL", f"{type(error).__name__}: {error}", FAILED)
        return FAILED


def _output_of(arguments: list[str]) -> str:
    """Whether errors of the very command line shall be JSON."""
    for i, word in enumerate(arguments):
        value = arguments[i + 1] if word in ("-o", "--output") and i + 1 < len(arguments) else word.partition("=")[2]
        if word.partition("=")[0] in ("-o", "--output") and value in ("json", "ndjson"):
            return value
    return "table"


def main() -> Any:
    def terminated(number: int, frame: Any) -> None:
        raise SystemExit(TERMINATED)

    entry.end_quietly()
    signal.signal(signal.SIGTERM, terminated)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `kdctl ... | head` ends like any other tool
    if any(name.startswith("_KDCTL_COMPLETE") for name in os.environ):
        cli.main(prog_name="kdctl")
    for name in ("kd.client", "kd.config"):
        importlib.import_module(name)
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # what a command has begun it can end in order
        code = run()
    except KeyboardInterrupt:  # before or after that
        code = INTERRUPTED
    entry.end_quietly()
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:  # run() has said so; the interpreter must not find the same bytes again and say it in its own way
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


if __name__ == "__main__":
    main()
