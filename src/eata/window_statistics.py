"""BatchNorm statistics of the last L samples of a stream, of which only the new ones are forwarded."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor, nn

from eata import norm
from eata.errors import EataError
from eata.moments import batch_statistics, inverse_moments, pooled
from eata.norm import Kernel, Layer, Statistics

MEMORY = 2  # windows: the time constant of deeper layers' statistics
MANY = 32  # samples for each new one: a window of so many is hardly changed by it
STRANGE = 8.0  # mean square of a sample's values at a layer, normalized by the others; 1 is usual


class Remembered:
    """What a window of L samples remembers of their statistics, and room to work in.

    Args:
        net: whose BatchNorm layers they are of.
        length: L.
        prior: samples that the source's statistics count for beside the window's.
    """

    def __init__(self, net: nn.Module, length: int, prior: float) -> None:
        self.net, self.length, self.prior = net, length, prior
        if norm.lacks_running_statistics(net) and not math.isinf(prior):
            raise EataError("A BatchNorm layer has no running statistics, which eata.Window needs until it is full.")
        self.allocate()

    def allocate(self) -> None:
        """Make everything anew, empty, where the net is."""
        self.layers = [] if math.isinf(self.prior) else norm.batch_norm_layers(self.net)
        like = self.layers[0].mean if self.layers else torch.empty(0)
        self.dtype = like.dtype
        channels = [layer.channels for layer in self.layers]
        sources = [torch.stack([layer.mean, layer.variance]) for layer in self.layers]
        self.source = torch.cat(sources or [like.new_zeros(2, 0)], 1)
        self.source_by_layer = [(mean, variance) for mean, variance in sources]
        #: mean and mean square of each sample, for the channels of the first layer; about the source mean and not about
        #: 0, that little is lost when the square of the one is taken from the other
        self.moments = like.new_zeros(self.length, 2, sum(channels[:1]))
        #: the same for the channels of all layers, averaged over samples; what deeper layers use
        self.average = like.new_zeros(2, sum(channels))
        # Room for one forward's mean and variance, and views of it by layer, made once, for making them takes time:
        # (1, C) each, as native_group_norm gives them, and (C,) each, as batch_norm takes them.
        self.room = like.new_zeros(2, sum(channels))
        # From channels to layers: the mean over each layer's.
        self.by_layer = torch.block_diag(*[like.new_full((c, 1), 1 / c) for c in channels] or [like.new_zeros(0, 1)])
        self.room_by_layer = list(zip(*(kind[None].split(channels, 1) for kind in self.room), strict=True))
        self.statistics_by_layer = [(mean[0], variance[0]) for mean, variance in self.room_by_layer]

    def source_share(self, samples: int) -> float:
        """The source statistics' share while the window holds so many samples."""
        return 1.0 if math.isinf(self.prior) else (self.prior + self.length - samples) / (self.prior + self.length)


