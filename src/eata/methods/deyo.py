"""DeYO (Lee et al., ICLR 2024): learn from samples whose prediction depends on the object's shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from eata import functional, stages
from eata.gradient import Choice, GradientAdapter
from eata.inputs import in_range
from eata.methods.per_image import OfImages
from eata.passes import Pass
from eata.views import shuffled_patches

if TYPE_CHECKING:
    from eata.gradient import Shared, Unpack


class DeYO(OfImages, GradientAdapter):
    """Entropy minimization on samples that are sure, and would no longer be if the object were taken apart.

    Of the samples with entropy below ``e0``, the patches change places. PLPD is what the predicted class loses by that
    (Eq. 4 of https://arxiv.org/abs/2403.07366); those that lose more than ``plpd`` take part, with the weight
    exp(margin - entropy) + exp(PLPD) (Eq. 6).

    The last stage stays fixed, as in SAR.

    Args:
        net: an image classifier with normalization layers.
        e0: entropy threshold as a fraction of ln C, above 0 and at most 1; the paper's 0.5.
        plpd: how much the prediction has to lose, -1 to 1; the paper's 0.2 (0.3 for ResNet-50 with BatchNorm).
        margin: entropy of weight 1, as a fraction of ln C; the paper's 0.4.
        patches: an image is cut into ``patches`` x ``patches``; the paper's 4.
        exclude: names of modules that stay fixed instead of the last stage, such as ``("layer4",)``.
        seed: of the random numbers.
        shared: ``lr`` (the paper's 0.00025 for ResNets) and the other arguments of ``eata.GradientAdapter``.

    >>> _ = torch.manual_seed(0)
    >>> net = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(64, 3))
    >>> model = DeYO(net, e0=1.0, plpd=-1.0, lr=0.1, exclude=())
    >>> model(torch.randn(4, 1, 8, 8)).shape, model.stats.forwards, model.stats.backwards
    (torch.Size([4, 3]), 8, 4)
    """

    divisible = True
    e0: float
    plpd: float
    margin: float
    patches: int
    exclude: Sequence[str] | None
    seed: int
    generator: torch.Generator

    def __init__(
        self,
        net: nn.Module,
        *,
        e0: float = 0.5,
        plpd: float = 0.2,
        margin: float = 0.4,
        patches: int = 4,
        exclude: Sequence[str] | None = None,
        seed: int = 0,
        **shared: Unpack[Shared],
    ) -> None:
        in_range("e0", e0, low=0.0, high=1.0, open_low=True)
        in_range("plpd", plpd, low=-1.0, high=1.0)
        in_range("margin", margin, low=0.0, high=1.0)
        in_range("patches", patches, low=2)
        self.exclude = exclude
        super().__init__(net, **shared)
        fixed = None if exclude is None else list(exclude)
        self.declare(e0=e0, plpd=plpd, margin=margin, patches=patches, exclude=fixed, seed=seed)
        self.remember("generator", torch.Generator().manual_seed(seed))

    def free_parameters(self, net: nn.Module, layers: int | None) -> dict[str, nn.Parameter]:
        """Scale and shift of the normalization layers but the last stage's."""
        return stages.affine_parameters(net, layers, self.exclude, "eata.DeYO")

    def select(self, batch: Pass) -> Choice:
        """Samples that are sure by their shape."""
        classes = batch.logits.shape[1]
        scores = self.score(batch.logits)
        reliable = scores < functional.entropy_threshold(self.e0, classes)
        lost = torch.full_like(scores, -torch.inf)
        index = reliable.nonzero().squeeze(1)
        first, count = batch.span(len(index))
        if count:
            draws = torch.rand(count, self.patches**2, generator=self.generator)[first : first + len(index)]
            lost[index] = self._lost(batch, index, draws)
        weight = torch.exp(functional.entropy_threshold(self.margin, classes) - scores) + torch.exp(lost)
        return Choice.of(lost > self.plpd, weight, reliable)

    def _lost(self, batch: Pass, index: Tensor, draws: Tensor) -> Tensor:
        """PLPD of some samples, whose patches change places by these draws."""
        images = shuffled_patches(batch.inputs.images[index], self.patches, draws)
        apart = self.forward(batch.inputs.take(index).with_images(images))
        before = functional.probabilities(batch.logits[index])
        predicted = before.argmax(1, keepdim=True)
        after = functional.probabilities(apart.logits)
        return (before.gather(1, predicted) - after.gather(1, predicted)).squeeze(1)
