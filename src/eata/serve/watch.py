"""What only some adapters tell of themselves: drift in nats, and a guard's alarms. Asked for here and nowhere else."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any


def _layers(model: Any) -> Iterator[Any]:
    """The adapter, and those that it wraps (a guard around a window around a method)."""
    while model is not None:
        yield model
        model = getattr(model, "model", None)


def drift(model: Any) -> float | None:
    """How far clean predictions may have moved from the source's, in nats; None for methods that do not know.

    >>> class Knows:
    ...     drift = 0.25
    >>> drift(Knows()), drift(object())
    (0.25, None)
    """
    for layer in _layers(model):
        found = getattr(layer, "drift", None)
        if found is not None:
            return float(found)
    return None


def method(model: Any) -> str:
    """The names of the adapter and of those that it wraps."""
    return " of ".join(type(layer).__name__ for layer in _layers(model))


class Alarms:
    """The guard's events, each told once; those of before this server are old news."""

    def __init__(self, model: Any) -> None:
        self._told = len(self._events(model))

    def fresh(self, model: Any) -> list[str]:
        """A sentence for each event since the last call."""
        events = self._events(model)
        new = events[self._told :] if self._told <= len(events) else events  # a reset begins a new list
        self._told = len(events)
        return [_sentence(event) for event in new]

    @staticmethod
    def _events(model: Any) -> list[Any]:
        for layer in _layers(model):
            if isinstance(found := getattr(layer, "events", None), list):
                return found
        return []


def _sentence(event: Any) -> str:
    if not dataclasses.is_dataclass(event):
        return str(event)
    fields = ((field.name, getattr(event, field.name)) for field in dataclasses.fields(event))
    return ", ".join(
        f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}" for name, value in fields
    )
