"""completion: what a shell needs to complete kdctl."""

from __future__ import annotations

import click

from kdctl.output import FAILED, Failure, Settings, command


@command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_obj
def completion(settings: Settings, shell: str) -> None:
    """Print the completion script of SHELL. Install it, e.g. for bash:

    \b
    kdctl completion bash > ~/.local/share/bash-completion/completions/kdctl
    """
    from click.shell_completion import get_completion_class

    from kdctl.__main__ import cli

    kind = get_completion_class(shell)
    if kind is None:
        raise Failure(f"no completion for {shell}", FAILED)
    # The template itself: click's source() would run the shell to ask for its version.
    maker = kind(cli, {}, "kdctl", "_KDCTL_COMPLETE")
    script = maker.source_template % maker.source_vars()
    settings.emit("completion", {"shell": shell, "script": script}, lambda: click.echo(script))
