"""How the constants of ``prior="auto"`` were chosen: on corrupted *training* images.

    python -m benchmarks.choose_statistics                    # ResNet-26, severity 5, batches of 64; some minutes
    python -m benchmarks.choose_statistics clean contrast --images 128

Each batch is predicted by the candidate that `eata.auto.choose` takes after a look at a part of the batch, by several
weights. Three equal ones are the least ``mean H(p) - weight * H(mean p)`` of all candidates: 0 is the least entropy, 1
the largest mutual information. Mean errors over the sets, beside each candidate's own; in brackets the difference to
the source on the set where it is largest. ``results/statistics/choice.md`` is what it printed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import mean

import torch
from torch import Tensor

import eata
from benchmarks.gradient import HALVES
from benchmarks.statistics import ordered
from eata import functional
from eata.auto import CANDIDATES, SOURCE, Layered, choose
from eata.inputs import Inputs
from eata.passes import Runner

WEIGHTS = (
    (0.0, 0.0, 0.0), (0.2, 0.2, 0.2), (1.0, 1.0, 1.0),
    (0.0, 0.7, 0.2), (0.1, 0.5, 0.2), (0.1, 0.7, 0.0), (0.1, 0.7, 0.2), (0.1, 0.7, 0.4), (0.1, 1.0, 0.2),
    (0.2, 0.7, 0.2),
)  # fmt: skip
PARTS = (64, 32, 16)  # samples looked at
ORDERS = ("shuffled", "sorted", "dirichlet", "one class")


def look(logits: Tensor) -> tuple[float, float]:
    """Mean entropy, and the entropy of the mean."""
    predictions = functional.probabilities(logits).mean(0)
    spread = -(predictions * predictions.clamp_min(1e-30).log()).sum()
    return float(functional.entropy(logits).mean()), float(spread)


class Batch:
    """One batch: how many each candidate gets wrong, and what a look at a part of it finds."""

    def __init__(self, runner: Runner, x: Tensor, y: Tensor) -> None:
        kinds = [Layered(first, last, len(runner.layers)) for first, last in CANDIDATES]
        parts = [[runner(Inputs(x[:: 64 // part]), kind).logits for kind in kinds] for part in PARTS]
        self.wrong = [int((logits.argmax(1) != y).sum()) for logits in parts[0]]
        self.looks = [list(zip(*map(look, by_kind), strict=True)) for by_kind in parts]
        self.samples = len(y)


def errors(sets: dict[str, list[list[Batch]]], pick: Callable[[Batch], int]) -> list[float]:
    """In percent, of each set, if each batch is predicted by the candidate that is picked for it."""
    rates = [
        [100 * sum(b.wrong[pick(b)] for b in stream) / sum(b.samples for b in stream) for stream in streams]
        for streams in sets.values()
    ]
    return [mean(of_set) for of_set in rates]


def chosen_by(sets: dict[str, list[list[Batch]]], part: int, weights: tuple[float, float, float]) -> str:
    """Mean error by these weights, and the largest difference to the source."""
    ours = errors(sets, lambda batch: choose(*batch.looks[part], weights))
    source = errors(sets, lambda batch: SOURCE)
    return f"{mean(ours):.1f} ({max(a - b for a, b in zip(ours, source, strict=True)):+.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="*", default=[*eata.data.CORRUPTIONS, "clean"], help="default: all, and clean")
    parser.add_argument("--images", type=int, default=448, help="of each set")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    runner = Runner(eata.models.load("resnet26-bn-cifar10"))
    found: dict[str, dict[str, list[list[Batch]]]] = {order: {} for order in ORDERS}
    for name in chosen.sets:
        corruption = None if name == "clean" else name
        stream = eata.data.load("cifar10", split="train", corruption=corruption, severity=5, limit=chosen.images)
        x, y = next(stream.batches(len(stream), seed=2020, mean=HALVES[0], std=HALVES[1]))
        for order in ORDERS:
            found[order][name] = [
                [Batch(runner, *pair) for pair in zip(images.split(64), labels.split(64), strict=True)]
                for _, images, labels in ordered(x, y, order, 2020)
            ]
    for order, sets in found.items():
        own = [mean(errors(sets, lambda batch, k=k: k)) for k in range(len(CANDIDATES))]  # type: ignore[misc]
        pairs = zip(CANDIDATES, own, strict=True)
        print(f"\n{order}:", ", ".join(f"{a:g} to {b:g}: {e:.1f}" for (a, b), e in pairs), end="\n\n")
        print("| weights |", " | ".join(f"{part} samples" for part in PARTS), "|\n" + "|---" * (len(PARTS) + 1) + "|")
        for weights in WEIGHTS:
            cells = [chosen_by(sets, part, weights) for part in range(len(PARTS))]
            print("|", ", ".join(f"{weight:g}" for weight in weights), "|", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
