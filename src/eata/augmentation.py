"""Random copies of images, made on tensors in a batch: crops and mirror images, quarter turns, AugMix.

The random numbers come from a generator that the caller owns, so one seed gives one result on every device.
"""

from __future__ import annotations

import dataclasses
import math
import warnings

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eata.extras import need

# Images whose shorter side is at most this are cropped after padding, as CIFAR-10's are in training; larger ones get a
# random part scaled up, as ImageNet's do. 84 is just below sqrt(32 * 224).
SMALL = 84

CHAINS = 3  # AugMix: chains of operations that are mixed
DEPTH = 3  # and the most operations in one
GREY = 128 / 255  # what a shift or rotation leaves empty

AUTOCONTRAST, EQUALIZE, SOLARIZE, POSTERIZE, ROTATE, SHEAR_X, SHEAR_Y, TRANSLATE_X, TRANSLATE_Y = range(9)
NOTHING = 9


def crop_and_flip(
    images: Tensor, generator: torch.Generator, padding: int, flip: bool, fill: Tensor | float = 0
) -> Tensor:
    """Random crop after padding and (where it keeps the meaning) random mirror image, one draw per image.

    Args:
        images: (B, C, H, W).
        generator: on the CPU.
        padding: pixels on each side.
        flip: mirror half of the images.
        fill: value of the padding, a number or (C, 1, 1).

    >>> crop_and_flip(torch.ones(2, 3, 8, 8), torch.Generator(), padding=1, flip=True).shape
    torch.Size([2, 3, 8, 8])
    """
    count, channels, height, width = images.shape
    padded = images.new_empty(count, channels, height + 2 * padding, width + 2 * padding)
    padded[:] = fill
    padded[:, :, padding : padding + height, padding : padding + width] = images
    top, left = torch.randint(0, 2 * padding + 1, (2, count, 1, 1), generator=generator)
    columns = torch.arange(width).expand(count, 1, width)
    if flip:
        mirrored = torch.rand(count, 1, 1, generator=generator) < 0.5
        columns = torch.where(mirrored, width - 1 - columns, columns)
    rows = torch.arange(height).view(1, height, 1) + top
    return padded.permute(0, 2, 3, 1)[torch.arange(count).view(-1, 1, 1), rows, columns + left].permute(0, 3, 1, 2)


def resized_crop_and_flip(images: Tensor, generator: torch.Generator, flip: bool) -> Tensor:
    """A random part of each image, 8 to 100 % of its area and 3:4 to 4:3, scaled to the whole size; mirrored by chance.

    >>> resized_crop_and_flip(torch.ones(2, 3, 8, 8), torch.Generator(), flip=True).shape
    torch.Size([2, 3, 8, 8])
    """
    area, shape, across, down, side = torch.rand(5, len(images), generator=generator)
    area = 0.08 + 0.92 * area
    ratio = torch.exp((2 * shape - 1) * math.log(4 / 3))
    width = (area * ratio).sqrt().clamp(max=1)
    height = (area / ratio).sqrt().clamp(max=1)
    sign = torch.where(side < 0.5, -1.0, 1.0) if flip else torch.ones(len(images))
    zero = torch.zeros(len(images))
    # From the output's coordinates to the input's, both from -1 to 1.
    matrix = torch.stack(
        [sign * width, zero, (1 - width) * (2 * across - 1), zero, height, (1 - height) * (2 * down - 1)], 1
    )
    grid = F.affine_grid(matrix.view(-1, 2, 3).to(images), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False)


def rotate(images: Tensor, quarter_turns: Tensor) -> Tensor:
    """Each image turned counter-clockwise by its own number of quarter turns (0 to 3)."""
    turned = torch.stack([torch.rot90(images, turns, (2, 3)) for turns in range(4)])
    return turned[quarter_turns, torch.arange(len(images), device=images.device)]


@dataclasses.dataclass
class AugMixDraws:
    """The random choices of AugMix for n images.

    Attributes:
        operation: (n, CHAINS, DEPTH), which operation, NOTHING behind the end of a chain.
        level: (n, CHAINS, DEPTH), how strong, 0.1 to 1.
        negative: (n, CHAINS, DEPTH), whether a rotation, shear or shift goes the other way.
        weight: (n, CHAINS), the chains' shares; they sum to 1.
        original: (n,), the untouched image's share in the end, 0 to 1.
    """

    operation: Tensor
    level: Tensor
    negative: Tensor
    weight: Tensor
    original: Tensor


