"""The blurs."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from eata.data.corruptions import filters
from eata.data.corruptions.draws import Draws
from eata.data.corruptions.filters import gaussian_blur, to_pixels


def defocus_blur(images: Tensor, c: tuple[float, float], draws: Draws) -> Tensor:
    """A lens out of focus: every point becomes a disc."""
    height, width = images.shape[-2:]
    reach = _disc(*c).shape[0] // 2
    padded = F.pad(images.float(), (reach,) * 4, mode="reflect")
    size = [-(-side // 16) * 16 for side in padded.shape[2:]]  # sides without large prime factors transform faster
    blurred = torch.fft.irfft2(torch.fft.rfft2(padded, s=size) * _disc_spectrum(*c, *size), s=size)
    return to_pixels(blurred[..., reach : reach + height, reach : reach + width])


@lru_cache
def _disc(radius: float, softness: float) -> Tensor:
    """The disc on the pixel grid, its rim softened by a small Gaussian (3 taps wide, 5 for radius over 8).

    As published, the grid ends at 8 pixels from the middle, or at the radius if that is more, and is mirrored there.
    """
    grid, taps = (8, 1) if radius <= 8 else (int(radius), 2)
    line = torch.arange(-grid, grid + 1, dtype=torch.float64)
    disc = (line[:, None] ** 2 + line**2 <= radius**2).double()
    around = torch.exp(-0.5 * (torch.arange(-taps, taps + 1, dtype=torch.float64) / softness) ** 2)
    kernel = torch.outer(around, around) / around.sum() ** 2
    mirrored = F.pad((disc / disc.sum())[None, None], (taps,) * 4, mode="reflect")
    empty = max(0, grid - int(radius) - taps)  # rows of zeros, which would only cost time
    softened: Tensor = F.conv2d(mirrored, kernel[None, None])[0, 0]
    return softened[empty : 2 * grid + 1 - empty, empty : 2 * grid + 1 - empty]


@lru_cache
def _disc_spectrum(radius: float, softness: float, height: int, width: int) -> Tensor:
    disc = _disc(radius, softness)
    reach = disc.shape[0] // 2
    centred = torch.zeros(height, width, dtype=torch.float64)
    centred[: disc.shape[0], : disc.shape[1]] = disc
    # The disc is symmetric about its middle, so its spectrum is real.
    spectrum: Tensor = torch.fft.rfft2(centred.roll((-reach, -reach), (0, 1)))
    return spectrum.real.float()


def glass_blur(images: Tensor, c: tuple[float, int, int], draws: Draws) -> Tensor:
    """Frosted glass: pixels change places with near ones, between two slight blurs."""
    sigma, reach, rounds = c
    pixels = to_pixels(gaussian_blur(images.float(), sigma, truncate=4)).flatten(2)
    height, width = images.shape[-2:]
    for _ in range(rounds):
        source = _shuffle(draws.bits(2, height, width), height, width, reach)
        pixels = pixels.gather(2, source[:, None].expand_as(pixels))
    return to_pixels(gaussian_blur(pixels.view_as(images).float(), sigma, truncate=4))


def _shuffle(bits: Tensor, height: int, width: int, reach: int) -> Tensor:
    """Where each pixel comes from (B, H * W) after one round of the published shuffle.

    The published loop walks from the last pixel to the first and means to swap each with a random neighbour, but its
    swap reads through a view: the pixel becomes a copy of the neighbour, and the neighbour stays. So a pixel whose
    neighbour was walked before it takes what that one has become, any other takes what was there at the start. That
    makes a forest of pointers, and following all of them at once, two steps for one each time, needs no walk.
    """
    down, right = (bits * (2 * reach) >> 16).sub_(reach).unbind(1)
    walked = torch.zeros(height, width, dtype=torch.bool)
    walked[reach + 1 : height - reach + 1, reach + 1 : width - reach + 1] = True
    step = (down.mul_(width).add_(right) * walked).flatten(1)
    pixel = torch.arange(height * width)
    neighbour = pixel + step
    # Later in the image means walked earlier: there the pointer goes on. Elsewhere it ends, at the neighbour as it was.
    pointer = pixel + step.clamp_min_(0)
    while True:
        further = pointer.gather(1, pointer)
        if torch.equal(further, pointer):
            return neighbour.gather(1, pointer)
        pointer = further


def motion_blur(images: Tensor, c: tuple[int, float], draws: Draws) -> Tensor:
    """A moving camera: smeared along a direction within 45 degrees of the horizontal."""
    angles = draws.uniform(-45.0, 45.0)
    return to_pixels(filters.motion_blur(images.float(), *c, angles))


def zoom_blur(images: Tensor, c: tuple[int, float], draws: Draws) -> Tensor:
    """A camera that moves towards the scene: the mean of the image and of ever larger zooms of it."""
    count, step = c
    values = images.float().contiguous(memory_format=torch.channels_last)
    total = values * 2  # the image itself, and the zoom by 1
    for i in range(1, count):
        total += filters.zoom(values, 1 + i * step)
    return to_pixels(total.div_(count + 1)).contiguous()
