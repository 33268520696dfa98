from __future__ import annotations

import errno
import hashlib

import numpy as np
import pytest
import torch

import eata.data
from eata.data import cache, cifar10

COUNT = 30


def images_of(stream) -> torch.Tensor:
    return torch.cat([x for x, _ in stream.batches(16, seed=None)]).mul(255).round().byte()


@pytest.fixture
def small(monkeypatch, tmp_path):
    """A cache folder with a CIFAR-10 of 30 test images."""
    monkeypatch.setenv("EATA_DATA", str(tmp_path))
    monkeypatch.setattr(cifar10, "COUNTS", {"train": 10, "test": COUNT})
    rng = np.random.default_rng(0)
    for split, count in cifar10.COUNTS.items():
        cache.save(cifar10.folder() / f"{split}_images.npy", rng.integers(0, 256, (count, 3, 32, 32), dtype=np.uint8))
        cache.save(cifar10.folder() / f"{split}_labels.npy", rng.integers(0, 10, count))
    return tmp_path


def test_cifar10_clean(small):
    stream = eata.data.load("cifar10")
    stored = np.load(small / "cifar10" / "test_images.npy")
    assert np.array_equal(images_of(stream).numpy(), stored)
    assert stream.name == "cifar10"
    assert stream.class_names[3] == "cat"
    assert not stream.generated
    assert np.array_equal(images_of(eata.data.load("cifar10-c")).numpy(), stored)
    assert len(eata.data.load("cifar10", split="train")) == 10
    assert np.array_equal(images_of(eata.data.load("cifar10", limit=7)).numpy(), stored[:7])


def test_a_generated_cell_is_made_once(small, monkeypatch):
    stream = eata.data.load("cifar10-c", corruption="gaussian_noise", severity=2)
    assert stream.generated
    assert stream.name == "cifar10-c gaussian_noise 2"
    made = images_of(stream)
    clean = torch.from_numpy(np.load(small / "cifar10" / "test_images.npy"))
    assert torch.equal(made, eata.data.corrupt(clean, "gaussian_noise", 2))
    monkeypatch.setattr(cifar10, "corrupt", None)  # from here on the cache must serve
    assert torch.equal(images_of(eata.data.load("cifar10", corruption="gaussian_noise", severity=2)), made)
    few = eata.data.load("cifar10-c", corruption="gaussian_noise", severity=2, limit=5)
    assert torch.equal(images_of(few), made[:5])
    assert few.digest != stream.digest


def test_with_a_limit_only_those_images_are_made(small, monkeypatch):
    corrupt, counts = cifar10.corrupt, []
    monkeypatch.setattr(cifar10, "corrupt", lambda images, *args: counts.append(len(images)) or corrupt(images, *args))
    few = images_of(eata.data.load("cifar10-c", corruption="fog", limit=5))
    assert not (small / "cifar10-c").exists()
    whole = images_of(eata.data.load("cifar10-c", corruption="fog"))
    assert counts == [5, COUNT]
    assert torch.equal(few, whole[:5])


def test_another_version_of_the_corruptions_has_another_cache(small, monkeypatch):
    eata.data.load("cifar10-c", corruption="contrast")
    monkeypatch.setattr(cifar10, "_version", lambda: "later")
    eata.data.load("cifar10-c", corruption="contrast")
    assert len(list((small / "cifar10-c").glob("*/contrast-5.npy"))) == 2


def test_a_full_disk_costs_the_cache_only(small, monkeypatch):
    def full(path, array):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cache, "save", full)
    with pytest.warns(UserWarning, match="could not be kept \\(No space left on device\\)"):
        assert len(eata.data.load("cifar10-c", corruption="contrast")) == COUNT


def write_published(folder):
    folder.mkdir()
    rng = np.random.default_rng(1)
    images = rng.integers(0, 256, (5 * COUNT, 32, 32, 3), dtype=np.uint8)
    labels = np.tile(rng.integers(0, 10, COUNT).astype(np.uint8), 5)
    np.save(folder / "fog.npy", images)
    np.save(folder / "labels.npy", labels)
    return images, labels


@pytest.mark.parametrize("place", ["CIFAR-10-C", "elsewhere"])
def test_published_files(small, place):
    images, labels = write_published(small / place)
    spec = "cifar10-c" if place == "CIFAR-10-C" else f"cifar10-c:{small / place}"
    stream = eata.data.load(spec, corruption="fog", severity=4)
    assert not stream.generated
    assert np.array_equal(images_of(stream).numpy(), images[3 * COUNT : 4 * COUNT].transpose(0, 3, 1, 2))
    assert torch.cat([y for _, y in stream.batches(9, seed=None)]).tolist() == labels[:COUNT].tolist()
    assert stream.name == "cifar10-c fog 4"
    with pytest.raises(FileNotFoundError, match=r"has no snow.npy; its corruptions are fog\."):
        eata.data.load(spec, corruption="snow")


