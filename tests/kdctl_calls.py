"""kdctl as tests call it: in this process, with its output caught."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from types import SimpleNamespace

from kdctl import __main__ as entry

COMMAND = [sys.executable, "-m", "kdctl"]


def caller(capsys):
    """A fixture: kdctl("status", ...) -> code, out, err, and `json`, the one document of stdout."""

    def run(*words, code=0, endpoint=None):
        arguments = ["--endpoint", endpoint] if endpoint else []
        capsys.readouterr()
        got = entry.run([*arguments, *map(str, words)])
        out, err = capsys.readouterr()
        assert got == code, f"{words}: exit {got}, expected {code}\n{out}\n{err}"
        document = None
        if "json" in words and out:
            document = json.loads(out)
            assert re.fullmatch(r"kdctl/\w+\.v1", document["schema"])
            assert len(out.strip().splitlines()) == 1
        return SimpleNamespace(code=got, out=out, err=err, json=document)

    return run


def place_of(tmp_path, monkeypatch):
    """A folder for daemons that kdctl starts itself; whatever still runs at the end is killed."""
    monkeypatch.setenv("KD_SERVER_RUNTIME_DIR", str(tmp_path))
    yield tmp_path
    for lock in tmp_path.glob("*/daemon.lock"):
        pid = int(lock.read_text() or 0)
        try:
            if pid and b"kd" in open(f"/proc/{pid}/cmdline", "rb").read():
                os.kill(pid, signal.SIGKILL)
        except OSError:
            pass


def held_before_start(tmp_path_factory, monkeypatch):
    """A fixture: daemons wait, before a line of theirs runs, for somebody to open this FIFO."""
    hooks = tmp_path_factory.mktemp("hooks")
    os.mkfifo(hooks / "fifo")
    (hooks / "sitecustomize.py").write_text(f"open({str(hooks / 'fifo')!r}).close()\n")
    monkeypatch.setenv("PYTHONPATH", str(hooks))
    yield hooks / "fifo"
    os.close(os.open(hooks / "fifo", os.O_RDWR | os.O_NONBLOCK))
