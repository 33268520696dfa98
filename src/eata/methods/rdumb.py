"""RDumb (Press et al., NeurIPS 2023): ETA that starts again every so often."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from eata.inputs import in_range
from eata.methods.eata import ETA
from eata.passes import Pass

if TYPE_CHECKING:
    from eata.gradient import Unpack
    from eata.methods.eata import Filters


class RDumb(ETA):
    """ETA, but after every ``every`` batches that it may learn from all goes back to the start, but for the stats.

    https://arxiv.org/abs/2306.05401: on streams that never end this is hard to beat. The paper says steps, and its
    program counts batches, with a step or without: a model that has collapsed predicts one class, leaves out every
    sample as redundant, and would never take the step that brings it back.

    Args:
        net: a model with normalization layers.
        every: batches from one start to the next, at least 1; the paper's 1000.
        filters: ``e0``, ``epsilon``, ``alpha`` and all other arguments of ``eata.ETA``.

    >>> import torch
    >>> net = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 3))
    >>> model = RDumb(net, e0=1.0, epsilon=1.0, lr=0.1, every=2)
    >>> _ = [model(torch.randn(4, 2)) for _ in range(2)]
    >>> model.stats.steps, model.average, bool((net[0].weight == 1).all())
    (2, None, True)
    """

    every: int
    #: batches since the last start
    age: int

    def __init__(self, net: nn.Module, *, every: int = 1000, **filters: Unpack[Filters]) -> None:
        in_range("every", every, low=1)
        super().__init__(net, **filters)
        self.declare(every=every)
        self.remember("age", 0)

    def learn(self, batch: Pass) -> None:
        super().learn(batch)
        self.age += 1
        if self.age >= self.every:
            self.restore_source()
            self.average, self.age = None, 0
