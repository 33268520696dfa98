"""Streams of single samples: BatchNorm statistics, and gradient steps, over the last L of them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from eata import norm
from eata.adapter import Adapter, Choice, GradientAdapter, Stats, in_range
from eata.errors import EataError
from eata.methods.per_image import PerImage


@dataclasses.dataclass
class _Layer:
    """A BatchNorm layer, with its source statistics."""

    module: _BatchNorm
    index: int
    mean: Tensor
    variance: Tensor

    def __post_init__(self) -> None:
        # Looking these up in the module takes as long as a small operation.
        self.weight, self.bias, self.eps = self.module.weight, self.module.bias, self.module.eps
        self.channels = self.module.num_features

    def normalize(self, x: Tensor, mean: Tensor | None, variance: Tensor | None) -> Tensor:
        own = mean is None
        return torch.batch_norm(x, self.weight, self.bias, mean, variance, own, 0.0, self.eps, False)


MEMORY = 2  # windows: the time constant of deeper layers' statistics
MANY = 32  # samples for each new one: a window of so many is hardly changed by it
STRANGE = 8.0  # mean square of a sample's values at a layer, normalized by the others; 1 is usual

Normalize = Callable[[_Layer, Tensor], Tensor]


class Window(Adapter):
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
    by the predictions given, and forwards the chosen again, normalized by the window's statistics; the gradient flows
    through BatchNorm as if they were the whole batch.

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

    def __init__(self, model: Adapter, length: int = 64, exact: bool = False) -> None:
        # No super().__init__: the inner adapter has made the net ready.
        if not isinstance(model, Adapter) or isinstance(model, Window):
            raise TypeError(
                f"eata.Window wraps an adapter, not a {type(model).__name__}: eata.Window(eata.Tent(net), length=64)."
            )
        in_range("length", length, low=1)
        try:
            length = operator.index(length)
        except TypeError:
            raise EataError(f"length={length!r} is not a whole number; count the samples, as in length=64.") from None
        if not exact and not isinstance(model, PerImage) and getattr(model, "episodic", False):
            raise EataError("An episodic method steps anew for each sample; use eata.Window(..., exact=True).")
        self.model = model
        self.net = model.net
        self.length = length
        self.exact = exact
        self.settings = {"length": length, "exact": exact}
        self._prepared = model._prepared
        self._undo = model._undo
        self._learning = self._channels_last = True
        self._batch_norm = model._batch_norm = False  # no warning of small batches: the window is the batch
        self._warned = model._warned
        self._source_digest = None
        self._prior: float = model.settings["prior"]
        self._layers = self._find_layers()
        self._passes_through = isinstance(model, PerImage) or (
            not isinstance(model, GradientAdapter) and math.isinf(self._prior)
        )
        self._clear()

    def _find_layers(self) -> list[_Layer]:
        if math.isinf(self._prior):
            return []
        layers: list[_Layer] = []
        with self._prepared.source_statistics():
            for name, module in self.net.named_modules():
                if not isinstance(module, _BatchNorm):
                    continue
                if module.running_mean is None or module.running_var is None:
                    raise EataError(
                        f"BatchNorm '{name}' has no running statistics, which eata.Window needs until it is full."
                    )
                layers.append(_Layer(module, len(layers), module.running_mean, module.running_var))
        return layers

    def _clear(self) -> None:
        """An empty window: three rings, in which a sample has the same place."""
        like = self._layers[0].mean if self._layers else torch.empty(0)
        channels = [layer.channels for layer in self._layers]
        sources = [torch.stack([layer.mean, layer.variance]) for layer in self._layers]
        self._source = torch.cat(sources or [like.new_zeros(2, 0)], 1)
        #: mean and mean square of each sample, for the channels of the first layer; about the source mean and not about
        #: 0, that little is lost when the square of the one is taken from the other
        self._moments = like.new_zeros(self.length, 2, sum(channels[:1]))
        #: the same for the channels of all layers, averaged over samples; what deeper layers use
        self._average = like.new_zeros(2, sum(channels))
        # Room for one forward's mean and variance, and views of it by layer, made once, for making them takes time:
        # (1, C) each, as native_group_norm gives them, and (C,) each, as batch_norm takes them.
        self._room = like.new_zeros(2, sum(channels))
        # From channels to layers: the mean over each layer's.
        self._by_layer = torch.block_diag(*[like.new_full((c, 1), 1 / c) for c in channels] or [like.new_zeros(0, 1)])
        self._room_by_layer = list(zip(*(kind[None].split(channels, 1) for kind in self._room), strict=True))
        self._statistics_by_layer = [(mean[0], variance[0]) for mean, variance in self._room_by_layer]
        self._images: list[Tensor | None] = [None] * self.length
        self._logits: list[Tensor | None] = [None] * self.length
        self._count = 0  # samples seen, at most L
        self._next = 0  # place of the next one
        self._since_step = 0  # samples

    # --- the loop -------------------------------------------------------------------------------------------------

    @property
    def stats(self) -> Stats:  # type: ignore[override]
        """Those of the inner method."""
        return self.model.stats

    def _checked(self, x: Tensor) -> Tensor:
        return self.model._checked(x)

    def _predict_and_adapt(self, x: Tensor) -> Tensor:
        if self._passes_through:
            with contextlib.nullcontext() if self._learning else self.model.frozen():
                return self.model._predict_and_adapt(x)
        predict = self._predict_exact if self.exact else self._predict_cached
        if len(x) <= self.length:
            return predict(x)
        return torch.cat([predict(part) for part in x.split(self.length)])

    def _places(self, samples: int) -> list[int]:
        """Where new samples go, in the place of the oldest."""
        return [(self._next + number) % self.length for number in range(samples)]

    def _others(self, shape: torch.Size, new: list[int]) -> dict[int, Tensor]:
        """The samples of the window that stay in it beside new ones, of those that have this shape, by place."""
        stay = {place: image for place, image in enumerate(self._images) if place not in new}
        return {place: image for place, image in stay.items() if image is not None and image.shape == shape}

    def _is_due(self, samples: int) -> bool:
        """Count these samples in; whether it is time for a step."""
        due = self._since_step + samples >= self.length
        self._since_step = (self._since_step + samples) % self.length
        return due

    @contextlib.contextmanager
    def _normalizing(self, normalize: Normalize) -> Iterator[None]:
        """BatchNorm layers work by ``normalize``, for as long as the block lasts."""
        before = [layer.module.__dict__.get("forward") for layer in self._layers]
        self._prepared.mixing = False
        for layer in self._layers:  # not by setattr, nor by hooks: both would take a good part of a small layer's time
            layer.module.__dict__["forward"] = functools.partial(normalize, layer)
        try:
            yield
        finally:
            self._prepared.mixing = True
            for layer, forward in zip(self._layers, before, strict=True):
                del layer.module.__dict__["forward"]
                if forward is not None:
                    layer.module.__dict__["forward"] = forward

    # --- the paper's window -----------------------------------------------------------------------------------------

    def _predict_exact(self, x: Tensor) -> Tensor:
        places = self._places(len(x))
        others = self._others(x.shape[1:], places)
        step = self._learning and (self._is_due(len(x)) or getattr(self.model, "episodic", False))
        with self._normalizing(self._by_batch), contextlib.nullcontext() if step else self.model.frozen():
            logits = self.model._predict_and_adapt(_batch(x, others))[: len(x)]
        if self._learning:
            self._advance(places, x, logits)
        return logits

    def _advance(self, places: list[int], images: Tensor, logits: Tensor) -> None:
        # Copies: the caller may write into either.
        for place, image, row in zip(places, images.detach().clone(), logits.clone(), strict=True):
            self._images[place], self._logits[place] = image, row
        self._count = min(self._count + len(places), self.length)
        self._next = (self._next + len(places)) % self.length

    def _by_batch(self, layer: _Layer, x: Tensor) -> Tensor:
        missing = self._prior + self.length - len(x)
        if x.numel() == x.shape[1]:  # one value per channel has no variance
            return layer.normalize(x, layer.mean, layer.variance)
        if missing == 0 and torch.is_grad_enabled():
            return layer.normalize(x, None, None)
        return layer.normalize(x, *norm.mixed_statistics(x, (layer.mean, layer.variance), missing))

    # --- the cached window ------------------------------------------------------------------------------------------

    def _predict_cached(self, x: Tensor) -> Tensor:
        places = self._places(len(x))
        others = self._others(x.shape[1:], places) if self._learning and self._outgrows(len(x)) else {}
        count = min(self._count + len(x), self.length)
        moments = _Moments(self, [*places, *others], count)
        logits = self._forward_by(moments, _batch(x, others))
        if moments.few and moments.strange():
            moments = _Moments(self, places, count, few=False)
            logits = self._forward_by(moments, x)
        if self._learning:
            if not bool(torch.isfinite(logits).all()):  # it would spoil the statistics of the next L samples
                self._warn_once("The net gave NaN or infinite logits for finite input; they stay out of the window.")
                self.stats.rejected += len(x)
                return logits[: len(x)]
            moments.write()
            self._advance(places, x, logits[: len(x)])
            if self._is_due(len(x)) and isinstance(self.model, GradientAdapter):
                self._step(self.model, x.shape[1:])
        return logits[: len(x)]

    def _forward_by(self, moments: _Moments, x: Tensor) -> Tensor:
        with torch.no_grad(), self._normalizing(moments.normalize):
            logits = self._forward(x)
        self.stats.forwards += len(x)
        return logits

    def _outgrows(self, samples: int) -> bool:
        """Whether the window grows to the next power of two, or becomes full, with so many more.

        Then all of it is forwarded again (2 L forwards in all, once). From layer to layer, what older samples went
        through lags behind, so that without this the deep layers would need many windows to settle.
        """
        after = min(self._count + samples, self.length)
        return after > self._count and (after == self.length or after.bit_length() > self._count.bit_length())

    def _step(self, model: GradientAdapter, shape: torch.Size) -> None:
        """One step over the samples of the window that are worth one, of those that have the newest one's shape."""
        known = {place: self._logits[place] for place in self._others(shape, [])}
        choice = model.select(torch.stack([row for row in known.values() if row is not None]))
        model.stats.reliable += choice.reliable
        if len(choice.index) == 0:
            return
        places = [list(known)[index] for index in choice.index.tolist()]
        moments = _Moments(self, [], self._count)  # the window's have theirs in them already
        with self._normalizing(moments.normalize_for_step):
            logits = self._forward_in_best_layout(
                torch.stack([image for place in places if (image := self._images[place]) is not None])
            )
        model.stats.forwards += len(logits)
        model._learn(logits, Choice(torch.arange(len(logits), device=logits.device), choice.weight, choice.reliable))

    def source_share(self, samples: int) -> float:
        """The source statistics' share while the window holds so many samples."""
        return (self._prior + self.length - samples) / (self._prior + self.length)

    # --- life and state -------------------------------------------------------------------------------------------

    def reset(self) -> None:
        self.model.reset()
        self._clear()

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "model": self.model.state_dict(),
            "moments": self._moments.clone(),
            "average": self._average.clone(),
            "images": list(self._images),
            "logits": list(self._logits),
            "count": self._count,
            "next": self._next,
            "since_step": self._since_step,
        }

    def _take_state(self, saved: dict[str, Any]) -> None:
        self.model.load_state_dict(saved["model"])
        device = next(self.net.parameters(), self._moments).device
        self._moments.copy_(saved["moments"])
        self._average.copy_(saved["average"])
        self._images = [None if image is None else image.to(device) for image in saved["images"]]
        self._logits = [None if row is None else row.to(device) for row in saved["logits"]]
        self._count, self._next, self._since_step = saved["count"], saved["next"], saved["since_step"]

    def source_digest(self) -> str:
        return self.model.source_digest()


