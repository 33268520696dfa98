"""The stress suite: methods with and without a guard on hard streams; one table, one figure, one manifest.

Each stream is followed by clean images, on which the model goes on: what did the stream do to it?
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from eata import data, models
from eata.adapter import Adapter
from eata.bench import hard
from eata.bench.manifest import manifest
from eata.data.stream import Batch
from eata.errors import unknown
from eata.files import replacing
from eata.guard import Guard
from eata.importance import Fisher, fisher
from eata.methods import EATA, Source, Tent, preset

WINDOW = 10  # batches, of the worst window
STRETCH = 4  # batches, over which a recovery is told
NEAR = 5.0  # points of error that count as recovered
IMAGES = 640  # in each part of a stream
CLEAN = 320  # clean images after each stream
NETS = {"cifar10": "resnet26-bn-cifar10", "digits": "resnet26-bn-digits"}
Row = dict[str, Any]
Make = Callable[[nn.Module, Fisher, dict[str, Any]], Adapter]  # net, Fisher, preset


def _budget(net: nn.Module, omega: Fisher, settings: dict[str, Any]) -> Adapter:
    return EATA(net, omega, **settings | {"beta": None, "budget": 0.02})


def _auto(net: nn.Module, omega: Fisher, settings: dict[str, Any]) -> Adapter:
    return EATA(net, omega, **settings | {"beta": None, "budget": 0.02, "prior": "auto"})


def _preset(net: nn.Module, omega: Fisher, settings: dict[str, Any]) -> Adapter:
    return EATA(net, omega, **settings)


def _tent(net: nn.Module, omega: Fisher, settings: dict[str, Any]) -> Adapter:
    return Tent(net, lr=settings["lr"])


def _guarded(make: Make) -> Make:
    return lambda net, omega, settings: Guard(make(net, omega, settings))


METHODS: dict[str, Make] = {
    "source": lambda net, omega, settings: Source(net),
    "budget": _budget,
    "budget+guard": _guarded(_budget),
    "auto": _auto,
    "auto+guard": _guarded(_auto),
    "eata": _preset,
    "eata+guard": _guarded(_preset),
    "tent": _tent,
    "tent+guard": _guarded(_tent),
}


DEFAULT = ("source", "budget", "budget+guard")


def run(streams: Sequence[str], methods: Sequence[str], source: hard.Source, folder: Path) -> Iterator[Row]:
    """Measure what is not in the folder yet, row by row; each is written there as soon as it is known.

    Args:
        streams: names in ``hard.STREAMS``.
        methods: names in ``METHODS``.
        source: of the images.
        folder: for ``stress.json``.
    """
    for kind, names, known in (("stream", streams, hard.STREAMS), ("method", methods, METHODS)):
        for name in names:
            if name not in known:
                raise unknown(kind, name, known)
    net = models.load(NETS[source.data]).eval()
    omega = _fisher(net, source.data)
    rows, made = read(folder), manifest("eata") | {"net": NETS[source.data], "severity": hard.SEVERITY}
    done = {_key(row) for row in rows}
    for stream in streams:
        settings = preset(source.data)
        settings["lr"] *= hard.STREAMS[stream].lr
        for method in methods:
            row: Row = {"stream": stream, "method": method, **dataclasses.asdict(source)}
            if _key(row) not in done:
                row |= measure(METHODS[method](copy.deepcopy(net), omega, settings), stream, source)
                rows.append(row)
                _write(folder / "stress.json", json.dumps({"manifest": made, "rows": rows}, indent=1))
                yield row


def _key(row: Row) -> tuple[Any, ...]:
    names = ("stream", "method", *(field.name for field in dataclasses.fields(hard.Source)))
    return tuple(row[name] for name in names)


def _fisher(net: nn.Module, name: str) -> Fisher:
    images = data.load(name, split="train").batches(500, mean=(0.5,) * 3, std=(0.5,) * 3)
    return fisher(net, images, samples=2000)


def measure(model: Adapter, stream: str, source: hard.Source) -> Row:
    """One stream, then clean images: errors in percent of the rows that count."""
    during = _errors(model, hard.STREAMS[stream].make(source))
    alarms = _alarms(model)
    after = _errors(model, hard.clean(dataclasses.replace(source, images=CLEAN, seed=source.seed + 1)))
    return {
        "during": _mean(during),
        "after": _mean(after),
        "worst": max(_mean(part) for part in _windows(during, WINDOW)),
        "alarms": alarms,
        "stretches": [_mean(part) for part in _windows(after, STRETCH)],
        "batches": len(during),
        "drift": getattr(getattr(model, "method", model), "drift", None),
    }


def _errors(model: Adapter, batches: list[Batch]) -> list[tuple[int, int]]:
    """Wrong and counted rows of each batch."""
    found = []
    for x, y in batches:
        wrong: Tensor = (model(x).argmax(1) != y) & (y >= 0)
        found.append((int(wrong.sum()), int((y >= 0).sum())))
    return found


def _mean(errors: list[tuple[int, int]]) -> float:
    counted = sum(total for _, total in errors)
    return 100 * sum(wrong for wrong, _ in errors) / counted if counted else math.nan


def _windows(errors: list[tuple[int, int]], length: int) -> list[list[tuple[int, int]]]:
    """Every stretch of so many batches in which something counts."""
    parts = [errors[start : start + length] for start in range(max(1, len(errors) - length + 1))]
    return [part for part in parts if any(total for _, total in part)]


def _alarms(model: Adapter) -> int:
    return sum(event.kind == "alarm" for event in model.events) if isinstance(model, Guard) else 0


def recovery(row: Row, fresh: float) -> int | None:
    """Clean batches until the error is within 5 points of a new model's; None: never."""
    return next((n for n, error in enumerate(row["stretches"]) if error <= fresh + NEAR), None)


