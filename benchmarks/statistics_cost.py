"""What a step costs by the statistics in use, as a ratio to the batch's own (prior 0). The sides take turns.

    python -m benchmarks.statistics_cost               # ResNet-26, batches of 64
    python -m benchmarks.statistics_cost --batch 16

Processor time on one core. EATA's selection is pinned to the first half of the batch, so that all do the same work.
Each number is the median over the rounds. Weights are random for the fixed priors: the time does not depend on them.

"auto" looks now and then, so its ratio, to prior 64, is that of all of a stream: 3,072 images under Gaussian noise, the
first look included. What is found is kept in ``results/statistics/cost-BATCH.json``.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

import eata
from eata import norm
from eata.bench.manifest import manifest
from eata.files import replacing
from eata.gradient import Choice
from eata.models import ResNet26
from eata.passes import Pass


class Half(eata.EATA):
    """EATA that does all of its own selection, and then takes the first half."""

    def select(self, batch: Pass) -> Choice:
        """The first half."""
        choice = super().select(batch)
        index = torch.arange(len(batch) // 2)
        return Choice(index, batch.logits.new_ones(len(index)), choice.reliable)


def build(name: str, prior: Any, net: torch.nn.Module) -> eata.GradientAdapter | eata.BN:
    if name == "bn":
        return eata.BN(net, prior=prior)
    fisher = {key: torch.rand_like(p) for key, p in norm.affine_parameters(net).items()}
    return Half(
        net, fisher, lr=1e-6, prior=prior, backward="full" if name == "eata, full" else "rows", lean="lean" in name
    )


def ratios(sides: dict[str, Callable[[Tensor], Tensor]], x: Tensor, rounds: int) -> dict[str, float]:
    """Median of each side's time over the first one's in the same round."""
    found: dict[str, list[float]] = {key: [] for key in sides}
    for number in range(rounds + 2):
        seconds = {}
        for key, step in sides.items():
            start = time.process_time()
            step(x)
            seconds[key] = time.process_time() - start
        if number >= 2:  # the first ones warm up
            for key, value in seconds.items():
                found[key].append(value / seconds[next(iter(sides))])
    return {key: median(values) for key, values in found.items()}


def over_a_stream(name: str, batch: int) -> float:
    """Time of "auto" over that of prior 64, for all of a stream; the sides take turns."""
    stream = eata.data.load("cifar10-sample", corruption="gaussian_noise", severity=5)
    batches = [x for x, _ in stream.batches(batch, seed=0, mean=(0.5,) * 3, std=(0.5,) * 3)] * 3
    sides = [build(name, prior, eata.models.load("resnet26-bn-cifar10")) for prior in ("auto", 64)]
    seconds = [0.0, 0.0]
    for number, x in enumerate(batches):
        for side in (0, 1) if number % 2 else (1, 0):
            start = time.process_time()
            sides[side](x)
            seconds[side] += time.process_time() - start
    return seconds[0] / seconds[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--results", type=Path, default=Path("results/statistics"), help="folder")
    chosen = parser.parse_args()
    made = manifest("python -m benchmarks.statistics_cost") | {"load": "one thread; nothing else ran"}
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.randn(chosen.batch, 3, 32, 32)
    rows = []
    for name in ("bn", "eata, rows", "eata, rows, lean", "eata, full"):
        sides = {f"prior {p:g} / prior 0": build(name, p, ResNet26(10, "bn").eval()) for p in (0, 16, 64)}
        found = ratios(sides, x, chosen.rounds)
        found["auto / prior 64"] = over_a_stream(name, chosen.batch)
        rows.append({"what": name, **{key: round(value, 3) for key, value in found.items()}})
        print(rows[-1], flush=True)
    with replacing(chosen.results / f"cost-{chosen.batch}.json") as temporary:
        Path(temporary).write_text(json.dumps({"manifest": made, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
