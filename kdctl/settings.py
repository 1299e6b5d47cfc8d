"""config: what is in force, where it comes from, whether a file is good. Needs no daemon."""

from __future__ import annotations

import json
from typing import Any

import click

from kdctl.output import EX_CONFIG, Failure, Settings, command, table


@click.group()
def config() -> None:
    """The daemon's settings, as it would find them here and now."""


@command()
@click.argument("keys", nargs=-1, metavar="[KEY]...")
@click.option("--config", "file", type=click.Path(readable=False), help="Instead of /etc/kd/kd.toml.")
@click.pass_obj
def show(settings: Settings, keys: tuple[str, ...], file: str | None) -> None:
    """Every setting, its value and the place it comes from; or only the KEYs."""
    from kd import config as configuration

    unknown = [key for key in keys if key not in configuration.SETTINGS]
    if unknown:
        raise click.BadParameter(f"there is no setting {unknown[0]}: see `kdctl config show`", param_hint="KEY")
    flags = {} if settings.instance == "default" else {"server.instance": settings.instance}
    found = configuration.load(flags=flags, file=file)
    rows: list[dict[str, Any]] = [
        {"key": key, "value": value, "origin": origin}
        for key, value, origin in found.items()
        if not keys or key in keys
    ]
    settings.emit(
        "config_show",
        {"settings": rows},
        lambda: table(("key", "value", "from"), [[r["key"], _toml(r["value"]), r["origin"]] for r in rows]),
        rows="settings",
    )


def _toml(value: Any) -> str:
    """As one would write it into a file."""
    return json.dumps(value)


@command()
@click.argument("file", type=click.Path(readable=False))
@click.pass_obj
def validate(settings: Settings, file: str) -> None:
    """Is FILE a configuration the daemon can start with? Exits with 78 if not, as the daemon would."""
    from kd import config as configuration

    try:
        configuration.load(env={}, file=file)
    except configuration.ConfigError as error:
        raise Failure(str(error), EX_CONFIG, "CONFIG") from None
    settings.emit("config_validate", {"file": file, "ok": True}, lambda: click.echo(f"{file}: good"))


config.add_command(show)
config.add_command(validate)
