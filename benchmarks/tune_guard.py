"""What the guard sees, beside the truth: how its thresholds (`eata.guard`) were chosen. Training images only.

    python -m benchmarks.tune_guard                        # 384 images of each stream; about a quarter of an hour
    python -m benchmarks.tune_guard --images 128 fog       # a taste

For each corruption, shuffled, sorted by class and nearly so: the estimated cost of each block of 64 samples, in points
(`Comparison.cost`), when EATA adapts without a guard, the least ratio of the numbers of classes, and the true cost, as
the labels tell it. Good thresholds lie between the kinds of streams.
"""

from __future__ import annotations

import argparse
import copy
from statistics import mean

import torch

import eata
from eata.bench import hard
from eata.guard import Comparison

CORRUPTIONS = ("clean", "gaussian_noise", "impulse_noise", "glass_blur", "fog", "brightness", "contrast",
               "jpeg_compression")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corruptions", nargs="*", default=CORRUPTIONS, help="default: eight, clean among them")
    parser.add_argument("--images", type=int, default=384, help="of each stream (default 384)")
    arguments = parser.parse_args()
    source = hard.Source(arguments.images, split="train")
    net = eata.models.load("resnet26-bn-cifar10").eval()
    images = eata.data.load("cifar10", split="train").batches(500, mean=(0.5,) * 3, std=(0.5,) * 3)
    fisher = eata.fisher(net, images, samples=2000)
    for name in arguments.corruptions:
        corruption = None if name == "clean" else name
        for kind, delta in (("shuffled", None), ("sorted", 0.0), ("Dirichlet 0.1", 0.1)):
            batches = hard.in_order(source, corruption, delta)
            model = eata.EATA(copy.deepcopy(net), fisher, **eata.preset("cifar10"))
            seen, truth = [], []
            for x, y in batches:
                adapted = model(x)
                with torch.no_grad():
                    plain = net(x)
                seen.append(Comparison.of(adapted.softmax(1), plain.softmax(1)))
                truth.append(((plain.argmax(1) == y).float() - (adapted.argmax(1) == y).float()).mean().item())
            costs = " ".join(f"{100 * one.cost:+5.1f}" for one in seen)
            ratio = min(one.classes / one.source_classes for one in seen)
            print(f"{name}, {kind}: cost {costs}; classes {ratio:.2f}; true {100 * mean(truth):+.1f}", flush=True)


if __name__ == "__main__":
    main()
