"""ResNet-26 for 32x32 images, as in TTT (Sun et al. 2020): the network of the paper's CIFAR-10 experiments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eata.errors import EataError

Norm = Literal["bn", "gn"]

WIDTHS = (16, 32, 64)
BLOCKS_PER_STAGE = 4  # depth 6n + 2 with n = 4


def _norm(kind: Norm) -> Callable[[int], nn.Module]:
    if kind == "bn":
        return nn.BatchNorm2d
    if kind == "gn":
        return lambda channels: nn.GroupNorm(8, channels)
    raise EataError(f"norm={kind!r} is neither 'bn' nor 'gn'.")


class Block(nn.Module):
    """Pre-activation basic block: norm-relu-conv twice, added to the shortcut.

    Where the shape changes, the shortcut is average pooling and zero-padded channels: it has no parameters.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm) -> None:
        super().__init__()
        make_norm = _norm(norm)
        self.norm1 = make_norm(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm2 = make_norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.stride = stride
        self.new_channels = outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        if self.stride > 1:
            shortcut = F.avg_pool2d(shortcut, self.stride)
        if self.new_channels:
            shortcut = F.pad(shortcut, (0, 0, 0, 0, 0, self.new_channels))
        out = self.conv1(torch.relu(self.norm1(x)))
        out = self.conv2(torch.relu(self.norm2(out)))
        return torch.add(out, shortcut)


def _stage(inputs: int, outputs: int, stride: int, norm: Norm) -> nn.Sequential:
    first = Block(inputs, outputs, stride, norm)
    return nn.Sequential(first, *(Block(outputs, outputs, 1, norm) for _ in range(BLOCKS_PER_STAGE - 1)))


class Head(nn.Module):
    """The last stage, its final norm-relu, global average pooling and a linear layer."""

    def __init__(self, classes: int, norm: Norm) -> None:
        super().__init__()
        self.stage = _stage(WIDTHS[1], WIDTHS[2], 2, norm)
        self.norm = _norm(norm)(WIDTHS[2])
        self.linear = nn.Linear(WIDTHS[2], classes)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stage(x)))
        logits: Tensor = self.linear(x.mean((2, 3)))
        return logits


class ResNet26(nn.Module):
    """ResNet-26: stages of 16, 32 and 64 channels, about 0.37 M parameters.

    Args:
        classes: number of classes.
        norm: ``"bn"`` (BatchNorm) or ``"gn"`` (GroupNorm with 8 groups).
        rotation: add TTT's rotation head: a copy of the last stage of its own, over the shared first two stages.

    >>> net = ResNet26(classes=10, norm="gn", rotation=True).eval()
    >>> images = torch.zeros(2, 3, 32, 32)
    >>> net(images).shape, net.rotation(images).shape
    (torch.Size([2, 10]), torch.Size([2, 4]))
    """

    def __init__(self, classes: int = 10, norm: Norm = "bn", rotation: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, WIDTHS[0], 3, padding=1, bias=False)
        self.stage1 = _stage(WIDTHS[0], WIDTHS[0], 1, norm)
        self.stage2 = _stage(WIDTHS[0], WIDTHS[1], 2, norm)
        self.head = Head(classes, norm)
        self.rotation_head = Head(4, norm) if rotation else None
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def shared(self, x: Tensor) -> Tensor:
        """Features of the first two stages, which both heads use."""
        features: Tensor = self.stage2(self.stage1(self.conv(x)))
        return features

    def forward(self, x: Tensor) -> Tensor:
        """Class logits, (B, classes)."""
        logits: Tensor = self.head(self.shared(x))
        return logits

    def rotation(self, x: Tensor) -> Tensor:
        """Logits of the four rotations (0, 90, 180, 270 degrees), (B, 4)."""
        if self.rotation_head is None:
            raise EataError("This ResNet26 has no rotation head; build it with rotation=True and train it jointly.")
        logits: Tensor = self.rotation_head(self.shared(x))
        return logits
