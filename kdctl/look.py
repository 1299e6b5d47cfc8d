"""Looking at a daemon: status, health, ps, events, version."""

from __future__ import annotations

from typing import Any

import click

from kdctl.output import NOT_READY, VERSION, Failure, Settings, bytes_text, command, line, pairs, table

_COLORS = {"ready": "green", "failed": "red", "draining": "yellow"}


def acceptance(stats: dict[str, Any]) -> float | None:
    """Tokens one stream gets a round, over the daemon's life."""
    streams = stats.get("round_streams", 0)
    return (stats["accepted_tokens"] + streams) / streams if streams else None


def progress_text(load: dict[str, Any] | None) -> str | None:
    if not load or load["phase"] == "done":
        return None
    if not load["bytes_total"]:
        return load["phase"]  # how much there is to read is not known yet
    text = f"{load['phase']} {load['percent']:.0f} % of {bytes_text(load['bytes_total'])}"
    if load["phase"] == "read" and load.get("rate_bytes_s"):
        text += f", {bytes_text(load['rate_bytes_s'])}/s"
        if load.get("eta_ms") is not None:
            text += f", {load['eta_ms'] / 1000:.0f} s left"
    return text


def builder_text(stats: dict[str, Any], choice: dict[str, Any] | None) -> str | None:
    if not stats.get("builder"):
        return None
    text = f"{stats['builder']}, budget {stats['builder_budget']}" if stats["builder_budget"] else stats["builder"]
    measured = choice["measured"] if choice else ()
    return text + (f" (the fastest of {len(measured)} measured when the model was loaded)" if measured else "")


@command()
@click.pass_obj
def status(settings: Settings) -> None:
    """What the daemon is doing. Exits with 3 if it is not running."""
    answer = settings.client().status()

    def human() -> None:
        about, model, stats = answer["daemon"], answer["model"], answer["stats"] or {}
        state = settings.paint(answer["state"], _COLORS.get(answer["state"], "yellow"))
        accept = acceptance(stats)
        pages = stats.get("pages_total")
        pairs(
            [
                ("state", state + (f" ({answer['reason']})" if answer["reason"] else "")),
                ("loading", progress_text(answer["load"]) if (answer["load"] or {}).get("under_way") else None),
                (
                    "daemon",
                    f"kd {about['version']}, instance {about['instance']}, pid {about['pid']}, "
                    f"up {about['uptime_ms'] / 1000:.0f} s",
                ),
                ("device", f"{about['device']}, tp {about['tp']}" if "tp" in about else about["device"]),
                (
                    "model",
                    f"{model['name']} ({model['parameters'] / 1e6:.1f} M parameters, "
                    f"{bytes_text(model['weight_bytes'])}, context {model['max_positions']})"
                    if model
                    else "none",
                ),
                ("builder", builder_text(stats, about.get("builder_choice"))),
                (
                    "requests",
                    f"{about['open_requests']} open, {stats.get('streams', 0)} decoding, "
                    f"{stats.get('waiting', 0)} waiting",
                ),
                (
                    "cache",
                    f"{stats['pages_free']} of {pages} pages free, {stats['pages_cached']} cached" if pages else None,
                ),
                ("decoded", f"{stats['tokens']} tokens in {stats['rounds']} rounds" if stats.get("rounds") else None),
                ("acceptance", f"{accept:.2f} tokens a round and stream" if accept else None),
                ("endpoint", about["serve"]),
            ]
        )

    settings.emit("status", answer, human)


@command()
@click.option("--live", "probe", flag_value="live", help="Does the daemon answer and its engine make progress?")
@click.option("--ready", "probe", flag_value="ready", default=True, help="Would a request be taken now? (default)")
@click.option("--startup", "probe", flag_value="startup", help="Is start-up over?")
@click.pass_obj
def health(settings: Settings, probe: str) -> None:
    """Answer one question with the exit code: 0 yes, 4 no, 3 not running. Costs the engine nothing."""
    answer = settings.client().status()
    good = bool(answer[{"live": "live", "ready": "ready", "startup": "started"}[probe]])
    data = {"probe": probe, "ok": good, "state": answer["state"], "reason": answer["reason"]}
    settings.emit("health", data, lambda: click.echo(f"{probe}: {'yes' if good else 'no'} (state {answer['state']})"))
    if not good:
        raise click.exceptions.Exit(NOT_READY)


