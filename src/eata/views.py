"""Random views of images, as the teachers of test-time adaptation use them: other colours, a small shift, a mirror.

CoTTA brought them (Wang et al., CVPR 2022); RoTTA and ROID use them too, ROID without blur and noise. The authors'
programs draw once a batch, here each image is drawn for.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eata.augmentation import normalization

# brightness, contrast, saturation, gamma, hue (turns), angle (degrees), shifts (of the side), scale, blur (pixels)
LOW = (0.6, 0.7, 0.5, 0.7, -0.06, -15.0, -1 / 16, -1 / 16, 0.9, 0.001)
HIGH = (1.4, 1.3, 1.5, 1.3, 0.06, 15.0, 1 / 16, 1 / 16, 1.1, 0.5)
NOISE = 0.005  # standard deviation
GREY = (0.299, 0.587, 0.114)
# From red, green, blue to lightness and two axes of colour (YIQ), about which hues turn.
YIQ = ((0.299, 0.587, 0.114), (0.596, -0.274, -0.322), (0.211, -0.523, 0.312))


class Views:
    """Random views of batches of images, normalized as the net wants them.

    Args:
        net: its ``pretrained_cfg`` says how its input is normalized.
        flip: mirror half of the views; not for digits or text.
        soften: blur them, and add noise.
        seed: of the private generator.

    >>> net = nn.Identity()
    >>> net.pretrained_cfg = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
    >>> Views(net, flip=True, soften=True, seed=0)(torch.zeros(2, 3, 8, 8)).shape
    torch.Size([2, 3, 8, 8])
    """

    def __init__(self, net: nn.Module, flip: bool, soften: bool, seed: int) -> None:
        self.mean, self.std = normalization(net)
        self.flip, self.soften, self.seed = flip, soften, seed
        self.generator = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """One view of each of the normalized images (B, C, H, W)."""
        mean, std = self.mean.to(images), self.std.to(images)
        numbers = torch.rand(len(images), len(LOW) + 1, generator=self.generator).to(images)
        low, high = images.new_tensor(LOW), images.new_tensor(HIGH)
        drawn = (low + (high - low) * numbers[:, :-1]).T[..., None, None, None]  # a column for each, (B, 1, 1, 1)
        brightness, contrast, saturation, gamma, hue, angle, across, down, scale, blur = drawn
        pixels = (images * std + mean).clamp(0, 1)
        pixels = _colours(pixels, brightness, contrast, saturation, gamma, hue)
        mirrored = self.flip & (numbers[:, -1] < 0.5)
        pixels = _moved(pixels, angle.flatten(), across.flatten(), down.flatten(), scale.flatten(), mirrored)
        if self.soften:
            noise = torch.randn(images.shape, generator=self.generator).to(images)
            pixels = _blurred(pixels, blur) + NOISE * noise
        return (pixels.clamp(0, 1) - mean) / std


def _colours(
    pixels: Tensor, brightness: Tensor, contrast: Tensor, saturation: Tensor, gamma: Tensor, hue: Tensor
) -> Tensor:
    """Brightness, contrast about the mean grey, saturation, hue and gamma, each within 0 to 1."""
    pixels = (pixels * brightness).clamp(0, 1)
    mean = _grey(pixels).mean((1, 2, 3), keepdim=True)
    pixels = (mean + contrast * (pixels - mean)).clamp(0, 1)
    if pixels.shape[1] == 3:
        grey = _grey(pixels)
        pixels = (grey + saturation * (pixels - grey)).clamp(0, 1)
        pixels = torch.einsum("bij,bjhw->bihw", _turns(hue.flatten()), pixels).clamp(0, 1)
    return (pixels + 1e-8) ** gamma  # 0 has no gradient, and need not be exact


def _grey(pixels: Tensor) -> Tensor:
    if pixels.shape[1] != 3:
        return pixels.mean(1, keepdim=True)
    return (pixels.new_tensor(GREY).view(3, 1, 1) * pixels).sum(1, keepdim=True)


def _turns(hue: Tensor) -> Tensor:
    """Matrices (B, 3, 3) that turn colours about the axis of greys."""
    turn = torch.eye(3).to(hue).repeat(len(hue), 1, 1)
    turn[:, 1, 1] = turn[:, 2, 2] = (2 * math.pi * hue).cos()
    turn[:, 1, 2], turn[:, 2, 1] = -(2 * math.pi * hue).sin(), (2 * math.pi * hue).sin()
    to = torch.tensor(YIQ, dtype=torch.float64)
    matrices: Tensor = torch.linalg.inv(to).to(hue) @ turn @ to.to(hue)
    return matrices


def _moved(pixels: Tensor, angle: Tensor, across: Tensor, down: Tensor, scale: Tensor, mirrored: Tensor) -> Tensor:
    """Turned about the middle, scaled, shifted and mirrored; beyond the edge its own colour goes on."""
    height, width = pixels.shape[2:]
    side = torch.where(mirrored, -1.0, 1.0).to(scale)
    cos, sin = (angle * math.pi / 180).cos() / scale, (angle * math.pi / 180).sin() / scale
    # From the output's coordinates to the input's, both from -1 to 1.
    rows = [side * cos, sin * height / width, 2 * across, -side * sin * width / height, cos, 2 * down]
    grid = F.affine_grid(torch.stack(rows, 1).view(-1, 2, 3), list(pixels.shape), align_corners=False)
    return F.grid_sample(pixels, grid, padding_mode="border", align_corners=False)


def _blurred(pixels: Tensor, sigma: Tensor) -> Tensor:
    """By a Gaussian of five pixels, across and then down."""
    near = torch.arange(-2, 3).to(pixels)
    weight = torch.softmax(-(near**2) / (2 * sigma.view(-1, 1) ** 2), 1).view(-1, 5, 1, 1, 1)
    for dim in (3, 2):
        sides = (2, 2, 0, 0) if dim == 3 else (0, 0, 2, 2)
        padded = F.pad(pixels, sides, mode="replicate")
        length = pixels.shape[dim]
        pixels = sum((weight[:, i] * padded.narrow(dim, i, length) for i in range(5)), torch.zeros_like(pixels))
    return pixels


def shuffled_patches(images: Tensor, patches: int, draws: Tensor) -> Tensor:
    """Each image cut into ``patches`` x ``patches`` pieces that change places, in the order of its draws.

    Images whose sides do not divide are resized for that, and back.

    Args:
        images: (B, C, H, W).
        patches: in a row and in a column.
        draws: random numbers, one for each piece, (B, patches^2).

    >>> mixed = shuffled_patches(torch.arange(16.0).view(1, 1, 4, 4), 2, torch.tensor([[0.5, 0.1, 0.9, 0.3]]))
    >>> mixed.shape, sorted(mixed.flatten().tolist()) == list(range(16))
    (torch.Size([1, 1, 4, 4]), True)
    """
    if not len(images):
        return images
    count, channels, height, width = images.shape
    tall, wide = max(1, height // patches), max(1, width // patches)
    fitting = _resized(images, tall * patches, wide * patches)
    pieces = fitting.reshape(count, channels, patches, tall, patches, wide).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
    order = draws.argsort(1).to(images.device)
    pieces = pieces[torch.arange(count, device=images.device)[:, None], order]
    mixed = pieces.view(count, patches, patches, channels, tall, wide).permute(0, 3, 1, 4, 2, 5)
    return _resized(mixed.reshape(fitting.shape), height, width)


def _resized(images: Tensor, height: int, width: int) -> Tensor:
    if images.shape[2:] == (height, width):
        return images
    return F.interpolate(images, (height, width), mode="bilinear", antialias=True, align_corners=False)
