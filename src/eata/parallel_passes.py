"""Forward and gradient of one process's shard of a batch, as if it held the batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eata.inputs import Inputs
from eata.mixture import Given
from eata.norm import Layer, Statistics
from eata.passes import Pass, Runner
from eata.processes import Processes
from eata.rows import Engine, Gradients, LossOf, Rows, RowsFailed, Watch, full_gradients


class Shard(Pass):
    """One forward of a batch of which this process has a shard; sums go over all processes.

    Args:
        inputs: the shard, maybe empty.
        local: its forward; that of a placeholder, where it is empty.
        samples: of the batch, in all.
        processes: that have the others.
        parameters: that gradients are taken by.
        coupled: whether samples depend on one another, so that a process without chosen ones has a gradient too.
    """

    def __init__(
        self,
        inputs: Inputs,
        local: Pass,
        samples: int,
        processes: Processes,
        parameters: Sequence[Tensor],
        coupled: bool,
    ) -> None:
        def gradients(index: Tensor, loss_of: LossOf) -> Gradients:
            takes_part = coupled or len(index) > 0
            found = local.gradients(index, loss_of) if takes_part else (None,) * len(parameters)
            return processes.gradients(found, parameters)

        features = None if local.features is None else local.features[: len(inputs)]
        super().__init__(inputs, local.logits[: len(inputs)], features, gradients if parameters else None)
        self._samples, self._processes = samples, processes

    @property
    def samples(self) -> int:
        return self._samples

    def total(self, values: Tensor) -> Tensor:
        return self._processes.total(values)

    def counts(self, *numbers: int) -> tuple[int, ...]:
        return self._processes.counts(*numbers)

    def span(self, count: int) -> tuple[int, int]:
        everywhere = [row[0] for row in self._processes.gather([count])]
        return sum(everywhere[: self._processes.rank]), sum(everywhere)


class SharedRunner:
    """Runs a net on the shards of batches, in place of a `Runner`.

    Args:
        runner: of the net.
        processes: that have the other shards.
        coupled: whether samples depend on one another, through BatchNorm.
        by_rows: whether they may have the row-sparse gradient even so.
    """

    def __init__(self, runner: Runner, processes: Processes, coupled: bool, by_rows: bool) -> None:
        #: for gradients; None for textbook gradients of nets whose samples do not depend on one another
        self.engine = SharedEngine(runner.engine, processes, by_rows) if coupled else runner.engine
        self._plain = Runner(runner.net, self.engine)
        self._processes, self._coupled = processes, coupled

    def __call__(
        self, inputs: Inputs, statistics: Statistics, parameters: Sequence[Tensor] = (), features: bool = False
    ) -> Pass:
        """Forward the shard, as ``Runner`` does."""
        (samples,) = self._processes.counts(len(inputs))
        here = inputs if len(inputs) else placeholder(inputs)
        if self._coupled:
            statistics = SharedStatistics(statistics, self._processes, len(here), samples, present=bool(len(inputs)))
        local = self._plain(here, statistics, parameters, features)
        return Shard(inputs, local, samples, self._processes, parameters, self._coupled)


class SharedEngine(Engine):
    """Gradients where samples depend on one another: the BatchNorm of an engine can share its sums.

    By rows only if all processes can, for they have to send the same messages; else the textbook's.

    Args:
        like: the engine of the net alone, if it has one.
        processes: that have the other shards.
        by_rows: whether rows are wanted at all.
    """

    def __init__(self, like: Engine | None, processes: Processes, by_rows: bool) -> None:
        super().__init__(like is not None and like.lean)
        self._processes, self._by_rows = processes, by_rows

    def watch(self, layers: Sequence[Layer], statistics: Statistics, needs_features: bool = False) -> Watch:
        watch = super().watch(layers, statistics, needs_features)
        watch.describes = self._by_rows
        return watch

    def gradients(
        self, watch: Watch, logits: Tensor, index: Tensor, loss_of: LossOf, parameters: Sequence[Tensor]
    ) -> Gradients:
        if self._by_rows and len(index):
            try:
                return super().gradients(watch, logits, index, loss_of, parameters)
            except RowsFailed:  # in every process alike: the next try is the textbook's
                self.failed = self._by_rows = False
                raise
        if self._by_rows:
            self._processes.counts(1)  # the question below
        return full_gradients(logits, index, loss_of, parameters)

    def rows_for(self, watch: Watch, logits: Tensor, index: Tensor) -> Rows | None:
        found = super().rows_for(watch, logits, index)
        (without,) = self._processes.counts(int(found is None))
        watch.rows = None if without else found
        return watch.rows


def placeholder(inputs: Inputs) -> Inputs:
    """One sample of zeros in place of none: many nets fail on an empty batch."""
    return inputs.map(lambda tensor: tensor.new_zeros(1, *tensor.shape[1:]))


class SharedStatistics(Statistics):
    """For one forward of one shard: as other statistics, with those of the whole batch for the batch's.

    Args:
        inner: the other statistics.
        processes: that have the other shards.
        rows: samples that are forwarded here.
        samples: of the batch, in all.
        present: whether the rows are of the batch, and no placeholder.
    """

    def __init__(self, inner: Statistics, processes: Processes, rows: int, samples: int, present: bool) -> None:
        super().__init__(inner.prior, inner.samples)
        self._processes, self._present = processes, present
        self._whole = samples / rows  # what a row here stands for in the batch, on average

    def for_layer(self, layer: Layer, x: Tensor) -> Given:
        """What the layer normalizes by; x (n, C, ...) is the part of this process."""
        values = round(x.numel() / layer.channels * self._whole)
        # One value has no variance; none is left of a batch whose samples were all rejected.
        share = 1.0 if values <= 1 else self.share(round(x.shape[0] * self._whole))
        if share == 1:
            return Given(1.0, layer.mean, layer.variance)
        return Given(share, layer.mean, layer.variance, LayerPool(layer, values, self._processes, self._present))


class LayerPool:
    """The other processes' part of one layer's input.

    Moments are sent as the sum of distances from the source's mean and that of their squares, in 64 bits: one message,
    whose size does not grow with the number of processes. Distances, and not the values, for in a difference of large
    squares the variance would be lost.

    Args:
        layer: whose input it is.
        values: of each channel, in all.
        processes: all of them.
        present: whether this process holds some of the batch.
    """

    def __init__(self, layer: Layer, values: int, processes: Processes, present: bool) -> None:
        self.present, self.values = present, values
        self._layer, self._processes = layer, processes

    def statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance over the whole batch, (C,) each."""
        source = self._layer.mean
        sums = torch.zeros(2, self._layer.channels, dtype=torch.float64, device=x.device)
        if self.present:
            mean, variance = _moments(x.detach().to(torch.promote_types(x.dtype, source.dtype)))
            far = mean.double().sub_(source)
            sums = torch.stack([far, variance.double().addcmul_(far, far)]).mul_(x.numel() / x.shape[1])
        far, square = self._processes.total(sums) / self.values
        variance = square.addcmul(far, far, value=-1).clamp_min_(0)
        return (far + source).to(source.dtype), variance.to(source.dtype)

    def total(self, values: Tensor) -> Tensor:
        """The sum over all processes."""
        return self._processes.total(values)


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance (biased) by channel, to the last bit: `moments.batch_statistics` is faster, and rounds more."""
    if x.device.type == "cpu":
        mean, variance = torch.ops.aten.batch_norm_update_stats(x, None, None, 0.0)
        return mean, variance
    variance, mean = torch.var_mean(x, [0, *range(2, x.dim())], correction=0)
    return mean, variance
