"""The paper's ResNet-26, its trained weights, and loading other people's models."""

from eata.models.resnet26 import ResNet26
from eata.models.zoo import load, names

__all__ = ["ResNet26", "load", "names"]
