"""Error by the statistics in use: prior 0 (the papers'), a fixed one, and "auto". ResNet-26, CIFAR-10-C, severity 5.

    python -m benchmarks.statistics                                       # reset before each corruption, 1,000 images
    python -m benchmarks.statistics --images 10000 --seeds 2020-2022
    python -m benchmarks.statistics --protocol lifelong --images 2000     # never reset; clean images come last
    python -m benchmarks.statistics --protocol streams --methods bn       # sorted by class, Dirichlet, one class
    python -m benchmarks.statistics --protocol photographs --data PATH    # ResNet-50; see benchmarks.imagenet_resnet50

A fixed prior counts samples: 64 is half source, half batch with batches of 64. Each line of
``results/statistics/PROTOCOL.csv`` is one set of one stream; a run goes on where the last one stopped, and
``PROTOCOL.json`` says what made it. A table of means comes at the end.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import eata
from benchmarks.accuracy import HALVES
from benchmarks.imagenet_resnet50 import resnet50
from eata.data import imagenet
from eata.files import replacing

FIELDS = ("seed", "order", "batch", "images", "method", "prior", "set", "error", "forwards", "seconds", "share")
ORDERS = (("sorted", 64), ("one class", 64), ("dirichlet", 64), ("shuffled", 4), ("shuffled", 2), ("shuffled", 1))
PHOTOGRAPHS = ("gaussian_noise", "jpeg_compression", "brightness", "contrast", None)
Row = dict[str, str]


class Table:
    """Lines of a CSV file that is whole at any time; those that are there already need not be made again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[Row] = list(csv.DictReader(path.open())) if path.exists() else []

    def has(self, **key: Any) -> bool:
        """Whether a line with these values is there."""
        return any(all(row[name] == str(value) for name, value in key.items()) for row in self.rows)

    def add(self, row: dict[str, Any]) -> None:
        """Append, and write."""
        self.rows.append({name: str(row[name]) for name in FIELDS})
        text = io.StringIO()
        writer = csv.DictWriter(text, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self.path) as temporary:
            Path(temporary).write_text(text.getvalue())


class Source:
    """A net, its sets and a Fisher of clean images."""

    def __init__(self, path: str | None, images: int) -> None:
        self.photographs, self.images = path is not None, images
        self.data = f"folder:{path}" if path else "cifar10"
        self.net: nn.Module = resnet50() if path else eata.models.load("resnet26-bn-cifar10")
        self.preset = "imagenet" if path else "cifar10"
        self._fisher: dict[str, Tensor] | None = None

    def load(self, corruption: str | None, seed: int) -> tuple[Tensor, Tensor]:
        """Images and labels of a set in the order of the seed."""
        config: Any = getattr(self.net, "pretrained_cfg", {"mean": HALVES[0], "std": HALVES[1]})
        stream = eata.data.load(self.data, corruption=corruption, severity=5, limit=self.images)
        x, y = next(stream.batches(len(stream), seed=seed, mean=config["mean"], std=config["std"]))
        if self.photographs:
            y = torch.tensor([imagenet.full_index()[name] for name in stream.class_names])[y]
        return x, y

    def build(self, method: str, prior: float | str) -> eata.Adapter:
        """A new adapter around a new copy."""
        net = resnet50() if self.photographs else eata.models.load("resnet26-bn-cifar10")
        kind = eata.methods.method(method)
        if kind is eata.Source:
            return eata.Source(net)
        arguments: dict[str, Any] = eata.preset(self.preset, kind)
        if kind is not eata.EATA:
            return kind(net, prior=prior, **arguments)  # type: ignore[call-arg]
        if self._fisher is None:
            x, _ = self.load(None, 2020)
            self._fisher = eata.fisher(self.net, x[:2000], per=arguments["per"])
        return eata.EATA(net, self._fisher, prior=prior, **arguments)  # type: ignore[arg-type]


def ordered(x: Tensor, y: Tensor, order: str, seed: int) -> list[tuple[str, Tensor, Tensor]]:
    """The streams of an order, by name: one, or one for each class."""
    if order == "sorted":
        index = y.argsort(stable=True)
        return [("", x[index], y[index])]
    if order == "dirichlet":  # ten slots in time; each class is spread over them by Dirichlet 0.1
        random, slots = np.random.RandomState(seed), [np.empty(0, dtype=np.int64) for _ in range(10)]
        for label in y.unique().tolist():
            own = np.flatnonzero(y.numpy() == label)
            cuts = (np.cumsum(random.dirichlet([0.1] * 10)) * len(own)).astype(int)[:-1]
            slots = [np.concatenate(pair) for pair in zip(slots, np.split(own, cuts), strict=True)]
        index = torch.from_numpy(np.concatenate([random.permutation(slot) for slot in slots]))
        return [("", x[index], y[index])]
    if order == "one class":
        return [(f" {label}", x[y == label], y[y == label]) for label in y.unique().tolist()]
    return [("", x, y)]


