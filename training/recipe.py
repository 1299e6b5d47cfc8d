"""Every number of the recipe: sizes of the models, mixes, wall-clock budgets. Two settings: FULL (one H200) and TINY (CPU)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ROOT / "models" / "nano"
WORK = ROOT / "training" / "work"

# The token streams that target training mixes, in the order of the mix weights below.
#   code: whole files   small: files of the small-function packages   functions: stand-alone functions, HumanEval-like
#   chat: docstring -> function in the chat format, and now and then a turn about the model itself
STREAMS = ("code", "small", "functions", "chat")


@dataclass(frozen=True)
class TargetShape:
    """The target's architecture, in the words of its config.json."""

    vocab: int = 4096
    hidden: int = 256
    layers: int = 6
    dense_layers: int = 1  # the first layers have a plain MLP, the others experts
    intermediate: int = 768
    experts: int = 16
    experts_per_token: int = 4
    expert_intermediate: int = 256
    heads: int = 8
    q_rank: int = 128
    kv_rank: int = 64
    nope_dim: int = 32
    rope_dim: int = 16
    value_dim: int = 32
    rope_theta: float = 50_000.0
    norm_eps: float = 1e-5
    routed_scale: float = 2.827
    yarn_factor: float = 4.0
    yarn_original: int = 512  # positions before YaRN's stretch
    positions: int = 2048


@dataclass(frozen=True)
class DrafterShape:
    """The DFlash drafter's architecture, in the words of draft/config.json. Its width is the target's."""

    layers: int = 3
    intermediate: int = 768
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 32
    block: int = 16  # the anchor and 15 drafted tokens
    taps: tuple[int, ...] = (1, 2, 4)  # target layers whose outputs it reads
    rope_theta: float = 50_000.0


@dataclass(frozen=True)
class Recipe:
    """One setting of the whole recipe. Budgets are wall-clock seconds, so that a stage ends on time at any speed."""

    name: str = "full"
    target: TargetShape = field(default_factory=TargetShape)
    drafter: DrafterShape = field(default_factory=DrafterShape)
    compile: bool = True

    # target training
    target_seconds: float = 270.0
    target_steps: int = 1_000_000  # an upper limit; the clock decides
    window: int = 1024  # tokens of a training row
    rows: int = 64
    matrix_rate: float = 4e-3  # Muon
    table_rate: float = 4e-3  # AdamW, embedding and head; half of it for norms and router
    warmup_steps: int = 300
    decay_share: float = 0.5  # of the budget: learning rate down to final_rate, INT4 rounding on
    final_rate: float = 0.01
    # Weights of STREAMS before and during the decay. A small stream gets a small weight: the functions stream may be
    # passed over ten times in all, the small packages four times more often than ordinary code.
    mix: tuple[float, ...] = (0.885, 0.005, 0.04, 0.07)
    decay_mix: tuple[float, ...] = (0.745, 0.005, 0.11, 0.14)
    held_windows: int = 256

    # the target's own text, for the drafter
    own_seconds: float = 36.0
    own_tokens: int = 24_000_000  # enough; stops early when reached
    own_batch: int = 8192
    own_length: int = 448  # prompt and answer
    temperatures: tuple[float, ...] = (0.0, 0.7, 0.0, 1.0)  # given to the rows of a batch in turn

    # drafter training
    drafter_seconds: float = 265.0
    drafter_steps: int = 1_000_000
    drafter_rows: int = 128
    anchors: int = 32  # blocks per row
    drafter_rate: float = 3e-3
    drafter_warmup_steps: int = 200
    drafter_decay_share: float = 0.6
    soft_share: float = 0.3  # of the loss: the target's own distribution instead of the token that came
    depth_scale: float = 5.0  # slot k weighs exp(-(k - 1) / depth_scale)
    corpus_share: float = 0.1  # rows taken from the corpus instead of the target's own text
    cache_positions: int = 40_000_000  # tapped states kept on the device

    # evaluation
    answers: int = 192  # new tokens per prompt
    prompts: int = 164  # of each set
    seed: int = 0

    def as_dict(self) -> dict:
        return asdict(self)


FULL = Recipe()

TINY = Recipe(
    name="tiny",
    target=TargetShape(
        hidden=64, layers=3, intermediate=128, experts=4, experts_per_token=2, expert_intermediate=32, heads=4,
        q_rank=32, kv_rank=32, nope_dim=16, rope_dim=8, value_dim=16,
    ),
    drafter=DrafterShape(layers=1, intermediate=64, heads=4, kv_heads=4, head_dim=16, block=8, taps=(0, 1)),
    compile=False,
    target_seconds=30.0, target_steps=60, window=128, rows=8, warmup_steps=10, held_windows=8,
    own_seconds=20.0, own_tokens=2_000, own_batch=32, own_length=96,
    drafter_seconds=20.0, drafter_steps=40, drafter_rows=8, anchors=8, drafter_warmup_steps=5, cache_positions=20_000,
    answers=24, prompts=6,
)  # fmt: skip
