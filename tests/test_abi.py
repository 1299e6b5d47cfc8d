"""The C interface under every kind of misuse: NULL, wrong sizes, wrong state, wrong values, a forked process."""

import os
import subprocess
import sys

import pytest

from kd import native
from kd.native import constants, ffi, load_library

STRUCTS = [s for s in ffi.list_types()[0] if ffi.typeof(s).kind == "struct" and ffi.typeof(s).fields is not None]
E = {name: code for code, name in native.status_names.items()}


@pytest.fixture(scope="module")
def kd(library):
    return load_library("cpu", library)


@pytest.fixture
def engine(kd):
    """An open engine without a model."""
    out = ffi.new("kd_engine **")
    options = new("kd_options")
    options.threads = 1
    assert kd.lib.kd_open(out, options) == 0
    yield out[0]
    assert kd.lib.kd_close(out[0]) == 0


@pytest.fixture(scope="module")
def ready(kd, nano):
    """An engine with nano loaded."""
    out = ffi.new("kd_engine **")
    options = new("kd_options")
    options.threads = 1
    assert kd.lib.kd_open(out, options) == 0
    kd.check(kd.lib.kd_load(out[0], str(nano).encode(), ffi.NULL))
    kd.check(kd.lib.kd_load_wait(out[0], 120_000))
    yield out[0]
    assert kd.lib.kd_close(out[0]) == 0


def new(name):
    struct = ffi.new(f"{name} *")
    struct.size = ffi.sizeof(name)
    return struct


# ---- misuse ------------------------------------------------------------------------------------------------

N = ffi.NULL
PATH = ffi.new("char[]", b"/nonexistent")
WORD = ffi.new("uint64_t *")
TOKENS = ffi.new("int32_t[]", [1, 2, 3])
FLOATS = ffi.new("float[]", 16)

# function -> arguments after the engine, each good enough that only the NULL is wrong.
HANDLE = {
    "kd_load": lambda: (PATH, new("kd_load_options")),
    "kd_load_wait": lambda: (0,),
    "kd_load_cancel": lambda: (),
    "kd_load_progress": lambda: (new("kd_progress"),),
    "kd_load_info": lambda: (new("kd_model_info"),),
    "kd_load_try": lambda: (request(), trial()),
    "kd_load_accept": lambda: (N, 0),
    "kd_save": lambda: (PATH,),
    "kd_unload": lambda: (WORD,),
    "kd_drain": lambda: (0,),
    "kd_info": lambda: (new("kd_model_info"),),
    "kd_stats_get": lambda: (new("kd_stats"),),
    "kd_submit": lambda: (request(), WORD),
    "kd_cancel": lambda: (1,),
    "kd_request_credit": lambda: (1, 1),
    "kd_score": lambda: (TOKENS, 3, FLOATS),
    "kd_poll": lambda: (new("kd_event"), 1, 0),
    "kd_event_fd": lambda: (),
    "kd_builder_register": lambda: (builder(),),
    "kd_builder_list": lambda: (new("kd_builder_info"), 1),
    "kd_builder_use": lambda: (ffi.new("char[]", b"none"), 0, 0, WORD),
}
# pointers that may not be NULL: function -> positions among the arguments after the engine
REQUIRED = {
    **dict.fromkeys(
        ["kd_load", "kd_load_progress", "kd_load_info", "kd_save", "kd_info", "kd_stats_get", "kd_poll"], [0]
    ),
    "kd_load_try": [0, 1],
    "kd_submit": [0, 1],
    "kd_score": [0, 2],
    "kd_builder_register": [0],
    "kd_builder_list": [0],
    "kd_builder_use": [0],
}
NO_HANDLE = {
    "kd_abi_version",
    "kd_version",
    "kd_build_info",
    "kd_status_name",
    "kd_last_error",
    "kd_open",
    "kd_close",
    "kd_builder_build",
    "kd_note_signal",
    "kd_inspect",
}

_keep = []


