"""llama.cpp behind a pipe, for llama_cpp.py: one JSON command a line on stdin, one JSON answer a line on stdout.

Run with the Python of an environment that has llama-cpp-python and numpy. Commands, all over token ids:
    open    path, threads, context, kv ("f16" | "f32"), flash (flash attention: true | false)
    score   ids, out        logits of every row, float32, to the file `out`
    prefill ids             logits of the last row
    decode  ids, n          prefill, then n tokens one by one, the best each time
    batch   ids, rows, n    prefill; then n times: `rows` more tokens in one batch, logits of all, and taken back
Times come as {"wall": seconds, "cpu": seconds of the whole process} of what is named last, without the prefill before it.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import llama_cpp as ll
import numpy as np


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


@contextmanager
def timed(into: dict[str, Any]) -> Iterator[None]:
    wall, cpu = time.perf_counter(), cpu_seconds()
    yield
    into.update(wall=time.perf_counter() - wall, cpu=cpu_seconds() - cpu)


class Peer:
    def __init__(self, path: str, threads: int, context: int, kv: str, flash: bool) -> None:
        model = ll.llama_model_default_params()
        model.n_gpu_layers = 0
        self.model = ll.llama_model_load_from_file(path.encode(), model)
        if not self.model:
            sys.exit(f"llama.cpp cannot load {path}")
        p = ll.llama_context_default_params()
        p.n_ctx = context
        p.n_batch = p.n_ubatch = 512
        p.n_threads = p.n_threads_batch = threads
        p.type_k = p.type_v = 0 if kv == "f32" else 1  # ggml_type
        p.flash_attn_type = int(flash)  # llama_flash_attn_type: 0 disabled, 1 enabled
        self.context = ll.llama_init_from_model(self.model, p)
        self.memory = ll.llama_get_memory(self.context)
        self.vocab = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(self.model))
        self.batch = ll.llama_batch_init(512, 0, 1)

    def decode(self, ids: list[int], position: int, every: bool) -> None:
        b = self.batch
        b.n_tokens = len(ids)
        for i, token in enumerate(ids):
            b.token[i] = token
            b.pos[i] = position + i
            b.n_seq_id[i] = 1
            b.seq_id[i][0] = 0
            b.logits[i] = every or i == len(ids) - 1
        if ll.llama_decode(self.context, b) != 0:
            sys.exit("llama_decode failed")

    def logits(self, rows: int) -> np.ndarray:
        """Of the rows of the last batch whose logits were wanted: [rows, vocab]. Waits for them."""
        at = ll.llama_get_logits(self.context)
        return np.ctypeslib.as_array(ctypes.cast(at, ctypes.POINTER(ctypes.c_float)), (rows, self.vocab))

    def forget(self, start: int) -> None:
        ll.llama_memory_seq_rm(self.memory, 0, start, -1)

    def prompt(self, ids: list[int]) -> int:
        self.forget(0)
        for i in range(0, len(ids), 512):
            self.decode(ids[i : i + 512], i, False)
        return int(self.logits(1).argmax())

    def run(self, c: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = {}
        ids = c["ids"]
        if c["do"] == "score":
            self.forget(0)
            self.decode(ids, 0, True)
            self.logits(len(ids)).tofile(c["out"])
        elif c["do"] == "prefill":
            with timed(answer):
                self.prompt(ids)
        elif c["do"] == "decode":
            token, answer["tokens"] = self.prompt(ids), []
            with timed(answer):
                for i in range(c["n"]):
                    answer["tokens"].append(token)
                    self.decode([token], len(ids) + i, False)
                    token = int(self.logits(1).argmax())
        elif c["do"] == "batch":
            rows = c["rows"]
            self.prompt(ids)
            with timed(answer):
                for _ in range(c["n"]):
                    self.decode(ids[:rows], len(ids), True)
                    self.logits(rows).argmax(axis=1)
                    self.forget(len(ids))
        return answer


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # llama.cpp's own lines go elsewhere
    quiet = ll.llama_log_callback(lambda *_: None)
    ll.llama_log_set(quiet, None)
    ll.llama_backend_init()
    info = ll.llama_print_system_info().decode()
    peer = None
    for line in sys.stdin:
        c = json.loads(line)
        if c["do"] == "open":
            peer = Peer(c["path"], c["threads"], c["context"], c["kv"], c["flash"])
            answer: dict[str, Any] = {"system": info}
        else:
            assert peer
            answer = peer.run(c)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
