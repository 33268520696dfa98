"""Who runs the cells: this process, or worker processes on this machine. The results are the same to the last bit."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

from eata import allocator
from eata.bench.protocol import Cell, Request, Result
from eata.bench.store import Run
from eata.bench.work import Advance, Worker

PAUSE = 0.5  # seconds between looks at what another process is doing
RETRIES = 3  # of a cell whose worker was lost


class Listener(Protocol):
    """Whoever shows the progress."""

    def started(self, cell: Cell) -> None:
        """Work on the cell begins, or begins again."""

    def advance(self, cell: Cell, images: int) -> None:
        """So many more images of it are done."""

    def finished(self, cell: Cell, result: Result) -> None:
        """The cell has its result."""


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux: a container or taskset may allow fewer than there are
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def alone(run: Run, cells: list[Cell], worker: Worker, listener: Listener) -> None:
    """Run what is not done yet in this process, one cell after another; wait for what another process has claimed."""
    todo = [cell for cell in cells if not run.done(cell)]
    while todo:
        others = []
        for cell in todo:
            started, advance = partial(listener.started, cell), partial(listener.advance, cell)
            result = _one(run, cell, worker, started, advance)
            if result is None:
                others.append(cell)
            else:
                listener.finished(cell, result)
        if len(others) == len(todo):
            time.sleep(PAUSE)
        todo = others


def _one(run: Run, cell: Cell, worker: Worker, started: Any, advance: Advance) -> Result | None:
    """Claim the cell, run it and write its result; None if another process has it."""
    with run.claim(cell) as ours:
        if not ours:
            return None
        if run.done(cell):  # another process may have done it since
            return run.result(cell)
        started()
        result = worker.run(cell, advance)
        run.write(cell, result)
        return result


# --- worker processes -------------------------------------------------------------------------------------------------


class Hand:
    """A worker process, and our end of the pipe to it."""

    def __init__(self, request: Request, folder: Path) -> None:
        # A fresh interpreter: threads of torch do not survive a fork, and Windows has none.
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(request, folder, theirs), daemon=True)
        with _deaf():
            self.process.start()
        theirs.close()
        self.cell: Cell | None = None

    def give(self, cell: Cell) -> None:
        """Send it a cell to run."""
        self.cell = cell
        with contextlib.suppress(OSError):  # it is lost; the next look at the pipe will tell
            self.pipe.send(cell)

    def hear(self) -> tuple[str, Any]:
        """Its next message."""
        try:
            message: tuple[str, Any] = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            return "lost", self.process.exitcode
        return message

    def stop(self) -> None:
        """End it, whatever it does; the cell in work is lost."""
        self.pipe.close()
        self.process.terminate()
        self.process.join()


def together(run: Run, cells: list[Cell], request: Request, listener: Listener, workers: int) -> None:
    """Run what is not done yet in worker processes. They claim cells and write results themselves.

    A cell whose worker is lost (killed, or out of memory) is run again by a new one; after a few times it has failed.

    Args:
        run: where results go.
        cells: of the run, those that take long first.
        request: the run's.
        listener: shows the progress.
        workers: processes.
    """
    crew = Crew(run, cells, request, listener, workers)
    try:
        crew.work()
    finally:
        crew.stop()


class Crew:
    """The worker processes of a run, what is left for them to do, and what became of it."""

    def __init__(self, run: Run, cells: list[Cell], request: Request, listener: Listener, workers: int) -> None:
        self._run, self._request, self._listener = run, request, listener
        self._todo = deque(cell for cell in cells if not run.done(cell))
        self._others: list[Cell] = []  # claimed by another process of the same run
        self._look = 0.0  # when to try those again
        self._losses: Counter[str] = Counter()
        self._hands = [self._hand() for _ in range(min(workers, len(self._todo)))]

    def _hand(self) -> Hand:
        return Hand(self._request, self._run.folder)

    def work(self) -> None:
        """Until nothing is left."""
        while self._todo or self._others or any(hand.cell for hand in self._hands):
            if self._others and time.monotonic() > self._look:
                self._todo.extend(self._others)
                self._others.clear()
            for hand in self._hands:
                if self._todo and hand.cell is None:
                    hand.give(self._todo.popleft())
            ready = wait([hand.pipe for hand in self._hands], timeout=PAUSE)
            for place, hand in enumerate(self._hands):
                if hand.pipe in ready:
                    self._heed(place, hand)

    def _heed(self, place: int, hand: Hand) -> None:
        """Take one message of a worker to heart."""
        cell, (what, value) = hand.cell, hand.hear()
        if what == "lost":
            self._hands[place] = self._hand()
            if cell:
                self._lost(cell, value)
        elif what == "problem":
            raise value
        elif what == "warning":
            warnings.warn(value, stacklevel=2)
        elif cell and what == "started":
            self._listener.started(cell)
        elif cell and what == "advance":
            self._listener.advance(cell, value)
        elif cell and what == "result":
            hand.cell = None
            if value is None:
                self._others.append(cell)
                self._look = time.monotonic() + PAUSE
            else:
                self._listener.finished(cell, value)

    def _lost(self, cell: Cell, code: int | None) -> None:
        """Have the cell run again, or write down that it fails."""
        self._losses[cell.id] += 1
        times = self._losses[cell.id]
        if times <= RETRIES:
            self._todo.appendleft(cell)
            return
        reason = f"its worker process ended {times} times (exit code {code}); is there memory enough?"
        result = {"cell": cell.id, "error": f"WorkerLost: {reason}"}
        self._run.write(cell, result)
        self._listener.finished(cell, result)

    def stop(self) -> None:
        """End the processes, whatever they do."""
        for hand in self._hands:
            hand.stop()


def _work(request: Request, folder: Path, pipe: Connection) -> None:
    """In a worker process: run the cells that come through the pipe, until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, who ends us
    allocator.keep_freed_memory()

    def tell(what: str, value: Any = None) -> None:
        try:
            pipe.send((what, value))
        except OSError:  # the parent is gone
            raise SystemExit(1) from None

    warnings.showwarning = lambda text, *_: tell("warning", str(text))
    run, worker = Run(folder), Worker(request, folder)
    while True:
        try:
            cell = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            tell("result", _one(run, cell, worker, partial(tell, "started"), partial(tell, "advance")))
        except Exception as problem:  # a full disk, say: the run can't go on
            tell("problem", problem)


@contextlib.contextmanager
def _deaf() -> Iterator[None]:
    """No Ctrl-C for a process that is started in here: it would end in a traceback while it imports."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
