"""The noises: each pixel value is drawn anew, given the old one."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from eata.data.corruptions.draws import Draws
from eata.data.corruptions.filters import to_pixels

_LEVELS = 2**14  # of probability in the table of photon counts


def gaussian_noise(images: Tensor, deviation: float, draws: Draws) -> Tensor:
    """Noise of low light: normal, the same everywhere."""
    return to_pixels(draws.normal(0.0, 255 * deviation, *images.shape[1:]).add_(images))


def shot_noise(images: Tensor, photons: float, draws: Draws) -> Tensor:
    """Noise of light itself: the number of photons is Poisson, and brighter is noisier."""
    cell = (draws.bits(*images.shape[1:]) >> 2).add_(images.int(), alpha=_LEVELS)
    return _photon_counts(photons).index_select(0, cell.flatten()).view_as(images)


@lru_cache
def _photon_counts(photons: float) -> Tensor:
    """For each pixel value and each of ``_LEVELS`` quantiles, the pixel value after counting photons: flat uint8."""
    counts = torch.arange(int(2 * photons) + 60, dtype=torch.float64)
    rate = torch.arange(256, dtype=torch.float64)[:, None] * photons / 255
    below = torch.exp(torch.special.xlogy(counts, rate) - rate - torch.lgamma(counts + 1)).cumsum(1)
    quantiles = ((torch.arange(_LEVELS, dtype=torch.float64) + 0.5) / _LEVELS).expand(256, -1).contiguous()
    count = torch.searchsorted(below.contiguous(), quantiles).double()
    return to_pixels(count * 255 / photons).flatten()


def impulse_noise(images: Tensor, share: float, draws: Draws) -> Tensor:
    """Noise of broken bits: a share of the values becomes black or white, as often one as the other."""
    words = draws.words(*images.shape[1:])
    edge = 32768 - round(share / 2 * 65536)
    kept = (words >= -edge).view(torch.uint8) * 255
    white = (words >= edge).view(torch.uint8) * 255
    return (images & kept).bitwise_or_(white)
