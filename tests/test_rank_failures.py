"""A rank that breaks while eight of them decode: the daemon ends within seconds, says in one message which rank and in which
step, leaves nothing behind, and the next one starts as if nothing had been."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest
from backend import DEVICE, gpus
from daemons import Daemon, until

import kd
from kd.client import KdClientError
from kd.native import constants, ffi
from kd.steps import Ranks, take_last_words

# Ranks of a daemon and the one that breaks. Eight share a GPU; two have one each.
RANKS = [(8, 0), (8, 5), *([(2, 0), (2, 1)] if DEVICE == "cuda" else [])]
EXCEPTION, BROKEN_DEVICE, SEGFAULT, HANG = range(4)
SECONDS = 5.0  # from the fault to the end of the process


@pytest.fixture
def start(tmp_path, test_library, small3):
    made: list[Daemon] = []

    def make(tp: int = 8) -> Daemon:
        if DEVICE == "cuda" and tp == 2 and gpus() < tp:
            pytest.skip("ranks on GPUs of their own need a second GPU")
        settings = {
            "engine.device": DEVICE,
            "engine.tp": tp,
            "engine.share_devices": DEVICE == "cuda" and tp == 8,
            "builder.name": "heap",
        }
        args = [part for key, value in settings.items() for part in ("--set", f"{key}={str(value).lower()}")]
        daemon = Daemon(
            tmp_path, *args, fake=None, model=small3, fault=(str(tmp_path / "fault"), str(test_library)),
            env={"PYTHONFAULTHANDLER": ""},
        )  # fmt: skip
        made.append(daemon)
        return daemon.wait()

    yield make
    for daemon in made:
        daemon.kill()


def break_rank(daemon: Daemon, rank: int, fault: int) -> tuple[int, str, float, set]:
    """Have a rank break while streams decode: (exit status, how the streams ended, seconds it took, what they were told)."""
    with daemon.client() as client:
        streams = [client.stream([1, 2, 3 + i], max_tokens=1000) for i in range(3)]
        rows = [iter(stream) for stream in streams]
        for row in rows:
            next(row)
        children = psutil.Process(daemon.process.pid).children(recursive=True)
        assert (daemon.place / daemon.instance / "steps").exists()
        order = daemon.place / "order"
        order.write_text(f"{rank} {fault}")
        order.rename(daemon.place / "fault")  # whole when it is there
        until(lambda: not (daemon.place / "fault").exists())
        began = time.monotonic()
        try:
            for row in rows:
                for _ in row:
                    pass
            how = "|".join(f"{s.result.finish} {s.result.error}" for s in streams)
            said = {s.result.message for s in streams}
        except KdClientError as error:
            how, said = error.name, set()
        status = daemon.end()
        took = time.monotonic() - began
    assert not [child for child in children if child.is_running()]
    return status, how, took, said


def starts_again(start, tp: int) -> Daemon:
    again = start(tp)
    assert not (again.place / "t" / "steps").stat().st_size == 0
    with again.client() as client:
        assert client.generate([1, 2, 3], max_tokens=8).finish == "length"
    assert again.end(signal.SIGTERM) == 0
    assert not (again.place / "t" / "steps").exists()
    return again


def told(daemon: Daemon, level: str) -> list[str]:
    return [" ".join([r["message"], r.get("reason", "")]).strip() for r in daemon.records() if r["level"] == level]


@pytest.mark.parametrize("tp, rank", RANKS)
@pytest.mark.parametrize("fault", [EXCEPTION, BROKEN_DEVICE, HANG], ids=["exception", "device", "hang"])
def test_one_message_names_rank_and_step(start, tp, rank, fault):
    daemon = start(tp)
    status, how, took, said = break_rank(daemon, rank, fault)
    assert status == 70
    assert how in ("error FATAL|error FATAL|error FATAL", "CLOSED", "LOST")
    [message] = told(daemon, "error")
    assert re.search(rf"\brank {rank}\b.* in step \d+ \(verify\)", message), message
    assert ("server.rank_stall_timeout_ms" in message) == (fault == HANG)
    assert all(message.endswith(words) for words in said) and "open it again" not in message
    assert took < SECONDS
    assert not [m for m in told(starts_again(start, tp), "warning") if "before this one" in m]


@pytest.mark.parametrize("tp, rank", RANKS)
def test_after_sigsegv_the_next_start_names_thread_rank_and_step(start, tp, rank):
    daemon = start(tp)
    status, _, took, _ = break_rank(daemon, rank, SEGFAULT)
    assert status == -signal.SIGSEGV
    assert took < SECONDS
    assert "Fatal Python error: Segmentation fault" in daemon.log()
    assert not told(daemon, "error")
    [words] = [m for m in told(starts_again(start, tp), "warning") if "before this one" in m]
    thread = f"kd-rank-{rank}" if rank else "kd-engine"
    assert re.search(
        rf"\(process {daemon.process.pid}\) died of SIGSEGV in thread {thread}, rank {rank} in step \d+ \(verify\)",
        words,
    ), words


def test_a_signal_that_another_process_sends_ends_it_too(start):
    """It does not recur, as a fault does."""
    daemon = start()
    assert daemon.end(signal.SIGSEGV) == -signal.SIGSEGV
    [words] = [m for m in told(starts_again(start, 8), "warning") if "before this one" in m]
    assert f"(process {daemon.process.pid}) died of SIGSEGV" in words


def test_a_killed_daemon_is_told_of_once(start):
    daemon = start()
    daemon.end(signal.SIGKILL)
    again = start()
    [words] = told(again, "warning")
    assert f"(process {daemon.process.pid}) ended without closing, between two steps" in words
    again.end(signal.SIGKILL)
    third = start()
    assert len(told(third, "warning")) == 2  # one log for all: each told of the one before it


def test_the_library_keeps_a_record_until_it_is_closed(library, small3, tmp_path):
    path = tmp_path / "steps"
    path.symlink_to(tmp_path / "elsewhere")
    with kd.Engine(small3, library=library, tp=2, threads=2, record=path) as engine:
        assert path.is_file() and not path.is_symlink() and path.stat().st_mode & 0o777 == 0o600
        engine.generate([1, 2, 3], max_tokens=4)
        record = ffi.from_buffer("kd_step_record *", path.read_bytes())
        assert (record.pid, record.tp, record.signal) == (os.getpid(), 2, 0)
        a, b = record.ranks[0:2]
        assert (
            0 < a.step == b.step <= 4
        )  # the prompt, and three rounds, of which some may have followed one another in one step
        assert a.meetings == b.meetings > 0 and a.thread != b.thread
        for number in (7, 11):
            engine._lib.kd_note_signal(number)
        record = ffi.from_buffer("kd_step_record *", path.read_bytes())
        assert (record.signal, record.signal_thread) == (7, threading.get_native_id())  # the first is the cause
        copy = tmp_path / "copy"
        copy.write_bytes(path.read_bytes())
    assert not path.exists() and not (tmp_path / "elsewhere").exists()
    assert "died of SIGBUS in thread" in (take_last_words(copy) or "")
    with pytest.raises(kd.KdError, match="cannot be made for the record of steps") as caught:
        kd.Engine(library=library, record=tmp_path / "no" / "folder")
    assert caught.value.name == "KD_E_IO"


def test_no_place_for_the_record_is_no_fault_of_a_model(tmp_path):
    (tmp_path / "t").mkdir(mode=0o700)
    (tmp_path / "t" / "steps").mkdir()  # unlink() refuses
    daemon = Daemon(tmp_path, model=None)
    assert daemon.process.wait(30) == 71
    assert "cannot be made for the record of steps" in daemon.log_path.read_text()


@pytest.mark.parametrize("damage", ["empty", "short", "other size", "wild"])
def test_a_damaged_record_is_told_and_removed(tmp_path: Path, damage):
    record = ffi.new("kd_step_record *")
    record.size = ffi.sizeof("kd_step_record")
    if damage == "other size":
        record.size += 64
    if damage == "wild":
        ffi.memmove(
            ffi.addressof(record, "pid"), b"\xff" * (ffi.sizeof("kd_step_record") - 4), ffi.sizeof("kd_step_record") - 4
        )
    raw = bytes(ffi.buffer(record))
    path = tmp_path / "steps"
    path.write_bytes({"empty": b"", "short": raw[:100]}.get(damage, raw))
    words = take_last_words(path)
    assert words is not None and words.startswith("the daemon before this one")
    assert ("of another version" in words) == (damage != "wild")
    assert not path.exists() and take_last_words(path) is None


def test_only_a_rank_that_keeps_others_waiting_is_late(tmp_path):
    """Ranks that all work may take their time, one that moves is not hung, and one alone keeps nobody waiting."""
    record = ffi.new("kd_step_record *")
    record.size, record.tp = ffi.sizeof("kd_step_record"), 2
    path = tmp_path / "steps"
    path.write_bytes(bytes(ffi.buffer(record)))
    ranks = Ranks(path)

    def look(*states: tuple[int, bool, int]) -> tuple[int | None, int]:
        for i, (stage, waiting, meetings) in enumerate(states):
            record.ranks[i].stage, record.ranks[i].waiting, record.ranks[i].meetings = stage, waiting, meetings
        with path.open("r+b") as file:
            file.write(bytes(ffi.buffer(record)))
        late, looks = ranks.look()
        return late and late.rank, looks

    verify = constants["KD_STAGE_VERIFY"]
    assert [look((verify, False, 7), (verify, False, 7)) for _ in range(3)] == [(None, 0)] * 3
    assert [look((verify, True, 8), (verify, False, 7)) for _ in range(3)] == [(None, 0), (1, 1), (1, 2)]
    assert look((verify, True, 8), (verify, True, 8)) == (None, 0)
    assert [look((verify, False, 8), (0, False, 8)) for _ in range(2)] == [(None, 0), (0, 1)]  # the other is done
    assert [look((0, False, 8), (0, False, 8)) for _ in range(2)] == [(None, 0)] * 2
    record.tp = 1
    assert [look((verify, False, 9)) for _ in range(3)] == [(None, 0)] * 3
