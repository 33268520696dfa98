"""Statistics that follow the stream slowly (RoTTA's robust BatchNorm)."""

from __future__ import annotations

import math

from torch import Tensor

from eata.mixture import Given
from eata.moments import mixed_statistics
from eata.norm import Layer, Statistics

Kept = list[list[Tensor]]  # mean and variance, (C,) each, of each BatchNorm layer


def of_source(layers: list[Layer]) -> Kept:
    """Where slow statistics start: a copy of the source's.

    >>> from torch import nn
    >>> from eata import norm
    >>> of_source(norm.batch_norm_layers(nn.BatchNorm1d(1)))
    [[tensor([0.]), tensor([1.])]]
    """
    return [[layer.mean.clone(), layer.variance.clone()] for layer in layers]


class Slow(Statistics):
    """Each layer normalizes by slow statistics; those of a forward that learns have its batch mixed in.

    Args:
        kept: the slow statistics.
        momentum: the batch's share, with a gradient; 0 to use them as they stand.
    """

    def __init__(self, kept: Kept, momentum: float = 0.0) -> None:
        super().__init__(math.inf)
        self.kept, self.momentum = kept, momentum
        self.begin()

    def begin(self) -> None:
        self._new: dict[int, tuple[Tensor, Tensor]] = {}

    def for_layer(self, layer: Layer, x: Tensor) -> Given:
        mean, variance = self._new.get(layer.index) or self.kept[layer.index]
        if self.momentum:
            self._new[layer.index] = mixed_statistics(x, (mean, variance), 1 - self.momentum)
        return Given(1 - self.momentum, mean, variance)

    def keep(self) -> None:
        """The statistics that the last forward used are the slow ones from now on."""
        for index, (mean, variance) in self._new.items():
            self.kept[index] = [mean, variance]
