"""``eata demo``: the paper's comparison in a few minutes, on data and a model that come with the package."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eata.errors import EataError

if TYPE_CHECKING:
    from eata.bench.tables import Table


def demo(
    data: Annotated[
        str, typer.Option(help="digits (comes with eata) or cifar10 (see 'eata data get cifar10').")
    ] = "digits",
    limit: Annotated[int, typer.Option(min=1, help="Images a corruption.")] = 320,
    out: Annotated[Path, typer.Option(help="Folder of runs.")] = Path("runs"),
) -> None:
    """See adaptation at work: a trained net meets 15 corruptions it has never seen, and five ways to deal with them.

    Takes less than 3 minutes on 2 cores. Writes a page about what it found.
    """
    from rich.console import Console

    from eata.bench.progress import grids
    from eata.bench.protocol import Request
    from eata.bench.report import write
    from eata.bench.run import execute

    console = Console()
    request = Request("demo", data, limit=limit, threads=min(4, os.cpu_count() or 1))
    run, table = execute(request, out, console)
    for grid in grids(table, console.width):
        console.print(grid)
    if table.failures:
        cell, error = table.failures[0]
        raise EataError(f"{len(table.failures)} streams failed, the first ({cell}) with: {error}")
    page, *_ = write(run, run.folder)
    console.print(f"{what_happened(table)}\n\n{what_next()}\n", highlight=False, soft_wrap=True)
    console.print(f"Report: {page.resolve()}", highlight=False, soft_wrap=True)


def what_happened(table: Table) -> str:
    """The table in one sentence of plain words."""
    line = {one.row: one for one in table.lines}
    source, eata, tent = line["source"], line["eata"], line["tent"]
    stays, leaves = line["eata-lifelong"], line["tent-lifelong"]
    return (
        f"The trained net got {source.mean:.0f} % of the corrupted images wrong; by learning from them, without "
        f"their labels, EATA got {eata.mean:.1f} % wrong (Tent: {tent.mean:.1f} %), spending a backward pass on "
        f"{100 * eata.backwards / eata.forwards:.0f} % of them, and after all 15 corruptions in a row it got "
        f"{stays.clean:.1f} % of the clean images wrong (Tent: {leaves.clean:.1f} %, "
        f"the untouched net: {source.clean:.1f} %)."
    )


def what_next() -> str:
    """What to run on one's own model."""
    return (
        "Next, on your own model and images: eata predict package.module:factory --images FOLDER --fisher CLEAN_FOLDER "
        "--out predictions.csv (or timm/NAME in place of the factory)."
    )
