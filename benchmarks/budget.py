"""What a budget of 0.02 nats does on several nets, at learning rates from a fifth of the preset's to five times it.

    python -m benchmarks.budget --out results/budget                              # some minutes on one core
    python -m benchmarks.budget --out /tmp/budget --images 64 --nets digits      # a taste

Each net goes through the 15 corruptions (severity 5), one after another, batches of 64, never reset, then through the
clean images; beside it ETA, which nothing holds back. ``clean, new`` is a new model that adapts to the clean images
alone. Drift is the largest after any step. The LayerNorm net is a small ConvNeXt, trained here on digits in a minute.
The Fisher is of clean test images, as in the paper: on those that a net was trained on its gradients are too small.
"""

from __future__ import annotations

import argparse
import copy
import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import eata
from benchmarks.gradient import HALVES
from benchmarks.kept import Cell, Kept
from benchmarks.lifelong import Watched, error

BUDGET = 0.02
RATES = (0.2, 1.0, 5.0)
SEED = 2020


class Block(nn.Module):
    """Of ConvNeXt: depthwise convolution, LayerNorm over the channels, two linear layers, a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Conv2d(width, width, 5, padding=2, groups=width)
        self.norm = nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """As published."""
        y = self.norm(self.mix(x).permute(0, 2, 3, 1))
        return x + self.narrow(F.gelu(self.wide(y))).permute(0, 3, 1, 2)


@functools.cache
def layer_norm_net() -> nn.Module:
    """Trained on the training digits; the same weights each time."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 48, 4, 4), *(Block(48) for _ in range(3)), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.LayerNorm(48), nn.Linear(48, 10),
    )  # fmt: skip
    epochs = 40
    optimizer = torch.optim.AdamW(net.parameters(), 0.003)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for epoch in range(epochs):
        for x, y in images("digits", None, None, seed=epoch, split="train"):
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
        schedule.step()
    return net.eval()


NETS: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "bn": ("cifar10", lambda: eata.models.load("resnet26-bn-cifar10")),
    "gn": ("cifar10", lambda: eata.models.load("resnet26-gn-rotation-cifar10")),
    "digits": ("digits", lambda: eata.models.load("resnet26-bn-digits")),
    "layer norm": ("digits", layer_norm_net),
}


def images(
    data: str, corruption: str | None, limit: int | None, seed: int = SEED, split: str = "test"
) -> Iterable[tuple[Tensor, Tensor]]:
    stream = eata.data.load(data, split=split, corruption=corruption, severity=5, limit=limit)
    return stream.batches(64, seed=seed, mean=HALVES[0], std=HALVES[1])


def build(name: str, kind: str, rate: float, fisher: eata.Fisher) -> eata.Adapter:
    """``source``, ``eta``, or ``budget``."""
    data, make = NETS[name]
    net = copy.deepcopy(make())
    if kind == "source":
        return eata.Source(net)
    settings = eata.preset(data)
    settings["lr"] *= rate
    if kind == "budget":
        return eata.EATA(net, fisher, **settings | {"beta": None, "budget": BUDGET})
    return eata.ETA(net, **{key: value for key, value in settings.items() if key not in ("beta", "per")})


def measure(name: str, kind: str, rate: float, limit: int, fisher: eata.Fisher) -> Cell:
    """One life of one model."""
    data = NETS[name][0]
    clean = list(images(data, None, limit))
    new = error(build(name, kind, rate, fisher), clean)
    model = Watched(build(name, kind, rate, fisher))
    errors = [error(model, images(data, corruption, limit)) for corruption in eata.data.CORRUPTIONS]
    after = error(model, clean)
    cell = {"net": name, "kind": kind, "rate": rate, "corruptions": mean(errors), "after": after, "new": new}
    return {**cell, "drift": model.worst, "errors": dict(zip(eata.data.CORRUPTIONS, errors, strict=True))}


def table(cells: list[Cell]) -> str:
    """A line for each net, method and learning rate."""
    lines = [
        "| net | method | learning rate | corruptions | clean after | clean, new | largest drift |",
        "|---|---|---|---|---|---|---|",
    ]
    for cell in sorted(cells, key=lambda cell: (list(NETS).index(cell["net"]), cell["kind"] != "source", cell["kind"])):
        rate = "" if cell["kind"] == "source" else f"x {cell['rate']:g}"
        drift = f"{cell['drift']:.4f}" if cell["drift"] else ""
        numbers = " | ".join(f"{cell[key]:.1f}" for key in ("corruptions", "after", "new"))
        lines.append(f"| {cell['net']} | {cell['kind']} | {rate} | {numbers} | {drift} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="+", default=list(NETS), choices=list(NETS), help="default: all")
    parser.add_argument("--images", type=int, default=512, help="of each corruption (default 512)")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    kept = Kept(
        arguments.out,
        "budget",
        data="CIFAR-10 and digits, corrupted here, severity 5; the Fisher of 512 clean test images, as in the paper",
        images=arguments.images,
        budget=BUDGET,
        seed=SEED,
    )
    kinds = [("source", 1.0), *((kind, rate) for kind in ("budget", "eta") for rate in RATES)]
    for name in arguments.nets:
        missing = [(kind, rate) for kind, rate in kinds if kept.cell(f"{name} {kind} {rate:g}") is None]
        if missing:
            data, make = NETS[name]
            clean = [x for x, _ in images(data, None, 512)]
            fisher = eata.fisher(copy.deepcopy(make()), torch.cat(clean))
        for kind, rate in missing:
            cell = measure(name, kind, rate, arguments.images, fisher)
            kept.add(f"{name} {kind} {rate:g}", cell)
            print({key: value for key, value in cell.items() if key != "errors"}, flush=True)
    kept.table(table(kept.cells()))


if __name__ == "__main__":
    main()
