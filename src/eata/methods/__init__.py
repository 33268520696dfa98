"""One file per method; here they are listed by the name that commands and state files use."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any

from eata.adapter import Adapter
from eata.errors import unknown
from eata.methods.augment import Augment
from eata.methods.bn import BN
from eata.methods.cotta import CoTTA
from eata.methods.deyo import DeYO
from eata.methods.eata import EATA, ETA
from eata.methods.lame import LAME
from eata.methods.memo import MEMO
from eata.methods.rdumb import RDumb
from eata.methods.roid import ROID
from eata.methods.rotta import RoTTA
from eata.methods.sar import SAR
from eata.methods.source import Source
from eata.methods.tent import Tent
from eata.methods.ttt import TTT

__all__ = [
    "BN",
    "EATA",
    "ETA",
    "LAME",
    "MEMO",
    "METHODS",
    "PRESETS",
    "ROID",
    "SAR",
    "TTT",
    "Augment",
    "CoTTA",
    "DeYO",
    "RDumb",
    "RoTTA",
    "Source",
    "Tent",
    "method",
    "preset",
    "preset_for",
    "takes",
]

METHODS: dict[str, type[Adapter]] = {
    "source": Source,
    "bn": BN,
    "tent": Tent,
    "eta": ETA,
    "eata": EATA,
    "augment": Augment,
    "memo": MEMO,
    "ttt": TTT,
    "rdumb": RDumb,
    "sar": SAR,
    "deyo": DeYO,
    "roid": ROID,
    "lame": LAME,
    "cotta": CoTTA,
    "rotta": RoTTA,
}

# Section 'Implementation Details' of the paper, for batches of 64; the beta of each goes with a Fisher ``per`` this.
PRESETS: dict[str, dict[str, Any]] = {
    "cifar10": {"lr": 0.005, "e0": 0.4, "epsilon": 0.4, "alpha": 0.1, "beta": 1.0, "per": "sample"},
    "imagenet": {"lr": 0.00025, "e0": 0.4, "epsilon": 0.05, "alpha": 0.1, "beta": 2000.0, "per": "batch"},
    # benchmarks/tune_digits.py
    "digits": {"lr": 0.05, "e0": 0.4, "epsilon": 0.4, "alpha": 0.1, "beta": 100.0, "per": "batch"},
}
# What a method has of its own: for copies of one image, the supplement ('Compared Methods'). For the methods since EATA
# their papers on ImageNet; on CIFAR-10, where not all of them have been, Adam with 0.001, as in the field's comparisons
# (with batches of 200).
_ADAM: dict[str, Any] = {"lr": 0.001, "optimizer": "adam"}
OWN_PRESETS: dict[str, dict[type[Adapter], dict[str, Any]]] = {
    "cifar10": {
        Augment: {"copies": 32, "copies_by": "augmix"},
        MEMO: {"copies": 32},
        TTT: {"copies": 32, "lr": 0.001},
        SAR: _ADAM,
        DeYO: {**_ADAM, "e0": 0.5},
        ROID: _ADAM,
        CoTTA: {**_ADAM, "restore": 0.01, "confidence": 0.92},
        RoTTA: _ADAM,
    },
    "imagenet": {
        Augment: {"copies": 64, "copies_by": "augmix"},
        MEMO: {"copies": 64},
        TTT: {"copies": 20, "lr": 0.001},
        DeYO: {"e0": 0.5, "plpd": 0.3},
        ROID: {"optimizer": "nesterov"},
        CoTTA: {"lr": 0.01, "optimizer": "sgd", "restore": 0.001, "confidence": 0.1},
        RoTTA: _ADAM,
    },
    "digits": {
        Augment: {"copies": 32, "flip": False},
        MEMO: {"copies": 32, "flip": False},
        TTT: {"copies": 32, "flip": False, "lr": 0.001},
        DeYO: {"e0": 0.5},
        ROID: {**_ADAM, "flip": False},
        CoTTA: {**_ADAM, "flip": False},
        RoTTA: {**_ADAM, "flip": False},
    },
}


def method(name: str) -> type[Adapter]:
    """The class of a method by name.

    >>> method("tent").__name__
    'Tent'
    """
    return METHODS[_known("method", name.lower(), METHODS)]


def preset(name: str, method: type[Adapter] = EATA) -> dict[str, Any]:
    """The paper's values for a benchmark: as keyword arguments of ``method``, those that it takes.

    Args:
        name: ``"cifar10"``, ``"imagenet"`` or ``"digits"``.
        method: class that the values are for; default EATA.

    >>> preset("cifar10")
    {'lr': 0.005, 'e0': 0.4, 'epsilon': 0.4, 'alpha': 0.1, 'beta': 1.0, 'per': 'sample'}
    >>> preset("imagenet", Tent)
    {'lr': 0.00025}
    >>> preset("imagenet", TTT)
    {'lr': 0.001, 'copies': 20}
    """
    name = _known("preset", name.lower(), PRESETS)
    names = takes(method)
    values = {key: value for key, value in PRESETS[name].items() if key in names}
    return {**values, **OWN_PRESETS[name].get(method, {})}


def takes(method: type[Adapter]) -> set[str]:
    """The names of a method's arguments, those of its base classes that it passes on included.

    >>> {"e0", "lr", "lean"} <= takes(ETA), "fisher" in takes(EATA), "lean" in takes(MEMO)
    (True, True, False)
    """
    names: set[str] = set()
    for kind in method.__mro__:
        if "__init__" in vars(kind):
            parameters = inspect.signature(vars(kind)["__init__"]).parameters.values()
            names |= {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
            if not any(p.kind is p.VAR_KEYWORD for p in parameters):
                break
    return names - {"self", "net", "statistics"}


def preset_for(classes: int) -> str:
    """The preset for a model that has none of its own: ImageNet's from 100 classes on.

    >>> preset_for(10), preset_for(1000)
    ('cifar10', 'imagenet')
    """
    return "imagenet" if classes >= 100 else "cifar10"


def _known(kind: str, name: str, table: Collection[str]) -> str:
    if name in table:
        return name
    raise unknown(kind, name, table)
