"""Kimi's tokenizer files against kd.tokenizer, with atheris:  python tests/fuzz/fuzz_tokenizer.py [CORPUS] [libFuzzer's options]

An input is a byte that says which file, then the file. Nothing but TokenizerError may come out, with a printable sentence.
tests/test_checkpoint_fuzz.py replays the corpus without atheris.
"""

from __future__ import annotations

import base64
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "runtime"))

SPECIAL_FROM = 300  # ids below are ordinary


def one_input(data: bytes) -> str:
    """How the input ended: "accepted", or the sentence."""
    from kd.tokenizer import Tokenizer, TokenizerError, read_ranks, read_special

    if not data:
        return "empty"
    try:
        if data[0] & 1:
            PLACE.write_bytes(data[1:])
            special = read_special(PLACE, SPECIAL_FROM)
            assert len(set(special.values())) == len(special) and all(
                SPECIAL_FROM <= i < 1_000_000 for i in special.values()
            )
            return "accepted"
        # Every single byte is a token already, or nearly nothing would be accepted.
        head = b"".join(base64.b64encode(bytes([b])) + b" %d\n" % b for b in range(256)) if data[0] & 2 else b""
        PLACE.write_bytes(head + data[1:])
        ranks = read_ranks(PLACE)
        assert sorted(ranks.values()) == list(range(len(ranks))) and all(1 <= len(t) <= 256 for t in ranks)
        if len(ranks) < 600:
            tokenizer = Tokenizer(ranks, {"[EOS]": len(ranks)})
            text = data.decode("utf-8", "replace")
            assert tokenizer.decode(tokenizer.encode(text)) == text
            assert len(ranks) not in tokenizer.encode("[EOS]" + text)
        return "accepted"
    except TokenizerError as error:
        assert str(error).isprintable() and len(str(error)) < 2000, str(error)
        return str(error)


PLACE = Path(tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)) / "file"

if __name__ == "__main__":
    import atheris

    with atheris.instrument_imports(include=["kd.tokenizer", "kd.files"]):
        import kd.tokenizer  # noqa: F401
    atheris.Setup(sys.argv, lambda data: one_input(data) and None)
    atheris.Fuzz()
