"""A stream that was decoded and corrupted once, in a file that any number of processes can share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eata import state
from eata.data.stream import Batch, Stream


def keep(stream: Stream, path: Path) -> None:
    """Write the images of a stream, as they are before they are normalized, with all that is known of them."""
    count = len(stream)
    images = torch.empty(0)
    readable = torch.zeros(count, dtype=torch.bool)
    labels = torch.full((count,), -1)
    for number, image, label in stream.pixels():
        if not readable.any():
            images = torch.zeros(count, *image.shape, dtype=torch.uint8)
        images[number], labels[number], readable[number] = image, label, True
    state.write(
        path,
        {
            "name": stream.name,
            "class_names": list(stream.class_names),
            "class_index": None if stream.class_index is None else list(stream.class_index),
            "digest": stream.digest,
            "generated": stream.generated,
            "skipped": [[str(file), why] for file, why in stream.skipped],
            "images": images,
            "labels": labels,
            "readable": readable,
        },
    )


class KeptStream(Stream):
    """What :func:`keep` wrote; the same batches, to the last bit, as the stream it was made from.

    The file is mapped into memory, so processes that read the same one share its pages.
    """

    def __init__(self, path: Path) -> None:
        found = state.read(path)
        super().__init__(
            found["name"],
            found["class_names"],
            digest=found["digest"],
            class_index=found["class_index"],
            generated=found["generated"],
        )
        self._images, self._labels, self._readable = found["images"], found["labels"], found["readable"]
        self._skipped = [(Path(file), why) for file, why in found["skipped"]]

    def __len__(self) -> int:
        return len(self._labels)

    def pixels(self) -> Iterator[tuple[int, Tensor, int]]:
        for number in self._readable.nonzero().flatten().tolist():
            yield number, self._images[number], int(self._labels[number])

    def _read(self, order: NDArray[np.int64], size: int) -> Iterator[Batch]:
        self.skipped = list(self._skipped)
        everything = torch.from_numpy(order)
        for index in everything[self._readable[everything]].split(size):
            yield self._images[index], self._labels[index]
