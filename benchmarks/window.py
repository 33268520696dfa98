"""Streams of single images: what ``eata.Window`` costs over plain inference, and what its cache costs in accuracy.

    python -m benchmarks.window                                    # time per image; about five minutes
    python -m benchmarks.window --accuracy NET.safetensors         # error on CIFAR-10-C; slow: L forwards an image
    python -m benchmarks.window --accuracy NET.safetensors --images 200 --corruptions fog snow --method tent

Times are processor time on one core, in turns, and the medians over the rounds are compared. With adaptation, the time
of L images, one step among them, is divided by L.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median

import torch
from torch import Tensor, nn

import eata
from benchmarks.nets import resnet50
from eata.data.corruptions import CORRUPTIONS
from eata.models import ResNet26

NETS: dict[str, tuple[Callable[[], nn.Module], int]] = {"ResNet-26": (ResNet26, 32), "ResNet-50": (resnet50, 224)}


def seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def adapter(net: nn.Module, share: float) -> eata.ETA:
    """ETA whose first filter lets about ``share`` of the samples of an untrained net pass."""
    model = eata.ETA(net, epsilon=1.0, lr=1e-9)
    select = model.select

    def choose(logits: Tensor) -> eata.adapter.Choice:
        model.e0 = 1.0
        choice = select(logits)
        count = round(share * len(logits))
        return eata.adapter.Choice(choice.index[:count], choice.weight[:count], choice.reliable)

    model.select = choose  # type: ignore[method-assign]
    return model


def times(make: Callable[[], nn.Module], side: int, length: int, rounds: int, share: float) -> dict[str, float]:
    """Seconds per image: plain inference, the cached window predicting and adapting, the exact window predicting."""
    images = torch.randn(length, 3, side, side)

    def stream(model: Callable[[Tensor], Tensor], count: int) -> float:
        return seconds(lambda: [model(image[None]) for image in images[:count]]) / count

    torch.manual_seed(0)
    plain = make().eval()
    cached = eata.Window(adapter(make(), share), length)
    exact = eata.Window(adapter(make(), share), length, exact=True)
    few = max(2, length // 4)
    with torch.no_grad():
        for model in (plain, cached):  # fill the window, warm up
            stream(model, length)
        with exact.frozen():
            exact(images)
        exact._images = list(images)
        taken: dict[str, list[float]] = {"plain": [], "predict": [], "adapt": [], "exact": []}
        for _ in range(rounds):
            taken["plain"].append(stream(plain, few))
            with cached.frozen():
                taken["predict"].append(stream(cached, few))
            taken["plain"].append(stream(plain, few))
            taken["adapt"].append(stream(cached, length))
        with exact.frozen():
            taken["exact"].append(stream(exact, 1))
    return {name: median(values) for name, values in taken.items()}


def error(model: Callable[[Tensor], Tensor], images: Tensor, labels: Tensor, batch: int) -> float:
    wrong = sum(
        int((model(x).argmax(1) != y).sum()) for x, y in zip(images.split(batch), labels.split(batch), strict=True)
    )
    return 100 * wrong / len(labels)


def accuracy(weights: Path, method: str, length: int, corruptions: list[str], count: int) -> None:
    """Error in per cent of batches, of the exact and of the cached window on the same images."""
    kind = eata.method(method)
    rows = []
    print(f"{method}, L = {length}, {count} images: error in %\n{'':20}source  batch  exact  cached")
    for corruption in corruptions:
        stream = eata.data.load("cifar10-c", corruption=corruption, severity=5, limit=count)
        (images, labels), *_ = stream.batches(count, seed=2020, mean=(0.5,) * 3, std=(0.5,) * 3)
        row = [error(eata.Source(load(weights)), images, labels, 250)]
        row.append(error(kind(load(weights), **eata.preset("cifar10", kind)), images, labels, length))
        for exact in (True, False):
            window = eata.Window(kind(load(weights), **eata.preset("cifar10", kind)), length, exact)
            row.append(error(window, images, labels, 1))
        rows.append(row)
        print(f"{corruption:20}" + "".join(f"{value:6.1f} " for value in row), flush=True)
    print(f"{'mean':20}" + "".join(f"{mean(column):6.1f} " for column in zip(*rows, strict=True)))


def load(weights: Path) -> nn.Module:
    return eata.models.load(str(weights))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accuracy", type=Path, metavar="NET", help="weights of a ResNet-26 with BatchNorm")
    parser.add_argument("--method", default="eta", help="for --accuracy: bn, tent or eta")
    parser.add_argument("--images", type=int, default=1000, help="for --accuracy: of each corruption")
    parser.add_argument("--corruptions", nargs="+", default=list(CORRUPTIONS), choices=CORRUPTIONS, metavar="NAME")
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--nets", nargs="+", default=list(NETS), choices=NETS)
    parser.add_argument("--share", type=float, default=0.5, help="of the samples that the step is on (ImageNet-C: 0.5)")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.accuracy is not None:
        accuracy(chosen.accuracy, chosen.method, chosen.length, chosen.corruptions, chosen.images)
        return
    print(f"L = {chosen.length}, step on {chosen.share:.0%}: time per image over plain inference of one image")
    for name in chosen.nets:
        taken = times(*NETS[name], chosen.length, chosen.rounds, chosen.share)
        plain = taken.pop("plain")
        print(f"{name} ({1000 * plain:.1f} ms): " + ", ".join(f"{k} {v / plain:.2f}" for k, v in taken.items()))


if __name__ == "__main__":
    main()
