"""BatchNorm statistics of the last L samples of a stream, of which only the new ones are forwarded."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor, nn

from eata import norm
from eata.errors import EataError
from eata.mixture import Given
from eata.moments import inverse_moments, pooled
from eata.norm import Layer, Statistics

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
        #: mean and mean square of each sample, for the channels of the first layer; about the source mean and not about
        #: 0, that little is lost when the square of the one is taken from the other
        self.moments = like.new_zeros(self.length, 2, sum(channels[:1]))
        #: the same for the channels of all layers, averaged over samples; what deeper layers use
        self.average = like.new_zeros(2, sum(channels))
        # Room for one forward's mean and variance, and views of it, made once, for making them takes time: of the first
        # layer, by kind and by layer; (1, C) each, as native_group_norm gives them, and (C,), as batch_norm takes them.
        self.room = like.new_zeros(2, sum(channels))
        self.room_of_first = self.room[:, : sum(channels[:1])]
        self.mean, self.variance = self.room
        self.room_by_layer = list(zip(*(kind[None].split(channels, 1) for kind in self.room), strict=True))
        self.given_by_layer = [Given(1.0, mean[0], variance[0]) for mean, variance in self.room_by_layer]
        # From channels to layers: the mean over each layer's.
        self.by_layer = torch.block_diag(*[like.new_full((c, 1), 1 / c) for c in channels] or [like.new_zeros(0, 1)])

    def fill(self, count: int, source: float, without: Tensor | None = None, mixed_from: int = 0) -> None:
        """Fill the room with the mean and variance over samples.

        Args:
            count: how many samples.
            source: share of the source's statistics.
            without: places whose samples are left out, in the first layer; the average of the others is as it is.
            mixed_from: the first channel that the source gets its share in.
        """
        weights = self.moments.new_full((1, self.length), 1 / max(1, count))
        if without is not None:
            weights.index_fill_(1, without, 0)
        self.room.copy_(self.average)
        self.room_of_first.copy_(torch.mm(weights, self.moments.flatten(1)).view(self.room_of_first.shape))
        self.variance.addcmul_(self.mean, self.mean, value=-1).clamp_(min=0)
        self.mean.add_(self.source[0])
        if source:
            self.room[:, mixed_from:].lerp_(self.source[:, mixed_from:], source)

    def source_share(self, samples: int) -> float:
        """The source statistics' share while the window holds so many samples."""
        return 1.0 if math.isinf(self.prior) else (self.prior + self.length - samples) / (self.prior + self.length)


class WindowStatistics(Statistics):
    """The window's as they stand, for samples that are in it already and are forwarded again, for a gradient.

    Args:
        memory: of the window.
        count: samples in the window.
    """

    def __init__(self, memory: Remembered, count: int) -> None:
        super().__init__(memory.prior + memory.length)
        self.memory, self.count = memory, count
        self.source_share = memory.source_share(count)

    def begin(self) -> None:
        self.memory.fill(self.count, self.source_share)

    def for_layer(self, layer: Layer, x: Tensor) -> Given:
        given = self.memory.given_by_layer[layer.index]
        if x.numel() > layer.channels:
            return given._replace(own_gradient=True)
        if self.count == 1:  # one value per channel has no variance, nor has a window of one
            return Given(1.0, layer.mean, layer.variance)
        return Given(1.0, given.mean.clone(), given.variance.clone())  # autograd keeps them


class NewSamples(WindowStatistics):
    """For one forward of new samples: each layer normalizes by the window with them in it, and notes their moments.

    Args:
        memory: it holds the moments of the others.
        count: samples in the window, the new ones included.
        places: where the new samples belong, in their order.
        few: whether deeper layers leave the new samples' own out, which are in the average from the next sample on;
            by default where there are many others.
    """

    def __init__(self, memory: Remembered, count: int, places: list[int], few: bool | None = None) -> None:
        super().__init__(memory, count)
        self.new = len(places)
        self.places = torch.tensor(places, dtype=torch.long, device=memory.moments.device)
        self.part = self.new / count  # of the window that gets new moments
        self.few = MANY * self.new <= count and len(memory.layers) > 1 if few is None else few

    def begin(self) -> None:
        """Fill the room with the statistics of the others; the source's are mixed in where the own ones are not."""
        memory = self.memory
        first = memory.room_of_first.shape[1]
        memory.fill(self.count - self.new, self.source_share if self.few else 0, self.places, mixed_from=first)
        #: for each layer: mean, and one over the standard deviation, of each sample's channels, (k, C) each
        self._own: list[tuple[Tensor, Tensor] | None] = [None] * len(memory.layers)

    def for_layer(self, layer: Layer, x: Tensor) -> Given:
        """A small layer takes no longer than ten operations, so there are few."""
        index, memory = layer.index, self.memory
        if self._own[index] is not None:
            raise EataError("The net uses one BatchNorm layer twice, which eata.Window can't cache; use exact=True.")
        self._own[index] = own = inverse_moments(x if x.dtype == memory.dtype else x.to(memory.dtype))
        return memory.given_by_layer[index] if self.few and index else self._with_own(layer, x, *own)

    def _with_own(self, layer: Layer, x: Tensor, means: Tensor, inverse: Tensor) -> Given:
        """Those of the whole window, from those of each sample of the part of it that is forwarded.

        They come in place of those of the others, without a new tensor for each step.
        """
        samples = x.shape[0]  # len(x) would be a Python function, and take as long as an operation
        if self.count * x.numel() == samples * layer.channels:  # one value per channel has no variance
            return Given(1.0, layer.mean, layer.variance)
        mean, variance = self.memory.room_by_layer[layer.index]
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
        return self.memory.given_by_layer[layer.index]

    @functools.cached_property
    def _moments(self) -> Tensor:
        """The new samples' means and variances, (k, 2, C), for all layers; the source's where one was not used."""
        own = [moments or self._of_source(layer) for moments, layer in zip(self._own, self.memory.layers, strict=True)]
        moments = torch.cat([means for means, _ in own] + [inverse for _, inverse in own], 1).view(self.new, 2, -1)
        moments[:, 1].pow_(-2)
        return moments

    def _of_source(self, layer: Layer) -> tuple[Tensor, Tensor]:
        return layer.mean.expand(self.new, -1), layer.variance.rsqrt().expand(self.new, -1)

    def strange(self) -> bool:
        """Whether a sample is so far from the others somewhere that its own moments are needed to hold it.

        With them in the statistics no value can be further off than the square root of the window's length. Without,
        images after a black frame, say, would explode from layer to layer, and spoil the average for long.
        """
        means, variances = self._moments.unbind(1)
        far = means - self.memory.mean
        square = torch.addcmul(variances, far, far).div_(self.memory.variance + 1e-5)
        return not float((square @ self.memory.by_layer).max()) <= STRANGE  # NaN is strange too

    def write(self) -> None:
        """Keep the new moments in the window, which uses them up; layers that were not used keep the source's."""
        memory = self.memory
        if not memory.layers:
            return
        moments = self._moments  # from variances to mean squares, and both about the source's means
        means, variances = moments.unbind(1)
        means.sub_(memory.source[0])
        variances.addcmul_(means, means)
        memory.moments.index_copy_(0, self.places, moments[:, :, : memory.layers[0].channels])
        time = self.count if self.count < memory.length or self.part == 1 else MEMORY * memory.length
        memory.average.lerp_(moments[0] if self.new == 1 else moments.mean(0), self.new / time)
