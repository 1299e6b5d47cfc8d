"""`python -m kd`: the daemon. Exit status: 0 stopped, 64 usage, 65 bad model data, 69 already running, 70 engine
failure, 71 memory or device, 78 bad configuration."""

from __future__ import annotations

import argparse
import os
import resource
import select
import signal
import sys
from collections.abc import Sequence
from typing import Any

EX_USAGE = 64
MOST_FILES = 1 << 16  # as the systemd unit has it

_FLAGS = {  # the settings people give by hand; --set reaches all of them
    "model": "model.path",
    "draft": "model.draft",
    "device": "engine.device",
    "threads": "engine.threads",
    "tp": "engine.tp",
    "builder": "builder.name",
    "budget": "builder.budget",
    "instance": "server.instance",
    "log-level": "server.log_level",
    "log-format": "server.log_format",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        self.print_usage(sys.stderr)
        self.exit(EX_USAGE, f"kd: {message}\n")


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(prog="python -m kd", description="The kd inference daemon. SIGTERM drains it.")
    parser.add_argument("--config", metavar="FILE", help="read this file instead of /etc/kd/kd.toml")
    for flag, key in _FLAGS.items():
        parser.add_argument(f"--{flag}", dest=key, metavar=flag.upper().replace("-", "_"), help=f"setting {key}")
    parser.add_argument(
        "--insecure",
        dest="server.insecure",
        action="store_const",
        const="true",
        help="allow tcp:// endpoints without CURVE keys",
    )
    parser.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any setting, e.g. engine.kv_bytes=2GiB",
    )
    parser.add_argument("--version", action="store_true", help="print the version and leave")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    from kd import config as configuration

    args = _arguments(argv)
    if args.version:
        import kd

        print(f"kd {kd.__version__}")
        return 0
    flags = {key: getattr(args, key) for key in (*_FLAGS.values(), "server.insecure")}
    try:
        for item in args.settings:
            key, sign, value = item.partition("=")
            if not sign:
                raise configuration.ConfigError(f"--set {item}: write it as KEY=VALUE")
            flags[key] = value
        config = configuration.load(flags=flags, file=args.config)
    except configuration.ConfigError as error:
        return _refuse(error)
    return serve(config, *_backend(config))


def _backend(config: Any, library: Any = None) -> tuple[Any, Any, Any]:
    """(open_engine, make_sampling, describe): the native library is loaded when the engine is opened, not before.
    library: another file than the device's own."""

    def open_engine() -> Any:
        from kd import config as configuration
        from kd.engine import Engine
        from kd.steps import note_crashes

        e = config.engine
        engine = Engine(
            device=e.device,
            tp=e.tp,
            threads=e.threads,
            isa=e.isa,
            max_streams=e.max_streams,
            max_queue=e.max_queue,
            max_rows=e.max_rows,
            max_nodes=e.max_nodes,
            prefill_chunk=e.prefill_chunk,
            prefix_cache=e.prefix_cache,
            kv_bytes=e.kv_bytes,
            slow_reader_timeout_ms=e.slow_reader_timeout_ms,
            share_devices=e.share_devices,
            record=configuration.paths(config.server.instance, runtime_dir=config.server.runtime_dir).steps,
            library=library,
        )
        note_crashes(engine.library)
        return engine

    def make_sampling(**values: Any) -> Any:
        from kd.engine import Sampling

        return Sampling(**values)

    def describe() -> tuple[int, str]:
        from kd import native

        return native.constants["KD_ABI_VERSION"], f"libkd_{config.engine.device}.so"

    return open_engine, make_sampling, describe


def fill_standard_descriptors() -> None:
    """A daemon started with 0, 1 or 2 closed must not have a socket or the lock there: prints would go into it."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number


def raise_file_limit() -> None:
    """As many open files as may be had: a connection takes one, and libzmq ends the process when there is none left."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, MOST_FILES) if hard != resource.RLIM_INFINITY else MOST_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def serve(config: Any, open_engine: Any, make_sampling: Any, describe: Any) -> int:
    """Run a daemon in this process, with its signals, until it ends."""
    from kd import config as configuration
    from kd.logs import Log
    from kd.server import AlreadyRunning, Daemon

    raise_file_limit()
    log = Log(2, config.server.log_level, config.server.log_format)
    # Before anything is open: a signal from here on is a wish to stop, never a traceback.
    early: list[int] = []
    handler = early.append
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda n, frame: handler(n))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    try:
        daemon = Daemon(config, log, open_engine, make_sampling, describe)
    except (configuration.ConfigError, AlreadyRunning) as error:
        return _refuse(error)
    except OSError as error:
        _say(f"kd: {error}")
        return 71
    handler = daemon.control.signal
    while early:
        handler(early.pop())
    # A signal must also end a wait in the poller: Python runs handlers only between two of its own steps.
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    daemon.control.watch_fd(reader)
    return daemon.run()


def _say(text: str) -> None:
    """To stderr, if it takes it: a full pipe must not hold the process."""
    poller = select.poll()
    poller.register(2, select.POLLOUT)
    try:
        if poller.poll(0):
            os.write(2, (text + "\n").encode(errors="backslashreplace")[: select.PIPE_BUF])
    except OSError:
        pass


def _refuse(error: Any) -> int:
    _say(f"kd: {error}")
    return error.exit_status if hasattr(error, "exit_status") else error.exit_code


if __name__ == "__main__":
    fill_standard_descriptors()
    status = main()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # it was closed when Python started
            stream.flush()
    os._exit(status)  # not sys.exit: a thread that hangs in the library must not hold the process
