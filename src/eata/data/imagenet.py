"""ImageNet, ImageNet-C and ImageNet-R in their usual folders; classes are WordNet ids in sorted order."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path

from eata.data import images
from eata.errors import EataError


@cache
def _table() -> list[list[str]]:
    text = resources.files("eata.data").joinpath("imagenet_classes.txt").read_text(encoding="utf-8")
    return [line.split("\t") for line in text.splitlines()]


def wnids() -> tuple[str, ...]:
    """The 1,000 WordNet ids in the order of the models' logits.

    >>> wnids()[:2], len(wnids())
    (('n01440764', 'n01443537'), 1000)
    """
    return tuple(row[0] for row in _table())


def names() -> tuple[str, ...]:
    """A name for each of the 1,000 classes.

    >>> names()[:2]
    ('tench', 'goldfish')
    """
    return tuple(row[1] for row in _table())


def rendition_index() -> tuple[int, ...]:
    """Which of the 1,000 classes ImageNet-R has.

    >>> rendition_index()[:3], len(rendition_index())
    ((1, 2, 4), 200)
    """
    return tuple(number for number, row in enumerate(_table()) if row[2:] == ["r"])


def clean_folder(path: Path, split: str) -> Path:
    """``PATH/val`` (or ``PATH/train``) where it exists, else PATH itself."""
    inner = path / {"test": "val", "train": "train"}[split]
    return inner if inner.is_dir() else path


def corrupted_folder(path: Path, corruption: str, severity: int) -> Path:
    """``PATH/<corruption>/<severity>``, or the same one level down (archives unpacked one folder each)."""
    for folder in (path, *sorted(path.glob("*/"))):
        if (folder / corruption / str(severity)).is_dir():
            return folder / corruption / str(severity)
    found = ", ".join(sorted(inner.name for inner in path.glob("*"))[:3]) or "nothing"
    raise FileNotFoundError(
        f"{path} has no folder {corruption}/{severity}/<wnid>, the layout of ImageNet-C; found there: {found}."
    )


def labelled(folder: Path, index: Mapping[str, int]) -> tuple[list[Path], list[int]]:
    """Images of ``<wnid>/*`` with the label that ``index`` gives each wnid."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder.")
    inside = sorted(inner for inner in folder.iterdir() if inner.is_dir() and not inner.name.startswith("."))
    foreign = [inner.name for inner in inside if inner.name not in index]
    if foreign:
        raise EataError(
            f"{folder} has the folder {foreign[0]}, which is none of the {len(index)} classes of this set; "
            "expected are folders named by WordNet id, such as n01443537."
        )
    pairs = [(path, index[inner.name]) for inner in inside for path in images.find(inner)]
    if not pairs:
        raise EataError(f"{folder} has no images in folders named by WordNet id (such as n01443537/*.JPEG).")
    return [path for path, _ in pairs], [label for _, label in pairs]


def full_index() -> dict[str, int]:
    """Label of each of the 1,000 wnids."""
    return {wnid: label for label, wnid in enumerate(wnids())}


def rendition_labels() -> dict[str, int]:
    """Label of each of ImageNet-R's 200 wnids, among the 200."""
    return {wnids()[place]: label for label, place in enumerate(rendition_index())}
