from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

import eata.data
from eata.data import images


def picture(width: int = 40, height: int = 40) -> Image.Image:
    """Red to the left, blue to the right, darker downwards."""
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return Image.fromarray(np.stack([255 - x, 128 - y / 2, x], 2).astype(np.uint8))


def pixels(stream, seed=None) -> torch.Tensor:
    return torch.cat([x for x, _ in stream.batches(3, seed=seed)])


def folder(path, size=32):
    return eata.data.load(f"folder:{path}", size=size)


def test_labels_come_from_subfolders(tmp_path):
    for name, count in (("cat", 2), ("ant", 3), (".hidden", 1), ("empty", 0)):
        (tmp_path / name / "deeper").mkdir(parents=True)
        for number in range(count):
            picture().save(tmp_path / name / "deeper" / f"{number}.png")
    (tmp_path / "ant" / "notes.txt").write_text("no image")
    picture().save(tmp_path / "loose.png")
    stream = folder(tmp_path)
    assert stream.class_names == ("ant", "cat")
    assert torch.cat([y for _, y in stream.batches(4, seed=None)]).tolist() == [0, 0, 0, 1, 1, -1]
    assert len(stream) == 6
    assert stream.skipped == []


def test_a_flat_folder_is_unlabelled(tmp_path):
    for number in range(5):
        picture().save(tmp_path / f"{number}.jpg")
    stream = folder(tmp_path)
    assert stream.class_names == ()
    assert {label for _, y in stream.batches(2) for label in y.tolist()} == {-1}
    stream.require(1000)  # no labels, so any model will do


def test_no_images(tmp_path):
    (tmp_path / "readme.txt").write_text("nothing here")
    with pytest.raises(ValueError, match="has no images"):
        folder(tmp_path)
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        folder(tmp_path / "missing")


