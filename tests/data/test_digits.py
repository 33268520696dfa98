from __future__ import annotations

import numpy as np
import torch
from sklearn.datasets import load_digits

from eata.data import digits


def test_split_is_the_first_897_and_the_last_900():
    train, test = digits.arrays("train"), digits.arrays("test")
    assert len(train[0]) == len(train[1]) == 897
    assert len(test[0]) == len(test[1]) == 900
    assert torch.cat([train[1], test[1]]).tolist() == load_digits().target.tolist()
    assert train[0].dtype == torch.uint8
    assert train[1].dtype == torch.int64


def test_images_are_the_scans_enlarged():
    images = digits.arrays("train")[0]
    assert torch.equal(images[:, 0], images[:, 2])
    scan = load_digits().images[5] * 255 / 16
    small = images[5, 0].float().reshape(8, 4, 8, 4).mean((1, 3)).numpy()
    assert np.corrcoef(scan.ravel(), small.ravel())[0, 1] > 0.97
    assert images.max() == 255
