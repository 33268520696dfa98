"""Streams of single images: what ``eata.Window`` costs over plain inference, and what its cache costs in accuracy.

    python -m benchmarks.window                        # time per image; about five minutes
    python -m benchmarks.window --out results/speed-window
    python -m benchmarks.window --accuracy             # error on CIFAR-10-C; the exact window takes L forwards an image
    python -m benchmarks.window --accuracy --limit 200 --corruptions fog snow --methods bn
    python -m benchmarks.window --layers               # statistics of each layer, cached against exact

Times are processor time on one core, in turns, and the medians over the rounds are compared. 'predict' is the window
with eata.BN inside (each image is remembered, no gradient), 'adapt' the one with eata.ETA, whose L images, one step
among them, are divided by L. The accuracy of each cell is kept in a file under --results, and a run that was stopped
goes on where it was; two runs of other --corruptions may share the folder, and so both cores.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean, median

import torch
from torch import Tensor, nn

import eata
from benchmarks import record
from benchmarks.nets import resnet50
from eata import allocator, norm
from eata.data.corruptions import CORRUPTIONS
from eata.files import replacing
from eata.mixture import Given
from eata.models import ResNet26
from eata.moments import pooled, sample_moments

NETS: dict[str, tuple[Callable[[], nn.Module], int]] = {"ResNet-26": (ResNet26, 32), "ResNet-50": (resnet50, 224)}
METHODS = ("bn", "eta")
WAYS = ("batch", "exact", "cached")


def seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


# --- time -------------------------------------------------------------------------------------------------------------


def adapter(net: nn.Module, share: float) -> eata.ETA:
    """ETA whose first filter lets about ``share`` of the samples of an untrained net pass."""
    model = eata.ETA(net, epsilon=1.0, lr=1e-9)
    select = model.select

    def choose(logits: Tensor) -> eata.adapter.Choice:
        model.e0 = 1.0
        choice = select(logits)
        count = round(share * len(logits))
        return eata.Choice(choice.index[:count], choice.weight[:count], choice.reliable)

    model.select = choose  # type: ignore[method-assign]
    return model


def times(make: Callable[[], nn.Module], side: int, length: int, rounds: int, share: float) -> dict[str, float]:
    """Seconds per image: plain inference, the cached window predicting and adapting, the exact window predicting."""
    images = torch.randn(length, 3, side, side)

    def stream(model: Callable[[Tensor], Tensor], count: int) -> float:
        return seconds(lambda: [model(image[None]) for image in images[:count]]) / count

    torch.manual_seed(0)
    plain = make().eval()
    predict = eata.Window(eata.BN(make(), prior=0), length)
    adapt = eata.Window(adapter(make(), share), length)
    exact = eata.Window(eata.BN(make(), prior=0), length, exact=True)
    few = max(2, length // 4)
    taken: dict[str, list[float]] = {"plain": [], "predict": [], "adapt": [], "exact": []}
    with torch.no_grad():
        for window in (predict, adapt, exact):  # full, and warm
            window(images)
        stream(plain, few)
        for _ in range(rounds):
            taken["plain"].append(stream(plain, few))
            taken["predict"].append(stream(predict, few))
            taken["plain"].append(stream(plain, few))
            taken["adapt"].append(stream(adapt, length))
        taken["exact"].append(stream(exact, 1))
    return {name: median(values) for name, values in taken.items()}


def time_table(found: dict[str, dict[str, float]], length: int, share: float) -> str:
    """Markdown: each time over that of plain inference."""
    lines = [
        f"L = {length}, step on {share:.0%}: processor time per image over plain inference of one image",
        "",
        "| net | plain | predict | adapt | exact window, predict |",
        "|---|---|---|---|---|",
    ]
    for name, taken in found.items():
        ratios = " | ".join(f"{taken[kind] / taken['plain']:.2f}" for kind in ("predict", "adapt", "exact"))
        lines.append(f"| {name} | {1000 * taken['plain']:.1f} ms | {ratios} |")
    return "\n".join(lines)


# --- accuracy ---------------------------------------------------------------------------------------------------------


def load(weights: Path | None) -> nn.Module:
    return eata.models.load("resnet26-bn-cifar10" if weights is None else str(weights))


def method(name: str, weights: Path | None) -> eata.Adapter:
    """By its name; BN of the batch's statistics alone, which are what a window changes."""
    if name == "bn":
        return eata.BN(load(weights), prior=0)
    kind = eata.method(name)
    return kind(load(weights), **eata.preset("cifar10", kind))


def images_of(corruption: str, limit: int) -> tuple[Tensor, Tensor]:
    stream = eata.data.load("cifar10-c", corruption=corruption, severity=5, limit=limit)
    (images, labels), *_ = stream.batches(limit, seed=2020, mean=(0.5,) * 3, std=(0.5,) * 3)
    return images, labels


def measure(model: eata.Adapter, way: str, length: int, images: Tensor, labels: Tensor) -> dict[str, float]:
    """Error in per cent, the share of samples that took part in a step, and seconds of processor time."""
    model = model if way == "batch" else eata.Window(model, length, exact=way == "exact")
    batch = length if way == "batch" else 1
    start = time.process_time()
    answers = torch.cat([model(x).argmax(1) for x in images.split(batch)])
    return {
        "error": 100 * float((answers != labels).float().mean()),
        "share": model.stats.backwards / len(labels),
        "seconds": time.process_time() - start,
    }


