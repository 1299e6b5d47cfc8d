"""Starting and stopping the daemon, and its log."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click

from kdctl.ended import exit_words, reason, tail
from kdctl.look_first import look_first
from kdctl.model import ProgressLine
from kdctl.output import DURATION, FAILED, NOT_RUNNING, REFUSED, TIMEOUT, Failure, Settings, command
from kdctl.started import alive, held_back, on_its_way, remember, remembered

LOG_LINES_ON_FAILURE = 20
MAX_LOG_BYTES = 64 << 20
POLL_S = 0.05
# An interrupt that comes while a destructor runs is printed as a traceback and lost, and a Popen has a long one: no child's runs
# before the end of the process, when interrupts end it quietly.
_children: list[subprocess.Popen] = []


def _paths(settings: Settings, flags: dict[str, Any], file: str | None) -> tuple[Any, Any]:
    from kd import config as configuration

    config = configuration.load(flags=flags, file=file)
    return config, configuration.paths(settings.instance, runtime_dir=config.server.runtime_dir)


def _owner(settings: Settings) -> int | None:
    """The pid of the daemon that answers, or of one that was started and does not answer yet, or None."""
    from kd.client import KdClientError

    try:
        return settings.client().hello()["pid"]
    except KdClientError as error:
        settings.close()
        if error.name == "NOT_RUNNING":
            return on_its_way(settings)
        raise


def _log_end(log: Path) -> int:
    """Where the next daemon's lines will begin: a log that has become long is put aside."""
    size = log.stat().st_size if log.exists() else 0
    if size <= MAX_LOG_BYTES:
        return size
    log.replace(log.with_suffix(".log.1"))
    return 0