def request(**values):
    r = new("kd_request")
    r.tokens, r.n_tokens, r.max_tokens = TOKENS, 3, 4
    for name, value in values.items():
        setattr(r, name, value)
    return r


def trial():
    t = new("kd_trial")
    t.tokens = TOKENS
    return t


def builder(name=b"mine"):
    """A builder that must never be called: its functions are not functions."""
    b = new("kd_tree_builder")
    text = ffi.new("char[]", name)
    _keep.append(text)
    b.abi, b.name, b.description = 1, text, text
    b.create, b.build, b.destroy = (ffi.cast(ffi.typeof(f), 16) for f in (b.create, b.build, b.destroy))
    return b


def test_every_function_is_misused_here():
    assert set(HANDLE) | NO_HANDLE == set(native.functions)


def refused(kd, rc, *names):
    assert rc in [E[n] for n in names], f"{kd.status_name(rc)}: {kd.last_error()}"
    text = kd.last_error()
    assert len(text) > 8 and "\n" not in text
    return text


@pytest.mark.parametrize("function", sorted(HANDLE))
def test_null_engine(kd, function):
    refused(kd, getattr(kd.lib, function)(N, *HANDLE[function]()), "KD_E_INVALID")


@pytest.mark.parametrize(("function", "position"), [(f, p) for f, ps in REQUIRED.items() for p in ps])
def test_null_argument(kd, ready, function, position):
    arguments = list(HANDLE[function]())
    arguments[position] = N
    refused(kd, getattr(kd.lib, function)(ready, *arguments), "KD_E_INVALID")


def test_null_where_it_is_allowed(kd, engine, nano):
    assert kd.lib.kd_close(N) == 0
    out = ffi.new("kd_engine **")
    assert kd.lib.kd_open(out, N) == 0 and kd.lib.kd_close(out[0]) == 0
    assert kd.lib.kd_builder_list(engine, N, 0) > 0
    assert kd.lib.kd_load(engine, str(nano).encode(), N) == 0
    assert kd.lib.kd_load_wait(engine, 120_000) == 0
    assert kd.lib.kd_builder_use(engine, b"none", 0, 0, N) == 0
    assert kd.lib.kd_unload(engine, N) == 0
    refused(kd, kd.lib.kd_open(N, N), "KD_E_INVALID")


# struct -> how it gets into the library. Inputs must be all known or zero, outputs are filled as far as they go.
INPUTS = {
    "kd_options": lambda kd, engine, s: kd.lib.kd_open(ffi.new("kd_engine **"), s),
    "kd_load_options": lambda kd, engine, s: kd.lib.kd_load(engine, PATH, s),
    "kd_request": lambda kd, engine, s: kd.lib.kd_submit(engine, s, WORD),
    "kd_trial": lambda kd, engine, s: kd.lib.kd_load_try(engine, request(), s),
    "kd_tree_builder": lambda kd, engine, s: kd.lib.kd_builder_register(engine, s),
    "kd_tree_in": lambda kd, engine, s: kd.lib.kd_builder_build(b"none", s, new("kd_tree_out")),
}
OUTPUTS = {
    "kd_progress": lambda kd, engine, s: kd.lib.kd_load_progress(engine, s),
    "kd_model_info": lambda kd, engine, s: kd.lib.kd_info(engine, s),
    "kd_stats": lambda kd, engine, s: kd.lib.kd_stats_get(engine, s),
    "kd_event": lambda kd, engine, s: kd.lib.kd_poll(engine, s, 1, 0),
    "kd_builder_info": lambda kd, engine, s: kd.lib.kd_builder_list(engine, s, 1),
    "kd_tree_out": lambda kd, engine, s: kd.lib.kd_builder_build(b"none", new("kd_tree_in"), s),
}


def test_every_struct_is_misused_here():
    assert set(INPUTS) | set(OUTPUTS) | {"kd_stop_string", "kd_rank_record", "kd_step_record"} == set(STRUCTS)


