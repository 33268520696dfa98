"""Adaptation state on disk: one safetensors file, its structure as JSON in the metadata. Never pickle."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from eata.errors import StateError
from eata.files import replacing

FORMAT = 1


def write(path: str | os.PathLike[str], state: Any) -> None:
    """Write a tree of dicts, lists, numbers, strings, None and tensors; the file is whole or not there."""
    tensors: dict[str, Tensor] = {}
    metadata = {"eata": str(FORMAT), "state": json.dumps(_pack(state, tensors))}
    with replacing(path) as temporary:
        save_file(tensors, temporary, metadata)


def read(path: str | os.PathLike[str]) -> Any:
    """Read what ``write`` wrote.

    Raises:
        StateError: the file is missing, truncated, not ours, or of a newer version.
    """
    if not Path(path).is_file():
        raise StateError(f"There is no state file {path}; save one with model.save().")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if "eata" not in metadata:
                raise StateError(f"{path} is a safetensors file, but not a state saved by eata.")
            if int(metadata["eata"]) > FORMAT:
                raise StateError(
                    f"{path} was saved by a newer eata (format {metadata['eata']}, not {FORMAT}); upgrade eata."
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (safe_open is no mapping)
    except SafetensorError as problem:
        raise StateError(f"{path} is truncated or not a state file ({problem}); use an earlier copy.") from None
    return _unpack(json.loads(metadata["state"]), tensors)


def _pack(value: Any, tensors: dict[str, Tensor]) -> Any:
    """JSON for ``value``; tensors go to ``tensors`` and leave their number behind."""
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().cpu().contiguous().clone()
        return {"tensor": name}
    if isinstance(value, dict):  # as pairs: JSON would turn the optimizer's integer keys into strings
        return {"dict": [[key, _pack(item, tensors)] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        return {"list": [_pack(item, tensors) for item in value]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"A {type(value).__name__} can't be saved in an adaptation state.")


def _unpack(value: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _unpack(item, tensors) for key, item in content}
    return [_unpack(item, tensors) for item in content]


def digest(named: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 over names, shapes and values: the same weights give the same text on every device.

    >>> digest([("w", torch.zeros(2))])[:8] == digest([("w", torch.zeros(2))])[:8]
    True
    """
    total = sha256()
    for name, tensor in sorted(named, key=lambda pair: pair[0]):
        flat = tensor.detach().cpu().contiguous()
        total.update(f"{name} {tuple(flat.shape)} {flat.dtype}".encode())
        total.update(flat.view(-1).view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    return total.hexdigest()
