"""How the guard's thresholds (`eata.guard`) were chosen: hard streams of corrupted *training* images, replayed.

    python -m benchmarks.tune_guard --out results/guard-tuning                   # about ten minutes on one core
    python -m benchmarks.tune_guard --out /tmp/tuning --images 128 --seeds 1     # a taste

First the answers of EATA with a budget, without a guard, and of the source are recorded on each stream of
`eata.bench.hard`; what is there already is not made again. The same with ``prior="auto"``, which can collapse, for a
guard has to see that too. Then `eata.Guard` itself is run on the recorded answers, with one candidate after another of
each threshold, the others being the best so far: who answers, and when, is its own decision, while what the model
learns is as recorded, for better or worse. Regret is the error above the better of source and unguarded method, in
points. The best has no alarm on shuffled streams with the budget, then the least mean regret over the streams with
it, and then with ``prior="auto"``; what is gained does not count.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import json
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import eata
from benchmarks.kept import Cell, Kept, write
from eata import guard
from eata.bench import hard, stress
from eata.files import replacing
from eata.inputs import Inputs
from eata.norm import Statistics
from eata.passes import Pass

CANDIDATES: dict[str, tuple[float, ...]] = {
    "CLASSES": (0.5, 0.6, 0.7, 0.8, 0.9),
    "CLEAR": (1.0, 1.5, 2.0, 2.5, 3.0),
    "BLOCKS": (2, 4, 8),
    "ALARM": (0.03, 0.05, 0.08, 0.12),
}
METHODS = ("budget", "auto")
STREAMS = [name for name in hard.STREAMS if name != stress.NEW]
Record = dict[str, Tensor]
Rule = dict[str, float]


@functools.cache
def trained() -> tuple[nn.Module, eata.Fisher]:
    """The net and its Fisher."""
    net = eata.models.load("resnet26-bn-cifar10").eval()
    return net, stress.importance(net, "cifar10")


def record(path: Path, method: str, stream: str, source: hard.Source) -> Record:
    """Logits of both and labels, one batch after another; from the file, if it is there."""
    if not path.exists():
        net, omega = trained()
        settings = eata.preset("cifar10")
        settings["lr"] *= hard.STREAMS[stream].lr
        model = stress.METHODS[method](copy.deepcopy(net), omega, settings)
        plain = eata.Source(copy.deepcopy(net))
        batches = hard.STREAMS[stream].make(source)
        answers = [(model(x), plain(x)) for x, _ in batches]
        found = {
            "both": torch.cat([torch.stack(pair, 1) for pair in answers]),
            "labels": torch.cat([y for _, y in batches]),
            "sizes": torch.tensor([len(y) for _, y in batches]),
        }
        with replacing(path) as temporary:
            save_file(found, temporary)
        print(f"recorded {path.stem}", flush=True)
    return load_file(path)


class Recorded(eata.Adapter):
    """Answers that were recorded, (B, 2, C): of the adapted model, or of the source when its statistics are wanted."""

    asked = 0  # samples that the source was asked for

    def forward(self, inputs: Inputs, *, grad: bool = False, count: bool = True) -> Pass:
        """One of the two."""
        column = int(self.statistics.share(1) == 1)
        self.asked += column * len(inputs)
        return super().forward(inputs.map(lambda both: both[:, column]), count=count)


def wrong(logits: Tensor, labels: Tensor) -> float:
    """In percent of the rows that count."""
    counts = labels >= 0
    return 100 * float((logits.argmax(1) != labels)[counts].float().mean())


def replay(found: Record) -> dict[str, float]:
    """The guard, with its thresholds as they are now, on recorded answers."""
    inner = Recorded(nn.Identity(), statistics=Statistics(0))
    model = eata.Guard(inner)
    sizes = found["sizes"].tolist()
    answers = torch.cat([model(both) for both in found["both"].split(sizes)])
    labels = found["labels"]
    plain, source = (wrong(found["both"][:, column], labels) for column in (0, 1))
    return {
        "source": source,
        "unguarded": plain,
        "error": wrong(answers, labels),
        "regret": wrong(answers, labels) - min(source, plain),
        "alarms": sum(event.kind == "alarm" for event in model.events),
        "asked": inner.asked / len(labels),
    }


def judged(records: dict[tuple[str, str, int], Record], rule: Rule) -> Cell:
    """Every record under one rule."""
    before = {name: getattr(guard, name) for name in rule}
    try:
        for name, value in rule.items():
            setattr(guard, name, value)
        rows = [
            {"method": method, "stream": stream, "seed": seed, **replay(found)}
            for (method, stream, seed), found in records.items()
        ]
    finally:
        for name, value in before.items():
            setattr(guard, name, value)
    parts = {name: _part([row for row in rows if row["method"] == name]) for name in METHODS}
    return {"rule": rule, **parts, "rows": rows}


def _part(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The regrets of one method: first the mean over the orders of a stream."""
    regrets = [mean(row["regret"] for row in rows if row["stream"] == name) for name in STREAMS]
    return {
        "mean regret": mean(max(0.0, regret) for regret in regrets),
        "worst regret": max(regrets),
        "false alarms": sum(row["alarms"] for row in rows if hard.STREAMS[row["stream"]].shuffled),
        "asked": mean(row["asked"] for row in rows if hard.STREAMS[row["stream"]].shuffled),
    }


