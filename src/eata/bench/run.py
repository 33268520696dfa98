"""Run a request: plan, open the folder, run what is missing, show it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from rich.console import Console

from eata.bench import engines
from eata.bench.experiments import find
from eata.bench.materials import Materials
from eata.bench.progress import Display
from eata.bench.protocol import Request, plan
from eata.bench.store import Run, create
from eata.bench.tables import Table, load
from eata.bench.work import Worker, needs_fisher
from eata.errors import EataError


def execute(
    request: Request,
    out: Path,
    console: Console,
    engine: Literal["local", "ray"] = "local",
    address: str | None = None,
    workers: int = 1,
) -> tuple[Run, Table]:
    """Run what is not there yet of this request, and give its run and its table.

    Args:
        request: what to run.
        out: folder of runs.
        console: shows the progress.
        engine: ``"local"`` or ``"ray"``.
        address: of the Ray cluster; None starts one on this machine.
        workers: processes of the local engine; 1 stays in this one. A script that asks for more must be importable
            (``if __name__ == "__main__":``), for each begins by importing it.
    """
    experiment = find(request.experiment)
    for spec in (request.data, request.clean_data or ""):  # before a model is fetched for them
        path = spec.partition(":")[2]
        if path and not Path(path).expanduser().is_dir():
            raise EataError(f"{path} (of {spec}) is not a folder.")
    materials = Materials(request)
    images = min(materials.available(model) for model in request.models or (request.net("bn"),))
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
    weights = {model: materials.weights(model) for model in sorted({cell.model for cell in cells})}
    name = f"{experiment.name}-{request.data.partition(':')[0]}"
    run = create(request, cells, weights, materials.facts(cells[0].model), out, name)
    worker = Worker(request, run.folder)
    done = {cell: result for cell, result in run.results().items() if "error" not in result}
    with Display(console, experiment, request, cells, done, images) as display:
        if engine == "ray":
            from eata.bench.cluster import on_ray

            on_ray(run, cells, worker, display, address)
        elif workers > 1:
            # what takes long first, so that the processes end together
            cells.sort(key=lambda cell: -cell.effort(images))
            engines.together(run, cells, request, display, workers)
        else:
            engines.alone(run, cells, worker, display)
    worker.materials.clear()
    return run, load(run)