def spawn(settings: Settings, arguments: list[str], log: Path, cwd: str | None = None) -> subprocess.Popen:
    """The daemon in a process group of its own, its output in `log`. cwd: what its relative paths are relative to."""
    import kd

    package = str(Path(kd.__file__).resolve().parents[1])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])}
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    _children[:] = [child for child in _children if child.poll() is None]
    try:
        child = subprocess.Popen(
            [sys.executable, "-m", "kd", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            env=env,
            cwd=cwd,
            close_fds=True,
        )
        _children.append(child)
        return child
    finally:
        os.close(out)


def wait_until(
    settings: Settings, child: subprocess.Popen, log: Path, wait: str, timeout_s: float, since: int = 0
) -> dict[str, Any]:
    """Wait for a started daemon; its last answer to STATUS. Raises Failure with its reason and the end of its log, in which its
    own lines begin at byte `since`."""
    from kd.client import KdClientError

    progress = ProgressLine(settings)
    limit = time.monotonic() + timeout_s
    answer: dict[str, Any] = {}
    while time.monotonic() < limit:
        code = child.poll()
        if code is not None:
            progress.end()
            # The daemon says in plain words why it did not start; the rest of the log is for those who want more.
            last = tail(log, LOG_LINES_ON_FAILURE, since)
            why = reason(last)
            what = f"the daemon ended with {exit_words(code)} before it was {wait}; its log is {log}"
            raise Failure(
                f"{why} ({what})" if why else what,
                REFUSED if code == 69 else 1,
                "START_FAILED",
                exit_status=code,
                log=str(log),
                tail=last,
            )
        try:
            answer = settings.client().status()
            progress(answer["load"])
            if answer["ready"] or wait == "live" or answer["started"]:
                progress.end()
                return answer
        except KdClientError as error:
            settings.close()  # a socket that came too early: connect afresh
            if error.name not in ("NOT_RUNNING", "NO_ANSWER"):
                raise
        time.sleep(POLL_S)
    progress.end()
    raise Failure(
        f"the daemon (pid {child.pid}) is still {answer.get('state', 'starting')} after {timeout_s:g} s; it "
        f"goes on: see `{settings.command('status')}` and {log}",
        TIMEOUT,
        "TIMEOUT",
        pid=child.pid,
        log=str(log),
    )


def _checked(
    settings: Settings, model: str | None, config_file: str | None, options: tuple[str, ...]
) -> tuple[Any, Any]:
    """The configuration that a daemon told this would have, and its files; an error where that cannot be."""
    pairs = []
    for item in options:
        key, sign, value = item.partition("=")
        if not sign:
            raise click.UsageError(f"--set {item}: write it as KEY=VALUE")
        pairs.append((key, value))
    flags: dict[str, Any] = {"server.instance": settings.instance, "model.path": model, **dict(pairs)}
    return _paths(settings, flags, config_file)


def _start(
    settings: Settings,
    model: str | None,
    config_file: str | None,
    options: tuple[str, ...],
    wait: str,
    timeout_s: float,
    cwd: str | None = None,
) -> dict[str, Any]:
    cwd = cwd or os.getcwd()
    config, paths = _checked(settings, model, config_file, options)
    from kd import config as configuration

    if config.server.serve or config.server.control or paths.dir != configuration.find(settings.instance).dir:
        # Where nobody would look for it: this command, and what it tells to type, must name the place.
        settings.endpoint = settings.endpoint or config.server.serve or f"ipc://{paths.serve}"
        settings.control = settings.control or config.server.control or f"ipc://{paths.control}"
    pid = _owner(settings)
    if pid is not None:
        raise Failure(
            f"instance '{settings.instance}' is running already, pid {pid}: stop it with `{settings.command('stop')}`",
            REFUSED,
            "ALREADY_RUNNING",
            pid=pid,
        )
    configuration.make_dirs(paths, group=config.server.serve_group)
    arguments = ["--instance", settings.instance]
    arguments += ["--config", config_file] if config_file else []
    arguments += ["--model", model] if model else []
    for item in options:
        arguments += ["--set", item]
    if config.origin("server.log_format") == "built-in":
        arguments += ["--log-format", "json"]  # this log is a file, read by programs as often as by people
    before = paths.started.read_bytes() if paths.started.exists() else None
    since = _log_end(paths.log)
    told = {"model": model, "config": config_file, "set": options, "cwd": cwd, "endpoint": settings.endpoint}
    child = None
    try:
        with held_back(signal.SIGINT):  # a child that nobody remembers would be found by nobody
            child = spawn(settings, arguments, paths.log, cwd)
            try:
                remember(paths.started, child.pid, **told)
            except OSError as error:
                child.kill()
                child.wait()
                raise Failure(
                    f"{paths.started} cannot be written ({error.strerror}), so nothing was started: make room, or let user "
                    f"{os.geteuid()} write there",
                    FAILED,
                    "IO",
                ) from None
        data = {"pid": child.pid, "log": str(paths.log), "state": "starting", "model": None}
        if wait != "none":
            answer = wait_until(settings, child, paths.log, wait, timeout_s, since)
            data.update(state=answer["state"], model=answer["model"] and answer["model"]["path"])
        return data
    except Failure:
        # What has never served is nothing to start again, unless another start has put its own there.
        if before and child and child.poll() is not None and remembered(paths.started, child.pid):
            paths.started.write_bytes(before)
        raise
    except (KeyboardInterrupt, SystemExit):
        if child:
            settings.note(
                f"kdctl: the daemon (pid {child.pid}) goes on without being waited for: `{settings.command('status')}` shows how "
                f"far it is, `{settings.command('stop')}` ends it"
            )
        raise


def _say_started(settings: Settings, data: dict[str, Any]) -> None:
    click.echo(f"{data['state']}, pid {data['pid']}, log {data['log']}")
    if data["state"] == "empty":
        click.echo(f"started without a model: `{settings.command('load PATH')}`")


_START = [
    click.option("--model", type=click.Path(exists=True, file_okay=False, resolve_path=True), help="Model folder."),
    click.option(
        "--config",
        "config_file",
        type=click.Path(readable=False, resolve_path=True),  # what is wrong with it the configuration's reader says
        help="Configuration file instead of /etc/kd/kd.toml.",
    ),
    click.option("--set", "options", multiple=True, metavar="KEY=VALUE", help="Any setting, e.g. engine.threads=8."),
    click.option(
        "--wait",
        type=click.Choice(["ready", "live", "none"]),
        default="ready",
        show_default=True,
        help="How far to wait.",
    ),
    click.option("--wait-timeout", type=DURATION, default="20m", show_default=True, help="And for how long."),
]


def _with_start_options(function: Any) -> Any:
    for option in reversed(_START):
        function = option(function)
    return function


@command()
@_with_start_options
@click.pass_obj
def start(
    settings: Settings,
    model: str | None,
    config_file: str | None,
    options: tuple[str, ...],
    wait: str,
    wait_timeout: float,
) -> None:
    """Start the daemon, detached, and wait until it is ready."""
    data = _start(settings, model, config_file, options, wait, wait_timeout)
    settings.emit("start", data, lambda: _say_started(settings, data))


def _stop(settings: Settings, now: bool, drain_s: float | None) -> dict[str, Any]:
    from kd.client import KdClientError

    socket = ""
    try:
        client = settings.client()
        pid = client.hello()["pid"]
        socket = client.endpoints["control"] or ""
        client.stop(now=now, deadline_ms=int((drain_s or 0) * 1000))
    except KdClientError as error:
        early = on_its_way(settings) if error.name == "NOT_RUNNING" else None
        if early is None:
            raise
        pid = early
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)  # it has no socket to ask through, and so no requests to let finish
    finally:
        settings.close()
    limit = time.monotonic() + (0 if now else drain_s or 30) + 15
    try:
        _wait_for_end(settings, pid, socket, limit)
    except (KeyboardInterrupt, SystemExit):
        settings.note(f"kdctl: the daemon (pid {pid}) goes on stopping without being waited for")
        raise
    return {"pid": pid}


