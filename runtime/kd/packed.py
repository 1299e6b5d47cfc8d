"""What packed files say of themselves: native/model/packed.h."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from xxhash import xxh3_64_intdigest

from kd.files import read_bounded, why
from kd.hashing import Segment
from kd.headers import MAX_TP, BadFile, Header, open_file

PACKED_PIECE_BYTES = 16 << 20  # kPieceBytes
MAX_CONFIG_BYTES = 1 << 20
AGAIN = "convert the checkpoint again"


@dataclass(frozen=True)
class Packed:
    """segments and hashes: of the pieces of its parts. draft: whether a drafter is packed with it."""

    tp: int
    rank: int
    segments: list[Segment]
    hashes: list[int]
    content_hash: int
    target_hash: int
    config_hash: int
    draft_config_hash: int

    @property
    def draft(self) -> bool:
        return self.draft_config_hash != 0

    def belongs(self, file: str, first: Packed) -> None:
        """Raises BadFile if it is not the file of its rank, or not of the folder that `first` is of."""
        if file != f"packed-rank-{self.rank}.safetensors":
            raise BadFile(f"was written as the file of rank {self.rank}: {AGAIN}", "", 0)
        if self.tp != first.tp or self.rank >= self.tp:
            raise BadFile(f"was packed for {self.tp} ranks, the others for {first.tp}: {AGAIN}", "", 0)
        if (self.content_hash, self.target_hash) != (first.content_hash, first.target_hash):
            raise BadFile(f"was packed from another checkpoint than packed-rank-{first.rank}: {AGAIN}", "", 0)

    def other_configs(self, folder: Path, follow_links: bool) -> Iterator[tuple[str, str, int, str]]:
        """A Fault's members for each config beside it that is not the one it was packed with."""
        for name, expected in (("config.json", self.config_hash), ("draft/config.json", self.draft_config_hash)):
            if expected == 0:
                continue
            try:
                found = max(1, xxh3_64_intdigest(read_bounded(folder / name, MAX_CONFIG_BYTES, follow_links)))
            except OSError as error:
                yield name, "", -1, f"cannot be read ({why(error)})"
                continue
            if found != expected:
                yield name, "", -1, f"is not the one the folder was packed with: {AGAIN}"


def read_packed(path: Path, header: Header, follow_links: bool) -> Packed:
    """Raises BadFile, OSError."""
    about = header.metadata
    try:
        if about["format"] != "kd-packed":
            raise ValueError("its format is another")
        tp, rank = int(about["tp"]), int(about["rank"])
        if not 0 <= rank < MAX_TP or not 1 <= tp <= MAX_TP:
            raise ValueError(f"rank {rank} of {tp}")
        digits = about["hashes"]
        values = {
            name: int(about[name], 16) for name in ("content_hash", "target_hash", "config_hash", "draft_config_hash")
        }
        hashes = [int(digits[i : i + 16], 16) for i in range(0, len(digits), 16)]
        expected = about["header_hash"]
    except (KeyError, ValueError) as error:
        raise BadFile(f"is no packed file of kd, or a damaged one ({error}): {AGAIN}", "", 8) from None
    fd, _ = open_file(path, follow_links)
    try:
        text = os.pread(fd, header.begin, 0)
    finally:
        os.close(fd)
    own = b'"header_hash":"%s"' % expected.encode()
    zeroed = text.replace(own, b'"header_hash":"%s"' % (b"0" * 16), 1)
    if own not in text or f"{xxh3_64_intdigest(zeroed):016x}" != expected:
        raise BadFile(f"bytes 0 to {header.begin} (its header) are not those that were written: {AGAIN}", "", 0)
    segments = [
        Segment(at, min(at + PACKED_PIECE_BYTES, part.end))
        for part in header.tensors.values()
        for at in range(part.begin, part.end, PACKED_PIECE_BYTES)
    ]
    if len(segments) != len(hashes):
        raise BadFile(f"has {len(hashes)} hashes of {len(segments)} pieces: {AGAIN}", "", 8)
    return Packed(tp, rank, segments, hashes, **values)