def good(name):
    return {"kd_request": request, "kd_trial": trial, "kd_tree_builder": builder}.get(name, lambda: new(name))()


def room(name, size, fill=0):
    """A struct in a larger, filled buffer; returns it and the buffer."""
    buffer = ffi.new("uint8_t[]", [fill] * 8192)
    ffi.memmove(buffer, good(name), ffi.sizeof(name))
    struct = ffi.cast(f"{name} *", buffer)
    struct.size = size
    return struct, buffer


@pytest.mark.parametrize("name", [*INPUTS, *OUTPUTS])
def test_short_struct(kd, ready, name):
    call = (INPUTS | OUTPUTS)[name]
    for size in (0, 1, 3, 4, 8, ffi.sizeof(name) - 1):
        struct, _ = room(name, size)
        refused(kd, call(kd, ready, struct), "KD_E_SIZE")


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("where", ["first", "last"])
def test_struct_from_the_future_that_says_something(kd, ready, name, where):
    known = ffi.sizeof(name)
    struct, buffer = room(name, known + 64)
    buffer[known if where == "first" else known + 63] = 1
    refused(kd, INPUTS[name](kd, ready, struct), "KD_E_TOO_NEW")


@pytest.mark.parametrize("name", INPUTS)
def test_struct_from_the_future_that_says_nothing(kd, engine, name):
    """The same as without: whatever the call then says, it is not about the size."""
    struct, buffer = room(name, ffi.sizeof(name) + 64)
    buffer[ffi.sizeof(name) + 64] = 1  # beyond the struct: not to be looked at
    out = ffi.new("kd_engine **")
    rc = kd.lib.kd_open(out, struct) if name == "kd_options" else INPUTS[name](kd, engine, struct)
    assert rc not in (E["KD_E_SIZE"], E["KD_E_TOO_NEW"]), kd.last_error()
    if out[0]:
        kd.lib.kd_close(out[0])
    if name == "kd_load_options":
        assert kd.lib.kd_load_wait(engine, 60_000) < 0  # /nonexistent


@pytest.mark.parametrize("name", OUTPUTS)
def test_output_struct_from_the_future(kd, ready, name):
    """What the library does not know comes back as zero, and nothing is written behind it."""
    known = ffi.sizeof(name)
    struct, buffer = room(name, known + 64, fill=0xAA)
    rc = OUTPUTS[name](kd, ready, struct)
    if rc == E["KD_E_TOO_NEW"]:
        struct, buffer = room(name, known + 64)
        ffi.memmove(buffer + known + 64, b"\xaa" * 512, 512)
        rc = OUTPUTS[name](kd, ready, struct)
    assert rc >= 0, kd.last_error()
    assert struct.size == known + 64
    whole = bytes(ffi.buffer(buffer))
    assert set(whole[known + 64 : known + 576]) == {0xAA}
    if name in ("kd_progress", "kd_model_info", "kd_stats"):
        assert not any(whole[known : known + 64])


@pytest.mark.parametrize("name", [*INPUTS, *OUTPUTS])
def test_absurd_size_is_refused_before_it_is_read(kd, ready, name):
    struct, _ = room(name, 0xFFFFFFFF)
    refused(kd, (INPUTS | OUTPUTS)[name](kd, ready, struct), "KD_E_SIZE", "KD_E_TOO_NEW")


AT_THE_EDGE = """
import ctypes, mmap, sys
import test_abi as t
from kd.native import ffi, load_library
kd, name = load_library("cpu", sys.argv[1]), sys.argv[2]
out = ffi.new("kd_engine **")
assert kd.lib.kd_open(out, ffi.NULL) == 0
page = mmap.PAGESIZE
memory = mmap.mmap(-1, 2 * page)
start = int(ffi.cast("intptr_t", ffi.from_buffer(memory)))
assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + page), page, 0) == 0
struct = ffi.cast(name + " *", start + page - ffi.sizeof(name))
ffi.memmove(struct, t.good(name), ffi.sizeof(name))
for size in (4096 + 8, 0xFFFFFFFF, ffi.sizeof(name)):
    struct.size = size
    print(t.INPUTS[name](kd, out[0], struct), flush=True)
"""