def _wait_for_end(settings: Settings, pid: int, socket: str, limit: float) -> None:
    while alive(pid, socket):
        if time.monotonic() > limit:
            raise Failure(
                f"the daemon (pid {pid}) has not ended in time: `{settings.command('stop --now')}`, or as "
                f"the last resort `kill -9 {pid}`",
                TIMEOUT,
                "TIMEOUT",
                pid=pid,
            )
        time.sleep(POLL_S)


@command()
@click.option("--drain", "drain_s", type=DURATION, help="How long running requests may go on (default: the daemon's).")
@click.option("--now", is_flag=True, help="End running requests at once.")
@click.pass_obj
def stop(settings: Settings, drain_s: float | None, now: bool) -> None:
    """Stop the daemon and wait until it is gone. Exits with 3 if it is not running."""
    data = _stop(settings, now, drain_s)
    settings.emit("stop", data, lambda: click.echo(f"stopped, pid was {data['pid']}"))


def _model_of(told: dict[str, Any]) -> str | None:
    """The model folder that a daemon told this loads, or None if it is not told."""
    model = told.get("model")
    for item in told.get("set", ()):
        model = item.removeprefix("model.path=") if item.startswith("model.path=") else model
    return os.path.realpath(os.path.join(told.get("cwd") or os.getcwd(), model)) if model else None


