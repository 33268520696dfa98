"""What a served model takes and gives; everything that comes from a client is held against it before it is queued."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from eata.data.images import Target
from eata.errors import EataError
from eata.serve.refusal import Refusal

INPUT, OUTPUT, DATATYPE = "input", "logits", "FP32"
#: How far below black and above white a value may lie, in units of that distance. Resizing overshoots a little; far
#: larger values would ruin the batch statistics for every other client in the batch.
SLACK = 1.0

Floats = NDArray[np.float32]


@dataclasses.dataclass(frozen=True)
class Contract:
    """The model's name, the samples that it takes, and the classes that it knows.

    Args:
        name: of the model in addresses.
        shape: of one sample, (C, H, W).
        mean: subtracted from each channel (pixels from 0 to 1).
        std: divides each channel.
        class_names: one for each logit.
        batch: most samples in one request.
        target: how image files are brought to that shape; None: scaled and cropped as usual.

    >>> contract = Contract("net", (1, 2, 2), (0.5,), (0.5,), ("a", "b"), batch=4)
    >>> contract.checked(np.zeros((2, 1, 2, 2))).dtype
    dtype('float32')
    """

    name: str
    shape: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    class_names: tuple[str, ...]
    batch: int
    target: Target | None = None

    @classmethod
    def of(cls, net: nn.Module, name: str, batch: int) -> Contract:
        """Read from ``net.pretrained_cfg``, which ``eata.models.load`` and timm set."""
        config: Any = getattr(net, "pretrained_cfg", None)
        try:
            classes = int(config["num_classes"])
            names = config.get("label_names") or range(classes)
            shape, mean, std = (tuple(config[key]) for key in ("input_size", "mean", "std"))
        except (TypeError, KeyError, ValueError, AttributeError):
            raise EataError(
                "The net does not say what it takes: set net.pretrained_cfg, a dict with mean, std, input_size "
                "and num_classes, as timm does."
            ) from None
        if len(names) != classes or not len(mean) == len(std) == shape[0]:
            raise EataError("net.pretrained_cfg contradicts itself: compare num_classes, label_names, mean and std.")
        return cls(name, shape, mean, std, tuple(str(each) for each in names), batch, Target.of(config))

    def checked(self, values: NDArray[Any]) -> Floats:
        """The batch as the net takes it; raises for any other shape, for NaN, and for what can't be an image."""
        if values.ndim != 1 + len(self.shape) or values.shape[1:] != self.shape:
            wanted = ", ".join(str(side) for side in self.shape)
            raise Refusal(400, f"The input has shape {list(values.shape)}; this model takes [n, {wanted}].")
        if not 1 <= len(values) <= self.batch:
            raise Refusal(400, f"The request has {len(values)} samples; send 1 to {self.batch}.")
        low, high = values.min(axis=(0, *range(2, values.ndim))), values.max(axis=(0, *range(2, values.ndim)))
        if not (np.isfinite(low).all() and np.isfinite(high).all()):  # a NaN is the least and the greatest
            raise Refusal(400, "The input holds NaN or infinity.")
        mean, std = np.array(self.mean), np.array(self.std)
        if (low * std + mean < -SLACK).any() or (high * std + mean > 1 + SLACK).any():
            raise Refusal(
                400,
                f"The input holds values from {low.min():.3g} to {high.max():.3g}, which no image has after "
                f"(pixel / 255 - mean) / std with mean {list(self.mean)} and std {list(self.std)}.",
            )
        return values.astype(np.float32, copy=False)

    def normalized(self, pixels: NDArray[np.uint8]) -> Floats:
        """Pixels (n, H, W, C) from 0 to 255, as the net takes them."""
        mean, std = np.array(self.mean, np.float32), np.array(self.std, np.float32)
        return np.ascontiguousarray(((pixels.astype(np.float32) / 255 - mean) / std).transpose(0, 3, 1, 2))

    def pixels(self, sample: Floats) -> NDArray[np.uint8]:
        """One sample (C, H, W) as pixels (H, W, C), to be looked at."""
        mean, std = (np.array(each, np.float32)[:, None, None] for each in (self.mean, self.std))
        whole: NDArray[np.uint8] = np.rint((sample * std + mean).clip(0, 1) * 255).astype(np.uint8).transpose(1, 2, 0)
        return whole

    @property
    def sample_bytes(self) -> int:
        """Of one sample in binary form."""
        return 4 * math.prod(self.shape)
