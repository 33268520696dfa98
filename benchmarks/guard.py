"""What a guard costs in time: EATA with a budget, with and without it, batch by batch in turns. ResNet-26, severity 5.

    python -m benchmarks.guard --out results/guard-time
    python -m benchmarks.guard --out /tmp/guard-time --images 512 shift       # a taste
    python -m benchmarks.guard --out /tmp/guard-time --busy                   # on a machine that does other things too

A stream of one corruption after another, shuffled, or ``mixed``. The ratio is of the seconds of the whole stream, so
the comparisons at its start, after each change and from time to time are all in it; ``asked`` is the share of the
samples for which the source was asked too.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch

import eata
from benchmarks.kept import Cell, Kept
from eata.bench import hard, stress

STREAMS = ("shift", "mixed", "clean")


class Counted(eata.Guard):
    """A guard that counts the samples which the source was asked for."""

    asked = 0

    def _of_source(self, inputs: eata.Inputs, count: bool = False) -> torch.Tensor:
        self.asked += len(inputs)
        return super()._of_source(inputs, count)


def measure(stream: str, images: int, seed: int, clock: Callable[[], float]) -> Cell:
    """Seconds of both over one stream, in turns; who begins alternates too."""
    name = "resnet26-bn-cifar10"
    omega = stress.importance(eata.models.load(name).eval(), "cifar10")
    settings = eata.preset("cifar10") | {"beta": None, "budget": 0.02}
    plain = eata.EATA(eata.models.load(name), omega, **settings)
    guarded = Counted(eata.EATA(eata.models.load(name), omega, **settings))
    seconds, total = {"plain": 0.0, "guarded": 0.0}, 0
    sides: list[tuple[str, eata.Adapter]] = [("plain", plain), ("guarded", guarded)]
    batches = hard.STREAMS[stream].make(hard.Source(images, seed=seed))
    for model in (plain, guarded):  # warm up
        model(batches[0][0])
        model.reset()
    guarded.asked = 0
    for number, (x, _) in enumerate(batches):
        for side, model in sides if number % 2 else sides[::-1]:
            start = clock()
            model(x)
            seconds[side] += clock() - start
        total += len(x)
    events = [str(event) for event in guarded.events]
    shares = {"ratio": seconds["guarded"] / seconds["plain"], "asked": guarded.asked / total}
    return {"stream": stream, "seed": seed, "images": total, **seconds, **shares, "events": events}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("streams", nargs="*", default=STREAMS, help=f"of eata bench stress; default: {STREAMS}")
    parser.add_argument("--images", type=int, default=4096, help="in each part of a stream (default 4096)")
    parser.add_argument("--seed", type=int, default=2020, help="of the order (default 2020)")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--busy", action="store_true", help="processor time instead of the clock on the wall")
    arguments = parser.parse_args()
    clock = time.process_time if arguments.busy else time.perf_counter
    torch.set_num_threads(1)
    kept = Kept(
        arguments.out, "guard", net="resnet26-bn-cifar10", batch=hard.SIZE, images=arguments.images, busy=arguments.busy
    )
    for stream in arguments.streams:
        kept.add(f"{stream} {arguments.seed}", measure(stream, arguments.images, arguments.seed, clock))
    lines = ["| stream | images | time with a guard / without | asked |", "|---|---|---|---|"]
    for cell in kept.cells():
        lines.append(f"| {cell['stream']} | {cell['images']} | {cell['ratio']:.3f} | {cell['asked']:.2f} |")
    kept.table("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
