"""Trained weights with the record of what made them: ``NAME.safetensors`` and ``NAME.json`` side by side."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import nn

from eata.errors import EataError
from eata.files import replacing
from eata.models.resnet26 import Norm, ResNet26

KINDS: dict[str, tuple[Norm, bool]] = {
    "resnet26-bn": ("bn", False),
    "resnet26-gn": ("gn", False),
    "resnet26-gn-rotation": ("gn", True),
}


def build(kind: str, classes: int) -> ResNet26:
    """An untrained ResNet-26 of one of ``KINDS``."""
    if kind not in KINDS:
        raise EataError(f"There is no model {kind!r} to train; take one of {', '.join(KINDS)}.")
    norm, rotation = KINDS[kind]
    return ResNet26(classes, norm, rotation)


@dataclasses.dataclass(frozen=True)
class Record:
    """What made a file of weights, and how well it does.

    Args:
        model: one of ``KINDS``.
        data: the data set, ``"cifar10"`` or ``"digits"``.
        class_names: one for each logit.
        command: gives these weights again.
        seed: of initial weights, order and augmentation.
        recipe: the fields of the recipe.
        commit: of this library's source; empty where it was not run from a git repository.
        torch: its version.
        error: on the clean test set, in per cent, after the last epoch (nothing was chosen by it).
        images: in that test set.
        mean: subtracted from each channel (pixels from 0 to 1).
        std: divides each channel.
        sha256: of the file of weights.
    """

    model: str
    data: str
    class_names: tuple[str, ...]
    command: str
    seed: int
    recipe: dict[str, Any]
    commit: str
    torch: str
    error: float
    images: int
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    input_size: tuple[int, ...] = (3, 32, 32)
    sha256: str = ""


def write(path: Path, net: nn.Module, record: Record) -> None:
    """Write the weights and, beside them, their record with the hash of the file."""
    content = safetensors.torch.save({name: value.contiguous() for name, value in net.state_dict().items()})
    record = dataclasses.replace(record, sha256=hashlib.sha256(content).hexdigest())
    with replacing(path) as temporary:
        temporary.write_bytes(content)
    with replacing(path.with_suffix(".json")) as temporary:
        temporary.write_text(json.dumps(dataclasses.asdict(record), indent=2) + "\n")


def read(path: Path) -> Record:
    """The record beside a file of weights."""
    beside = path.with_suffix(".json")
    try:
        fields = json.loads(beside.read_text())
        for name in ("class_names", "mean", "std", "input_size"):
            fields[name] = tuple(fields[name])
        return Record(**fields)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} has no record {beside.name} beside it; `eata train` writes both.") from None
    except (ValueError, KeyError, TypeError) as problem:
        raise EataError(f"{beside} is no record of `eata train` ({problem}).") from None


def restore(path: Path) -> ResNet26:
    """The network of a file of weights and its record; the hash is checked."""
    record = read(path)
    content = path.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != record.sha256:
        raise EataError(
            f"{path} is damaged: its SHA-256 is {found[:12]}, its record says {record.sha256[:12]}. "
            "Install eata again, or train it again."
        )
    net = build(record.model, len(record.class_names))
    net.load_state_dict(safetensors.torch.load(content))
    return net
