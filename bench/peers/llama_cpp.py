"""kd beside llama.cpp on the same weights and token ids, in one run, taking turns.

    python bench/peers/llama_cpp.py [--model FOLDER] [--threads 1,2] [--contexts 64,512] [--json FILE]

The first run makes an environment of its own in build/out/peers and builds llama.cpp there for this machine (pip's
llama-cpp-python from source: some minutes; needs cmake and a C++ compiler). The folder becomes two GGUF files: one with
Q4_0 experts, which is what is timed, and one in float32, on which logits are compared with kd's. Weights are equal to
the bit; llama.cpp rounds activations to 8 bits before products with Q4_0, kd does not.

llama.cpp is measured in three settings (flash attention, and KV rows of f16 or f32) and each row of the table takes the
best of them. A batch of n rows costs llama.cpp n tokens after one another with logits of all; to kd it is the verify
part of a decode round with a tree of n - 1 nodes: forward, choice, acceptance and commit.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import kd

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PLACE = ROOT / "build" / "out" / "peers"
PACKAGES = ("llama-cpp-python==0.3.36", "gguf==0.19.0", "numpy")
OFF = ("LLAMA_BUILD_TESTS", "LLAMA_BUILD_TOOLS", "LLAMA_BUILD_EXAMPLES", "LLAMA_BUILD_SERVER", "LLAVA_BUILD")
SETTINGS = ({"flash": True, "kv": "f16"}, {"flash": False, "kv": "f16"}, {"flash": False, "kv": "f32"})
ROWS = (9, 17, 33)
NEAR_TIE = 0.02  # a gap of the two best logits under which the two engines may differ
PASSES = 2


def peer_python() -> Path:
    """The Python of the environment with llama.cpp, which is made if it is not there."""
    python = PLACE / "venv" / "bin" / "python"
    done = PLACE / "installed"
    if not done.exists():
        print(f"building {PACKAGES[0]} in {PLACE} (once, some minutes)", file=sys.stderr)
        venv.create(PLACE / "venv", with_pip=True)
        switches = " ".join(f"-D{name}=OFF" for name in OFF)
        subprocess.run(
            [python, "-m", "pip", "install", "-q", *PACKAGES], check=True, env={**os.environ, "CMAKE_ARGS": switches}
        )
        done.write_text("\n".join(PACKAGES))
    return python


class Peer:
    """llama_worker.py in a process of its own."""

    def __init__(self, python: Path, path: Path, threads: int, context: int, kv: str, flash: bool) -> None:
        self.process = subprocess.Popen(
            [python, "-P", HERE / "llama_worker.py"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        opened = self.ask(do="open", path=str(path), threads=threads, context=context, kv=kv, flash=flash)
        self.system: str = opened["system"]

    def ask(self, **command: Any) -> dict[str, Any]:
        assert self.process.stdin and self.process.stdout
        print(json.dumps({"ids": [], **command}), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            sys.exit("llama_cpp.py: llama.cpp ended; its sentence is above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Ours:
    """kd.Engine, timed by its own counters: {"wall": s, "cpu": s} as of llama_worker.py."""

    def __init__(self, model: Path, threads: int) -> None:
        self.engine = kd.Engine(str(model), threads=threads, prefix_cache=False, prefill_chunk=512)

    def generate(self, ids: list[int], n: int) -> dict[str, Any]:
        before, cpu, wall = self.engine.stats(), cpu_seconds(), time.perf_counter()
        done = self.engine.generate(ids, max_tokens=n, ignore_eos=True)
        wall, cpu = time.perf_counter() - wall, cpu_seconds() - cpu
        after = self.engine.stats()
        counts = {k: after[k] - before[k] for k in ("prefill_us", "verify_us", "rounds", "round_rows")}
        return {"tokens": list(done.tokens), "wall": wall, "cpu": cpu} | counts

    def prefill(self, ids: list[int]) -> dict[str, float]:
        t = self.generate(ids, 1)
        return {"wall": t["prefill_us"] / 1e6, "cpu": t["cpu"]}

    def decode(self, ids: list[int], n: int) -> dict[str, Any]:
        """Everything but the prefill: rounds, events, this loop. The first token is the prefill's."""
        self.engine.use_builder("none")
        t = self.generate(ids, n + 1)
        before = t["prefill_us"] / 1e6
        return {"wall": t["wall"] - before, "cpu": max(0.0, t["cpu"] - before), "tokens": t["tokens"][:n]}

    def batch(self, ids: list[int], rows: int, n: int) -> dict[str, float]:
        self.engine.use_builder("heap", rows - 1)
        t = self.generate(ids, n)
        return {"wall": t["verify_us"] / 1e6 / t["rounds"], "rows": t["round_rows"] / t["rounds"]}


