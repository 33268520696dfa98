from __future__ import annotations

import colorsys
import json
import math
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from data.reference.inputs import photographs
from eata.data.corruptions import CORRUPTIONS, SEVERITIES, blur, corrupt, digital, filters, ice, noise, weather
from eata.data.corruptions.constants import CIFAR, IMAGENET
from eata.data.corruptions.draws import Draws

REFERENCE = json.loads(Path(__file__).with_name("reference").joinpath("imagecorruptions.json").read_text())["figures"]
STILL = ("defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression")  # no randomness


@lru_cache
def photos() -> Tensor:
    return torch.from_numpy(photographs()).permute(0, 3, 1, 2).contiguous()


def small(count: int = 6, side: int = 32) -> Tensor:
    return photos()[:count, :, 120 : 120 + side, 90 : 90 + side].contiguous()


def draws(count: int = 1, *, key: int = 0) -> Draws:
    return Draws((key,), 0, count)


# Against imagecorruptions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in CORRUPTIONS if name != "frost"])
def test_changes_images_as_much_as_the_reference_does(name: str) -> None:
    for severity, expected in zip(SEVERITIES, REFERENCE[name]["severities"], strict=True):
        changes = [
            (corrupt(photos(), name, severity, seed).float() - photos()).abs().mean((1, 2, 3))
            for seed in range(min(12, REFERENCE[name]["draws"]))
        ]
        change = torch.cat(changes)
        assert change.mean().item() == pytest.approx(expected["mean"], rel=0.1), severity
        assert change.std(correction=0).item() == pytest.approx(expected["std"], rel=0.1), severity


def test_computed_frost_hides_about_as_much_as_the_photographs() -> None:
    for severity, expected in zip(SEVERITIES, REFERENCE["frost"]["severities"], strict=True):
        change = (corrupt(photos(), "frost", severity).float() - photos()).abs().mean()
        assert change.item() == pytest.approx(expected["mean"], rel=0.25), severity


# Streams and seeds ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CORRUPTIONS)
@pytest.mark.parametrize("side", [32, 96])
def test_does_not_depend_on_the_batch(name: str, side: int) -> None:
    images = small(6, side)
    whole = corrupt(images, name, 4, seed=3, first=10)
    parts = [corrupt(part, name, 4, seed=3, first=10 + at) for at, part in [(0, images[:1]), (1, images[1:])]]
    assert torch.equal(torch.cat(parts), whole)
    assert whole.is_contiguous()


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_seed_and_place_decide_the_draws(name: str) -> None:
    images = small(1)
    one = corrupt(images, name, 3)
    assert torch.equal(corrupt(images, name, 3), one)
    assert torch.equal(corrupt(images, name, 3, seed=1), one) == (name in STILL)
    assert torch.equal(corrupt(images, name, 3, first=1), one) == (name in STILL)
    assert not torch.equal(corrupt(images, name, 4), one)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_leaves_its_input_alone(name: str) -> None:
    images = small(2)
    before = images.clone()
    corrupt(images, name, 5)
    assert torch.equal(images, before)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_takes_any_shape_and_an_empty_batch(name: str) -> None:
    for height, width in [(16, 16), (33, 70), (90, 141)]:
        assert corrupt(photos()[:2, :, :height, :width], name, 5).shape == (2, 3, height, width)
    assert corrupt(photos()[:0], name, 5).shape == (0, 3, 224, 224)


def test_constants_are_cifars_up_to_84_pixels() -> None:
    for side, family in [(32, CIFAR), (84, CIFAR), (85, IMAGENET), (224, IMAGENET)]:
        images = photos()[:1, :, :side, :side]
        expected = digital.contrast(images, family["contrast"][1], draws())
        assert torch.equal(corrupt(images, "contrast", 2), expected)


def test_draws_have_their_distributions_and_belong_to_their_index() -> None:
    many = Draws((1, 2), first=5, count=3)
    normal, uniform = many.normal(2.0, 3.0, 100_000), many.uniform(-1.0, 4.0, 100_000)
    assert normal.mean(1).tolist() == pytest.approx([2.0] * 3, abs=0.05)
    assert normal.std(1).tolist() == pytest.approx([3.0] * 3, rel=0.01)
    assert uniform.mean(1).tolist() == pytest.approx([1.5] * 3, abs=0.02)
    assert -1 < uniform.min() < uniform.max() < 4
    assert normal.corrcoef().fill_diagonal_(0).abs().max() < 0.02
    alone = Draws((1, 2), first=7, count=1)
    assert torch.equal(alone.normal(2.0, 3.0, 100_000)[0], normal[2])
    assert torch.equal(alone.uniform(-1.0, 4.0, 100_000)[0], uniform[2])


