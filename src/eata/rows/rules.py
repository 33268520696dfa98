"""How each operation of a backward pass runs on the stored rows: one small fact for each family.

They rest on two facts. A gradient enters every derivative linearly, so rows of zeros stay zeros. And an operation that
treats samples alike (elementwise, convolution, pooling, a norm within the sample, a product with a weight) can be run
on some of them alone. Where an operation *sums* over the batch (a weight's gradient), zero rows add nothing.

A rule returns NotImplemented where its fact does not hold (say, softmax over the batch dimension).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from eata.rows.gradient import RULES, RowGradient, Rule, is_channels_last, shaped, take, take_if_zero_elsewhere

aten = torch.ops.aten


def rule(*functions: Any) -> Callable[[Rule], Rule]:
    """Register a rule for aten operations."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(functions, function))
        return function

    return register


def _batch_first(g: Any) -> bool:
    return isinstance(g, RowGradient) and g.place.dim == 0


# --- elementwise ------------------------------------------------------------------------------------------------------


def _elementwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], g: RowGradient) -> Any:
    """Run on the stored rows of every operand; dimensions are aligned at the right, as broadcasting does."""
    from_right = g.place.dim - g.dim()
    for a in args:
        if isinstance(a, RowGradient) and not (
            a.rows is g.rows and a.place.at(a.place.dim - a.dim()).same(g.place.at(from_right))
        ):
            return NotImplemented

    def kept(a: Any) -> Any:
        if isinstance(a, RowGradient):
            return a.kept
        if isinstance(a, Tensor) and a.dim() >= -from_right and a.shape[from_right] != 1:
            return take(a, g.rows, g.place.at(a.dim() + from_right))
        return a

    result = func(*map(kept, args), **kwargs)
    if isinstance(result, tuple):
        return tuple(g.like(r, g.place.at(r.dim() + from_right)) for r in result)
    if func._schema.is_mutable:
        return args[0]
    return g.like(result, g.place.at(result.dim() + from_right))


