"""The bounded queue in front of the writer, and when a batch is due."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from eata.inputs import in_range
from eata.serve.contract import Floats
from eata.serve.refusal import Refusal


@dataclasses.dataclass(frozen=True)
class Settings:
    """How requests become batches.

    Args:
        batch: most samples a batch, and a request.
        wait: seconds that the first request of a batch waits for others.
        queue: most samples that wait.
        timeout: seconds after which a request that still waits is refused.
        share: most of a step that one client may have; 1 is no limit.
        save_every: batches between two saves.
    """

    batch: int = 64
    wait: float = 0.01
    queue: int = 512
    timeout: float = 30.0
    share: float = 1.0
    save_every: int = 20

    @classmethod
    def checked(cls, *, batch: int, wait: float, queue: int, timeout: float, share: float, save_every: int) -> Settings:
        """The same, with ``wait`` in milliseconds, as a user gives it; raises for what makes no sense.

        >>> Settings.checked(batch=8, wait=5.0, queue=64, timeout=1.0, share=1.0, save_every=20).wait
        0.005
        """
        for name, value, low in (("batch", batch, 1), ("queue", queue, batch), ("save_every", save_every, 1)):
            in_range(name, value, low=low)
        in_range("wait", wait, low=0)
        in_range("timeout", timeout, low=0, open_low=True)
        in_range("share", share, low=0, high=1, open_low=True)
        return cls(batch, wait / 1000, queue, timeout, share, save_every)


@dataclasses.dataclass(frozen=True)
class Answer:
    """The logits (n, C) of a request, and the version that made them."""

    logits: Floats
    version: int


@dataclasses.dataclass(eq=False)
class Job:
    """A request that waits. ``version`` asks for a kept version, which predicts and does not learn."""

    values: Floats
    client: str
    version: int | None
    arrived: float
    future: Future[Answer]


@dataclasses.dataclass(eq=False)
class Command:
    """Something to be done between two batches."""

    run: Callable[[], Any]
    future: Future[Any]


Work = TypeVar("Work", Job, Command)


class Queue:
    """Requests and commands in the order in which they came. Many add, one takes.

    Args:
        settings: how requests become batches.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._work: deque[Job | Command] = deque()
        self._wake = threading.Condition()
        #: samples that wait
        self.samples = 0
        #: whether nothing is taken in any more
        self.closed = False

    def add(self, work: Work) -> Work:
        """Queue a request or a command; a full queue refuses a request."""
        with self._wake:
            if self.closed:
                raise Refusal(503, "The server is stopping.")
            first = not self._work
            if isinstance(work, Job):
                if self.samples + len(work.values) > self._settings.queue:
                    raise Refusal(429, "Too many samples wait already; try again.", {"Retry-After": "1"})
                self.samples += len(work.values)
            self._work.append(work)
            if first or isinstance(work, Command) or self.samples >= self._settings.batch:
                self._wake.notify()
        return work

    def close(self) -> None:
        """Take nothing in any more; what waits is due at once."""
        with self._wake:
            self.closed = True
            self._wake.notify()

    def next(self) -> list[Job] | Command | None:
        """What is to be done next, as soon as it is due; None when nothing will come any more."""
        with self._wake:
            while not self._work:
                if self.closed:
                    return None
                self._wake.wait()
            while (left := self._time_left()) > 0:
                self._wake.wait(left)
            if isinstance(self._work[0], Command):
                return self._pop_command()
            return self._pop_batch()

    def _time_left(self) -> float:
        """Seconds until the first is due: a full batch at once, and so is one that an operator's command waits for."""
        first = self._work[0]
        if isinstance(first, Command) or isinstance(self._work[-1], Command):
            return 0.0
        if self.closed or self.samples >= self._settings.batch:
            return 0.0
        return first.arrived + self._settings.wait - time.monotonic()

    def _pop_command(self) -> Command:
        command = self._work.popleft()
        assert isinstance(command, Command)
        return command

    def _pop_batch(self) -> list[Job]:
        jobs: list[Job] = []
        room = self._settings.batch
        while self._work and isinstance(job := self._work[0], Job) and len(job.values) <= room:
            self._work.popleft()
            room -= len(job.values)
            self.samples -= len(job.values)
            jobs.append(job)
        return jobs
