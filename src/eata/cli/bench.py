"""``eata bench``: an experiment of the paper, on the data at hand."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eata.errors import EataError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as Grid

    from eata.bench.tables import Table


def numbers(text: str) -> tuple[int, ...]:
    """Whole numbers from a list with ranges.

    >>> numbers("3,5"), numbers("2020-2023")
    ((3, 5), (2020, 2021, 2022, 2023))
    """
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise EataError(f"{text!r} is not a list of numbers; write 3,5 or 1-5.")
        if dash and int(last) < int(first):
            raise EataError(f"{text!r} goes backwards; write {last}-{first}.")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


def names(text: str) -> tuple[str, ...]:
    """Names from a list with commas; none from an empty one."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def bench(
    experiment: Annotated[str, typer.Argument(help="An experiment's name; --list shows them.")] = "",
    show_list: Annotated[bool, typer.Option("--list", help="Show the experiments.")] = False,
    data: Annotated[
        str, typer.Option(help="digits, cifar10, cifar10-c[:PATH], imagenet-c:PATH, imagenet-r:PATH or folder:PATH.")
    ] = "",
    clean: Annotated[
        str, typer.Option(help="Clean images, such as imagenet:PATH; digits and CIFAR-10 bring their own.")
    ] = "",
    model: Annotated[
        str, typer.Option(help="Model(s), with commas: ours, timm/NAME, torchvision/NAME or package.module:factory.")
    ] = "",
    limit: Annotated[int | None, typer.Option(min=1, help="Images a stream; without it, all.")] = None,
    severity: Annotated[str, typer.Option(help="Such as 5, 3,5 or 1-5; default: the paper's.")] = "",
    methods: Annotated[
        str,
        typer.Option(help="Such as source,tent,eata; 'all' adds the slow ones (TTT, MEMO, TTA, episodic)."),
    ] = "",
    seeds: Annotated[str, typer.Option(help="Orders of the stream, such as 2020-2029; default: the paper's.")] = "",
    batch: Annotated[int | None, typer.Option(min=1, help="Images a batch; default 64 (BN adaptation: 256).")] = None,
    stream: Annotated[
        str,
        typer.Option(
            help="How shifts follow one another: reset, continual, gradual, mixed, correlated[:DELTA], recurring:N, or "
            "two of them as in gradual+correlated; default: the experiment's. Some of those of 'streams', with commas."
        ),
    ] = "",
    backward: Annotated[
        str,
        typer.Option(help="full: the textbook's, as the paper takes; rows: a faster one; default: rows on a CPU."),
    ] = "",
    threads: Annotated[
        int, typer.Option(min=1, help="Threads a stream; the same number gives the same bits on either engine.")
    ] = 1,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Streams at once, a process each; default: all cores, with a GPU one.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 or mps; auto: the accelerator if any.")] = "auto",
    amp: Annotated[bool, typer.Option("--amp", help="Mixed precision: faster on a GPU.")] = False,
    engine: Annotated[str, typer.Option(help="local, or ray to share the cells among many machines.")] = "local",
    address: Annotated[str, typer.Option(help="Of a Ray cluster; default: a new one on this machine.")] = "",
    out: Annotated[Path, typer.Option(help="Folder of runs.")] = Path("runs"),
) -> None:
    """Run an experiment of the paper and set its numbers beside the published ones.

    The same command goes on where it stopped: Ctrl-C or a crash loses the streams in work at most, and what several
    streams share (images decoded and corrupted, the Fisher information) is made once. In a second terminal, or on
    another machine that sees the folder, it shares the work. 'eata report RUN' makes a page.

    Example: eata bench components --data digits
    """
    from eata.bench.engines import cores
    from eata.bench.experiments import find
    from eata.bench.protocol import Request
    from eata.bench.run import execute
    from eata.cli.screen import console as screen
    from eata.device import choose

    console = screen()
    if show_list or not experiment:
        console.print(_listing(), soft_wrap=False)
        return
    if engine not in ("local", "ray"):
        raise EataError(f"There is no engine {engine!r}; there are local and ray.")
    if address and engine != "ray":
        raise EataError("--address is of a Ray cluster: add --engine ray, or leave it out.")
    if experiment == "stress":
        _stress(console, data, limit, names(methods), numbers(seeds) if seeds else (), names(stream), out)
        return
    on = choose(device)
    request = Request(
        experiment=experiment,
        data=data or _default_data(find(experiment).needs_data, experiment),
        clean=clean or None,
        models=names(model),
        limit=limit,
        severities=numbers(severity) if severity else (),
        methods=names(methods),
        seeds=numbers(seeds) if seeds else (),
        batch=batch,
        stream=stream or None,
        backward=backward or None,
        threads=threads,
        device=str(on),
        amp=amp,
    )
    workers = workers or (max(1, cores() // threads) if on.type == "cpu" else 1)
    run, table = execute(request, out, console, "ray" if engine == "ray" else "local", address or None, workers)
    show(console, run.folder, table)
    if table.failures:
        raise typer.Exit(1)


def _stress(
    console: Console,
    data: str,
    limit: int | None,
    methods: tuple[str, ...],
    seeds: tuple[int, ...],
    streams: tuple[str, ...],
    out: Path,
) -> None:
    """The stress suite is no table of the paper: hard streams, with and without a guard."""
    from rich.markdown import Markdown

    from eata.bench import hard, stress

    data = data or "cifar10"
    if data not in stress.NETS:
        raise EataError(f"The stress suite is for {' and '.join(stress.NETS)}, not for {data!r}.")
    folder = out / f"stress-{data}"
    for seed in seeds or (2020,):
        source = hard.Source(limit or stress.IMAGES, seed, data=data)
        for row in stress.run(streams or tuple(hard.STREAMS), methods or stress.DEFAULT, source, folder):
            console.print(stress.line(row))
    console.print(Markdown(stress.write(folder)))
    console.print(f"The table, the figure and the numbers are in {folder}")


def show(console: Console, folder: Path, table: Table) -> None:
    """The table of a run, what failed in it, and what to do next."""
    from eata.bench.progress import grids

    for grid in grids(table, console.width):
        console.print(grid, soft_wrap=False)
    for cell, error in table.failures:
        console.print(f"failed: {cell}: {error}", style="red")
    if table.failures:
        console.print(f"{len(table.failures)} cells failed; the same command tries them again.")
    console.print(f"The run is in {folder}\nA page of it: eata report {folder}")


def _default_data(wanted: str | None, experiment: str) -> str:
    if wanted and "PATH" in wanted:
        raise EataError(f"{experiment} needs its data: --data {wanted}. On what you have: --data cifar10 or digits.")
    return wanted or "digits"


def _listing() -> Grid:
    from rich.table import Column, Table

    from eata.bench.experiments import EXPERIMENTS

    table = Table("name", Column("label in eata.tex", overflow="fold"), "what")
    for experiment in EXPERIMENTS.values():
        if experiment.labels:
            table.add_row(experiment.name, "\n".join(experiment.labels), experiment.about)
    table.add_row("stress", "", "Hard streams, with and without a guard (--stream sorted,garbage for some of them).")
    return table
