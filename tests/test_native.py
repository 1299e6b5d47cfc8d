"""The header as cffi sees it against the compiler's view, and the C interface under every kind of misuse."""

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kd import native
from kd.native import KdError, Library, NativeError, constants, ffi, load_library

ROOT = Path(__file__).resolve().parent.parent
HEADER = ROOT / "include" / "kd.h"
STRUCTS = [s for s in ffi.list_types()[0] if ffi.typeof(s).kind == "struct" and ffi.typeof(s).fields is not None]
E = {name: code for code, name in native.status_names.items()}


@pytest.fixture(scope="module")
def kd(library):
    return load_library("cpu", library)


# ---- the header --------------------------------------------------------------------------------------------


def test_layout_is_the_compilers(tmp_path):
    """sizeof and offsetof of everything, and every number, from a C program that includes kd.h."""
    lines, want = [], []
    for s in STRUCTS:
        lines.append(f'printf("%zu\\n", sizeof({s}));')
        want.append((s, ffi.sizeof(s)))
        for field, member in ffi.typeof(s).fields:
            lines.append(f'printf("%zu\\n", offsetof({s}, {field}));')
            want.append((f"{s}.{field}", member.offset))
            lines.append(f'printf("%zu\\n", sizeof((({s} *)0)->{field}));')
            want.append((f"sizeof {s}.{field}", ffi.sizeof(member.type)))
    for name, value in constants.items():
        lines.append(f'printf("%lld\\n", (long long)({name}));')
        want.append((name, value))
    source = tmp_path / "layout.c"
    source.write_text("#include <stdio.h>\n#include <kd.h>\nint main(void) {\n" + "\n".join(lines) + "\nreturn 0;\n}\n")
    program = tmp_path / "layout"
    subprocess.run(
        ["gcc", "-std=c11", "-Wall", "-Wextra", "-Werror", f"-I{HEADER.parent}", source, "-o", program], check=True
    )
    got = [int(line) for line in subprocess.run([program], check=True, capture_output=True, text=True).stdout.split()]
    assert dict(want) == dict(zip((name for name, _ in want), got, strict=True))
    assert len(STRUCTS) == 15 and len(constants) > 60, "the header has changed: look whether this test still sees all"


def test_every_name_of_the_header_is_bound():
    code = re.sub(r"/\*.*?\*/", "", native.CDEF, flags=re.S)
    assert set(native.functions) == set(re.findall(r"\b(kd_\w+)\(", code))
    assert set(constants) == set(re.findall(r"\b(KD_\w+)\b(?=\s*=|\s+\d)", code))
    assert len(set(native.status_names)) == len(native.status_names) == code.count("KD_E_") + 1


def test_every_struct_begins_with_its_size():
    for s in STRUCTS:
        field, member = ffi.typeof(s).fields[0]
        if s not in ("kd_stop_string", "kd_rank_record"):  # elements of an array of another struct
            assert field == "size" and member.offset == 0 and member.type.cname == "uint32_t"


def test_no_hidden_padding():
    """Padding would be bytes that a caller cannot zero and a newer library cannot use."""
    for s in STRUCTS:
        at = 0
        for field, member in ffi.typeof(s).fields:
            assert member.offset == at, f"{at - member.offset} bytes of padding before {s}.{field}"
            at += ffi.sizeof(member.type)
        assert at == ffi.sizeof(s), f"padding at the end of {s}"


# ---- finding and loading the library -----------------------------------------------------------------------


def test_cuda_without_its_library_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "_HERE", tmp_path)
    monkeypatch.setattr(native, "_ROOT", tmp_path)
    with pytest.raises(NativeError) as error:
        load_library("cuda")
    assert error.value.name == "KD_E_DEVICE" and error.value.code == E["KD_E_DEVICE"]
    for part in ('"cuda"', str(tmp_path / "lib" / "libkd_cuda.so"), str(tmp_path / "build/out/libkd_cuda.so")):
        assert part in error.value.message
    with pytest.raises(NativeError, match="run `make`"):
        load_library("cpu")
    for bad in ("../x", "CPU", "", "gpu/../cpu"):
        with pytest.raises(NativeError, match='use "cpu" or "cuda"'):
            load_library(bad)
    with pytest.raises(NativeError, match="there is no library at"):
        load_library("cpu", tmp_path / "absent.so")


def test_package_comes_before_the_checkout(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "_HERE", tmp_path / "kd")
    monkeypatch.setattr(native, "_ROOT", tmp_path)
    for place in native.library_paths("cpu"):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text("no library")
    with pytest.raises(NativeError, match=re.escape(str(tmp_path / "kd" / "lib"))):
        load_library("cpu")
    (tmp_path / "kd" / "kd.h").write_text("x")
    assert native.header_path() == tmp_path / "kd" / "kd.h"
    (tmp_path / "kd" / "kd.h").unlink()
    with pytest.raises(NativeError, match="reinstall kd"):
        native.header_path()


def compile_library(tmp_path, name, body):
    source, target = tmp_path / f"{name}.c", tmp_path / f"{name}.so"
    source.write_text(body)
    subprocess.run(["gcc", "-shared", "-fPIC", source, "-o", target], check=True)
    return target


