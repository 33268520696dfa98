"""Error of N workers that synchronise every step, every k-th, never, or follow one writer: ResNet-26, CIFAR-10-C.

    python -m benchmarks.parallel_steps --out results/parallel/steps.json
    python -m benchmarks.parallel_steps --limit 512 fog        # a taste

A simulation in one process. Each worker gets a shard of every batch. 'exact' is what `eata.parallel` computes: the
joined batch in one model. 'every k' has a model for each worker, which adapts by its own shard alone (its own BatchNorm
moments, choice and gradient); after every k-th step weights, momentum and moving average are replaced by their means.
'never' is k without end. 'writer k' adapts on the first worker's shards only, and the others get its weights every k
steps; all predict by the statistics of their own shard. EATA with the CIFAR-10 preset, severity 5, reset before each
corruption. The interval is 95 % of the binomial of the images, the same images for all.
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

import eata
from benchmarks import record
from benchmarks.gradient import HALVES

CORRUPTIONS = ("gaussian_noise", "fog", "contrast")
Batches = list[tuple[Tensor, Tensor]]
Make = Callable[[], eata.Adapter]


def mean_of(trees: list[Any]) -> Any:
    """The mean of states, number by number; what is no tensor is the first one's."""
    present = [tree for tree in trees if tree is not None]
    if not present:
        return None
    first = present[0]
    if isinstance(first, Tensor):
        return torch.stack(present).mean(0) if first.is_floating_point() else first
    if isinstance(first, dict):
        return {key: mean_of([tree.get(key) for tree in present]) for key in first}
    if isinstance(first, list):
        return [mean_of(list(values)) for values in zip(*present, strict=True)]
    return first


def exact(make: Make, batches: Batches, workers: int) -> int:
    model = make()
    return sum(int((model(x).argmax(1) != y).sum()) for x, y in batches)


def every(steps: int, make: Make, batches: Batches, workers: int) -> int:
    models = [make() for _ in range(workers)]
    wrong = 0
    for number, (x, y) in enumerate(batches, 1):
        for model, shard, labels in zip(models, x.chunk(workers), y.chunk(workers), strict=True):
            wrong += int((model(shard).argmax(1) != labels).sum())
        if number % steps == 0:
            agreed = mean_of([model.state_dict() for model in models])
            for model in models:
                model.load_state_dict(copy.deepcopy(agreed))
    return wrong


def writer(steps: int, make: Make, batches: Batches, workers: int) -> int:
    first, follower = make(), make()
    wrong = 0
    for number, (x, y) in enumerate(batches, 1):
        (own, *others), (own_labels, *labels) = x.chunk(workers), y.chunk(workers)
        wrong += int((first(own).argmax(1) != own_labels).sum())
        with follower.frozen():
            for shard, expected in zip(others, labels, strict=True):
                wrong += int((follower(shard).argmax(1) != expected).sum())
        if number % steps == 0:
            follower.load_state_dict(first.state_dict())
    return wrong


def strategies(steps: list[int], workers: int) -> dict[str, Callable[[Make, Batches, int], int]]:
    found: dict[str, Callable[[Make, Batches, int], int]] = {"exact": exact}
    for k in steps:
        found[f"every {k}"] = lambda *given, k=k: every(k, *given)  # type: ignore[misc]
    found["never"] = lambda *given: every(10**9, *given)
    found[f"writer {steps[0]}"] = lambda *given: writer(steps[0], *given)
    found[f"writer {steps[-1]}"] = lambda *given: writer(steps[-1], *given)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corruptions", nargs="*", default=list(CORRUPTIONS), help=f"default: {' '.join(CORRUPTIONS)}")
    parser.add_argument("--limit", type=int, default=2048, help="images of each corruption (default 2048)")
    parser.add_argument("--workers", type=int, default=4, help="default 4")
    parser.add_argument("--shard", type=int, default=16, help="images a worker and step (default 16)")
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 4, 16], help="k (default: 1 4 16)")
    parser.add_argument("--out", type=Path, help="a .json file for the numbers")
    arguments = parser.parse_args()
    made = record.manifest()
    size = arguments.workers * arguments.shard
    normalized = {"mean": HALVES[0], "std": HALVES[1]}
    clean = torch.cat([x for x, _ in eata.data.load("cifar10", limit=512).batches(64, seed=2020, **normalized)])
    fisher = eata.fisher(eata.models.load("resnet26-bn-cifar10"), clean, per="sample")

    def make() -> eata.Adapter:
        return eata.EATA(eata.models.load("resnet26-bn-cifar10"), fisher, **eata.preset("cifar10"))

    errors: dict[str, dict[str, float]] = {}
    for corruption in arguments.corruptions:
        stream = eata.data.load("cifar10", corruption=corruption, severity=5, limit=arguments.limit)
        batches = [(x, y) for x, y in stream.batches(size, seed=2020, **normalized) if len(x) == size]
        images = size * len(batches)
        for name, run in strategies(arguments.steps, arguments.workers).items():
            wrong = run(make, batches, arguments.workers)
            errors.setdefault(name, {})[corruption] = 100 * wrong / images
            print(f"{corruption}, {name}: {100 * wrong / images:.2f} %", flush=True)
    print("\n| |", " | ".join(arguments.corruptions), "| mean |\n|" + "---|" * (len(arguments.corruptions) + 2))
    for name, by_corruption in errors.items():
        print(
            f"| {name} |",
            " | ".join(f"{value:.1f}" for value in by_corruption.values()),
            f"| {mean(by_corruption.values()):.2f} |",
        )
    middle = mean(errors["exact"].values()) / 100
    interval = 196 * math.sqrt(middle * (1 - middle) / (images * len(arguments.corruptions)))
    print(f"95 % of the mean: +- {interval:.2f}")
    given = {name: value for name, value in vars(arguments).items() if name != "out"}
    record.keep(arguments.out, made, {"arguments": given, "seed": 2020, "interval": interval, "errors": errors})


if __name__ == "__main__":
    main()
