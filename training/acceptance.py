"""How many tokens a round yields: the drafter's blocks against what the target wrote, for chains and heap trees.

The target's answers are decoded first; then one block is drafted at every position of every answer, and rounds are
replayed over the fixed text. With exact verification (greedy, or sampling whose noise depends on the position alone)
that is what an engine accepts. A round yields the accepted drafted tokens and the one token of the target.
"""

from __future__ import annotations

import heapq
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from training.decode import Decoder, padded
from training.model import Drafter, Target
from training.tokenizer import STOPS
from training.train_drafter import draft_blocks

BUILDERS = (("chain", 7), ("chain", 15), ("heap", 8), ("heap", 16), ("heap", 32), ("heap", 64))
WIDTH = 64  # candidates kept per slot
GRAM, GRAM_SHARE = 6, 0.6  # an answer loops when fewer than this share of its 6-grams differ


def heap_tree(scores: list[list[float]], ids: list[list[int]], budget: int) -> tuple[list[int], list[int]]:
    """The `budget` most probable nodes. scores, ids [slots][WIDTH], best first -> tokens and parents (-1: the anchor)."""
    tokens, parents = [], []
    heap, order = [(-scores[0][0], 0, -1, 1, 0)], 1  # (-log probability of the path, tie, parent, depth, rank)
    while heap and len(tokens) < budget:
        cost, _, parent, depth, rank = heapq.heappop(heap)
        tokens.append(ids[depth - 1][rank])
        parents.append(parent)
        row = scores[depth - 1]
        if rank + 1 < len(row):
            heapq.heappush(heap, (cost + row[rank] - row[rank + 1], order, parent, depth, rank + 1))
        if depth < len(scores):
            heapq.heappush(heap, (cost - scores[depth][0], order + 1, len(tokens) - 1, depth + 1, 0))
        order += 2
    return tokens, parents


def is_loop(answer: list[int], numbers: frozenset[int] = frozenset()) -> bool:
    """numbers: ids that count as one, so that text that only counts upwards is a loop as well."""
    answer = [-1 if token in numbers else token for token in answer]
    grams = [tuple(answer[i : i + GRAM]) for i in range(len(answer) - GRAM)]
    return len(grams) > 20 and len(set(grams)) < GRAM_SHARE * len(grams)


def replay(job: tuple[list[int], np.ndarray, np.ndarray, int]) -> list[list[int]]:
    """One answer: per builder, how many rounds yielded 0, 1, 2 ... tokens.

    job: the answer's ids; scores and ids [positions, slots, WIDTH] of the block whose anchor is each position; how many
    positions may start a round.
    """
    answer, scores, ids, limit = job
    histograms = []
    for builder, budget in BUILDERS:
        histogram = [0] * (scores.shape[1] + 2)
        at = 0
        while at < limit:
            accepted = 0
            rest = answer[at + 1 : at + 1 + scores.shape[1]]
            if builder == "chain":
                best = ids[at, :budget, 0].tolist()
                while accepted < min(len(rest), len(best)) and best[accepted] == rest[accepted]:
                    accepted += 1
            else:
                tokens, parents = heap_tree(scores[at].tolist(), ids[at].tolist(), budget)
                child = {(parent, token): i for i, (token, parent) in enumerate(zip(tokens, parents, strict=True))}
                node = -1
                while accepted < len(rest) and (node, rest[accepted]) in child:
                    node = child[node, rest[accepted]]
                    accepted += 1
            yielded = min(accepted + 1, len(answer) - 1 - at)
            histogram[yielded] += 1
            at += yielded
        histograms.append(histogram)
    return histograms


