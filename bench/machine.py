"""What figures were measured on."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def told(main: Callable[[], Any]) -> Any:
    """main(), or what an engine or a library refuses as one sentence."""
    from kd import KdError

    try:
        return main()
    except KdError as error:
        raise SystemExit(str(error)) from None


def machine(device: str) -> dict[str, Any]:
    about: dict[str, Any] = {
        "python": platform.python_version(),
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
    }
    if device == "cuda":
        query = "name,driver_version,clocks.max.sm,clocks.max.mem,power.limit"
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
        try:
            about["gpu"] = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            raise SystemExit(
                "there is no NVIDIA GPU here (nvidia-smi shows none), and this measures one; --device cpu, where it is known, "
                "measures the CPU twin"
            ) from None
    return about
