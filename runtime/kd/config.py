"""The daemon's configuration: one table of settings, five places a value may come from.

    flag  >  environment KD_<SECTION>_<KEY>  >  /etc/kd/<instance>.toml  >  /etc/kd/kd.toml  >  built-in

`load()` merges them into a frozen `Config`; `Config.origin(key)` says which place won. A file given by name
(`--config FILE`) is read instead of the two under /etc/kd. Unknown keys and bad values are errors that name the place,
the key and what is allowed; the daemon exits with 78 (EX_CONFIG) on them.

`TABLE` lists every setting, in order: `kdctl config show`, the documentation and the tests are written from it.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from kd.instance import INSTANCE, INSTANCE_ALLOWED, SOCKET_PATH_MAX, ConfigError, short
from kd.instance import Paths as Paths
from kd.instance import find as find
from kd.instance import make_dirs as make_dirs
from kd.instance import paths as paths

ETC = Path("/etc/kd")
MAX_FILE_BYTES = 1 << 20
_ENDPOINT = re.compile(r"ipc:///[^\0]+|tcp://(?:\*|[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]):\d{1,5}")
_SIZE = re.compile(r"(\d{1,19}) ?(B|KiB|MiB|GiB|TiB)?")
_UNITS = {None: 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def setting(
    default: Any, help: str, *, low: int | None = None, high: int | None = None, choices: tuple = (), kind: str = ""
) -> Any:
    """A dataclass field with the facts that `TABLE` and the checks need. kind: "" (from the default) | "bytes" |
    "path" | "endpoint" | "name"."""
    kind = kind or type(default).__name__
    facts = {"help": help, "low": low, "high": high, "choices": choices, "kind": kind}
    return field(default=default, metadata=facts)


@dataclass(frozen=True)
class ModelConfig:
    path: str = setting("", "model folder to load at start; empty: start without a model", kind="path")
    draft: str = setting("auto", 'drafter: "auto" (<path>/draft if there), "none", or a folder', kind="path")
    follow_links: bool = setting(False, "symbolic links in the model folder may lead out of it")


@dataclass(frozen=True)
class EngineConfig:
    device: str = setting("cpu", "backend library to load", choices=("cpu", "cuda"))
    tp: int = setting(1, "ranks", choices=(1, 2, 4, 8))
    threads: int = setting(0, "compute threads over all ranks; 0: the cores this process may use", low=0, high=1024)
    isa: str = setting("auto", "CPU instruction set", choices=("auto", "plain", "avx2", "avx512"))
    max_streams: int = setting(0, "requests decoding at once; 0: 64", low=0, high=64)
    max_queue: int = setting(0, "requests waiting; 0: 512", low=0, high=4096)
    max_rows: int = setting(0, "rows of one round over all streams; 0: 1024, on cuda 640", low=0, high=65536)
    max_nodes: int = setting(0, "largest budget a builder may be given; 0: 64", low=0, high=256)
    prefill_chunk: int = setting(0, "prompt tokens of one step; 0: 256", low=0, high=65536)
    prefix_cache: bool = setting(True, "keep pages of finished prompts for the next request with the same start")
    kv_bytes: int = setting(0, 'KV cache of one rank, e.g. "2 GiB"; 0: 128 MiB', low=0, high=1 << 50, kind="bytes")
    slow_reader_timeout_ms: int = setting(
        0, "a request without credit for so long is cancelled; 0: 30000", low=0, high=86_400_000
    )
    share_devices: bool = setting(False, "several ranks may share a GPU: for tests, it is slower than one rank")


@dataclass(frozen=True)
class BuilderConfig:
    name: str = setting("", "tree builder in force at start; empty: the fastest, measured at every load", kind="name")
    budget: int = setting(0, "nodes of one stream's tree; 0: the builder's default", low=0, high=256)


@dataclass(frozen=True)
class ServerConfig:
    instance: str = setting(
        "default", "name of this daemon; picks /etc/kd/<instance>.toml and the socket folder", kind="name"
    )
    runtime_dir: str = setting(
        "",
        "folder of the instance folders; empty: $RUNTIME_DIRECTORY, else $XDG_RUNTIME_DIR/kd, else /tmp/kd-<uid>",
        kind="path",
    )
    control: str = setting(
        "", "control endpoint; empty: ipc socket control.sock in the instance folder", kind="endpoint"
    )
    serve: str = setting("", "serve endpoint; empty: ipc socket serve.sock in the instance folder", kind="endpoint")
    events: str = setting("", "events endpoint; empty: ipc socket events.sock in the instance folder", kind="endpoint")
    insecure: bool = setting(False, "allow tcp:// endpoints without CURVE keys")
    curve_dir: str = setting("", "folder of the CURVE keys, needed for tcp:// endpoints", kind="path")
    serve_group: str = setting("", "group that may use the serve and events sockets; empty: only the daemon's user")
    log_level: str = setting("info", "what is logged", choices=("debug", "info", "warning", "error"))
    log_format: str = setting("text", "one line of text or one JSON object a record", choices=("text", "json"))
    drain_timeout_ms: int = setting(30_000, "time running requests get after SIGTERM", low=0, high=86_400_000)
    load_stall_timeout_ms: int = setting(
        120_000, "a load without progress for so long has failed", low=1000, high=86_400_000
    )
    round_stall_timeout_ms: int = setting(
        60_000, "an engine turn longer than this counts as hung (watchdog)", low=1000, high=86_400_000
    )
    rank_stall_timeout_ms: int = setting(
        3000, "a rank that keeps the others waiting for so long counts as hung", low=1000, high=86_400_000
    )
    client_timeout_ms: int = setting(
        30_000, "a client silent for so long has vanished: its requests are cancelled", low=1000, high=86_400_000
    )
    publish_interval_ms: int = setting(
        1000, "time between two state messages on the events socket", low=50, high=3_600_000
    )
    max_requests_client: int = setting(256, "requests one client may have open", low=1, high=4096)
    max_message_bytes: int = setting(
        8 << 20, "largest message accepted on the serve socket", low=4096, high=1 << 30, kind="bytes"
    )


SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "engine": EngineConfig,
    "builder": BuilderConfig,
    "server": ServerConfig,
}


@dataclass(frozen=True)
class Setting:
    """One row of `TABLE`."""

    key: str  # "engine.tp"
    kind: str  # "str" | "int" | "bool" | "bytes" | "path" | "endpoint" | "name"
    default: Any
    help: str
    low: int | None
    high: int | None
    choices: tuple

    @property
    def env(self) -> str:
        """Its environment variable: KD_ENGINE_TP."""
        return "KD_" + self.key.upper().replace(".", "_")

    @property
    def allowed(self) -> str:
        """What a value may be, in words."""
        if self.choices:
            return "one of " + ", ".join(str(c) for c in self.choices)
        if self.kind in ("int", "bytes"):
            unit = ', or a string such as "512 MiB"' if self.kind == "bytes" else ""
            return f"an integer from {self.low} to {self.high}{unit}"
        return {
            "bool": "true or false",
            "endpoint": "empty, ipc:///absolute/path or tcp://host:port",
            "name": INSTANCE_ALLOWED,
            "path": "a path",
            "str": "text",
        }[self.kind]

    def parse(self, value: Any, place: str, *, text: bool) -> Any:
        """Check a value; `text`: it comes from a flag or the environment, where everything is a string."""
        if text and isinstance(value, str):
            value = self._from_text(value)
        if self.kind == "bytes" and isinstance(value, str) and (found := _SIZE.fullmatch(value.strip())):
            value = int(found[1]) * _UNITS[found[2]]
        want = {"int": int, "bytes": int, "bool": bool}.get(self.kind, str)
        good = type(value) is want
        if good and want is int and self.low is not None:
            good = self.low <= value <= self.high
        if good and want is str:
            good = len(value) <= 4096 and "\0" not in value and value.isprintable()
        if good and self.choices:
            good = value in self.choices
        if good and self.kind == "endpoint" and value:
            good = _endpoint_fits(value)
        if good and self.kind == "name" and (value or self.default):
            good = INSTANCE.fullmatch(value) is not None
        if not good:
            raise ConfigError(f"{place}: {self.key} = {short(value)} is not allowed; it must be {self.allowed}")
        return value

    def _from_text(self, value: str) -> Any:
        if self.kind == "bool":
            return _WORDS.get(value.strip().lower(), value)
        if self.kind == "int" and re.fullmatch(r"-?[0-9]{1,19}", value.strip()):
            return int(value)
        return value


def _table() -> tuple[Setting, ...]:
    rows = []
    for section, cls in SECTIONS.items():
        for f in fields(cls):
            assert f.default is not MISSING
            rows.append(Setting(key=f"{section}.{f.name}", default=f.default, **f.metadata))
    return tuple(rows)


TABLE = _table()
SETTINGS = {row.key: row for row in TABLE}


@dataclass(frozen=True)
class Config:
    """Every setting, by section: `config.engine.tp`. Equal values and origins compare equal."""

    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    builder: BuilderConfig = BuilderConfig()
    server: ServerConfig = ServerConfig()
    origins: Mapping[str, str] = field(default_factory=dict)

    def get(self, key: str) -> Any:
        """The value of "engine.tp"; KeyError for a key that is not in `TABLE`."""
        section, _, name = SETTINGS[key].key.partition(".")
        return getattr(getattr(self, section), name)

    def origin(self, key: str) -> str:
        """Where the value came from: "flag", "environment KD_ENGINE_TP", a file's path, or "built-in"."""
        return self.origins.get(SETTINGS[key].key, "built-in")

    def items(self) -> Iterator[tuple[str, Any, str]]:
        """(key, value, origin) of every setting, in the order of `TABLE`."""
        for row in TABLE:
            yield row.key, self.get(row.key), self.origin(row.key)


