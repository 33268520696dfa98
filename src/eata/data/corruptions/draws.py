"""Randomness that belongs to an image, not to a batch: each image of a stream draws from its own generator."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

# Starts of two images' draws lie a multiple of this odd number apart in one long sequence, as in numpy's `jumped`:
# a power of two would leave the low bits of all starts equal.
_STRIDE = 0x9E3779B97F4A7C15F39CC0605CEDC835


class Draws:
    """Random tensors for images ``first, first + 1, ...`` of the stream that ``key`` names.

    Every method returns (count, *shape), of which row i depends only on ``key``, ``first + i`` and the calls before.
    Values have 16 bits: finer than the 8-bit pixels they end in, and several times faster than full floats.
    """

    def __init__(self, key: tuple[int, ...], first: int, count: int) -> None:
        self._generator = np.random.PCG64(np.random.SeedSequence(key))
        self._start = self._generator.state
        self._indices = range(first, first + count)
        self._used = 0

    def words(self, *shape: int) -> Tensor:
        """Uniform int16 in -32768..32767."""
        size = math.prod(shape)
        words = np.empty((len(self._indices), -(-size // 4)), dtype=np.uint64)
        for row, index in zip(words, self._indices, strict=True):
            self._generator.state = self._start
            self._generator.advance((index * _STRIDE + self._used) % 2**128)
            row[:] = self._generator.random_raw(len(row))
        self._used += words.shape[1]
        return torch.from_numpy(words.view(np.int16))[:, :size].reshape(-1, *shape)

    def bits(self, *shape: int) -> Tensor:
        """Uniform int32 in 0..65535."""
        return self.words(*shape).int().add_(32768)

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        """Uniform float32 between ``low`` and ``high``."""
        return self.words(*shape).float().add_(32768.5).mul_((high - low) / 65536).add_(low)

    def normal(self, mean: float, deviation: float, *shape: int) -> Tensor:
        """Normal float32."""
        bits = self.bits(*shape)
        return (_normal_quantiles() * deviation + mean).index_select(0, bits.flatten()).view_as(bits)


@lru_cache
def _normal_quantiles() -> Tensor:
    middles = (torch.arange(65536, dtype=torch.float64) + 0.5) / 65536
    quantiles: Tensor = torch.special.ndtri(middles).float()
    return quantiles
