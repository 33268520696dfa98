"""One forward of one batch, and its gradient."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from eata import allocator, norm, rows
from eata.errors import EataError
from eata.inputs import Inputs, checked_logits, misfit
from eata.norm import Layer, Normalizing, Statistics
from eata.rows import Gradients, LossOf


class Pass:
    """One forward of one batch: what went in, what came out, and the way back.

    Passes are independent of one another: a method may hold several.

    >>> batch = Pass(Inputs(torch.zeros(4, 2)), torch.zeros(4, 3))
    >>> len(batch), batch.samples, batch.counts(3, 1)
    (4, 4, (3, 1))

    Attributes:
        inputs: the batch.
        logits: (B, C) or (B, C, ...), without a gradient.
        features: input of the last linear layer, (B, ...), without a gradient; None unless asked for.
        notes: what one hook of a method wants to tell a later one about this batch.
    """

    def __init__(
        self,
        inputs: Inputs,
        logits: Tensor,
        features: Tensor | None = None,
        gradients: Callable[[Tensor, LossOf], Gradients] | None = None,
    ) -> None:
        self.inputs = inputs
        self.logits = logits.detach()
        self.features = features
        self.notes: dict[str, Any] = {}
        self._gradients = gradients

    def __len__(self) -> int:
        return len(self.logits)

    # A batch may be spread over processes, each with a part of it (`eata.parallel`). What a method sums over samples
    # goes through these, before anything changes; in one process they cost nothing.

    @property
    def samples(self) -> int:
        """How many samples the batch has, over all processes."""
        return len(self)

    def total(self, values: Tensor) -> Tensor:
        """The sum of ``values``, which are about this process's samples, over all processes."""
        return values

    def counts(self, *numbers: int) -> tuple[int, ...]:
        """The sum of each number over all processes."""
        return numbers

    def span(self, count: int) -> tuple[int, int]:
        """The place of this process's first item among those of all processes, and how many there are in all.

        Args:
            count: items of this process; those of the processes before it come first.
        """
        return 0, count

    def gradients(self, index: Tensor, loss_of: LossOf) -> Gradients:
        """Gradients of a loss on some rows, by the free parameters; once, for it uses up what the forward kept.

        Args:
            index: the rows that the loss is about, each once, at least one.
            loss_of: from their logits, (B', C), with a gradient, to a scalar.

        Returns:
            One for each free parameter; None where it does not take part.
        """
        way_back, self._gradients = self._gradients, None
        if way_back is None:
            raise RuntimeError(
                "This pass has no gradient (any more): it was made with grad=False, or taken once already."
            )
        return way_back(index, loss_of)


class Runner:
    """Runs a net on batches: by given statistics, in the memory layout that it likes best, watched where that pays.

    Args:
        net: in eval mode.
        engine: for gradients on some rows; None for textbook gradients.
    """

    def __init__(self, net: nn.Module, engine: rows.Engine | None = None) -> None:
        self.net = net
        self.layers = norm.batch_norm_layers(net)
        self._compiled = norm.is_compiled(net)
        self._plain = norm.is_plain(net)
        self.engine = None if self._compiled else engine
        self._channels_last = True

    def __call__(
        self, inputs: Inputs, statistics: Statistics, parameters: Sequence[Tensor] = (), features: bool = False
    ) -> Pass:
        """Forward the batch.

        Args:
            inputs: the batch.
            statistics: what BatchNorm layers normalize by.
            parameters: what gradients will be asked for; none: no gradient is kept.
            features: keep the input of the last linear layer too.
        """
        engine = self.engine if parameters and self.engine is not None and not self.engine.failed else None
        with torch.set_grad_enabled(bool(parameters)):
            new_mode = partial(Normalizing if engine is None else engine.watch, self.layers, statistics, features)
            mode, logits = self._forward(inputs, new_mode, best_layout=engine is not None or not parameters)
        if features and mode.features is None:
            raise EataError("No linear layer was seen in this net, so there are no features in front of the last one.")
        kept = mode.features.detach() if features and mode.features is not None else None

        def gradients(index: Tensor, loss_of: LossOf) -> Gradients:
            if engine is None or not isinstance(mode, rows.Watch):
                return rows.full_gradients(logits, index, loss_of, parameters)
            with contextlib.suppress(rows.RowsFailed):
                return engine.gradients(mode, logits, index, loss_of, parameters)
            return self(inputs, statistics, parameters).gradients(index, loss_of)

        return Pass(inputs, logits, kept, gradients if parameters else None)

    def _forward(
        self, inputs: Inputs, new_mode: Callable[[], Normalizing], best_layout: bool
    ) -> tuple[Normalizing, Tensor]:
        """Logits, and what was seen on the way, of images that lie pixel by pixel: CPU kernels like that best.

        The textbook's gradient is taken in the caller's own layout.
        """
        try:
            if best_layout and self._channels_last and _gains_by_layout(inputs.first):
                try:
                    return self._run(inputs.map(_pixel_by_pixel), new_mode())
                except EataError:
                    raise
                except Exception:  # the net's own errors come again
                    found = self._run(inputs, new_mode())
                self._channels_last = False  # it takes images apart by .view(), say, which needs the usual layout
                return found
            return self._run(inputs, new_mode())
        except (RuntimeError, ValueError, IndexError) as problem:
            said = None if isinstance(problem, EataError) else misfit(problem, inputs)
            if said is None:
                raise
            raise said from problem

    def _run(self, inputs: Inputs, mode: Normalizing) -> tuple[Normalizing, Tensor]:
        mode.statistics.begin()
        with self._normalized(mode, grad=torch.is_grad_enabled()):
            logits = checked_logits(inputs(self.net), inputs)
        if isinstance(mode, rows.Watch) and mode.keep_less and logits.device.type == "cpu":
            allocator.give_back()
        return mode, logits

    def _normalized(self, mode: Normalizing, grad: bool) -> contextlib.AbstractContextManager[Any]:
        """The block in which the net's layers normalize as the mode says; the cheapest one that works."""
        if self._compiled:
            if math.isinf(mode.statistics.prior):
                return contextlib.nullcontext()
            if mode.statistics.of_batch_alone:
                return norm.without_running_statistics(self.layers)
            raise EataError("A compiled net hides its layers, so statistics can't be mixed; give eata the plain net.")
        if grad or mode.needs_features or not self._plain:
            return mode
        return _instead_of_forward(self.layers, mode)


@contextlib.contextmanager
def _instead_of_forward(layers: Sequence[Layer], mode: Normalizing) -> Iterator[None]:
    """The layers normalize as the mode says, without it: seeing every function would slow a small net by a fifth.

    Not by setattr, nor by hooks: both would take a good part of a small layer's time.
    """
    for layer in layers:
        layer.module.__dict__["forward"] = partial(mode.normalize, layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.module.__dict__["forward"]


def _gains_by_layout(x: Tensor) -> bool:
    """Whether another memory layout pays: not for one image, whose moments (`eata.Window`) are taken plane by plane."""
    return x.dim() == 4 and x.shape[0] > 1 and x.device.type == "cpu" and x.is_floating_point()


def _pixel_by_pixel(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x
