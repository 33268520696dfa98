"""Tent (Wang et al. 2021): minimize the entropy of every sample."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from eata.adapter import Backward, Choice, GradientAdapter, MakeOptimizer


class Tent(GradientAdapter):
    """One step per batch on the mean entropy of all its samples, over the normalization layers' scale and shift.

    Args:
        net: a model with normalization layers.
        lr: learning rate; the paper's 0.00025 (ImageNet), 0.005 for CIFAR-10.
        episodic: restore the source weights for each batch, step, and predict the batch again with the stepped weights
            (two forwards); nothing is carried over.
        optimizer: function from parameters to a torch optimizer; default SGD, momentum 0.9.
        backward: ``"rows"`` or ``"full"``; the same for Tent, which uses all rows.
        layers: adapt only the last ``layers`` normalization layers; None means all.
        lean: keep in memory only what training scale and shift needs (with ``backward="rows"``).

    >>> _ = torch.manual_seed(0)
    >>> net = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 3))
    >>> model = Tent(net, lr=0.1)
    >>> model(torch.randn(4, 2)).shape, model.stats.backwards
    (torch.Size([4, 3]), 4)
    """

    def __init__(
        self,
        net: nn.Module,
        lr: float = 0.00025,
        episodic: bool = False,
        optimizer: MakeOptimizer | None = None,
        backward: Backward = "rows",
        layers: int | None = None,
        lean: bool = False,
    ) -> None:
        super().__init__(net, lr=lr, optimizer=optimizer, backward=backward, layers=layers, lean=lean)
        self.settings["episodic"] = episodic
        self.episodic = episodic

    def select(self, logits: Tensor) -> Choice:
        """Every sample, with weight 1."""
        everything = torch.arange(len(logits), device=logits.device)
        return Choice(everything, logits.new_ones(len(logits)), len(logits))

    def _predict_and_adapt(self, x: Tensor) -> Tensor:
        logits = super()._predict_and_adapt(x)
        if not (self.episodic and self._learning):
            return logits
        try:
            with self.frozen():
                return super()._predict_and_adapt(x)
        finally:
            self.restore_source()
