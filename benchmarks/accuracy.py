"""Error of ETA and EATA with backward="rows" and "full": the same net, seeds and order, 15 corruptions of CIFAR-10.

    python -m benchmarks.accuracy --out results/rows-accuracy    # 2,000 images a corruption; about five minutes
    python -m benchmarks.accuracy --limit 512 fog                # a taste

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
from benchmarks import record
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


def measure(corruptions: list[str], limit: int, seed: int, weights: Path | None) -> dict[str, dict[str, float]]:
    """The errors by side and corruption, shown as they come."""
    mean_, std = HALVES
    clean = eata.data.load("cifar10", limit=2000).batches(64, seed=seed, mean=mean_, std=std)
    fisher = eata.fisher(trained(weights), torch.cat([x for x, _ in clean]), samples=2000, per="sample")
    models = {f"{method}, {how}": build(weights, fisher, method, how) for method, how in SIDES}
    errors: dict[str, dict[str, float]] = {side: {} for side in models}
    for corruption in corruptions:
        stream = eata.data.load("cifar10", corruption=corruption, severity=5, limit=limit)
        batches = list(stream.batches(64, seed=seed, mean=mean_, std=std))
        for side, model in models.items():
            model.reset()
            errors[side][corruption] = error(model, batches)
        print(corruption, *(f"{side} {found[corruption]:.1f}" for side, found in errors.items()), sep=" | ", flush=True)
    return errors


def table(errors: dict[str, dict[str, float]]) -> str:
    """A line for each side: its mean error, and how far that is from the textbook's backward."""
    means = {side: mean(found.values()) for side, found in errors.items()}
    lines = ["| | mean error | points from full |", "|---|---:|---:|"]
    for side, value in means.items():
        full = f"{side.partition(',')[0]}, full"
        lines.append(f"| {side} | {value:.2f} | {'' if side == full else f'{value - means[full]:+.2f}'} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corruptions", nargs="*", default=list(eata.data.CORRUPTIONS), help="default: all 15")
    parser.add_argument("--limit", type=int, default=2000, help="images of each corruption (default 2000)")
    parser.add_argument("--seed", type=int, default=2020, help="of the order (default 2020)")
    parser.add_argument("--weights", type=Path, help="safetensors file of a ResNet26(10, 'bn') in training")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="keep the errors there, as results/rows-accuracy")
    arguments = parser.parse_args()
    made = record.manifest()
    errors = measure(arguments.corruptions, arguments.limit, arguments.seed, arguments.weights)
    print(table(errors))
    record.keep_folder(arguments.out, made, {"errors": errors}, [table(errors)])


if __name__ == "__main__":
    main()
