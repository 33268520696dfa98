"""Time of one adaptation step, as a ratio to the textbook EATA step. The sides take turns in one process.

    python -m benchmarks.step                  # both nets; some minutes
    python -m benchmarks.step --quick          # fewer repeats
    python -m benchmarks.step resnet26 --out results/speed-step-resnet26
    python -m benchmarks.step resnet26
    python -m benchmarks.step --since          # the methods since EATA: rows over full
    python -m benchmarks.step --busy           # on a machine that does other things too

Textbook is stock PyTorch (`benchmarks.textbook`); ours is `eata.EATA` as a user calls it. The selection of all is
pinned to the first B' rows of the batch, so that B'/B is the same for all. Each number is the median, over the repeats,
of the ratio to the textbook step of the same repeat. Weights and images are random: the time does not depend on them.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import eata
from benchmarks import record, textbook
from benchmarks.nets import resnet50
from eata import allocator, norm
from eata.gradient import Choice
from eata.models import ResNet26
from eata.passes import Pass

FRACTIONS = (0.25, 0.38, 0.5, 0.75, 1.0)
# The methods since EATA whose loss touches some rows, with arguments that let them work on any net and many rows.
SINCE: dict[type[eata.GradientAdapter], dict[str, Any]] = {
    eata.RDumb: {"e0": 1.0, "epsilon": 1.0},
    eata.SAR: {"e0": 1.0, "exclude": ()},
    eata.DeYO: {"e0": 1.0, "plpd": -1.0, "exclude": ()},
    eata.ROID: {"optimizer": "sgd"},
}


class Pinned(eata.EATA):
    """EATA that does all of its own selection, and then takes the first ``chosen`` rows."""

    chosen = 0

    def select(self, batch: Pass) -> Choice:
        """The first rows."""
        choice = super().select(batch)
        index = torch.arange(self.chosen)
        return Choice(index, batch.logits.new_ones(self.chosen), choice.reliable)


def ours(net: nn.Module, chosen: int, **arguments: object) -> Pinned:
    fisher = {name: torch.rand_like(p) for name, p in norm.affine_parameters(net).items()}
    model = Pinned(net, fisher, lr=1e-6, **arguments)  # type: ignore[arg-type]
    model.chosen = chosen
    return model


def sides(net: nn.Module, batch: int) -> dict[tuple[str, float | None], Callable[[Tensor], Tensor]]:
    """Everything to time, by column and fraction (None: the fraction does not matter)."""
    layers = len(norm.normalization_layers(net))
    found: dict[tuple[str, float | None], Callable[[Tensor], Tensor]] = {
        ("textbook", None): textbook.EATA(copy.deepcopy(net), batch // 2),
        ("forward", None): textbook.Forward(copy.deepcopy(net), 0),
        ("tent", None): textbook.Tent(copy.deepcopy(net), batch),
    }
    for fraction in FRACTIONS:
        chosen = round(fraction * batch)
        found["two-pass", fraction] = textbook.TwoPass(copy.deepcopy(net), chosen)
        found["ours", fraction] = ours(copy.deepcopy(net), chosen)
        found["ours, last third", fraction] = ours(copy.deepcopy(net), chosen, layers=layers // 3)
    return found


def first_rows(method: type[eata.GradientAdapter], net: nn.Module, chosen: int, **arguments: Any) -> eata.Adapter:
    """The method, which does all of its own selection and then takes the first ``chosen`` rows."""

    class First(method):  # type: ignore[valid-type,misc]
        def select(self, batch: Pass) -> Choice:
            choice = super().select(batch)
            return Choice(torch.arange(chosen), batch.logits.new_ones(chosen), choice.reliable)

    return First(copy.deepcopy(net), lr=1e-6, **arguments)


def measure_since(name: str, net: nn.Module, x: Tensor, repeats: int, clock: Callable[[], float]) -> None:
    """The methods since EATA, rows over full, at each fraction."""
    net.pretrained_cfg = {"mean": (0.5,), "std": (0.5,)}  # type: ignore[assignment]
    print(f"\n{name}, B = {len(x)}; time of a step with backward='rows' over the same with 'full'")
    print("| B'/B |", " | ".join(method.__name__ for method in SINCE), "|")
    print("|---|" + "---|" * len(SINCE))
    for fraction in FRACTIONS[:-1]:
        cells = []
        for method, arguments in SINCE.items():
            rows, full = (
                first_rows(method, net, round(fraction * len(x)), backward=way, **arguments) for way in ("rows", "full")
            )
            ratios = []
            for repeat in range(repeats + 1):
                times = []
                for step in (full, rows):
                    start = clock()
                    step(x)
                    times.append(clock() - start)
                if repeat:  # the first warms up
                    ratios.append(times[1] / times[0])
            cells.append(f"{median(ratios):.2f}")
        print(f"| {fraction} |", " | ".join(cells), "|", flush=True)


def measure(name: str, net: nn.Module, x: Tensor, repeats: int, clock: Callable[[], float]) -> dict[str, Any]:
    """Every ratio, by column and fraction, and the textbook step's seconds."""
    timed = sides(net, len(x))
    ratios: dict[tuple[str, float | None], list[float]] = {key: [] for key in timed}
    textbook_seconds = []
    for repeat in range(repeats + 1):
        seconds = {}
        for key, step in timed.items():
            start = clock()
            step(x)
            seconds[key] = clock() - start
        if repeat:  # the first warms up
            textbook_seconds.append(seconds["textbook", None])
            for key, value in seconds.items():
                ratios[key].append(value / seconds["textbook", None])

    return {
        "net": name,
        "batch": len(x),
        "repeats": repeats,
        "textbook seconds": median(textbook_seconds),
        "forward": median(ratios["forward", None]),
        "tent": median(ratios["tent", None]),
        **{
            column: {str(fraction): median(ratios[column, fraction]) for fraction in FRACTIONS}
            for column in ("two-pass", "ours", "ours, last third")
        },
    }