def draw_augmix(count: int, generator: torch.Generator) -> AugMixDraws:
    """Draw for ``count`` images as MEMO does: severity 1, Dirichlet(1) over the chains, Beta(1, 1) for the original."""
    shape = (count, CHAINS, DEPTH)
    operation = torch.randint(0, NOTHING, shape, generator=generator)
    depth = torch.randint(1, DEPTH + 1, (count, CHAINS, 1), generator=generator)
    operation[torch.arange(DEPTH) >= depth] = NOTHING
    level, sign = torch.rand(2, *shape, generator=generator)
    # Exponentials over their sum are Dirichlet(1); 1 - u keeps the logarithm finite.
    exponentials = -torch.log1p(-torch.rand(count, CHAINS, generator=generator)) + 1e-12
    return AugMixDraws(
        operation,
        0.1 + 0.9 * level,
        sign < 0.5,
        exponentials / exponentials.sum(1, keepdim=True),
        torch.rand(count, generator=generator),
    )


def augmix(images: Tensor, draws: AugMixDraws) -> Tensor:
    """AugMix (Hendrycks et al. 2020) of pixels from 0 to 1, all images at once; the operations work on 8-bit levels.

    Args:
        images: (n, C, H, W), values 0 to 1.
        draws: of ``draw_augmix(n, generator)``.

    >>> images = torch.rand(4, 3, 8, 8)
    >>> augmix(images, draw_augmix(4, torch.Generator())).shape
    torch.Size([4, 3, 8, 8])
    """
    count = len(images)
    chains = _levels(images).repeat_interleave(CHAINS, 0)
    for step in range(DEPTH):
        chains = _operate(
            chains,
            draws.operation[:, :, step].flatten(),
            draws.level[:, :, step].flatten(),
            draws.negative[:, :, step].flatten(),
        )
    weight = draws.weight.to(images).view(count, CHAINS, 1, 1, 1)
    mixed = (weight * chains.view(count, CHAINS, *images.shape[1:])).sum(1)
    return torch.lerp(mixed, images, draws.original.to(images).view(-1, 1, 1, 1))


def _levels(images: Tensor) -> Tensor:
    """The nearest of 256 levels from 0 to 1."""
    return images.clamp(0, 1).mul(255).round_().div_(255)


def _operate(images: Tensor, operation: Tensor, level: Tensor, negative: Tensor) -> Tensor:
    """One operation on each image; those of a kind go together."""
    enhance = need("kornia.enhance", "AugMix (eata.MEMO, eata.Augment)", "bench")  # here, for kornia is slow to import
    result = images.clone()

    def where(*kinds: int) -> Tensor:
        return torch.isin(operation, torch.tensor(kinds)).nonzero().squeeze(1)

    if len(rows := where(AUTOCONTRAST)):
        result[rows] = _autocontrast(images[rows])
    if len(rows := where(EQUALIZE)):
        result[rows] = enhance.equalize(images[rows])
    if len(rows := where(SOLARIZE)):
        lowest_inverted = 256 - (25.6 * level[rows]).floor()
        result[rows] = enhance.solarize(images[rows], ((lowest_inverted - 0.5) / 255).to(images))
    if len(rows := where(POSTERIZE)):
        bits = 4 - (0.4 * level[rows]).floor()
        result[rows] = enhance.posterize(images[rows], bits.int().to(images.device))
    if len(rows := where(ROTATE, SHEAR_X, SHEAR_Y, TRANSLATE_X, TRANSLATE_Y)):
        matrix = _matrices(operation[rows], level[rows], negative[rows], images.shape[2], images.shape[3])
        result[rows] = _warp(images[rows], matrix)
    return result


