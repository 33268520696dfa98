"""Run a request: plan, open the folder, run what is missing, show it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from rich.console import Console

from eata.bench import engines
from eata.bench.experiments import find
from eata.bench.progress import Display
from eata.bench.protocol import Request, plan
from eata.bench.store import Run, create
from eata.bench.tables import Table, tabulate
from eata.bench.work import Worker, needs_fisher
from eata.errors import EataError


def execute(
    request: Request,
    out: Path,
    console: Console,
    engine: Literal["local", "ray"] = "local",
    address: str | None = None,
) -> tuple[Run, Table]:
    """Run what is not there yet of this request, and give its run and its table.

    Args:
        request: what to run.
        out: folder of runs.
        console: shows the progress.
        engine: ``"local"`` or ``"ray"``.
        address: of the Ray cluster; None starts one on this machine.
    """
    experiment = find(request.experiment)
    for spec in (request.data, request.clean_data or ""):  # before a model is fetched for them
        path = spec.partition(":")[2]
        if path and not Path(path).expanduser().is_dir():
            raise EataError(f"{path} (of {spec}) is not a folder.")
    worker = Worker(request)
    images = min(worker.available(model) for model in request.models or (request.net("bn"),))
    cells = plan(request, images)
    if not cells:
        raise EataError(
            f"{experiment.name} needs more images of {request.data} than {min(images, request.limit or images)}."
        )
    if request.clean_data is None and any(needs_fisher(cell) for cell in cells):
        raise EataError(
            f"EATA needs clean images beside {request.data}: name them (--clean imagenet:PATH), or "
            "leave EATA out with --methods source,bn,tent,eta."
        )
    run = create(request, cells, worker, out, f"{experiment.name}-{request.data.partition(':')[0]}")
    worker.folder = run.folder
    done = {cell.id: result for cell in cells if (result := run.result(cell)) is not None and "error" not in result}
    with Display(console, experiment, request, cells, done, images) as display:
        if engine == "ray":
            engines.on_ray(run, cells, worker, display, address)
        else:
            engines.local(run, cells, worker, display)
    return run, load(run)


def load(run: Run) -> Table:
    """The table of what a run has so far."""
    results = ((cell, result) for cell in run.cells if (result := run.result(cell)) is not None)
    return tabulate(find(run.request.experiment), run.request, results)
