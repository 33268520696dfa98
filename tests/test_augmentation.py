"""Copies made in a batch, against Pillow and plain loops, image by image, with the same draws."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch import nn

from eata import augmentation
from eata.augmentation import Copies, augmix, crop_and_flip, draw_augmix, resized_crop_and_flip, rotate

NAMES = [
    "autocontrast",
    "equalize",
    "solarize",
    "posterize",
    "rotate",
    "shear_x",
    "shear_y",
    "translate_x",
    "translate_y",
]


def photos(count: int, height: int, width: int) -> np.ndarray:
    """Smooth uint8 pictures (count, H, W, 3) with a few hard edges and some noise."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:height, :width] / 8
    waves = [np.sin(a * x + b * y + c)[..., None] * d for a, b, c, d in rng.normal(size=(count, 4))]
    pictures = 110 + 60 * np.stack(waves) * rng.uniform(0.4, 1, (count, 1, 1, 3)) + rng.normal(size=(count, 1, 1, 3))
    pictures[:, : height // 3, : width // 4] += 40
    return (pictures + rng.normal(0, 2, pictures.shape)).clip(0, 255).astype(np.uint8)


def tensor(pictures: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 255


def pil_operation(picture: Image.Image, name: str, level: float, negative: bool) -> Image.Image:
    """AugMix's operation at severity 1, as its authors' program does it with Pillow."""
    sign = -1 if negative else 1
    grey, smooth = (128, 128, 128), Image.Resampling.BILINEAR
    if name == "autocontrast":
        return ImageOps.autocontrast(picture)
    if name == "equalize":
        return ImageOps.equalize(picture)
    if name == "solarize":
        return ImageOps.solarize(picture, 256 - int(level * 256 / 10))
    if name == "posterize":
        return ImageOps.posterize(picture, 4 - int(level * 4 / 10))
    if name == "rotate":
        return picture.rotate(sign * int(level * 30 / 10), resample=smooth, fillcolor=grey)
    shear, across, down = sign * level * 0.3 / 10, 0, 0
    if name == "shear_x":
        matrix = (1, shear, 0, 0, 1, 0)
    elif name == "shear_y":
        matrix = (1, 0, 0, shear, 1, 0)
    else:
        across = sign * int(level * picture.width / 3 / 10) if name == "translate_x" else 0
        down = sign * int(level * picture.height / 3 / 10) if name == "translate_y" else 0
        matrix = (1, 0, across, 0, 1, down)
    return picture.transform(picture.size, Image.Transform.AFFINE, matrix, resample=smooth, fillcolor=grey)


@pytest.mark.parametrize("size", [(32, 32), (64, 96)])
@pytest.mark.parametrize("name", NAMES)
def test_each_operation_is_pillows(name, size):
    pictures = photos(6, *size)
    level = torch.tensor([0.1, 0.37, 0.5, 0.71, 0.999, 0.95])
    negative = torch.tensor([False, True, False, True, False, True])
    ours = augmentation._operate(tensor(pictures), torch.full((6,), NAMES.index(name)), level, negative)
    ours = (ours.permute(0, 2, 3, 1) * 255).numpy()
    assert np.array_equal(ours, ours.round())  # 8-bit levels
    for i in range(6):
        expected = pil_operation(Image.fromarray(pictures[i]), name, float(level[i]), bool(negative[i]))
        difference = np.abs(ours[i] - np.asarray(expected, dtype=float))[4:-4, 4:-4]  # Pillow's edges are hard
        assert difference.max() <= (1.01 if name in NAMES[:1] + NAMES[4:] else 0), (i, difference.max())
        assert name == "posterize" or name == "solarize" or i < 4 or not np.array_equal(ours[i], pictures[i])


def test_augmix_mixes_chains_like_a_loop_over_pillow_images():
    pictures = photos(24, 32, 32)
    images = tensor(pictures)
    draws = draw_augmix(24, torch.Generator().manual_seed(3))
    # Our edges are not Pillow's, and equalize would carry that inwards: what moves pixels comes last in its chain.
    early = draws.operation[:, :, :2]
    early[(early >= 4) & (early < 9)] %= 4
    ours = augmix(images, draws)
    used = set()
    for i in range(24):
        mixed = torch.zeros(3, 32, 32)
        for chain in range(3):
            picture = Image.fromarray(pictures[i])
            for step in range(3):
                operation = int(draws.operation[i, chain, step])
                if operation < len(NAMES):
                    used.add(operation)
                    level, negative = float(draws.level[i, chain, step]), bool(draws.negative[i, chain, step])
                    picture = pil_operation(picture, NAMES[operation], level, negative)
            mixed += draws.weight[i, chain] * tensor(np.array(picture)[None])[0]
        expected = draws.original[i] * images[i] + (1 - draws.original[i]) * mixed
        difference = (ours[i] - expected).abs()[:, 4:-4, 4:-4]
        assert difference.mean() < 0.5 / 255
        assert difference.max() < 17 / 255  # a level off before posterize
    assert used == set(range(9))


def test_draws_follow_augmix():
    draws = draw_augmix(4000, torch.Generator().manual_seed(0))
    depth = (draws.operation != augmentation.NOTHING).sum(2)
    assert set(depth.unique().tolist()) == {1, 2, 3}
    counts = torch.bincount(draws.operation[draws.operation < 9].flatten(), minlength=9).float()
    assert ((counts / counts.sum() - 1 / 9).abs() < 0.01).all()
    torch.testing.assert_close(draws.weight.sum(1), torch.ones(4000))
    assert abs(float(draws.weight[:, 0].mean()) - 1 / 3) < 0.02
    assert abs(float(draws.weight[:, 0].var()) - 1 / 18) < 0.01  # Dirichlet(1, 1, 1)
    assert abs(float(draws.original.mean()) - 0.5) < 0.02
    assert 0.1 <= float(draws.level.min()) < 0.12 < 0.98 < float(draws.level.max()) <= 1


@pytest.mark.parametrize("flip", [True, False])
def test_crops_are_one_of_all_crops_and_mirror_images(flip):
    image = torch.randn(3, 6, 8)
    padded = torch.full((3, 10, 12), 7.0)
    padded[:, 2:8, 2:10] = image
    possible = [padded[:, t : t + 6, s : s + 8] for t in range(5) for s in range(5)]
    if flip:
        possible += [crop.flip(2) for crop in possible]
    seen = set()
    for copy in crop_and_flip(image.expand(400, 3, 6, 8), torch.Generator().manual_seed(1), 2, flip, 7.0):
        seen.add(next(i for i, crop in enumerate(possible) if torch.equal(crop, copy)))
    assert len(seen) >= 0.95 * len(possible)


def test_resized_crops_are_parts_of_the_image():
    # An image whose two channels are its own coordinates: each copy says where it came from.
    height, width = 90, 120
    y, x = torch.meshgrid((torch.arange(height) + 0.5) / height, (torch.arange(width) + 0.5) / width, indexing="ij")
    copies = resized_crop_and_flip(torch.stack([x, y]).expand(300, 2, height, width), torch.Generator(), flip=True)
    inner = copies[:, :, 5:-5, 5:-5]  # the border repeats
    across = (inner[:, 0, 0, -1] - inner[:, 0, 0, 0]) / (width - 11) * width
    down = (inner[:, 1, -1, 0] - inner[:, 1, 0, 0]) / (height - 11) * height
    assert 0.4 < float((across < 0).float().mean()) < 0.6
    area = across.abs() * down
    assert float(area.min()) >= 0.08 - 1e-3
    assert float(area.max()) > 0.9
    ratio = across.abs() / down
    assert float(ratio.min()) >= 3 / 4 - 1e-3
    assert float(ratio.max()) <= 4 / 3 + 1e-3
    assert 0 <= float(copies.min()) <= float(copies.max()) <= 1


def test_rotate_turns_each_image_by_its_own():
    images = torch.randn(5, 3, 4, 4)
    turns = torch.tensor([0, 1, 2, 3, 1])
    for image, turn, turned in zip(images, turns.tolist(), rotate(images, turns), strict=True):
        for _ in range(turn):
            image = torch.stack([image[:, :, 3 - row] for row in range(4)], 1)  # the last column becomes the first row
        assert torch.equal(image, turned)


def test_copies_are_normalized_black_outside_and_repeatable():
    net = nn.Identity()
    net.pretrained_cfg = {"mean": (0.4, 0.5, 0.6), "std": (0.2, 0.25, 0.3)}
    copies = Copies(net, 64, True, 5)
    image = torch.zeros(3, 32, 32)  # the mean colour
    crops = copies.crops(image)
    black = torch.tensor([-2.0, -2.0, -2.0])
    corners = crops[:, :, 0, 0]
    assert {tuple(corner.round(decimals=4).tolist()) for corner in corners} == {(0.0, 0.0, 0.0), tuple(black.tolist())}
    first = copies.augmix(image)
    assert first.shape == (64, 3, 32, 32)
    assert float(first.min()) >= -2.01
    copies.reset()
    assert torch.equal(copies.crops(image), crops)
    assert torch.equal(copies.augmix(image), first)


def test_large_images_are_cropped_and_scaled_small_ones_padded():
    copies = Copies(_configured(), 32, False, 0)
    assert (copies.crops(torch.zeros(3, 32, 32)) != 0).any()  # black borders
    assert (copies.crops(torch.zeros(3, 96, 96)) == 0).all()  # none
    assert copies.crops(torch.zeros(3, 4, 4)).shape == (32, 3, 4, 4)  # never too small


def test_one_grey_level_survives_autocontrast_and_equalize():
    images = torch.full((2, 3, 8, 8), 100 / 255)
    for operation in (augmentation.AUTOCONTRAST, augmentation.EQUALIZE):
        same = augmentation._operate(images, torch.full((2,), operation), torch.ones(2), torch.zeros(2).bool())
        torch.testing.assert_close(same, images)


def test_an_unknown_normalization_is_said():
    with pytest.warns(UserWarning, match="pretrained_cfg"):
        copies = Copies(nn.Identity(), 1, True, 0)
    assert math.isclose(float(copies.mean), 0.5)


def test_kornia_is_not_imported_with_eata():
    code = "import sys, eata; sys.exit('kornia' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def _configured() -> nn.Module:
    net = nn.Identity()
    net.pretrained_cfg = {"mean": (0.5,) * 3, "std": (0.5,) * 3}
    return net
