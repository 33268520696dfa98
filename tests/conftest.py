"""Small trained nets and streams that the tests share."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import settings
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

# timm imports torchvision, whose missing CPU build would register these two operators; nothing here calls them.
_operators = torch.library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):
    if not hasattr(torch.ops.torchvision, _name):
        _operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


settings.register_profile("eata", deadline=None)  # machines are noisy
settings.load_profile("eata")


@pytest.fixture(autouse=True)
def _one_thread_and_a_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def small_net(norm: str = "bn", classes: int = 10) -> nn.Sequential:
    """Two convolutions with normalization and dropout, on 8x8 images of one channel."""
    layers = {
        "bn": nn.BatchNorm2d,
        "gn": lambda c: nn.GroupNorm(4, c),
        "in": lambda c: nn.InstanceNorm2d(c, affine=True),
        "ln": lambda c: nn.LayerNorm([c, 8, 8]),
    }
    make = layers[norm]
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), make(8), nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1), make(16), nn.ReLU(), nn.Dropout(0.5),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, classes),
    )  # fmt: skip


@pytest.fixture(scope="session")
def digits() -> tuple[Tensor, Tensor]:
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    return images, torch.tensor(data.target)


_trained: dict[str, nn.Sequential] = {}


@pytest.fixture
def trained(digits):
    """Factory of fresh copies of a net trained for a moment on real digits: ``trained("gn", torch.float64)``."""

    def make(norm: str = "bn", dtype: torch.dtype = torch.float32) -> nn.Sequential:
        if norm not in _trained:
            torch.manual_seed(1)
            images, labels = digits
            net = small_net(norm)
            optimizer = torch.optim.Adam(net.parameters(), 0.01)
            for _ in range(4):
                for index in torch.randperm(1000).split(50):
                    optimizer.zero_grad()
                    F.cross_entropy(net(images[index]), labels[index]).backward()
                    optimizer.step()
            _trained[norm] = net
        return copy.deepcopy(_trained[norm]).to(dtype)

    return make


@pytest.fixture
def stream(digits):
    """Factory of a shifted stream: ``stream(sizes, dtype)`` gives noisy, darker batches of unseen digits."""

    def make(sizes: list[int], dtype: torch.dtype = torch.float32, noise: float = 0.6) -> list[Tensor]:
        generator = torch.Generator().manual_seed(7)
        images = digits[0][1000:]
        batches = []
        for size in sizes:
            x = images[torch.randint(len(images), (size,), generator=generator)]
            x = 0.7 * x - 0.2 + noise * torch.randn(x.shape, generator=generator)
            batches.append(x.to(dtype))
        return batches

    return make
