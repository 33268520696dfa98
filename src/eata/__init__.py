"""Test-time adaptation of PyTorch classifiers: efficient, and without forgetting (EATA, Niu et al., ICML 2022)."""

from eata import data, functional, models
from eata.adapter import Adapter, Stats
from eata.check import check
from eata.errors import EataError, InputError, StateError
from eata.gradient import Choice, GradientAdapter
from eata.guard import Event, Guard
from eata.importance import Fisher, fisher, in_distribution
from eata.inputs import Inputs
from eata.methods import (
    BN,
    EATA,
    ETA,
    LAME,
    MEMO,
    ROID,
    SAR,
    TTT,
    Augment,
    CoTTA,
    DeYO,
    RDumb,
    RoTTA,
    Source,
    Tent,
    method,
    preset,
)
from eata.parallel import parallel
from eata.passes import Pass
from eata.window import Window

__all__ = [
    "BN",
    "EATA",
    "ETA",
    "LAME",
    "MEMO",
    "ROID",
    "SAR",
    "TTT",
    "Adapter",
    "Augment",
    "Choice",
    "CoTTA",
    "DeYO",
    "EataError",
    "Event",
    "Fisher",
    "GradientAdapter",
    "Guard",
    "InputError",
    "Inputs",
    "Pass",
    "RDumb",
    "RoTTA",
    "Source",
    "StateError",
    "Stats",
    "Tent",
    "Window",
    "check",
    "data",
    "fisher",
    "functional",
    "in_distribution",
    "method",
    "models",
    "parallel",
    "preset",
]
__version__ = "0.1.0"
