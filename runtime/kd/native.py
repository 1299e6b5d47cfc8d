"""The library through cffi: include/kd.h itself is the binding, read between its two marker comments.

A wheel carries the header as kd/kd.h and the libraries in kd/lib; in a checkout they are include/kd.h and build/out.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import struct
import threading
from pathlib import Path
from typing import Any

import cffi

_HERE = Path(__file__).resolve().parent
_ROOT = _HERE.parents[1]


class KdError(Exception):
    """A call that failed. code: kd_status, negative. name: "KD_E_BUSY". message: what, where, what to do."""

    def __init__(self, code: int, name: str, message: str):
        super().__init__(f"{message} [{name}]" if message else name)
        self.code, self.name, self.message = code, name, message

    def __reduce__(self) -> tuple:
        return type(self), (self.code, self.name, self.message)


class NativeError(KdError):
    """The header or the library is missing, cannot be loaded, or is of another version than this package."""


def header_path() -> Path:
    """Where kd.h is: beside this file (installed), else in the checkout. Raises NativeError."""
    for path in (_HERE / "kd.h", _ROOT / "include" / "kd.h"):
        if path.is_file():
            return path
    raise NativeError(-61, "KD_E_IO", f"kd.h is neither in {_HERE} nor in {_ROOT / 'include'}; reinstall kd")


def _read_cdef() -> str:
    path = header_path()
    found = re.search(r"/\* cdef: begin \*/(.*)/\* cdef: end \*/", path.read_text(encoding="utf-8"), re.S)
    if not found:
        raise NativeError(-61, "KD_E_IO", f"{path} has no cdef markers; reinstall kd")
    return found[1]


CDEF = _read_cdef()
ffi = cffi.FFI()
ffi.cdef(CDEF)

# Every KD_ number of the header: #define and enum alike. They need no library.
_header = ffi.dlopen(None)
constants: dict[str, int] = {name: getattr(_header, name) for name in dir(_header) if name.startswith("KD_")}
status_names: dict[int, str] = {value: name for name, value in ffi.typeof("kd_status").relements.items()}
functions: tuple[str, ...] = tuple(name for name in dir(_header) if name.startswith("kd_"))


def _touch_types() -> None:
    # cffi builds types on first use, and not safely from several threads (cffi issue 271): build them all now.
    typedefs, structs, _ = ffi.list_types()
    for name in [*typedefs, *(f"struct {s}" for s in structs)]:
        kind = ffi.typeof(name)
        if kind.kind == "struct":
            for _, member in kind.fields or ():
                ffi.typeof(ffi.getctype(member.type))
        ffi.typeof(f"{name} *")
        if kind.kind != "struct" or kind.fields is not None:  # an opaque one has no arrays
            ffi.typeof(f"{name}[]")
    for name in ("int32_t[]", "uint32_t[]", "uint8_t[]", "uint64_t *", "float[]", "char[]"):
        ffi.typeof(name)


_touch_types()


def whole(path: Path) -> Path:
    """`path`, unless it is an ELF file that lacks its end: loading that may end the process with SIGBUS. Raises NativeError."""
    try:
        with path.open("rb") as file:
            head = file.read(64)
            size = os.fstat(file.fileno()).st_size
    except OSError:
        return path  # what is wrong with it the loader will say
    if head.startswith(b"\x7fELF\x02\x01") and len(head) == 64:
        # The table of section headers is the last thing that a linker writes.
        (at,), (entry, n) = struct.unpack_from("<Q", head, 40), struct.unpack_from("<HH", head, 58)
        if at + entry * n > size:
            raise NativeError(
                constants["KD_E_DEVICE"],
                "KD_E_DEVICE",
                f"{path} is cut short: it has {size} bytes of {at + entry * n}; build or install it again",
            )
    return path


class Library:
    """One loaded library: `lib` has the functions of kd.h, `check` turns their status into KdError."""

    def __init__(self, path: Path, device: str):
        self.path, self.device = path, device
        try:
            self.lib: Any = ffi.dlopen(str(whole(path)))
        except OSError as error:
            raise NativeError(
                constants["KD_E_DEVICE"], "KD_E_DEVICE", f"{path} cannot be loaded: {error}; rebuild it on this machine"
            ) from None
        missing = []
        for name in functions:
            try:
                getattr(self.lib, name)  # also builds the function's type, see _touch_types
            except AttributeError:
                missing.append(name)
        if missing:
            raise NativeError(
                constants["KD_E_DEVICE"],
                "KD_E_DEVICE",
                f"{path} lacks {', '.join(missing[:3])}: it is no kd library, or older than this "
                "package; rebuild or reinstall it",
            )
        theirs, ours = self.lib.kd_abi_version(), constants["KD_ABI_VERSION"]
        if theirs != ours:
            raise NativeError(
                constants["KD_E_DEVICE"],
                "KD_E_DEVICE",
                f"{path} has ABI {theirs} and this package ABI {ours}; install both from one version",
            )

    @property
    def version(self) -> str:
        return ffi.string(self.lib.kd_version()).decode()

    @property
    def build_info(self) -> str:
        return ffi.string(self.lib.kd_build_info()).decode()

    def status_name(self, code: int) -> str:
        return ffi.string(self.lib.kd_status_name(code)).decode()

    def last_error(self) -> str:
        """The sentence of this thread's last failing call."""
        return ffi.string(self.lib.kd_last_error()).decode("utf-8", "replace")

    def check(self, rc: int) -> int:
        """rc itself if it is no failure; else raise KdError. Call it on the thread that made the call."""
        if rc >= 0:
            return rc
        raise KdError(rc, self.status_name(rc), self.last_error())


_libraries: dict[Path, Library] = {}
_libraries_lock = threading.Lock()


def library_paths(device: str) -> tuple[Path, Path]:
    """Where a backend's library is looked for: in the package, then in the checkout's build/out."""
    name = f"libkd_{device}.so"
    return _HERE / "lib" / name, _ROOT / "build" / "out" / name


def find_library(device: str) -> Path:
    """The file of a backend's library. Raises NativeError."""
    if not isinstance(device, str) or not re.fullmatch(r"[a-z0-9_]{1,16}", device):
        raise NativeError(
            constants["KD_E_DEVICE"], "KD_E_DEVICE", f'device "{device!s:.40}" is not known; use "cpu" or "cuda"'
        )
    places = library_paths(device)
    for place in places:
        if place.is_file():
            return place
    how = "run `make`" if device == "cpu" else 'build it where nvcc is, or ask for device "cpu"'
    raise NativeError(
        constants["KD_E_DEVICE"],
        "KD_E_DEVICE",
        f'there is no library for device "{device}": neither {places[0]} nor {places[1]} exists; {how}',
    )


def load_library(device: str = "cpu", path: str | Path | None = None) -> Library:
    """The backend's library, loaded once a process. path: this file instead of the usual places.

    A backend without its library is an error, never another backend. Raises NativeError.
    """
    if path is None:
        found = find_library(device)
    else:
        found = Path(path)
        if not found.is_file():
            raise NativeError(constants["KD_E_DEVICE"], "KD_E_DEVICE", f"there is no library at {found}")
    found = found.resolve()
    with _libraries_lock:
        if found not in _libraries:
            _libraries[found] = Library(found, device)
        return _libraries[found]


def find_nccl() -> None:
    """Load the NCCL of PyPI's wheel, if it is installed: the library asks for libnccl.so.2 by name alone, and only for
    GPUs that cannot read each other's memory."""
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / "lib" / "libnccl.so.2"
        if path.is_file():
            ctypes.CDLL(str(whole(path)))
            return
