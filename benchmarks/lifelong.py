"""What EATA forgets over a long stream, by beta or by a budget in nats: ResNet-26, CIFAR-10-C, never reset.

    python -m benchmarks.lifelong --out results/lifelong                        # every variant, 3 orders; hours
    python -m benchmarks.lifelong --out results/lifelong --seeds 2021 --variants "budget 0.02" "beta 1"
    python -m benchmarks.lifelong --out /tmp/lifelong --limit 512 --seeds 2020  # a taste

The 15 corruptions at severity 5, one after another, batches of 64: in the paper's order with seed 2020, in an order by
the seed with others. For each: the error of the predictions as they were given, then that of the adapted model on 2,048
clean images, predicting only, its drift, and the largest drift after any step. In the end the error on all clean
images, adapting on them too, beside that of a new model which adapts on them alone. The Fisher is of 2,000 clean
images, as in the paper: the same 2,000 for every order.

``beta B`` has omega per sample (Eq. 9 as written), ``beta B per batch`` as the authors' program for ImageNet;
``reset``: a new model for each corruption. What is done is kept in ``--out``: the same command goes on after the last
corruption that was finished, and several commands may share a folder.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterable
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor

import eata
from benchmarks.gradient import HALVES, trained
from benchmarks.kept import Cell, Kept

FIRST = 2020  # the seed of the paper's order
VARIANTS = (
    "beta 1 per batch", "beta 1", "budget 0.02", "eta", "beta 1 reset", "beta 0.3", "beta 3", "beta 10",
    "budget 0.01", "budget 0.05", "budget 0.02 reset",
)  # fmt: skip


def images(corruption: str | None, limit: int | None, seed: int) -> Iterable[tuple[Tensor, Tensor]]:
    stream = eata.data.load("cifar10", corruption=corruption, severity=5, limit=limit)
    return stream.batches(64, seed=seed, mean=HALVES[0], std=HALVES[1])


@functools.cache
def fisher(per: Any, limit: int | None) -> eata.Fisher:
    clean = torch.cat([x for x, _ in list(images(None, limit, FIRST))[:32]])
    return eata.fisher(trained(None), clean, samples=2000, per=per)


def build(variant: str, limit: int | None) -> eata.ETA:
    """``beta 1``, ``beta 1 per batch``, ``budget 0.02``, ``eta``; ``reset`` at the end is the caller's."""
    if variant.startswith("eta"):
        return eata.ETA(trained(None), **eata.preset("cifar10", eata.ETA))
    kind, value, *rest = variant.split()
    per = "batch" if "batch" in rest else "sample"
    held = {"beta": None, "budget": None, "per": None} | {kind: float(value)}
    return eata.EATA(trained(None), fisher(per, limit), **eata.preset("cifar10") | held)


def corruptions(seed: int) -> list[str]:
    names = list(eata.data.CORRUPTIONS)
    return names if seed == FIRST else [names[n] for n in np.random.RandomState(seed).permutation(len(names))]


def error(model: eata.Adapter, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    """In percent, the model going on from where it is, and adapting as it goes."""
    wrong = total = 0
    for x, y in batches:
        wrong += int((model(x).argmax(1) != y).sum())
        total += len(y)
    return 100 * wrong / total


class Watched:
    """A model, and the largest drift that it had after a step."""

    def __init__(self, model: eata.ETA) -> None:
        self.model = model
        self.worst = 0.0

    def __call__(self, x: Tensor) -> Tensor:
        answer = self.model(x)
        self.worst = max(self.worst, getattr(self.model, "drift", None) or 0.0)
        return answer


def live(kept: Kept, variant: str, seed: int, limit: int | None) -> None:
    """One variant through one order, from where it stopped."""
    name = f"{variant} {seed}"
    partial = kept.partial / f"{kept.path(name).stem}.safetensors"
    cell = kept.cell(name) or {"variant": variant, "seed": seed, "limit": limit, "new": None, "after": None, "sets": []}
    if cell["after"] is not None:
        return
    clean = list(images(None, limit, seed))
    if cell["new"] is None:
        cell["new"] = error(build(variant, limit), clean)
    model = Watched(build(variant, limit))
    if cell["sets"]:
        model.model.load(partial)
    for corruption in corruptions(seed)[len(cell["sets"]) :]:
        if variant.endswith("reset"):
            model.model.reset()
        model.worst = 0.0
        found = {"corruption": corruption, "error": error(model, images(corruption, limit, seed))}  # type: ignore[arg-type]
        with model.model.frozen():
            found["clean"] = error(model.model, clean[:32])
        found |= {"drift": getattr(model.model, "drift", None), "worst drift": model.worst}
        cell["sets"].append(found)
        model.model.save(partial)
        kept.add(name, cell)
        print(f"{name}, {corruption}: {found['error']:.1f} %, clean images then {found['clean']:.1f} %", flush=True)
    cell["after"] = error(model.model, clean)
    kept.add(name, cell)
    partial.unlink()


def table(cells: list[Cell]) -> str:
    """Means over the orders of each variant that is finished."""
    lines = [
        "| variant | orders | corruptions | clean after | clean, new model | after - new | largest drift |",
        "|---|---|---|---|---|---|---|",
    ]
    done = [cell for cell in cells if cell["after"] is not None]
    for variant in dict.fromkeys([*VARIANTS, *(cell["variant"] for cell in done)]):
        own = [cell for cell in done if cell["variant"] == variant]
        if own:
            errors = mean(one["error"] for cell in own for one in cell["sets"])
            after, new = mean(cell["after"] for cell in own), mean(cell["new"] for cell in own)
            worst = max(one["worst drift"] for cell in own for one in cell["sets"])
            numbers = f"{errors:.2f} | {after:.2f} | {new:.2f} | {after - new:+.2f}"
            lines.append(f"| {variant} | {len(own)} | {numbers} | {f'{worst:.4f}' if worst else ''} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", default=VARIANTS, help=f"default: {', '.join(VARIANTS)}")
    parser.add_argument("--seeds", type=int, nargs="+", default=[2020, 2021, 2022], help="of the orders")
    parser.add_argument("--limit", type=int, help="images of each corruption (default: all 10,000)")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--threads", type=int, default=1, help="default 1")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    kept = Kept(
        arguments.out,
        "lifelong",
        net="resnet26-bn-cifar10",
        data="CIFAR-10, corrupted here, severity 5; the Fisher of 2,000 clean test images, as in the paper",
        images=arguments.limit or 10_000,
    )
    for seed in arguments.seeds:
        for variant in arguments.variants:
            live(kept, variant, seed, arguments.limit)
    kept.table(table(kept.cells()))


if __name__ == "__main__":
    main()
