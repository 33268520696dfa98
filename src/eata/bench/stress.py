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

from filelock import FileLock
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
CLEAN = 640  # clean images after each stream
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
PLAIN = "budget"  # what a guarded method is judged by, beside the source
NEW = "new"  # the stream of which nothing came before the clean images


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
    omega = importance(net, source.data)
    made = manifest("eata") | {"net": NETS[source.data], "severity": hard.SEVERITY}
    done = {_key(row) for row in read(folder)}
    for stream in streams:
        settings = preset(source.data)
        settings["lr"] *= hard.STREAMS[stream].lr
        for method in methods:
            row: Row = {"stream": stream, "method": method, **dataclasses.asdict(source)}
            if _key(row) not in done:
                row |= measure(METHODS[method](copy.deepcopy(net), omega, settings), stream, source)
                row["commit"] = made["commit"]
                _add(folder, row, made)
                yield row


def _key(row: Row) -> tuple[Any, ...]:
    names = ("stream", "method", *(field.name for field in dataclasses.fields(hard.Source)))
    return tuple(row[name] for name in names)


def importance(net: nn.Module, name: str) -> Fisher:
    """Of 2,000 clean training images."""
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
        "worst": max((_mean(part) for part in _windows(during, WINDOW)), default=math.nan),
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


def _add(folder: Path, row: Row, made: dict[str, Any]) -> None:
    """One more row; another process may have added some. The manifest is that of the first."""
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        file = folder / "stress.json"
        known = json.loads(file.read_text()) if file.exists() else {"manifest": made, "rows": []}
        _write(file, json.dumps({**known, "rows": [*known["rows"], row]}, indent=1))


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
    numbers = ["" if math.isnan(value := _of(own, name)) else f"{value:.1f}" for name in ("during", "after", "worst")]
    fresh = _mean_of(rows, NEW, PLAIN, "after")
    found = [recovery(row, fresh) for row in own]
    slowest = "never" if None in found else str(max(n for n in found if n is not None))
    alarms = sum(row["alarms"] for row in own)
    return " | ".join([*numbers, str(alarms), "?" if math.isnan(fresh) else slowest])


def _of(own: list[Row], name: str) -> float:
    return sum(row[name] for row in own) / len(own) if own else math.nan


def _mean_of(rows: list[Row], stream: str, method: str, name: str) -> float:
    """Over the orders; not a number where there is nothing."""
    return _of([row for row in rows if (row["stream"], row["method"]) == (stream, method)], name)


# --- the goals --------------------------------------------------------------------------------------------------------

ABOVE = 1.0  # points that a guarded method may lose to the better of source and unguarded one
KEPT = 95.0  # percent of the gain that has to be kept on shuffled streams
GAIN = 1.0  # points; a smaller gain has no share worth telling
AFTER = 1.0  # points above a new model, on clean images after any stream


def goals(rows: list[Row], method: str) -> list[Row]:
    """What a guarded method reaches on each stream, mean over the orders, and which goals it misses."""
    fresh = _mean_of(rows, NEW, PLAIN, "after")
    found = []
    for stream, spec in hard.STREAMS.items():
        own = [row for row in rows if (row["stream"], row["method"]) == (stream, method)]
        source, plain = (_mean_of(rows, stream, name, "during") for name in ("source", PLAIN))
        if stream == NEW or not own or math.isnan(source + plain + fresh):
            continue
        during, better, alarms = _of(own, "during"), min(source, plain), sum(row["alarms"] for row in own)
        gains = spec.shuffled and source - plain >= GAIN
        goal: Row = {
            "stream": stream,
            "during": during,
            "better": better,
            "above": during - better,
            "kept": 100 * (source - during) / (source - plain) if gains else None,
            "alarms": alarms,
            "after": _of(own, "after") - fresh,
        }
        met = {
            "error": goal["above"] <= ABOVE,
            "gain": not gains or goal["kept"] >= KEPT,
            "alarms": not (spec.shuffled and alarms),
            "clean after": goal["after"] <= AFTER,
        }
        found.append({**goal, "missed": [name for name in met if not met[name]]})
    return found


def goals_table(rows: list[Row], method: str) -> str:
    """Markdown: the goals in words, and a line for each stream."""
    found = goals(rows, method)
    if not found:
        return ""
    met = sum(not goal["missed"] for goal in found)
    lines = [
        "",
        f"Goals of {method}: at most {ABOVE} above the better of source and {PLAIN}; on shuffled streams at least "
        f"{KEPT:.0f} % of the gain kept, and no alarm; clean images after the stream at most {AFTER} above those of a "
        f"new {PLAIN} model. All met on {met} of {len(found)} streams.",
        "",
        f"| stream | {method} | better of source, {PLAIN} | above it | gain kept | alarms | clean after - new | met |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for goal in found:
        kept = "" if goal["kept"] is None else f"{goal['kept']:.0f} %"
        words = f"no: {', '.join(goal['missed'])}" if goal["missed"] else "yes"
        lines.append(
            f"| {goal['stream']} | {goal['during']:.1f} | {goal['better']:.1f} | {goal['above']:+.1f} | {kept} | "
            f"{goal['alarms']} | {goal['after']:+.1f} | {words} |"
        )
    return "\n".join(lines) + "\n"


def figure(rows: list[Row], path: Path) -> None:
    """Error during each stream, a mark for each method."""
    from matplotlib.figure import Figure

    names = [name for name in hard.STREAMS if name != NEW and any(row["stream"] == name for row in rows)]
    drawing = Figure(figsize=(8, 0.3 * len(names) + 1), layout="constrained")
    axes = drawing.add_subplot()
    marks = dict(zip(METHODS, "|o*svPDx+", strict=True))
    for method, mark in marks.items():
        points = [(_mean_of(rows, name, method, "during"), place) for place, name in enumerate(names)]
        points = [(x, y) for x, y in points if not math.isnan(x)]
        if points:
            axes.plot(*zip(*points, strict=True), mark, label=method, alpha=0.8)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("error during the stream (%)")
    axes.grid(axis="x", alpha=0.3)
    if names:
        axes.legend(fontsize="small")
    with replacing(path) as temporary:
        drawing.savefig(temporary, format="svg")


def write(folder: Path) -> str:
    """The table, the goals and the figure of what is in the folder; the text of the first two."""
    rows = read(folder)
    text = table(rows) + "".join(goals_table(rows, method) for method in METHODS if method.endswith("+guard"))
    _write(folder / "stress.md", text)
    figure(rows, folder / "stress.svg")
    return text


def _write(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        Path(temporary).write_text(text)
