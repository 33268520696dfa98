"""Error of ETA and EATA with backward="rows" and "full": the same net, seeds and order, 15 corruptions of CIFAR-10.

    python -m benchmarks.accuracy                     # 2,000 images a corruption; about half an hour on two cores
    python -m benchmarks.accuracy --limit 512 fog     # a taste

Severity 5, batches of 64, the model reset before each corruption. The last lines are the mean differences in points;
the depth cut is `layers=` with a third of the normalization layers.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor

import eata
from benchmarks.gradient import trained
from eata import norm

HALVES = ((0.5,) * 3, (0.5,) * 3)  # mean and std that the ResNet-26 was trained with
SIDES = (("ETA", "full"), ("ETA", "rows"), ("EATA", "full"), ("EATA", "rows"), ("EATA", "depth cut"))


def build(weights: Path | None, fisher: dict[str, Tensor], method: str, how: str) -> eata.Adapter:
    net = trained(weights)
    if how == "depth cut":
        layers = len(norm.normalization_layers(net)) // 3
        return eata.EATA(net, fisher, layers=layers, **eata.preset("cifar10"))  # type: ignore[arg-type]
    if method == "ETA":
        return eata.ETA(net, backward=how, **eata.preset("cifar10", eata.ETA))  # type: ignore[arg-type]
    return eata.EATA(net, fisher, backward=how, **eata.preset("cifar10"))  # type: ignore[arg-type]


def error(model: eata.Adapter, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    """In percent, the model going on from where it is, and adapting as it goes."""
    wrong = total = 0
    for x, y in batches:
        wrong += int((model(x).argmax(1) != y).sum())
        total += len(y)
    return 100 * wrong / total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corruptions", nargs="*", default=list(eata.data.CORRUPTIONS), help="default: all 15")
    parser.add_argument("--limit", type=int, default=2000, help="images of each corruption (default 2000)")
    parser.add_argument("--seed", type=int, default=2020, help="of the order (default 2020)")
    parser.add_argument("--weights", type=Path, help="safetensors file of a ResNet26(10, 'bn') in training")
    arguments = parser.parse_args()
    mean_, std = HALVES
    clean = eata.data.load("cifar10", limit=2000).batches(64, seed=arguments.seed, mean=mean_, std=std)
    fisher = eata.fisher(trained(arguments.weights), torch.cat([x for x, _ in clean]), samples=2000, per="sample")
    models = {side: build(arguments.weights, fisher, *side) for side in SIDES}
    errors: dict[tuple[str, str], list[float]] = {side: [] for side in SIDES}
    print("| corruption |", " | ".join(f"{m}, {b}" for m, b in SIDES), "| chosen |")
    print("|" + "---|" * (len(SIDES) + 2))
    for corruption in arguments.corruptions:
        stream = eata.data.load("cifar10", corruption=corruption, severity=5, limit=arguments.limit)
        batches = list(stream.batches(64, seed=arguments.seed, mean=mean_, std=std))
        for side, model in models.items():
            model.reset()
            errors[side].append(error(model, batches))
        stats = models["EATA", "rows"].stats
        cells = " | ".join(f"{errors[side][-1]:.1f}" for side in SIDES)
        print(f"| {corruption} | {cells} | {stats.backwards / stats.forwards:.2f} |", flush=True)
    print("| mean |", " | ".join(f"{mean(errors[side]):.2f}" for side in SIDES), "| |")
    for method, how in SIDES:
        if how != "full":
            difference = mean(errors[method, how]) - mean(errors[method, "full"])
            print(f"{method}: {how} is {difference:+.2f} points from full")


if __name__ == "__main__":
    main()
