"""include/kd.h: compiles alone as C and C++, and holds between its markers only what cffi takes."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import cffi
import pytest

ROOT = Path(__file__).resolve().parent.parent
HEADER = (ROOT / "include" / "kd.h").read_text()
CDEF = re.search(r"/\* cdef: begin \*/(.*)/\* cdef: end \*/", HEADER, re.S)[1]
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"]


def without_comments(text: str) -> str:
    return re.sub(r"/\*.*?\*/", " ", text, flags=re.S)


def structs() -> list[str]:
    return re.findall(r"typedef struct (kd_\w+) \{", CDEF)


def compile_and_run(tmp_path: Path, compiler: list[str], suffix: str, source: str) -> str:
    file = tmp_path / f"probe{suffix}"
    file.write_text(source)
    program = tmp_path / "probe"
    subprocess.run([*compiler, "-I", str(ROOT / "include"), str(file), "-o", str(program)], check=True)
    return subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize(
    ("compiler", "standard", "suffix"),
    [
        ("gcc", "c11", ".c"),
        ("gcc", "c17", ".c"),
        ("g++", "c++11", ".cpp"),
        ("g++", "c++17", ".cpp"),
        ("g++", "c++20", ".cpp"),
    ],
)
def test_compiles_alone_and_twice(tmp_path, compiler, standard, suffix):
    file = tmp_path / f"alone{suffix}"
    file.write_text('#include "kd.h"\n#include "kd.h"\nint main(void) { return KD_OK; }\n')
    done = subprocess.run(
        [compiler, f"-std={standard}", *WARNINGS, "-fsyntax-only", "-I", str(ROOT / "include"), str(file)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_includes_only_two_headers():
    assert sorted(re.findall(r"#include\s+(\S+)", HEADER)) == ["<stddef.h>", "<stdint.h>"]


def test_cdef_region_holds_only_what_cffi_takes():
    code = without_comments(CDEF)
    for line in re.findall(r"^\s*#.*$", code, re.M):
        assert re.fullmatch(r"\s*#define KD_\w+ \d+\s*", line), f"not an integer #define: {line.strip()}"
    assert "__attribute__" not in code
    assert "static inline" not in code
    ffi = cffi.FFI()
    ffi.cdef(CDEF)
    for name in structs():
        assert ffi.sizeof(name) > 0


def test_structs_start_with_their_size():
    passed_by_value_array = {"kd_stop_string", "kd_rank_record"}  # elements of an array, versioned with what holds it
    for name in structs():
        body = re.search(rf"typedef struct {name} \{{(.*?)\}} {name};", CDEF, re.S)[1]
        first = without_comments(body).split(";")[0].strip()
        assert first == "uint32_t size" or name in passed_by_value_array, f"{name} starts with `{first}`"


def test_cffi_and_the_compiler_agree_on_every_offset(tmp_path):
    ffi = cffi.FFI()
    ffi.cdef(CDEF)
    lines, want = [], []
    for name in structs():
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        want.append(f"{name} {ffi.sizeof(name)}")
        for field, _ in ffi.typeof(name).fields:
            lines.append(f'printf("{name}.{field} %zu\\n", offsetof({name}, {field}));')
            want.append(f"{name}.{field} {ffi.offsetof(name, field)}")
    source = '#include <stdio.h>\n#include "kd.h"\nint main(void) {\n' + "\n".join(lines) + "\nreturn 0;\n}\n"
    assert compile_and_run(tmp_path, ["gcc", "-std=c11"], ".c", source).split("\n")[:-1] == want


def test_structs_have_no_hidden_padding():
    """A caller that zeroes a struct field by field must have zeroed all of it."""
    ffi = cffi.FFI()
    ffi.cdef(CDEF)
    for name in structs():
        end = 0
        for field, info in ffi.typeof(name).fields:
            assert info.offset == end, f"{name}: {info.offset - end} bytes of padding before {field}"
            end = info.offset + ffi.sizeof(info.type)
        assert end == ffi.sizeof(name), f"{name}: {ffi.sizeof(name) - end} bytes of padding at the end"


def test_enum_and_define_values_are_what_the_compiler_sees(tmp_path):
    ffi = cffi.FFI()
    ffi.cdef(CDEF)
    names = sorted(set(re.findall(r"\bKD_[A-Z0-9_]+\b(?=\s*=\s*-?\d)", without_comments(CDEF))))
    names += re.findall(r"#define (KD_\w+) \d+", CDEF)
    constants = ffi.dlopen(None)
    source = "".join(f'printf("{n} %d\\n", (int){n});\n' for n in names)
    source = f'#include <stdio.h>\n#include "kd.h"\nint main(void) {{\n{source}return 0;\n}}\n'
    printed = compile_and_run(tmp_path, ["gcc", "-std=c11"], ".c", source).split("\n")[:-1]
    assert printed == [f"{n} {getattr(constants, n)}" for n in names]


def test_status_values_are_unique_and_negative():
    body = re.search(r"typedef enum kd_status \{(.*?)\} kd_status;", CDEF, re.S)[1]
    values = [int(v) for v in re.findall(r"=\s*(-?\d+)", without_comments(body))]
    assert values[0] == 0
    assert all(v < 0 for v in values[1:])
    assert len(set(values)) == len(values)


# Values that programs already compiled rely on. Add to this list; never change an entry.
FROZEN = {
    "KD_OK": 0,
    "KD_E_INVALID": -1,
    "KD_E_TOO_NEW": -2,
    "KD_E_SIZE": -3,
    "KD_E_FORKED": -4,
    "KD_E_STATE": -20,
    "KD_E_NOT_FOUND": -21,
    "KD_E_DONE": -22,
    "KD_E_BUSY": -23,
    "KD_E_DRAINING": -24,
    "KD_E_TIMEOUT": -25,
    "KD_E_CANCELLED": -26,
    "KD_E_EXISTS": -27,
    "KD_E_CONTEXT": -40,
    "KD_E_TOKEN": -41,
    "KD_E_SAMPLING": -42,
    "KD_E_SLOW_READER": -43,
    "KD_E_NOMEM": -60,
    "KD_E_IO": -61,
    "KD_E_MODEL": -62,
    "KD_E_DEVICE": -63,
    "KD_E_BUILDER": -64,
    "KD_E_FATAL": -90,
}


def test_status_values_are_never_renumbered():
    found = {n: int(v) for n, v in re.findall(r"(KD_(?:OK|E_\w+)) = (-?\d+)", CDEF)}
    assert {n: found.get(n) for n in FROZEN} == FROZEN


def test_every_function_says_its_thread():
    for comment, function in re.findall(r"(/\*(?:(?!\*/).)*\*/)\s*[\w ]+?\*?(kd_\w+)\([^;{]*\);", CDEF, re.S):
        assert re.search(r"\[(any|poller)[^\]]*\]", comment), f"{function}: its comment names no thread"


def test_limits_agree_with_the_arrays():
    tokens = int(re.search(r"#define KD_MAX_TOKENS_EVENT (\d+)", CDEF)[1])
    depth = int(re.search(r"#define KD_MAX_DEPTH (\d+)", CDEF)[1])
    stops = int(re.search(r"#define KD_MAX_STOP_IDS (\d+)", CDEF)[1])
    assert tokens == depth + 1
    event = re.search(r"typedef struct kd_event \{(.*?)\} kd_event;", CDEF, re.S)[1]
    assert {int(n) for n in re.findall(r"\[(\d+)\]", without_comments(event))} == {tokens}
    assert f"stop_ids[{stops}]" in CDEF
