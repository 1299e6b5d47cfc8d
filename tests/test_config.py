"""kd.config: five places and who wins, what is refused and how it is said, and where an instance lives."""

import os
import socket
import stat
import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path

import pytest

from kd import config
from kd.config import SECTIONS, SETTINGS, TABLE, ConfigError, Paths

ROOT = Path(__file__).resolve().parent.parent


def load(tmp_path, *, kd=None, instances=(), flags=None, env=None, file=None):
    if kd is not None:
        (tmp_path / "kd.toml").write_text(kd)
    for name, text in dict(instances).items():
        (tmp_path / f"{name}.toml").write_text(text)
    return config.load(flags=flags, env=env or {}, file=file, etc=tmp_path)


def test_built_in(tmp_path):
    found = load(tmp_path)
    assert found == config.Config()
    assert [key for key, _, _ in found.items()] == [row.key for row in TABLE]
    assert all(value == SETTINGS[key].default and origin == "built-in" for key, value, origin in found.items())


def test_precedence_one_place_at_a_time(tmp_path):
    """flag > environment > instance file > kd.toml > built-in, and `origin` says which."""
    kd, instance = str(tmp_path / "kd.toml"), str(tmp_path / "default.toml")
    found = load(tmp_path)
    assert (found.engine.threads, found.origin("engine.threads")) == (0, "built-in")
    found = load(tmp_path, kd="[engine]\nthreads = 1\n")
    assert (found.engine.threads, found.origin("engine.threads")) == (1, kd)
    found = load(tmp_path, instances={"default": "[engine]\nthreads = 2\n"})
    assert (found.engine.threads, found.origin("engine.threads")) == (2, instance)
    env = {"KD_ENGINE_THREADS": "3"}
    found = load(tmp_path, env=env)
    assert (found.engine.threads, found.origin("engine.threads")) == (3, "environment KD_ENGINE_THREADS")
    found = load(tmp_path, env=env, flags={"engine.threads": 4})
    assert (found.engine.threads, found.origin("engine.threads")) == (4, "flag")
    found = load(tmp_path, env=env, flags={"engine.threads": None})
    assert found.engine.threads == 3, "a flag that was not given wins over nothing"
    assert found.origin("engine.tp") == "built-in"


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.key)
def test_every_setting_from_every_place(tmp_path, row):
    value = other(row)
    as_toml = f'"{value}"' if isinstance(value, str) else str(value).lower()
    section, _, name = row.key.partition(".")
    extra = {"server.insecure": True} if row.kind == "endpoint" else {}
    if row.key != "server.instance":
        assert load(tmp_path, kd=f"[{section}]\n{name} = {as_toml}\n", flags=extra).get(row.key) == value
        (tmp_path / "kd.toml").unlink()
    text = str(value).lower() if isinstance(value, bool) else str(value)
    assert load(tmp_path, env={row.env: text}, flags=extra).get(row.key) == value
    assert load(tmp_path, flags={row.key: text} | extra).get(row.key) == value
    assert load(tmp_path, flags={row.key: value} | extra).get(row.key) == value


def other(row):
    """A good value that is not the default."""
    if row.choices:
        return next(c for c in row.choices if c != row.default)
    return (
        {
            "bool": not row.default,
            "int": row.high if row.key != "engine.prefill_chunk" else 64,
            "bytes": row.high,
            "endpoint": "tcp://127.0.0.1:5555",
            "path": "/srv/x",
            "name": "other",
            "str": "word",
        }[row.kind]
        if row.key not in ("builder.budget", "engine.max_rows")
        else 64
    )


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.key)
def test_every_setting_refuses_nonsense(tmp_path, row):
    wrong = {
        "bool": ["maybe", 1, []],
        "int": ["many", row.low, 1.5, True, [], -(1 << 70)],
        "bytes": ["2 GB", "-1", -1, 1.5, True, "1e9"],
        "endpoint": ["tcp://x", "http://x:1", "ipc://rel", 7, "tcp://h:0", "tcp://h:65536", "ipc:///" + "x" * 120],
        "path": ["a\nb", 7, "a\0b", "x" * 5000],
        "name": ["", "Upper", "../x", "x" * 33, "-x", 7],
        "str": ["a\nb", 7],
    }[row.kind]
    if row.choices:
        wrong = ["nonsense", 3, True, []]
    for value in wrong:
        if (value == row.low and row.kind == "int") or (value == "" and row.default == ""):
            continue
        with pytest.raises(ConfigError) as error:
            load(tmp_path, flags={row.key: value})
        assert row.key in str(error.value) and row.allowed in str(error.value)
    if row.low is not None:
        for value in (row.low - 1, row.high + 1):
            with pytest.raises(ConfigError, match=f"{row.low} to {row.high}"):
                load(tmp_path, flags={row.key: value})


