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


def test_the_table_of_accuracy_sets_each_side_beside_the_textbook_backward() -> None:
    from benchmarks.accuracy import table

    errors = {"ETA, full": {"fog": 20.0, "snow": 30.0}, "ETA, rows": {"fog": 20.5, "snow": 30.0}}
    assert table(errors).splitlines()[2:] == ["| ETA, full | 25.00 |  |", "| ETA, rows | 25.25 | +0.25 |"]
