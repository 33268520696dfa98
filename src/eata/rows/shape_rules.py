"""As `eata.rows.rules`, for operations that sum over dimensions or change the shape."""

from __future__ import annotations

import math
from typing import Any

import torch

from eata.rows.gradient import Place, RowGradient, take_if_zero_elsewhere
from eata.rows.rules import rule

aten = torch.ops.aten


@rule(aten.is_same_size.default)
def _same_size(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0].shape == args[1].shape


@rule(aten.sum.default)
def _total(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(args[0].kept, **kwargs)


@rule(aten.sum.dim_IntList)
def _sum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Zero rows add nothing to a sum over the batch; a sum over other dimensions keeps the rows."""
    g: RowGradient = args[0]
    dims = [d % g.dim() for d in args[1]] if args[1] else list(range(g.dim()))
    keep = args[2] if len(args) > 2 else False
    result = func(g.kept, dims, keep, **kwargs)
    at = g.place.dim
    return result if at in dims else g.like(result, g.place.at(at if keep else at - sum(d < at for d in dims)))


@rule(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten._reshape_alias.default)
def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The batch stays where it is in memory order; it needs one dimension of the new shape that holds it whole."""
    g: RowGradient = args[0]
    shape = list(args[1])
    if -1 in shape:
        shape[shape.index(-1)] = g.numel() // -math.prod(shape)
    before = math.prod(g.shape[: g.place.dim]) * g.place.outer  # elements' worth of dimensions in front of the batch
    front = 1
    for dim, size in enumerate(shape):
        if before % front == 0 and size and (front * size) % (before * g.rows.batch) == 0:
            place = Place(dim, before // front, front * size // (before * g.rows.batch))
            kept_shape = [*shape[:dim], place.size(g.rows.count), *shape[dim + 1 :]]
            return g.like(g.kept.reshape(kept_shape), place)
        front *= size
    return NotImplemented


@rule(aten.permute.default)
def _permute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    g, order = args[0], [d % args[0].dim() for d in args[1]]
    return g.like(g.kept.permute(order), g.place.at(order.index(g.place.dim)))


@rule(aten.transpose.int)
def _transpose(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    g, a, b = args[0], args[1] % args[0].dim(), args[2] % args[0].dim()
    return g.like(g.kept.transpose(a, b), g.place.at({a: b, b: a}.get(g.place.dim, g.place.dim)))


@rule(aten.t.default)
def _t(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    g = args[0]
    return g.like(g.kept.t(), g.place.at(1 - g.place.dim if g.dim() == 2 else 0))


@rule(aten.unsqueeze.default)
def _unsqueeze(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    g, dim = args[0], args[1] % (args[0].dim() + 1)
    return g.like(g.kept.unsqueeze(dim), g.place.at(g.place.dim + (dim <= g.place.dim)))


@rule(aten.squeeze.dim, aten.squeeze.dims)
def _squeeze(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The batch has more than one row (else nothing is sparse), so its dimension stays."""
    g = args[0]
    given = [args[1]] if isinstance(args[1], int) else args[1]
    dims = [d for d in {d % g.dim() for d in given} if g.shape[d] == 1]
    return g.like(g.kept.squeeze(tuple(dims)), g.place.at(g.place.dim - sum(d < g.place.dim for d in dims)))


@rule(aten.expand.default)
def _expand(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    g, shape = args[0], list(args[1])
    dim = g.place.dim + len(shape) - g.dim()
    shape[dim] = g.kept.shape[g.place.dim]
    return g.like(g.kept.expand(shape), g.place.at(dim))


@rule(aten.slice_backward.default)
def _slice_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    g, shape, dim = args[0], list(args[1]), args[2] % len(args[1])
    if dim == g.place.dim:
        return NotImplemented
    shape[g.place.dim] = g.kept.shape[g.place.dim]
    return g.like(func(g.kept, shape, dim, *args[3:]))


@rule(aten.select_backward.default)
def _select_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    g, shape, dim = args[0], list(args[1]), args[2] % len(args[1])
    at = g.place.dim + (dim <= g.place.dim)
    shape[at] = g.kept.shape[g.place.dim]
    return g.like(func(g.kept, shape, dim, args[3]), g.place.at(at))


@rule(aten.slice.Tensor)
def _slice(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    g, dim = args[0], (args[1] if len(args) > 1 else 0) % args[0].dim()
    return NotImplemented if dim == g.place.dim else g.like(func(g.kept, *args[1:]))


@rule(aten.select.int)
def _select(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    g, dim = args[0], args[1] % args[0].dim()
    if dim == g.place.dim:
        return NotImplemented
    return g.like(func(g.kept, dim, args[2]), g.place.at(g.place.dim - (dim < g.place.dim)))


@rule(aten.split.Tensor, aten.split_with_sizes.default)
def _split(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    g, sizes, dim = args[0], args[1], (args[2] if len(args) > 2 else 0) % args[0].dim()
    return NotImplemented if dim == g.place.dim else [g.like(part) for part in func(g.kept, sizes, dim)]


@rule(aten.flip.default, aten.roll.default)
def _turned(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    g, dims = args[0], args[-1]
    if not dims or g.place.dim in [d % g.dim() for d in dims] or (func is aten.roll.default and len(args) < 3):
        return NotImplemented
    return g.like(func(g.kept, *args[1:]))


@rule(aten.constant_pad_nd.default)
def _pad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Padding (or cropping: the backward of padding) with zeros, counted from the last dimension."""
    g, pad = args[0], args[1]
    padded = [g.dim() - 1 - i for i in range(len(pad) // 2) if pad[2 * i] or pad[2 * i + 1]]
    if (len(args) > 2 and args[2] != 0) or g.place.dim in padded:
        return NotImplemented
    while len(pad) // 2 >= g.dim() - g.place.dim:  # zeros for the batch dimension and those in front of it
        pad = pad[:-2]
    return g.like(func(g.kept, pad)) if not any(d < g.place.dim for d in padded) else NotImplemented


@rule(aten.cat.default, aten.stack.default)
def _join(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Parts beside each other within the sample; a dense part (zeros, mostly) is looked at."""
    parts = list(args[0])
    g: RowGradient = next(p for p in parts if isinstance(p, RowGradient))
    stacked = func is aten.stack.default
    dim = (args[1] if len(args) > 1 else 0) % (g.dim() + stacked)
    if dim == g.place.dim and not stacked:
        return NotImplemented
    kept = []
    for part in parts:
        if isinstance(part, RowGradient):
            if part.rows is not g.rows or not part.place.same(g.place):
                return NotImplemented
            kept.append(part.kept)
        else:
            rows = take_if_zero_elsewhere(part, g.rows, g.place)
            if rows is None:
                return NotImplemented
            kept.append(rows)
    return g.like(func(kept, dim), g.place.at(g.place.dim + (stacked and dim <= g.place.dim)))