def _batch(x: Tensor, others: dict[int, Tensor]) -> Tensor:
    return torch.cat([x, torch.stack(list(others.values()))]) if others else x


class _Moments:
    """One forward of some samples of the window: each layer normalizes by all of it, and notes their new moments.

    Args:
        window: it holds the moments of the others.
        places: where the forwarded samples belong, in their order; none if their moments are to stay as they are.
        count: samples in the window, these included.
        few: whether deeper layers leave the new samples' own out, which are in the average from the next sample on;
            by default where there are many others.
    """

    def __init__(self, window: Window, places: list[int], count: int, few: bool | None = None) -> None:
        self.window = window
        self.places = torch.tensor(places, dtype=torch.long, device=window._moments.device)
        self.count = count
        self.share = window.source_share(count)
        self.part = len(places) / count  # of the window that gets new moments
        self.few = 0 < MANY * len(places) <= count and len(window._layers) > 1 if few is None else few
        #: for each layer: mean, and one over the standard deviation, of each sample's channels, (k, C) each
        self._new: list[tuple[Tensor, Tensor] | None] = [None] * len(window._layers)
        weights = window._moments.new_full((1, window.length), 1 / max(1, count - len(places)))
        weights.index_fill_(1, self.places, 0)
        first = torch.mm(weights, window._moments.flatten(1)).view_as(window._moments[0])
        window._room.copy_(window._average)[:, : first.shape[1]] = first
        mean, variance = window._room
        variance.addcmul_(mean, mean, value=-1).clamp_(min=0)
        mean += window._source[0]
        if self.share and (self.few or not places):
            since = first.shape[1] if places else 0  # the first layer still gets its own
            window._room[:, since:].lerp_(window._source[:, since:], self.share)

    def normalize(self, layer: _Layer, x: Tensor) -> Tensor:
        """What the layer gives for x. A small layer takes no longer than ten operations, so there are few."""
        return layer.normalize(x, *self._statistics(layer, x, *self._own(layer, x)))

    def normalize_for_step(self, layer: _Layer, x: Tensor) -> Tensor:
        """The same with a graph, for samples whose moments are in the window's already."""
        mean, variance = self.window._statistics_by_layer[layer.index]
        if x.numel() == layer.channels:  # one value per channel has no variance, nor has a window of one
            given = (layer.mean, layer.variance) if self.count == 1 else (mean.clone(), variance.clone())
            return layer.normalize(x, *given)  # clones: autograd keeps them
        with torch.no_grad():
            own_mean, own_variance = norm.batch_statistics(x.detach().to(layer.mean.dtype))
        return _OwnGradient.apply(x, layer.weight, layer.bias, own_mean, own_variance, mean, variance, layer.eps)  # type: ignore[no-any-return,no-untyped-call]

    def _own(self, layer: _Layer, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean, and one over the standard deviation, of each sample's channels, (k, C) each, which are noted too."""
        if self._new[layer.index] is not None:
            raise RuntimeError("The net uses one BatchNorm layer twice, which eata.Window can't cache; use exact=True.")
        own = self._new[layer.index] = norm.inverse_moments(
            x if x.dtype == layer.mean.dtype else x.to(layer.mean.dtype)
        )
        return own

    def _statistics(self, layer: _Layer, x: Tensor, means: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of the whole window, from those of each sample of the part of it that is forwarded.

        They come in place of those of the others, without a new tensor for each step.
        """
        if self.few and layer.index:
            return self.window._statistics_by_layer[layer.index]
        samples = x.shape[0]  # len(x) would be a Python function, and take as long as an operation
        if self.count * x.numel() == samples * layer.channels:  # one value per channel has no variance
            return layer.mean, layer.variance
        mean, variance = self.window._room_by_layer[layer.index]
        part = self.part
        variance.mul_(1 - part)
        deviations = inverse.reciprocal()
        if samples == 1:
            far = means - mean
            variance.addcmul_(deviations, deviations, value=part)
        else:
            own_mean, own_variance = norm.pooled(means, deviations)
            far = own_mean - mean
            variance.add_(own_variance, alpha=part)
        variance.addcmul_(far, far, value=part * (1 - part))
        mean.add_(far, alpha=part)
        if self.share:
            mean.lerp_(layer.mean, self.share)
            variance.lerp_(layer.variance, self.share)
        return self.window._statistics_by_layer[layer.index]

    @functools.cached_property
    def _all(self) -> tuple[Tensor, Tensor]:
        """The new samples' mean and variance in the channels of all layers; the source's where one was not used."""
        new = [
            (layer.mean.expand(len(self.places), -1), layer.variance.rsqrt().expand(len(self.places), -1))
            if moments is None
            else moments
            for moments, layer in zip(self._new, self.window._layers, strict=True)
        ]
        return torch.cat([means for means, _ in new], 1), torch.cat([inverse for _, inverse in new], 1).pow_(-2)

    def strange(self) -> bool:
        """Whether a sample is so far from the others somewhere that its own moments are needed to hold it.

        With them in the statistics no value can be further off than the square root of the window's length. Without,
        images after a black frame, say, would explode from layer to layer, and spoil the average for long.
        """
        means, variances = self._all
        mean, variance = self.window._room
        square = (means - mean).square_().add_(variances).div_(variance + 1e-5)
        return not bool((square @ self.window._by_layer).max() <= STRANGE)  # NaN is strange too

    def write(self) -> None:
        """Keep the new moments in the window; layers that were not used (another head's) keep the source's."""
        window = self.window
        if not window._layers:
            return
        means, variances = self._all
        means = means - window._source[0]
        moments = torch.stack([means, variances.addcmul(means, means)], 1)
        window._moments.index_copy_(0, self.places, moments[:, :, : window._layers[0].channels])
        memory = self.count if self.count < window.length or self.part == 1 else MEMORY * window.length
        window._average.lerp_(moments.mean(0), len(self.places) / memory)


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
