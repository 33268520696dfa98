"""What happened lately, for people to look at: a point a second, events, class balance, the last images."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import deque
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eata.serve import pictures

SECONDS = 600  # of history
EVENTS = 200
IMAGES = 24
FRESH = 4  # images taken from one batch
MEMORY = 0.9  # share of the class balance that the next comparison leaves


@dataclasses.dataclass(frozen=True)
class Event:
    """Something an operator should know of: when (seconds since 1970), what kind, and a sentence."""

    when: float
    kind: str
    text: str


@dataclasses.dataclass(frozen=True)
class Seen:
    """One image of late, as pixels (H, W, C), with what was said of it."""

    pixels: NDArray[np.uint8]
    best: int
    confidence: float
    version: int

    @cached_property
    def address(self) -> str:
        """The picture as a page shows it; made once, however many look."""
        return pictures.thumbnail(self.pixels)


@dataclasses.dataclass
class Point:
    """One second of traffic; ``entropy`` is a sum over ``samples``, in nats."""

    second: int
    samples: int = 0
    batches: int = 0
    entropy: float = 0.0
    learnt: int = 0
    chosen: int = 0
    drift: float | None = None
    version: int = 0


class History:
    """Written by the engine's thread, read by others; the lock is held for as long as it takes to copy a list.

    Args:
        classes: number of them.
    """

    def __init__(self, classes: int) -> None:
        self._lock = threading.Lock()
        self._points: deque[Point] = deque(maxlen=SECONDS)
        self._events: deque[Event] = deque(maxlen=EVENTS)
        self._images: deque[Seen] = deque(maxlen=IMAGES)
        self._now: NDArray[np.float64] = np.zeros(classes)
        self._source: NDArray[np.float64] = np.zeros(classes)

    def event(self, kind: str, text: str, when: float | None = None) -> None:
        """Remember an event; now, unless ``when`` says otherwise."""
        with self._lock:
            self._events.append(Event(time.time() if when is None else when, kind, text))

    def add(self, point: Point, images: list[Seen]) -> None:
        """Add a batch to its second."""
        with self._lock:
            last = self._points[-1] if self._points else None
            if last is None or last.second != point.second:
                self._points.append(point)
            else:
                for name in ("samples", "batches", "entropy", "learnt", "chosen"):
                    setattr(last, name, getattr(last, name) + getattr(point, name))
                last.drift, last.version = point.drift, point.version
            self._images.extend(images)

    def compare(self, now: NDArray[np.int64], source: NDArray[np.int64]) -> None:
        """Count the classes that the model, and the source model, gave to the same samples."""
        classes = len(self._now)
        with self._lock:
            self._now = MEMORY * self._now + np.bincount(now, minlength=classes)
            self._source = MEMORY * self._source + np.bincount(source, minlength=classes)

    @property
    def events(self) -> list[Event]:
        """All that are remembered, oldest first."""
        with self._lock:
            return list(self._events)

    @property
    def images(self) -> list[Seen]:
        """The last images, newest first."""
        with self._lock:
            return list(reversed(self._images))

    def series(self) -> dict[str, Any]:
        """The points as columns, and both class balances as shares (empty before the first comparison)."""
        with self._lock:
            points = [dataclasses.replace(point) for point in self._points]
            balance = (self._now, self._source)
        return {
            "second": [point.second for point in points],
            "samples": [point.samples for point in points],
            "entropy": [point.entropy / max(1, point.samples) for point in points],
            "learnt": [point.learnt for point in points],
            "chosen": [point.chosen for point in points],
            "drift": [point.drift for point in points],
            "version": [point.version for point in points],
            "now": (balance[0] / balance[0].sum()).tolist() if balance[0].sum() else [],
            "source": (balance[1] / balance[1].sum()).tolist() if balance[1].sum() else [],
        }
