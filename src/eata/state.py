"""What an adapter remembers, and its file: safetensors, with the structure as JSON in the metadata. Never pickle."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from eata.errors import StateError
from eata.files import replacing

FORMAT = 2


class Memory:
    """What an object remembers from batch to batch, declared once: to read, to put back, to start anew, to move.

    The values are the object's attributes. They are trees of dicts, lists, numbers, strings, None and tensors, or
    generators of random numbers, whose state counts.

    Args:
        owner: has the attributes.

    >>> class Counter:
    ...     pass
    >>> one = Counter()
    >>> memory = Memory(one)
    >>> memory.add("seen", 0)
    >>> one.seen = 5
    >>> memory.read()
    {'seen': 5}
    >>> memory.reset()
    >>> one.seen
    0
    """

    def __init__(self, owner: object) -> None:
        self._owner = weakref.ref(owner)  # a cycle would keep a forgotten adapter, and its hold on the net, alive
        self._initial: dict[str, Any] = {}

    def add(self, name: str, value: Any) -> None:
        """Remember the attribute ``name``, from ``value`` on; a reset comes back to it."""
        setattr(self._owner(), name, value)
        self._initial[name] = copied(value)

    def read(self) -> dict[str, Any]:
        """A copy of everything."""
        return {name: copied(getattr(self._owner(), name)) for name in self._initial}

    def write(self, saved: Mapping[str, Any], like: Tensor | None = None) -> None:
        """Take over what ``read`` gave; tensors go to the device of ``like``."""
        for name in self._initial:
            value, now = saved[name], getattr(self._owner(), name)
            if isinstance(now, torch.Generator):
                now.set_state(value.cpu())
            else:
                setattr(self._owner(), name, copied(value) if like is None else moved(copied(value), like.device))

    def reset(self) -> None:
        """Back to the first values."""
        self.write(self._initial)

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move tensors to a device; floating ones become ``dtype``."""
        self._initial = moved(self._initial, device, dtype)
        for name in self._initial:
            setattr(self._owner(), name, moved(getattr(self._owner(), name), device, dtype))


def require_fit(saved: Any, own: Mapping[str, Any]) -> None:
    """Raise unless a state is of the same method, settings and source model as the adapter's own.

    >>> require_fit({"method": "Tent"}, {"method": "EATA"})
    Traceback (most recent call last):
    ...
    eata.errors.StateError: The state is of eata.Tent, and this is eata.EATA.
    """
    if not isinstance(saved, dict) or "method" not in saved:
        raise StateError("This is not an adaptation state; pass what state_dict() gave.")
    if saved["method"] != own["method"]:
        raise StateError(f"The state is of eata.{saved['method']}, and this is eata.{own['method']}.")
    _require_all(own, saved)
    if saved["source"] != own["source"]:
        raise StateError("The state belongs to another model: its source weights differ; load those weights first.")
    for name, value in own["settings"].items():
        if saved["settings"].get(name) != value:
            raise StateError(
                f"The state was saved with {name}={saved['settings'].get(name)!r}, but this model has "
                f"{name}={value!r}; build it with the same."
            )
    _require_all(own["memory"], saved["memory"])


def _require_all(names: Iterable[str], saved: Mapping[str, Any]) -> None:
    for name in names:
        if name not in saved:
            raise StateError(f"The state has no '{name}', so it is of another version of eata; adapt anew.")


def copied(tree: Any) -> Any:
    """A copy that shares nothing; a generator's is its state."""
    if isinstance(tree, Tensor):
        return tree.detach().clone()
    if isinstance(tree, torch.Generator):
        return tree.get_state()
    if isinstance(tree, dict):
        return {key: copied(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [copied(value) for value in tree]
    return tree


def moved(tree: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """The tree with its tensors on ``device``, floating ones as ``dtype`` if given; bytes (of generators) stay."""
    if isinstance(tree, Tensor):
        return tree if tree.dtype == torch.uint8 else tree.to(device, dtype if tree.is_floating_point() else None)
    if isinstance(tree, dict):
        return {key: moved(value, device, dtype) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [moved(value, device, dtype) for value in tree]
    return tree


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
