"""What a step costs by the statistics in use, as a ratio to the batch's own (prior 0). The sides take turns.

    python -m benchmarks.statistics_cost               # ResNet-26, batches of 64
    python -m benchmarks.statistics_cost --batch 16

Processor time on one core. EATA's selection is pinned to the first half of the batch, so that all do the same work.
Each number is the median over the rounds. Weights are random for the fixed priors: the time does not depend on them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

import eata
from eata import norm
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


def build(name: str, prior: float) -> eata.GradientAdapter | eata.BN:
    net = ResNet26(10, "bn").eval()
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=30)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.randn(chosen.batch, 3, 32, 32)
    for name in ("bn", "eata, rows", "eata, rows, lean", "eata, full"):
        found = ratios({f"prior {p:g}": build(name, p) for p in (0, 16, 64)}, x, chosen.rounds)
        print(f"{name}:", ", ".join(f"{key} {value:.3f}" for key, value in found.items()), flush=True)


if __name__ == "__main__":
    main()