# --- what comes out ---------------------------------------------------------------------------------------------------


def read(folder: Path) -> list[Row]:
    """The rows measured so far."""
    file = folder / "stress.json"
    rows: list[Row] = json.loads(file.read_text())["rows"] if file.exists() else []
    return rows


def line(row: Row) -> str:
    """A row in words."""
    return (
        f"{row['stream']}, {row['method']}: {row['during']:.1f} %, clean images after it {row['after']:.1f} %, "
        f"worst {WINDOW} batches {row['worst']:.1f} %, {row['alarms']} alarms"
    )


def table(rows: list[Row]) -> str:
    """Markdown: a line for each stream and method, the mean over the seeds."""
    lines = [
        "| stream | method | during | clean after | worst 10 batches | alarms | batches until recovery |",
        "|---|---|---|---|---|---|---|",
    ]
    for stream, spec in hard.STREAMS.items():
        for method in METHODS:
            own = [row for row in rows if (row["stream"], row["method"]) == (stream, method)]
            if own:
                lines.append(f"| {stream}: {spec.says} | {method} | {_cells(own, rows)} |")
    return "\n".join(lines) + "\n"


def _cells(own: list[Row], rows: list[Row]) -> str:
    numbers = [sum(row[name] for row in own) / len(own) for name in ("during", "after", "worst")]
    fresh = [row["during"] for row in rows if (row["stream"], row["method"]) == ("clean", "budget")]
    found = [recovery(row, sum(fresh) / len(fresh)) for row in own] if fresh else [None]
    slowest = "never" if None in found else str(max(n for n in found if n is not None))
    alarms = sum(row["alarms"] for row in own)
    return " | ".join([*(f"{number:.1f}" for number in numbers), str(alarms), slowest if fresh else "?"])


def figure(rows: list[Row], path: Path) -> None:
    """Error during each stream, a mark for each method."""
    from matplotlib.figure import Figure

    names = [name for name in hard.STREAMS if any(row["stream"] == name for row in rows)]
    drawing = Figure(figsize=(8, 0.3 * len(names) + 1), layout="constrained")
    axes = drawing.add_subplot()
    marks = dict(zip(METHODS, "|o*svPDx+", strict=True))
    for method, mark in marks.items():
        points = [
            (_average([row["during"] for row in rows if (row["stream"], row["method"]) == (name, method)]), place)
            for place, name in enumerate(names)
        ]
        points = [(x, y) for x, y in points if not math.isnan(x)]
        if points:
            axes.plot(*zip(*points, strict=True), mark, label=method, alpha=0.8)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("error during the stream (%)")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize="small")
    with replacing(path) as temporary:
        drawing.savefig(temporary, format="svg")


def _average(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def write(folder: Path) -> str:
    """The table and the figure of what is in the folder; the table's text."""
    rows = read(folder)
    text = table(rows)
    _write(folder / "stress.md", text)
    figure(rows, folder / "stress.svg")
    return text


def _write(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        Path(temporary).write_text(text)
