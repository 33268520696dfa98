"""Error by the statistics in use: prior 0 (the papers'), a fixed one, and "auto". ResNet-26, CIFAR-10-C, severity 5.

    python -m benchmarks.statistics                                       # reset before each corruption, 1,000 images
    python -m benchmarks.statistics --images 10000 --seeds 2020-2022
    python -m benchmarks.statistics --protocol lifelong --images 2000 --methods eata budget   # never reset; clean last
    python -m benchmarks.statistics --protocol streams --methods source bn --priors auto      # sorted, Dirichlet, ...
    python -m benchmarks.statistics --protocol photographs --data PATH    # ResNet-50; see benchmarks.imagenet_resnet50

A fixed prior counts samples: 64 is half source, half batch with batches of 64. The learning rate of the preset, which
is for batches of 64, goes with the size of the batch. ``budget`` is EATA with a budget of 0.02 nats in place of beta;
``window-eata`` is EATA in a window of 64 samples, for small batches.
Each line of ``results/statistics/PROTOCOL.csv`` is one set of one stream; a run goes on where the last one stopped, and
``PROTOCOL.json`` says what made it. `benchmarks.statistics_table` makes tables of it.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import time
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import eata
from benchmarks.gradient import HALVES
from benchmarks.imagenet_resnet50 import resnet50
from eata.bench.manifest import manifest
from eata.bench.materials import Restricted
from eata.data import imagenet
from eata.files import replacing

FIELDS = ("seed", "order", "batch", "images", "method", "prior", "set", "error", "forwards", "seconds", "share")
ORDERS = (("sorted", 64), ("one class", 64), ("dirichlet", 64), ("shuffled", 4), ("shuffled", 2), ("shuffled", 1))
PHOTOGRAPHS = ("gaussian_noise", "jpeg_compression", "brightness", "contrast", "clean")
BUDGET = 0.02  # nats
Row = dict[str, str]


class Table:
    """Lines of a CSV file that is whole at any time; those that are there already need not be made again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[Row] = list(csv.DictReader(path.open())) if path.exists() else []
        self._said = False

    def has(self, **key: Any) -> bool:
        """Whether a line with these values is there."""
        return any(all(row[name] == str(value) for name, value in key.items()) for row in self.rows)

    def add(self, row: dict[str, Any]) -> None:
        """Append, and write; the manifest too, before the first."""
        if not self._said:
            self._say_who()
        self.rows.append({name: str(row[name]) for name in FIELDS})
        text = io.StringIO()
        writer = csv.DictWriter(text, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        with replacing(self.path) as temporary:
            Path(temporary).write_text(text.getvalue())

    def _say_who(self) -> None:
        """Each run that adds lines is one entry of the manifest."""
        path = self.path.with_suffix(".json")
        made: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"severity": 5, "runs": []}
        made["runs"].append(manifest("python -m benchmarks.statistics") | {"lines before": len(self.rows)})
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            Path(temporary).write_text(json.dumps(made, indent=1) + "\n")
        self._said = True


