"""load and unload."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import click

from kdctl.look import progress_text
from kdctl.output import DRAFT, DURATION, Settings, bytes_text, command, is_terminal

CANCEL_S = 10.0  # for a cancelled load to be gone


class ProgressLine:
    """Load progress on stderr: one changing line on a terminal, otherwise a line when the phase changes."""

    def __init__(self, settings: Settings):
        self._on, self._tty, self._last = not settings.quiet and not settings.machine, is_terminal(sys.stderr), ""

    def __call__(self, load: dict[str, Any] | None) -> None:
        text = progress_text(load)
        if not self._on or not text or load is None:
            return
        if self._tty:
            click.echo(f"\r\x1b[Kloading: {text}", nl=False, err=True)
            self._last = text
        elif load["phase"] not in ("open", self._last):  # what fails fails while it is opened, and says so itself
            click.echo(f"loading: {text}", err=True)
            self._last = load["phase"]

    def end(self) -> None:
        if self._tty and self._last:
            click.echo("\r\x1b[K", nl=False, err=True)


def _ended(client: Any) -> None:
    """Wait until a cancelled load is gone: until then STATUS may name the model that was about to take over."""
    limit = time.monotonic() + CANCEL_S
    while client.status()["load"]["under_way"] and time.monotonic() < limit:
        time.sleep(0.05)


def _cancelled(settings: Settings, ident: bytes) -> None:
    """After an interrupt: end the load that was asked for, and say what serves now."""
    from kd.client import KdClientError

    def may_go_on(why: str) -> None:
        settings.note(
            f"kdctl: the load may go on, {why}: see `{settings.command('status')}` and `{settings.command('load --cancel')}`"
        )

    client = settings.client()
    try:
        try:
            client.load_cancel(ident)
            _ended(client)
            outcome = "the load is cancelled"
        except KdClientError as error:
            if error.name != "STATE":
                may_go_on(f"since it could not be cancelled ({error.message})")
                return
            outcome = "it was too late to cancel the load"
        try:
            model = client.status()["model"]
        except KdClientError:
            model = None
    except (KeyboardInterrupt, SystemExit):
        may_go_on("since its end was not waited for")
        raise
    settings.note(f"kdctl: {outcome}; " + (f"{model['path']} serves" if model else "no model is loaded"))


@command()
@click.argument("path", required=False)
@DRAFT
@click.option(
    "--replace", is_flag=True, help="In place of a loaded model, which serves until then and ends its requests."
)
@click.option("--follow-links", is_flag=True, help="Symbolic links in the folder may lead out of it.")
@click.option("--stall-timeout", type=DURATION, default="2m", show_default=True, help="Without any progress.")
@click.option("--detach", is_flag=True, help="Return when the load has begun: `kdctl status` shows how far it is.")
@click.option("--cancel", is_flag=True, help="End the load under way; a model that was to be replaced serves on.")
@click.pass_obj
def load(
    settings: Settings,
    path: str | None,
    draft: str,
    replace: bool,
    follow_links: bool,
    stall_timeout: float,
    detach: bool,
    cancel: bool,
) -> None:
    """Load the model folder PATH and wait until it is ready. The daemon reads it: what counts is what it can see.

    Ctrl-C cancels the load, unless its model has taken over already; the one before serves on."""
    if cancel:
        if path:
            raise click.UsageError("--cancel takes no PATH: it ends the load under way, whatever its folder")
        client = settings.client()
        client.load_cancel()
        _ended(client)
        model = client.status()["model"]
        serves = f"{model['path']} serves" if model else "no model is loaded"
        settings.emit("load_cancel", {"model": model}, lambda: click.echo(f"cancelled; {serves}"))
        return
    if not path:
        raise click.UsageError("give the model's folder, or --cancel")
    path = os.path.abspath(path)  # its current folder is another one
    progress, ident = ProgressLine(settings), os.urandom(16)
    import zmq  # noqa: F401 (whole, before an interrupt is answered by sending something)

    try:
        answer = settings.client().load(
            path,
            draft=draft,
            replace=replace,
            follow_links=follow_links,
            progress=progress,
            timeout_s=stall_timeout,
            wait=not detach,
            ident=ident,
        )
    except (KeyboardInterrupt, SystemExit):  # the second: of SIGTERM
        progress.end()
        _cancelled(settings, ident)
        raise
    finally:
        progress.end()
    if "model" not in answer:
        hint = f"{settings.command('status')}` shows how far it is, `{settings.command('load --cancel')}"
        settings.emit(
            "load", {"model": None, "state": "loading"}, lambda: click.echo(f"loading {path}: `{hint}` ends it")
        )
        return
    model = answer["model"]
    settings.emit(
        "load",
        {"model": model, "state": answer["state"]},
        lambda: click.echo(
            f"{model['name']}: {model['parameters'] / 1e6:.1f} M parameters, "
            f"{bytes_text(model['weight_bytes'])} resident, {answer['state']}"
        ),
    )
    if model.get("skipped_tensors"):
        settings.note(f"kdctl: {model['skipped_tensors']} tensors of the vision tower were skipped: text only")


@command()
@click.pass_obj
def unload(settings: Settings) -> None:
    """Cancel all requests, unload the model, say how much memory came back."""
    freed = settings.client().unload()
    settings.emit("unload", {"freed_bytes": freed}, lambda: click.echo(f"unloaded, {bytes_text(freed)} given back"))
