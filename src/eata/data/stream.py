"""Labelled image streams: one order for every method, batches normalized as the model wants them."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eata.errors import EataError

Batch = tuple[Tensor, Tensor]


class Stream(ABC):
    """A set of images in a fixed order, with labels where they are known.

    Attributes:
        name: for tables, such as ``"cifar10-c fog 5"``.
        class_names: what the labels mean; empty where the images have no labels.
        class_index: which of the model's logits count, in the order of ``class_names`` (ImageNet-R: 200 of the 1,000);
            ``None`` means all of them. Labels always count within ``class_names``.
        generated: the corruption was made here, not read from the published files.
        cached: the images lie in a file already that all processes share.
        digest: short hash of the images and labels (of paths and sizes where they are files).
        skipped: ``(path, reason)`` of the files that could not be read, in the latest pass.
    """

    def __init__(
        self,
        name: str,
        class_names: Sequence[str],
        *,
        digest: str,
        class_index: Sequence[int] | None = None,
        generated: bool = False,
        cached: bool = False,
    ) -> None:
        self.name = name
        self.class_names = tuple(class_names)
        self.class_index = None if class_index is None else tuple(class_index)
        self.generated = generated
        self.cached = cached
        self.digest = digest
        self.skipped: list[tuple[Path, str]] = []

    @abstractmethod
    def __len__(self) -> int:
        """Number of images, counting files that may turn out unreadable."""

    @property
    @abstractmethod
    def labels(self) -> NDArray[np.int64]:
        """Of all images in the set's own order, (N,); -1: unknown."""

    @abstractmethod
    def pixels(self) -> Iterator[tuple[int, Tensor, int]]:
        """Number, image as uint8 (3, H, W) and label of each image that can be read, in the set's own order."""

    @abstractmethod
    def _read(self, order: NDArray[np.int64], size: int) -> Iterator[Batch]:
        """Batches of uint8 images (B, 3, H, W) and int64 labels in this order."""

    def batches(
        self,
        size: int = 64,
        *,
        seed: int | None = 2020,
        order: NDArray[np.int64] | None = None,
        mean: Sequence[float] = (0.0, 0.0, 0.0),
        std: Sequence[float] = (1.0, 1.0, 1.0),
    ) -> Iterator[Batch]:
        """Float images (B, 3, H, W) normalized to ``(x / 255 - mean) / std``, and int64 labels (-1: unknown).

        The order depends on ``seed`` and the number of images only, so every method and every corruption of a set sees
        the same one.

        Args:
            size: images per batch; the last may be smaller.
            seed: of the order; ``None`` keeps that of the files.
            order: the numbers of the images to take, instead of an order by ``seed``.
            mean: of each channel, for pixels from 0 to 1 (``net.pretrained_cfg["mean"]``).
            std: standard deviation of each channel, likewise.

        >>> import eata.data
        >>> images, labels = next(eata.data.load("digits").batches(4, mean=(0.5,) * 3, std=(0.5,) * 3))
        >>> images.shape, images.dtype, labels.dtype
        (torch.Size([4, 3, 32, 32]), torch.float32, torch.int64)
        """
        if size < 1:
            raise EataError(f"A batch of {size} images cannot be; take 1 or more.")
        count = len(self)
        # RandomState is the one generator of numpy whose draws are promised to stay the same in later versions.
        if order is None:
            order = np.arange(count) if seed is None else np.random.RandomState(seed).permutation(count)
        offset = 255 * torch.tensor(mean, dtype=torch.float32).view(-1, 1, 1)
        scale = 255 * torch.tensor(std, dtype=torch.float32).view(-1, 1, 1)
        self.skipped = []
        for images, labels in self._read(order, size):
            yield images.float().sub_(offset).div_(scale), labels

    def require(self, classes: int) -> None:
        """Raise ``EataError`` unless a model with this number of classes fits the labels."""
        if not self.class_names:
            return
        if self.class_index is not None:
            if max(self.class_index) >= classes:
                raise EataError(
                    f"The model has {classes} classes, but {self.name} picks its {len(self.class_names)} "
                    "from the 1000 of ImageNet: they do not belong together."
                )
        elif len(self.class_names) != classes:
            raise EataError(
                f"The model has {classes} classes, but {self.name} has {len(self.class_names)}: "
                "they do not belong together."
            )


class ArrayStream(Stream):
    """Images that fit into memory, as uint8 (N, 3, H, W) with int64 labels (N)."""

    def __init__(
        self,
        name: str,
        class_names: Sequence[str],
        images: Tensor,
        labels: Tensor,
        *,
        generated: bool = False,
        cached: bool = False,
    ) -> None:
        content = hashlib.sha256(images.contiguous().numpy().data)
        content.update(labels.contiguous().numpy().data)
        super().__init__(name, class_names, digest=content.hexdigest()[:12], generated=generated, cached=cached)
        self._images = images
        self._labels = labels

    def __len__(self) -> int:
        return len(self._labels)

    @property
    def labels(self) -> NDArray[np.int64]:
        return self._labels.numpy()

    def pixels(self) -> Iterator[tuple[int, Tensor, int]]:
        for number, (image, label) in enumerate(zip(self._images, self._labels.tolist(), strict=True)):
            yield number, image, label

    def _read(self, order: NDArray[np.int64], size: int) -> Iterator[Batch]:
        for start in range(0, len(order), size):
            index = torch.from_numpy(order[start : start + size])
            yield self._images[index], self._labels[index]
