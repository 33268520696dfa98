"""ROID (Marsden et al., WACV 2024): universal test-time adaptation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eata import functional, weights
from eata.gradient import Choice, GradientAdapter
from eata.inputs import in_range
from eata.methods.per_image import OfImages
from eata.passes import Pass
from eata.views import Views

if TYPE_CHECKING:
    from eata.gradient import Shared, Unpack

MOMENTUM = 0.9  # of the moving average of predictions
TEMPERATURE = 1 / 3  # of the weights


class ROID(OfImages, GradientAdapter):
    """Sure and diverse samples by a soft likelihood ratio, consistent under augmentation; weights stay near the source.

    Samples unlike the moving average of the predictions count, the more the surer they are. The loss is their soft
    likelihood ratio plus the symmetric cross-entropy to another view of them (a second forward, with a gradient through
    both). After each step the weights go back a little to the source. The answer is corrected by how often the batch
    has each class. https://arxiv.org/abs/2306.00650

    Args:
        net: an image classifier with normalization layers; ``net.pretrained_cfg`` says how its input is normalized.
        ensemble: the source's share in the weights after each step, 0 to 1; the paper's 0.01.
        flip: mirror half of the views; not for digits or text.
        seed: of the random numbers.
        shared: ``lr`` (0.001) and ``optimizer`` (``"adam"``; for ImageNet ``"nesterov"`` and 0.00025) and the other
            arguments of ``eata.GradientAdapter`` but ``score``, for ROID has its own.

    >>> _ = torch.manual_seed(0)
    >>> net = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(64, 3))
    >>> net.pretrained_cfg = {"mean": (0.5,), "std": (0.5,)}
    >>> model = ROID(net)
    >>> model(torch.randn(4, 1, 8, 8)).shape, model.stats.steps
    (torch.Size([4, 3]), 1)
    """

    ensemble: float
    #: moving average of the mean prediction, (C,); None before the first batch, where it is 1 / C
    average: Tensor | None

    def __init__(
        self, net: nn.Module, *, ensemble: float = 0.01, flip: bool = True, seed: int = 0, **shared: Unpack[Shared]
    ) -> None:
        in_range("ensemble", ensemble, low=0.0, high=1.0)
        views = Views(net, flip, soften=False, seed=seed)
        settings: Any = {"lr": 0.001, "optimizer": "adam", **shared}
        super().__init__(net, **settings)
        self.declare(ensemble=ensemble)
        self.use(views)
        self.remember("average", None)

    def select(self, batch: Pass) -> Choice:
        """Samples more diverse than the mean, weighted by diversity times certainty; the loss is over the batch."""
        predictions = functional.probabilities(batch.logits)
        usual = torch.full_like(predictions[0], 1 / predictions.shape[1]) if self.average is None else self.average
        diversity = functional.scaled(1 - F.cosine_similarity(usual[None], predictions, dim=1))
        certainty = functional.scaled(-functional.entropy(batch.logits))
        self.average = MOMENTUM * usual + (1 - MOMENTUM) * predictions.mean(0)
        kept = diversity >= diversity.mean()
        choice = Choice.of(kept, torch.exp(diversity * certainty / TEMPERATURE), kept)
        choice.count = len(batch)
        return choice

    def update(self, batch: Pass, choice: Choice) -> bool:
        """One step on the gradient through both views."""
        chosen = batch.inputs.take(choice.index)
        view = self.forward(chosen.with_images(self.views(chosen.images)), grad=True)
        batch.notes["view"] = view.logits
        view.notes["original"] = batch.logits[choice.index]
        rows = torch.arange(len(view), device=view.logits.device)
        of_view = Choice(rows, choice.weight, choice.reliable, choice.count)
        pairs = zip(self.gradients(batch, choice), self.gradients(view, of_view), strict=True)
        both = tuple(b if a is None else a if b is None else a + b for a, b in pairs)
        return self.step(both, 2 * len(rows))

    def loss(self, logits: Tensor, batch: Pass, choice: Choice) -> Tensor:
        """Of the batch: likelihood ratio and consistency; of the view: consistency. The other side is constant."""
        other = batch.notes["original"] if "original" in batch.notes else batch.notes["view"]
        losses = (functional.cross_entropy(logits, other) + functional.cross_entropy(other, logits)) / 2
        if "view" in batch.notes:
            losses = losses + functional.soft_likelihood_ratio(logits)
        return (choice.weight * losses).sum() / choice.count

    def after_step(self, batch: Pass, choice: Choice) -> None:
        """A little back to the source."""
        weights.follow(self.parameters, self.source, self.ensemble)

    def answer(self, batch: Pass) -> Tensor:
        """The logits, corrected by the prior of the batch."""
        prior = functional.smoothed_prior(functional.probabilities(batch.logits))
        return batch.logits * prior.to(batch.logits.dtype)