def table(found: dict[str, Any]) -> str:
    """Markdown: each time over the textbook step's."""
    milliseconds = 1000 * found["textbook seconds"]
    lines = [
        f"{found['net']}, B = {found['batch']}; the textbook EATA step takes {milliseconds:.0f} ms",
        "",
        "| B'/B | forward only | Tent | EATA, textbook | EATA, two-pass | EATA, ours | ours, last third of layers |",
        "|---|---|---|---|---|---|---|",
    ]
    for fraction in map(str, FRACTIONS):
        values = [found["forward"], found["tent"], 1.0]
        values += [found[column][fraction] for column in ("two-pass", "ours", "ours, last third")]
        lines.append(f"| {fraction} | " + " | ".join(f"{value:.2f}" for value in values) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nets", nargs="*", help="resnet26, resnet50 (default: both)")
    parser.add_argument(
        "--since", action="store_true", help="the methods since EATA (RDumb, SAR, DeYO, ROID), ResNet-26"
    )
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument(
        "--busy", action="store_true", help="one thread, processor time instead of the clock on the wall"
    )
    parser.add_argument("--batch", type=int, default=32, help="B of ResNet-50 (default 32)")
    parser.add_argument(
        "--allocator", action="store_true", help="keep freed memory, both sides, as the eata command does"
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="keep the numbers there, as results/speed-NAME")
    arguments = parser.parse_args()
    unknown = set(arguments.nets) - {"resnet26", "resnet50"}
    if unknown:
        parser.error(f"there is no net {sorted(unknown)[0]!r}; known are resnet26, resnet50")
    if arguments.allocator:
        allocator.keep_freed_memory()
    wanted = arguments.nets or ["resnet26", "resnet50"]
    clock = time.process_time if arguments.busy else time.perf_counter
    if arguments.busy:
        torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    torch.manual_seed(0)
    if arguments.since:
        repeats = 5 if arguments.quick else 15
        measure_since("ResNet-26, 32x32", ResNet26(10, "bn"), torch.randn(64, 3, 32, 32), repeats, clock)
        return
    made, found = record.manifest(), []
    if "resnet26" in wanted:
        x, repeats = torch.randn(64, 3, 32, 32), 5 if arguments.quick else 15
        found.append(measure("ResNet-26, 32x32", ResNet26(10, "bn"), x, repeats, clock))
        print(table(found[-1]), flush=True)
    if "resnet50" in wanted:
        x, repeats = torch.randn(arguments.batch, 3, 224, 224), 2 if arguments.quick else 5
        found.append(measure("ResNet-50, 224x224", resnet50(), x, repeats, clock))
        print(table(found[-1]))
    record.keep_folder(arguments.out, made, {"nets": found}, [table(one) for one in found])


if __name__ == "__main__":
    main()
