"""Cells on the workers of a Ray cluster; the same results, to the last bit, as on one machine."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from functools import cache, partial
from pathlib import Path
from typing import Any

from eata.bench.engines import PAUSE, RETRIES, Listener, alone
from eata.bench.protocol import Cell, Request, Result
from eata.bench.store import Run
from eata.bench.work import Worker
from eata.errors import EataError
from eata.extras import need

IN_FLIGHT = 400  # cells at most; each holds a descriptor for its claim, and 1,024 are what a process usually has


class News:
    """What the cells in work tell of themselves; an actor, so that they can reach it from any machine."""

    def __init__(self) -> None:
        self._news: list[tuple[str, str, int]] = []

    def tell(self, what: str, cell: str, images: int = 0) -> None:
        """From a cell."""
        self._news.append((what, cell, images))

    def take(self) -> list[tuple[str, str, int]]:
        """All since the last time."""
        news, self._news = self._news, []
        return news


def on_ray(run: Run, cells: list[Cell], worker: Worker, listener: Listener, address: str | None) -> None:
    """Send the cells to a Ray cluster; a cell whose worker is lost is run again.

    Args:
        run: where results go; this process writes them.
        cells: of the run.
        worker: of this process: it makes what the cells share before they are sent.
        listener: shows the progress.
        address: of the cluster; None starts one on this machine.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = need("ray", "--engine ray", "ray")
    worker.prepare(cells)
    try:
        _join(ray, address)
        _Sender(ray, run, worker, listener).send(cells)
    finally:
        ray.shutdown()
    alone(run, [cell for cell in cells if run.result(cell) is None], worker, listener)  # another process had those


class _Sender:
    """Keeps the cluster busy, and no more cells claimed than that takes."""

    def __init__(self, ray: Any, run: Run, worker: Worker, listener: Listener) -> None:
        self._ray, self._run, self._listener = ray, run, listener
        self._request = worker.request
        threads = worker.request.threads
        gpus = 1 if worker.device.type == "cuda" else 0
        self._remote = ray.remote(num_cpus=threads, num_gpus=gpus, max_retries=RETRIES)(_work)
        self._news = ray.remote(num_cpus=0)(News).remote()
        slots = int(ray.cluster_resources().get("CPU", 1)) // threads
        self._most = min(IN_FLIGHT, 2 * max(1, slots))

    def send(self, cells: list[Cell]) -> None:
        todo = deque(cells)
        names = {cell.id: cell for cell in cells}
        waiting: dict[Any, tuple[Cell, contextlib.ExitStack]] = {}
        try:
            while todo or waiting:
                while todo and len(waiting) < self._most:
                    self._give(todo.popleft(), waiting)
                ready, _ = self._ray.wait(list(waiting), num_returns=1, timeout=PAUSE) if waiting else ([], [])
                self._show(names)
                for reference in ready:
                    cell, claim = waiting.pop(reference)
                    with claim:
                        result = _result(self._ray, reference, cell)
                        self._run.write(cell, result)
                    self._listener.finished(cell, result)
        finally:
            for _, claim in waiting.values():
                claim.close()

    def _give(self, cell: Cell, waiting: dict[Any, tuple[Cell, contextlib.ExitStack]]) -> None:
        with contextlib.ExitStack() as claim:
            if claim.enter_context(self._run.claim(cell)) and not self._run.done(cell):
                reference = self._remote.remote(self._request, str(self._run.folder), cell, self._news)
                waiting[reference] = (cell, claim.pop_all())

    def _show(self, names: dict[str, Cell]) -> None:
        for what, name, images in self._ray.get(self._news.take.remote()):
            if what == "started":
                self._listener.started(names[name])
            else:
                self._listener.advance(names[name], images)


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


def _work(request: Request, folder: str, cell: Cell, news: Any) -> Result:
    """In a Ray worker: the process keeps its streams and networks from cell to cell."""
    news.tell.remote("started", cell.id)
    return _worker(request, folder).run(cell, partial(news.tell.remote, "advance", cell.id))
