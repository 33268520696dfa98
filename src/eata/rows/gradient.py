"""A gradient that claims B rows and stores those that count.

`RowGradient` is a tensor subclass. To autograd it has the shape of the whole batch, so every check passes; each
operation of the backward pass on it arrives at ``__torch_dispatch__``, where a rule (`eata.rows.rules`) computes the
stored rows alone. The rows that are not stored are zero: this is the one invariant, and every rule keeps it.

An operation without a rule gets the dense gradient, which is always right and only slower. What can't be made right
that way (writing in place into a gradient that has no storage for its zero rows) raises `UnsupportedError`, and the
caller takes the full gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

Rule: TypeAlias = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
RULES: dict[Any, Rule] = {}  # by aten operation; a rule that does not apply returns NotImplemented


class UnsupportedError(RuntimeError):
    """The row-sparse backward can't go on; the full gradient has to be taken."""


class Rows:
    """The stored rows of one backward pass.

    Args:
        index: positions of the stored rows in the batch, unique and ascending.
        batch: B.
        weight: how many rows of the batch each stored row stands for in BatchNorm's sums (`eata.rows.batchnorm`).
    """

    def __init__(self, index: Tensor, batch: int, weight: Tensor | None = None) -> None:
        self.index, self.batch, self.count, self.weight = index, batch, len(index), weight
        self.dense: Counter[str] = Counter()  # operations that went dense, for tests and for the curious
        absent = torch.ones(batch, dtype=torch.bool, device=index.device)
        absent[index] = False
        self.absent = absent.nonzero().flatten()


class Place:
    """Where the batch lies in a shape: dimension ``dim`` has size ``outer * B * inner``, the batch in the middle."""

    __slots__ = ("dim", "inner", "outer")

    def __init__(self, dim: int = 0, outer: int = 1, inner: int = 1) -> None:
        self.dim, self.outer, self.inner = dim, outer, inner

    def at(self, dim: int) -> Place:
        """The same layout in another dimension."""
        return Place(dim, self.outer, self.inner)

    def same(self, other: Place) -> bool:
        """Whether both are one place, dimensions counted from the left."""
        return (self.dim, self.outer, self.inner) == (other.dim, other.outer, other.inner)

    def size(self, rows: int) -> int:
        """Size of the dimension for that many rows."""
        return self.outer * rows * self.inner


def is_channels_last(t: Tensor) -> bool:
    """Whether images lie in memory pixel by pixel (and not also channel by channel, as 1x1 images do)."""
    return t.dim() == 4 and not t.is_contiguous() and t.is_contiguous(memory_format=torch.channels_last)


def _picked(t: Tensor, index: Tensor, batch: int, place: Place) -> Tensor:
    """Rows ``index`` of ``t``, in the memory format of ``t``."""
    dim = place.dim
    if place.outer == place.inner == 1:
        if dim == 0 and is_channels_last(t):
            return t.permute(0, 2, 3, 1).index_select(0, index).permute(0, 3, 1, 2)
        return t.index_select(dim, index)
    shape = list(t.shape)
    apart = t.reshape(*shape[:dim], place.outer, batch, place.inner, *shape[dim + 1 :])
    shape[dim] = place.size(len(index))
    return apart.index_select(dim + 1, index).reshape(shape)


def take(t: Tensor, rows: Rows, place: Place) -> Tensor:
    """The stored rows of a dense tensor."""
    return _picked(t, rows.index, rows.batch, place)


def shaped(t: Tensor, rows: Rows, place: Place) -> Tensor:
    """A tensor as `take` gives, for kernels that look at its shape and layout only: no copy."""
    return t.narrow(place.dim, 0, place.size(rows.count))


def take_if_zero_elsewhere(t: Tensor, rows: Rows, place: Place) -> Tensor | None:
    """The stored rows of a dense gradient if all others are exactly zero, else None: looked at, so never wrong."""
    if place.dim >= t.dim() or t.shape[place.dim] != place.size(rows.batch):
        return None
    for absent in (rows.absent[:1], rows.absent):  # one row tells most dense gradients
        if bool(_picked(t, absent, rows.batch, place).any()):
            return None
    return take(t, rows, place)


class RowGradient(Tensor):
    """A gradient with rows of zeros that are not stored.

    Attributes:
        kept: the stored rows.
        rows: which rows they are.
        place: where the batch lies in the shape.
    """

    kept: Tensor
    rows: Rows
    place: Place

    @staticmethod
    def __new__(cls, kept: Tensor, rows: Rows, place: Place) -> RowGradient:
        shape = list(kept.shape)
        shape[place.dim] = place.size(rows.batch)
        new: RowGradient = Tensor._make_wrapper_subclass(cls, shape, dtype=kept.dtype, device=kept.device)
        new.kept, new.rows, new.place = kept, rows, place
        return new

    def __repr__(self) -> str:  # type: ignore[override]
        return f"RowGradient({tuple(self.kept.shape)} of {tuple(self.shape)})"

    def like(self, kept: Tensor, place: Place | None = None) -> RowGradient:
        """Other values in the same rows."""
        return RowGradient(kept, self.rows, self.place if place is None else place)

    def take(self, t: Tensor) -> Tensor:
        """The stored rows of a dense tensor that lies as this gradient does."""
        return take(t, self.rows, self.place)

    def dense(self) -> Tensor:
        """All rows."""
        place, dim = self.place, self.place.dim
        shape = list(self.kept.shape)
        apart = self.kept.reshape(*shape[:dim], place.outer, self.rows.count, place.inner, *shape[dim + 1 :])
        full = apart.new_zeros(*shape[:dim], place.outer, self.rows.batch, place.inner, *shape[dim + 1 :])
        return full.index_copy_(dim + 1, self.rows.index, apart).reshape(self.shape)

    # Nothing above dispatch is special about this tensor.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        rule = RULES.get(func)
        if rule is not None:
            result = rule(func, args, kwargs)
            if result is not NotImplemented:
                return result
        return _densely(func, args, kwargs)


# Views of the batch dimension itself. A copy serves as well: no derivative formula writes through these.
_READ_ONLY_VIEWS = ("aten::slice", "aten::select", "aten::narrow", "aten::split", "aten::unbind", "aten::view")


def _densely(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``func`` on dense gradients."""
    schema = func._schema
    writes_or_aliases = [a for a in schema.arguments if a.alias_info is not None]
    if writes_or_aliases and not schema.name.startswith(_READ_ONLY_VIEWS):
        given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
        if any(isinstance(given.get(a.name), RowGradient) for a in writes_or_aliases):
            raise UnsupportedError(
                f"{func} writes into, or is a view of, a gradient of which only some rows are stored"
            )

    def dense(value: Any) -> Any:
        if not isinstance(value, RowGradient):
            return value
        value.rows.dense[str(func)] += 1
        return value.dense()

    return func(*tree_map(dense, args), **tree_map(dense, kwargs))


def reenter(gradient: Tensor, rows: Rows) -> Tensor | None:
    """A dense gradient that is zero outside of the stored rows, as a `RowGradient` again; None if it is neither."""
    if isinstance(gradient, RowGradient) or gradient.dim() == 0:
        return None
    place = Place()
    if gradient.shape[0] != rows.batch:
        return None
    kept = take_if_zero_elsewhere(gradient, rows, place)
    return None if kept is None else RowGradient(kept, rows, place)
