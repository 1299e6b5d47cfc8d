"""inspect, verify-checkpoint and convert: model folders, without a daemon."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import click

from kdctl.output import (
    DRAFT,
    FAILED,
    NOT_FOUND,
    PERMISSION,
    REFUSED,
    Failure,
    Settings,
    bytes_text,
    command,
    is_terminal,
    pairs,
    table,
)

ROWS = {"cpu": 1024, "cuda": 640}  # of one step, the engine's own limits
ELEMENT_BYTES = {"cpu": 4, "cuda": 2}  # of activations and KV rows
EXITS = {"KD_E_NOT_FOUND": NOT_FOUND, "KD_E_EXISTS": REFUSED, "KD_E_BUSY": REFUSED}
LINKS = click.option("--follow-links", is_flag=True, help="Symbolic links in the folder may lead out of it.")


def _failed(error: Any) -> Failure:
    return Failure(error.message, EXITS.get(error.name, FAILED), error.name)


def _ranks(n: int) -> str:
    return "1 rank" if n == 1 else f"{n} ranks"


def _parameters(n: int) -> str:
    return f"{n / 1e9:.1f} B parameters" if n >= 1e9 else f"{n / 1e6:.1f} M parameters"


def gpus() -> list[tuple[str, int]]:
    """(name, bytes) of each GPU that nvidia-smi shows."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20)
        rows = [line.rsplit(",", 1) for line in done.stdout.splitlines() if "," in line]
        return [(name.strip(), int(mib) << 20) for name, mib in rows] if done.returncode == 0 else []
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return []


