"""BatchNorm by a mixture of given and own statistics, with its gradient in few operations.

With N values a channel, the share p of the given statistics, the mixed mean m and deviation s, and y = (x - m) / s,

    dx = w / s (dy - (1 - p) (sum dy) / N - (1 - p) (x - own mean) / s (sum dy y) / N).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


class Mixture(torch.autograd.Function):
    """Normalize x (n, C, ...) by ``share`` of the given mean and variance and the rest of its own, which are known."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        share: float,
        given: tuple[Tensor, Tensor],
        own: tuple[Tensor, Tensor],
    ) -> Tensor:
        """By PyTorch's kernel for fixed statistics."""
        mean, variance = (mine.lerp(fixed.to(mine.dtype), share) for mine, fixed in zip(own, given, strict=True))
        ctx.save_for_backward(x, weight, bias, mean, variance, own[0], *given)
        ctx.eps, ctx.share = eps, share
        return torch.native_batch_norm(x, weight, bias, mean, variance, False, 0.0, eps)[0]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        """The equation above; where the gradient itself is to be differentiated, autograd's own."""
        x, weight, bias, mean, variance, own_mean, *given = ctx.saved_tensors
        if torch.is_grad_enabled():
            wanted = [t for t in (x, weight, bias) if t is not None and t.requires_grad]
            y = plain(x, weight, bias, ctx.eps, ctx.share, *given)
            found = iter(torch.autograd.grad(y, wanted, g, create_graph=True))
            return *(next(found) if t is not None and t.requires_grad else None for t in (x, weight, bias)), *[None] * 4
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
        return dx, *(d if there else None for d, there in zip((dot, total), affine, strict=True)), *[None] * 4


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
