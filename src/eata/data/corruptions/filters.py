"""What several corruptions share: rounding to pixels, blurs with borders, zooms."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


def to_pixels(values: Tensor) -> Tensor:
    """Cut floats on the 0..255 scale to uint8, overwriting them.

    The published sets cut off the fraction rather than round. The small margin keeps an exact level that float32 has
    just missed, so that a flat area stays flat.
    """
    return values.add_(1e-3).clamp_(0, 255).to(torch.uint8)


def gaussian_blur(values: Tensor, sigma: float, truncate: float, mirror: bool = False) -> Tensor:
    """Blur the last two dimensions; outside lie the border pixels again, or with ``mirror`` the image reversed."""
    radius = int(truncate * sigma + 0.5)
    if radius == 0:
        return values
    taps = torch.exp(-0.5 * (torch.arange(-radius, radius + 1, dtype=torch.float64) / sigma) ** 2)
    weights = (taps / taps.sum()).tolist()
    for dim in (-1, -2):
        size = values.shape[dim]
        padded = _padded(values, dim, radius, mirror)
        values = padded.narrow(dim, radius, size) * weights[radius]
        for shift in range(radius):
            values.add_(padded.narrow(dim, shift, size), alpha=weights[shift])
            values.add_(padded.narrow(dim, 2 * radius - shift, size), alpha=weights[shift])
    return values


def _padded(values: Tensor, dim: int, radius: int, mirror: bool) -> Tensor:
    if mirror:
        start, end = (values.narrow(dim, at, radius).flip(dim) for at in (0, values.shape[dim] - radius))
        return torch.cat((start, values, end), dim)
    return F.pad(values, (radius, radius, 0, 0) if dim == -1 else (0, 0, radius, radius), mode="replicate")


def motion_blur(values: Tensor, radius: int, sigma: float, angles: Tensor) -> Tensor:
    """Smear each image of (B, C, H, W) one way along its own angle (degrees), with the weights of half a Gaussian.

    As in ImageMagick: steps of one pixel, each rounded to the grid; the border pixel goes on outside.
    """
    steps = np.arange(2 * radius + 1)
    weights = np.exp(-0.5 * (steps / sigma) ** 2)
    weights /= weights.sum()
    steps = steps[weights > 1e-5]  # the others change no 8-bit value
    radians = np.deg2rad(angles.double().numpy())[:, None]
    down = np.ceil(steps * np.sin(radians) - 0.5).astype(int)
    right = np.ceil(steps * np.cos(radians) - 0.5).astype(int)
    return torch.stack(
        [_shifted_sum(image, weights.tolist(), *offsets) for image, *offsets in zip(values, down, right, strict=True)]
    )


def _shifted_sum(image: Tensor, weights: list[float], down: np.ndarray, right: np.ndarray) -> Tensor:
    height, width = image.shape[-2:]
    inside = (abs(down) < height) & (abs(right) < width)
    down, right = down[inside], right[inside]
    top, left = -min(0, down.min()), -min(0, right.min())
    padded = F.pad(image, (left, max(0, right.max()), top, max(0, down.max())), mode="replicate")
    blurred = torch.zeros_like(image)
    for weight, y, x in zip(weights, (down + top).tolist(), (right + left).tolist(), strict=False):
        blurred.add_(padded[:, y : y + height, x : x + width], alpha=weight)
    return blurred


def zoom_window(size: int, factor: float) -> tuple[int, int, int, int]:
    """For one side: start and length of the centre that a zoom enlarges, its length then, and what to trim of that."""
    length = math.ceil(size / factor)
    zoomed = round(length * factor)
    return (size - length) // 2, length, zoomed, (zoomed - size) // 2


def zoom(values: Tensor, factor: float) -> Tensor:
    """Enlarge the centre of (B, C, H, W) to the full size, bilinearly, corner pixels onto corner pixels."""
    height, width = values.shape[-2:]
    top, rows, tall, over = zoom_window(height, factor)
    left, columns, wide, beyond = zoom_window(width, factor)
    centre = values[..., top : top + rows, left : left + columns]
    return enlarge(centre, (tall, wide))[..., over : over + height, beyond : beyond + width]


def enlarge(values: Tensor, size: tuple[int, int]) -> Tensor:
    """Bilinear, corner pixels onto corner pixels."""
    return F.interpolate(values, size=size, mode="bilinear", align_corners=True)
