"""Who runs the cells: this process, or the workers of a Ray cluster. The results are the same to the last bit."""

from __future__ import annotations

import contextlib
import os
import time
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

from eata.bench.protocol import Cell, Request
from eata.bench.store import Run
from eata.bench.work import Result, Worker
from eata.errors import EataError

PAUSE = 0.5  # seconds between looks at what another process is doing
RETRIES = 3  # of a cell whose Ray worker was lost


class Listener(Protocol):
    """Whoever shows the progress."""

    def started(self, cell: Cell) -> None:
        """Work on the cell begins."""

    def advance(self, cell: Cell, images: int) -> None:
        """So many more images of it are done."""

    def finished(self, cell: Cell, result: Result) -> None:
        """The cell has its result."""


def local(run: Run, cells: list[Cell], worker: Worker, listener: Listener) -> None:
    """Run what is not done yet, one cell after another; wait for what another process has claimed."""
    todo = [cell for cell in cells if not run.done(cell)]
    while todo:
        others = []
        for cell in todo:
            with run.claim(cell) as ours:
                if not ours:
                    others.append(cell)
                    continue
                result = run.result(cell) if run.done(cell) else None  # another process may have done it since
                if result is None:
                    listener.started(cell)
                    result = worker.run(cell, partial(listener.advance, cell))
                    run.write(cell, result)
            listener.finished(cell, result)
        if len(others) == len(todo):
            time.sleep(PAUSE)
        todo = others


def on_ray(run: Run, cells: list[Cell], worker: Worker, listener: Listener, address: str | None) -> None:
    """Send the cells to a Ray cluster; a cell whose worker is lost is run again.

    Args:
        run: where results go; this process writes them.
        cells: of the run.
        worker: of this process: it makes what the cells share before they are sent.
        listener: shows the progress.
        address: of the cluster; None starts one on this machine.
    """
    ray = _ray()
    worker.prepare(cells)
    try:
        _join(ray, address)
        remote = ray.remote(num_cpus=worker.request.threads, max_retries=RETRIES)(_work)
        with contextlib.ExitStack() as claims:
            ours = [cell for cell in cells if claims.enter_context(run.claim(cell)) and not run.done(cell)]
            waiting = {remote.remote(worker.request, str(run.folder), cell): cell for cell in ours}
            for cell in ours:
                listener.started(cell)
            while waiting:
                (reference,), _ = ray.wait(list(waiting), num_returns=1)
                cell = waiting.pop(reference)
                result = _result(ray, reference, cell)
                run.write(cell, result)
                listener.finished(cell, result)
    finally:
        ray.shutdown()
    local(run, [cell for cell in cells if run.result(cell) is None], worker, listener)  # another process had those


def _ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        raise EataError("--engine ray needs Ray: install eata[ray], or leave --engine out.") from None
    return ray


def _join(ray: Any, address: str | None) -> None:
    """Find the cluster or start one. Ray says what is wrong by exceptions of every kind."""
    try:
        ray.init(address=address, include_dashboard=False, log_to_driver=False, logging_level="error")
    except Exception as problem:
        where = f"at {address} cannot be reached" if address else "did not start on this machine, maybe a busy one"
        reason = str(problem).strip().partition("\n")[0] or type(problem).__name__
        raise EataError(f"Ray {where} ({reason}): try again, or leave --engine out.") from problem


def _result(ray: Any, reference: Any, cell: Cell) -> Result:
    try:
        result: Result = ray.get(reference)
    except ray.exceptions.RayError as problem:  # a lost worker's cell has been tried again by now
        reason = str(problem).strip().rpartition("\n")[2]
        return {"cell": cell.id, "error": f"{type(problem).__name__}: {reason}"}
    return result


@cache
def _worker(request: Request, folder: str) -> Worker:
    return Worker(request, Path(folder))


def _work(request: Request, folder: str, cell: Cell) -> Result:
    """In a Ray worker: the process keeps its streams and networks from cell to cell."""
    return _worker(request, folder).run(cell)