@command()
@click.option("--own", is_flag=True, help="Ask on the serve socket: only this connection's requests.")
@click.pass_obj
def ps(settings: Settings, own: bool) -> None:
    """Requests under way, oldest first."""
    rows = sorted(settings.client().ps(own=own), key=lambda r: -r["age_ms"])
    keys = ("request", "state", "prompt_tokens", "tokens", "rounds", "credit", "age_ms")
    settings.emit(
        "ps",
        {"requests": rows},
        lambda: table(
            ("request", "state", "prompt", "tokens", "rounds", "credit", "age ms"), [[r[k] for k in keys] for r in rows]
        ),
        rows="requests",
    )


@command()
@click.option("-f", "--follow", is_flag=True, help="Go on until interrupted.")
@click.option("--topic", multiple=True, type=click.Choice(["state", "load", "metrics"]), help="Only these.")
@click.pass_obj
def events(settings: Settings, follow: bool, topic: tuple[str, ...]) -> None:
    """State changes, load progress and metrics. Without -f: what comes within a second and a half."""
    if follow and settings.output == "json":
        raise click.UsageError("events -f never ends: use -o ndjson")
    got = []
    client = settings.client()
    client.ping()  # says clearly if there is no daemon; a subscription alone would wait for ever
    for event in client.events(topic or ("",), timeout_s=None if follow else 1.5):
        if settings.output == "ndjson":
            line({"schema": "kdctl/event.v1", **event})
        elif settings.output == "table":
            shown = {k: v for k, v in event.items() if k not in ("boot", "seq", "time_ms", "topic", "stats")}
            click.echo(f"{event['seq']} {event['topic']} " + " ".join(f"{k}={v}" for k, v in shown.items() if v != ""))
        got.append(event)
        if follow:
            got.clear()
        elif len(got) >= (len(topic) or 2):
            break
    if settings.output == "json":
        settings.emit("events", {"events": got})


@command()
@click.pass_obj
def version(settings: Settings) -> None:
    """Versions of everything. Exits with 8 if client and daemon have no protocol version in common."""
    import kd
    from kd import wire
    from kd.client import KdClientError

    data: dict[str, Any] = {
        "client": kd.__version__,
        "protocol_min": wire.VERSION_MIN,
        "protocol_max": wire.VERSION_MAX,
        "daemon": None,
        "daemon_protocol_min": None,
        "daemon_protocol_max": None,
        "abi": None,
        "pid": None,
    }
    why = None
    try:
        answer = settings.client().hello()
        data.update(
            daemon=answer["daemon"],
            daemon_protocol_min=answer["version_min"],
            daemon_protocol_max=answer["version_max"],
            abi=answer["abi"],
            pid=answer["pid"],
        )
    except KdClientError as error:
        if error.name == "UNSUPPORTED_VERSION":
            raise
        why = error.message
    fits = data["daemon"] is None or not (
        data["daemon_protocol_min"] > wire.VERSION_MAX or data["daemon_protocol_max"] < wire.VERSION_MIN
    )
    settings.emit(
        "version",
        data,
        lambda: pairs(
            [
                ("client", f"{data['client']}, protocol {data['protocol_min']} to {data['protocol_max']}"),
                (
                    "daemon",
                    f"{data['daemon']}, protocol {data['daemon_protocol_min']} to {data['daemon_protocol_max']}, "
                    f"ABI {data['abi']}"
                    if data["daemon"]
                    else f"none ({why})",
                ),
            ]
        ),
    )
    if not fits:
        raise Failure(
            "client and daemon have no protocol version in common: restart the daemon, or update kdctl",
            VERSION,
            "UNSUPPORTED_VERSION",
        )
    if data["daemon"] and data["daemon"] != data["client"]:
        settings.note(f"kdctl: client {data['client']} and daemon {data['daemon']} differ but understand each other")
