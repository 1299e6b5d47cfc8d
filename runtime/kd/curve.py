"""CURVE keys for tcp endpoints: the key a client shows decides whether it may operate the daemon or only use it.

Daemon's folder:  server.key_secret, operators/*.key, clients/*.key     (operators may use both sockets)
Client's folder:  server.key, client.key_secret
All in the format of zmq.auth.create_certificates; `python -m kd.curve FOLDER` makes a set.
"""

from __future__ import annotations

import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from kd.config import ConfigError


def _secret(path: Path) -> tuple[bytes, bytes]:
    """(public, secret) of a certificate that only its owner can read. Raises ConfigError."""
    import zmq.auth

    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise ConfigError(f"{path}: is open to others; chmod it to 0600")
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: no CURVE certificate can be read ({error}): see python -m kd.curve") from None
    if secret is None:
        raise ConfigError(f"{path}: holds no secret key; use the .key_secret file")
    return public, secret


def _publics(folder: Path) -> set[bytes]:
    import zmq.auth

    keys = set()
    for path in sorted(folder.glob("*.key")):
        try:
            keys.add(zmq.auth.load_certificate(path)[0])
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: no CURVE certificate can be read ({error})") from None
    return keys


class _Allowed:
    """The ZAP callback of one socket: files are read again for every new connection, so keys can be added."""

    def __init__(self, folders: list[Path]):
        self._folders = folders

    def callback(self, domain: str, key: bytes) -> bool:
        """key: in Z85, as certificates have it."""
        try:
            return any(key in _publics(folder) for folder in self._folders)
        except ConfigError:
            return False  # fail closed


def server_side(context: zmq.Context, folder: Path) -> Callable[[str, zmq.Socket], None]:
    """Start the authenticator; returns what makes a socket ("control", "serve" or "events") speak CURVE."""
    from zmq.auth.thread import ThreadAuthenticator

    public, secret = _secret(folder / "server.key_secret")
    operators, clients = folder / "operators", folder / "clients"
    _publics(operators), _publics(clients)  # complain now, not at the first connection
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    for name, folders in (("control", [operators]), ("serve", [operators, clients]), ("events", [operators, clients])):
        authenticator.configure_curve_callback(domain=name, credentials_provider=_Allowed(folders))

    def prepare(name: str, socket: zmq.Socket) -> None:
        socket.zap_domain = name.encode()
        socket.curve_server, socket.curve_publickey, socket.curve_secretkey = True, public, secret

    prepare.authenticator = authenticator  # type: ignore[attr-defined]  # stopped before the context ends
    return prepare


def client_side(socket: Any, folder: Path) -> None:
    """Make a client's socket speak CURVE."""
    import zmq.auth

    public, secret = _secret(folder / "client.key_secret")
    try:
        server = zmq.auth.load_certificate(folder / "server.key")[0]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / 'server.key'}: no CURVE certificate can be read ({error})") from None
    socket.curve_serverkey, socket.curve_publickey, socket.curve_secretkey = server, public, secret


def create(folder: Path) -> None:
    """Make a daemon's folder and, in folder/operator and folder/client, one client's folder of each role."""
    import shutil

    import zmq.auth

    for part in ("operators", "clients", "operator", "client"):
        (folder / part).mkdir(mode=0o700, parents=True, exist_ok=True)
    zmq.auth.create_certificates(folder, "server")
    for role in ("operator", "client"):
        zmq.auth.create_certificates(folder / role, "client")
        (folder / role / "client.key_secret").chmod(0o600)
        shutil.move(folder / role / "client.key", folder / f"{role}s" / "first.key")
        shutil.copy(folder / "server.key", folder / role / "server.key")
    (folder / "server.key_secret").chmod(0o600)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m kd.curve FOLDER")
    create(Path(sys.argv[1]))
