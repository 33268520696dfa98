"""Every benchmark can be started: they are commands, seldom run, and the code that they use moves."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
OTHERS = {"corruptions"}  # needs a program of others, and says so


@pytest.mark.parametrize("name", sorted({path.stem for path in FOLDER.glob("*.py")} - OTHERS))
def test_it_can_be_imported(name: str) -> None:
    importlib.import_module(f"benchmarks.{name}")