def test_errors_name_place_key_and_what_is_allowed(tmp_path):
    place = tmp_path / "kd.toml"
    for text, says in [
        ("[engine]\ntp = 3\n", f"{place}: engine.tp = 3 is not allowed; it must be one of 1, 2, 4, 8"),
        ('[engine]\ntp = "2"\n', f'{place}: engine.tp = "2" is not allowed'),
        ("[engine]\nprefix_cache = 1\n", "it must be true or false"),
        ("[engine]\ntpp = 2\n", f'{place}: there is no setting "engine.tpp"; did you mean engine.tp?'),
        ("[engine]\nqqqqqqqq = 2\n", "[engine] has: device, tp, threads"),
        ("[motor]\ntp = 2\n", 'there is no section [""motor""]'.replace('""', '"')),
        ("tp = 2\n", "there is no section"),
        ("[engine\n", f"{place}: is not valid TOML"),
        ("[engine]\ntp = 1\ntp = 2\n", "is not valid TOML"),
    ]:
        with pytest.raises(ConfigError) as error:
            load(tmp_path, kd=text)
        assert says in str(error.value), text
        assert error.value.exit_code == 78
    place.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        load(tmp_path)
    place.write_bytes(b"#" * (config.MAX_FILE_BYTES + 1))
    with pytest.raises(ConfigError, match="is larger than"):
        load(tmp_path)
    place.write_bytes(b"x = " + b"[" * 100_000)
    with pytest.raises(ConfigError, match="is not valid TOML"):
        load(tmp_path)
    place.unlink()
    place.mkdir()
    with pytest.raises(ConfigError, match="is not a file"):
        load(tmp_path)


def test_environment(tmp_path):
    with pytest.raises(ConfigError, match="environment KD_ENGINE_TPP.*did you mean engine.tp"):
        load(tmp_path, env={"KD_ENGINE_TPP": "2"})
    with pytest.raises(ConfigError, match="environment KD_ENGINE_TP: engine.tp = 3"):
        load(tmp_path, env={"KD_ENGINE_TP": "3"})
    assert load(tmp_path, env={"KD_PORT": "tcp://10.0.0.1:80", "KD_INSTANCE": "x", "PATH": "/bin"}) == config.Config()
    for word, value in (("true", True), ("ON", True), ("0", False), ("no", False)):
        assert load(tmp_path, env={"KD_ENGINE_PREFIX_CACHE": word}).engine.prefix_cache is value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("12345", 12345),
        ("4096 B", 4096),
        ("64KiB", 65536),
        ("128 MiB", 1 << 27),
        ("2 GiB", 1 << 31),
        ("1TiB", 1 << 40),
    ],
)
def test_sizes(tmp_path, text, value):
    assert load(tmp_path, env={"KD_ENGINE_KV_BYTES": text}).engine.kv_bytes == value
    assert load(tmp_path, kd=f'[engine]\nkv_bytes = "{text}"\n').engine.kv_bytes == value


def test_instances(tmp_path):
    files = {"blue": "[engine]\ntp = 2\n", "green": "[engine]\ntp = 4\n"}
    assert load(tmp_path, instances=files).engine.tp == 1
    assert load(tmp_path, flags={"server.instance": "blue"}).engine.tp == 2
    assert load(tmp_path, env={"KD_SERVER_INSTANCE": "green"}).engine.tp == 4
    assert load(tmp_path, env={"KD_SERVER_INSTANCE": "green"}, flags={"server.instance": "blue"}).engine.tp == 2
    found = load(tmp_path, kd='[server]\ninstance = "green"\n')
    assert (found.engine.tp, found.server.instance) == (4, "green")
    (tmp_path / "blue.toml").write_text('[server]\ninstance = "red"\n')
    with pytest.raises(ConfigError, match='blue.toml: server.instance = "red" contradicts'):
        load(tmp_path, flags={"server.instance": "blue"})


