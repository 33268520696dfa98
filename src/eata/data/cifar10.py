"""CIFAR-10 (Krizhevsky 2009) from the cache folder, and CIFAR-10-C (Hendrycks & Dietterich 2019) published or made."""

from __future__ import annotations

import functools
import hashlib
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from eata.data import cache, corruptions
from eata.data.corruptions import corrupt
from eata.errors import EataError

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
COUNTS = {"train": 50_000, "test": 10_000}
SIDE = 32
PUBLISHED = "CIFAR-10-C"  # the folder that the published archive unpacks to


def folder() -> Path:
    """Where ``eata data get cifar10`` puts its four arrays."""
    return cache.folder() / "cifar10"


def arrays(split: str) -> tuple[Tensor, Tensor]:
    """Images as uint8 (N, 3, 32, 32) and labels as int64 (N) of ``"train"`` (50,000) or ``"test"`` (10,000)."""
    files = [folder() / f"{split}_{kind}.npy" for kind in ("images", "labels")]
    for file in files:
        if not file.exists():
            raise FileNotFoundError(
                f"CIFAR-10 is not in {folder()}: run `eata data get cifar10`, with `--from PATH` if you have a copy."
            )
    count = COUNTS[split]
    images = cache.load(files[0], (count, 3, SIDE, SIDE), "uint8")
    labels = cache.load(files[1], (count,), "int64")
    return torch.from_numpy(images), torch.from_numpy(labels)


def published(path: Path, corruption: str, severity: int) -> tuple[Tensor, Tensor]:
    """One cell of the published CIFAR-10-C: ``<corruption>.npy`` holds five severities of the 10,000 test images."""
    file = path / f"{corruption}.npy"
    if not file.exists():
        there = sorted(other.stem for other in path.glob("*.npy") if other.stem != "labels")
        raise FileNotFoundError(f"{path} has no {corruption}.npy; its corruptions are {', '.join(there) or 'none'}.")
    if not (path / "labels.npy").exists():
        raise FileNotFoundError(f"{path} has no labels.npy; it belongs to the published CIFAR-10-C.")
    count = COUNTS["test"]
    cell = slice((severity - 1) * count, severity * count)
    try:
        # mapped, not read: one severity is a fifth of the file
        images = np.load(file, mmap_mode="r", allow_pickle=False)
        labels = np.load(path / "labels.npy", allow_pickle=False)
    except (ValueError, EOFError) as problem:
        raise EataError(f"{file} is damaged ({problem}); unpack it again.") from None
    if images.shape != (5 * count, SIDE, SIDE, 3) or images.dtype != np.uint8 or labels.shape != (5 * count,):
        raise EataError(
            f"{file} holds {images.dtype} {images.shape} with {len(labels)} labels, not 50,000 uint8 images of 32x32x3."
        )
    pixels = np.ascontiguousarray(images[cell].transpose(0, 3, 1, 2))
    return torch.from_numpy(pixels), torch.from_numpy(labels[cell].astype(np.int64))


def generated(images: Tensor, corruption: str, severity: int, limit: int | None) -> Tensor:
    """The first ``limit`` test images corrupted by us: from the cache, else made; a whole cell is then kept there."""
    file = cache.folder() / "cifar10-c" / _version() / f"{corruption}-{severity}.npy"
    if file.exists():
        return torch.from_numpy(cache.load(file, tuple(images.shape), "uint8"))[:limit]
    made = corrupt(images[:limit], corruption, severity)
    if len(made) == len(images):
        try:
            cache.save(file, made.numpy())
        except OSError as problem:
            warnings.warn(f"{file} could not be kept ({problem.strerror}); it is made anew each time.", stacklevel=2)
    return made


@functools.cache
def _version() -> str:
    """Changes with the code of the corruptions, so that the cache never gives what another version of it made."""
    sources = sorted(Path(corruptions.__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:12]
