"""The table in the terminal."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from eata.bench.progress import grids
from eata.bench.protocol import Cell, Request, plan
from eata.bench.tables import tabulate


@pytest.mark.parametrize(("severities", "beside"), [((), True), ((5,), False)])
def test_the_papers_mean_stands_beside_ours_where_both_are_of_the_same_severities(
    severities: tuple[int, ...], beside: bool, result: Callable[[Cell, float], dict[str, Any]]
) -> None:
    request = Request("cifar10-c", "cifar10-c:PATH", models=("m",), methods=("source",), severities=severities)
    cells = plan(request, 10_000)
    table = tabulate(request, cells, {cell.id: result(cell, 70) for cell in cells})
    console = Console(file=io.StringIO(), width=80)
    for grid in grids(table, 80):
        console.print(grid)
    shown = [line.split() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert ["Mean", "30.0"] in shown
    assert (["In", "the", "paper", "28.4"] in shown) == beside