def _autocontrast(images: Tensor) -> Tensor:
    """Each channel stretched to the full range; one of a single value stays."""
    low = images.amin((2, 3), keepdim=True)
    span = images.amax((2, 3), keepdim=True) - low
    stretched = ((images - low) / span.clamp(min=1 / 255) * 255 + 1e-3).floor_().div_(255)
    return torch.where(span > 0, stretched, images)


def _matrices(operation: Tensor, level: Tensor, negative: Tensor, height: int, width: int) -> Tensor:
    """Matrices (n, 2, 3) from the output's coordinates to the input's, both from -1 to 1, as affine_grid takes them."""
    sign = torch.where(negative, -1.0, 1.0)
    angle = torch.where(operation == ROTATE, -sign * (3 * level).floor() * math.pi / 180, 0.0)
    shear_x = torch.where(operation == SHEAR_X, sign * 0.03 * level, 0.0)
    shear_y = torch.where(operation == SHEAR_Y, sign * 0.03 * level, 0.0)
    shift_x = torch.where(operation == TRANSLATE_X, sign * (level * width / 30).floor(), 0.0)
    shift_y = torch.where(operation == TRANSLATE_Y, sign * (level * height / 30).floor(), 0.0)
    tall, wide = height / width, width / height
    return torch.stack(
        [
            *(angle.cos(), tall * (angle.sin() + shear_x), tall * shear_x + 2 * shift_x / width),
            *(wide * (shear_y - angle.sin()), angle.cos(), wide * shear_y + 2 * shift_y / height),
        ],
        1,
    ).view(-1, 2, 3)


def _warp(images: Tensor, matrix: Tensor) -> Tensor:
    grid = F.affine_grid(matrix.to(images), list(images.shape), align_corners=False)
    return _levels(F.grid_sample(images - GREY, grid, align_corners=False) + GREY)


def normalization(net: nn.Module) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation that the net's input was normalized with, (C, 1, 1) each, from ``pretrained_cfg``."""
    config = getattr(net, "pretrained_cfg", None) or {}
    if "mean" not in config or "std" not in config:
        warnings.warn(
            "The net does not say how its input is normalized, so mean 0.5 and deviation 0.5 are taken; set "
            "net.pretrained_cfg = {'mean': (...), 'std': (...)}.",
            UserWarning,
            stacklevel=5,
        )
        config = {"mean": (0.5,), "std": (0.5,)}
    mean, std = (torch.tensor(config[key], dtype=torch.float32).view(-1, 1, 1) for key in ("mean", "std"))
    return mean, std


class Copies:
    """Random copies of one image at a time, normalized as the net wants them.

    Args:
        net: its ``pretrained_cfg`` says how its input is normalized.
        count: copies of each image.
        flip: mirror half of the copies; not for digits or text.
        seed: of the private generator.
    """

    def __init__(self, net: nn.Module, count: int, flip: bool, seed: int) -> None:
        self.count = count
        self.flip = flip
        self.seed = seed
        self.mean, self.std = normalization(net)
        self.generator = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def crops(self, image: Tensor) -> Tensor:
        """Random crops and mirror images (count, C, H, W) of a normalized image (C, H, W), each of its size.

        Up to 84 pixels: a black border of an eighth of the shorter side is added, and cut away elsewhere. So no image
        is too small. Larger images: a random part of the image, scaled up.
        """
        images = image.expand(self.count, *image.shape)
        shorter = min(image.shape[1:])
        if shorter > SMALL:
            return resized_crop_and_flip(images, self.generator, self.flip)
        black = (-self.mean / self.std).to(image)
        return crop_and_flip(images, self.generator, shorter // 8, self.flip, black)

    @torch.no_grad()
    def augmix(self, image: Tensor) -> Tensor:
        """AugMix of random crops and mirror images, (count, C, H, W), of a normalized image (C, H, W)."""
        mean, std = self.mean.to(image), self.std.to(image)
        pixels = self.crops(image) * std + mean
        return (augmix(pixels, draw_augmix(self.count, self.generator)) - mean) / std

    def quarter_turns(self) -> Tensor:
        """A random number of quarter turns for each copy, (count,)."""
        return torch.randint(0, 4, (self.count,), generator=self.generator)

    def reset(self) -> None:
        """Start the random numbers again."""
        self.generator.manual_seed(self.seed)
