"""LAME (Boudiaf et al., CVPR 2022): correct the outputs, leave the model alone."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eata import functional
from eata.adapter import Adapter
from eata.errors import InputError, unknown
from eata.inputs import Inputs, in_range
from eata.norm import Statistics
from eata.passes import Pass

ROUNDS = 100
TOLERANCE = 1e-8  # of the energy, relative
LEAST = 1e-10  # added to a probability before its logarithm


AFFINITIES = {"knn": functional.neighbourhood, "rbf": functional.closeness}


class LAME(Adapter):
    """Laplacian adjusted maximum likelihood: neighbours among a batch's features get the same class.

    No parameter changes. With an affinity W of the samples, by the angle between the inputs of the last linear layer,
    Y = softmax(log p + W Y) is repeated until its energy stays (Eq. 5 to 7 of https://arxiv.org/abs/2201.05718). The
    answer is log Y. This helps where neighbours in time share a class, and hurts where they do not.

    Args:
        net: a classifier that ends in a linear layer.
        neighbours: of each sample, at least 1; the paper's 5. A smaller batch has as many as it has.
        affinity: ``"knn"``: W[i, j] = 1 for the nearest neighbours j of i; ``"rbf"``: exp(-d^2 / 2 s^2) of all, with s
            the mean distance to the last of ``neighbours`` (itself among them), which pulls much harder.

    >>> _ = torch.manual_seed(0)
    >>> LAME(nn.Sequential(nn.Linear(2, 8)))(torch.randn(16, 2)).exp().sum(1).allclose(torch.ones(16))
    True
    """

    needs_features = True
    neighbours: int
    affinity: str

    def __init__(self, net: nn.Module, *, neighbours: int = 5, affinity: Literal["knn", "rbf"] = "knn") -> None:
        in_range("neighbours", neighbours, low=1)
        if affinity not in AFFINITIES:
            raise unknown("affinity", affinity, AFFINITIES)
        super().__init__(net, statistics=Statistics(math.inf))
        self.declare(neighbours=neighbours, affinity=affinity)

    def forward(self, inputs: Inputs, *, grad: bool = False, count: bool = True) -> Pass:
        batch = super().forward(inputs, grad=grad, count=False)
        assert batch.features is not None
        if batch.logits.dim() > 2 or len(batch.features) != len(batch):
            raise InputError(
                f"The net gave logits of shape {tuple(batch.logits.shape)} from features of shape "
                f"{tuple(batch.features.shape)}; eata.LAME is for classifiers with one prediction for each sample."
            )
        if batch.logits.shape[1] < self.neighbours:
            raise InputError(
                f"The net has {batch.logits.shape[1]} classes, fewer than neighbours={self.neighbours}: most "
                "neighbours would be of another class; use fewer."
            )
        if len(batch) == 1:
            self.warn_once("A batch of 1 has no neighbours, so eata.LAME predicts it as the source does; use more.")
        self.stats.forwards += len(batch) if count else 0
        return batch

    def answer(self, batch: Pass) -> Tensor:
        """Log Y."""
        assert batch.features is not None
        p = functional.probabilities(batch.logits)
        affinity = AFFINITIES[self.affinity](batch.features.flatten(1).to(p.dtype), self.neighbours)
        own = torch.log(p + LEAST)
        y, before = p, 0.0
        for turn in range(ROUNDS):
            pairs = affinity @ y
            log_y = F.log_softmax(own + pairs, 1)
            y = log_y.exp()
            energy = float((-own * y - pairs * y + y * log_y).sum())
            if turn > 1 and abs(energy - before) <= TOLERANCE * abs(before):
                break
            before = energy
        return log_y

    def unfit_for_window(self, exact: bool) -> str | None:
        if exact:
            return None
        return "eata.LAME compares the features of whole batches; use eata.Window(..., exact=True), or larger batches."
