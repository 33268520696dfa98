"""Test-time adaptation of PyTorch classifiers: efficient, and without forgetting (EATA, Niu et al., ICML 2022)."""

from eata import data, functional, models
from eata.adapter import Adapter, Stats
from eata.check import check
from eata.errors import EataError, InputError, StateError
from eata.gradient import Choice, GradientAdapter
from eata.importance import Fisher, fisher, in_distribution
from eata.inputs import Inputs
from eata.methods import BN, EATA, ETA, MEMO, TTT, Augment, Source, Tent, method, preset
from eata.passes import Pass
from eata.window import Window

__all__ = [
    "BN",
    "EATA",
    "ETA",
    "MEMO",
    "TTT",
    "Adapter",
    "Augment",
    "Choice",
    "EataError",
    "Fisher",
    "GradientAdapter",
    "InputError",
    "Inputs",
    "Pass",
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
    "preset",
]
__version__ = "0.1.0"
