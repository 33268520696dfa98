"""What EATA forgets over a long stream, by beta or by a budget in nats: ResNet-26, CIFAR-10-C, never reset.

    python -m benchmarks.lifelong                     # beta 1 (the paper's for CIFAR-10), 30 and 300
    python -m benchmarks.lifelong --beta 30           # about a quarter of an hour on one core
    python -m benchmarks.lifelong --beta 1 --budget 0.02 0.1        # budgets beside it
    python -m benchmarks.lifelong --limit 512         # a taste

The 15 corruptions at severity 5, one after another, batches of 64. For each: the error of the predictions as they were
given, then that of the adapted model on 2,048 clean images, predicting only, and its drift. The last line of each
has the error on all clean images, adapting on them too, beside that of a new model which adapts on them alone. The
Fisher is of 2,000 clean images, as in the paper: the same 2,000.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from statistics import mean

import torch
from torch import Tensor

import eata
from benchmarks.accuracy import HALVES, error
from benchmarks.gradient import trained


def images(corruption: str | None, limit: int | None) -> Iterable[tuple[Tensor, Tensor]]:
    stream = eata.data.load("cifar10", corruption=corruption, severity=5, limit=limit)
    return stream.batches(64, seed=2020, mean=HALVES[0], std=HALVES[1])


def build(held: dict[str, float | None], fisher: eata.Fisher) -> eata.EATA:
    return eata.EATA(trained(None), fisher, **eata.preset("cifar10") | held)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beta", type=float, nargs="*", default=[1, 30, 300], help="default: 1 30 300; 0 is ETA")
    parser.add_argument("--budget", type=float, nargs="*", default=[], help="in nats; default: none")
    parser.add_argument("--limit", type=int, help="images of each corruption (default: all 10,000)")
    parser.add_argument("--threads", type=int, help="default: as many as there are cores")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    clean = list(images(None, arguments.limit))
    fisher = eata.fisher(trained(None), torch.cat([x for x, _ in clean[:32]]), samples=2000, per="sample")
    runs: dict[str, dict[str, float | None]] = {f"beta {beta:g}": {"beta": beta} for beta in arguments.beta}
    runs |= {f"budget {nats:g}": {"beta": None, "budget": nats} for nats in arguments.budget}
    for name, held in runs.items():
        fresh = error(build(held, fisher), clean)
        model = build(held, fisher)
        errors = []
        for corruption in eata.data.CORRUPTIONS:
            errors.append(error(model, images(corruption, arguments.limit)))
            with model.frozen():
                kept = error(model, clean[:32])
            print(
                f"{name}, {corruption}: {errors[-1]:.1f} %, clean images then {kept:.1f} %, {model.drift:.4f} nats",
                flush=True,
            )
        after = error(model, clean)
        print(f"{name}: mean {mean(errors):.2f} %, clean {after:.2f} %, clean of a new model {fresh:.2f} %\n")


if __name__ == "__main__":
    main()
