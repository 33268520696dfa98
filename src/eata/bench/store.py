"""A run is a folder: ``run.json`` and one file per cell, each written whole. The same request finds its run again."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

import eata
from eata.bench.manifest import manifest
from eata.bench.protocol import Cell, Request, Result, Stage, digest
from eata.errors import EataError
from eata.files import replacing

FORMAT = 1
MANIFEST = "run.json"


class Run:
    """A run's folder.

    Args:
        folder: made by :func:`create`.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / MANIFEST
        if not path.is_file():
            inside = sorted(item.parent.name for item in folder.glob(f"*/{MANIFEST}"))
            hint = f"it holds the runs {', '.join(inside)}" if inside else f"there is no {MANIFEST} in it"
            raise EataError(f"{folder} is not a run: {hint}.")
        self.folder = folder
        try:
            self.manifest: dict[str, Any] = json.loads(path.read_text("utf-8"))
            found = (self.manifest["format"], self.manifest["versions"]["eata"])
        except (ValueError, KeyError, TypeError) as problem:
            raise EataError(f"{path} is damaged ({problem}); remove the folder and run again.") from None
        if found != (FORMAT, eata.__version__):
            raise EataError(
                f"{folder} was made by eata {found[1]} (format {found[0]}), and this is eata {eata.__version__} "
                f"(format {FORMAT}): their results are not mixed. Use that version, or choose another --out."
            )

    @property
    def request(self) -> Request:
        """What the run is for."""
        raw = self.manifest["request"]
        values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in raw.items()}
        return Request(**values)

    @property
    def cells(self) -> list[Cell]:
        """Its cells, done or not."""
        return [
            Cell(**{**raw, "stages": tuple(Stage(**stage) for stage in raw["stages"])})
            for raw in self.manifest["cells"]
        ]

    def result(self, cell: Cell) -> Result | None:
        """What the cell gave, or None if it is not done; a failed cell's result has an ``error``."""
        path = self.folder / "cells" / f"{cell.id}.json"
        try:
            found: Result = json.loads(path.read_text("utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as problem:
            raise EataError(f"{path} is damaged ({problem}); remove it and run the same command again.") from None
        return found

    def results(self) -> dict[str, Result]:
        """What is there, by the cells' names."""
        return {cell.id: result for cell in self.cells if (result := self.result(cell)) is not None}

    def done(self, cell: Cell) -> bool:
        """Whether the cell has a result without an error."""
        result = self.result(cell)
        return result is not None and "error" not in result

    def write(self, cell: Cell, result: Result) -> None:
        """Keep the cell's result."""
        with replacing(self.folder / "cells" / f"{cell.id}.json") as temporary:
            temporary.write_text(json.dumps(result, indent=1), "utf-8")

    @contextlib.contextmanager
    def claim(self, cell: Cell) -> Iterator[bool]:
        """Whether the cell is ours to run: True for one process at a time.

        The operating system lets go of the lock when its process ends, however that happens, so no lock is ever stale.
        """
        path = self.folder / "locks" / cell.id
        path.parent.mkdir(exist_ok=True)
        lock = FileLock(path)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            yield False
            return
        try:
            yield True
        finally:
            lock.release()


def create(
    request: Request, cells: list[Cell], weights: dict[str, str], data: dict[str, Any], out: Path, name: str
) -> Run:
    """The run of this request under ``out``: the one that is there, or a new one.

    What the results depend on names the folder, so that a changed setting, model, data set or torch is a new run. The
    commit of the code is only written down: a run must be able to go on after the code has moved. Each cell's result
    says which commit made it.

    Args:
        request: its settings.
        cells: of the request.
        weights: hash of each model's weights.
        data: what is known of the data, with its hashes.
        out: folder of runs.
        name: beginning of the folder's name.
    """
    hashes = [weights, data["digest"], data["clean_digest"]]
    folder = out / f"{name}-{digest([_settings(request), [cell.id for cell in cells], hashes, torch.__version__])}"
    if not (folder / MANIFEST).exists():
        with replacing(folder / MANIFEST) as temporary:
            about = _manifest(request, cells, weights, data)
            temporary.write_text(json.dumps(about, indent=1, default=dict), "utf-8")
    return Run(folder)


def _settings(request: Request) -> dict[str, Any]:
    """Those that are not at their default: an option that is added later changes no run that does not use it."""
    return {field.name: value for field in fields(request) if (value := getattr(request, field.name)) != field.default}


def _manifest(request: Request, cells: list[Cell], weights: dict[str, str], data: dict[str, Any]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        **manifest("eata", request.device),
        "request": asdict(request),
        "seeds": sorted({cell.seed for cell in cells}),
        "models": weights,
        "data": data,
        "cells": [asdict(cell) for cell in cells],
    }
