"""scikit-learn's handwritten digits: 1,797 real scans that come with a package, so nothing is downloaded."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from eata.extras import need

CLASSES = tuple("0123456789")
TRAIN_IMAGES = 897


def arrays(split: str) -> tuple[Tensor, Tensor]:
    """Images as uint8 (N, 3, 32, 32) and labels as int64 (N).

    The 8x8 scans are enlarged bilinearly. The first 897 are ``"train"``, the last 900 are ``"test"``: the set is in the
    order of its writers, so this split (unlike a random one) tests on people who were not seen in training.

    >>> images, labels = arrays("test")
    >>> images.shape, labels.shape
    (torch.Size([900, 3, 32, 32]), torch.Size([900]))
    """
    scans = need("sklearn.datasets", "digits", "bench").load_digits()  # here, for it takes a second to import
    small = torch.from_numpy(scans.images).float().unsqueeze(1) * (255 / 16)
    images = F.interpolate(small, size=(32, 32), mode="bilinear").round().byte().expand(-1, 3, -1, -1)
    part = {"train": slice(None, TRAIN_IMAGES), "test": slice(TRAIN_IMAGES, None)}[split]
    return images[part].contiguous(), torch.from_numpy(scans.target).long()[part]
