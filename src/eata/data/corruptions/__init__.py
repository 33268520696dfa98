"""The 15 corruptions of ImageNet-C and CIFAR-10-C, batched on tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eata.data.corruptions import blur, digital, noise, weather
from eata.data.corruptions.constants import CIFAR, IMAGENET
from eata.data.corruptions.draws import Draws
from eata.errors import EataError, unknown

_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "gaussian_noise": noise.gaussian_noise,
    "shot_noise": noise.shot_noise,
    "impulse_noise": noise.impulse_noise,
    "defocus_blur": blur.defocus_blur,
    "glass_blur": blur.glass_blur,
    "motion_blur": blur.motion_blur,
    "zoom_blur": blur.zoom_blur,
    "snow": weather.snow,
    "frost": weather.frost,
    "fog": weather.fog,
    "brightness": weather.brightness,
    "contrast": digital.contrast,
    "elastic_transform": digital.elastic_transform,
    "pixelate": digital.pixelate,
    "jpeg_compression": digital.jpeg_compression,
}

CORRUPTIONS: tuple[str, ...] = tuple(_FUNCTIONS)
"""The names, in the paper's order."""

SEVERITIES: tuple[int, ...] = (1, 2, 3, 4, 5)

SMALLEST = 16
"""Pixels that each side of an image needs; on fewer, some corruptions have no meaning."""

# Many constants are lengths in pixels. Images of 32 pixels have their own set, those of 224 theirs; between the two the
# nearer one in proportion holds, and 84 is just below sqrt(32 * 224).
_SMALL = 84

# Values worked on at once: small enough to stay in a core's cache, large enough to make Python's share small.
_CHUNK = 2**19


@torch.no_grad()
def corrupt(
    images: Tensor, name: str, severity: int, seed: int = 0, *, frost: Path | None = None, first: int = 0
) -> Tensor:
    """Corrupt a batch of images as ImageNet-C and CIFAR-10-C do (section 4 of the paper; Hendrycks & Dietterich, 2019).

    Images whose shorter side has at most 84 pixels get the constants of CIFAR-10-C (made for 32), others those of
    ImageNet-C (made for 224). The result depends on the image, its place in the stream and the seed, not on the batch.

    Args:
        images: uint8 (B, 3, H, W), red first; both sides at least 16 pixels.
        name: one of ``CORRUPTIONS``.
        severity: 1 (slight) to 5 (severe).
        seed: of all randomness; default 0.
        frost: a folder with the six photographs of the original (``frost1.png`` to ``frost6.jpg``); default: ice that
            is computed.
        first: the place in the stream of the first image, so that batches of any size give what one call would.

    >>> images = torch.full((4, 3, 32, 32), 128, dtype=torch.uint8)
    >>> noisy = corrupt(images, "gaussian_noise", severity=3)
    >>> noisy.shape, noisy.dtype
    (torch.Size([4, 3, 32, 32]), torch.uint8)
    >>> torch.equal(noisy[2:], corrupt(images[2:], "gaussian_noise", severity=3, first=2))
    True
    """
    check(name, severity)
    _check_images(images)
    if min(seed, first) < 0:
        raise EataError(f"seed and first must be 0 or more, not {seed} and {first}.")
    if len(images) == 0:
        return images.clone()
    family = CIFAR if min(images.shape[2:]) <= _SMALL else IMAGENET
    function = partial(_FUNCTIONS[name], photos=frost) if name == "frost" else _FUNCTIONS[name]
    key = (seed, CORRUPTIONS.index(name), severity)
    size = max(1, _CHUNK // images[0].numel())
    corrupted = [
        function(chunk, family[name][severity - 1], Draws(key, first + i * size, len(chunk)))
        for i, chunk in enumerate(images.cpu().split(size))
    ]
    return torch.cat(corrupted).to(images.device)


def check(name: Any, severity: Any) -> None:
    """Raise ``EataError`` unless there is such a corruption and such a severity."""
    if name not in CORRUPTIONS:
        raise unknown("corruption", str(name), CORRUPTIONS)
    if isinstance(severity, bool) or severity not in SEVERITIES:
        raise EataError(f"severity must be a whole number from 1 (slight) to 5 (severe), not {severity!r}.")


def _check_images(images: Tensor) -> None:
    if not isinstance(images, Tensor) or images.dtype != torch.uint8:
        kind = images.dtype if isinstance(images, Tensor) else type(images).__name__
        raise TypeError(f"images must be a uint8 tensor with values 0 to 255, not {kind}; corrupt before normalizing.")
    if images.ndim != 4 or images.shape[1] != 3:
        raise EataError(f"images must have shape (B, 3, height, width), not {tuple(images.shape)}.")
    height, width = images.shape[2:]
    if min(height, width) < SMALLEST:
        raise EataError(f"images must have at least {SMALLEST} x {SMALLEST} pixels, not {height} x {width}.")
