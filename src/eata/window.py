"""Streams of single samples: BatchNorm statistics, and gradient steps, over the last L of them."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from eata import norm
from eata.adapter import Adapter
from eata.auto import Auto
from eata.errors import EataError
from eata.gradient import GradientAdapter
from eata.inputs import Inputs, finite_rows, in_range, joined
from eata.methods.per_image import PerImage
from eata.norm import Statistics
from eata.passes import Pass
from eata.rows import Gradients, LossOf
from eata.window_statistics import NewSamples, Remembered, WindowStatistics
from eata.wrapper import Wrapper

# Sizes of a step's batch, at most. With one for each number of chosen samples the heap grows for minutes: what a tensor
# of one size leaves behind fits no tensor of another, and compiled convolutions, kept by size, lie in between.
SIZES = 8


class Window(Wrapper):
    """Any method on a stream of single samples (or small batches): the last ``length`` samples stand in for a batch.

    The paper forwards the last L samples again with each new one (``exact=True``; '-wnd' in its Table 'bs=1'), L times
    the cost. But a sample's share in a BatchNorm layer's statistics is two numbers a channel: mean and mean square. The
    default keeps those of the last L samples and forwards only the new ones, normalized by the window's statistics
    (theirs included). In the first layer (as registered) that is exact. A deeper layer's moments of an older sample
    were computed under older statistics of the layers before, which wander as the window moves; so there the moments of
    the others are an exponential average with a time constant of 2 L samples, which wanders less. To save time, a
    sample's own moments are left out in deeper layers until it is predicted, where the window is at least 32 times as
    many; if it then turns out to be far from the others, it is forwarded again with its own. On the shipped
    ResNet-26 (L = 64, Gaussian noise and contrast at severity 5) the deeper layers' means then differ from the exact
    window's by 0.01 to 0.02 standard deviations, their variances by 2 to 6 per cent (``python -m benchmarks.window
    --layers``). After a sudden shift the average forgets slowly: 63 per cent of it in 2 L samples.

    A gradient step comes once in every L samples, over those of the window that the method chooses. The default chooses
    by the predictions given, and forwards the chosen again, normalized by the window's statistics; others of the window
    fill them up to a multiple of L/8 samples, so that a step has few sizes. The gradient is of the chosen alone, and
    flows through BatchNorm as if what is forwarded were the whole batch.

    Until the window is full, the source statistics count for the missing samples: with n of L there,
    (L-n)/L * source + n/L * window, and no step is taken. A prior of the method's own (``eata.BN``) comes on top. Of
    images of several sizes, only those of the newest one's size can be forwarded together with it (``exact=True``, and
    the gradient step); the default's statistics are over all. A batch larger than the window is taken in parts of
    ``length``. ``frozen()`` predicts with the window, and does not remember the sample. Methods that use no batch
    statistics and no batches (Source, Augment, MEMO, TTT) work as without a window.

    Args:
        model: an adapter, such as ``eata.EATA(net, fisher)``.
        length: L, in samples; the paper's 64.
        exact: forward all of the window with each new sample, as the paper.

    >>> import eata
    >>> net = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 3))
    >>> model = Window(eata.Tent(net, lr=0.1), length=4)
    >>> for _ in range(8):
    ...     logits = model(torch.randn(1, 2))
    >>> logits.shape, model.stats.steps
    (torch.Size([1, 3]), 2)
    """

    length: int
    exact: bool
    #: the samples and their logits, each in its place; None where there is none yet
    samples: list[dict[str, Any] | None]
    logits: list[Tensor | None]
    #: samples in the window; the place of the next one; samples since the last step
    count: int
    next: int
    since_step: int

    def __init__(self, model: Adapter, length: int = 64, exact: bool = False) -> None:
        if not isinstance(model, Adapter) or isinstance(model, Wrapper):
            raise TypeError(
                f"eata.Window wraps an adapter, not a {type(model).__name__}: eata.Window(eata.Tent(net), length=64)."
            )
        in_range("length", length, low=1)
        try:
            length = operator.index(length)
        except TypeError:
            raise EataError(f"length={length!r} is not a whole number; count the samples, as in length=64.") from None
        unfit = model.unfit_for_window(exact)
        if unfit is not None:
            raise EataError(unfit)
        if isinstance(model.statistics, Auto):
            raise EataError(
                'eata.Window keeps statistics of its own, which prior="auto" can\'t choose; give the method a number, '
                "such as prior=0."
            )
        remembered = Remembered(model.net, length, model.statistics.prior)
        super().__init__(model)
        self.remembered = remembered
        self._passes_through = isinstance(model, PerImage) or (
            not isinstance(model, GradientAdapter)
            and math.isinf(model.statistics.prior)
            and model.unfit_for_window(exact=False) is None
        )
        self.declare(length=length, exact=exact)
        self.remember("samples", [None] * length)
        self.remember("logits", [None] * length)
        for name in ("count", "next", "since_step"):
            self.remember(name, 0)
        self.remember("moments", remembered.moments)
        self.remember("average", remembered.average)

    @property
    def moments(self) -> Tensor:
        """Of the first layer: mean and mean square of each sample, (L, 2, C)."""
        return self.remembered.moments

    @moments.setter
    def moments(self, value: Tensor) -> None:
        self.remembered.moments = value

    @property
    def average(self) -> Tensor:
        """Of all layers: mean and mean square over samples, (2, channels)."""
        return self.remembered.average

    @average.setter
    def average(self, value: Tensor) -> None:
        self.remembered.average = value

    @property
    def share(self) -> float:
        """How much of the source is in the BatchNorm statistics now: its prior, and what the window lacks."""
        return super().share if self._passes_through else self.remembered.source_share(self.count)

    # --- the loop -------------------------------------------------------------------------------------------------

    def run(self, inputs: Inputs) -> Tensor:
        if self._passes_through:
            return self.model.run(inputs)
        predict = self._predict_exact if self.exact else self._predict_cached
        if len(inputs) <= self.length:
            return predict(inputs)
        return torch.cat([predict(part) for part in inputs.split(self.length)])

    @contextlib.contextmanager
    def _normalizing_by(self, statistics: Statistics) -> Iterator[None]:
        """The method works by these statistics, for as long as the block lasts; nets without BatchNorm need none."""
        before = self.model.statistics
        if self.remembered.layers:
            self.model.statistics = statistics
        try:
            yield
        finally:
            self.model.statistics = before

    def _places(self, samples: int) -> list[int]:
        """Where new samples go, in the place of the oldest."""
        return [(self.next + number) % self.length for number in range(samples)]

    def _others(self, kind: tuple[Any, ...], new: list[int]) -> dict[int, Inputs]:
        """The samples of the window that stay in it beside new ones, of those of this kind, by place."""
        stay = {place: Inputs.of(kept) for place, kept in enumerate(self.samples) if kept and place not in new}
        return {place: sample for place, sample in stay.items() if sample.kind == kind}

    def _advance(self, places: list[int], inputs: Inputs, logits: Tensor) -> None:
        """Take new samples in."""
        # Copies: the caller may write into either.
        for place, sample, row in zip(places, inputs.map(torch.clone).split(1), logits.clone(), strict=True):
            self.samples[place], self.logits[place] = sample.tree(), row
        self.count = min(self.count + len(places), self.length)
        self.next = (self.next + len(places)) % self.length
        self.since_step = (self.since_step + len(places)) % self.length

    def _is_due(self, samples: int) -> bool:
        """Whether it is time for a step with so many more samples."""
        return self.since_step + samples >= self.length

    # --- the paper's window -----------------------------------------------------------------------------------------

    def _predict_exact(self, inputs: Inputs) -> Tensor:
        places = self._places(len(inputs))
        batch = joined([inputs, *self._others(inputs.kind, places).values()])
        step = self.learning and (self._is_due(len(inputs)) or getattr(self.model, "episodic", False))
        missing = self.model.statistics.prior + self.length - len(batch)
        with self._normalizing_by(Statistics(missing)), contextlib.nullcontext() if step else self.model.frozen():
            logits = self.model.run(batch)[: len(inputs)]
        if self.learning:
            self._advance(places, inputs, logits)
        return logits

    # --- the cached window ------------------------------------------------------------------------------------------

    def _predict_cached(self, inputs: Inputs) -> Tensor:
        places = self._places(len(inputs))
        others = self._others(inputs.kind, places) if self.learning and self._outgrows(len(inputs)) else {}
        count = min(self.count + len(inputs), self.length)
        statistics = NewSamples(self.remembered, count, [*places, *others])
        batch = self._forward_by(statistics, joined([inputs, *others.values()]))
        if statistics.few and statistics.strange():
            statistics = NewSamples(self.remembered, count, places, few=False)
            batch = self._forward_by(statistics, inputs)
        answer = self.model.answer(batch)[: len(inputs)]
        if not self.learning:
            return answer
        if finite_rows([batch.logits]) is not None:  # it would spoil the statistics of the next L samples
            self.warn_once("The net gave NaN or infinite logits for finite input; they stay out of the window.")
            self.stats.rejected += len(inputs)
            return answer
        statistics.write()
        due = self._is_due(len(inputs))
        self._advance(places, inputs, batch.logits[: len(inputs)])
        if due and not self.model.paused:
            if self.on_answer is not None:
                self.on_answer(answer)
            self._step(inputs.kind)
        return answer

    def _forward_by(self, statistics: WindowStatistics, inputs: Inputs) -> Pass:
        with self._normalizing_by(statistics):
            return self.model.forward(inputs)

    def _outgrows(self, samples: int) -> bool:
        """Whether the window grows to the next power of two, or becomes full, with so many more.

        Then all of it is forwarded again (2 L forwards in all, once). From layer to layer, what older samples went
        through lags behind, so that without this the deep layers would need many windows to settle.
        """
        after = min(self.count + samples, self.length)
        return after > self.count and (after == self.length or after.bit_length() > self.count.bit_length())

    def _step(self, kind: tuple[Any, ...]) -> None:
        """Let the method learn from the samples of the window, of those of the newest one's kind.

        Their logits are known; only what the method chooses (filled up) is forwarded again, for the gradient.
        """
        known = self._others(kind, [])
        inputs = joined(list(known.values()))
        logits = torch.stack([row for place in known if (row := self.logits[place]) is not None])

        def gradients(index: Tensor, loss_of: LossOf) -> Gradients:
            rows = _filled_up(index, len(inputs), -(-self.length // SIZES))
            batch = self.model.forward(inputs.take(rows), grad=True)
            every = torch.arange(len(rows), device=index.device)
            return batch.gradients(every, lambda logits: loss_of(logits[: len(index)]))

        with self._normalizing_by(WindowStatistics(self.remembered, self.count)):
            self.model.learn(Pass(inputs, logits, gradients=gradients))

    # --- life -----------------------------------------------------------------------------------------------------

    def move(self, device: torch.device, dtype: torch.dtype) -> None:
        moments, average = self.moments, self.average
        self.remembered.allocate()
        self.moments, self.average = moments, average
        super().move(device, dtype)

    def snapshot(self, *args: Any, **kwargs: Any) -> torch.nn.Module:
        """As the inner adapter's; without a batch, the window's statistics as they stand become the running ones."""
        if args or kwargs or not self.remembered.layers:
            return super().snapshot(*args, **kwargs)
        with self.lock:
            WindowStatistics(self.remembered, self.count).begin()  # fills the room with them as they stand
            now = enumerate(self.remembered.given_by_layer)
            return norm.with_statistics(self.net, {index: (g.mean.clone(), g.variance.clone()) for index, g in now})


def _filled_up(index: Tensor, samples: int, step: int) -> Tensor:
    """Chosen positions, then as many others of ``samples`` as make their number a multiple of ``step``.

    >>> _filled_up(torch.tensor([1, 4]), 6, 4)
    tensor([1, 4, 0, 2])
    """
    missing = min(-len(index) % max(1, step), samples - len(index))
    others = torch.ones(samples, dtype=torch.bool, device=index.device).index_fill_(0, index, False).nonzero()[:, 0]
    return torch.cat([index, others[:missing]])