class Source:
    """A net, its sets and a Fisher of clean images."""

    def __init__(self, path: str | None, images: int) -> None:
        self.photographs, self.images = path is not None, images
        self.data = f"folder:{path}" if path else "cifar10"
        self.net = self._new_net()
        self.preset = "imagenet" if path else "cifar10"
        self._fisher: dict[str, Tensor] | None = None
        self.load = lru_cache(maxsize=16 if images <= 2000 else 1)(self._load)  # corrupting takes time, too

    def _load(self, name: str, seed: int) -> tuple[Tensor, Tensor]:
        """Images and labels of a set in the order of the seed."""
        config: Any = getattr(self.net, "pretrained_cfg", {"mean": HALVES[0], "std": HALVES[1]})
        corruption = None if name == "clean" else name
        limit = None if self.images == 10_000 and not self.photographs else self.images  # all of CIFAR-10 is in a file
        stream = eata.data.load(self.data, corruption=corruption, severity=5, limit=limit)
        return next(stream.batches(len(stream), seed=seed, mean=config["mean"], std=config["std"]))

    def _new_net(self) -> nn.Module:
        """The net; of photographs only the logits of their classes, as ImageNet-R has 200 of 1,000."""
        if not self.photographs:
            return eata.models.load("resnet26-bn-cifar10")
        net, places = resnet50(), imagenet.full_index()
        restricted = Restricted(net, tuple(places[name] for name in eata.data.load(self.data, limit=1).class_names))
        restricted.pretrained_cfg = net.pretrained_cfg
        return restricted

    def build(self, method: str, prior: float | str, batch: int) -> eata.Adapter:
        """A new adapter around a new copy."""
        if method.startswith("window-"):  # its steps are those of batches of 64
            return eata.Window(self.build(method.removeprefix("window-"), prior, 64), length=64)
        net = self._new_net()
        kind = eata.EATA if method == "budget" else eata.methods.method(method)
        if kind is eata.Source:
            return eata.Source(net)
        arguments: dict[str, Any] = eata.preset(self.preset, kind)
        if "lr" in arguments:
            arguments["lr"] *= batch / 64
        if "epsilon" in arguments and self.photographs:  # how alike predictions are depends on the number of classes
            arguments["epsilon"] = eata.preset("cifar10", kind)["epsilon"]
        if kind is not eata.EATA:
            return kind(net, prior=prior, **arguments)  # type: ignore[call-arg]
        if self._fisher is None:
            x, _ = self.load("clean", 2020)
            self._fisher = eata.fisher(self.net, x[:2000], per=arguments["per"])
        if method == "budget":
            arguments |= {"beta": None, "budget": BUDGET}
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


class Stream:
    """The sets of one order in one protocol, and the lines of the table that are theirs."""

    def __init__(self, table: Table, source: Source, sets: Sequence[str], seed: int, order: str, batch: int) -> None:
        self.table, self.source, self.sets = table, source, sets
        self.seed, self.order, self.batch = seed, order, batch

    def missing(self, method: str, prior: float | str) -> list[str]:
        """Sets without a line."""
        labels = [f" {label}" for label in range(10)] if self.order == "one class" else [""]
        key = {"seed": self.seed, "order": self.order, "batch": self.batch, "method": method, "prior": prior}
        return [name for name in self.sets if not all(self.table.has(**key, set=name + label) for label in labels)]

    def reset(self, method: str, prior: float | str) -> None:
        """Every set that is missing, each by a new model."""
        for name in self.missing(method, prior):
            x, y = self.source.load(name, self.seed)
            for label, images, labels in ordered(x, y, self.order, self.seed):
                model = self.source.build(method, prior, self.batch)
                self._add(method, prior, name + label, measured(model, images, labels, self.batch))

    def live(self, method: str, prior: float | str) -> None:
        """All sets by one model, if one is missing: a life can't be entered half-way."""
        if not self.missing(method, prior):
            return
        model = self.source.build(method, prior, self.batch)
        for name in self.sets:
            result = measured(model, *self.source.load(name, self.seed), self.batch)
            if name in self.missing(method, prior):
                self._add(method, prior, name, result)

    def _add(self, method: str, prior: float | str, name: str, result: dict[str, Any]) -> None:
        key = {"seed": self.seed, "order": self.order, "batch": self.batch, "method": method, "prior": prior}
        row = {**key, "set": name, **result}
        self.table.add(row)
        print(*(f"{name}={row[name]}" for name in FIELDS), flush=True)


def run(table: Table, source: Source, chosen: argparse.Namespace) -> None:
    """Every line that is missing."""
    orders = ORDERS if chosen.protocol == "streams" else [("shuffled", batch) for batch in chosen.batches]
    sets = chosen.sets or (PHOTOGRAPHS if source.photographs else (*eata.data.CORRUPTIONS, "clean"))
    for seed in chosen.seeds:
        for order, batch in orders:
            stream = Stream(table, source, sets, seed, order, batch)
            for method, prior in settings(chosen.methods, chosen.priors):
                if chosen.protocol == "lifelong":
                    stream.live(method, prior)
                else:
                    stream.reset(method, prior)


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
    run(table, Source(chosen.data, chosen.images), chosen)


if __name__ == "__main__":
    main()