def cross_check(python: Path, file: Path, model: Path, ids: list[int], folder: Path) -> dict[str, Any]:
    """Logits of one prompt on the float32 file beside kd's: how far, and where the best token differs."""
    peer = Peer(python, file, 1, 1024, "f32", False)
    out = folder / "logits"
    peer.ask(do="score", ids=ids, out=str(out))
    peer.close()
    with kd.Engine(str(model), threads=1) as engine:
        ours = engine.score(ids)
    theirs = np.fromfile(out, np.float32).reshape(ours.shape)
    two = np.sort(ours, axis=1)[:, -2:]
    gap = two[:, 1] - two[:, 0]
    differs = ours.argmax(1) != theirs.argmax(1)
    away = np.abs(ours - theirs)
    return {
        "positions": len(ids),
        "same_best": int((~differs).sum()),
        "near_tie": NEAR_TIE,
        "differs_outside_near_ties": int((differs & (gap > NEAR_TIE)).sum()),
        "mean_difference": float(away.mean()),
        "max_difference": float(away.max()),
        "max_difference_at": int(away.max(1).argmax()),
    }


def compare(python: Path, file: Path, model: Path, ids: list[int], threads: int, context: int) -> list[dict[str, Any]]:
    """One row a measure: ours and theirs in turn, the best of PASSES of each; theirs is the best setting's."""
    prompt = ids[:context]
    ours = Ours(model, threads)
    peers = [Peer(python, file, threads, 1024, **setting) for setting in SETTINGS]
    n = 64
    asks: list[tuple[str, str, Callable[[], dict[str, Any]], dict[str, Any], float, float]] = [
        # what, unit, ours, theirs, work of our time, work of their time
        ("prefill", "tokens/s", lambda: ours.prefill(prompt), {"do": "prefill"}, context, context),
        ("decode", "tokens/s", lambda: ours.decode(prompt, n), {"do": "decode", "n": n}, n, n),
    ]
    for rows in ROWS:
        mine = partial(ours.batch, prompt, rows, 64)
        asks.append((f"{rows} rows", "ms", mine, {"do": "batch", "rows": rows, "n": 10}, 1, 10))
    result = []
    for what, unit, mine, command, our_work, their_work in asks:
        a: list[dict[str, Any]] = []
        b: list[list[dict[str, Any]]] = [[] for _ in peers]
        for _ in range(PASSES):
            a.append(mine())
            for peer, times in zip(peers, b, strict=True):
                times.append(peer.ask(ids=prompt, **command))
        kd_best = min(a, key=lambda t: t["wall"])
        each = [min(times, key=lambda t: t["wall"]) for times in b]
        chosen = min(range(len(each)), key=lambda i: each[i]["wall"])
        seconds, theirs = kd_best["wall"] / our_work, each[chosen]["wall"] / their_work
        row = {"what": what, "unit": unit, "threads": threads, "context": context, "ratio": theirs / seconds}
        row["kd"] = 1 / seconds if unit == "tokens/s" else seconds * 1e3
        row["llama_cpp"] = 1 / theirs if unit == "tokens/s" else theirs * 1e3
        row["setting"] = SETTINGS[chosen]
        row["llama_cpp_cpu_s"] = each[chosen]["cpu"] / their_work
        if "cpu" in kd_best:
            row["kd_cpu_s"] = kd_best["cpu"] / our_work
        if "rows" in kd_best:
            row["kd_rows"] = kd_best["rows"]
        if "tokens" in kd_best:
            same = [x == y for x, y in zip(kd_best["tokens"], each[chosen]["tokens"], strict=True)]
            row["same_tokens"] = same.index(False) if False in same else len(same)
        row["load"] = os.getloadavg()[0]
        result.append(row)
    for peer in peers:
        peer.close()
    ours.engine.close()
    return result


