"""`python -m training STEP ...`: one step of the recipe, or several in order. See README.md."""

from __future__ import annotations

import argparse
from pathlib import Path

from training import recipe

STEPS = ("corpus", "tokens", "target", "own-text", "drafter", "export", "evaluate", "humaneval", "check")
PACKAGES = Path(__file__).with_name("packages.txt")


def run(step: str, work: Path, r: recipe.Recipe, packages: Path, tokenizer: Path, device: str) -> None:
    """One step. Imports happen here: the corpus needs no torch, the training machine no transformers."""
    if step == "corpus":
        from training import corpus

        corpus.run(work, packages)
    elif step == "tokenizer":
        from training import corpus
        from training import tokenizer as learner

        shards = sorted((work / "corpus").glob("*-*.xz"))
        learner.train((text for shard in shards for _, text in corpus.read_shard(shard)), work / "tiktoken.model")
    elif step == "tokens":
        from training import tokens

        tokens.run(work, tokenizer)
    elif step == "target":
        from training import train_target

        train_target.run(work, r, tokenizer, device)
    elif step in ("own-text", "drafter"):
        import torch

        from training import own_text, train_drafter
        from training.model import loaded

        # The weights that ship, not the masters: the drafter must know the model that it will draft for.
        target = loaded(torch.load(work / "target" / "weights.pt"), r.target, device)
        (own_text if step == "own-text" else train_drafter).run(work, r, target, device)
    elif step == "export":
        from training import export

        export.run(work, r, tokenizer)
    elif step == "evaluate":
        from training import evaluate

        evaluate.run(work, r, tokenizer, device)
    elif step == "humaneval":
        from training import humaneval

        humaneval.run(work)
    elif step == "check":
        from training import check

        check.run(work)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m training", description=__doc__)
    parser.add_argument(
        "steps", nargs="+", choices=(*STEPS, "tokenizer", "all"), help=f"in order; all: {' '.join(STEPS)}"
    )
    parser.add_argument("--tiny", action="store_true", help="the whole recipe in small, on a CPU, without a network")
    parser.add_argument("--work", type=Path, default=recipe.WORK, help="work folder (default: training/work)")
    parser.add_argument("--tokenizer", type=Path, default=recipe.SHIPPED / "tiktoken.model", help="vocabulary file")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    options = parser.parse_args(arguments)
    packages, r, device = PACKAGES, recipe.FULL, options.device
    if options.tiny:
        import torch

        from training import tiny

        r, packages, device = recipe.TINY, options.work / "packages.txt", device or "cpu"
        if "corpus" in options.steps or "all" in options.steps:
            tiny.prepare(options.work)
        torch.set_num_threads(1)  # such small matrices gain nothing from more
    if device is None and set(options.steps) - {"corpus", "tokens", "tokenizer"}:
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device:
        from training import ranks

        ranks.start(device)
    for step in STEPS if "all" in options.steps else options.steps:
        print(f"== {step}", flush=True)
        run(step, options.work, r, packages, options.tokenizer, device)
        if device:
            ranks.wait()  # the next step reads what rank 0 wrote
    if device:
        ranks.stop()


if __name__ == "__main__":
    main()