class WindowStatistics(Statistics):
    """For one forward of some samples of the window: each layer normalizes by all of it, and notes their new moments.

    Args:
        memory: it holds the moments of the others.
        places: where the forwarded samples belong, in their order; none if their moments are to stay as they are.
        count: samples in the window, these included.
        few: whether deeper layers leave the new samples' own out, which are in the average from the next sample on;
            by default where there are many others.
    """

    def __init__(self, memory: Remembered, places: list[int], count: int, few: bool | None = None) -> None:
        super().__init__(memory.prior + memory.length)
        self.memory = memory
        self.places = torch.tensor(places, dtype=torch.long, device=memory.moments.device)
        self.count = count
        self.source_share = memory.source_share(count)
        self.part = len(places) / count  # of the window that gets new moments
        self.few = 0 < MANY * len(places) <= count and len(memory.layers) > 1 if few is None else few

    def begin(self) -> None:
        """Fill the room with the statistics of the others."""
        memory = self.memory
        #: for each layer: mean, and one over the standard deviation, of each sample's channels, (k, C) each
        self._new: list[tuple[Tensor, Tensor] | None] = [None] * len(memory.layers)
        weights = memory.moments.new_full((1, memory.length), 1 / max(1, self.count - len(self.places)))
        weights.index_fill_(1, self.places, 0)
        first = torch.mm(weights, memory.moments.flatten(1)).view_as(memory.moments[0])
        memory.room.copy_(memory.average)[:, : first.shape[1]] = first
        mean, variance = memory.room
        variance.addcmul_(mean, mean, value=-1).clamp_(min=0)
        mean += memory.source[0]
        if self.source_share and (self.few or not len(self.places)):
            since = first.shape[1] if len(self.places) else 0  # the first layer still gets its own
            memory.room[:, since:].lerp_(memory.source[:, since:], self.source_share)

    def normalize(self, layer: Layer, x: Tensor, kernel: Kernel) -> Tensor:
        """What the layer gives for x. A small layer takes no longer than ten operations, so there are few."""
        if not len(self.places):
            return self._normalize_for_step(layer, x, kernel)
        if self._new[layer.index] is not None:
            raise EataError("The net uses one BatchNorm layer twice, which eata.Window can't cache; use exact=True.")
        own = inverse_moments(x if x.dtype == self.memory.dtype else x.to(self.memory.dtype))
        self._new[layer.index] = own
        return kernel(1.0, *self._statistics(layer, x, *own))

    def _normalize_for_step(self, layer: Layer, x: Tensor, kernel: Kernel) -> Tensor:
        """The same with a graph, for samples whose moments are in the window's already."""
        mean, variance = self.memory.statistics_by_layer[layer.index]
        if x.numel() == layer.channels:  # one value per channel has no variance, nor has a window of one
            given = (layer.mean, layer.variance) if self.count == 1 else (mean.clone(), variance.clone())
            return kernel(1.0, *given)  # clones: autograd keeps them
        module = layer.module
        with torch.no_grad():
            own_mean, own_variance = batch_statistics(x.detach().to(self.memory.dtype))
        return _OwnGradient.apply(x, module.weight, module.bias, own_mean, own_variance, mean, variance, module.eps)  # type: ignore[no-any-return,no-untyped-call]

    def _statistics(self, layer: Layer, x: Tensor, means: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of the whole window, from those of each sample of the part of it that is forwarded.

        They come in place of those of the others, without a new tensor for each step.
        """
        index = layer.index
        if self.few and index:
            return self.memory.statistics_by_layer[index]
        samples = x.shape[0]  # len(x) would be a Python function, and take as long as an operation
        if self.count * x.numel() == samples * layer.channels:  # one value per channel has no variance
            return layer.mean, layer.variance
        mean, variance = self.memory.room_by_layer[index]
        part = self.part
        variance.mul_(1 - part)
        deviations = inverse.reciprocal()
        if samples == 1:
            far = means - mean
            variance.addcmul_(deviations, deviations, value=part)
        else:
            own_mean, own_variance = pooled(means, deviations)
            far = own_mean - mean
            variance.add_(own_variance, alpha=part)
        variance.addcmul_(far, far, value=part * (1 - part))
        mean.add_(far, alpha=part)
        if self.source_share:
            mean.lerp_(layer.mean, self.source_share)
            variance.lerp_(layer.variance, self.source_share)
        return self.memory.statistics_by_layer[index]

    @functools.cached_property
    def _all(self) -> tuple[Tensor, Tensor]:
        """The new samples' mean and variance in the channels of all layers; the source's where one was not used."""
        new = [
            (mean.expand(len(self.places), -1), variance.rsqrt().expand(len(self.places), -1))
            if moments is None
            else moments
            for moments, (mean, variance) in zip(self._new, self.memory.source_by_layer, strict=True)
        ]
        return torch.cat([means for means, _ in new], 1), torch.cat([inverse for _, inverse in new], 1).pow_(-2)

    def strange(self) -> bool:
        """Whether a sample is so far from the others somewhere that its own moments are needed to hold it.

        With them in the statistics no value can be further off than the square root of the window's length. Without,
        images after a black frame, say, would explode from layer to layer, and spoil the average for long.
        """
        means, variances = self._all
        mean, variance = self.memory.room
        square = (means - mean).square_().add_(variances).div_(variance + 1e-5)
        return not bool((square @ self.memory.by_layer).max() <= STRANGE)  # NaN is strange too

    def write(self) -> None:
        """Keep the new moments in the window; layers that were not used (another head's) keep the source's."""
        memory = self.memory
        if not memory.layers:
            return
        means, variances = self._all
        means = means - memory.source[0]
        moments = torch.stack([means, variances.addcmul(means, means)], 1)
        memory.moments.index_copy_(0, self.places, moments[:, :, : memory.layers[0].channels])
        time = self.count if self.count < memory.length or self.part == 1 else MEMORY * memory.length
        memory.average.lerp_(moments.mean(0), len(self.places) / time)


class _OwnGradient(torch.autograd.Function):
    """Normalize by the window's mean and variance, with the gradient of BatchNorm over x's own.

    Statistics as constants would give a gradient far off the textbook's (cosine 0.4); BatchNorm's own backward over the
    chosen samples comes near it (0.9 to 0.98). Between two sets of statistics lies a scale and a shift a channel, so
    BatchNorm over x with these in its weight and bias has the one's values and the other's gradient.
    """

    @staticmethod
    def forward(
        context: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        own_mean: Tensor,
        own_variance: Tensor,
        mean: Tensor,
        variance: Tensor,
        eps: float,
    ) -> Tensor:
        """The values, by the window's statistics: BatchNorm's own forward would find x's again, in thrice the time."""
        own_inverse, inverse = (own_variance + eps).rsqrt(), (variance + eps).rsqrt()
        scale, shift = inverse / own_inverse, (own_mean - mean) * inverse
        context.save_for_backward(x, weight, own_mean, own_inverse, scale, shift)
        context.eps = eps
        return torch.batch_norm(x, weight, bias, mean, variance, False, 0.0, eps, False)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """BatchNorm's backward, of the weight times ``scale`` and the bias plus the weight times ``shift``."""
        x, weight, own_mean, own_inverse, scale, shift = context.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = context.needs_input_grad
        to_x, to_scaled, to_bias = torch.ops.aten.native_batch_norm_backward(
            gradient, x, scale if weight is None else weight * scale, None, None, own_mean, own_inverse, True,
            context.eps, [needs_x, needs_weight, needs_weight or needs_bias],
        )  # fmt: skip
        to_weight = scale * to_scaled + shift * to_bias if needs_weight else None
        return to_x, to_weight, to_bias if needs_bias else None, None, None, None, None, None
