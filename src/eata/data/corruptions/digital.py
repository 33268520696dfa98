"""The digital corruptions."""

from __future__ import annotations

from io import BytesIO

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from eata.data.corruptions.draws import Draws
from eata.data.corruptions.filters import gaussian_blur, to_pixels
from eata.extras import need


def contrast(images: Tensor, factor: float, draws: Draws) -> Tensor:
    """Each channel pulled towards its mean."""
    height, width = images.shape[2:]
    mean = images.sum((2, 3), keepdim=True) / (height * width)  # a sum of integers has no order to depend on
    return to_pixels(images.float().mul_(factor).add_(mean, alpha=1 - factor))


def elastic_transform(images: Tensor, c: tuple[float, float, float], draws: Draws) -> Tensor:
    """Rubber: a random affine shift, then a smooth random bending; fractions of the shorter side."""
    height, width = images.shape[-2:]
    amplitude, sigma, affine = (fraction * min(height, width) for fraction in c)
    values = images.float().contiguous(memory_format=torch.channels_last)
    y, x = torch.meshgrid(torch.arange(height).float(), torch.arange(width).float(), indexing="ij")
    if affine:
        source = _affine(draws.uniform(-affine, affine, 3, 2), height, width)
        across, down = torch.einsum("bij,jhw->ibhw", source, torch.stack((x, y, torch.ones_like(x))))
        grid = torch.stack((across * 2 / (width - 1) - 1, down * 2 / (height - 1) - 1), dim=-1)
        values = F.grid_sample(values, grid, padding_mode="reflection", align_corners=True)
    if amplitude:
        bend = gaussian_blur(draws.uniform(-amplitude, amplitude, 2, height, width), sigma, truncate=3, mirror=True)
        across, down = bend[:, 0].add_(x), bend[:, 1].add_(y)
        grid = torch.stack(((across * 2 + 1) / width - 1, (down * 2 + 1) / height - 1), dim=-1)
        values = F.grid_sample(values, grid, padding_mode="reflection", align_corners=False)
    return to_pixels(values).contiguous()


def _affine(shifts: Tensor, height: int, width: int) -> Tensor:
    """The map (B, 2, 3) from the new image back to the old one when three points of its middle move by ``shifts``."""
    centre = torch.tensor([width // 2, height // 2])
    arm = min(height, width) // 3
    old = (centre + arm * torch.tensor([[1, 1], [1, -1], [-1, -1]])).float()
    new = torch.cat((old + shifts, torch.ones(len(shifts), 3, 1)), dim=2)
    back: Tensor = torch.linalg.solve(new, old.expand(len(shifts), -1, -1))
    return back.mT


def pixelate(images: Tensor, ratio: float, draws: Draws) -> Tensor:
    """Scaled down by the mean of boxes, and up again by repetition."""
    values = images.float()
    for _ in range(2):  # rows; then columns, turned to rows because whole rows are copied much faster
        values = _box_means(values, ratio).mT.contiguous()
    small = values.add_(0.5).to(torch.uint8)
    for size in images.shape[2:]:
        nearest = (2 * torch.arange(size) + 1) * small.shape[2] // (2 * size)
        small = small.index_select(2, nearest).mT.contiguous()
    return small


def _box_means(values: Tensor, ratio: float) -> Tensor:
    """The mean over each box of rows."""
    starts, counts = _boxes(values.shape[2], ratio)
    total = values.index_select(2, starts)
    for k in range(1, int(counts.max())):
        # A box that has ended takes its last row again, with weight 0.
        more = values.index_select(2, starts + counts.clamp_max(k + 1) - 1)
        total.addcmul_(more, (counts > k).float()[:, None])
    return total.div_(counts[:, None])


def _boxes(size: int, ratio: float) -> tuple[Tensor, Tensor]:
    """First pixel and number of pixels of each box along one side; as in Pillow, every pixel is in exactly one."""
    boxes = max(1, int(size * ratio))
    edges = (2 * torch.arange(boxes + 1) * size + boxes) // (2 * boxes)
    return edges[:-1], edges.diff()


def jpeg_compression(images: Tensor, quality: int, draws: Draws) -> Tensor:
    """Saved as a JPEG file of low quality, and read again."""
    image = need("PIL.Image", "jpeg_compression", "bench")
    pixels = images.permute(0, 2, 3, 1).contiguous().numpy()
    decoded = np.empty_like(pixels)
    for original, read in zip(pixels, decoded, strict=True):
        file = BytesIO()
        image.fromarray(original).save(file, "JPEG", quality=quality)
        read[:] = image.open(file, formats=("JPEG",))
    return torch.from_numpy(decoded).permute(0, 3, 1, 2).contiguous()