@pytest.mark.parametrize("name", INPUTS)
def test_nothing_is_read_behind_a_struct(library, name):
    """The struct ends where memory ends. A size that cannot be is refused without looking there."""
    done = subprocess.run(
        [sys.executable, "-c", AT_THE_EDGE, str(library), name],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    assert done.returncode == 0, f"the library read behind a {name}: {done.returncode} {done.stderr}"
    too_large, absurd, right = map(int, done.stdout.split())
    assert too_large == absurd == E["KD_E_SIZE"] and right not in (E["KD_E_SIZE"], E["KD_E_TOO_NEW"])


@pytest.mark.parametrize("name", ["kd_load_options", "kd_request"])
def test_reserved_fields_must_be_zero(kd, ready, name):
    """A later version may give them a meaning: what asks for it must not be accepted today."""
    struct, _ = room(name, ffi.sizeof(name))
    if name == "kd_load_options":
        struct.flags = 1 << 31
    else:
        struct.reserved0 = 1
    refused(kd, INPUTS[name](kd, ready, struct), "KD_E_TOO_NEW", "KD_E_INVALID")


@pytest.mark.parametrize("value", [2, -1])
def test_switches_are_off_or_on(kd, value):
    for name in ("share_devices", "prefix_cache"):
        options = new("kd_options")
        setattr(options, name, value)
        assert kd.lib.kd_open(ffi.new("kd_engine **"), options) == E["KD_E_INVALID"]
        assert name in kd.last_error()


def test_empty_names_are_refused(kd, engine):
    assert kd.lib.kd_load(engine, b"", N) == E["KD_E_INVALID"]
    assert kd.last_error() == "path is empty: give the model's folder"
    options, draft = new("kd_load_options"), ffi.new("char[]", b"")
    options.draft, options.draft_path = 2, draft
    assert kd.lib.kd_load(engine, PATH, options) == E["KD_E_INVALID"]
    assert "draft_path is empty" in kd.last_error()


def test_loads_whose_ends_nobody_polls(kd, engine, nano):
    """Their number is not bounded; of their events the first 32 are kept."""
    for _ in range(40):
        assert kd.lib.kd_load(engine, PATH, N) == 0
        assert kd.lib.kd_load_wait(engine, 10_000) == E["KD_E_IO"]
    kd.check(kd.lib.kd_load(engine, str(nano).encode(), N))
    kd.check(kd.lib.kd_load_wait(engine, 120_000))
    events = ffi.new("kd_event[]", 64)
    events[0].size = ffi.sizeof("kd_event")
    assert kd.lib.kd_poll(engine, events, 64, 0) == 32
    assert {(e.type, e.status) for e in events[0:32]} == {(constants["KD_EVENT_LOAD"], E["KD_E_IO"])}
    kd.check(kd.lib.kd_unload(engine, N))
    assert kd.lib.kd_load(engine, PATH, N) == 0  # there is room again
    assert kd.lib.kd_load_wait(engine, 10_000) == E["KD_E_IO"]
    events[0].size = ffi.sizeof("kd_event")
    assert kd.lib.kd_poll(engine, events, 64, 1000) == 1


# ---- wrong state -------------------------------------------------------------------------------------------


LOADING = ["kd_load_cancel", "kd_load_wait", "kd_load_info", "kd_load_try", "kd_load_accept"]


@pytest.mark.parametrize("function", ["kd_info", "kd_submit", "kd_score", "kd_unload", *LOADING])
def test_without_a_model(kd, engine, function):
    refused(kd, getattr(kd.lib, function)(engine, *HANDLE[function]()), "KD_E_STATE")
    for unknown in ("kd_cancel", "kd_request_credit"):
        refused(kd, getattr(kd.lib, unknown)(engine, *HANDLE[unknown]()), "KD_E_NOT_FOUND")


def test_always_possible(kd, engine):
    stats = new("kd_stats")
    assert kd.lib.kd_stats_get(engine, stats) == 0 and stats.state == constants["KD_STATE_EMPTY"]
    assert kd.lib.kd_poll(engine, new("kd_event"), 1, 0) == 0
    assert kd.lib.kd_event_fd(engine) >= 0
    assert kd.lib.kd_drain(engine, 1) == 0 and kd.lib.kd_drain(engine, 0) == 0
    assert kd.lib.kd_load_progress(engine, new("kd_progress")) == 0


def test_with_a_model(kd, ready, nano):
    refused(kd, kd.lib.kd_load(ready, str(nano).encode(), N), "KD_E_EXISTS")
    refused(kd, kd.lib.kd_load_cancel(ready), "KD_E_STATE")
    refused(kd, kd.lib.kd_cancel(ready, 0), "KD_E_NOT_FOUND")
    refused(kd, kd.lib.kd_cancel(ready, 2**64 - 1), "KD_E_NOT_FOUND")
    refused(kd, kd.lib.kd_builder_use(ready, b"no-such-builder", 0, 0, N), "KD_E_NOT_FOUND")
    refused(kd, kd.lib.kd_builder_use(ready, b"none", -1, 0, N), "KD_E_INVALID")
    refused(kd, kd.lib.kd_builder_use(ready, b"heap", 100_000, 0, N), "KD_E_INVALID")
    refused(kd, kd.lib.kd_poll(ready, new("kd_event"), 0, 0), "KD_E_INVALID")


def test_one_load_at_a_time(kd, engine, nano):
    assert kd.lib.kd_load(engine, str(nano).encode(), N) == 0
    refused(kd, kd.lib.kd_load(engine, str(nano).encode(), N), "KD_E_BUSY", "KD_E_EXISTS")
    assert kd.lib.kd_load_wait(engine, 120_000) == 0


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"n_tokens": 0}, "KD_E_INVALID"),
        ({"tokens": N}, "KD_E_INVALID"),
        ({"max_tokens": 0}, "KD_E_INVALID"),
        ({"max_tokens": 2**32 - 1}, "KD_E_CONTEXT"),
        ({"max_tokens": 2046}, "KD_E_CONTEXT"),
        ({"flags": 1 << 30}, "KD_E_TOO_NEW"),
        ({"flags": 16, "builder": N}, "KD_E_INVALID"),
        ({"temperature": -1}, "KD_E_SAMPLING"),
        ({"temperature": float("nan")}, "KD_E_SAMPLING"),
        ({"temperature": float("inf")}, "KD_E_SAMPLING"),
        ({"top_p": 1.5}, "KD_E_SAMPLING"),
        ({"top_p": -0.1}, "KD_E_SAMPLING"),
        ({"top_p": float("nan")}, "KD_E_SAMPLING"),
        ({"min_p": 2}, "KD_E_SAMPLING"),
        ({"min_p": float("nan")}, "KD_E_SAMPLING"),
        ({"top_k": -1}, "KD_E_SAMPLING"),
        ({"n_stop_ids": 1}, "KD_E_INVALID"),
        ({"n_stop_ids": 17, "stop_ids": TOKENS}, "KD_E_INVALID"),
        ({"n_stop_strings": 1}, "KD_E_INVALID"),
        ({"n_stop_strings": 2**32 - 1}, "KD_E_INVALID"),
    ],
)
def test_bad_requests(kd, ready, values, name):
    WORD[0] = 0
    refused(kd, kd.lib.kd_submit(ready, request(**values), WORD), name)
    assert WORD[0] == 0