def host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def buffer_bytes(about: dict[str, Any], tp: int, device: str, streams: int) -> int:
    """About what one rank's activations take beside weights and KV cache: the large arrays of a step of as many rows as fit."""
    t, d = about["target"], about["draft"]
    heads, rows, element = -(-t["heads"] // tp), ROWS[device], ELEMENT_BYTES[device]
    kv_row = t["kv_lora"] + t["rope"]
    inter = max(t["dense_inter"], t["shared_inter"]) // tp
    width = (
        3 * t["hidden"]
        + 2 * t["q_lora"]
        + kv_row
        + heads * (t["nope"] + t["rope"] + kv_row + t["kv_lora"] + t["v_head"])
    )
    row = element * (width + 3 * inter) + 4 * (t["hidden"] + -(-t["vocab"] // tp))
    taps = 0
    if d:
        taps = len(d["taps"]) * t["hidden"] * element * (2 * rows + 64 * streams)
    return rows * row + taps


def memory(about: dict[str, Any], device: str, context: int, streams: int) -> list[dict[str, Any]]:
    """What each number of ranks takes, a rank."""
    found = []
    for rank in about["ranks"]:
        row: dict[str, Any] = {"tp": rank["tp"], "refused": rank.get("refused")}
        if not row["refused"]:
            kv = rank["kv_elements_token"] * ELEMENT_BYTES[device]
            row |= {"weight_bytes": rank["weight_bytes"], "expert_bytes": rank["expert_bytes"], "kv_bytes_token": kv}
            row["kv_bytes"] = kv * context * streams
            row["buffer_bytes"] = buffer_bytes(about, rank["tp"], device, streams)
            row["bytes"] = row["weight_bytes"] + row["kv_bytes"] + row["buffer_bytes"]
        found.append(row)
    return found


def fits(row: dict[str, Any], device: str, cards: list[tuple[str, int]]) -> str:
    if row["refused"]:
        return "no: " + row["refused"].split(":")[0]
    if device == "cpu":
        return "yes" if row["bytes"] * row["tp"] <= host_memory() else "no"
    if not cards:
        return "no GPU here"
    if row["tp"] > len(cards):
        return f"no: {len(cards)} GPU{'s' * (len(cards) > 1)}"
    return "yes" if row["bytes"] <= min(size for _, size in cards[: row["tp"]]) else "no"


@command()
@click.argument("path")
@DRAFT
@LINKS
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="Where it is to run.",
)
@click.option("--context", type=click.IntRange(1), help="Tokens of one stream; the model's own if not given.")
@click.option("--streams", type=click.IntRange(1, 64), default=1, show_default=True, help="Requests at once.")
@click.pass_obj
def inspect(
    settings: Settings, path: str, draft: str, follow_links: bool, device: str, context: int | None, streams: int
) -> None:
    """What the model folder PATH holds, and what it takes to serve it. Needs no daemon and reads no weights."""
    from kd import checkpoint
    from kd.beside import look_beside
    from kd.native import KdError

    drafter = None
    try:
        about = checkpoint.inspect(path, draft=draft, follow_links=follow_links)
    except KdError as error:
        if draft == "none":
            raise _failed(error) from None
        try:  # perhaps it is the drafter alone that does not fit
            about = checkpoint.inspect(path, draft="none", follow_links=follow_links)
        except KdError as again:
            raise _failed(again) from None
        drafter = error.message
    del about["skipped"], about["draft_skipped"]  # names, perhaps thousands
    cards = gpus()
    if device == "auto":
        device = "cuda" if cards else "cpu"
    context = context or about["target"]["max_positions"]
    rows = memory(about, device, context, streams)
    for row in rows:
        packed = about.get("packed_tp") or row["tp"]
        row["fits"] = fits(row, device, cards) if packed == row["tp"] else f"no: packed for {_ranks(packed)}"
    target = about["target"]
    beside = look_beside(path, target["vocab"], target["max_positions"], follow_links)
    data = about | {
        "draft_refused": drafter,
        "beside": beside,
        "device": device,
        "context": context,
        "streams": streams,
        "gpus": [{"name": name, "bytes": size} for name, size in cards],
        "memory": rows,
    }

    def human() -> None:
        t, d = about["target"], about["draft"]
        pairs(
            [
                ("model", f"{_parameters(about['parameters'])}, {t['layers']} layers, hidden {t['hidden']}"),
                ("attention", f"{t['heads']} heads, latent {t['kv_lora']} + {t['rope']}, context {t['max_positions']}"),
                (
                    "experts",
                    f"{t['experts_per_token']} of {t['experts']}, width {t['expert_inter']}, INT4 groups of 32",
                ),
                ("rope", f"{t['rotary']['type']}, theta {t['rotary']['theta']:g}, factor {t['rotary']['factor']:g}"),
                ("stop ids", ", ".join(map(str, about["stop_ids"]))),
                ("files", f"{about['files']}, {about['tensors']} tensors, {bytes_text(about['file_bytes'])}")
                if about["kind"] == "published"
                else ("packed", f"for {_ranks(about['packed_tp'])}, layout {about['packed_layout']}"),
                (
                    "skipped",
                    f"{about['skipped_tensors']} tensors, {bytes_text(about['skipped_bytes'])}: text needs no vision",
                )
                if about["skipped_tensors"]
                else ("skipped", None),
                (
                    "drafter",
                    f"refused: {drafter}"
                    if drafter
                    else f"matches: {d['layers']} layers, block {d['block']}, taps {d['taps']}"
                    if d
                    else "none",
                ),
                *(
                    (name, file["about"] if file["usable"] is not False else f"not usable: {file['about']}")
                    for name, file in beside.items()
                ),
            ]
        )
        if about["kind"] == "published":
            click.echo("")
            table(("kind", "bytes"), [(kind, bytes_text(n)) for kind, n in about["bytes"].items() if n])
        click.echo(f"\na rank on {device}, {streams} stream{'s' * (streams > 1)} of {context} tokens:")
        table(
            ("tp", "weights", "KV cache", "buffers", "together", "fits"),
            [
                [r["tp"], *(bytes_text(r[k]) for k in ("weight_bytes", "kv_bytes", "buffer_bytes", "bytes")), r["fits"]]
                if not r["refused"]
                else [r["tp"], "", "", "", "", r["fits"]]
                for r in rows
            ],
        )

    settings.emit("inspect", data, human)


@command()
@click.argument("path")
@DRAFT
@LINKS
@click.option("--no-hashes", is_flag=True, help="Only presence, sizes, headers and index: seconds instead of minutes.")
@click.option("--again", is_flag=True, help="Read files, too, that have not changed since they were hashed.")
@click.option("--write", is_flag=True, help="Leave a kd-hashes.json in the folder for the next time, if it is whole.")
@click.pass_obj
def verify_checkpoint(
    settings: Settings, path: str, draft: str, follow_links: bool, no_hashes: bool, again: bool, write: bool
) -> None:
    """Is the model folder PATH whole? Names file, tensor and offset of every fault. Needs no daemon.

    Bytes are compared with everything that is known of them: the hashes in packed files, golden.json, kd-hashes.json, and the
    names in Hugging Face's cache; what was hashed is remembered until a file changes, as its size, times and inode tell: a
    disk that changes bytes by itself is found with --again.
    """
    from kd import checkpoint, hashing
    from kd.native import KdError

    for name, given in (("--write", write), ("--again", again)):
        if given and no_hashes:
            raise click.UsageError(f"{name} needs the hashes that --no-hashes leaves out")
    shown = [0]

    def progress(done: int, total: int) -> None:
        percent = 100 * done // max(total, 1)
        if percent != shown[0] and not settings.quiet and not settings.machine and is_terminal(sys.stderr):
            shown[0] = percent
            click.echo(f"\r\x1b[Kreading: {percent} % of {bytes_text(total)}", nl=False, err=True)

    try:
        found = checkpoint.verify(
            path,
            draft=draft,
            follow_links=follow_links,
            hashes=not no_hashes,
            again=again,
            write=write,
            progress=progress,
        )
    except KdError as error:
        raise _failed(error) from None
    except hashing.NotWritten as error:
        raise Failure(str(error), PERMISSION, "PERMISSION") from None
    finally:
        if shown[0]:
            click.echo("\r\x1b[K", nl=False, err=True)

    def human() -> None:
        for fault in found["faults"]:
            place = os.path.join(path, fault["file"]) if fault["file"] else path
            place += f", byte {fault['offset']}" if fault["offset"] >= 0 else ""
            place += f", tensor {fault['tensor']}" if fault["tensor"] else ""
            click.echo(f"{place}: {fault['what']}")
        number = len(found["faults"])
        text = f"{number} fault{'s' * (number > 1)}" if number else "whole"
        how = (
            f", {found['hashed']} hashed, {found['cached']} known, {found['compared']} compared"
            if not no_hashes
            else ""
        )
        files = f"{found['files']} file{'s' * (found['files'] != 1)}"
        click.echo(f"{text}: {files}, {bytes_text(found['bytes'])}{how}")
        if not (no_hashes or number or found["compared"]):
            click.echo("There was nothing to compare the bytes with: no golden.json, kd-hashes.json or download cache.")
        for name in found["written"]:
            click.echo(f"written: {name}")
        if write and number:
            click.echo("no kd-hashes.json was written: it is for folders without faults")

    settings.emit("verify_checkpoint", {"path": path, **found}, human, rows="faults")
    if found["faults"]:
        raise click.exceptions.Exit(FAILED)


@command()
@click.argument("path")
@click.argument("out")
@DRAFT
@LINKS
@click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Where it is to run."
)
@click.option(
    "--tp", type=click.Choice(["1", "2", "4", "8"]), default="1", show_default=True, help="Ranks it is to run on."
)
@click.pass_obj
def convert(settings: Settings, path: str, out: str, draft: str, follow_links: bool, device: str, tp: str) -> None:
    """Write the model folder PATH as a packed folder OUT: loading that one reads and copies, and computes nothing.

    It is for one device and one number of ranks, and takes the memory that serving takes. Needs no daemon."""
    from kd.convert import convert as pack
    from kd.convert import unfinished
    from kd.native import KdError
    from kdctl.model import ProgressLine

    if not path or not out:
        raise click.UsageError("PATH and OUT are names of folders, and may not be empty")
    line = ProgressLine(settings)

    def progress(now: dict[str, Any]) -> None:
        total = now["bytes_total"]
        line({**now, "percent": 100 * now["bytes_done"] / total if total else 0})

    try:
        written = pack(path, out, device=device, tp=int(tp), draft=draft, follow_links=follow_links, progress=progress)
    except KdError as error:
        raise _failed(error) from None
    except (KeyboardInterrupt, SystemExit):
        line.end()
        left = unfinished(out)
        settings.note(
            f"kdctl: {left} is left of it: the next conversion to {out} removes it"
            if left.exists()
            else f"kdctl: {out} was not made"
        )
        raise
    finally:
        line.end()
    data = {"path": path, "out": out, "device": device, "tp": int(tp), "bytes": written}
    settings.emit(
        "convert",
        data,
        lambda: click.echo(f"{out}: {bytes_text(written)} for {_ranks(int(tp))} on {device}"),
    )
