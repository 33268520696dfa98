"""Streams of single samples: BatchNorm statistics, and gradient steps, over the last L of them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from eata import norm
from eata.adapter import Adapter, Choice, GradientAdapter, Stats, in_range
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

    def normalize(self, x: Tensor, mean: Tensor | None, variance: Tensor | None) -> Tensor:
        own = mean is None
        return torch.batch_norm(x, self.weight, self.bias, mean, variance, own, 0.0, self.eps, False)


TINY = 1e-12  # keeps 1 / deviation finite

Normalize = Callable[[_Layer, Tensor], Tensor]


class Window(Adapter):
    """Any method on a stream of single samples (or small batches): the last ``length`` samples stand in for a batch.

    The paper forwards the last L samples again with each new one (``exact=True``; '-wnd' in its Table 'bs=1'), L times
    the cost. But a sample's share in a BatchNorm layer's statistics is two numbers a channel: mean and mean square. The
    default keeps those of the last L samples for each layer and forwards only the new ones, normalized by the window's
    statistics (theirs included). Past the first layer this is an approximation, for an older sample's activations were
    computed under older statistics.

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
        if not exact and not isinstance(model, PerImage) and getattr(model, "episodic", False):
            raise ValueError("An episodic method steps anew for each sample; use eata.Window(..., exact=True).")
        self.model = model
        self.net = model.net
        self.length = length
        self.exact = exact
        self.settings = {"length": length, "exact": exact}
        self._prepared = model._prepared
        self._undo = model._undo
        self._learning = True
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
                    raise ValueError(
                        f"BatchNorm '{name}' has no running statistics, which eata.Window needs until it is full."
                    )
                layers.append(_Layer(module, len(layers), module.running_mean, module.running_var))
        return layers

    def _clear(self) -> None:
        """An empty window: three rings, in which a sample has the same place."""
        like = self._layers[0].mean if self._layers else torch.empty(0)
        self._channels = [layer.module.num_features for layer in self._layers]
        self._origin = torch.cat([layer.mean for layer in self._layers] or [like])
        #: mean and mean square of each sample, about the source mean, for the channels of all layers; about it and not
        #: about 0, that little is lost when the square of the one is taken from the other
        self._moments = like.new_zeros(self.length, 2, sum(self._channels))
        # Room for one forward's numbers, and views of it by layer: made once, for making them takes time.
        self._room = like.new_zeros(2, sum(self._channels))
        self._room_by_layer = list(zip(*(kind.split(self._channels) for kind in self._room), strict=True))
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
        for place, image, row in zip(places, images.detach().clone(), logits, strict=True):
            self._images[place], self._logits[place] = image, row
        self._count = min(self._count + len(places), self.length)
        self._next = (self._next + len(places)) % self.length

    def _by_batch(self, layer: _Layer, x: Tensor) -> Tensor:
        missing = self._prior + self.length - len(x)
        if x.numel() == x.shape[1]:  # one value per channel has no variance
            return layer.normalize(x, layer.mean, layer.variance)
        if missing == 0:
            return layer.normalize(x, None, None)
        return layer.normalize(x, *norm.mixed_statistics(x, (layer.mean, layer.variance), missing))

    # --- the cached window ------------------------------------------------------------------------------------------

    def _predict_cached(self, x: Tensor) -> Tensor:
        places = self._places(len(x))
        others = self._others(x.shape[1:], places) if self._learning and self._outgrows(len(x)) else {}
        count = min(self._count + len(x), self.length)
        moments = _Moments(self, [*places, *others], count)
        with torch.no_grad(), self._normalizing(moments.normalize):
            logits = self._forward(_batch(x, others))
        self.stats.forwards += len(logits)
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
        moments = _Moments(self, places, self._count)
        with self._normalizing(moments.normalize):
            logits = self._forward(
                torch.stack([image for place in places if (image := self._images[place]) is not None])
            )
        model.stats.forwards += len(logits)
        moments.write()
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
        places: where the forwarded samples belong, in their order.
        count: samples in the window, these included.
    """

    def __init__(self, window: Window, places: list[int], count: int) -> None:
        self.window = window
        self.places = torch.tensor(places)
        self.count = count
        self.share = window.source_share(count)
        self.part = len(places) / count  # of the window that is forwarded
        #: for each layer: mean and 1 / standard deviation of each sample's channels, (k, C) each
        self._new: list[tuple[Tensor, Tensor] | None] = [None] * len(window._layers)
        weights = window._moments.new_full((window.length,), 1 / max(1, count - len(places)))
        weights.index_fill_(0, self.places, 0)
        torch.mm(weights[None], window._moments.flatten(1), out=window._room.view(1, -1))
        mean, variance = window._room
        variance.addcmul_(mean, mean, value=-1).clamp_(min=0).mul_(1 - self.part)
        mean += window._origin
        #: of the others, for each layer: mean, and variance times their part of the window
        self._others = window._room_by_layer

    def normalize(self, layer: _Layer, x: Tensor) -> Tensor:
        """What the layer gives for x. A small layer takes no longer than ten operations, so there are few."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                own = self._own(layer, x)
                statistics = self._statistics(layer, *own)
            return _with_own_gradient(layer, x, own, statistics)
        return layer.normalize(x, *self._statistics(layer, *self._own(layer, x)))

    def _own(self, layer: _Layer, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of x alone; those of each sample are noted."""
        if self._new[layer.index] is not None:
            raise RuntimeError("The net uses one BatchNorm layer twice, which eata.Window can't cache; use exact=True.")
        count, channels = x.shape[:2]
        values = x.numel() // (count * channels)
        if x.dtype != layer.mean.dtype:
            x = x.to(layer.mean.dtype)
        # GroupNorm with a channel a group gives both in one pass, at a tenth of the time of var_mean.
        _, means, inverse = torch.native_group_norm(x.contiguous(), None, None, count, channels, values, channels, TINY)
        self._new[layer.index] = (means, inverse)
        if self.count * values == 1:  # one value per channel has no variance
            return layer.mean, layer.variance
        if count == 1:
            return means[0], inverse[0].pow(-2)
        return means.mean(0), inverse.pow(-2).mean(0) + means.var(0, correction=0)

    def _statistics(self, layer: _Layer, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of the whole window, from those of the part of it that is forwarded."""
        others_mean, others_variance = self._others[layer.index]
        far = mean - others_mean
        variance = torch.add(others_variance, variance, alpha=self.part)
        variance.addcmul_(far, far, value=self.part * (1 - self.part))
        mean = torch.add(others_mean, far, alpha=self.part)
        if self.share:
            return torch.lerp(mean, layer.mean, self.share), torch.lerp(variance, layer.variance, self.share)
        return mean, variance

    def write(self) -> None:
        """Keep the new moments in the window; those of layers that were not used (another head's) stay 0."""
        window = self.window
        if not window._layers:
            return
        zeros = window._moments.new_zeros(len(self.places), max(window._channels))
        new = [
            (zeros[:, :channels], zeros[:, :channels]) if moments is None else moments
            for moments, channels in zip(self._new, window._channels, strict=True)
        ]
        means = torch.cat([means for means, _ in new], 1) - window._origin
        squares = torch.cat([inverse for _, inverse in new], 1).pow_(-2).addcmul_(means, means)
        window._moments[self.places] = torch.stack([means, squares], 1)


def _with_own_gradient(
    layer: _Layer, x: Tensor, own: tuple[Tensor, Tensor], statistics: tuple[Tensor, Tensor]
) -> Tensor:
    """Normalize by the given mean and variance, with the gradient of BatchNorm over x's own.

    Statistics as constants would give a gradient far off the textbook's (cosine 0.4); BatchNorm's own backward over the
    chosen samples comes near it (0.9 to 0.98). Between two sets of statistics lies a scale and a shift a channel, so
    BatchNorm over x with these in its weight and bias has the one's values and the other's gradient.
    """
    mean, variance = statistics
    if x.numel() == x.shape[1]:  # one value per channel has no variance
        return layer.normalize(x, mean, variance)
    deviation = (variance + layer.eps).sqrt()
    scale = (own[1] + layer.eps).sqrt() / deviation
    shift = (own[0] - mean) / deviation
    weight = scale if layer.weight is None else layer.weight * scale
    bias = shift if layer.weight is None else layer.bias + layer.weight * shift
    return F.batch_norm(x, None, None, weight, bias, True, 0.0, layer.eps)
