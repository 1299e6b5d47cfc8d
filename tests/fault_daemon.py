"""The daemon with the test library, in which faults can be planted: `python tests/fault_daemon.py FILE LIBRARY ...`, where
the rest are the daemon's own arguments.

Once FILE is there, it is read as "RANK FAULT" and that rank breaks: 0 an exception, 1 its device, 2 SIGSEGV, 3 a loop.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1] / "runtime")]

from kd import __main__ as entry  # noqa: E402
from kd import config as configuration  # noqa: E402
from kd.native import ffi  # noqa: E402


def main() -> int:
    fault, library = Path(sys.argv[1]), sys.argv[2]
    args = entry._arguments(sys.argv[3:])
    flags = {key: getattr(args, key) for key in (*entry._FLAGS.values(), "server.insecure")}
    flags.update(item.split("=", 1) for item in args.settings)
    config = configuration.load(flags=flags, file=args.config)
    open_real, make_sampling, describe = entry._backend(config, library)

    def open_engine():
        engine = open_real()

        def wait_for_fault():
            while not fault.exists():
                time.sleep(0.02)
            rank, kind = map(int, fault.read_text().split())
            fault.unlink()
            handle = ctypes.c_void_p(int(ffi.cast("uintptr_t", engine._handle)))
            ctypes.CDLL(library).kd_probe_break_rank(handle, rank, kind)

        threading.Thread(target=wait_for_fault, daemon=True).start()
        return engine

    return entry.serve(config, open_engine, make_sampling, describe)


if __name__ == "__main__":
    entry.fill_standard_descriptors()
    os._exit(main())
