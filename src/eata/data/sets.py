"""``load``: from the name of a data set to a stream of its images."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from torch import Tensor

from eata.data import cache, cifar10, corruptions, digits, sample
from eata.data.corruptions import corrupt
from eata.data.stream import ArrayStream, Stream
from eata.errors import EataError, unknown

SPECS = (
    *("digits", "cifar10-sample", "cifar10", "cifar10-c[:PATH]"),
    *("imagenet:PATH", "imagenet-c:PATH", "imagenet-r:PATH", "folder:PATH"),
)
ARRAYS: dict[str, ModuleType] = {"digits": digits, "cifar10-sample": sample, "cifar10": cifar10, "cifar10-c": cifar10}

Item = TypeVar("Item")


def load(
    spec: str,
    *,
    split: str = "test",
    corruption: str | None = None,
    severity: int = 5,
    limit: int | None = None,
    size: int = 224,
    config: Mapping[str, Any] | None = None,
) -> Stream:
    """A stream of one data set, clean or under one corruption.

    | spec | what |
    |---|---|
    | ``digits`` | scikit-learn's, 32x32, 897 for training, 900 for testing |
    | ``cifar10-sample`` | 1,024 test images of CIFAR-10 that come with the package |
    | ``cifar10`` | from the cache folder (``eata data get cifar10``) |
    | ``cifar10-c[:PATH]`` | the published files in PATH (default: ``CIFAR-10-C`` in the cache folder), else made here |
    | ``imagenet:PATH`` | ``PATH[/val]/<wnid>/*.JPEG``, resized and cropped |
    | ``imagenet-c:PATH`` | ``PATH/<corruption>/<severity>/<wnid>/*.JPEG``, cropped |
    | ``imagenet-r:PATH`` | ``PATH[/imagenet-r]/<wnid>/*``, resized and cropped, 200 of the 1,000 classes |
    | ``folder:PATH`` | any images: ``PATH/<class>/**`` with labels, or files right in PATH without |

    Args:
        spec: one of the above.
        split: ``"test"`` or ``"train"``, where the set has both.
        corruption: one of ``eata.data.CORRUPTIONS``; ``None`` means clean. Where the published images are not at hand
            the corruption is made here, and ``stream.generated`` says so.
        severity: 1 to 5, of the corruption.
        limit: take only so many images: the first of digits and CIFAR-10, whose own order is mixed already (so only
            those need to be corrupted), and evenly spread ones of image files, which are sorted by class.
        size: side in pixels of images read from files: those of another size are resized and cropped to a square.
        config: a network's ``pretrained_cfg``, whose ``input_size``, ``crop_pct`` and ``interpolation`` (as in timm)
            then say how images from files are resized and cropped, instead of ``size``.

    >>> stream = load("digits", limit=100)
    >>> len(stream), stream.name, stream.generated
    (100, 'digits', False)
    """
    kind, _, rest = spec.partition(":")
    path = Path(rest).expanduser() if rest else None
    known = {name.partition(":")[0].removesuffix("["): name for name in SPECS}
    if kind not in known:
        raise unknown("data set", kind, known, f"Write one of {', '.join(SPECS)}.")
    if path is None and known[kind].endswith(":PATH"):
        raise EataError(f"{kind!r} needs its folder: write {known[kind]}.")
    if path is not None and ":" not in known[kind]:
        raise EataError(f"{kind!r} takes no path; write {kind!r} alone.")
    if split not in ("train", "test"):
        raise EataError(f"There is no split {split!r}; take 'train' or 'test'.")
    if limit is not None and limit < 1:
        raise EataError(f"limit={limit} leaves no images; take 1 or more, or None for all.")
    if corruption is not None:
        corruptions.check(corruption, severity)
    if path is None:
        return _from_arrays(kind, split, corruption, severity, limit)
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is not a folder.")
    if kind == "cifar10-c":
        return _published_cifar10(path, split, corruption, severity, limit)
    return _from_files(kind, path, split, corruption, severity, limit, config or {"input_size": (3, size, size)})


def _from_arrays(kind: str, split: str, corruption: str | None, severity: int, limit: int | None) -> Stream:
    unpacked = cache.folder() / cifar10.PUBLISHED
    if kind == "cifar10-c" and unpacked.is_dir():
        return _published_cifar10(unpacked, split, corruption, severity, limit)
    source = ARRAYS[kind]
    name = _name(kind, corruption, severity)
    pixels, labels = source.arrays(split)
    if corruption is None:
        pixels = pixels[:limit]
    elif source is cifar10 and split == "test":
        pixels = cifar10.generated(pixels, corruption, severity, limit)
    else:
        pixels = corrupt(pixels[:limit], corruption, severity)
    made = corruption is not None
    cached = made and source is cifar10 and split == "test" and limit is None
    return ArrayStream(name, source.CLASSES, pixels, labels[:limit], generated=made, cached=cached)


def _published_cifar10(path: Path, split: str, corruption: str | None, severity: int, limit: int | None) -> Stream:
    if corruption is None:  # the published files have no clean images
        return _from_arrays("cifar10", split, None, severity, limit)
    if split == "train":
        raise EataError("CIFAR-10-C has no training split; take cifar10, whose images are corrupted here.")
    pixels, labels = cifar10.published(path, corruption, severity)
    return ArrayStream(_name("cifar10-c", corruption, severity), cifar10.CLASSES, pixels[:limit], labels[:limit])


def _from_files(
    kind: str,
    path: Path,
    split: str,
    corruption: str | None,
    severity: int,
    limit: int | None,
    config: Mapping[str, Any],
) -> Stream:
    from eata.data import imagenet, images  # Pillow is no part of the core

    target = images.Target.of(config)
    class_names: Sequence[str] = imagenet.names()
    class_index: Sequence[int] | None = None
    prepare = partial(images.resize_and_crop, target=target)
    made_here = corruption
    if kind != "imagenet" and split == "train":
        raise EataError(f"{kind}:PATH has no training split; name the folder of the images that you want.")
    if kind == "imagenet":
        files, labels = imagenet.labelled(imagenet.clean_folder(path, split), imagenet.full_index())
    elif kind == "imagenet-c":
        if corruption is None:
            raise EataError("ImageNet-C has no clean images; name a corruption, or take imagenet:PATH.")
        folder, made_here = imagenet.corrupted_folder(path, corruption, severity), None
        files, labels = imagenet.labelled(folder, imagenet.full_index())
        prepare = partial(images.crop, target=target)  # they are stored at 224x224
    elif kind == "imagenet-r":
        inner = path / "imagenet-r"
        files, labels = imagenet.labelled(inner if inner.is_dir() else path, imagenet.rendition_labels())
        class_index = imagenet.rendition_index()
        class_names = [class_names[place] for place in class_index]
    else:
        files, labels, class_names = images.by_subfolder(path)
        prepare = partial(images.fit, target=target)
        places = imagenet.full_index()
        if class_names and config.get("num_classes") == len(places) and set(class_names) < set(places):
            class_index = [places[name] for name in class_names]
    return images.FileStream(
        _name(kind, corruption, severity),
        class_names,
        path,
        _spread(files, limit),
        _spread(labels, limit),
        prepare,
        recipe=f"{prepare.func.__name__} {target} {made_here} {severity if made_here else ''}",
        class_index=class_index,
        corrupt=_corruptor(made_here, severity) if made_here else None,
    )


def _corruptor(corruption: str, severity: int) -> Callable[[Tensor, int], Tensor]:
    return lambda image, number: corrupt(image, corruption, severity, first=number)


def _spread(items: Sequence[Item], limit: int | None) -> Sequence[Item]:
    if limit is None or limit >= len(items):
        return items
    return [items[number * len(items) // limit] for number in range(limit)]


def _name(kind: str, corruption: str | None, severity: int) -> str:
    return f"{kind} {corruption} {severity}" if corruption else kind
