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
    """A BatchNorm layer, its source statistics, and where its channels are among those of all layers."""

    module: _BatchNorm
    source: tuple[Tensor, Tensor]
    channels: slice

    def normalize(self, x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        return F.batch_norm(x, mean, variance, self.module.weight, self.module.bias, False, 0.0, self.module.eps)


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
        end = 0
        with self._prepared.source_statistics():
            for name, module in self.net.named_modules():
                if not isinstance(module, _BatchNorm):
                    continue
                if module.running_mean is None or module.running_var is None:
                    raise ValueError(
                        f"BatchNorm '{name}' has no running statistics, which eata.Window needs until it is full."
                    )
                start, end = end, end + module.num_features
                layers.append(_Layer(module, (module.running_mean, module.running_var), slice(start, end)))
        return layers

    def _clear(self) -> None:
        """An empty window: three rings, in which a sample has the same place."""
        like = self._layers[0].source[0] if self._layers else torch.empty(0)
        channels = self._layers[-1].channels.stop if self._layers else 0
        #: mean and mean square of each sample, for the channels of all layers
        self._moments = like.new_zeros(self.length, 2, channels)
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
            return layer.normalize(x, *layer.source)
        if missing == 0:
            module = layer.module
            return F.batch_norm(x, None, None, module.weight, module.bias, True, 0.0, module.eps)
        return layer.normalize(x, *norm.mixed_statistics(x, layer.source, missing))

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
        self._new: dict[int, tuple[Tensor, Tensor]] = {}
        keep = window._moments.new_full((window.length,), 1 / count)
        keep[self.places] = 0
        self._rest_mean, self._rest_square = (keep @ window._moments.flatten(1)).view(2, -1)

    def normalize(self, layer: _Layer, x: Tensor) -> Tensor:
        at = layer.channels
        if at.start in self._new:
            raise RuntimeError("The net uses one BatchNorm layer twice, which eata.Window can't cache; use exact=True.")
        with torch.no_grad():
            each = self._new[at.start] = _sample_moments(x, layer.source[0].dtype)
            if self.count * (x.numel() // (len(x) * x.shape[1])) == 1:  # one value per channel has no variance
                return layer.normalize(x, *layer.source)
            mean, square = (each[0][0], each[1][0]) if len(x) == 1 else (each[0].sum(0), each[1].sum(0))
            mean = torch.add(self._rest_mean[at], mean, alpha=1 / self.count)
            square = torch.add(self._rest_square[at], square, alpha=1 / self.count)
            variance = square.addcmul_(mean, mean, value=-1).clamp_(min=0)
            if self.share:
                mean = torch.lerp(mean, layer.source[0], self.share)
                variance = torch.lerp(variance, layer.source[1], self.share)
        if torch.is_grad_enabled():
            return _own_gradient(layer, x, each, mean, variance)
        return layer.normalize(x, mean, variance)

    def write(self) -> None:
        """Keep the new moments in the window."""
        if len(self._new) == len(self.window._layers):
            each = [self._new[layer.channels.start] for layer in self.window._layers]
            if each:
                stacked = torch.stack([torch.cat(moments, 1) for moments in zip(*each, strict=True)], 1)
                self.window._moments[self.places] = stacked
            return
        for start, moments in self._new.items():  # some layers are not used, such as those of another head
            for kind, values in enumerate(moments):
                self.window._moments[self.places, kind, start : start + values.shape[1]] = values


def _sample_moments(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Mean and mean square of each sample's channels, (k, C) each."""
    if x.dim() == 2:
        x = x.to(dtype)
        return x, x.square()
    places = tuple(range(2, x.dim()))
    # Not var_mean, which takes 10 to 50 times as long on a CPU.
    norms = torch.linalg.vector_norm(x, dim=places, dtype=dtype)
    return x.mean(places, dtype=dtype), norms.square_().mul_(x.shape[1] * len(x) / x.numel())


def _own_gradient(layer: _Layer, x: Tensor, each: tuple[Tensor, Tensor], mean: Tensor, variance: Tensor) -> Tensor:
    """Normalize by a mean and variance, with the gradient of BatchNorm over x's own.

    Statistics as constants would give a gradient far off the textbook's (cosine 0.4); BatchNorm's own backward over the
    chosen samples comes near it (0.9 to 0.98). Between two sets of statistics lies a scale and a shift a channel, so
    BatchNorm over x with these in its weight and bias has the one's values and the other's gradient.
    """
    module = layer.module
    if x.numel() == x.shape[1]:  # one value per channel has no variance
        return layer.normalize(x, mean, variance)
    with torch.no_grad():
        own_mean, own_square = (moments.mean(0) for moments in each)
        own_variance = (own_square - own_mean.square()).clamp_(min=0)
        deviation = (variance + module.eps).sqrt()
        scale = (own_variance + module.eps).sqrt() / deviation
        shift = (own_mean - mean) / deviation
    weight = scale if module.weight is None else module.weight * scale
    bias = shift if module.weight is None else module.bias + module.weight * shift
    return F.batch_norm(x, None, None, weight, bias, True, 0.0, module.eps)
