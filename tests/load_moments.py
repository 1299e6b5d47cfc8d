"""What the tests of a replacement under way share: two models that tell themselves apart, and who asks them meanwhile."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

from daemons import Daemon
from fake_model import SMALL3, write_model

from kd import Engine
from kd.client import KdClientError
from kd.tokenizer import Tokenizer

TEXT_FILES = ("tiktoken.model", "tokenizer_config.json", "chat_template.jinja")
PROMPT = "def greet(name):\n    return"
MOST = 40
SHAPE = {**SMALL3, "vocab": 4096}


def write_pair(base: Path, nano: Path) -> tuple[Path, Path]:
    """Both have a tokenizer, and not the same: two tokens of PROMPT have changed their places in the second."""
    folders = base / "a", base / "b"
    for seed, folder in enumerate(folders):
        write_model(folder, **{**SHAPE, "seed": 41 + seed})
        for name in TEXT_FILES:
            shutil.copy(nano / name, folder / name)
    place = folders[1] / "tiktoken.model"
    lines = place.read_bytes().splitlines()
    i, j = Tokenizer.load(folders[0]).encode(PROMPT)[:2]  # a line a rank
    first, second = lines[i].split(), lines[j].split()
    lines[i], lines[j] = second[0] + b" " + first[1], first[0] + b" " + second[1]
    place.write_bytes(b"\n".join(lines) + b"\n")
    return folders


def answers(library, folder: Path) -> tuple[list[int], list[int]]:
    """Tokens and hashes of PROMPT, as the daemon must give them."""
    with Engine(folder, threads=1, library=library) as engine:
        got = engine.generate(PROMPT, max_tokens=MOST, ignore_eos=True, cold=True, hash_logits=True)
        return got.tokens, got.hashes


def write_golden(library, folder: Path, **changes) -> None:
    with Engine(folder, threads=1, library=library) as engine:
        tokens = engine.generate([1, 2, 3], max_tokens=6, ignore_eos=True).tokens
        content = f"{engine.info.content_hash:016x}"
    golden = {"prompt_tokens": [1, 2, 3], "tokens": tokens, "content_hash": content, **changes}
    (folder / "golden.json").write_text(json.dumps(golden))


class Asking:
    """A client that asks all the time and keeps what it was answered; every answer must be one of `known`, whole."""

    def __init__(self, daemon: Daemon, known: list[tuple[list[int], list[int]]]):
        self.daemon, self.known = daemon, known
        self.answered, self.wrong = 0, []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with self.daemon.client(timeout_s=60) as client:
            while not self._stop.is_set():
                try:
                    got = client.generate(
                        PROMPT, max_tokens=MOST, ignore_eos=True, hash_logits=True, cold=self.answered % 2 == 0
                    )
                    if (got.tokens, got.hashes) not in self.known:
                        self.wrong.append((got.finish, got.error, got.message, got.tokens[:8]))
                    self.answered += 1
                except KdClientError as error:
                    if error.name not in ("DRAINING", "NOT_READY"):
                        self.wrong.append(("refused", error.name, error.message, []))

    def __enter__(self) -> Asking:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)
