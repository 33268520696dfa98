"""A memory of few samples that are balanced over the classes, recent and sure (RoTTA, Section 3.3)."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from torch import Tensor

from eata.errors import InputError
from eata.inputs import Inputs

Item = dict[str, Any]  # image (1, C, H, W), label, entropy in nats, age in samples


def same_size(inputs: Inputs, bank: list[Item]) -> Inputs:
    """The batch, if its images can be put beside those of the bank."""
    if bank and bank[0]["image"].shape[1:] != inputs.shape[1:]:
        old, new = tuple(bank[0]["image"].shape[1:]), tuple(inputs.shape[1:])
        raise InputError(f"The memory holds images {old}, not {new}; resize them, or reset().")
    return inputs


def admit(bank: list[Item], image: Tensor, label: int, entropy: float, capacity: int, classes: int) -> None:
    """Let one more sample of the stream into the bank, if it is better than the worst of those that it may replace.

    A class has room for ``capacity / classes``, begun ones included. Where it is full, a sample has to replace one of
    its class; where the whole bank is, one of the largest classes. The worst is the one with the largest
    1 / (1 + exp(-age / capacity)) + entropy / ln C.

    Args:
        bank: changed in place.
        image: of the sample, (1, C, H, W).
        label: that was predicted.
        entropy: of the prediction, in nats.
        capacity: of the bank, in samples.
        classes: C.

    >>> import torch
    >>> bank = []
    >>> for entropy in (0.3, 0.1, 0.2):
    ...     admit(bank, torch.zeros(1, 1, 2, 2), 0, entropy, capacity=4, classes=2)
    >>> [(item["entropy"], item["age"]) for item in bank]
    [(0.1, 2), (0.2, 1)]
    """

    def badness(item: Item) -> float:
        return 1 / (1 + math.exp(-item["age"] / capacity)) + float(item["entropy"]) / math.log(classes)

    new: Item = {"image": image.clone(), "label": label, "entropy": entropy, "age": 0}
    counts = Counter(item["label"] for item in bank)
    if counts[label] >= capacity / classes:
        rivals = [item for item in bank if item["label"] == label]
    elif len(bank) >= capacity:
        largest = max(counts.values())
        rivals = [item for item in bank if counts[item["label"]] == largest]
    else:
        rivals = []
    worst = max(rivals, key=badness, default=None)
    if worst is None or badness(worst) > badness(new):
        bank[:] = [item for item in bank if item is not worst]
        bank.append(new)
    for item in bank:
        item["age"] += 1