def crowded(model: Path, ids: list[int]) -> dict[str, float]:
    """Plain decoding tokens/s with as many threads as cores and with four times as many, in turn."""
    cores = len(os.sched_getaffinity(0))
    engines = {n: Ours(model, n) for n in (cores, 4 * cores)}
    wall: dict[int, float] = dict.fromkeys(engines, 1000000000.0)
    for _ in range(PASSES):
        for n, ours in engines.items():
            wall[n] = min(wall[n], ours.decode(ids[:64], 256)["wall"])
    for ours in engines.values():
        ours.engine.close()
    return {str(n): 256 / seconds for n, seconds in wall.items()}


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "nano")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--contexts", default="64,512")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--python", type=Path, help="a Python that has llama_cpp, gguf and numpy, instead of building")
    options = parser.parse_args()
    python = options.python or peer_python()
    contexts = [int(c) for c in options.contexts.split(",")]

    folder = Path(tempfile.mkdtemp(prefix="kd-peer-"))
    try:
        files = {"q4_0": folder / "q4_0.gguf", "f32": folder / "f32.gguf"}
        for experts, file in files.items():
            dense = "f32" if experts == "f32" else "bf16"
            subprocess.run(
                [python, HERE / "gguf_folder.py", options.model, file, "--experts", experts, "--dense", dense],
                check=True,
            )
        with kd.Engine(str(options.model), threads=1) as engine:
            if engine.tokenizer is None:
                sys.exit("llama_cpp.py: the folder has no tiktoken.model, so there is no prompt to give")
            ids = engine.tokenizer.encode((ROOT / "runtime" / "kd" / "engine.py").read_text())[: max(512, *contexts)]
        report: dict[str, Any] = {"cpu": cpu_name(), "cores": len(os.sched_getaffinity(0)), "packages": PACKAGES}
        check = report["logits"] = cross_check(python, files["f32"], options.model, ids[:512], folder)
        print(f"{report['cpu']}, {report['cores']} cores, load {os.getloadavg()[0]:.1f}")
        print(
            f"logits, float32 file: best token equal at {check['same_best']} of {check['positions']} positions, "
            f"{check['differs_outside_near_ties']} of the others no near-tie; difference mean "
            f"{check['mean_difference']:.1e}, largest {check['max_difference']:.1e}\n"
        )
        print(
            f"{'':>8} {'context':>7} {'threads':>7} {'kd':>9} {'llama.cpp':>9} {'':8} {'kd faster':>9}  llama.cpp's best, load"
        )
        report["rows"] = []
        for threads in [int(t) for t in options.threads.split(",")]:
            for context in contexts:
                for r in compare(python, files["q4_0"], options.model, ids, threads, context):
                    report["rows"].append(r)
                    digits = 0 if r["unit"] == "tokens/s" else 2
                    flash = "flash" if r["setting"]["flash"] else "plain"
                    print(
                        f"{r['what']:>8} {context:>7} {threads:>7} {r['kd']:>9.{digits}f} {r['llama_cpp']:>9.{digits}f} "
                        f"{r['unit']:8} {r['ratio']:>8.2f}x  {flash} {r['setting']['kv']}, {r['load']:.1f}",
                        flush=True,
                    )
        report["crowded_tokens_per_s"] = crowded(options.model, ids)
        print(
            "\nplain decoding, tokens/s by threads: "
            + ", ".join(f"{n}: {rate:.0f}" for n, rate in report["crowded_tokens_per_s"].items())
        )
        if options.json:
            options.json.write_text(json.dumps(report, indent=1) + "\n")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
