"""What the methods with a teacher share."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from eata import functional, weights
from eata.gradient import Choice, GradientAdapter
from eata.methods.per_image import OfImages
from eata.passes import Pass
from eata.views import Views


class Taught(OfImages, GradientAdapter):
    """A student that learns by gradient steps what its teacher, an average of itself, says of other views.

    Args:
        net: an image classifier; ``net.pretrained_cfg`` says how its input is normalized.
        flip: mirror half of the views; not for digits or text.
        seed: of the random numbers.
        shared: the arguments of ``eata.GradientAdapter``; default Adam with 0.001.
    """

    #: the teacher's values of what is adapted, by name; all else is shared
    teacher: dict[str, Tensor]

    def __init__(self, net: nn.Module, *, flip: bool, seed: int, **shared: Any) -> None:
        views = Views(net, flip, soften=True, seed=seed)
        super().__init__(net, **{"lr": 0.001, "optimizer": "adam", **shared})
        self.use(views)
        self.remember("teacher", weights.copies(self.parameters))

    def loss(self, logits: Tensor, batch: Pass, choice: Choice) -> Tensor:
        """Cross-entropy to the teacher's answer, which is in the notes of the batch."""
        losses = functional.cross_entropy(logits, batch.notes["target"][choice.index])
        return (choice.weight * losses).sum() / choice.count

    def follow(self, share: float) -> None:
        """The teacher moves by this share of the way to the student."""
        weights.follow(self.teacher, self.parameters, share)
