"""Streams of image files: any mode, size and state of health, decoded ahead, in threads."""

from __future__ import annotations

import hashlib
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eata.data.stream import Batch, Stream
from eata.errors import EataError, unknown

try:
    from PIL import Image, ImageOps
except ModuleNotFoundError:
    raise EataError("Images in files need Pillow: pip install 'eata[bench]'.") from None

SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".apng", ".gif", ".bmp", ".dib", ".webp", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".j2k", ".avif", ".tga"),
)
UNKNOWN = -1
AHEAD = 128  # images decoded before they are asked for, where batches don't say

Pixels = NDArray[np.uint8]
Prepare = Callable[[Image.Image], Image.Image]
Corrupt = Callable[[Tensor, int], Tensor]


def find(folder: Path) -> list[Path]:
    """All image files in a folder and its subfolders, by name, sorted; hidden ones are left out."""
    found = []
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(place, name) for name in files if _is_image(name)]
    return sorted(found)


def _is_image(name: str) -> bool:
    return Path(name).suffix.lower() in SUFFIXES and not name.startswith(".")


def by_subfolder(folder: Path) -> tuple[list[Path], list[int], list[str]]:
    """Images with the number of their subfolder as label, and the subfolders' names; without subfolders, no labels."""
    inside = sorted(inner for inner in folder.iterdir() if inner.is_dir() and not inner.name.startswith("."))
    found = {inner.name: find(inner) for inner in inside}
    names = [name for name, files in found.items() if files]
    files = [path for name in names for path in found[name]]
    labels = [label for label, name in enumerate(names) for _ in found[name]]
    loose = sorted(path for path in folder.iterdir() if not path.is_dir() and _is_image(path.name))
    if not files and not loose:
        raise EataError(f"{folder} has no images (looked for {' '.join(SUFFIXES)}).")
    return files + loose, labels + [UNKNOWN] * len(loose), names


def to_rgb(image: Image.Image) -> Image.Image:
    """The picture as a viewer shows it: upright (EXIF), first frame, eight bits, three channels."""
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):  # 16 bits; Pillow's own conversion would clip at 255 instead of scaling
        high = np.asarray(image).astype(np.int64) >> 8
        image = Image.fromarray(high.clip(0, 255).astype(np.uint8))
    if image.mode == "F":
        raise EataError("its pixels are floating-point numbers, so how bright white is, is not known")
    return image.convert("RGB")


@dataclass(frozen=True)
class Target:
    """What a network wants its images to be, as its configuration says it (timm's ``resolve_data_config``).

    Args:
        height: in pixels.
        width: in pixels.
        crop_pct: the image is scaled so that the middle ``height`` x ``width`` is this share of its shorter side.
        interpolation: of Pillow's: nearest, box, bilinear, hamming, bicubic or lanczos.
        crop_mode: ``"center"`` keeps the picture's proportions, ``"squash"`` does not.
    """

    height: int
    width: int
    crop_pct: float = 0.875
    interpolation: str = "bilinear"
    crop_mode: str = "center"

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Target:
        """From ``net.pretrained_cfg``.

        >>> Target.of({"input_size": (3, 224, 224), "crop_pct": 0.95, "interpolation": "bicubic"}).scale
        (235, 235)
        """
        *_, height, width = config["input_size"]
        given = {name: config[name] for name in ("crop_pct", "interpolation", "crop_mode") if config.get(name)}
        target = cls(int(height), int(width), **given)
        if target.interpolation.upper() not in Image.Resampling.__members__:
            known = [name.lower() for name in Image.Resampling.__members__]
            raise unknown("interpolation", target.interpolation, known, "The model's configuration names it.")
        if target.crop_mode not in ("center", "squash"):
            raise unknown("crop_mode", target.crop_mode, ("center", "squash"), "The model's configuration names it.")
        return target

    @property
    def scale(self) -> tuple[int, int]:
        """Height and width that images are scaled to, before they are cropped."""
        tiny = 1e-6  # 224 / (224 / 232) is 232
        return math.floor(self.height / self.crop_pct + tiny), math.floor(self.width / self.crop_pct + tiny)


