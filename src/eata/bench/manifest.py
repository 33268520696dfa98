"""What made a result: command, date, code, versions and machine."""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import socket
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import eata
from eata import origin


def manifest(program: str, device: str = "cpu") -> dict[str, Any]:
    """What a result is kept with; call it at the start, for the code on disk may change while the work is done.

    Args:
        program: what was called, as in ``"eata"``; its arguments are those of this process.
        device: where the work is done.
    """
    return {
        "command": f"{program} {shlex.join(sys.argv[1:])}".rstrip(),
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "commit": origin.commit(),
        "versions": {
            "eata": eata.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
        "hardware": hardware(torch.device(device)),
    }


def hardware(device: torch.device) -> dict[str, Any]:
    """The machine, and the device that does the work, in words that a reader can compare with."""
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    gpu = {"cuda": torch.cuda.get_device_name, "mps": lambda _: "Apple GPU"}.get(device.type)
    return {
        "host": socket.gethostname(),
        "system": platform.platform(),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "device": str(device),
        "gpu": gpu(device) if gpu else None,
    }
