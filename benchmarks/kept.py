"""What a benchmark has measured, as files: ``manifest.json``, one file for each cell in ``cells/``, ``table.md``.

Cells are files of their own, so a run goes on where it stopped, and several may write into one folder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eata import origin
from eata.bench.manifest import manifest as of_program
from eata.errors import EataError
from eata.files import replacing

Cell = dict[str, Any]


def write(path: Path, text: str) -> None:
    """The whole file, or the old one."""
    with replacing(path) as temporary:
        temporary.write_text(text, "utf-8")


class Kept:
    """The folder of a run.

    Args:
        folder: where it is, or will be.
        module: of the command, such as ``"lifelong"``.
        facts: what the numbers depend on besides; all that goes into one folder has the same.
    """

    def __init__(self, folder: Path, module: str, **facts: Any) -> None:
        self.folder = folder
        self.partial = folder / "partial"
        manifest = folder / "manifest.json"
        if manifest.exists():
            found = json.loads(manifest.read_text("utf-8"))
            differs = [name for name, value in facts.items() if found.get(name) != value]
            if differs:
                raise EataError(
                    f"{folder} has results of {differs[0]}={found.get(differs[0])!r}, and this is "
                    f"{facts[differs[0]]!r}; name another folder."
                )
        else:
            write(manifest, json.dumps(of_program(f"python -m benchmarks.{module}") | facts, indent=1) + "\n")

    def path(self, name: str) -> Path:
        """Of a cell's file."""
        return self.folder / "cells" / f"{name.replace(' ', '-')}.json"

    def cell(self, name: str) -> Cell | None:
        """What is there of a cell."""
        path = self.path(name)
        found: Cell | None = json.loads(path.read_text("utf-8")) if path.exists() else None
        return found

    def add(self, name: str, cell: Cell) -> None:
        """Write a cell, with the commit that made it."""
        write(self.path(name), json.dumps({"commit": origin.commit(), **cell}, indent=1) + "\n")

    def cells(self) -> list[Cell]:
        """All that is there, by name."""
        return [json.loads(path.read_text("utf-8")) for path in sorted((self.folder / "cells").glob("*.json"))]

    def table(self, text: str) -> None:
        """Write and show ``table.md``."""
        write(self.folder / "table.md", text)
        print(text)