def test_a_file_given_by_name_is_read_alone(tmp_path):
    path = tmp_path / "mine.conf"
    path.write_text("[engine]\nthreads = 5\n")
    found = load(tmp_path, kd="[engine]\ntp = 2\n", instances={"default": "[engine]\ntp = 4\n"}, file=path)
    assert (found.engine.threads, found.engine.tp) == (5, 1)
    assert found.origin("engine.threads") == str(path)
    with pytest.raises(ConfigError, match="absent.toml: there is no such file"):
        load(tmp_path, file=tmp_path / "absent.toml")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"engine.prefill_chunk": 128, "engine.max_rows": 64, "engine.max_streams": 4}, "engine.prefill_chunk = 128"),
        ({"engine.max_rows": 32}, "engine.max_streams = 64 needs"),
        ({"builder.budget": 65}, "engine.max_nodes = 64"),
        ({"engine.max_nodes": 16, "builder.budget": 17}, "engine.max_nodes = 16"),
        ({"server.serve": "tcp://0.0.0.0:1"}, "is open to the network"),
    ],
)
def test_settings_that_contradict_each_other(tmp_path, flags, says):
    with pytest.raises(ConfigError) as error:
        load(tmp_path, flags=flags)
    assert says in str(error.value) and "flag" in str(error.value)


def test_tcp_with_keys_or_insecure(tmp_path):
    flags = {"server.control": "tcp://*:7000", "server.serve": "tcp://[::1]:7001"}
    load(tmp_path, flags=flags | {"server.insecure": True})
    load(tmp_path, flags=flags | {"server.curve_dir": "/etc/kd/curve"})


def test_engine_settings_are_the_engines_arguments():
    """Engine(**asdict(config.engine)): same names."""
    import ast

    tree = ast.parse((ROOT / "runtime/kd/engine.py").read_text())
    engine = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Engine")
    init = next(n for n in engine.body if isinstance(n, ast.FunctionDef) and n.name == "__init__")
    assert set(asdict(config.EngineConfig())) <= {a.arg for a in init.args.kwonlyargs}


def test_table_is_complete_and_documented():
    assert len(TABLE) == sum(len(fields(cls)) for cls in SECTIONS.values()) == len({row.env for row in TABLE})
    for row in TABLE:
        assert row.help and row.allowed and row.parse(row.default, "here", text=False) == row.default
    with pytest.raises(KeyError):
        config.Config().get("engine.tpp")
    with pytest.raises(KeyError):
        config.Config().origin("engine.tpp")


def test_limits_are_those_of_the_header():
    from kd.native import constants

    assert SETTINGS["engine.max_streams"].high == constants["KD_MAX_STREAMS"]
    assert SETTINGS["engine.max_queue"].high == constants["KD_MAX_QUEUE"]
    assert SETTINGS["engine.max_nodes"].high == SETTINGS["builder.budget"].high == constants["KD_MAX_NODES"]
    assert SETTINGS["engine.tp"].choices[-1] == constants["KD_MAX_TP"]


def test_import_is_light():
    code = "import kd.config, sys; print(*sorted(sys.modules))"
    out = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "runtime")},
    ).stdout.split()
    assert not {"cffi", "numpy", "tiktoken", "jinja2", "tomllib", "kd.native", "zmq"} & set(out)


# ---- where an instance lives -----------------------------------------------------------------------------------------


def test_paths(tmp_path):
    uid = os.geteuid()
    assert config.paths(env={}).dir == Path(f"/tmp/kd-{uid}/default")
    assert config.paths(env={"XDG_RUNTIME_DIR": "/run/user/7"}).dir == Path("/run/user/7/kd/default")
    both = {"XDG_RUNTIME_DIR": "/run/user/7", "RUNTIME_DIRECTORY": "/run/kd"}
    assert config.paths("blue", env=both) == Paths(Path("/run/kd/blue"), shared=True)
    assert config.paths("blue", env={"RUNTIME_DIRECTORY": "/run/kd/blue:/run/x"}).dir == Path("/run/kd/blue")
    assert config.paths("blue", runtime_dir="/srv/kd", env=both) == Paths(Path("/srv/kd/blue"))
    names = config.paths(env={})
    assert [p.name for p in (names.control, names.serve, names.events, names.lock, names.log)] == [
        "control.sock",
        "serve.sock",
        "events.sock",
        "daemon.lock",
        "daemon.log",
    ]
    for bad in ("", "../x", "A", "a/b", "x" * 33):
        with pytest.raises(ConfigError, match="server.instance"):
            config.paths(bad, env={})
    with pytest.raises(ConfigError, match="longer than the 107 bytes"):
        config.paths(runtime_dir="/" + "x" * 90, env={})
    with pytest.raises(ConfigError, match="not an absolute path"):
        config.paths(runtime_dir="run", env={})


