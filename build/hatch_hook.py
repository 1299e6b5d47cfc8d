"""hatchling's build hook: builds the CPU library with build/make.sh and puts it, with kd.h, into the wheel.

An editable install only builds: there the library is found in build/out.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

WHEEL_FILES = {
    "build/out/libkd_cpu.so": "kd/lib/libkd_cpu.so",
    "include/kd.h": "kd/kd.h",
    "models/nano": "kd/models/nano",
}


class NativeLibrary(BuildHookInterface):
    """Wheels are built for this machine's platform; the instruction set is chosen when an engine opens."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        script = root / "build" / "make.sh"
        done = subprocess.run(["bash", str(script), "cpu"], cwd=root, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"build/make.sh cpu failed with status {done.returncode}:\n{done.stdout}{done.stderr}")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-linux_{os.uname().machine}"
        if version != "editable":
            for source, target in WHEEL_FILES.items():
                build_data["force_include"][str(root / source)] = target