def measured(model: eata.Adapter, x: Tensor, y: Tensor, batch: int) -> dict[str, Any]:
    """Error in percent, forwards a sample, processor seconds, and the share of the source in the end."""
    before, start, wrong = model.stats.forwards, time.process_time(), 0
    for images, labels in zip(x.split(batch), y.split(batch), strict=True):
        wrong += int((model(images).argmax(1) != labels).sum())
    return {
        "error": round(100 * wrong / len(y), 3),
        "forwards": round((model.stats.forwards - before) / len(y), 4),
        "seconds": round(time.process_time() - start, 2),
        "share": round(model.share, 4),
        "images": len(y),
    }


def settings(methods: Sequence[str], priors: Sequence[float | str]) -> Iterator[tuple[str, float | str]]:
    for method in methods:
        for prior in priors if method != "source" else ["-"]:
            yield method, prior


def run(table: Table, source: Source, chosen: argparse.Namespace) -> None:
    """Every line that is missing."""
    lifelong = chosen.protocol == "lifelong"
    orders = ORDERS if chosen.protocol == "streams" else [("shuffled", batch) for batch in chosen.batches]
    sets = PHOTOGRAPHS if source.photographs else (*eata.data.CORRUPTIONS, None)
    if chosen.sets:
        sets = tuple(None if name == "clean" else name for name in chosen.sets)
    for seed in chosen.seeds:
        for order, batch in orders:
            models: dict[tuple[str, float | str], eata.Adapter] = {}
            for corruption in sets:
                x, y = source.load(corruption, seed)
                for name, images, labels in ordered(x, y, order, seed):
                    for method, prior in settings(chosen.methods, chosen.priors):
                        key = {"seed": seed, "order": order, "batch": batch, "method": method, "prior": prior}
                        row = {**key, "set": f"{corruption or 'clean'}{name}"}
                        if table.has(**row) and not lifelong:  # a life can't be entered half-way
                            continue
                        if not lifelong or (method, prior) not in models:
                            models[method, prior] = source.build(method, prior)
                        row |= measured(models[method, prior], images, labels, batch)
                        if not table.has(**key, set=row["set"]):
                            table.add(row)
                        print(*(f"{name}={row[name]}" for name in FIELDS), flush=True)


def means(rows: list[Row]) -> None:
    """Mean error by order, batch, method and prior: corruptions, clean; and what it cost."""
    print("| order | batch | method | prior | corruptions | clean | forwards | seconds | lines |\n" + "|---" * 9 + "|")
    for key in dict.fromkeys((row["order"], row["batch"], row["method"], row["prior"]) for row in rows):
        own = [row for row in rows if (row["order"], row["batch"], row["method"], row["prior"]) == key]
        clean = [float(row["error"]) for row in own if row["set"].startswith("clean")]
        shifted = [float(row["error"]) for row in own if not row["set"].startswith("clean")]
        errors = [f"{mean(values):.2f}" if values else "" for values in (shifted, clean)]
        cost = f"{mean(float(row['forwards']) for row in own):.3f}", f"{sum(float(row['seconds']) for row in own):.0f}"
        print("|", " | ".join((*key, *errors, *cost, str(len(own)))), "|")


def seeds(text: str) -> list[int]:
    """``2020-2022`` or ``2020``."""
    first, _, last = text.partition("-")
    return list(range(int(first), int(last or first) + 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--protocol", choices=("reset", "lifelong", "streams", "photographs"), default="reset")
    parser.add_argument("--images", type=int, default=1000, help="of each set (default 1000)")
    parser.add_argument("--seeds", type=seeds, default=[2020], help="of the order: 2020, or 2020-2022")
    parser.add_argument("--batches", type=int, nargs="+", default=[64], help="sizes (default 64)")
    parser.add_argument("--methods", nargs="+", default=["source", "bn", "tent", "eta", "eata"])
    parser.add_argument(
        "--priors", nargs="+", default=[0.0, 64.0, "auto"], type=lambda v: v if v == "auto" else float(v)
    )
    parser.add_argument("--sets", nargs="+", help="corruptions, and clean (default: all)")
    parser.add_argument("--data", help="folder of <wnid>/*.JPEG, for photographs")
    parser.add_argument("--results", type=Path, default=Path("results/statistics"), help="folder")
    chosen = parser.parse_args()
    if (chosen.protocol == "photographs") != (chosen.data is not None):
        parser.error("--protocol photographs and --data PATH belong together")
    torch.set_num_threads(1)
    table = Table(chosen.results / f"{chosen.protocol}-{chosen.images}.csv")
    made = {
        "command": ["python", "-m", "benchmarks.statistics", *sys.argv[1:]],
        "torch": torch.__version__,
        "severity": 5,
    }
    table.path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(table.path.with_suffix(".json")) as temporary:
        Path(temporary).write_text(json.dumps(made, indent=1) + "\n")
    run(table, Source(chosen.data, chosen.images), chosen)
    means(table.rows)


if __name__ == "__main__":
    main()
