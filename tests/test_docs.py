"""The documents: console blocks do what they show, links lead somewhere, tables say what the code says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kd import config as configuration

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "models" / "nano" / "MODEL_CARD.md"])

# Commands that are not run here, and where or why not.
ELSEWHERE = {
    "make demo": "run by whoever builds; its parts are tests/test_kdctl*.py",
    "make test": "this is it",
}


@dataclass
class Command:
    """A line `$ command` of a console block and the lines shown below it. `# command`: as root, on a real machine."""

    page: str
    line: str
    shown: list[str] = field(default_factory=list)
    as_root: bool = False


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(page: Path) -> Iterator[list[Command]]:
    for block in re.findall(r"^```console\n(.*?)^```$", page.read_text(), re.M | re.S):
        commands: list[Command] = []
        for line in block.splitlines():
            if line.startswith(("$ ", "# ")):
                commands.append(Command(name(page), line[2:], as_root=line.startswith("# ")))
            else:
                assert commands, f"{name(page)}: a console block starts with output: {line!r}"
                commands[-1].shown.append(line)
        yield commands


def plain(text: str) -> list[str]:
    """What a run may change is masked: numbers, paths, the width of columns, the order of stdout and stderr."""
    text = re.sub(r"(?:ipc://)?/\S+", "PATH", text)
    text = re.sub(r"\d+(?:\.\d+)?", "N", text)
    return sorted(" ".join(line.split()) for line in text.splitlines() if line.strip())


CONSOLE = [(f"{name(page)}-{i}", block) for page in PAGES for i, block in enumerate(blocks(page))]


@pytest.mark.parametrize("block", [b for _, b in CONSOLE], ids=[i for i, _ in CONSOLE])
def test_commands_do_what_the_page_shows(block, tmp_path, library):
    scripts = tmp_path / "bin"
    scripts.mkdir()
    kdctl = scripts / "kdctl"
    kdctl.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m kdctl "$@"\n')
    kdctl.chmod(0o755)
    (tmp_path / "run").mkdir(mode=0o700)
    env = {**os.environ, "KD_SERVER_RUNTIME_DIR": str(tmp_path / "run"), "NO_COLOR": "1"}
    env["KD_BUILDER_NAME"] = "heap"  # as the pages say: which one is the fastest is no matter of documents
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "runtime"), str(ROOT)])
    try:
        for command in block:
            if command.as_root or command.line in ELSEWHERE:
                continue
            line = command.line.replace(".venv/bin/kdctl", str(kdctl)).replace(
                "build/out/embed", str(scripts / "embed")
            )
            done = subprocess.run(["bash", "-c", line], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, f"{command.page}: $ {command.line}\n{done.stdout}{done.stderr}"
            if command.shown:
                want = plain("\n".join(command.shown))
                # Progress on stderr is not shown in the page; a program's own summary may be.
                got = plain(done.stdout)
                if got != want:
                    got = plain(done.stdout + done.stderr)
                assert got == want, f"{command.page}: $ {command.line}"
    finally:
        subprocess.run([str(kdctl), "-q", "stop", "--now"], cwd=ROOT, env=env, capture_output=True, timeout=60)


def test_commands_as_root_name_files_that_exist():
    for _, block in CONSOLE:
        for command in block:
            for file in re.findall(r"\b(?:systemd|models)/[\w./@-]*\w", command.line if command.as_root else ""):
                if not file.startswith(("systemd/system", "models/nano/")):
                    assert (ROOT / file).exists(), f"{command.page}: # {command.line}: there is no {file}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{name(page)}: {target} is not there"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_files_a_page_names_exist(page):
    folders = "native|tests|runtime|kdctl|include|docs|systemd|examples|build|bench"
    for file in re.findall(rf"`((?:{folders})/[\w./@-]+)`", page.read_text()):
        if not re.match(r"build/out|native/cuda", file):
            assert (ROOT / file).exists(), f"{name(page)} speaks of {file}, which is not there"


def test_every_document_can_be_reached_from_the_readme():
    seen, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page in seen:
            continue
        seen.add(page)
        text = page.read_text()
        for other in PAGES:
            if other not in seen and (name(other) in text or f"({other.name}" in text):
                todo.append(other)
    assert seen == set(PAGES), f"no page mentions {[name(p) for p in set(PAGES) - seen]}"


def test_operations_lists_every_setting():
    text = (ROOT / "docs" / "operations.md").read_text()
    listed = dict(re.findall(r"^\| `(\w+\.\w+)` \| `([^`]*)` \|", text, re.M))
    want = {
        r.key: str(r.default).lower() if isinstance(r.default, bool) else str(r.default) for r in configuration.TABLE
    }
    assert {key: value.strip('"') for key, value in listed.items()} == want
    told = dict(re.findall(r"^\| `(\w+\.\w+)` \| `[^`]*` \| (.*) \|$", text, re.M))
    for row in configuration.TABLE:
        assert told[row.key] == row.help + (f" ({row.allowed})" if row.choices else "")


def test_operations_lists_every_exit_status():
    from kd import __main__ as main
    from kd import state

    text = (ROOT / "docs" / "operations.md").read_text()
    listed = {int(n) for n in re.findall(r"^\| (\d+) \|", text, re.M)}
    known = {0, main.EX_USAGE, state.EX_DATA, state.EX_RUNNING, state.EX_SOFTWARE, state.EX_OS, state.EX_CONFIG}
    assert listed == known
    prevented = re.search(r"^RestartPreventExitStatus=(.*)$", (ROOT / "systemd" / "kd@.service").read_text(), re.M)[1]
    for status, restarted in re.findall(r"^\| (\d+) \|.*\| (yes|no) \|$", text, re.M):
        assert (restarted == "no") == (status == "0" or status in prevented.split()), f"status {status}"


def test_python_in_the_readme_runs(library, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    for code in re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S):
        exec(compile(code, "README.md", "exec"), {})
    assert "tokens in" in capsys.readouterr().out


SHOWN = [
    (page, line)
    for page in PAGES
    for block in re.findall(r"^```\w*\n(.*?)^```$", page.read_text(), re.M | re.S)
    for line in block.splitlines()
    if re.match(r"(?:[$#] )?\.venv/bin/kdctl \w", line)
]


@pytest.mark.parametrize(("page", "line"), SHOWN, ids=[f"{name(page)}: {line}" for page, line in SHOWN])
def test_options_that_are_shown_exist(page, line):
    """Also in blocks that are not run here, such as those for a machine with a GPU."""
    from kdctl.__main__ import cli

    words = line.split("#")[0].split("kdctl", 1)[1].split()
    while words and words[0].startswith("-"):  # options of kdctl itself
        words = words[2:]
    command = cli
    while words and hasattr(command, "get_command"):
        command = command.get_command(None, words.pop(0))
        assert command is not None, line
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    for option in (word.split("=")[0] for word in words if word.startswith("--") and len(word) > 2):
        assert option in known | {"--help"}, f"{name(page)}: {line}: no {option}"