def load(
    *,
    flags: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    file: str | Path | None = None,
    etc: Path = ETC,
) -> Config:
    """Merge all places.

    flags: {"engine.tp": 2 or "2"}; None means "not given". file: read this one (it must exist) and nothing under
    `etc`. env: os.environ unless given. Raises ConfigError.
    """
    flags = {key: value for key, value in (flags or {}).items() if value is not None}
    env = os.environ if env is None else env
    from_flags = {key: _known(key, "flag").parse(value, "flag", text=True) for key, value in flags.items()}
    from_env = _read_env(env)

    layers: list[tuple[str, dict[str, Any]]] = []  # weakest first
    if file is not None:
        layers.append((str(file), _read_file(Path(file), must_exist=True)))
    else:
        layers.append((str(etc / "kd.toml"), _read_file(etc / "kd.toml", must_exist=False)))
        instance = "default"
        for values in (layers[0][1], from_env, from_flags):
            instance = values.get("server.instance", instance)
        path = etc / f"{instance}.toml"
        if instance != "kd":
            values = _read_file(path, must_exist=False)
            if values.get("server.instance", instance) != instance:
                raise ConfigError(
                    f'{path}: server.instance = "{values["server.instance"]}" contradicts the file\'s '
                    f'name; leave it out or write "{instance}"'
                )
            layers.append((str(path), values))

    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for place, values in layers:
        merged.update(values)
        origins.update(dict.fromkeys(values, place))
    merged.update(from_env)
    origins.update({key: f"environment {SETTINGS[key].env}" for key in from_env})
    merged.update(from_flags)
    origins.update(dict.fromkeys(from_flags, "flag"))

    sections = {}
    for section, cls in SECTIONS.items():
        prefix = section + "."
        sections[section] = cls(**{k[len(prefix) :]: v for k, v in merged.items() if k.startswith(prefix)})
    config = Config(**sections, origins=origins)
    _check_together(config)
    return config


