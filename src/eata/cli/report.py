"""``eata report``: a page about a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[Path, typer.Argument(help="Folder of a run, as 'eata bench' and 'eata demo' name it at their end.")],
    out: Annotated[Path | None, typer.Option(help="Folder for the files; default: the run's own.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Also report.md: the table for GitHub.")] = False,
    latex: Annotated[bool, typer.Option("--latex", help="Also report.tex: the table for booktabs.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="Also report.csv: one record a value.")] = False,
    png: Annotated[bool, typer.Option("--png", help="Also each plot as a PNG file.")] = False,
    into: Annotated[
        Path | None,
        typer.Option(help="Keep what was measured as data in this folder, such as results/NAME, instead of a page."),
    ] = None,
) -> None:
    """Make one self-contained page of a run: tables beside the published ones, plots, sample images, how it ran."""
    from eata.bench.report import write
    from eata.bench.store import Run

    if into is not None:
        from eata.bench.results import keep

        keep(Run(run), into)
        typer.echo(into)
        return
    asked = {"markdown": markdown, "latex": latex, "csv": csv, "png": png}
    extras = tuple(name for name, wanted in asked.items() if wanted)
    for path in write(Run(run), out or run, extras):
        typer.echo(path)