# Each against a naive implementation ----------------------------------------------------------------------------------


def test_shot_noise_counts_photons() -> None:
    for value in (0, 40, 200):
        counted = noise.shot_noise(torch.full((1, 3, 200, 200), value, dtype=torch.uint8), 25, draws()).float()
        expected = np.floor(
            np.minimum(np.random.default_rng(0).poisson(value * 25 / 255, 10**5) * 255 / 25, 255) + 1e-3
        )
        assert counted.mean().item() == pytest.approx(expected.mean(), rel=0.01, abs=1e-6)
        assert counted.std().item() == pytest.approx(expected.std(), rel=0.02, abs=1e-6)


def test_impulse_noise_is_half_black_half_white() -> None:
    grey = torch.full((1, 3, 200, 200), 100, dtype=torch.uint8)
    noisy = noise.impulse_noise(grey, 0.2, draws())
    shares = [(noisy == value).float().mean().item() for value in (0, 100, 255)]
    assert shares == pytest.approx([0.1, 0.8, 0.1], abs=0.005)


def test_gaussian_noise_has_its_deviation() -> None:
    grey = torch.full((1, 3, 200, 200), 127, dtype=torch.uint8)
    assert noise.gaussian_noise(grey, 0.1, draws()).float().std().item() == pytest.approx(25.5, rel=0.02)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(12, 20), st.integers(12, 20))
