"""A forward pass that keeps only what training the scale and shift of normalization layers needs.

PyTorch keeps the input of each convolution for the gradient of its weight, although the weight is frozen; the output of
each ReLU, although its sign would do; and 64-bit indices of each maximum. Here

- a convolution with frozen weights keeps nothing but the weights (its input's gradient does not depend on the input),
- ReLU keeps one byte for each element: whether it was positive,
- max pooling keeps its indices in 32 bits,
- BatchNorm by batch statistics (`eata.rows.batchnorm`) keeps its normalized input in 16 bits (float16).

On the CPU, what is kept (from 1 MB on) goes back to the system as soon as the backward pass is done with it, and what
glibc holds free goes back after each forward pass (`eata.allocator`): less memory, at the price of fresh pages.

The first three change no gradient; the last one changes it by rounding (`benchmarks.memory` says by how much).

`SWAPS` maps a torch function to its lean form; the form returns NotImplemented where it does not apply.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from eata.allocator import block_like
from eata.rows.gradient import RowGradient, is_channels_last

aten = torch.ops.aten


def _pair(value: int | Sequence[int]) -> tuple[int, ...]:
    return (value, value) if isinstance(value, int) else tuple(value) * (2 // len(value))


class _FrozenConvolution(torch.autograd.Function):
    """Convolution whose weights get no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *how: Any) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.how, ctx.shape = how, x.shape[1:]
        return torch.conv2d(x, weight, bias, *how)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        *how, groups = ctx.how
        kept = g.kept if isinstance(g, RowGradient) else g
        x = kept.new_empty(1).expand(len(kept), *ctx.shape)  # read for its shape only
        (dx, _, _) = aten.convolution_backward(kept, x, weight, None, *how, False, (0, 0), groups, (True, False, False))
        return (g.like(dx) if isinstance(g, RowGradient) else dx), *[None] * 6


class _MaskedReLU(torch.autograd.Function):
    """ReLU that keeps the signs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, inplace: bool) -> Tensor:
        y = x.relu_() if inplace else x.relu()
        if inplace:
            ctx.mark_dirty(x)
        ctx.save_for_backward(torch.gt(y, 0, out=block_like(y, torch.bool)))
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (positive,) = ctx.saved_tensors
        return g * positive, None


class _NarrowMaxPool(torch.autograd.Function):
    """Max pooling with 32-bit indices."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *how: Any) -> Tensor:
        y, indices = aten.max_pool2d_with_indices(x, *how)
        ctx.save_for_backward(block_like(indices, torch.int32).copy_(indices))
        ctx.how, ctx.shape, ctx.last = how, x.shape[1:], is_channels_last(x)
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (indices,) = ctx.saved_tensors
        rows = g if isinstance(g, RowGradient) else None
        kept, indices = (g, indices) if rows is None else (rows.kept, rows.take(indices))
        layout = torch.channels_last if ctx.last else torch.contiguous_format
        x = torch.empty_like(kept[:, :, :1, :1].expand(len(kept), *ctx.shape), memory_format=layout)
        dx = aten.max_pool2d_with_indices_backward(
            kept.contiguous(memory_format=layout), x, *ctx.how, indices.long().contiguous(memory_format=layout)
        )
        return (dx if rows is None else rows.like(dx)), *[None] * 5


def _applies(x: Any, *frozen: Tensor | None) -> bool:
    """A batch of images with a gradient to come, weights without, and no autocast (which casts between the lines)."""
    return (
        isinstance(x, Tensor)
        and x.dim() == 4
        and x.requires_grad
        and not any(weight is not None and weight.requires_grad for weight in frozen)
        and not torch.is_autocast_enabled(x.device.type)
    )


def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    if isinstance(padding, str) or not _applies(x, weight, bias):
        return NotImplemented
    return _FrozenConvolution.apply(x, weight, bias, _pair(stride), _pair(padding), _pair(dilation), groups)  # type: ignore[no-untyped-call]


def _relu(x: Tensor, inplace: bool = False) -> Any:
    return _MaskedReLU.apply(x, inplace) if _applies(x) else NotImplemented  # type: ignore[no-untyped-call]


def _relu_in_place(x: Tensor) -> Any:
    return _relu(x, inplace=True)


def _max_pool(
    x: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    if return_indices or not _applies(x):
        return NotImplemented
    step = kernel_size if stride is None or stride == [] else stride
    return _NarrowMaxPool.apply(x, _pair(kernel_size), _pair(step), _pair(padding), _pair(dilation), ceil_mode)  # type: ignore[no-untyped-call]


SWAPS: dict[Any, Callable[..., Any]] = {
    torch.conv2d: _convolution,
    F.relu: _relu,
    torch.relu: _relu,
    Tensor.relu: _relu,
    torch.relu_: _relu_in_place,
    Tensor.relu_: _relu_in_place,
    F.max_pool2d: _max_pool,
    torch.max_pool2d: _max_pool,
}