# The gradient is the first operand and enters linearly; the others are values of the forward pass.
@rule(
    aten.div.Tensor, aten.div.Scalar, aten.div_.Tensor, aten.div_.Scalar, aten.neg.default, aten.mul.Scalar,
    aten.mul_.Tensor, aten.mul_.Scalar,
    aten.gelu_backward.default, aten.silu_backward.default,
    aten.sigmoid_backward.default, aten.tanh_backward.default, aten.hardtanh_backward.default,
    aten.hardswish_backward.default, aten.hardsigmoid_backward.default, aten.leaky_relu_backward.default,
    aten.elu_backward.default, aten.softplus_backward.default, aten.mish_backward.default,
    aten.log_sigmoid_backward.default, aten.hardshrink_backward.default, aten.softshrink_backward.default,
    aten.rrelu_with_noise_backward.default, aten.native_dropout_backward.default, aten.logit_backward.default,
)  # fmt: skip
def _first_operand(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    g, *others = args
    if not isinstance(g, RowGradient) or any(isinstance(o, RowGradient) for o in others):
        return NotImplemented
    return _elementwise(func, args, kwargs, g)


@rule(aten.threshold_backward.default)
def _relu(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As above; the copy of the stored rows takes the result, since fresh memory is what costs here."""
    g, output, threshold = args
    if not isinstance(g, RowGradient) or isinstance(output, RowGradient) or g.dim() != output.dim():
        return NotImplemented
    own = g.take(output)
    return g.like(aten.threshold_backward.grad_input(g.kept, own, threshold, grad_input=own))


@rule(aten.mul.Tensor)
def _product(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Zero times anything finite is zero, whichever side it stands on."""
    return _elementwise(func, args, kwargs, next(a for a in args if isinstance(a, RowGradient)))


@rule(aten.clone.default, aten.detach.default, aten.alias.default, aten._to_copy.default, aten.contiguous.default)
def _copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    g: RowGradient = args[0]
    if kwargs.get("memory_format") is torch.channels_last and g.kept.dim() != 4:
        return NotImplemented
    return g.like(func(g.kept, **kwargs))


@rule(aten.add.Tensor, aten.sub.Tensor, aten.add_.Tensor, aten.sub_.Tensor)
def _sum_of_two(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Two gradients meet (a residual connection): zero where both are, so a dense one is looked at."""
    a, b = args[:2]
    g = a if isinstance(a, RowGradient) else b
    other = b if g is a else a
    if not isinstance(other, RowGradient):
        if func._schema.is_mutable or not isinstance(other, Tensor) or other.shape != g.shape:
            return NotImplemented
        kept = take_if_zero_elsewhere(other, g.rows, g.place)
        if kept is None:
            return NotImplemented
        other = g.like(kept)
        args = (g, other) if g is a else (other, g)
    return _elementwise(func, args, kwargs, g)


@rule(aten.masked_fill.Scalar, aten.masked_fill_.Scalar)
def _masked(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not isinstance(args[0], RowGradient) or args[2] != 0:
        return NotImplemented
    return _elementwise(func, args, kwargs, args[0])


@rule(aten.masked_fill.Tensor, aten.masked_fill_.Tensor)
def _masked_by_tensor(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not isinstance(args[0], RowGradient) or isinstance(args[2], RowGradient) or bool(args[2] != 0):
        return NotImplemented
    return _elementwise(func, args, kwargs, args[0])


@rule(aten.where.self)
def _either(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Both branches are zero outside of the stored rows, or one is the number zero."""
    for branch in args[1:]:
        if not isinstance(branch, RowGradient) and (branch.dim() or bool(branch != 0)):
            return NotImplemented
    return _elementwise(func, args, kwargs, next(b for b in args[1:] if isinstance(b, RowGradient)))


@rule(aten._prelu_kernel_backward.default)
def _prelu(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _first_operand(func, args, kwargs)


@rule(aten.glu_backward.default)
def _glu(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    g, x, dim = args
    if not isinstance(g, RowGradient) or dim % g.dim() == g.place.dim:
        return NotImplemented
    return g.like(func(g.kept, g.take(x), dim))


# --- convolution, normalization within the sample, pooling ------------------------------------------------------------


@rule(aten.convolution_backward.default)
def _convolution(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """By sample, and summed over the batch for the weight; the input is read for the weight's gradient only."""
    g, x, *others = args
    if not _batch_first(g) or isinstance(x, RowGradient):
        return NotImplemented
    mask = others[-1]
    kept_x = g.take(x) if mask[1] else shaped(x, g.rows, g.place)
    dx, dweight, dbias = func(g.kept, kept_x, *others)
    return (g.like(dx) if mask[0] else None), dweight, dbias


@rule(aten.native_layer_norm_backward.default)
def _layer_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    g, x, shape, mean, rstd, weight, bias, mask = args
    if not isinstance(g, RowGradient) or g.place.dim >= x.dim() - len(shape):
        return NotImplemented
    dx, dweight, dbias = func(g.kept, g.take(x), shape, g.take(mean), g.take(rstd), weight, bias, mask)
    return (g.like(dx) if mask[0] else None), dweight, dbias


@rule(aten.native_group_norm_backward.default)
def _group_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    g, x, mean, rstd, weight, _, *others = args
    if not _batch_first(g):
        return NotImplemented
    kept_x = g.take(x)
    # Both in one memory format; without an input gradient the channels-last kernel of PyTorch 2.13 crashes.
    last = others[-1][0] and is_channels_last(kept_x)
    layout = torch.channels_last if last else torch.contiguous_format
    kept_g, kept_x = g.kept.contiguous(memory_format=layout), kept_x.contiguous(memory_format=layout)
    count = g.place.size(g.rows.count)
    dx, dweight, dbias = func(kept_g, kept_x, g.take(mean), g.take(rstd), weight, count, *others)
    return (g.like(dx) if others[-1][0] else None), dweight, dbias


@rule(aten.max_pool2d_with_indices_backward.default, aten.max_pool3d_with_indices_backward.default)
def _max_pool(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    g, x, *how, indices = args
    if not _batch_first(g):
        return NotImplemented
    return g.like(func(g.kept, shaped(x, g.rows, g.place), *how, g.take(indices)))


@rule(aten.adaptive_max_pool2d_backward.default, aten.adaptive_max_pool3d_backward.default)
def _adaptive_max_pool(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    g, x, indices = args
    return g.like(func(g.kept, shaped(x, g.rows, g.place), g.take(indices))) if _batch_first(g) else NotImplemented


@rule(
    aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default, aten._adaptive_avg_pool2d_backward.default,
    aten._adaptive_avg_pool3d_backward.default, aten.reflection_pad1d_backward.default,
    aten.reflection_pad2d_backward.default, aten.reflection_pad3d_backward.default,
    aten.replication_pad1d_backward.default, aten.replication_pad2d_backward.default,
    aten.replication_pad3d_backward.default,
)  # fmt: skip
def _average_pool(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The input gives its shape only."""
    g, x, *how = args
    return g.like(func(g.kept, shaped(x, g.rows, g.place), *how)) if _batch_first(g) else NotImplemented


@rule(
    aten.upsample_nearest1d_backward.default, aten.upsample_nearest2d_backward.default,
    aten.upsample_nearest3d_backward.default, aten._upsample_nearest_exact2d_backward.default,
    aten.upsample_linear1d_backward.default, aten.upsample_bilinear2d_backward.default,
    aten.upsample_bicubic2d_backward.default, aten.upsample_trilinear3d_backward.default,
    aten._upsample_bilinear2d_aa_backward.default,
)  # fmt: skip
def _upsample(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    g, output_size, input_size, *how = args
    if not _batch_first(g):
        return NotImplemented
    return g.like(func(g.kept, output_size, [len(g.kept), *input_size[1:]], *how))


@rule(
    aten.pixel_shuffle.default, aten.pixel_unshuffle.default, aten.channel_shuffle.default, aten.im2col.default,
    aten.col2im.default,
)  # fmt: skip
def _rearranged(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Within each sample; fewer than three dimensions behind the batch mean that there is no batch dimension."""
    g, *how = args
    behind = 2 if func in (aten.im2col.default, aten.col2im.default) else 3
    least = 3 if func is aten.col2im.default else behind + 1
    return g.like(func(g.kept, *how)) if _batch_first(g) and g.dim() >= least else NotImplemented


# --- matrices and attention -------------------------------------------------------------------------------------------


@rule(aten.mm.default)
def _matrix_product(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The batch is a free dimension of the result, or the one summed over (a weight's gradient)."""
    a, b = args
    if isinstance(a, RowGradient) and isinstance(b, RowGradient):
        return NotImplemented
    if isinstance(a, RowGradient):
        if a.place.dim == 0:
            return a.like(func(a.kept, b))
        return func(a.kept, take(b, a.rows, a.place.at(0)))
    if b.place.dim == 1:
        return b.like(func(a, b.kept))
    return func(take(a, b.rows, b.place.at(1)), b.kept)


@rule(aten.bmm.default)
def _batched_matrix_product(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    a, b = args
    g: RowGradient = a if isinstance(a, RowGradient) else b
    if isinstance(a, RowGradient) and isinstance(b, RowGradient):
        return g.like(func(a.kept, b.kept)) if a.place.same(b.place) and g.place.dim == 0 else NotImplemented
    if g.place.dim == 0:
        return g.like(func(*(t.kept if t is g else g.take(t) for t in args)))
    if g is a:  # (n, rows, k): free; (n, k, rows): summed over
        return g.like(func(a.kept, b)) if g.place.dim == 1 else func(a.kept, take(b, g.rows, g.place.at(1)))
    return g.like(func(a, b.kept)) if g.place.dim == 2 else func(take(a, g.rows, g.place.at(2)), b.kept)


@rule(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
def _softmax(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    g, output, dim, dtype = args
    if not isinstance(g, RowGradient) or dim % g.dim() == g.place.dim:
        return NotImplemented
    return g.like(func(g.kept, g.take(output), dim, dtype))


@rule(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def _attention(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    g, *others = args
    if not _batch_first(g):
        return NotImplemented
    values, how = others[:5], others[5:]  # query, key, value, output, logsumexp
    attention_mask = kwargs.get("attn_mask")
    if attention_mask is not None and attention_mask.dim() == 4 and attention_mask.shape[0] != 1:
        kwargs = kwargs | {"attn_mask": g.take(attention_mask)}
    return tuple(g.like(d) for d in func(g.kept, *map(g.take, values), *how, **kwargs))