def accuracy(chosen: argparse.Namespace) -> None:
    """Error in per cent of batches of L, of the exact and of the cached window, on the same images."""
    print(f"L = {chosen.length}, {chosen.limit} images of each corruption, severity 5: error in %")
    for name in chosen.methods:
        print(f"\n{name:20}" + "".join(f"{way:>8}" for way in WAYS) + "   share of samples stepped on (cached)")
        rows = []
        for corruption in chosen.corruptions:
            cells = [cell(chosen, name, way, corruption) for way in WAYS]
            rows.append([one["error"] for one in cells])
            values = "".join(f"{value:8.1f}" for value in rows[-1])
            print(f"{corruption:20}{values}{cells[-1]['share']:8.2f}", flush=True)
        print(f"{'mean':20}" + "".join(f"{mean(column):8.2f}" for column in zip(*rows, strict=True)), flush=True)


def cell(chosen: argparse.Namespace, name: str, way: str, corruption: str) -> dict[str, float]:
    """From its file, else measured and kept there."""
    net = "shipped" if chosen.weights is None else chosen.weights.stem
    file = chosen.results / f"{net}-{name}-{way}-{corruption}-{chosen.length}-{chosen.limit}.json"
    if not file.exists():
        found = measure(method(name, chosen.weights), way, chosen.length, *images_of(corruption, chosen.limit))
        with replacing(file) as temporary:
            temporary.write_text(json.dumps(found))
    kept: dict[str, float] = json.loads(file.read_text())
    return kept


# --- layers -----------------------------------------------------------------------------------------------------------


def differences(weights: Path | None, corruption: str, length: int, limit: int) -> Tensor:
    """How far the cached statistics are from the exact ones, (probes, layers, 3).

    For each layer, over its channels: the mean of |difference of the means| in exact standard deviations; the mean and
    the standard deviation of the logarithm of the variances' ratio.
    """
    images, _ = images_of(corruption, limit)
    window = eata.Window(method("bn", weights), length)
    net = load(weights).eval()
    exact: list[tuple[Tensor, Tensor]] = []
    for layer in norm.normalization_layers(net).values():
        layer.train()
        layer.register_forward_pre_hook(lambda _, inputs: exact.append(pooled(*sample_moments(inputs[0]))))
    probes = []
    for number, image in enumerate(images):
        window(image[None])
        if number < 2 * length or number % (length // 4):
            continue
        exact.clear()
        with torch.no_grad():
            net(images[number + 1 - length : number + 1])
        probes.append(list(_compared(window.remembered.given_by_layer, exact)))
    return torch.tensor(probes)


def _compared(cached: list[Given], exact: list[tuple[Tensor, Tensor]]) -> Iterator[tuple[float, float, float]]:
    for given, (exact_mean, exact_variance) in zip(cached, exact, strict=True):
        ratio = (given.variance / exact_variance).log()
        far = (given.mean - exact_mean).abs() / exact_variance.sqrt()
        yield float(far.mean()), float(ratio.mean()), float(ratio.std())


def layers(chosen: argparse.Namespace) -> None:
    print(f"L = {chosen.length}: cached against exact statistics of each BatchNorm layer, {chosen.limit} images")
    print("layer  |mean difference| / deviation   log variance ratio: mean, deviation over channels")
    found = torch.cat([differences(chosen.weights, name, chosen.length, chosen.limit) for name in chosen.corruptions])
    for number, (far, bias, spread) in enumerate(found.mean(0).tolist()):
        print(f"{number:5}  {far:.3f}   {bias:+.3f} {spread:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accuracy", action="store_true", help="error on CIFAR-10-C instead of time")
    parser.add_argument("--layers", action="store_true", help="statistics of each layer instead of time")
    parser.add_argument("--weights", type=Path, metavar="NET", help="another ResNet-26 with BatchNorm than the shipped")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=["bn", "tent", "eta"], metavar="NAME")
    parser.add_argument("--limit", type=int, default=1000, help="images of each corruption (default 1000)")
    parser.add_argument("--corruptions", nargs="+", default=list(CORRUPTIONS), choices=CORRUPTIONS, metavar="NAME")
    parser.add_argument("--results", type=Path, default=Path("runs/window"), help="folder (default runs/window)")
    parser.add_argument("--length", type=int, default=64, help="L (default 64)")
    parser.add_argument("--rounds", type=int, default=5, help="of the time (default 5)")
    parser.add_argument("--nets", nargs="+", default=list(NETS), choices=NETS, help="for the time")
    parser.add_argument("--share", type=float, default=0.5, help="of the samples that the step is on (ImageNet-C: 0.5)")
    parser.add_argument(
        "--allocator", action="store_true", help="keep freed memory, both sides, as the eata command does"
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="keep the times there, as results/speed-window")
    chosen = parser.parse_args()
    if chosen.allocator:
        allocator.keep_freed_memory()
    torch.set_num_threads(1)
    if chosen.accuracy:
        accuracy(chosen)
        return
    if chosen.layers:
        layers(chosen)
        return
    made = record.manifest()
    found = {name: times(*NETS[name], chosen.length, chosen.rounds, chosen.share) for name in chosen.nets}
    table = time_table(found, chosen.length, chosen.share)
    print(table)
    settings = {"length": chosen.length, "share": chosen.share, "rounds": chosen.rounds}
    record.keep_folder(chosen.out, made, {**settings, "seconds": found}, [table])


if __name__ == "__main__":
    main()
