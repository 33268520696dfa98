"""What a benchmark measured, kept with what it depends on."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import torch

import eata
from eata import origin
from eata.bench.store import hardware
from eata.files import replacing


def manifest() -> dict[str, Any]:
    """Command, code and machine; call it at the start, for the code on disk may change while a benchmark runs."""
    return {
        "command": shlex.join(["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]),
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "commit": origin.commit(),
        "versions": {"eata": eata.__version__, "python": platform.python_version(), "torch": torch.__version__},
        "hardware": hardware(torch.device("cpu")),
        "load": os.getloadavg(),
    }


def keep(out: Path | None, made: dict[str, Any], numbers: dict[str, Any]) -> None:
    """Write the numbers beside their manifest; nothing where no file is asked for."""
    if out is None:
        return
    with replacing(out) as temporary:
        temporary.write_text(json.dumps({"manifest": made, **numbers}, indent=1) + "\n", "utf-8")
