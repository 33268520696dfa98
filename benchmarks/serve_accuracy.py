"""What the traffic's rhythm does to accuracy: single images, alone or 32 at once, with and without a window."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch

import eata
from benchmarks import record
from benchmarks.serve_load import NET
from eata.serve.contract import Contract
from eata.serve.engine import Engine
from eata.serve.queue import Settings
from eata.serve.recipe import Recipe
from eata.serve.versions import Versions

NOISE = 0.12  # standard deviation, pixels from 0 to 1


def add(commands: Any) -> None:
    """The command."""
    rhythm = commands.add_parser("accuracy", help="of single noisy images, alone or 32 at once (needs CIFAR-10)")
    rhythm.add_argument("--images", type=int, default=1024)
    rhythm.set_defaults(run=run)


def accuracy(recipe: Recipe, x: np.ndarray, labels: list[int], at_once: int) -> float:
    """Per cent, of requests with one image each, ``at_once`` of them waiting together."""
    net = recipe.net()
    model = recipe.adapter(net)
    engine = Engine(model, Contract.of(net, "net", 64), Settings(wait=0.002), Versions(None), None)
    engine.start()
    right = 0
    for begin in range(0, len(x), at_once):
        asked = [engine.submit(each[None], "client") for each in x[begin : begin + at_once]]
        right += sum(
            int(future.result().logits.argmax()) == label for future, label in zip(asked, labels[begin:], strict=False)
        )
    engine.stop()
    return 100 * right / len(x)


def run(arguments: argparse.Namespace) -> int:
    """Print a table."""
    made = record.manifest()
    stream = eata.data.load("cifar10")
    pixels, labels = next(iter(stream.batches(arguments.images, seed=0, mean=(0.0,) * 3, std=(1.0,) * 3)))
    noise = NOISE * torch.randn(pixels.shape, generator=torch.Generator().manual_seed(0))
    x = (2 * (pixels + noise).clamp(0, 1) - 1).numpy()
    print(f"accuracy in % on {len(x)} CIFAR-10 test images with noise, one a request")
    print("| | 32 at once | alone |\n|---|---|---|")
    sides = {
        "source": Recipe(NET, method="source", window=0),
        "eta, window 64 (the default)": Recipe(NET, method="eta"),
        "eta, no window": Recipe(NET, method="eta", window=0),
    }
    found = {}
    for name, recipe in sides.items():
        found[name] = together, alone = [accuracy(recipe, x, labels.tolist(), at_once) for at_once in (32, 1)]
        print(f"| {name} | {together:.1f} | {alone:.1f} |")
    record.keep(
        arguments.out, made, {"images": len(x), "noise": NOISE, "seed": 0, "at_once": [32, 1], "accuracy": found}
    )
    return 0