def test_glass_shuffle_is_the_published_walk(key: int, reach: int, height: int, width: int) -> None:
    bits = draws(2, key=key).bits(2, height, width)
    source = blur._shuffle(bits.clone(), height, width, reach)
    for image in range(2):
        pixels = np.arange(height * width).reshape(height, width)
        for h in range(height - reach, reach, -1):
            for w in range(width - reach, reach, -1):
                down, right = (int(bits[image, k, h, w]) * 2 * reach // 65536 - reach for k in (0, 1))
                pixels[h, w] = pixels[h + down, w + right]
        assert np.array_equal(source[image].view(height, width).numpy(), pixels)


def test_defocus_is_a_sum_over_the_disc() -> None:
    image = small(1, 20)
    padded = np.pad(image[0].double().numpy(), ((0, 0), (3, 3), (3, 3)), mode="reflect")
    inside = [(y, x) for y in range(-3, 4) for x in range(-3, 4) if y * y + x * x <= 9]
    total = sum(padded[:, 3 + y : 23 + y, 3 + x : 23 + x] for y, x in inside) / len(inside)
    # A softness of 0.1 leaves the disc as it is.
    assert np.abs(blur.defocus_blur(image, (3, 0.1), draws())[0].numpy() - np.floor(total + 1e-3)).max() == 0


@pytest.mark.parametrize("softness", [0.4, 0.5])
def test_defocus_rim_is_softened(softness: float) -> None:
    disc = blur._disc(4, softness)
    assert disc.sum().item() == pytest.approx(1)
    assert disc.shape == (11, 11)
    assert 0 < disc[5, 10] < disc[5, 9] < disc[5, 8]


@pytest.mark.parametrize("mirror", [False, True])
def test_gaussian_blur_is_a_weighted_mean(mirror: bool) -> None:
    values, sigma = torch.rand(1, 1, 9, 11), 1.2
    radius = int(3 * sigma + 0.5)
    padded = np.pad(values[0, 0].numpy(), radius, mode="symmetric" if mirror else "edge")
    taps = [math.exp(-(k**2) / (2 * sigma**2)) for k in range(-radius, radius + 1)]
    expected = np.zeros((9, 11))
    for y, down in enumerate(taps):
        for x, right in enumerate(taps):
            expected += down * right / sum(taps) ** 2 * padded[y : y + 9, x : x + 11]
    blurred = filters.gaussian_blur(values, sigma, truncate=3, mirror=mirror)
    assert blurred[0, 0].numpy() == pytest.approx(expected, abs=1e-5)


@settings(max_examples=20, deadline=None)
@given(st.floats(-180, 180), st.integers(1, 12), st.floats(0.5, 10))
def test_motion_blur_walks_along_its_angle(angle: float, radius: int, sigma: float) -> None:
    image = small(1, 16).float()[:, :1]
    blurred = filters.motion_blur(image, radius, sigma, torch.tensor([angle]))[0, 0]
    radians = math.radians(float(torch.tensor(angle)))
    weights = [math.exp(-(k**2) / (2 * sigma**2)) for k in range(2 * radius + 1)]
    for y, x in [(0, 0), (3, 12), (8, 8), (15, 15)]:
        total = 0.0
        for k, weight in enumerate(weights):
            down, right = math.ceil(k * math.sin(radians) - 0.5), math.ceil(k * math.cos(radians) - 0.5)
            if max(abs(down), abs(right)) >= 16:
                break
            total += weight / sum(weights) * image[0, 0, min(max(y + down, 0), 15), min(max(x + right, 0), 15)].item()
        assert blurred[y, x].item() == pytest.approx(total, abs=0.2)


def test_zoom_enlarges_the_centre() -> None:
    values = torch.rand(1, 1, 40, 40)
    length = math.ceil(40 / 1.3)
    top = (40 - length) // 2
    grid = np.linspace(top, top + length - 1, round(length * 1.3))[:40]
    expected = [[_bilinear(values[0, 0], y, x) for x in grid] for y in grid]
    assert filters.zoom(values, 1.3)[0, 0].numpy() == pytest.approx(np.array(expected), abs=1e-5)


def _bilinear(values: Tensor, y: float, x: float) -> float:
    top, left = min(int(y), values.shape[0] - 2), min(int(x), values.shape[1] - 2)
    down, right = y - top, x - left
    (a, b), (c, d) = values[top : top + 2, left : left + 2].tolist()
    return (1 - down) * ((1 - right) * a + right * b) + down * ((1 - right) * c + right * d)


def test_brightness_raises_the_value_of_hsv() -> None:
    image = small(1)
    image[0, :, 0, 0] = 0
    brighter = weather.brightness(image, 0.2, draws())
    for y in range(0, 32, 3):
        for x in range(0, 32, 3):
            hue, saturation, value = colorsys.rgb_to_hsv(*(image[0, :, y, x] / 255).tolist())
            expected = [255 * c for c in colorsys.hsv_to_rgb(hue, saturation, min(1, value + 0.2))]
            assert brighter[0, :, y, x].tolist() == pytest.approx([math.floor(c + 1e-3) for c in expected], abs=0)


def test_contrast_pulls_towards_the_mean() -> None:
    values = small(1)[0].double()
    mean = values.mean((1, 2), keepdim=True)
    expected = (mean + 0.3 * (values - mean) + 1e-3).floor()
    assert torch.equal(digital.contrast(small(1), 0.3, draws())[0].double(), expected)


def test_plasma_is_diamond_square() -> None:
    size, decay = 8, 2.0
    chance = draws().uniform(-1.0, 1.0, size * size)[0].tolist()
    heights, step, rough = {(0, 0): 0.0}, size, 100.0

    def mean(*places: tuple[int, int]) -> float:
        return sum(heights[y % size, x % size] for y, x in places) / 4 + rough**2 * chance.pop(0)

    while step >= 2:
        half, cells = step // 2, [(y, x) for y in range(0, size, step) for x in range(0, size, step)]
        for y, x in cells:
            heights[y + half, x + half] = mean((y, x), (y, x + step), (y + step, x), (y + step, x + step))
        for y, x in cells:
            heights[y, x + half] = mean((y, x), (y, x + step), (y - half, x + half), (y + half, x + half))
        for y, x in cells:
            heights[y + half, x] = mean((y, x), (y + step, x), (y + half, x - half), (y + half, x + half))
        step, rough = half, rough / decay
    expected = np.array([[heights[y, x] for x in range(size)] for y in range(size)])
    expected = (expected - expected.min()) / (expected.max() - expected.min())
    assert weather._plasma(draws(), size, decay)[0].numpy() == pytest.approx(expected, abs=1e-5)


def test_fog_of_a_black_image_is_black() -> None:
    black = torch.zeros(1, 3, 32, 32, dtype=torch.uint8)
    assert not corrupt(black, "fog", 5).any()


@pytest.mark.parametrize("ratio", sorted({*IMAGENET["pixelate"], *CIFAR["pixelate"]}))
@pytest.mark.parametrize("side", [32, 96])
def test_pixelate_is_pillows_box(ratio: float, side: int) -> None:
    image = small(1, side)
    shrunk = Image.fromarray(image[0].permute(1, 2, 0).numpy()).resize((int(side * ratio),) * 2, Image.Resampling.BOX)
    expected = np.asarray(shrunk.resize((side, side), Image.Resampling.BOX)).astype(int)
    difference = digital.pixelate(image, ratio, draws())[0].permute(1, 2, 0).numpy() - expected
    assert np.abs(difference).max() <= 1  # Pillow also rounds between rows and columns


def test_elastic_affine_sends_the_moved_points_back() -> None:
    shifts = torch.randn(2, 3, 2)
    back = digital._affine(shifts, 40, 60)
    for image in range(2):
        for corner, shift in zip([(43, 33), (43, 7), (17, 7)], shifts[image], strict=True):
            moved = torch.tensor([*(torch.tensor(corner) + shift), 1.0])
            assert (back[image] @ moved).tolist() == pytest.approx(corner, abs=1e-3)


def test_elastic_without_shift_or_bend_is_the_image() -> None:
    assert torch.equal(digital.elastic_transform(small(), (0, 0, 1e-9), draws(6)), small())
    assert torch.equal(digital.elastic_transform(small(), (1e-9, 0.03, 0), draws(6)), small())


def test_snow_without_flakes_only_whitens() -> None:
    none_falls = (0.0, 0.1, 2.0, 9.0, 5, 2.0, 0.8)
    values = small(1)[0].double()
    grey = 0.299 * values[0] + 0.587 * values[1] + 0.114 * values[2]
    expected = 0.8 * values + 0.2 * torch.maximum(values, 1.5 * grey + 127.5)
    snowy = weather.snow(small(1), none_falls, draws())[0].double()
    assert (snowy - expected.clamp_max(255).floor()).abs().max() <= 1


# Frost ----------------------------------------------------------------------------------------------------------------


def write_photographs(folder: Path) -> None:
    for k, name in enumerate(ice._PHOTOS):
        Image.new("RGB", (300, 260), (40 * k, 10, 200)).save(folder / name)


def test_frost_takes_the_users_photographs(tmp_path: Path) -> None:
    write_photographs(tmp_path)
    black = torch.zeros(40, 3, 224, 224, dtype=torch.uint8)
    reds = corrupt(black, "frost", 1, frost=tmp_path)[:, 0].flatten(1).float().mean(1)
    assert {round(red / 0.4 / 40) for red in reds.tolist()} == {0, 1, 2, 3, 4, 5}
    assert corrupt(photos()[:1].repeat(1, 1, 2, 2), "frost", 1, frost=tmp_path).shape == (1, 3, 448, 448)


def test_frost_names_the_photograph_that_is_missing(tmp_path: Path) -> None:
    write_photographs(tmp_path)
    (tmp_path / "frost4.jpg").unlink()
    with pytest.raises(ValueError, match=r"frost4\.jpg cannot be read"):
        corrupt(small(), "frost", 1, frost=tmp_path)


# Bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "hint"),
    [("gausian_noise", "'gaussian_noise'"), ("Motion Blur", "'motion_blur'"), ("x", "there are: gaussian")],
)
def test_unknown_name_gets_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(ValueError, match=hint):
        corrupt(small(), name, 1)


@pytest.mark.parametrize("severity", [0, 6, -1, 2.5, "3", True])
def test_severity_is_one_to_five(severity: object) -> None:
    with pytest.raises(ValueError, match=r"from 1 .* to 5"):
        corrupt(small(), "fog", severity)  # type: ignore[arg-type]


def test_images_of_the_wrong_kind_are_refused() -> None:
    with pytest.raises(TypeError, match=r"not torch\.float32; corrupt before normalizing"):
        corrupt(small().float(), "fog", 1)
    with pytest.raises(TypeError, match="not ndarray"):
        corrupt(small().numpy(), "fog", 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"\(B, 3, height, width\), not \(3, 32, 32\)"):
        corrupt(small()[0], "fog", 1)
    with pytest.raises(ValueError, match=r"at least 16 x 16 pixels, not 8 x 32"):
        corrupt(small()[:, :, :8], "fog", 1)
    with pytest.raises(ValueError, match="0 or more"):
        corrupt(small(), "fog", 1, seed=-1)
