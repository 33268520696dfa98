"""SAR (Niu et al., ICLR 2023): reliable samples, a step that looks for flat ground, and recovery."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from eata import functional, stages, weights
from eata.gradient import Choice, GradientAdapter
from eata.inputs import in_range
from eata.passes import Pass
from eata.rows import Gradients

if TYPE_CHECKING:
    from eata.gradient import Shared, Unpack


class SAR(GradientAdapter):
    """Sharpness-aware and reliable entropy minimization.

    With the samples of entropy below E0 (their mean is loss 1, its gradient g), climb by ``rho g / |g|``; forward again
    there, keep those that are still below E0 (loss 2), and take their gradient as the step from where it began (Eq. 2
    to 5 of https://arxiv.org/abs/2302.12400). Where a moving average of loss 2 falls below ``recover``, the model is
    about to collapse to one class: weights and optimizer go back to the source. (The authors' program then keeps the
    average, which they call a slip; here it starts anew.) The last stage stays fixed: `eata.stages` finds it.

    Args:
        net: a model with normalization layers.
        e0: entropy threshold as a fraction of ln C, above 0 and at most 1; the paper's 0.4.
        rho: how far to climb, at least 0; the paper's 0.05.
        recover: level of the moving average in nats that means collapse; the paper's 0.2 (ImageNet). None: never.
        exclude: names of modules that stay fixed instead of the last stage, such as ``("layer4",)``.
        shared: ``lr`` (the paper's 0.00025 for ResNets) and the other arguments of ``eata.GradientAdapter``.

    >>> _ = torch.manual_seed(0)
    >>> net = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 3))
    >>> model = SAR(net, e0=1.0, lr=0.1, exclude=())
    >>> model(torch.randn(4, 2)).shape, model.stats.forwards, model.stats.backwards
    (torch.Size([4, 3]), 8, 8)
    """

    divisible = True
    e0: float
    rho: float
    recover: float | None
    exclude: Sequence[str] | None
    average: float | None  #: moving average of loss 2; None before the first

    def __init__(
        self,
        net: nn.Module,
        *,
        e0: float = 0.4,
        rho: float = 0.05,
        recover: float | None = 0.2,
        exclude: Sequence[str] | None = None,
        **shared: Unpack[Shared],
    ) -> None:
        in_range("e0", e0, low=0.0, high=1.0, open_low=True)
        in_range("rho", rho, low=0.0)
        if recover is not None:
            in_range("recover", recover, low=0.0)
        self.exclude = exclude
        super().__init__(net, **shared)
        self.declare(e0=e0, rho=rho, recover=recover, exclude=None if exclude is None else list(exclude))
        self.remember("average", None)

    def free_parameters(self, net: nn.Module, layers: int | None) -> dict[str, nn.Parameter]:
        """Scale and shift of the normalization layers but the last stage's."""
        return stages.affine_parameters(net, layers, self.exclude, "eata.SAR")

    def select(self, batch: Pass) -> Choice:
        """The reliable samples, all alike."""
        reliable = (scores := self.score(batch.logits)) < self._threshold(batch)
        return Choice.of(reliable, torch.ones_like(scores), reliable)

    def update(self, batch: Pass, choice: Choice) -> bool:
        """Climb, choose again among the chosen, and step from below with the gradient from above."""
        up = self.gradients(batch, choice)
        length = torch.stack([g.norm() for g in up if g is not None]).norm()
        if not bool(torch.isfinite(length)):
            return self.step(up, 0)  # which says so
        with self._climbed(up, self.rho / (length + 1e-12)):
            above = self.forward(batch.inputs, grad=True)
            scores = self.score(above.logits[choice.index])
            sure = scores < self._threshold(batch)
            (count,) = above.counts(int(sure.sum()))
            if not count:
                return False
            again = Choice(choice.index[sure], choice.weight[sure], choice.reliable, count)
            batch.notes["loss"] = float(above.total(scores[sure].sum())) / count
            gradients = self.gradients(above, again)
        return self.step(gradients, choice.count + again.count)

    def after_step(self, batch: Pass, choice: Choice) -> None:
        """Recover from a collapse."""
        loss = batch.notes["loss"]
        self.average = loss if self.average is None else 0.9 * self.average + 0.1 * loss
        if self.recover is not None and self.average < self.recover:
            self.restore_source()
            self.average = None

    def _threshold(self, batch: Pass) -> float:
        return functional.entropy_threshold(self.e0, batch.logits.shape[1])

    @contextlib.contextmanager
    def _climbed(self, gradients: Gradients, distance: Tensor) -> Iterator[None]:
        """The parameters that far up the gradient, for as long as the block lasts."""
        before = weights.copies(self.parameters)
        with torch.no_grad():
            for parameter, gradient in zip(self.parameters.values(), gradients, strict=True):
                if gradient is not None:
                    parameter.add_(distance * gradient)
        try:
            yield
        finally:
            weights.put(self.parameters, before)
