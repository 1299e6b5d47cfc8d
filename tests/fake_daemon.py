"""The daemon with the fake engine: `python tests/fake_daemon.py '{"token_delay_s": 0.01}' --instance x ...`.

While the file named by "gate_file" exists the engine is wedged; once the one named by "fatal_file" does, it is latched.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1] / "runtime")]

from fake_engine import FakeEngine, KdError  # noqa: E402

from kd import __main__ as entry  # noqa: E402
from kd import config as configuration  # noqa: E402


def main() -> int:
    fake = json.loads(sys.argv[1])
    gate_file, fatal_file = fake.pop("gate_file", None), fake.pop("fatal_file", None)
    error = fake.pop("load_error", None)
    if error:
        fake["load_error"] = KdError(*error)
    args = entry._arguments(sys.argv[2:])
    flags = {key: getattr(args, key) for key in (*entry._FLAGS.values(), "server.insecure")}
    flags.update(item.split("=", 1) for item in args.settings)
    config = configuration.load(flags=flags, file=args.config)

    def open_engine():
        engine = FakeEngine(
            slow_reader_timeout_ms=config.engine.slow_reader_timeout_ms,
            max_queue=config.engine.max_queue,
            max_streams=config.engine.max_streams,
            **fake,
        )

        def faults():
            while True:
                time.sleep(0.02)
                if gate_file:
                    (engine.gate.clear if os.path.exists(gate_file) else engine.gate.set)()
                if fatal_file and os.path.exists(fatal_file) and not engine.fatal_status:
                    engine.fatal()

        if gate_file or fatal_file:
            threading.Thread(target=faults, daemon=True).start()
        return engine

    return entry.serve(config, open_engine, SimpleNamespace, lambda: (1, "fake"))


if __name__ == "__main__":
    os._exit(main())
