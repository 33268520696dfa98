"""Tent (Wang et al. 2021): minimize the entropy of every sample."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from eata.gradient import GradientAdapter
from eata.inputs import Inputs

if TYPE_CHECKING:
    from eata.gradient import Shared, Unpack


class Tent(GradientAdapter):
    """One step per batch on the mean entropy of all its samples, over the normalization layers' scale and shift.

    Args:
        net: a model with normalization layers.
        episodic: restore the source weights for each batch, step, and predict the batch again with the stepped weights
            (two forwards); nothing is carried over.
        shared: ``lr`` (the paper's 0.005 for CIFAR-10) and the other arguments of ``eata.GradientAdapter``.

    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> net = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 3))
    >>> model = Tent(net, lr=0.1)
    >>> model(torch.randn(4, 2)).shape, model.stats.backwards
    (torch.Size([4, 3]), 4)
    """

    episodic: bool

    def __init__(self, net: nn.Module, *, episodic: bool = False, **shared: Unpack[Shared]) -> None:
        super().__init__(net, **shared)
        self.declare(episodic=episodic)

    def run(self, inputs: Inputs) -> Tensor:
        if not (self.episodic and self.learning):
            return super().run(inputs)
        try:
            super().run(inputs)
            with self.frozen():
                return super().run(inputs)
        finally:
            self.restore_source()
