"""The table in the terminal."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from eata.bench.experiments import find
from eata.bench.progress import Display, grids
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


def test_an_error_with_brackets_is_shown_as_it_is(result: Callable[[Cell, float], dict[str, Any]]) -> None:
    request = Request("components", "digits", models=("m",))
    cells = plan(request, 900)
    console = Console(file=io.StringIO(), width=200)
    with Display(console, find("components"), request, cells, {}, 900) as display:
        display.started(cells[0])
        display.finished(cells[0], {"error": "ValueError: cannot read [/data/x.png] or [bold]"})
        display.finished(cells[1], result(cells[1], 70))
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "ValueError: cannot read [/data/x.png] or [bold]" in said


def test_a_cell_that_begins_again_counts_once(result: Callable[[Cell, float], dict[str, Any]]) -> None:
    request = Request("components", "digits", models=("m",), limit=100)
    cells = plan(request, 900)
    display = Display(Console(quiet=True), find("components"), request, cells, {}, 900)
    bar = display._bar.tasks[0]
    for _ in range(2):
        display.started(cells[0])
        display.advance(cells[0], 64)
    assert bar.completed == 64 * cells[0].cost
    display.started(cells[1])
    assert bar.fields["cell"].endswith("and 1 more")
    for cell in cells:
        display.finished(cell, result(cell, 70))
    assert bar.completed == bar.total == sum(cell.effort(900) for cell in cells)
