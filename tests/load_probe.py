"""native/model through its probes (native/probe_load.cpp), for the checkpoint tests."""

from __future__ import annotations

import ctypes
import json
import os
from pathlib import Path

import numpy as np
import pytest

NEVER = 2**64 - 1
KD_OK, KD_E_NOT_FOUND, KD_E_CANCELLED, KD_E_IO, KD_E_MODEL = 0, -21, -26, -61, -62
DRAFT_AUTO, DRAFT_NONE, DRAFT_PATH = 0, 1, 2
CAPACITY = 16 << 20


class Refused(Exception):
    """A probe returned a status: `status` and `sentence` are the loader's own."""

    def __init__(self, status: int, sentence: str):
        super().__init__(f"{status}: {sentence}")
        self.status, self.sentence = status, sentence


def refused(call, *words: str, status: int = KD_E_MODEL) -> str:
    """`call` fails with `status` and a sentence that holds all `words`; the sentence."""
    with pytest.raises(Refused) as caught:
        call()
    assert caught.value.status == status, caught.value
    sentence = caught.value.sentence
    for word in words:
        assert word in sentence, f"{word!r} is not in {sentence!r}"
    assert sentence.isprintable() and len(sentence.encode()) < 1024
    return sentence


class Probe:
    def __init__(self, library: Path):
        self.lib = lib = ctypes.CDLL(str(library))
        self.out = ctypes.create_string_buffer(CAPACITY)  # of every answer
        u64, size, text, ptr = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_void_p
        lib.kd_probe_load_error.restype = text
        lib.kd_probe_hash.restype = u64
        lib.kd_probe_hash.argtypes = [text, size, size]
        lib.kd_probe_json.argtypes = [text, size, text, size]
        lib.kd_probe_safetensors.argtypes = [text, size, u64, text, size]
        lib.kd_probe_index.argtypes = [text, size, text, size]
        lib.kd_probe_config.argtypes = [text, text, text, text, size]
        u64p = ctypes.POINTER(u64)
        lib.kd_probe_load.argtypes = [ctypes.POINTER(ptr), text, ctypes.c_int, text, ctypes.c_int, u64, u64p, u64p]
        lib.kd_probe_save.argtypes = [ptr, text, u64]
        lib.kd_probe_read.argtypes = [text, text, u64, size]
        lib.kd_probe_unload.argtypes = [ptr]
        lib.kd_probe_unload.restype = None
        lib.kd_probe_loaded_info.argtypes = [ptr, ctypes.c_int, text, size]
        lib.kd_probe_weight.argtypes = [ptr, ctypes.c_int, text, ptr, u64p, u64p]

    def check(self, status: int) -> None:
        if status != KD_OK:
            raise Refused(status, self.lib.kd_probe_load_error().decode())  # strict: a sentence is UTF-8

    def _text(self, call, *arguments):
        self.check(call(*arguments, self.out, CAPACITY))
        return json.loads(self.out.value.decode())

    def hash(self, data: bytes, piece: int = 1 << 30) -> int:
        return self.lib.kd_probe_hash(data, len(data), piece)

    def json(self, text: bytes):
        return self._text(self.lib.kd_probe_json, text, len(text))

    def safetensors(self, data: bytes, file_bytes: int | None = None) -> list[dict]:
        size = len(data) if file_bytes is None else file_bytes
        return self._text(self.lib.kd_probe_safetensors, data, len(data), size)

    def index(self, text: bytes) -> dict[str, str]:
        return self._text(self.lib.kd_probe_index, text, len(text))

    def config(self, config: dict, generation: dict | None = None, draft: dict | None = None) -> dict:
        given = [None if c is None else json.dumps(c).encode() for c in (config, generation, draft)]
        return self._text(self.lib.kd_probe_config, *given)

    def read(self, folder: Path, name: str, offset: int, n: int) -> None:
        self.check(self.lib.kd_probe_read(os.fsencode(folder), name.encode(), offset, n))

    def load(self, folder: Path, *, tp: int = 1, draft: int = DRAFT_AUTO, draft_path: Path | None = None) -> Loaded:
        return Loaded(self, folder, tp, draft, draft_path)

    def load_until(self, folder: Path, stop_at: int, *, tp: int = 1) -> tuple[int, int, int]:
        """(status, tensor bytes read, tensor bytes to read) of a load that is cancelled after `stop_at` bytes."""
        handle, done, total = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_uint64()
        status = self.lib.kd_probe_load(handle, os.fsencode(folder), DRAFT_AUTO, None, tp, stop_at, done, total)
        if status == KD_OK:
            self.lib.kd_probe_unload(handle)
        return status, done.value, total.value


class Loaded:
    """A loaded folder; a context manager. Raises Refused."""

    def __init__(self, probe: Probe, folder: Path, tp: int, draft: int, draft_path: Path | None):
        self.probe, self.tp = probe, tp
        self._handle = ctypes.c_void_p()
        done, total = ctypes.c_uint64(), ctypes.c_uint64()
        path = None if draft_path is None else os.fsencode(draft_path)
        load = probe.lib.kd_probe_load
        probe.check(load(self._handle, os.fsencode(folder), draft, path, tp, NEVER, done, total))
        assert done.value == total.value > 0
        self.read_bytes = done.value

    def __enter__(self) -> Loaded:
        return self

    def __exit__(self, *_) -> None:
        self.probe.lib.kd_probe_unload(self._handle)

    def save(self, folder: Path, stop_at: int = NEVER) -> None:
        """As packed files."""
        self.probe.check(self.probe.lib.kd_probe_save(self._handle, os.fsencode(folder), stop_at))

    def info(self, rank: int = 0) -> dict:
        return self.probe._text(self.probe.lib.kd_probe_loaded_info, self._handle, rank)

    def weight(self, rank: int, name: str) -> np.ndarray:
        """float32 [n, k]; INT4 dequantised; a vector is [1, k]."""
        n, k = ctypes.c_uint64(), ctypes.c_uint64()
        call = self.probe.lib.kd_probe_weight
        self.probe.check(call(self._handle, rank, name.encode(), None, n, k))
        out = np.full((n.value, k.value), np.nan, np.float32)
        self.probe.check(call(self._handle, rank, name.encode(), out.ctypes.data, n, k))
        return out
