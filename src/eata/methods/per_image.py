"""What the methods that work on random copies of one image share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from eata.adapter import Adapter
from eata.augmentation import Copies
from eata.errors import InputError
from eata.inputs import Inputs, in_range
from eata.passes import Pass


class PerImage(Adapter):
    """An adapter that takes the images of a batch one by one, each with random copies of it.

    The random numbers come from a generator of its own, whose state is part of the adapter's.

    Args:
        net: an image classifier; ``net.pretrained_cfg`` says how its input is normalized (mean and std, as in timm).
        copies: random copies of each image.
        flip: mirror half of the copies; not for digits or text.
        seed: of the random numbers.
        settings: of the next class in line.
    """

    flip: bool
    seed: int

    def __init__(self, net: nn.Module, *, copies: int, flip: bool, seed: int, **settings: Any) -> None:
        in_range("copies", copies, low=1)
        made = Copies(net, copies, flip, seed)
        super().__init__(net, **settings)
        self.copies = made
        self.declare(flip=flip, seed=seed)
        self.remember("generator", made.generator)

    @property
    def settings(self) -> dict[str, Any]:
        """The method's arguments as they are now."""
        return {**super().settings, "copies": self.copies.count}

    def run(self, inputs: Inputs) -> Tensor:
        return torch.cat([self.one(image) for image in inputs.images])

    def one(self, image: Tensor) -> Tensor:
        """Logits (1, C) of one image (channels, H, W)."""
        raise NotImplementedError

    def forward(self, inputs: Inputs, *, grad: bool = False, count: bool = True) -> Pass:
        batch = super().forward(inputs, grad=grad, count=count)
        if batch.logits.dim() > 2:
            raise InputError(
                f"The net gave logits of shape {tuple(batch.logits.shape)}; eata.{type(self).__name__} is for "
                "classifiers with one prediction for each image."
            )
        return batch

    def checked(self, inputs: Inputs) -> Inputs:
        inputs = super().checked(inputs)
        if inputs.first.dim() != 4:
            raise InputError(
                f"eata.{type(self).__name__} makes copies of images and takes (B, C, H, W), not {tuple(inputs.shape)}."
            )
        if len(inputs.tensors) > 1:
            raise InputError(f"eata.{type(self).__name__} takes images alone, not {len(inputs.tensors)} tensors.")
        if len(self.copies.mean) not in (1, inputs.shape[1]):
            raise InputError(
                f"The images have {inputs.shape[1]} channels, but net.pretrained_cfg['mean'] has "
                f"{len(self.copies.mean)}."
            )
        return inputs
