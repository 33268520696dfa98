"""Test-time augmentation (Ashukha et al. 2020): the mean prediction over random copies."""

from __future__ import annotations

import math

from torch import Tensor, nn

from eata import functional
from eata.inputs import Inputs
from eata.methods.per_image import PerImage
from eata.norm import Statistics


class Augment(PerImage):
    """The mean softmax over random crop-and-flip copies of each image; nothing is learnt ('TTA' in the paper).

    The logits are the logarithm of that mean, so their softmax is the mean.

    Args:
        net: an image classifier; ``net.pretrained_cfg`` says how its input is normalized.
        copies: of each image; the paper's 32 (CIFAR-10), 64 for ImageNet.
        flip: mirror half of the copies; not for digits or text.
        seed: of the random numbers.

    >>> import eata, torch
    >>> net = eata.models.ResNet26(norm="gn")
    >>> net.pretrained_cfg = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
    >>> model = Augment(net, copies=4)
    >>> model(torch.zeros(2, 3, 32, 32)).shape, model.stats.forwards
    (torch.Size([2, 10]), 8)
    """

    def __init__(self, net: nn.Module, *, copies: int = 32, flip: bool = True, seed: int = 0) -> None:
        super().__init__(net, copies=copies, flip=flip, seed=seed, statistics=Statistics(math.inf))

    def one(self, image: Tensor) -> Tensor:
        return functional.mean_prediction(self.forward(Inputs(self.copies.crops(image))).logits)[None]
