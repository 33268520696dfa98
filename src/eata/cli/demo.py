"""``eata demo``: the paper's comparison in two minutes, on images and a model that come with the package."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eata.errors import EataError


def demo(
    data: Annotated[
        str, typer.Option(help="cifar10-sample or digits (come with eata), or cifar10 ('eata data get cifar10').")
    ] = "cifar10-sample",
    limit: Annotated[int, typer.Option(min=1, help="Images a corruption.")] = 512,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; default: all cores.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of runs.")] = Path("runs"),
) -> None:
    """See adaptation at work: a trained net meets 15 corruptions it has never seen, and five ways to deal with them.

    The corruptions come one after another, three times over, and the net is never reset. Takes less than 2 minutes on 2
    cores, and writes a page about what it found.
    """
    from eata.bench.engines import cores
    from eata.bench.progress import grids
    from eata.bench.protocol import Request
    from eata.bench.report import write
    from eata.bench.run import execute
    from eata.bench.story import sentences
    from eata.cli.screen import console as screen

    console = screen()
    run, table = execute(Request("demo", data, limit=limit), out, console, workers=workers or cores())
    for grid in grids(table, console.width):
        console.print(grid, soft_wrap=False)
    if table.failures:
        cell, error = table.failures[0]
        raise EataError(f"{len(table.failures)} streams failed, the first ({cell}) with: {error}")
    page, *_ = write(run, run.folder)
    for sentence in sentences(table):
        console.print(sentence, soft_wrap=False)
    console.print(f"\n{NEXT}\n")
    console.print(f"Report: {page.resolve()}")


NEXT = (
    "Next, on your own model and images: eata predict package.module:factory --images FOLDER --fisher CLEAN_FOLDER "
    "--out predictions.csv (or timm/NAME in place of the factory)."
)
