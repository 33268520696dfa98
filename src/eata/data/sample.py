"""The first 1,024 test images of CIFAR-10, which come with the package, so that nothing is downloaded."""

from __future__ import annotations

from importlib import resources

import numpy as np
import torch
from torch import Tensor

from eata.data.cifar10 import CLASSES, SIDE
from eata.errors import EataError
from eata.extras import need

__all__ = ["CLASSES", "FILE", "arrays"]

FILE = "cifar10-sample.png"  # a picture of 32 x 32 tiles, row by row, with the labels as text; see cifar10-sample.md


def arrays(split: str) -> tuple[Tensor, Tensor]:
    """Images as uint8 (1024, 3, 32, 32) and labels as int64 (1024); there is only ``"test"``.

    >>> images, labels = arrays("test")
    >>> images.shape, CLASSES[labels[0]]
    (torch.Size([1024, 3, 32, 32]), 'cat')
    """
    if split != "test":
        raise EataError("cifar10-sample has test images only; `eata data get cifar10` brings the others.")
    image = need("PIL.Image", "cifar10-sample", "bench")
    with resources.files("eata.data").joinpath(FILE).open("rb") as file, image.open(file) as picture:
        labels = torch.tensor([int(digit) for digit in picture.text["labels"]])
        tiles = np.asarray(picture).reshape(-1, SIDE, picture.width // SIDE, SIDE, 3)
    pixels = tiles.transpose(0, 2, 4, 1, 3).reshape(-1, 3, SIDE, SIDE)
    return torch.from_numpy(np.ascontiguousarray(pixels)), labels