def order(cell: Cell) -> tuple[float, ...]:
    """The best first."""
    return cell["budget"]["false alarms"], *(round(cell[method]["mean regret"], 2) for method in METHODS)


def search(records: dict[tuple[str, str, int], Record]) -> tuple[list[Cell], Cell]:
    """Each threshold in its turn: all that was tried, and the best."""
    tried: list[Cell] = []
    rule: Rule = {name: getattr(guard, name) for name in CANDIDATES}
    for name, values in CANDIDATES.items():
        turn = [judged(records, rule | {name: value}) for value in values]
        best = min(turn, key=order)
        rule = best["rule"]
        tried += [{"varied": name, **cell} for cell in turn]
    return tried, best


def table(tried: list[Cell], best: Cell) -> str:
    """All candidates, then the chosen one on each stream."""
    columns = ("mean regret", "worst regret", "false alarms", "asked")
    head = [*CANDIDATES, *(f"{method}: {column}" for method in METHODS for column in columns)]
    lines = ["| varied | " + " | ".join(head) + " |", "|---" * (len(head) + 1) + "|"]
    for cell in tried:
        values = [f"{value:g}" for value in cell["rule"].values()]
        numbers = [f"{cell[method][column]:.2f}" for method in METHODS for column in columns]
        lines.append("| " + " | ".join([cell["varied"], *values, *numbers]) + " |")
    lines += ["", f"The choice, {best['rule']}, on each stream (mean over the orders):", ""]
    lines += ["| method | stream | source | unguarded | guard | regret | alarms | asked |", "|---" * 8 + "|"]
    for method, name in itertools.product(METHODS, STREAMS):
        own = [row for row in best["rows"] if (row["method"], row["stream"]) == (method, name)]
        numbers = [f"{mean(row[key] for row in own):.1f}" for key in ("source", "unguarded", "error", "regret")]
        last = [str(sum(row["alarms"] for row in own)), f"{mean(row['asked'] for row in own):.2f}"]
        lines.append(f"| {method} | {name} | " + " | ".join([*numbers, *last]) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=640, help="in each part of a stream (default 640)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2], help="of the orders (default 1 2)")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    kept = Kept(
        arguments.out,
        "tune_guard",
        net="resnet26-bn-cifar10",
        data="CIFAR-10, training images, corrupted here, severity 5",
        images=arguments.images,
        seeds=arguments.seeds,
    )
    records = {
        (method, stream, seed): record(
            kept.partial / f"{method}-{stream}-{seed}.safetensors",
            method,
            stream,
            hard.Source(arguments.images, seed=seed, split="train"),
        )
        for seed, method, stream in itertools.product(arguments.seeds, METHODS, STREAMS)
    }
    tried, best = search(records)
    for number, cell in enumerate(tried):
        kept.add(f"{number:02d}", {name: value for name, value in cell.items() if name != "rows"})
    write(arguments.out / "choice.json", json.dumps(best, indent=1) + "\n")
    kept.table(table(tried, best))


if __name__ == "__main__":
    main()