def resize(image: Image.Image, height: int, width: int, target: Target) -> Image.Image:
    """Scaled (antialiased) so that it just covers ``height`` x ``width``, or, squashed, has that size."""
    old_width, old_height = image.size
    if target.crop_mode == "squash":
        new = (width, height)
    elif height == width:  # the shorter side fits, the longer is cut to whole pixels, as torchvision does it
        new = (height * old_width // min(image.size), height * old_height // min(image.size))
    else:
        ratio = min(old_height / height, old_width / width)
        new = (round(old_width / ratio), round(old_height / ratio))
    return image.resize(new, Image.Resampling[target.interpolation.upper()])


def crop(image: Image.Image, target: Target) -> Image.Image:
    """The middle, of the target's size; the image is enlarged first where it is smaller."""
    if image.width < target.width or image.height < target.height:
        image = resize(image, target.height, target.width, target)
    left, top = round((image.width - target.width) / 2), round((image.height - target.height) / 2)
    return image.crop((left, top, left + target.width, top + target.height))


def resize_and_crop(image: Image.Image, target: Target) -> Image.Image:
    """A network's evaluation: scaled, then the middle (ImageNet's: shorter side to 256, the middle 224 x 224)."""
    return crop(resize(image, *target.scale, target), target)


def fit(image: Image.Image, target: Target) -> Image.Image:
    """An image of the wanted size as it is, any other resized and cropped."""
    return image if image.size == (target.width, target.height) else resize_and_crop(image, target)


class FileStream(Stream):
    """Images in files, read while streaming; a file that cannot be read is left out and named in ``skipped``.

    Args:
        name: see :class:`Stream`.
        class_names: see :class:`Stream`.
        root: folder that the digest's paths are relative to.
        files: paths.
        labels: one for each path, ``UNKNOWN`` where there is none.
        prepare: turns an RGB picture into one of the stream's size.
        recipe: names ``prepare`` and the corruption in the digest.
        class_index: see :class:`Stream`.
        corrupt: corrupts one uint8 image (1, 3, H, W), given its number in ``files``.
    """

    def __init__(
        self,
        name: str,
        class_names: Sequence[str],
        root: Path,
        files: Sequence[Path],
        labels: Sequence[int],
        prepare: Prepare,
        *,
        recipe: str,
        class_index: Sequence[int] | None = None,
        corrupt: Corrupt | None = None,
    ) -> None:
        listing = [f"{path.relative_to(root)} {path.stat().st_size if path.exists() else 0}" for path in files]
        digest = hashlib.sha256("\n".join([recipe, *listing]).encode(errors="surrogateescape")).hexdigest()[:12]
        super().__init__(name, class_names, digest=digest, class_index=class_index, generated=corrupt is not None)
        self._files = files
        self._labels = labels
        self._prepare = prepare
        self._corrupt = corrupt

    def __len__(self) -> int:
        return len(self._files)

    def pixels(self) -> Iterator[tuple[int, Tensor, int]]:
        self.skipped = []
        for number, image in self._decoded(list(range(len(self))), ahead=AHEAD):
            yield number, image, self._labels[number]

    def _read(self, order: NDArray[np.int64], size: int) -> Iterator[Batch]:
        images: list[Tensor] = []
        labels: list[int] = []
        for number, image in self._decoded(order.tolist(), ahead=2 * size):
            images.append(image)
            labels.append(self._labels[number])
            if len(images) == size:
                yield torch.stack(images), torch.tensor(labels)
                images, labels = [], []
        if images:
            yield torch.stack(images), torch.tensor(labels)

    def _decoded(self, order: list[int], ahead: int) -> Iterator[tuple[int, Tensor]]:
        """The readable images in this order. Threads are enough: Pillow lets go of Python's lock while it decodes."""
        pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1))
        todo = iter(order)
        waiting: deque[tuple[int, Future[Tensor | str]]] = deque(
            (number, pool.submit(self._decode, number)) for number in islice(todo, ahead)
        )
        try:
            while waiting:
                number, future = waiting.popleft()
                result = future.result()
                for following in islice(todo, 1):
                    waiting.append((following, pool.submit(self._decode, following)))
                if isinstance(result, str):
                    self.skipped.append((self._files[number], result))
                else:
                    yield number, result
        finally:
            pool.shutdown(cancel_futures=True)

    def _decode(self, number: int) -> Tensor | str:
        """One image as uint8 (3, H, W), or why it could not be read."""
        path = self._files[number]
        try:
            if path.stat().st_size == 0:
                return "the file is empty"
            with Image.open(path) as image:
                pixels: Pixels = np.asarray(self._prepare(to_rgb(image)))
        except Exception as problem:  # decoders of broken files raise anything; the stream must go on
            return str(problem) or type(problem).__name__
        tensor = torch.from_numpy(pixels.transpose(2, 0, 1).copy())
        return tensor if self._corrupt is None else self._corrupt(tensor.unsqueeze(0), number).squeeze(0)
