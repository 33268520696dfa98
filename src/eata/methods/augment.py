"""Test-time augmentation (Ashukha et al. 2020): the mean prediction over random copies."""

from __future__ import annotations

import math
from typing import Literal, get_args

from torch import Tensor, nn

from eata import functional
from eata.errors import unknown
from eata.inputs import Inputs
from eata.methods.per_image import PerImage
from eata.norm import Statistics

By = Literal["crops", "augmix"]


class Augment(PerImage):
    """The mean softmax over random copies of each image; nothing is learnt ('TTA' in the paper).

    The logits are the logarithm of that mean, so their softmax is the mean.

    Args:
        net: an image classifier; ``net.pretrained_cfg`` says how its input is normalized.
        copies: of each image; the paper's 32 (CIFAR-10), 64 for ImageNet.
        copies_by: ``"crops"``, random crops and mirror images, as in Ashukha et al.; ``"augmix"``, the copies of MEMO,
            nearer to the paper's row, which is on MEMO's net: the presets say this (it needs ``pip install
            'eata[bench]'``).
        flip: mirror half of the copies; not for digits or text.
        seed: of the random numbers.

    >>> import eata, torch
    >>> net = eata.models.ResNet26(norm="gn")
    >>> net.pretrained_cfg = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
    >>> model = Augment(net, copies=4)
    >>> model(torch.zeros(2, 3, 32, 32)).shape, model.stats.forwards
    (torch.Size([2, 10]), 8)
    """

    copies_by: By

    def __init__(
        self, net: nn.Module, *, copies: int = 32, copies_by: By = "crops", flip: bool = True, seed: int = 0
    ) -> None:
        if copies_by not in get_args(By):
            raise unknown("kind of copies", copies_by, get_args(By))
        super().__init__(net, copies=copies, flip=flip, seed=seed, statistics=Statistics(math.inf))
        self.declare(copies_by=copies_by)

    def one(self, image: Tensor) -> Tensor:
        made = self.copies.augmix(image) if self.copies_by == "augmix" else self.copies.crops(image)
        return functional.mean_prediction(self.forward(Inputs(made)).logits)[None]
