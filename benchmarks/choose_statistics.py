"""How the constants of ``prior="auto"`` were chosen: on corrupted *training* images.

    python -m benchmarks.choose_statistics                    # ResNet-26, severity 5, batches of 64; some minutes
    python -m benchmarks.choose_statistics clean contrast --images 128

Each batch is predicted by that candidate which has the least ``mean H(p) - lambda * H(mean p)`` on a part of the batch;
lambda 0 is the least entropy, 1 the largest mutual information. Mean errors over the sets, beside each candidate's own;
in brackets the difference to the source on the set where it is largest. A candidate is the source's share in the first
and in the last layer. ``results/statistics/choice.md`` is what it printed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import mean

import torch
from torch import Tensor

import eata
from benchmarks.accuracy import HALVES
from benchmarks.statistics import ordered
from eata import functional
from eata.auto import Layered
from eata.inputs import Inputs
from eata.passes import Runner

SETS = ("contrast", "gaussian_noise", "clean", "glass_blur", "jpeg_compression")
CANDIDATES = ((1.0, 1.0), (0.5, 0.5), (0.4, 1.0), (0.8, 0.8), (0.3, 0.3))
LAMBDAS = (0.0, 0.2, 0.3, 0.5, 1.0)
PARTS = (64, 32, 16)  # samples looked at
ORDERS = ("shuffled", "sorted", "dirichlet", "one class")


def score(logits: Tensor, weight: float) -> float:
    predictions = functional.probabilities(logits).mean(0)
    spread = -(predictions * predictions.clamp_min(1e-30).log()).sum()
    return float(functional.entropy(logits).mean() - weight * spread)


class Batch:
    """One batch: how many each candidate gets wrong, and its score by part and lambda."""

    def __init__(self, runner: Runner, x: Tensor, y: Tensor) -> None:
        kinds = [Layered(first, last, len(runner.layers)) for first, last in CANDIDATES]
        parts = [[runner(Inputs(x[:: max(1, 64 // part)]), kind).logits for kind in kinds] for part in PARTS]
        self.wrong = [int((logits.argmax(1) != y).sum()) for logits in parts[0]]
        self.scores = [[[score(logits, weight) for logits in by_kind] for weight in LAMBDAS] for by_kind in parts]
        self.samples = len(y)


def errors(sets: dict[str, list[list[Batch]]], pick: Callable[[Batch], int]) -> list[float]:
    """In percent, of each set, if each batch is predicted by the candidate that is picked for it."""
    rates = [
        [100 * sum(b.wrong[pick(b)] for b in stream) / sum(b.samples for b in stream) for stream in streams]
        for streams in sets.values()
    ]
    return [mean(of_set) for of_set in rates]


def chosen_by(sets: dict[str, list[list[Batch]]], part: int, number: int, candidates: int) -> str:
    """Mean error where the least score decides, and the largest difference to the source (the first candidate)."""

    def least(batch: Batch) -> int:
        scores = batch.scores[part][number][:candidates]
        return scores.index(min(scores))

    ours, source = errors(sets, least), errors(sets, lambda batch: 0)
    return f"{mean(ours):.1f} ({max(a - b for a, b in zip(ours, source, strict=True)):+.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="*", default=list(SETS), help=f"default: {' '.join(SETS)}")
    parser.add_argument("--images", type=int, default=448, help="of each set")
    parser.add_argument("--candidates", type=int, default=3, help="how many of the candidates take part in the choice")
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
        print("| lambda |", " | ".join(f"{part} samples" for part in PARTS), "|\n" + "|---" * (len(PARTS) + 1) + "|")
        for number, weight in enumerate(LAMBDAS):
            cells = [chosen_by(sets, part, number, chosen.candidates) for part in range(len(PARTS))]
            print(f"| {weight:g} |", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