def mode(path):
    return stat.S_IMODE(os.lstat(path).st_mode)


@pytest.fixture
def short(tmp_path_factory):
    """A folder of ours whose name leaves room for socket paths."""
    return tmp_path_factory.mktemp("r")


def test_make_dirs(short):
    old = os.umask(0o000)  # the mode must not depend on it
    try:
        where = Paths(short / "kd" / "default")
        config.make_dirs(where)
        config.make_dirs(where)
        assert mode(where.dir) == mode(where.dir.parent) == 0o700
        shared = Paths(short / "run" / "default", shared=True)
        config.make_dirs(shared)
        assert mode(shared.dir) == 0o750
    finally:
        os.umask(old)


def test_make_dirs_for_a_group(short):
    import grp

    group = grp.getgrgid(os.getegid()).gr_name
    where = Paths(short / "kd" / "default")
    config.make_dirs(where, group=group)
    config.make_dirs(where, group=group)
    assert mode(where.dir) == 0o710 and os.lstat(where.dir).st_gid == os.getegid()
    with pytest.raises(ConfigError, match="there is no such group"):
        config.make_dirs(where, group="no-such-group-here")


@pytest.mark.parametrize("level", ["above", "own"])
def test_make_dirs_refuses_what_is_not_ours(short, level):
    where = Paths(short / "kd" / "default")
    config.make_dirs(where)
    path = where.dir if level == "own" else where.dir.parent
    os.chmod(path, 0o777)
    with pytest.raises(ConfigError, match=r"is open to others \(mode 0777\)"):
        config.make_dirs(where)
    os.chmod(path, 0o700)
    where.dir.rmdir()
    if level == "above":
        where.dir.parent.rmdir()
    elsewhere = short / "elsewhere"
    elsewhere.mkdir()
    path.symlink_to(elsewhere)
    with pytest.raises(ConfigError, match="is not a folder but a link"):
        config.make_dirs(where)
    path.unlink()
    path.write_text("")
    with pytest.raises(ConfigError, match="is not a folder but a link or a file"):
        config.make_dirs(where)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
@pytest.mark.parametrize("level", ["above", "own"])
def test_make_dirs_refuses_another_users(short, level):
    where = Paths(short / "kd" / "default")
    config.make_dirs(where)
    os.chown(where.dir if level == "own" else where.dir.parent, 65534, -1)
    with pytest.raises(ConfigError, match="belongs to user 65534"):
        config.make_dirs(where)


def test_make_dirs_says_why_it_cannot(short):
    with pytest.raises(ConfigError, match="cannot be created .*server.runtime_dir"):
        config.make_dirs(Paths(short / "absent" / "kd" / "default"))


def test_find(short):
    env = {"XDG_RUNTIME_DIR": str(short)}
    here = short / "kd" / "default"
    assert config.find(env=env).dir == here, "where it would be"
    config.make_dirs(Paths(here))
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(str(here / "serve.sock"))
    assert config.find(env=env).dir == here
    assert config.find(env={**env, "KD_SERVER_RUNTIME_DIR": "/srv"}).dir == Path("/srv/default")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_find_passes_over_another_users_folder(short, monkeypatch):
    here = short / "kd" / "default"
    config.make_dirs(Paths(here))
    (here / "serve.sock").write_text("")
    os.chown(here, 65534, -1)
    asked = []
    monkeypatch.setattr(Paths, "serve", property(lambda self: asked.append(self.dir) or self.dir / "serve.sock"))
    config.find(env={"XDG_RUNTIME_DIR": str(short)})
    assert here not in asked
