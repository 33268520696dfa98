"""The weathers."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from eata.data.corruptions import filters
from eata.data.corruptions.draws import Draws
from eata.data.corruptions.filters import to_pixels


def snow(images: Tensor, c: tuple[float, float, float, float, int, float, float], draws: Draws) -> Tensor:
    """Flakes that fall, in two directions, over a whitened photograph."""
    mean, deviation, factor, threshold, radius, sigma, weight = c
    height, width = images.shape[-2:]
    _, rows, tall, over = filters.zoom_window(height, factor)
    _, columns, wide, beyond = filters.zoom_window(width, factor)
    flakes = filters.enlarge(draws.normal(mean, deviation, 1, rows, columns), (tall, wide))
    flakes = flakes[..., over : over + height, beyond : beyond + width]
    flakes = torch.where(flakes < threshold, 0, flakes).clamp_(0, 1)
    angles = draws.uniform(-135.0, -45.0)
    flakes = filters.motion_blur(flakes, radius, sigma, angles).mul_(255).round_()

    values = images.float()
    red, green, blue = values.split(1, dim=1)
    grey = 0.299 * red + 0.587 * green + 0.114 * blue
    white = torch.maximum(values, grey * 1.5 + 127.5)
    values = values.mul_(weight).add_(white, alpha=1 - weight)
    return to_pixels(values.add_(flakes + flakes.flip(2, 3)))


def frost(images: Tensor, c: tuple[float, float, float], draws: Draws, photos: Path | None) -> Tensor:
    """Ice on the window: a random cut of a texture, added to the photograph."""
    from eata.data.corruptions.ice import textures  # draws with Pillow, which is no part of the core

    height, width = images.shape[-2:]
    ices = textures(photos, c[2], height, width)
    cuts = []
    for which, down, right in draws.uniform(0.0, 1.0, 3).tolist():
        ice = ices[int(which * len(ices))]
        top, left = int(down * (ice.shape[1] - height + 1)), int(right * (ice.shape[2] - width + 1))
        cuts.append(ice[:, top : top + height, left : left + width])
    return to_pixels(images.float().mul_(c[0]).add_(torch.stack(cuts), alpha=c[1]))


def fog(images: Tensor, c: tuple[float, float], draws: Draws) -> Tensor:
    """A bank of fog: rough at all scales, lighter than the photograph, which keeps its brightest value."""
    thickness, decay = 255 * c[0], c[1]
    height, width = images.shape[-2:]
    bank = _plasma(draws, 1 << (max(height, width) - 1).bit_length(), decay)[:, None, :height, :width]
    brightest = images.flatten(1).amax(1).float().view(-1, 1, 1, 1)
    values = images.float().add_(bank, alpha=thickness)
    return to_pixels(values.mul_(brightest / (brightest + thickness)))


def _plasma(draws: Draws, size: int, decay: float) -> Tensor:
    """Heights (B, size, size) in 0..1 by the diamond-square algorithm on a torus; ``size`` is a power of two."""
    chance = draws.uniform(-1.0, 1.0, size * size)
    heights = torch.zeros(len(chance), size, size)
    used, step, rough = 0, size, 100.0
    while step >= 2:
        half, cells = step // 2, size // step
        shifts = chance[:, used : used + 3 * cells**2].view(-1, 3, cells, cells) * rough**2
        used += 3 * cells**2
        corner = heights[:, ::step, ::step].clone()
        beside = corner + corner.roll(-1, 2)  # sum with the corner to the right
        below = corner + corner.roll(-1, 1)
        middle = (beside + beside.roll(-1, 1)) / 4 + shifts[:, 0]
        heights[:, half::step, half::step] = middle
        heights[:, ::step, half::step] = (beside + middle + middle.roll(1, 1)) / 4 + shifts[:, 1]
        heights[:, half::step, ::step] = (below + middle + middle.roll(1, 2)) / 4 + shifts[:, 2]
        step, rough = half, rough / decay
    lowest, highest = heights.aminmax(dim=2)
    lowest, highest = lowest.amin(1).view(-1, 1, 1), highest.amax(1).view(-1, 1, 1)
    return heights.sub_(lowest).div_(highest - lowest)


def brightness(images: Tensor, more: float, draws: Draws) -> Tensor:
    """More light: the value of HSV is raised, hue and saturation stay; so red, green and blue grow by one factor."""
    old = torch.arange(256, dtype=torch.float64)[:, None]
    new = (old + 255 * more).clamp_max(255)
    # Row: the pixel's largest channel. Column: the channel. Black has no hue and becomes grey.
    table = to_pixels(torch.where(old == 0, new, torch.arange(256) * new / old.clamp_min(1))).flatten()
    largest = torch.maximum(torch.maximum(images[:, 0], images[:, 1]), images[:, 2])
    cell = (largest.int() << 8)[:, None] + images
    return table.index_select(0, cell.flatten()).view_as(images)
