"""Ice for ``frost``: computed crystals, or the six photographs of the original for those who have them."""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from eata.errors import EataError

try:
    from PIL import Image, ImageDraw
except ModuleNotFoundError:
    raise EataError("frost needs Pillow: pip install 'eata[bench]'.") from None

_PHOTOS = ("frost1.png", "frost2.png", "frost3.png", "frost4.jpg", "frost5.jpg", "frost6.jpg")
_SIDE = 600
_Array = NDArray[np.float64]

# Mean and deviation of the grey levels, and what red and blue differ from green: near those of the six photographs, so
# that computed ice hides about as much of an image as theirs does.
_LOOKS = (
    (131, 21, -72, 17),
    (207, 21, -5, 9),
    (195, 24, -6, 10),
    (152, 28, -15, 12),
    (123, 42, -11, 11),
    (90, 39, -24, 9),
)


@lru_cache(maxsize=4)
def textures(photos: Path | None, scale: float, height: int, width: int) -> list[Tensor]:
    """The six pieces of ice as uint8 (3, H, W), scaled, and larger where an image of this size needs more."""
    pieces = _computed() if photos is None else [_photo(Path(photos) / name) for name in _PHOTOS]
    return [_scaled(piece, max(scale, height / piece.shape[1], width / piece.shape[2])) for piece in pieces]


def _photo(path: Path) -> Tensor:
    try:
        with Image.open(path) as image:
            return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
    except OSError as problem:
        wanted = ", ".join(_PHOTOS)
        raise EataError(f"{path} cannot be read as an image; the frost folder needs {wanted}.") from problem


def _scaled(piece: Tensor, scale: float) -> Tensor:
    if scale == 1:
        return piece
    size = [math.ceil(side * scale) for side in piece.shape[1:]]
    return F.interpolate(piece[None].float(), size=size, mode="bilinear")[0].to(torch.uint8)


@lru_cache(maxsize=1)
def _computed() -> list[Tensor]:
    """One pane of crystals, turned and lit in six ways: drawing it is the slow part."""
    rng = np.random.default_rng(0)
    pane = Image.new("L", (_SIDE, _SIDE), 60)
    for _ in range(45):
        angle, length = rng.uniform(0, 2 * math.pi), rng.uniform(60, 260)
        _feather(ImageDraw.Draw(pane), rng, rng.uniform(0, _SIDE, 2), angle, length)
    ice = np.asarray(pane, dtype=np.float64)
    turned = [np.rot90(side, k) for side in (ice, ice[:, ::-1]) for k in range(3)]
    return [_lit(rng, piece, *look) for piece, look in zip(turned, _LOOKS, strict=True)]


def _feather(
    draw: ImageDraw.ImageDraw,
    rng: np.random.Generator,
    point: _Array,
    angle: float,
    length: float,
    stem: bool = True,
) -> None:
    """A curved stem with branches at 60 degrees, as ice has them, and twigs on those at 60 degrees again."""
    pace, bend = 6.0, rng.normal(0, 0.02)
    for travelled in np.arange(0, length, pace):
        end = point + pace * np.array([math.cos(angle), math.sin(angle)])
        light = int(rng.uniform(90, 255))
        draw.line((*point, *end), fill=light, width=3 if stem else 2)
        for side in (angle - math.pi / 3, angle + math.pi / 3):
            reach = (length - travelled) * rng.uniform(0.2, 0.45)
            if stem:
                _feather(draw, rng, end, side, reach, stem=False)
            else:
                draw.line((*end, end[0] + reach * math.cos(side), end[1] + reach * math.sin(side)), fill=light)
        point, angle = end, angle + bend


def _lit(rng: np.random.Generator, ice: _Array, mean: float, deviation: float, red: float, blue: float) -> Tensor:
    """The crystals on a cloudy pane, lit from one corner, in the wanted tones: uint8 (3, H, W)."""
    relief = ice - np.roll(ice, (2, 2), (0, 1))
    grey = ice + 0.5 * relief + 60 * _cloud(rng) + 12 * rng.standard_normal(ice.shape)
    grey = mean + deviation * (grey - grey.mean()) / grey.std()
    channels = np.stack((grey + red, grey, grey + blue))
    return torch.from_numpy(channels.clip(0, 255).astype(np.uint8))


def _cloud(rng: np.random.Generator) -> _Array:
    """Smooth noise: random grids of 3 to 48 points a side, enlarged and added, the finer the fainter."""
    total = np.zeros((_SIDE, _SIDE))
    for points in (3, 6, 12, 24, 48):
        grid = Image.fromarray(rng.standard_normal((points, points)).astype(np.float32))
        total += np.asarray(grid.resize((_SIDE, _SIDE), Image.Resampling.BICUBIC)) * (3 / points) ** 0.5
    return np.asarray(total / total.std())
