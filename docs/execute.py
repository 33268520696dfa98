"""Run the notebook from top to bottom, offline, and keep what it prints: ``python docs/execute.py``.

A notebook is a JSON file of cells, so this needs no Jupyter.
"""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parent / "notebook.ipynb"


def executed(notebook: dict[str, Any]) -> dict[str, Any]:
    """The notebook with each code cell's output, as one namespace runs them in order; raises where a cell does."""
    space: dict[str, Any] = {"__name__": "__main__"}
    cells: list[dict[str, Any]] = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile("".join(cell["source"]), NOTEBOOK.name, "exec"), space)
            lines = printed.getvalue().splitlines(keepends=True)
            outputs = [{"output_type": "stream", "name": "stdout", "text": lines}] if lines else []
            number = 1 + sum(one["cell_type"] == "code" for one in cells)
            cell = {**cell, "execution_count": number, "outputs": outputs}
        cells.append(cell)
    return {**notebook, "cells": cells}


if __name__ == "__main__":
    found = executed(json.loads(NOTEBOOK.read_text("utf-8")))
    NOTEBOOK.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", "utf-8")
