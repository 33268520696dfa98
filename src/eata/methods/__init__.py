"""One file per method; here they are listed by the name that commands and state files use."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection

from eata.adapter import Adapter
from eata.methods.bn import BN
from eata.methods.eata import EATA, ETA
from eata.methods.source import Source
from eata.methods.tent import Tent

__all__ = ["BN", "EATA", "ETA", "METHODS", "PRESETS", "Source", "Tent", "method", "preset"]

METHODS: dict[str, type[Adapter]] = {"source": Source, "bn": BN, "tent": Tent, "eta": ETA, "eata": EATA}

# Section 'Implementation Details' of the paper, for per="batch" importance and batches of 64.
PRESETS: dict[str, dict[str, float]] = {
    "cifar10": {"lr": 0.005, "e0": 0.4, "epsilon": 0.4, "alpha": 0.1, "beta": 1.0},
    "imagenet": {"lr": 0.00025, "e0": 0.4, "epsilon": 0.05, "alpha": 0.1, "beta": 2000.0},
}


def method(name: str) -> type[Adapter]:
    """The class of a method by name.

    >>> method("tent").__name__
    'Tent'
    """
    return METHODS[_known("method", name.lower(), METHODS)]


def preset(name: str, method: type[Adapter] = EATA) -> dict[str, float]:
    """The paper's values for a benchmark: as keyword arguments of ``method``, those that it takes.

    Args:
        name: ``"cifar10"`` or ``"imagenet"``.
        method: class that the values are for; default EATA.

    >>> preset("cifar10")
    {'lr': 0.005, 'e0': 0.4, 'epsilon': 0.4, 'alpha': 0.1, 'beta': 1.0}
    >>> preset("imagenet", Tent)
    {'lr': 0.00025}
    """
    values = PRESETS[_known("preset", name.lower(), PRESETS)]
    takes = inspect.signature(method).parameters
    return {key: value for key, value in values.items() if key in takes}


def _known(kind: str, name: str, table: Collection[str]) -> str:
    if name in table:
        return name
    near = difflib.get_close_matches(name, table, n=1, cutoff=0.0)
    raise ValueError(f"There is no {kind} {name!r}; did you mean {near[0]!r}? There are: {', '.join(table)}.")