@pytest.mark.parametrize("token", [-1, 4096, 2**31 - 1, -(2**31)])
def test_tokens_outside_the_vocabulary(kd, ready, token):
    bad = ffi.new("int32_t[]", [1, token, 2])
    assert f"{token}" in refused(kd, kd.lib.kd_submit(ready, request(tokens=bad), WORD), "KD_E_TOKEN")
    refused(kd, kd.lib.kd_score(ready, bad, 3, FLOATS), "KD_E_TOKEN")


def test_stop_strings_need_token_bytes(kd, ready):
    stop = ffi.new("kd_stop_string[1]")
    text = ffi.new("char[]", b"x")
    stop[0].bytes, stop[0].length = text, 1
    refused(kd, kd.lib.kd_submit(ready, request(stop_strings=stop, n_stop_strings=1), WORD), "KD_E_STATE")


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"tp": 3}, "KD_E_INVALID"),
        ({"tp": -1}, "KD_E_INVALID"),
        ({"tp": 16}, "KD_E_INVALID"),
        ({"threads": -1}, "KD_E_INVALID"),
        ({"isa": 9}, "KD_E_INVALID"),
        ({"isa": -1}, "KD_E_INVALID"),
        ({"max_streams": 65}, "KD_E_INVALID"),
        ({"max_streams": -1}, "KD_E_INVALID"),
        ({"max_queue": 5000}, "KD_E_INVALID"),
        ({"max_rows": 2}, "KD_E_INVALID"),
        ({"max_nodes": 257}, "KD_E_INVALID"),
        ({"max_nodes": -1}, "KD_E_INVALID"),
        ({"prefill_chunk": 2000}, "KD_E_INVALID"),
        ({"prefix_cache": 2}, "KD_E_INVALID"),
    ],
)
def test_bad_options(kd, values, name):
    options = new("kd_options")
    for field, value in values.items():
        setattr(options, field, value)
    out = ffi.new("kd_engine **")
    assert next(iter(values)) in refused(kd, kd.lib.kd_open(out, options), name)
    assert out[0] == N


