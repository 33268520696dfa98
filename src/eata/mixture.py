"""BatchNorm by given statistics, the batch's own, or a mixture of both, with a gradient."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from eata.moments import mixed_statistics, own_statistics

aten = torch.ops.aten


class Pool(Protocol):
    """The rest of the batch, where other processes hold it (`eata.parallel`)."""

    #: whether this process holds some of the batch at all
    present: bool
    #: how many values of each channel the whole batch has
    values: int

    def statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance (biased) over the whole batch, (C,) each.

        Args:
            x: this process's part of a layer's input, without a gradient.
        """

    def total(self, values: Tensor) -> Tensor:
        """The sum over all processes."""


class Given(NamedTuple):
    """What a BatchNorm layer normalizes by: ``share`` of a given mean and variance, and the rest of the batch's own.

    Attributes:
        share: 0 to 1.
        mean: (C,); not used where ``share`` is 0.
        variance: (C,); the same.
        pool: who else has a part of the batch.
        own_gradient: with a share of 1: the gradient is as if x had been normalized by its own statistics.
    """

    share: float
    mean: Tensor
    variance: Tensor
    pool: Pool | None = None
    own_gradient: bool = False


Own = tuple[Tensor, Tensor]  # the batch's mean and variance, (C,) each
OWN_ALONE = Given(0.0, torch.empty(0), torch.empty(0))


def batch_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, given: Given) -> Tensor:
    """BatchNorm of x (n, C, ...), with a gradient through what is the batch's own; with a pool, without.

    >>> x = torch.tensor([[1.0], [3.0]])
    >>> batch_norm(x, None, None, 0.0, Given(0.5, torch.zeros(1), torch.ones(1))).flatten()
    tensor([0., 2.])
    """
    share, mean, variance, pool, own_gradient = given
    cudnn = x.is_cuda and torch.backends.cudnn.enabled
    if share == 1:
        if own_gradient and torch.is_grad_enabled():
            return OwnGradient.apply(x, weight, bias, eps, given, own_statistics(x, mean))  # type: ignore[no-any-return,no-untyped-call]
        return torch.batch_norm(x, weight, bias, mean, variance, False, 0.0, eps, cudnn)
    if pool is not None:  # without a gradient: `eata.rows` has the one with
        own_mean, own_variance = pool.statistics(x)
        mean, variance = own_mean.lerp(mean, share), own_variance.lerp(variance, share)
        return torch.batch_norm(x, weight, bias, mean, variance, False, 0.0, eps, cudnn)
    if share == 0:
        return torch.batch_norm(x, weight, bias, None, None, True, 0.0, eps, cudnn)
    if torch.is_grad_enabled() and x.requires_grad:
        return Mixture.apply(x, weight, bias, eps, given, own_statistics(x, mean))  # type: ignore[no-any-return,no-untyped-call]
    mixed = mixed_statistics(x, (mean, variance), share)
    return torch.batch_norm(x, weight, bias, *mixed, False, 0.0, eps, cudnn)


class Mixture(torch.autograd.Function):
    """Normalize x (n, C, ...) by a share of given statistics and the rest of its own, which are known.

    The gradient takes few operations. With N values a channel, the share p of the given statistics, the mixed mean m
    and deviation s, and y = (x - m) / s,

        dx = w / s (dy - (1 - p) (sum dy) / N - (1 - p) (x - own mean) / s (sum dy y) / N).
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, given: Given, own: Own
    ) -> Tensor:
        """By PyTorch's kernel for fixed statistics."""
        share, *fixed = given[:3]
        mean, variance = (mine.lerp(theirs.to(mine.dtype), share) for mine, theirs in zip(own, fixed, strict=True))
        ctx.save_for_backward(x, weight, bias, mean, variance, own[0], *fixed)
        ctx.eps, ctx.share = eps, share
        return torch.native_batch_norm(x, weight, bias, mean, variance, False, 0.0, eps)[0]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        """The equation above; where the gradient itself is to be differentiated, autograd's own."""
        x, weight, bias, mean, variance, own_mean, *fixed = ctx.saved_tensors
        if torch.is_grad_enabled():
            wanted = [t for t in (x, weight, bias) if t is not None and t.requires_grad]
            y = plain(x, weight, bias, ctx.eps, ctx.share, *fixed)
            found = iter(torch.autograd.grad(y, wanted, g, create_graph=True))
            return *(next(found) if t is not None and t.requires_grad else None for t in (x, weight, bias)), *[None] * 3
        dx, dot, total = aten.native_batch_norm_backward(
            g, x, weight, mean, variance, None, None, False, ctx.eps, (True, True, True)
        )
        if ctx.needs_input_grad[0]:
            rstd = (variance + ctx.eps).rsqrt()
            part = -(1 - ctx.share) * x.shape[1] / x.numel() * (rstd if weight is None else rstd * weight)
            slope = part * rstd * dot
            over = (1, -1, *[1] * (x.dim() - 2))
            offset = part * total - slope * own_mean
            dx = dx.addcmul_(x, slope.to(dx.dtype).view(over)).add_(offset.to(dx.dtype).view(over))
        affine = weight is not None, bias is not None
        return dx, *(d if there else None for d, there in zip((dot, total), affine, strict=True)), *[None] * 3


def plain(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, share: float, mean: Tensor, variance: Tensor
) -> Tensor:
    """The same by operations that autograd can differentiate as often as it likes."""
    wide = x.to(torch.promote_types(x.dtype, mean.dtype))
    own_variance, own_mean = torch.var_mean(wide, [0, *range(2, x.dim())], correction=0)
    scale = (torch.lerp(own_variance, variance, share) + eps).rsqrt()
    shift = -torch.lerp(own_mean, mean, share) * scale
    if weight is not None:
        scale, shift = scale * weight, shift * weight
    shift = shift if bias is None else shift + bias
    over = (1, -1, *[1] * (x.dim() - 2))
    return (wide * scale.view(over) + shift.view(over)).to(x.dtype)


class OwnGradient(torch.autograd.Function):
    """Normalize by given statistics (a window's), with the gradient of BatchNorm over x's own.

    Statistics as constants would give a gradient far off the textbook's (cosine 0.4); BatchNorm's own backward over the
    chosen samples comes near it (0.9 to 0.98). Between two sets of statistics lies a scale and a shift a channel, so
    BatchNorm over x with these in its weight and bias has the one's values and the other's gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, given: Given, own: Own
    ) -> Tensor:
        """The values by the given statistics: BatchNorm's own forward would find x's again, in thrice the time."""
        mean, variance = given.mean, given.variance
        own_mean, own_variance = own
        own_inverse, inverse = (own_variance + eps).rsqrt(), (variance + eps).rsqrt()
        scale, shift = inverse / own_inverse, (own_mean - mean) * inverse
        ctx.save_for_backward(x, weight, own_mean, own_inverse, scale, shift)
        ctx.eps = eps
        return torch.batch_norm(x, weight, bias, mean, variance, False, 0.0, eps, False)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        """BatchNorm's backward, of the weight times ``scale`` and the bias plus the weight times ``shift``."""
        x, weight, own_mean, own_inverse, scale, shift = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        to_x, to_scaled, to_bias = aten.native_batch_norm_backward(
            g, x, scale if weight is None else weight * scale, None, None, own_mean, own_inverse, True,
            ctx.eps, [needs_x, needs_weight, needs_weight or needs_bias],
        )  # fmt: skip
        to_weight = scale * to_scaled + shift * to_bias if needs_weight else None
        return to_x, to_weight, to_bias if needs_bias else None, None, None, None