def _known(key: str, place: str) -> Setting:
    row = SETTINGS.get(key)
    if row is None:
        import difflib  # only when something is wrong: it costs start-up time

        near = difflib.get_close_matches(key, SETTINGS, 1)
        section = key.partition(".")[0]
        names = ", ".join(r.key.partition(".")[2] for r in TABLE if r.key.startswith(section + "."))
        hint = (
            f"did you mean {near[0]}?"
            if near
            else f"[{section}] has: {names}"
            if names
            else ("sections are: " + ", ".join(SECTIONS))
        )
        raise ConfigError(f"{place}: there is no setting {short(key)}; {hint}")
    return row


def _read_env(env: Mapping[str, str]) -> dict[str, Any]:
    by_name = {row.env: row for row in TABLE}
    values = {}
    for name, value in env.items():
        if name in by_name:
            row = by_name[name]
            values[row.key] = row.parse(value, f"environment {name}", text=True)
        elif any(name.startswith(f"KD_{section.upper()}_") for section in SECTIONS):
            # Only names below one of our sections: orchestrators put KD_PORT and the like into the environment.
            section, _, rest = name[3:].lower().partition("_")
            _known(f"{section}.{rest}", f"environment {name}")
    return values


def _read_file(path: Path, *, must_exist: bool) -> dict[str, Any]:
    import tomllib  # only the daemon and `kdctl config` get here

    try:
        mode = path.stat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISCHR(mode)):  # a pipe would be waited for; /dev/null is an empty file
            raise ConfigError(f"{path}: is not a file; give a file to --config")
        with path.open("rb") as f:
            raw = f.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        if must_exist:
            raise ConfigError(f"{path}: there is no such file; give an existing one to --config") from None
        return {}
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None
    if len(raw) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: is larger than {MAX_FILE_BYTES} bytes; this is no kd configuration")
    try:
        document = tomllib.loads(raw.decode("utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: is not valid TOML: {error}") from None
    values: dict[str, Any] = {}
    for section, table in document.items():
        if section not in SECTIONS or not isinstance(table, dict):
            raise ConfigError(f"{path}: there is no section [{short(section)}]; sections are: {', '.join(SECTIONS)}")
        for name, value in table.items():
            row = _known(f"{section}.{name}", str(path))
            values[row.key] = row.parse(value, str(path), text=False)
    return values


def _endpoint_fits(value: str) -> bool:
    if not _ENDPOINT.fullmatch(value):
        return False
    if value.startswith("ipc://"):
        return len(os.fsencode(value[6:])) <= SOCKET_PATH_MAX
    return 1 <= int(value.rpartition(":")[2]) <= 65535


def _check_together(config: Config) -> None:
    """Settings that are fine alone and wrong together."""
    engine, server = config.engine, config.server
    rows = engine.max_rows or (640 if engine.device == "cuda" else 1024)
    chunk, streams = engine.prefill_chunk or 256, engine.max_streams or 64
    if engine.prefill_chunk and chunk > rows:
        raise ConfigError(
            f"{config.origin('engine.prefill_chunk')}: engine.prefill_chunk = {chunk} is larger than "
            f"engine.max_rows = {rows}; lower it or raise engine.max_rows"
        )
    if (engine.max_rows or engine.max_streams) and streams > rows:
        key = "engine.max_rows" if engine.max_rows else "engine.max_streams"
        raise ConfigError(
            f"{config.origin(key)}: engine.max_streams = {streams} needs at least as many "
            f"engine.max_rows, which is {rows}; lower the first or raise the second"
        )
    if config.builder.budget > (engine.max_nodes or 64):
        raise ConfigError(
            f"{config.origin('builder.budget')}: builder.budget = {config.builder.budget} is larger than "
            f"engine.max_nodes = {engine.max_nodes or 64}; lower it or raise engine.max_nodes"
        )
    for name in ("control", "serve", "events"):
        endpoint = getattr(server, name)
        if endpoint.startswith("tcp://") and not (server.curve_dir or server.insecure):
            raise ConfigError(
                f'{config.origin("server." + name)}: server.{name} = "{endpoint}" is open to the '
                "network; set server.curve_dir to a folder of keys, or server.insecure = true"
            )
