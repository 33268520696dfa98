"""What making MEMO's AugMix copies costs, over the network's own work on them.

    python -m benchmarks.memo

32 copies of a 32x32 image for ResNet-26 with GroupNorm. The network's work is a forward and backward pass over them.
Processor time on one core, in turns; the medians over the rounds are compared.
"""

from __future__ import annotations

import argparse
from statistics import median

import torch

import eata
from benchmarks.window import seconds
from eata.augmentation import Copies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--copies", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=10)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    net = eata.models.ResNet26(norm="gn")
    net.pretrained_cfg = {"mean": (0.5,) * 3, "std": (0.5,) * 3}  # type: ignore[assignment]
    copies = Copies(net, chosen.copies, True, 0)
    image = torch.randn(3, 32, 32).clamp_(-1, 1)
    images = copies.augmix(image)

    def work() -> None:
        loss = eata.functional.marginal_entropy(net(images))
        torch.autograd.grad(loss, list(net.parameters()))

    work()
    making, working = [], []
    for _ in range(chosen.rounds):
        making.append(seconds(lambda: copies.augmix(image)))
        working.append(seconds(work))
    ratio = median(making) / median(working)
    print(
        f"{chosen.copies} copies: making them {1000 * median(making):.1f} ms, the network's work on them "
        f"{1000 * median(working):.1f} ms, ratio {ratio:.2f}"
    )


if __name__ == "__main__":
    main()
