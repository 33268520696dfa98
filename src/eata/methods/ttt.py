"""TTT, test-time training (Sun et al. 2020): learn from each test image how it is rotated."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eata.augmentation import rotate
from eata.errors import EataError, InputError
from eata.gradient import GradientAdapter, MakeOptimizer
from eata.inputs import Inputs
from eata.methods.per_image import PerImage


class TTT(PerImage, GradientAdapter):
    """For each image: one step on the rotation loss of random crop-and-flip copies turned at random; then predict.

    The step moves what the rotation head and the classifier share, and the rotation head itself.

    Args:
        net: a square-image classifier trained jointly with a rotation head: ``net.rotation(x)`` gives the logits of the
            four quarter turns. ``eata.models.ResNet26(norm="gn", rotation=True)`` is one, and ``net.pretrained_cfg``
            says how its input is normalized.
        copies: of each image; the paper's 32 (CIFAR-10), 20 for ImageNet.
        lr: learning rate; the paper's 0.001.
        episodic: restore the source weights after each image; default: they carry on (online).
        optimizer: function from parameters to a torch optimizer; default SGD without momentum, as in TTT.
        flip: mirror half of the copies; not for digits or text.
        seed: of the random numbers.

    >>> import eata
    >>> net = eata.models.ResNet26(norm="gn", rotation=True)
    >>> net.pretrained_cfg = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
    >>> model = TTT(net, copies=4)
    >>> model(torch.zeros(2, 3, 32, 32)).shape, model.stats.forwards, model.stats.backwards
    (torch.Size([2, 10]), 10, 8)
    """

    episodic: bool

    def __init__(
        self,
        net: nn.Module,
        *,
        copies: int = 32,
        lr: float = 0.001,
        episodic: bool = False,
        optimizer: MakeOptimizer | None = None,
        flip: bool = True,
        seed: int = 0,
    ) -> None:
        if not callable(getattr(net, "rotation", None)) or getattr(net, "rotation_head", net) is None:
            raise EataError(
                "eata.TTT learns from a rotation head, and this net has none; train one jointly, for example with "
                "'eata train --model resnet26-gn-rotation'."
            )
        super().__init__(
            net,
            copies=copies,
            flip=flip,
            seed=seed,
            lr=lr,
            optimizer=optimizer or (lambda parameters: torch.optim.SGD(parameters, lr)),
            backward="full",
            prior=math.inf,
        )
        self.declare(episodic=episodic)

    def free_parameters(self, net: nn.Module, layers: int | None) -> dict[str, nn.Parameter]:
        return dict(net.named_parameters())  # the classifier's own get no gradient, hence no step

    def one(self, image: Tensor) -> Tensor:
        try:
            if self.learning:
                self._learn_rotation(image)
            return self.forward(Inputs(image[None])).logits
        finally:
            if self.episodic:
                self.restore_source()

    def _learn_rotation(self, image: Tensor) -> None:
        turns = self.copies.quarter_turns().to(image.device)
        copies = rotate(self.copies.crops(image), turns)
        rotation: Any = self.net.rotation
        loss = F.cross_entropy(rotation(copies), turns)
        self.stats.forwards += len(copies)
        self.step(torch.autograd.grad(loss, self.differentiable, allow_unused=True), len(copies))

    def checked(self, inputs: Inputs) -> Inputs:
        inputs = super().checked(inputs)
        height, width = inputs.shape[2:]
        if height != width:
            raise InputError(
                f"eata.TTT turns images by 90 degrees, so they have to be square, not {height} x {width}; "
                "crop or resize them."
            )
        return inputs
