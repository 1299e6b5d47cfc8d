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
    moved: bool  # whether the two took other experts where that can have moved them
    shift: float  # the largest difference of two scores of a router before any other expert was taken


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
        """(logits [n][vocab], what routers are given [layers with experts][n][hidden]) of a prompt."""
        rows = np.full((len(self.of), len(ids), self.shape.hidden), np.nan, np.float32)
        logits = np.empty((len(ids), self.engine.info.vocab_size), np.float32)
        tokens = np.array(ids, np.int32)
        handle = ctypes.c_void_p(int(ffi.cast("uintptr_t", self.engine._handle)))
        at = [ctypes.c_void_p(a.ctypes.data) for a in (tokens, logits, rows)]
        assert self.probe.kd_probe_routed(handle, at[0], ctypes.c_uint32(len(ids)), *at[1:]) == 0
        return logits, rows

    def margins(self, rows: np.ndarray) -> np.ndarray:
        """[layers with experts][n]"""
        return np.array([ref.moe.route_margin(h, *own, self.shape) for h, own in zip(rows, self.of, strict=True)])

    def experts(self, rows: np.ndarray) -> np.ndarray:
        """Taken, in order of their numbers. [layers with experts][n][experts a token]"""
        return np.array([np.sort(ref.moe.route(h, *own, self.shape)[0]) for h, own in zip(rows, self.of, strict=True)])

    def scores(self, rows: np.ndarray) -> np.ndarray:
        """[layers with experts][n][experts]"""
        return np.array([ref.moe.router_scores(h, own[0]) for h, own in zip(rows, self.of, strict=True)])

    def parting(
        self, other: Routers, prompt: tuple[int, ...], one: tuple[int, ...], two: tuple[int, ...]
    ) -> Parting | None:
        """Of two texts after a prompt, of this engine and of the other one; None if they are the same."""
        at = next((i for i, (a, b) in enumerate(zip(one, two, strict=True)) if a != b), None)
        if at is None:
            return None
        ids = [*prompt, *one[:at]]
        (logits, rows), (_, others) = self.look(ids), other.look(ids)
        second, first = np.sort(logits[-1])[-2:]
        seen = bears(len(rows), len(ids))
        moved = ((self.experts(rows) != self.experts(others)).any(axis=2) & seen).any(axis=1)
        shift = rounding((abs(self.scores(rows) - self.scores(others)).max(axis=2) * seen).max(axis=1), moved)
        return Parting(len(prompt), at, float(first - second), *nearest(self.margins(rows)), bool(moved.any()), shift)


def bears(layers: int, positions: int) -> np.ndarray:
    """Whether a layer's experts at a position can move the last position's logits. [layers with experts][positions]

    Earlier positions are read by way of keys and values, and nothing makes any of what the last layer's experts give."""
    made = np.ones((layers, positions), bool)
    made[-1, :-1] = False
    return made


def rounding(differences: np.ndarray, moved: np.ndarray) -> float:
    """The largest difference in layers up to the first that took other experts: what comes later differs by what they give."""
    first = int(moved.argmax()) if moved.any() else len(moved) - 1
    return float(differences[: first + 1].max())


def nearest(margins: np.ndarray) -> tuple[float, int]:
    """(margin, position): the smallest that bears on the last position's logits. [layers with experts][positions]"""
    least = np.where(bears(*margins.shape), margins, np.inf).min(axis=0)
    position = least.argmin()
    return float(least[position]), int(position)
