"""Where two greedy texts part, and how close the choices were that they hang on: of the token, and of experts.

A score of a router is a sum whose rounding depends on the degree of parallelism. Where the last expert taken is hardly better
than the first left out, another one may be taken, which moves what comes of that row by far more than a rounding: the logits of
its position, and in every layer but the last also keys and values that all later positions read."""

from __future__ import annotations

import ctypes
import json
import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np
import ref
from ref import model as spec

import kd
from kd.native import ffi


class Parting(NamedTuple):
    prompt: int  # tokens
    token: int  # the first that differs, of those after the prompt
    gap: float  # of the two best logits there
    margin: float  # the smallest router margin that can have moved them
    position: int  # where that is; the logits are those of position prompt + token - 1


def read_tensor(path: Path, wanted: str) -> np.ndarray | None:
    """A tensor of a safetensors file whose name ends so, without reading the others."""
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
        for name, about in header.items():
            if name.endswith(wanted):
                begin, end = about["data_offsets"]
                file.seek(8 + size + begin)
                return np.frombuffer(file.read(end - begin), spec.DTYPES[about["dtype"]]).reshape(about["shape"])
    return None


class Routers:
    """The routers of a model, and what they are given in an engine that has it open, with the test library."""

    def __init__(self, engine: kd.Engine, library: Path, folder: Path):
        config = json.loads((folder / "config.json").read_text())
        self.shape = spec.target_shape(config.get("text_config", config))
        self.probe = ctypes.CDLL(str(library))
        self.engine = engine
        self.of = [
            [self._find(folder, f"model.layers.{layer}.mlp.gate.{part}") for part in ("weight", "e_score_correction_bias")]
            for layer in range(self.shape.dense_layers, self.shape.layers)
        ]  # fmt: skip

    @staticmethod
    def _find(folder: Path, name: str) -> np.ndarray:
        found = [a for path in sorted(folder.glob("*.safetensors")) if (a := read_tensor(path, name)) is not None]
        assert len(found) == 1, name
        return found[0]

    def look(self, ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """(logits [n][vocab], margins [layers with experts][n]) of a prompt."""
        rows = np.full((len(self.of), len(ids), self.shape.hidden), np.nan, np.float32)
        logits = np.empty((len(ids), self.engine.info.vocab_size), np.float32)
        tokens = np.array(ids, np.int32)
        handle = ctypes.c_void_p(int(ffi.cast("uintptr_t", self.engine._handle)))
        at = [ctypes.c_void_p(a.ctypes.data) for a in (tokens, logits, rows)]
        assert self.probe.kd_probe_routed(handle, at[0], ctypes.c_uint32(len(ids)), *at[1:]) == 0
        margins = [ref.moe.route_margin(h, *own, self.shape) for h, own in zip(rows, self.of, strict=True)]
        return logits, np.array(margins)

    def parting(self, prompt: tuple[int, ...], one: tuple[int, ...], two: tuple[int, ...]) -> Parting | None:
        """Of two texts after a prompt; None if they are the same."""
        at = next((i for i, (a, b) in enumerate(zip(one, two, strict=True)) if a != b), None)
        if at is None:
            return None
        logits, margins = self.look([*prompt, *one[:at]])
        second, first = np.sort(logits[-1])[-2:]
        return Parting(len(prompt), at, float(first - second), *nearest(margins))


def nearest(margins: np.ndarray) -> tuple[float, int]:
    """(margin, position): the smallest that bears on the last position's logits. [layers with experts][positions]

    Earlier positions are read by way of keys and values, and nothing makes any of what the last layer's experts give."""
    bears = margins.copy()
    bears[-1, :-1] = np.inf
    position = bears.min(axis=0).argmin()
    return float(bears[:, position].min()), int(position)