@command()
@_with_start_options
@click.option("--now", is_flag=True, help="End running requests at once.")
@click.pass_obj
def restart(
    settings: Settings,
    model: str | None,
    config_file: str | None,
    options: tuple[str, ...],
    wait: str,
    wait_timeout: float,
    now: bool,
) -> None:
    """Stop the daemon if it runs, then start it again: the same model folder, drafter and --follow-links as it serves with,
    and the --config and --set it was started with. What is given here comes on top; what cannot be is refused before
    anything is stopped. Not kept, and that is said: a tree builder that `kdctl builders use` has set since, and for another
    model folder the drafter and --follow-links of the one before."""
    from kd import config as configuration
    from kd.client import KdClientError

    told = configuration.find(settings.instance).started
    builder = builders = None
    try:
        answer = settings.client().status()
        same = remembered(told, settings.client().hello()["pid"])
        serves, builder = answer["model"] or {}, answer["daemon"].get("builder_told")
        former = _model_of({"model": serves["path"]} if serves else same)
        same["model"] = serves.get("path")
        if serves:
            since = {"model.draft": serves["draft"], "model.follow_links": str(serves["follow_links"]).lower()}
            before = [item for item in same.get("set", ()) if item.partition("=")[0] not in since]
            same["set"] = [*before, *(f"{key}={value}" for key, value in since.items())]
        builders = [row["name"] for row in settings.client().builders()]
        runs = True
    except KdClientError as error:
        settings.close()
        if error.name != "NOT_RUNNING":
            raise
        same = remembered(told, None)
        former = _model_of(same)
        runs = on_its_way(settings) is not None
    config_file = config_file or same.get("config")
    wanted = _model_of({"model": model, "set": options, "cwd": same.get("cwd")})
    if wanted and former and wanted != former:
        gone = [item for item in same.get("set", ()) if item.startswith(("model.draft=", "model.follow_links="))]
        same["set"] = [item for item in same.get("set", ()) if item not in gone]
        for item in gone:
            if item not in ("model.draft=auto", "model.follow_links=false", *options):
                settings.note(f"kdctl: {item} was for {former} and is not kept: --set {item} starts with it")
    if not any(item.startswith("model.path=") for item in options):
        model = model or same.get("model")
    kept = (item for item in same.get("set", ()) if not (model and item.startswith("model.path=")))
    options = (*kept, *options)
    config, _ = _checked(settings, model, config_file, options)
    if runs:
        look_first(config, same.get("cwd") or os.getcwd(), builders)
        try:
            _stop(settings, now, None)
        except (KeyboardInterrupt, SystemExit):
            settings.note(f"kdctl: and it is not started again: `{settings.command('restart')}` does that")
            raise
    if builder and not any(item.startswith("builder.name=") for item in options):
        settings.note(
            f"kdctl: builder {builder['builder']} was set by a command and is not kept: --set builder.name={builder['builder']} "
            f"--set builder.budget={builder['budget']} starts with it"
        )
    try:
        data = _start(settings, model, config_file, options, wait, wait_timeout, same.get("cwd"))
    except Failure:
        if runs:
            settings.note("kdctl: the daemon that ran before was stopped for this one")
        raise
    settings.emit("restart", data, lambda: _say_started(settings, data))


@command()
@click.pass_obj
def drain(settings: Settings) -> None:
    """Refuse new requests; running ones go on."""
    data = {"state": settings.client().drain(True)}
    settings.emit("drain", data, lambda: click.echo(data["state"]))


@command()
@click.pass_obj
def undrain(settings: Settings) -> None:
    """Take new requests again."""
    data = {"state": settings.client().drain(False)}
    settings.emit("undrain", data, lambda: click.echo(data["state"]))


@command()
@click.option("-f", "--follow", is_flag=True, help="Go on with what is written from now on.")
@click.option(
    "-n", "--lines", type=click.IntRange(0), default=50, show_default=True, help="How many of the last lines."
)
@click.pass_obj
def logs(settings: Settings, follow: bool, lines: int) -> None:
    """The log of a daemon that `kdctl start` has started; one started by systemd logs to the journal."""
    from kd import config as configuration

    if follow and settings.output == "json":
        raise click.UsageError("logs -f never ends: use -o ndjson")
    path = configuration.find(settings.instance).log
    if not path.exists():
        raise Failure(
            f"{path}: there is no log; a daemon of systemd logs to `journalctl -u kd@{settings.instance}`",
            NOT_RUNNING,
            "NOT_FOUND",
        )
    found = tail(path, lines)
    settings.emit(
        "logs", {"log": str(path), "lines": found}, lambda: click.echo("".join(f"{one}\n" for one in found), nl=False)
    )
    if not follow:
        return
    with path.open("rb") as f:
        f.seek(0, os.SEEK_END)
        while True:
            piece = f.readline()
            if piece:
                click.echo(piece.decode("utf-8", "replace"), nl=False)
            else:
                time.sleep(0.2)
