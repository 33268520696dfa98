"""``eata corrupt``: a folder of images, corrupted into ImageNet-C's layout."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from PIL import Image
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor

from eata import files
from eata.cli.screen import console as screen
from eata.data import corruptions, images
from eata.data.corruptions import ice
from eata.errors import EataError

_Cell = tuple[str, int]


def corrupt(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="Folder of images, with or without subfolders.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="Folder to write to; made where it is missing.")],
    corruption: Annotated[
        str, typer.Option(metavar="NAME|all", help=f"One of {', '.join(corruptions.CORRUPTIONS)}.")
    ] = "all",
    severity: Annotated[str, typer.Option(metavar="1..5|all", help="1 is slight, 5 is severe.")] = "all",
    seed: Annotated[int, typer.Option(min=0, help="Of all randomness.")] = 0,
    frost: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder with the original frost1.png to frost6.jpg; without it the ice is computed."
        ),
    ] = None,
) -> None:
    """Corrupt a folder of images as ImageNet-C does: DST/<corruption>/<severity>/<same path as in SRC>.

    Images keep their size and format (JPEG at quality 85, as in ImageNet-C). Files that are already there are kept, so
    a run that was stopped goes on where it was. Example: eata corrupt photos photos-c --corruption fog --severity 3
    """
    cells = _cells(corruption, severity)
    paths = _paths(source, target)
    if frost is not None:
        ice.textures(frost, 1.0, 224, 224)  # a bad folder is told now, not after an hour
    written = kept = 0
    skipped: dict[Path, str] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=screen(errors=True)) as progress:
        task = progress.add_task("corrupting", total=len(paths) * len(cells))
        for path in paths:
            relative = path.relative_to(source)
            missing = [cell for cell in cells if not _place(target, cell, relative).exists()]
            kept += len(cells) - len(missing)
            progress.advance(task, len(cells) - len(missing))
            try:
                image = _read(path) if missing else None
            except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as problem:
                skipped[relative] = str(problem)
                progress.advance(task, len(missing))
                continue
            # Keyed by the path, so that a file comes out the same whatever else is in the folder.
            first = zlib.crc32(os.fsencode(relative.as_posix()))
            for cell in missing:
                assert image is not None
                corrupted = corruptions.corrupt(image, *cell, seed, frost=frost, first=first)
                _write(corrupted, _place(target, cell, relative))
                written += 1
                progress.advance(task)
    _summarize(target, written, kept, skipped)


def _cells(corruption: str, severity: str) -> list[_Cell]:
    names: Sequence[str] = corruptions.CORRUPTIONS if corruption == "all" else (corruption,)
    if severity == "all":
        levels: Sequence[int] = corruptions.SEVERITIES
    elif severity.isdecimal():
        levels = (int(severity),)
    else:
        raise EataError(f"--severity must be 1, 2, 3, 4, 5 or all, not {severity!r}.")
    for name in names:
        corruptions.check(name, levels[0])
    return [(name, level) for name in names for level in levels]


def _paths(source: Path, target: Path) -> list[Path]:
    if not source.is_dir():
        raise EataError(f"{source} is not a folder; give a folder of images.")
    if target.resolve().is_relative_to(source.resolve()):
        raise EataError(f"{target} lies inside {source}: the next run would corrupt its own results; choose another.")
    paths = images.find(source)
    if not paths:
        raise EataError(f"{source} has no images (looked for {' '.join(images.SUFFIXES)}).")
    return paths


def _place(target: Path, cell: _Cell, relative: Path) -> Path:
    return target / cell[0] / str(cell[1]) / relative


def _read(path: Path) -> Tensor:
    """The image as uint8 (1, 3, H, W), if it can be corrupted and written back."""
    if _format(path) not in Image.SAVE:
        raise EataError(f"Pillow cannot write {path.suffix} files")
    with Image.open(path) as opened:
        pixels = np.array(images.to_rgb(opened))
    if min(pixels.shape[:2]) < corruptions.SMALLEST:
        raise EataError(f"has {pixels.shape[1]} x {pixels.shape[0]} pixels; {corruptions.SMALLEST} a side are needed")
    return torch.from_numpy(pixels).permute(2, 0, 1)[None].contiguous()


def _write(image: Tensor, path: Path) -> None:
    options = {"quality": 85, "optimize": True} if _format(path) == "JPEG" else {}
    with files.replacing(path) as temporary:
        Image.fromarray(image[0].permute(1, 2, 0).numpy()).save(temporary, _format(path), **options)


def _format(path: Path) -> str | None:
    return Image.registered_extensions().get(path.suffix.lower())


def _summarize(target: Path, written: int, kept: int, skipped: dict[Path, str]) -> None:
    console = screen()
    console.print(f"{written} images written to {target}" + (f", {kept} were already there." if kept else "."))
    if skipped:
        console.print(f"{len(skipped)} files could not be used:")
        for path, why in skipped.items():
            console.print(f"  {os.fsencode(path).decode(errors='backslashreplace')}: {why}")
    if skipped and not written and not kept:
        raise EataError(f"None of the files could be used, so {target} has nothing.")
