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


class Decisions:
    """A guard's events, each told once; those of before this server are old news."""

    def __init__(self, model: Any) -> None:
        self._last = next(reversed(_events(model)), None)

    def fresh(self, model: Any) -> list[tuple[str, str]]:
        """Kind (``"alarm"``, or ``"guard"`` for the others) and text of each event since the last call."""
        new = []
        for event in reversed(_events(model)):
            if event == self._last:
                break
            new.append(event)
        self._last = new[0] if new else self._last
        return [
            ("alarm" if getattr(event, "kind", "alarm") == "alarm" else "guard", _text(event)) for event in new[::-1]
        ]


def _events(model: Any) -> list[Any]:
    for layer in _layers(model):
        if isinstance(found := getattr(layer, "events", None), list):
            return found
    return []


def _text(event: Any) -> str:
    """The event's own words, else its fields."""
    if "__str__" in vars(type(event)) or not dataclasses.is_dataclass(event):
        return str(event)
    fields = ((field.name, getattr(event, field.name)) for field in dataclasses.fields(event))
    told = ((name, f"{value:.4g}" if isinstance(value, float) else value) for name, value in fields)
    return ", ".join(f"{name}: {value}" for name, value in told)
