"""What the methods that work on random copies of one image share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from eata.adapter import Adapter, in_range
from eata.augmentation import Copies
from eata.errors import EataError


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

    def __init__(self, net: nn.Module, *, copies: int, flip: bool, seed: int, **settings: Any) -> None:
        in_range("copies", copies, low=1)
        super().__init__(net, **settings)
        self.settings.update(copies=copies, flip=flip, seed=seed)
        self.copies = Copies(net, copies, flip, seed)

    def _predict_and_adapt(self, x: Tensor) -> Tensor:
        return torch.cat([self._one(image) for image in x])

    def _one(self, image: Tensor) -> Tensor:
        """Logits (1, C) of one image (channels, H, W)."""
        raise NotImplementedError

    def _forward(self, x: Tensor) -> Tensor:
        logits = super()._forward(x)
        if logits.dim() > 2:
            raise EataError(
                f"The net gave logits of shape {tuple(logits.shape)}; eata.{type(self).__name__} is for classifiers "
                "with one prediction for each image."
            )
        return logits

    def _checked(self, x: Tensor) -> Tensor:
        x = super()._checked(x)
        if x.dim() != 4:
            raise EataError(
                f"eata.{type(self).__name__} makes copies of images and takes (B, C, H, W), not {tuple(x.shape)}."
            )
        if len(self.copies.mean) not in (1, x.shape[1]):
            raise EataError(
                f"The images have {x.shape[1]} channels, but net.pretrained_cfg['mean'] has {len(self.copies.mean)}."
            )
        return x

    def reset(self) -> None:
        super().reset()
        self.copies.reset()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "generator": self.copies.generator.get_state()}

    def _take_state(self, saved: dict[str, Any]) -> None:
        super()._take_state(saved)
        self.copies.generator.set_state(saved["generator"])
