"""Means and variances by channel, and BatchNorm by a mixture of given ones and the batch's own."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from eata.mixture import Mixture

TINY = 1e-12  # keeps 1 / deviation finite


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


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    share: float,
    mean: Tensor | None,
    variance: Tensor | None,
) -> Tensor:
    """BatchNorm of x (n, C, ...) by ``share`` of the given statistics and the rest of its own; all with a gradient.

    >>> x = torch.tensor([[1.0], [3.0]])
    >>> batch_norm(x, None, None, 0.0, 0.5, torch.zeros(1), torch.ones(1)).flatten()
    tensor([0., 2.])
    """
    cudnn = x.is_cuda and torch.backends.cudnn.enabled
    if share == 1:
        return torch.batch_norm(x, weight, bias, mean, variance, False, 0.0, eps, cudnn)
    if share == 0:
        return torch.batch_norm(x, weight, bias, None, None, True, 0.0, eps, cudnn)
    assert mean is not None
    assert variance is not None
    if torch.is_grad_enabled() and x.requires_grad:
        with torch.no_grad():
            own = batch_statistics(x.detach().to(torch.promote_types(x.dtype, mean.dtype)))
        return Mixture.apply(x, weight, bias, eps, share, (mean, variance), own)  # type: ignore[no-any-return,no-untyped-call]
    mixed = mixed_statistics(x.detach(), (mean, variance), share)
    return torch.batch_norm(x, weight, bias, *mixed, False, 0.0, eps, cudnn)


def mixed_statistics(x: Tensor, source: tuple[Tensor, Tensor], share: float) -> tuple[Tensor, Tensor]:
    """Mean and variance share * source + (1 - share) * batch, by channel (Schneider et al. 2020).

    Args:
        x: a BatchNorm layer's input, (n, C, ...), without a gradient.
        source: running mean and variance of the source model, (C,) each.
        share: of the source, 0 to 1.

    >>> mixed_statistics(torch.tensor([[1.0], [3.0]]), (torch.zeros(1), torch.zeros(1)), share=0.5)
    (tensor([1.]), tensor([0.5000]))
    """
    source_mean, source_variance = source
    # The variance is the biased one, by which a batch is normalized: a share of 0 is then exactly batch statistics.
    mean, variance = batch_statistics(x.to(torch.promote_types(x.dtype, source_mean.dtype)))
    return (
        share * source_mean + (1 - share) * mean.to(source_mean.dtype),
        share * source_variance + (1 - share) * variance.to(source_variance.dtype),
    )


def batch_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance (biased) over all samples, (C,) each, of x (n, C, ...).

    >>> batch_statistics(torch.tensor([[1.0], [3.0]]))
    (tensor([2.]), tensor([1.]))
    """
    if x.is_contiguous() or x.device.type != "cpu":
        return pooled(*sample_moments(x))
    # Pixel by pixel, PyTorch's own are fast; not every device has them.
    mean, variance = torch.ops.aten.batch_norm_update_stats(x, None, None, 0.0)
    return mean, variance


def sample_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation (biased) of each sample's channels, (n, C) each, of x (n, C, ...).

    >>> sample_moments(torch.tensor([[[1.0, 3.0]], [[4.0, 4.0]]]))
    (tensor([[2.],
            [4.]]), tensor([[1.0000e+00],
            [1.0000e-06]]))
    """
    means, inverse = inverse_moments(x)
    return means, inverse.reciprocal_()


def inverse_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """As `sample_moments`, with one over the standard deviation."""
    count, channels = x.shape[:2]
    # GroupNorm with a channel a group gives both in one pass, at a tenth of the time of torch.var_mean.
    values = x.numel() // (count * channels)
    _, means, inverse = torch.native_group_norm(x.contiguous(), None, None, count, channels, values, channels, TINY)
    return means, inverse


def pooled(means: Tensor, deviations: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance over all samples, (C,) each, from those of each sample, (n, C).

    >>> pooled(torch.tensor([[1.0], [3.0]]), torch.tensor([[0.0], [2.0]]))
    (tensor([2.]), tensor([3.]))
    """
    return means.mean(0), deviations.square().mean(0).add_(means.var(0, correction=0))
