"""load and unload."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from kdctl.look import progress_text
from kdctl.output import DURATION, Settings, bytes_text, command, is_terminal


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


@command()
@click.argument("path")
@click.option("--draft", default="auto", show_default=True, help="Drafter: auto (PATH/draft), none, or a folder.")
@click.option(
    "--replace", is_flag=True, help="In place of a loaded model, which serves until then and ends its requests."
)
@click.option("--follow-links", is_flag=True, help="Symbolic links in the folder may lead out of it.")
@click.option("--stall-timeout", type=DURATION, default="2m", show_default=True, help="Without any progress.")
@click.pass_obj
def load(settings: Settings, path: str, draft: str, replace: bool, follow_links: bool, stall_timeout: float) -> None:
    """Load the model folder PATH and wait until it is ready. The daemon reads it: what counts is what it can see."""
    path = os.path.abspath(path)  # its current folder is another one
    if draft not in ("auto", "none"):
        draft = os.path.abspath(draft)
    progress = ProgressLine(settings)
    try:
        answer = settings.client().load(
            path, draft=draft, replace=replace, follow_links=follow_links, progress=progress, timeout_s=stall_timeout
        )
    finally:
        progress.end()
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