def test_forked_child_is_refused(kd, ready):
    """Every call on the parent's handle says KD_E_FORKED, at once and without touching it."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            results = [f"{f}={getattr(kd.lib, f)(ready, *HANDLE[f]())}" for f in sorted(HANDLE)]
            results.append(f"kd_close={kd.lib.kd_close(ready)}")
            os.write(write, " ".join(results).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        got = dict(item.split("=") for item in pipe.read().split())
    assert os.waitpid(pid, 0)[1] == 0
    assert got == {f: str(E["KD_E_FORKED"]) for f in [*HANDLE, "kd_close"]}
    assert kd.lib.kd_stats_get(ready, new("kd_stats")) == 0


def test_builders_are_checked_when_registered(kd, engine):
    for field, value, name in [
        ("abi", 2, "KD_E_INVALID"),
        ("create", N, "KD_E_INVALID"),
        ("build", N, "KD_E_INVALID"),
        ("destroy", N, "KD_E_INVALID"),
        ("name", N, "KD_E_INVALID"),
    ]:
        b = builder()
        setattr(b, field, value)
        refused(kd, kd.lib.kd_builder_register(engine, b), name)
    for bad in (b"", b"A", b"a b", b"x" * 32, b"\xff", b"a/b"):
        refused(kd, kd.lib.kd_builder_register(engine, builder(bad)), "KD_E_INVALID")
    assert kd.lib.kd_builder_register(engine, builder(b"x" * 31)) == 0
    refused(kd, kd.lib.kd_builder_register(engine, builder(b"x" * 31)), "KD_E_EXISTS")
    refused(kd, kd.lib.kd_builder_register(engine, builder(b"heap")), "KD_E_EXISTS")


def test_nothing_is_printed(kd, ready, capfd):
    for function in HANDLE:
        getattr(kd.lib, function)(N, *HANDLE[function]())
    kd.lib.kd_load(ready, PATH, N)
    kd.lib.kd_submit(ready, request(flags=1 << 30), WORD)
    assert capfd.readouterr() == ("", "")
