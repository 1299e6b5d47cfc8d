"""Tree builders: which there are, which is in force, and an offline check against recorded trees."""

from __future__ import annotations

import re
from typing import Any

import click

from kdctl.output import BUDGET_HELP, FAILED, NOT_FOUND, Failure, Settings, command, table

MAX_VECTOR_BYTES = 256 << 20


@click.group()
def builders() -> None:
    """Tree builders: they decide what a round verifies, never what comes out."""


@command("list")
@click.pass_obj
def list_builders(settings: Settings) -> None:
    """The builders of the running daemon."""
    rows = settings.client().builders()
    settings.emit(
        "builders",
        {"builders": rows},
        lambda: table(
            ("name", "in force", "budget", "streams", "description"),
            [
                [
                    r["name"],
                    "yes" if r["in_force"] else "",
                    r["budget"] if r["in_force"] else "",
                    r["streams"],
                    r["description"],
                ]
                for r in rows
            ],
        ),
        rows="builders",
    )


@command()
@click.argument("name")
@click.option("--budget", type=click.IntRange(0), default=0, help=BUDGET_HELP + ".")
@click.option("--stream", "request", metavar="ID", help="Only for this request.")
@click.pass_obj
def use(settings: Settings, name: str, budget: int, request: str | None) -> None:
    """Build trees with NAME from the next round on, for all requests or one. Drops and changes no token."""
    if request is not None and not re.fullmatch(r"[0-9a-fA-F]{32}", request):
        raise click.BadParameter("a request id has 32 hex digits: see `kdctl ps`", param_hint="--stream")
    generation = settings.client().use_builder(name, budget, request)
    data = {"builder": name, "budget": budget, "request": request, "generation": generation}
    settings.emit("builders_use", data, lambda: click.echo(f"{name} is in force from generation {generation}"))


@command()
@click.argument("name")
@click.option(
    "--vectors",
    required=True,
    type=click.Path(exists=True, dir_okay=False),
    help="An .npz of drafts and the trees expected for them.",
)
@click.pass_obj
def check(settings: Settings, name: str, vectors: str) -> None:
    """Build the trees of FILE with built-in builder NAME, without a daemon, and compare node by node."""
    checked, difference = compare(name, vectors)
    data = {
        "builder": name,
        "vectors": vectors,
        "checked": checked,
        "equal": difference is None,
        "difference": difference,
    }
    settings.emit(
        "builders_check",
        data,
        lambda: click.echo(f"{name}: {checked} trees equal" if difference is None else f"{name}: {difference}"),
    )
    if difference is not None:
        raise click.exceptions.Exit(FAILED)


def compare(name: str, path: str) -> tuple[int, str | None]:
    """(trees checked, first difference or None).

    The file: for each case '000/...': top_logprobs [L, K] float32, top_ids [L, K], budget, and what is expected:
    tokens [n], depths [n], parents [n + 1] with parents[0] = -1 for the root."""
    import os

    import numpy as np

    if os.path.getsize(path) > MAX_VECTOR_BYTES:
        raise Failure(f"{path}: larger than {MAX_VECTOR_BYTES >> 20} MiB")
    try:
        file = np.load(path, allow_pickle=False)
        cases = sorted({key.partition("/")[0] for key in file.files if "/" in key})
        if not cases:
            raise ValueError("it has no cases")
        for done, case in enumerate(cases):
            data = {
                key: file[f"{case}/{key}"]
                for key in ("top_logprobs", "top_ids", "budget", "tokens", "depths", "parents")
            }
            difference = _differs(name, case, data)
            if difference:
                return done, difference
    except (OSError, ValueError, KeyError) as error:
        raise Failure(f"{path}: not a file of tree vectors ({error}); see `kdctl builders check --help`") from None
    return len(cases), None


def _differs(name: str, case: str, data: dict[str, Any]) -> str | None:
    tokens, parents, depths = build(name, data["top_logprobs"], data["top_ids"], int(data["budget"]))
    want = {
        "tokens": data["tokens"].tolist(),
        "parents": data["parents"].tolist()[1:],
        "depths": data["depths"].tolist(),
    }
    got = {"tokens": tokens, "parents": parents, "depths": depths}
    if len(tokens) != len(want["tokens"]):
        return f"case {case}: {len(tokens)} nodes, expected {len(want['tokens'])}"
    for i in range(len(tokens)):
        for key in ("tokens", "parents", "depths"):
            if got[key][i] != want[key][i]:
                return f"case {case}, node {i + 1}: {key[:-1]} {got[key][i]}, expected {want[key][i]}"
    return None


def build(name: str, logprobs: Any, ids: Any, budget: int) -> tuple[list[int], list[int], list[int]]:
    """(tokens, parents, depths) of one tree, by kd_builder_build."""
    import numpy as np

    from kd import native

    ffi, library = native.ffi, native.load_library("cpu")
    ids = np.ascontiguousarray(ids, np.int32)
    logprobs = np.ascontiguousarray(logprobs, np.float32)
    if ids.ndim != 2 or ids.shape != logprobs.shape:
        raise ValueError("top_ids and top_logprobs must have one two-dimensional shape")
    inp, out = ffi.new("kd_tree_in *"), ffi.new("kd_tree_out *")
    token, parent = ffi.new("int32_t[]", max(1, budget)), ffi.new("int32_t[]", max(1, budget))
    inp.size, inp.depths, inp.width, inp.budget = ffi.sizeof("kd_tree_in"), ids.shape[0], ids.shape[1], budget
    inp.token, inp.logprob = ffi.from_buffer("int32_t[]", ids), ffi.from_buffer("float[]", logprobs)
    out.size, out.token, out.parent = ffi.sizeof("kd_tree_out"), token, parent
    try:
        library.check(library.lib.kd_builder_build(name.encode(), inp, out))
    except native.KdError as error:
        raise Failure(error.message, NOT_FOUND if error.name == "KD_E_NOT_FOUND" else FAILED, error.name) from None
    tokens, parents = list(token[0 : out.n]), list(parent[0 : out.n])
    depths: list[int] = []
    for p in parents:
        depths.append(1 if p == 0 else depths[p - 1] + 1)
    return tokens, parents, depths


builders.add_command(list_builders)
builders.add_command(use)
builders.add_command(check)