def test_wrong_libraries_are_named(tmp_path):
    stub = compile_library(tmp_path, "stub", "int x;")
    with pytest.raises(NativeError, match=r"stub\.so lacks kd_abi_version, .*rebuild or reinstall"):
        load_library("cpu", stub)
    functions = "".join(f"int {name}() {{ return 99; }}\n" for name in native.functions)
    other = compile_library(tmp_path, "other", functions)
    with pytest.raises(
        NativeError, match=r"other\.so has ABI 99 and this package ABI 1; install both from one version"
    ):
        load_library("cpu", other)
    (tmp_path / "text.so").write_text("no library")
    with pytest.raises(NativeError, match=r"text\.so cannot be loaded"):
        load_library("cpu", tmp_path / "text.so")


@pytest.mark.parametrize("bytes_less", [1, 1000, 500_000])
def test_a_library_that_is_cut_short_is_not_loaded(library, tmp_path, bytes_less):
    """The loader maps what the headers promise: touching what is not there is SIGBUS, and no sentence."""
    cut = tmp_path / "libkd_cpu.so"
    raw = library.read_bytes()
    cut.write_bytes(raw[:-bytes_less])
    with pytest.raises(
        NativeError, match=rf"libkd_cpu.so is cut short: it has {len(raw) - bytes_less} bytes of {len(raw)};"
    ):
        load_library("cpu", cut)
    cut.write_bytes(raw[:40])
    with pytest.raises(NativeError, match=r"libkd_cpu\.so cannot be loaded"):
        load_library("cpu", cut)


def test_import_needs_no_library_numpy_or_tiktoken():
    code = """if True:
        import sys, kd
        kd.__version__
        import kd.config, kd.notify
        for name in ("kd.native", "kd.engine", "cffi", "numpy", "tiktoken", "jinja2"):
            assert name not in sys.modules, name
        assert "Engine" in dir(kd) and "__version__" in dir(kd)
        kd.KdError
        assert "kd.native" in sys.modules and "numpy" not in sys.modules and "tiktoken" not in sys.modules
        kd.Engine, kd.Tokenizer, kd.Sampling, kd.Event, kd.Completion, kd.ModelInfo, kd.NativeError
        assert issubclass(kd.KdClientError, Exception) and "KdClientError" in kd.__all__
        for name in ("numpy", "tiktoken", "jinja2", "torch"):
            assert name not in sys.modules, name
        try:
            kd.Nothing
        except AttributeError as error:
            assert "Nothing" in str(error)
        else:
            raise SystemExit("kd.Nothing exists")
    """
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(ROOT / "runtime")})


def test_errors_survive_pickling_between_processes():
    import copy

    error = KdError(-23, "KD_E_BUSY", "the queue is full")
    again = copy.copy(error)
    assert (again.code, again.name, again.message, str(again)) == (-23, "KD_E_BUSY", "the queue is full", str(error))


# ---- library functions -------------------------------------------------------------------------------------


def test_version_and_names(kd):
    assert kd.lib.kd_abi_version() == constants["KD_ABI_VERSION"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", kd.version)
    assert "cpu" in kd.build_info and "\n" not in kd.build_info and kd.version in kd.build_info
    for code, name in native.status_names.items():
        assert kd.status_name(code) == name
    for code in (1, -5, -1000, 2**31 - 1, -(2**31)):
        assert kd.status_name(code) == "KD_E_UNKNOWN"


def test_load_library_is_once(kd, library):
    assert load_library("cpu", library) is kd
    assert isinstance(kd, Library) and kd.path == library.resolve()


def test_last_error_is_of_this_thread(kd):
    assert kd.lib.kd_drain(ffi.NULL, 1) == E["KD_E_INVALID"]
    mine = kd.last_error()
    theirs = []

    def other():
        theirs.append(kd.last_error())
        kd.lib.kd_open(ffi.NULL, ffi.NULL)
        theirs.append(kd.last_error())

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert theirs[0] == "" and theirs[1] and kd.last_error() == mine
    with pytest.raises(KdError) as error:
        kd.check(kd.lib.kd_drain(ffi.NULL, 1))
    assert (error.value.code, error.value.name, error.value.message) == (E["KD_E_INVALID"], "KD_E_INVALID", mine)
    assert kd.check(5) == 5


def test_the_nccl_of_a_wheel_is_found_by_name(tmp_path):
    folder = tmp_path / "nvidia" / "nccl" / "lib"
    folder.mkdir(parents=True)
    (tmp_path / "nvidia" / "nccl" / "__init__.py").touch()
    (tmp_path / "n.c").write_text("int ncclAnything(void) { return 7; }\n")
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", "-o", folder / "libnccl.so.2", tmp_path / "n.c"],
        check=True,
    )
    program = "import ctypes, kd.native as n; n.find_nccl(); print(ctypes.CDLL('libnccl.so.2').ncclAnything())"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    )  # fmt: skip
    assert done.stdout.strip() == "7", done.stderr