def test_damaged_published_files(small):
    write_published(small / "pub")
    content = (small / "pub" / "fog.npy").read_bytes()
    (small / "pub" / "fog.npy").write_bytes(content[:5000])
    with pytest.raises(ValueError, match=r"fog.npy is damaged"):
        eata.data.load(f"cifar10-c:{small / 'pub'}", corruption="fog")
    np.save(small / "pub" / "fog.npy", np.zeros((3, 32, 32, 3), np.uint8))
    with pytest.raises(ValueError, match=r"not 50,000 uint8 images"):
        eata.data.load(f"cifar10-c:{small / 'pub'}", corruption="fog")
    (small / "pub" / "labels.npy").unlink()
    with pytest.raises(FileNotFoundError, match=r"no labels.npy"):
        eata.data.load(f"cifar10-c:{small / 'pub'}", corruption="fog")


def test_cifar10_missing_or_damaged(small, monkeypatch, tmp_path):
    (small / "cifar10" / "test_labels.npy").write_bytes(b"\x93NUMPY")
    with pytest.raises(ValueError, match=r"test_labels.npy is damaged"):
        eata.data.load("cifar10")
    np.save(small / "cifar10" / "test_labels.npy", np.zeros(3))
    with pytest.raises(ValueError, match=r"holds float64 \(3,\), not int64 \(30,\)"):
        eata.data.load("cifar10")
    monkeypatch.setenv("EATA_DATA", str(tmp_path / "empty"))
    with pytest.raises(FileNotFoundError, match="run `eata data get cifar10`"):
        eata.data.load("cifar10")


def test_corrupted_digits():
    stream = eata.data.load("digits", corruption="pixelate", limit=20)
    assert stream.generated
    assert len(stream) == 20
    assert stream.name == "digits pixelate 5"
    assert not torch.equal(images_of(stream), images_of(eata.data.load("digits", limit=20)))


def test_every_corruption_has_the_same_order():
    orders = [
        torch.cat([y for _, y in eata.data.load("digits", corruption=name, limit=50).batches(8, seed=2021)]).tolist()
        for name in (None, "contrast", "gaussian_noise")
    ]
    assert orders[0] == orders[1] == orders[2]


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("cifar", {}, "no data set 'cifar'; did you mean 'cifar10'"),
        ("imagenet", {}, "needs its folder: write imagenet:PATH"),
        ("digits:here", {}, "'digits' takes no path"),
        ("digits", {"corruption": "rain"}, "no corruption 'rain'"),
        ("digits", {"corruption": "fogg"}, "did you mean 'fog'"),
        ("digits", {"corruption": "fog", "severity": 0}, "1 .*to 5.*not 0"),
        ("digits", {"corruption": "fog", "severity": 6}, "1 .*to 5.*not 6"),
        ("digits", {"split": "val"}, "no split 'val'; take 'train' or 'test'"),
        ("digits", {"limit": 0}, "limit=0 leaves no images"),
    ],
)
def test_bad_requests(spec, options, message):
    with pytest.raises(ValueError, match=message):
        eata.data.load(spec, **options)


def test_sets_without_a_training_split(tmp_path):
    (tmp_path / "x").mkdir()
    for kind in ("folder", "imagenet-r", "imagenet-c"):
        with pytest.raises(ValueError, match="has no training split"):
            eata.data.load(f"{kind}:{tmp_path}", split="train", corruption="fog")
    with pytest.raises(ValueError, match="CIFAR-10-C has no training split"):
        eata.data.load(f"cifar10-c:{tmp_path}", split="train", corruption="fog")


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("EATA_DATA", str(tmp_path))
    assert cache.folder() == tmp_path
    monkeypatch.delenv("EATA_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.folder() == tmp_path / "eata"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.folder() == tmp_path / ".cache" / "eata"


@pytest.mark.skipif(not (cifar10.folder() / "train_labels.npy").exists(), reason="CIFAR-10 is not in the cache folder")
def test_real_cifar10_is_what_it_is_known_for():
    images, labels = cifar10.arrays("train")
    means = [images[:, channel].float().mean().item() / 255 for channel in range(3)]
    assert np.allclose(means, [0.4914, 0.4822, 0.4465], atol=5e-5)
    assert labels.bincount().tolist() == [5000] * 10
    assert cifar10.arrays("test")[1].bincount().tolist() == [1000] * 10


def test_the_sample_of_cifar10_is_what_its_note_says() -> None:
    from eata.data import sample

    images, labels = sample.arrays("test")
    assert (images.shape, images.dtype, labels.dtype) == ((1024, 3, 32, 32), torch.uint8, torch.int64)
    # of the first 1,024 images and labels of the official test_batch.bin
    content = hashlib.sha256(images.numpy().tobytes() + labels.numpy().tobytes()).hexdigest()
    assert content.startswith("c972f50670c2280c")
    if (cifar10.folder() / "test_images.npy").exists():
        whole, names = cifar10.arrays("test")
        assert torch.equal(images, whole[:1024])
        assert torch.equal(labels, names[:1024])
    with pytest.raises(eata.EataError, match="test images only"):
        eata.data.load("cifar10-sample", split="train")
    assert eata.data.load("cifar10-sample", corruption="fog", limit=5).generated
