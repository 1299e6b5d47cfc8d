"""Where an instance's files are: its sockets, its lock, its log. Used by the daemon and by clients.

The names are part of `kd.config`; they live here because the two do not need each other.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SOCKET_PATH_MAX = 107  # bytes of sockaddr_un.sun_path, the ending zero not counted
INSTANCE = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
INSTANCE_ALLOWED = "lower-case letters, digits, - and _, at most 32 of them"


class ConfigError(ValueError):
    """A configuration the daemon cannot start with. The message says where, which key, and what is allowed."""

    exit_code = 78


@dataclass(frozen=True)
class Paths:
    """The files of one instance. `shared`: the folder was made by systemd, whose group may pass through it."""

    dir: Path
    shared: bool = False

    @property
    def control(self) -> Path:
        return self.dir / "control.sock"

    @property
    def serve(self) -> Path:
        return self.dir / "serve.sock"

    @property
    def events(self) -> Path:
        return self.dir / "events.sock"

    @property
    def lock(self) -> Path:
        return self.dir / "daemon.lock"

    @property
    def steps(self) -> Path:
        return self.dir / "steps"

    @property
    def log(self) -> Path:
        return self.dir / "daemon.log"

    @property
    def started(self) -> Path:
        """What `kdctl start` was told, for `kdctl restart`."""
        return self.dir / "started.json"


def paths(instance: str = "default", *, runtime_dir: str = "", env: Mapping[str, str] | None = None) -> Paths:
    """Where the instance's files are or will be; touches nothing. Raises ConfigError for a name or path that cannot be.

    Folder: runtime_dir, else $RUNTIME_DIRECTORY (systemd), else $XDG_RUNTIME_DIR/kd, else /tmp/kd-<uid>; below it the
    instance's name, unless systemd's folder already ends in it (RuntimeDirectory=kd/%i).
    """
    env = os.environ if env is None else env
    if not INSTANCE.fullmatch(instance):
        raise ConfigError(f"server.instance = {short(instance)} is not allowed; it must be {INSTANCE_ALLOWED}")
    shared = False
    if runtime_dir:
        base = Path(runtime_dir)
    elif env.get("RUNTIME_DIRECTORY"):
        base, shared = Path(env["RUNTIME_DIRECTORY"].partition(":")[0]), True
    elif env.get("XDG_RUNTIME_DIR"):
        base = Path(env["XDG_RUNTIME_DIR"]) / "kd"
    else:
        base = Path(f"/tmp/kd-{os.geteuid()}")
    if not base.is_absolute():
        raise ConfigError(
            f"the runtime folder {short(str(base))} is not an absolute path; set server.runtime_dir to one that is"
        )
    found = Paths(base if shared and base.name == instance else base / instance, shared)
    if len(os.fsencode(found.control)) > SOCKET_PATH_MAX:
        raise ConfigError(
            f"the socket path {found.control} is longer than the {SOCKET_PATH_MAX} bytes a Unix socket "
            "may have; set server.runtime_dir to a shorter folder"
        )
    return found


def find(instance: str = "default", *, env: Mapping[str, str] | None = None) -> Paths:
    """For clients: the first folder in which the instance has a control or serve socket, else where one would be.

    Looks in KD_SERVER_RUNTIME_DIR alone if set, else where `paths()` says and in /run/kd (the system service). A folder
    that another user made where ours should be is passed over: its sockets are not our daemon's.
    """
    env = os.environ if env is None else env
    given = env.get("KD_SERVER_RUNTIME_DIR", "")
    here = paths(instance, runtime_dir=given, env=env)
    if given:
        return here
    for place in (here, Paths(Path("/run/kd") / instance, shared=True)):
        if place is here and _owner(place.dir) not in (None, 0, os.geteuid()):
            continue
        if place.serve.exists() or place.control.exists():
            return place
    return here


def _owner(path: Path) -> int | None:
    try:
        return os.lstat(path).st_uid
    except OSError:
        return None


def make_dirs(where: Paths, *, group: str = "") -> None:
    """Create the instance's folder and the one above, or check those that are there: ours (or root's above), no link,
    writable by nobody else, and the instance's folder closed to others. group: its members may pass through (mode
    0710), so that they reach the serve socket. Raises ConfigError."""
    gid = -1
    if group:
        import grp

        try:
            gid = grp.getgrnam(group).gr_gid
        except KeyError:
            raise ConfigError(
                f"server.serve_group = {short(group)}: there is no such group; create it or leave it out"
            ) from None
    for path in (where.dir.parent, where.dir):
        try:
            os.mkdir(path, 0o750 if where.shared else 0o700)
        except FileExistsError:
            pass
        except OSError as error:
            raise ConfigError(
                f"{path}: cannot be created ({error.strerror}); set server.runtime_dir to a folder this user may write"
            ) from None
        _check_dir(path, above=path != where.dir, shared=where.shared or bool(group))
        if group and os.lstat(path).st_uid == os.geteuid() and not where.shared:
            try:
                os.chown(path, -1, gid)
                os.chmod(path, 0o710)
            except OSError as error:
                raise ConfigError(
                    f"{path}: cannot be given to group {group} ({error.strerror}); the daemon's user must be a member"
                ) from None


def _check_dir(path: Path, *, above: bool, shared: bool) -> None:
    try:
        info = os.lstat(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be checked ({error.strerror}); remove what is there") from None
    if not stat.S_ISDIR(info.st_mode):
        raise ConfigError(f"{path}: is not a folder but a link or a file; remove it, or set server.runtime_dir")
    if info.st_uid != os.geteuid() and not (above and info.st_uid == 0):
        raise ConfigError(
            f"{path}: belongs to user {info.st_uid}, not to {os.geteuid()}; remove it, or set server.runtime_dir"
        )
    # Whoever can write in the folder above can replace ours; whoever can write in ours can replace a socket.
    if info.st_mode & (0o022 if above or shared else 0o077):
        raise ConfigError(f"{path}: is open to others (mode {stat.S_IMODE(info.st_mode):04o}); chmod it to 0700")


def short(value: object) -> str:
    """A value as it may stand in a message: quoted, printable, not long."""
    text = value if isinstance(value, str) else repr(value)
    text = text if len(text) <= 80 else text[:77] + "..."
    text = "".join(c if c.isprintable() else "?" for c in text)
    return f'"{text}"' if isinstance(value, str) else text
