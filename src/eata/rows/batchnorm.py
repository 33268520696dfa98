"""BatchNorm with the batch's own statistics: the one layer that couples samples, so the one approximation.

With N values a channel, scale s = weight / std, and y the normalized input, the gradient of row i is

    dx_i = s (dy_i - (sum dy) / N - y_i (sum dy y) / N),

with the sums over the whole batch. So rows that were not chosen get a gradient too, through the mean and the variance,
and hand it down to the layers below. It is small and alike from row to row: a few rows can stand for all. Each stored
row k (the chosen ones, and some *stand-ins*) therefore counts for w_k rows of the batch in what mean and variance send
back, with sum w_k = B:

    dx_k = s (dy_k - w_k ((sum dy) / N + y_k (sum dy y) / N)),

where dy is already the sum over the rows that k stands for. w = 1 with all rows stored is the exact gradient; w = B/B'
without stand-ins takes the chosen rows for the batch (biased, since confident samples are not typical ones).

Where the statistics are a mixture, a share p of fixed ones and 1 - p of the batch's, y is normalized by the mixture,
both sums count 1 - p, and y_i in front of the last one is centred by the batch's own mean.

Which rows stand in, and their weights, is a quadrature problem: the weighted sum of what describes a row shall match
the sum over the batch. A row is described by its mean and mean square in each channel of some BatchNorm layers. See
`stand_ins`. No random numbers are drawn.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eata.allocator import block_like
from eata.mixture import Given, Pool
from eata.moments import own_statistics
from eata.rows.gradient import RowGradient, is_channels_last, take
from eata.rows.rules import rule

aten = torch.ops.aten
Matrix: TypeAlias = npt.NDArray[np.float64]


# --- forward ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Moments:
    """Mean and mean square of each row and channel, (B, C) each, at one BatchNorm layer.

    ``exact`` ones are over all positions of the images, the others over some that describe the row well enough.
    """

    mean: Tensor
    square: Tensor
    exact: bool = True


POSITIONS = 64  # looked at in each image where the moments are for description only


def row_moments(x: Tensor, described: bool = True) -> Moments | None:
    """Moments of a layer's input (B, C, ...); None where only a description would come of them, and none is wanted."""
    if not described and (is_channels_last(x) or x.dtype != torch.float32):
        return None
    x = x.detach()
    if x.dtype in (torch.float16, torch.bfloat16):
        x = x.float()
    if x.dim() == 2:
        return Moments(x, x.square())
    if is_channels_last(x):  # PyTorch's own statistics are fast in this layout
        by_row = x.permute(0, 2, 3, 1).flatten(1, 2)
        some = by_row[:, :: -(-by_row.shape[1] // POSITIONS)]
        return Moments(some.mean(1), some.square().mean(1), exact=False)
    by_row = x.flatten(2)
    return Moments(by_row.mean(2), torch.linalg.vector_norm(by_row, dim=2).square_().div_(by_row.shape[2]))


def statistics(moments: Moments | None, x: Tensor) -> tuple[Tensor, Tensor] | None:
    """Mean and (biased) variance by channel; None where rounding would show, that is |mean| >> deviation."""
    if moments is None or not moments.exact or x.dtype != torch.float32:
        return None
    wide = torch.float32 if x.device.type == "mps" else torch.float64
    mean = moments.mean.mean(0, dtype=wide)
    square_of_mean = mean.square()
    variance = moments.square.mean(0, dtype=wide).sub_(square_of_mean).clamp_min_(0)
    if bool((variance < 1e-2 * square_of_mean).any()):
        return None
    return mean.float(), variance.float()


class BatchNorm(torch.autograd.Function):
    """BatchNorm by the batch's statistics, or a mixture with fixed ones: faster, and with the rule above backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        given: Given,
        moments: Moments | None,
        half: bool,
    ) -> Tensor:
        """Normalize; ``half`` keeps the input for the backward pass in 16 bits."""
        share, fixed_mean, fixed_variance, pool, _ = given
        known = statistics(moments, x) if pool is None else pool.statistics(x)
        if known is None and share:
            known = own_statistics(x, fixed_mean)
        if known is None:
            y, mean, rstd = torch.native_batch_norm(x, weight, bias, None, None, True, 0.0, eps)
            own_mean = mean
        else:
            own_mean, variance = known
            mean = own_mean
            if share:
                mean, variance = mean.lerp(fixed_mean, share), variance.lerp(fixed_variance, share)
            y = torch.native_batch_norm(x, weight, bias, mean, variance, False, 0.0, eps)[0]
            rstd = (variance + eps).rsqrt_()
        ctx.affine, ctx.eps, ctx.dtype, ctx.pool = weight is not None, eps, x.dtype, pool
        # The batch's part in the statistics, for each of its values; rows that are not of the batch have none.
        values = x.numel() / x.shape[1] if pool is None else pool.values if pool.present else math.inf
        ctx.part = (1 - share) / values
        off = own_mean - mean if share else None  # of the batch's own mean from the one that was used
        if half:
            x = _normalized_half(x, mean, rstd)
            weight = rstd if weight is None else rstd * weight
            off = None if off is None else off * rstd
            mean, rstd = torch.zeros_like(mean), torch.ones_like(rstd)
        ctx.save_for_backward(x, weight, mean, rstd, off)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        """The rule at the top, or the exact gradient where ``g`` is dense."""
        x, weight, mean, rstd, off = ctx.saved_tensors
        if isinstance(g, RowGradient) and g.place.dim == 0 and g.place.outer == g.place.inner == 1:
            own = g.take(x).to(ctx.dtype)
            dx, dweight, dbias = _by_sums(
                g.kept, own, own, weight, mean, rstd, off, ctx.part, g.rows.weight, ctx.eps, ctx.pool
            )
            dx = g.like(dx)
        else:
            dense = g.dense() if isinstance(g, RowGradient) else g
            x = x.to(ctx.dtype)
            if off is None and ctx.pool is None:
                dx, dweight, dbias = aten.native_batch_norm_backward(
                    dense, x, weight, None, None, mean, rstd, True, ctx.eps, (True, True, True)
                )
            else:
                room = torch.empty_like(x)
                dx, dweight, dbias = _by_sums(
                    dense, x, room, weight, mean, rstd, off, ctx.part, None, ctx.eps, ctx.pool
                )
        return dx, *((dweight, dbias) if ctx.affine else (None, None)), *[None] * 4


def _normalized_half(x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    """(x - mean) * rstd in float16: normalized values are within its range, and it rounds 8 times less than bfloat16.

    Row by row, so that no second tensor of full precision is needed.
    """
    half = block_like(x, torch.float16)
    shape = (-1, *[1] * (x.dim() - 2))
    for source, target in zip(x, half, strict=True):
        target.copy_((source - mean.view(shape)).mul_(rstd.view(shape)))
    return half


def _by_sums(
    g: Tensor,
    x: Tensor,
    room: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    off: Tensor | None,
    part: float,
    row_weight: Tensor | None,
    eps: float,
    pool: Pool | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients from some rows, or all; that of x goes to ``room``, which may be x itself.

    ``part`` is what each value of the batch counts for in the statistics, ``off`` how far the batch's mean is from the
    one that was used, ``row_weight`` how many rows each one stands for (None: one), and ``pool`` has the other rows.
    """
    # The kernel for fixed statistics gives the two sums without another large tensor.
    variance = rstd.pow(-2) - eps
    _, dot, total = aten.native_batch_norm_backward(
        g, x, weight, mean, variance, None, None, False, eps, (False, True, True)
    )
    scale = rstd if weight is None else rstd * weight
    all_dot, all_total = (dot, total) if pool is None else pool.total(torch.stack([dot, total]))
    counted = -part * scale
    slope = counted * rstd * all_dot
    offset = counted * all_total - slope * (mean if off is None else mean + off)
    if row_weight is not None:
        slope, offset = (row_weight.to(x)[:, None] * by_channel for by_channel in (slope, offset))
    over = (-1, x.shape[1], *[1] * (x.dim() - 2))
    torch.addcmul(offset.view(over), x, slope.view(over), out=room).addcmul_(g, scale.view(over))
    return room, dot, total


@rule(aten.native_batch_norm_backward.default)
def _fixed_statistics(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Statistics of the source: a fixed scale and shift. InstanceNorm: B * C channels of one sample, each by itself."""
    g, x, weight, running_mean, running_var, mean, rstd, train, eps, mask = args
    if not isinstance(g, RowGradient):
        return NotImplemented
    if g.place.dim == 0 and not train:
        dx, dweight, dbias = func(g.kept, g.take(x), weight, running_mean, running_var, mean, rstd, train, eps, mask)
        return (g.like(dx) if mask[0] else None), dweight, dbias
    if g.place.dim == 1:
        channels = g.place.at(0)

        def kept(v: Tensor | None) -> Tensor | None:
            return v if v is None or not v.numel() else take(v, g.rows, channels)

        vectors = map(kept, (weight, running_mean, running_var, mean, rstd))
        dx, dweight, dbias = func(g.kept, g.take(x), *vectors, train, eps, mask)
        return tuple(
            g.like(d, place) if wanted else None
            for d, place, wanted in zip((dx, dweight, dbias), (g.place, channels, channels), mask, strict=True)
        )
    return NotImplemented


# --- who stands in ----------------------------------------------------------------------------------------------------

SHARE = 0.5  # stand-ins: SHARE (1 - B'/B)^3 B; fewer are needed where the chosen rows are many
RIDGE = 0.4  # in units of a row's own variance: pulls the weights towards B / rows


def stand_ins(layers: list[Moments], index: Tensor) -> tuple[Tensor, Tensor]:
    """Rows to store, and how many rows of the batch each stands for.

    Greedy kernel quadrature: rows are added one by one, each the one that lowers most the distance between the batch's
    sum of descriptions and what the stored rows can make of it; then the weights solve a small ridge problem.

    Args:
        layers: the rows' moments at the BatchNorm layers that describe them.
        index: the chosen rows, ascending.

    Returns:
        Stored rows, ascending, chosen ones among them; and their weights, not negative, with sum about B.
    """
    kernel = _likeness(layers)
    batch = len(kernel)
    free = np.ones(batch, dtype=bool)
    free[index.cpu().numpy()] = False
    among, wanted = ~free, math.ceil(SHARE * (1 - len(index) / batch) ** 3 * batch)
    explained = np.linalg.solve(kernel[among][:, among] + RIDGE * np.eye(len(index)), kernel[among])
    rest = kernel - kernel[:, among] @ explained  # what the stored rows can't tell of the others
    target = rest.sum(1)
    for _ in range(wanted):
        pivot = rest.diagonal() + RIDGE
        best = int(np.where(free, target**2 / pivot, -1.0).argmax())
        column = rest[:, best] / pivot[best]
        target = target - column * target[best]
        rest = rest - np.outer(column, rest[best])
        free[best] = False
    stored = np.flatnonzero(~free)
    weights = torch.from_numpy(_weights(kernel, stored))
    weights = weights.float() if index.device.type == "mps" else weights  # it has no float64
    return torch.from_numpy(stored).to(index.device), weights.to(index.device)


def _likeness(layers: list[Moments]) -> Matrix:
    """How alike any two rows are, (B, B): k + k^2 of their descriptions' products, every layer counting the same."""
    share = torch.cat([layer.mean.new_full((layer.mean.shape[1],), layer.mean.shape[1] ** -0.5) for layer in layers])
    mean = torch.cat([layer.mean for layer in layers], 1)
    center = mean.mean(0)
    spread = torch.cat([layer.square for layer in layers], 1) - 2 * mean * center  # around the channel's mean
    described = torch.cat([mean - center, spread - spread.mean(0)], 1)
    described = described * (share.repeat(2) / described.std(0, correction=0).clamp_min_(1e-12))
    products = (described @ described.T).cpu().double()
    products /= products.diagonal().mean().clamp_min(1e-12)
    alike: Matrix = products.numpy()  # small from here on: numpy's calls cost a fraction of torch's
    return alike + alike**2 + 10.0  # the constant: what the weights sum to matters most


def _weights(kernel: Matrix, stored: npt.NDArray[np.intp]) -> Matrix:
    even = np.full(len(stored), len(kernel) / len(stored))
    among = kernel[stored][:, stored]
    missing = kernel[stored].sum(1) - among @ even
    weights: Matrix = even + np.linalg.solve(among + RIDGE * np.eye(len(stored)), missing)
    return weights.clip(0)
