"""Hard streams: what a stream does to adaptation that is left on. Each is a list of batches of labelled images.

Rows that are no images (noise, constant frames, garbage) have the label -1 and do not count in an error.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from eata import data
from eata.bench import streams
from eata.bench.streams import Order
from eata.data.stream import Batch

SIZE = 64  # images in a batch
SEVERITY = 5
SHIFT = ("gaussian_noise", "fog", "jpeg_compression")  # noise, weather, digital
Images = tuple[Tensor, Tensor]


@dataclasses.dataclass(frozen=True)
class Source:
    """Where the images come from, and how many.

    Attributes:
        images: in each part of a stream.
        seed: of the order, and of noise.
        split: ``"test"``; ``"train"`` for choosing thresholds.
        data: ``"cifar10"`` or ``"digits"``.
    """

    images: int
    seed: int = 2020
    split: str = "test"
    data: str = "cifar10"

    def load(self, corruption: str | None, count: int | None = None) -> Images:
        """The first ``count`` images under a corruption, normalized, and their labels."""
        pixels, labels = _load(self.data, self.split, corruption, self.images)
        return pixels[:count], labels[:count]

    def random(self) -> np.random.RandomState:
        """Its draws are promised to stay the same in later versions of numpy."""
        return np.random.RandomState(self.seed)


@functools.lru_cache(maxsize=32)
def _load(name: str, split: str, corruption: str | None, limit: int) -> Images:
    stream = data.load(name, split=split, corruption=corruption, severity=SEVERITY, limit=limit)
    # Both splits come in a mixed order of their own; the stream's order is chosen here.
    (batch,) = stream.batches(limit, seed=None, mean=(0.5,) * 3, std=(0.5,) * 3)
    return batch


def _cut(images: Images, order: Order, size: int = SIZE) -> list[Batch]:
    x, y = images
    return [(x[index], y[index]) for index in torch.from_numpy(order).split(size)]


def _shuffled(source: Source, corruption: str | None, count: int | None = None, size: int = SIZE) -> list[Batch]:
    images = source.load(corruption, count)
    return _cut(images, source.random().permutation(len(images[1])), size)


# --- the streams ------------------------------------------------------------------------------------------------------


def shift(source: Source) -> list[Batch]:
    """Three corruptions, one after another, each shuffled."""
    return [batch for name in SHIFT for batch in _shuffled(source, name)]


def clean(source: Source) -> list[Batch]:
    """No shift at all."""
    return _shuffled(source, None)


def continual(source: Source) -> list[Batch]:
    """All 15 corruptions, a quarter of the images each."""
    return [batch for name in data.CORRUPTIONS for batch in _shuffled(source, name, source.images // 4)]


def recurring(source: Source) -> list[Batch]:
    """Three corruptions, ten times over."""
    turns = [dataclasses.replace(source, seed=source.seed + turn) for turn in range(10)]
    return [batch for turn in turns for name in SHIFT for batch in _shuffled(turn, name, source.images // 10)]


def mixed(source: Source) -> list[Batch]:
    """All 15 corruptions shuffled together."""
    parts = [source.load(name, -(-source.images // 15)) for name in data.CORRUPTIONS]
    images = torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])
    return _cut(images, source.random().permutation(len(images[1])))


def in_order(source: Source, corruption: str | None, delta: float | None) -> list[Batch]:
    """Sorted by class (``delta`` 0), or nearly; None: shuffled."""
    images = source.load(corruption)
    part = streams.Part(((corruption, SEVERITY),), source.seed, delta)
    return _cut(images, streams.order(part, images[1].numpy()))


def one_class(source: Source) -> list[Batch]:
    """One class only (CIFAR-10's cats), over and over: eight times as long as other streams, at most 5,000 images."""
    x, y = source.load(None)
    own = torch.nonzero(y == 3).flatten().numpy()
    order = np.resize(source.random().permutation(own), min(8 * len(y), 5000))
    return _cut((x, y), order)


def alternating(source: Source) -> list[Batch]:
    """Another of the three corruptions with each batch."""
    parts = [_shuffled(source, name, source.images // 3) for name in SHIFT]
    return [batch for batches in zip(*parts, strict=True) for batch in batches]


def noise_first(source: Source) -> list[Batch]:
    """Pure noise for as long as the images then take (at most 50 batches), then fog."""
    batches = _shuffled(source, "fog")
    return [_noise(batch, source.seed + n) for n, batch in enumerate(batches[:50])] + batches


def _noise(batch: Batch, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.rand(batch[0].shape, generator=generator) - 1, torch.full_like(batch[1], -1)


def spoilt(source: Source, share: float, fill: Callable[[Batch, int], Tensor]) -> list[Batch]:
    """Fog, in which a share of each batch is replaced by something else."""
    found = []
    for number, (x, y) in enumerate(_shuffled(source, "fog")):
        count = max(1, round(share * len(y)))
        rows = torch.from_numpy(np.random.RandomState(source.seed + number).permutation(len(y))[:count])
        x, other, y = x.clone(), fill((x, y), source.seed + number), y.clone()
        x[rows], y[rows] = other[rows], -1
        found.append((x, y))
    return found


def _frames(batch: Batch, seed: int) -> Tensor:
    return torch.full_like(batch[0], (-1.0, 0.0)[seed % 2])  # black and grey by turns


def _garbage(batch: Batch, seed: int) -> Tensor:
    return _noise(batch, seed)[0]


def _nan(batch: Batch, seed: int) -> Tensor:
    return torch.full_like(batch[0], float("nan"))


@dataclasses.dataclass(frozen=True)
class Hard:
    """A hard stream.

    Attributes:
        make: its batches.
        says: what it is.
        shuffled: a stream that is as the papers want it: no alarm is due.
        lr: by how much the learning rate is too high.
    """

    make: Callable[[Source], list[Batch]]
    says: str
    shuffled: bool = False
    lr: float = 1.0


def _sizes(size: int) -> Hard:
    def make(source: Source) -> list[Batch]:
        return _shuffled(source, "fog", max(size, min(source.images, 256 * size)), size)

    return Hard(make, f"fog in batches of {size}")


STREAMS: dict[str, Hard] = {
    "shift": Hard(shift, "noise, fog, JPEG, shuffled", shuffled=True),
    "clean": Hard(clean, "clean images, shuffled", shuffled=True),
    "continual": Hard(continual, "15 corruptions one after another", shuffled=True),
    "recurring": Hard(recurring, "three corruptions, ten times", shuffled=True),
    "mixed": Hard(mixed, "15 corruptions mixed", shuffled=True),
    "sorted": Hard(functools.partial(in_order, corruption=None, delta=0.0), "clean images sorted by class"),
    "sorted-fog": Hard(functools.partial(in_order, corruption="fog", delta=0.0), "fog, sorted by class"),
    "dirichlet": Hard(functools.partial(in_order, corruption=None, delta=0.1), "clean images, Dirichlet 0.1"),
    "one-class": Hard(one_class, "cats only"),
    "alternating": Hard(alternating, "another corruption each batch", shuffled=True),
    "noise": Hard(noise_first, "pure noise, then fog"),
    "frames": Hard(functools.partial(spoilt, share=0.1, fill=_frames), "fog, 10 % black or grey frames"),
    "garbage": Hard(functools.partial(spoilt, share=0.3, fill=_garbage), "fog, 30 % noise in each batch"),
    "nan": Hard(functools.partial(spoilt, share=0.1, fill=_nan), "fog, 10 % NaN rows", shuffled=True),
    "lr20": Hard(shift, "noise, fog, JPEG, learning rate x 20", shuffled=True, lr=20.0),
    "batch1": _sizes(1),
    "batch2": _sizes(2),
    "batch4": _sizes(4),
    "batch16": _sizes(16),
    "new": Hard(lambda source: [], "nothing: a new model"),
}