@torch.no_grad()
def answers_and_drafts(
    target: Target, drafter: Drafter, prompts: list[list[int]], count: int, temperature: float, seed: int
) -> list[tuple[list[int], np.ndarray, np.ndarray, int]]:
    """One replay job per prompt; answers of up to `count` tokens, fp32."""
    device = target.lm_head.weight.device.type
    slots = drafter.c.block - 1
    rows, lengths = padded(prompts, device)
    total = min(rows.shape[1] + count + slots + 1, target.c.positions)
    noise = torch.Generator(device).manual_seed(seed)
    level = torch.full((len(prompts),), temperature, device=device)
    text = Decoder(target, torch.float32).generate(rows, lengths, total, level, noise)
    answers = []
    for row, start in enumerate(lengths.tolist()):
        answer = text[row, start : start + count + slots + 1].tolist()
        stop = next((i for i, t in enumerate(answer) if t in STOPS), len(answer))
        answers.append(answer[: stop + 1])
    limits = [min(count, len(answer)) - 1 for answer in answers]
    jobs: list = [None] * len(answers)
    by_length = sorted(range(len(answers)), key=lambda i: limits[i])
    for first in range(0, len(by_length), 8):
        picked = by_length[first : first + 8]
        most = max(1, limits[picked[-1]])
        start = lengths[picked]
        ids = text[picked, : int(start.max()) + most + slots + 1]
        anchor = (start[:, None] + torch.arange(most, device=device)).clamp_max(ids.shape[1] - 1)
        _, taps = target(ids, drafter.c.taps)
        states, _ = draft_blocks(drafter, target, ids, taps, anchor)
        scores, best = F.linear(states, target.lm_head.weight).log_softmax(-1).topk(WIDTH, -1)
        scores, best = scores.half().float().cpu().numpy(), best.int().cpu().numpy()
        for i, row in enumerate(picked):
            jobs[row] = (answers[row], scores[i], best[i], limits[row])
    return jobs


def summary(histograms: list[list[list[int]]]) -> dict:
    """Per builder: tokens per round, rounds, tokens, how many rounds yielded k tokens, and by depth the share of the
    rounds that accepted at least that many drafted tokens."""
    out = {}
    for i, (builder, budget) in enumerate(BUILDERS if histograms else ()):
        total = np.sum([h[i] for h in histograms], 0)
        rounds, tokens = int(total.sum()), int((total * np.arange(len(total))).sum())
        if rounds:
            deeper = total[::-1].cumsum()[::-1]
            out[f"{builder}-{budget}"] = dict(
                tokens_per_round=round(tokens / rounds, 4), rounds=rounds, tokens=tokens, yielded=total.tolist(),
                accepted_by_depth=[round(x / rounds, 4) for x in deeper[2:].tolist()],
            )  # fmt: skip
    return out


def measure(
    target: Target, drafter: Drafter, sets: dict[str, list[list[int]]], count: int, seed: int, numbers: frozenset[int]
) -> tuple[list[dict], dict]:
    """Rows of figures (set, temperature, looping or not) and the greedy jobs of each set."""
    figures, greedy = [], {}
    for name, prompts in sets.items():
        for temperature, samples in ((0.0, 1), (0.8, 2)):
            jobs = answers_and_drafts(target, drafter, prompts * samples, count, temperature, seed)
            if temperature == 0:
                greedy[name] = jobs
            context = multiprocessing.get_context("spawn")  # a process that has used a GPU must not fork
            with ProcessPoolExecutor(min(16, os.cpu_count()), mp_context=context) as pool:
                results = list(pool.map(replay, jobs, chunksize=8))
            loops = [is_loop(job[0], numbers) for job in jobs]
            for looping in (False, True):
                picked = [h for loop, h in zip(loops, results, strict=True) if loop == looping]
                row = dict(
                    set=name, temperature=temperature, looping=looping, answers=len(picked), builders=summary(picked)
                )
                figures.append(row)
                taus = {k: v["tokens_per_round"] for k, v in row["builders"].items()}
                print(
                    f"{name} T={temperature} {'looping' if looping else 'not looping'} ({len(picked)}): {taus}",
                    flush=True,
                )
    return figures, greedy


def marginals(jobs: list, keep: int = 8, width: int = 8) -> dict[str, np.ndarray]:
    """A small record of drafted scores and the target's tokens, for simulations of other tree builders."""
    out = {}
    for i, (answer, scores, ids, limit) in enumerate(jobs[:keep]):
        out[f"answer_{i}"] = np.array(answer, np.uint16)
        out[f"scores_{i}"] = scores[:limit, :, :width].astype(np.float16)
        out[f"ids_{i}"] = ids[:limit, :, :width].astype(np.uint16)
    return out


def expert_shares(target: Target, windows: Tensor, rows: int = 16) -> list[list[float]]:
    """Per layer with experts: the share of the tokens of `windows` that use each expert (they sum to top-k)."""
    totals = [torch.zeros(target.c.experts, device=windows.device) for _ in target.experts()]
    with torch.no_grad():
        for part in windows.split(rows):
            target(part[:, :-1])
            for total, experts in zip(totals, target.experts(), strict=True):
                total += experts.load * len(part)
    return [[round(x / len(windows), 5) for x in total.tolist()] for total in totals]