def test_every_kind_of_file_is_read_right_or_named(tmp_path):
    plain = picture()
    plain.save(tmp_path / "plain.png")
    plain.convert("L").save(tmp_path / "gray.png")
    plain.convert("CMYK").save(tmp_path / "cmyk.jpg", quality=95)
    plain.convert("P", palette=Image.Palette.ADAPTIVE, colors=256).save(tmp_path / "palette.png")
    plain.convert("RGBA").save(tmp_path / "alpha.png")
    gray = np.asarray(plain.convert("L")).astype(np.uint16)
    Image.fromarray(gray * 257).save(tmp_path / "sixteen.png")
    plain.save(tmp_path / "animated.gif", save_all=True, append_images=[plain.rotate(180)])
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: rotate by 270 degrees to see it upright
    plain.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "turned.png", exif=exif)
    (tmp_path / "bad_empty.jpg").touch()
    (tmp_path / "bad_text.png").write_text("not an image at all")
    plain.resize((400, 400)).save(tmp_path / "whole.jpeg")
    whole = (tmp_path / "whole.jpeg").read_bytes()
    (tmp_path / "whole.jpeg").unlink()
    (tmp_path / "bad_cut.jpeg").write_bytes(whole[: len(whole) // 2])
    Image.fromarray(gray.astype(np.float32)).save(tmp_path / "bad_float.tiff")
    png = (tmp_path / "plain.png").read_bytes()
    (tmp_path / "bad_cut.png").write_bytes(png[: len(png) // 2])
    (tmp_path / "bad_link.png").symlink_to(tmp_path / "nowhere.png")

    stream = folder(tmp_path)
    good = sorted(path.stem for path in tmp_path.iterdir() if not path.name.startswith("bad"))
    seen = dict(zip(good, pixels(stream), strict=True))
    assert {path.name for path, _ in stream.skipped} == {path.name for path in tmp_path.glob("bad_*")}
    assert all(reason for _, reason in stream.skipped)

    colour = seen["plain"]
    for name in ("cmyk", "palette", "alpha", "animated", "turned"):
        assert (seen[name] - colour).abs().mean() < 0.04, name
    weights = torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1)
    brightness = (colour * weights).sum(0)
    for name in ("gray", "sixteen"):
        assert (seen[name] - brightness).abs().max() < 0.02, name

    first = list(stream.skipped)
    pixels(stream)
    assert stream.skipped == first  # of the latest pass, not added up


def test_batches_stay_full_although_files_are_skipped(tmp_path):
    for number in range(9):
        picture().save(tmp_path / f"{number}.png")
    for number in range(4):
        (tmp_path / f"{number}.png").write_bytes(b"")
    assert [len(x) for x, _ in folder(tmp_path).batches(2, seed=1)] == [2, 2, 1]


def test_a_folder_of_broken_files_ends_quietly(tmp_path):
    (tmp_path / "a.png").write_bytes(b"")
    stream = folder(tmp_path)
    assert list(stream.batches(2)) == []
    assert len(stream.skipped) == 1


def test_images_of_the_right_size_are_left_alone_and_others_resized_and_cropped(tmp_path):
    exact = picture(32, 32)
    exact.save(tmp_path / "a.png")
    picture(300, 100).save(tmp_path / "b.png")
    picture(20, 70).save(tmp_path / "c.png")
    seen = pixels(folder(tmp_path))
    assert seen.shape == (3, 3, 32, 32)
    assert torch.equal((seen[0] * 255).round().byte(), torch.from_numpy(np.array(exact)).permute(2, 0, 1))
    assert seen[1, 2, 16, 0] > 0.3  # the left third was cut off
    assert seen[1, 2, 16, -1] < 0.7


@pytest.mark.parametrize("size", [(500, 375), (375, 500), (224, 224), (256, 256), (343, 300), (100, 60)])
def test_resize_and_crop_is_that_of_imagenet(size):
    image = picture(*size)
    width, height = size
    if width <= height:
        resized = image.resize((256, int(256 * height / width)), Image.Resampling.BILINEAR)
    else:
        resized = image.resize((int(256 * width / height), 256), Image.Resampling.BILINEAR)
    array = np.asarray(resized)
    top, left = round((array.shape[0] - 224) / 2), round((array.shape[1] - 224) / 2)
    expected = array[top : top + 224, left : left + 224]
    assert np.array_equal(np.asarray(images.resize_and_crop(image, images.Target(224, 224))), expected)


@pytest.mark.parametrize("size", [(500, 375), (375, 500), (288, 288), (640, 333), (97, 60)])
@pytest.mark.parametrize(
    "config",
    [
        {"input_size": (3, 224, 224), "crop_pct": 0.95, "interpolation": "bicubic"},  # timm's resnet50
        {"input_size": (3, 160, 160), "crop_pct": 1.0, "interpolation": "bilinear"},
        {"input_size": (3, 64, 64), "crop_pct": 0.9, "interpolation": "bicubic", "crop_mode": "squash"},
        {"input_size": (3, 96, 48), "crop_pct": 0.875, "interpolation": "bilinear"},
    ],
)
def test_preprocessing_is_that_of_timm(size, config):
    data = pytest.importorskip("timm.data", reason="timm is not installed: pip install 'eata[vision]'")
    transform = data.create_transform(**data.resolve_data_config(pretrained_cfg=config), normalize=False)
    image = picture(*size)
    if min(size) * 0.875 < min(config["input_size"][1:]) and "crop_mode" not in config:
        image = image.resize((size[0] * 3, size[1] * 3))  # timm pads what is too small, we enlarge it
    ours = np.asarray(images.resize_and_crop(image, images.Target.of(config)))
    assert np.array_equal(ours, transform(image).permute(1, 2, 0).numpy())


def test_a_configuration_that_cannot_be_followed_says_so():
    with pytest.raises(eata.EataError, match="There is no interpolation 'cubist'"):
        images.Target.of({"input_size": (3, 8, 8), "interpolation": "cubist"})
    with pytest.raises(eata.EataError, match="There is no crop_mode 'border'"):
        images.Target.of({"input_size": (3, 8, 8), "crop_mode": "border"})


def test_load_follows_the_configuration_of_the_model(tmp_path):
    wide = picture(300, 100)
    wide.save(tmp_path / "a.png")
    config = {"input_size": (3, 32, 32), "crop_pct": 1.0, "interpolation": "bicubic"}
    seen = pixels(eata.data.load(f"folder:{tmp_path}", config=config))
    expected = np.asarray(wide.resize((96, 32), Image.Resampling.BICUBIC))[:, 32:64]
    assert np.array_equal((seen[0] * 255).round().byte().permute(1, 2, 0).numpy(), expected)
    assert eata.data.load(f"folder:{tmp_path}", config=config).digest != folder(tmp_path).digest


def test_stopping_early_stops_the_threads(tmp_path):
    for number in range(20):
        picture().save(tmp_path / f"{number}.png")
    batches = folder(tmp_path).batches(2)
    next(batches)
    batches.close()


def test_a_corruption_of_files_does_not_depend_on_the_order(tmp_path):
    for number in range(4):
        picture().save(tmp_path / f"{number}.png")
    stream = eata.data.load(f"folder:{tmp_path}", corruption="gaussian_noise", severity=3, size=32)
    assert stream.generated
    assert stream.name == "folder gaussian_noise 3"
    ordered = pixels(stream)
    shuffled = pixels(stream, seed=5)
    assert torch.equal(shuffled, ordered[np.random.RandomState(5).permutation(4)])
    assert not torch.equal(ordered[0], ordered[1])  # each image has noise of its own
    clean = folder(tmp_path)
    assert clean.digest != stream.digest
    assert not clean.generated
