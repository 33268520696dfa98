"""What a benchmark measured, kept with what it depends on."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from eata.bench.manifest import manifest as of_program
from eata.files import replacing


def manifest() -> dict[str, Any]:
    """Command, code and machine; call it at the start, for the code on disk may change while a benchmark runs."""
    return {
        **of_program(f"python -m benchmarks.{Path(sys.argv[0]).stem}"),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg(),
    }


def keep(out: Path | None, made: dict[str, Any], numbers: dict[str, Any]) -> None:
    """Write the numbers beside their manifest; nothing where no file is asked for."""
    if out is None:
        return
    with replacing(out) as temporary:
        temporary.write_text(json.dumps({"manifest": made, **numbers}, indent=1) + "\n", "utf-8")


def keep_folder(out: Path | None, made: dict[str, Any], numbers: dict[str, Any], tables: list[str]) -> None:
    """The same as a folder: ``manifest.json``, ``numbers.json``, and ``table.md`` for people."""
    if out is None:
        return
    for name, content in {"manifest.json": made, "numbers.json": numbers}.items():
        with replacing(out / name) as temporary:
            temporary.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    with replacing(out / "table.md") as temporary:
        temporary.write_text("\n\n".join(tables) + "\n", "utf-8")
