"""The tables of ``docs/results.md``, from ``results/``: ``python docs/reproduced.py`` writes them anew.

The page is plain Markdown, and everything but the tables is written by hand. A table stands between
``<!-- made NAME -->`` and ``<!-- /made -->``; ``TABLES`` says what is in it. A test makes them all again: a page that
differs from ``results/`` fails.
"""

from __future__ import annotations

import csv
import json
import math
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from eata.bench import published
from eata.bench.experiments import HELD
from eata.bench.lines import CLEAN_AFTER, name_of
from eata.bench.tables import column_name
from eata.data import CORRUPTIONS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
PAGE = ROOT / "docs" / "results.md"
BLOCK = re.compile(r"(<!-- made (\S+) -->\n).*?(<!-- /made -->)", re.DOTALL)
MISSING = "*Not measured yet.*"

MAIN = ("source", "bn", "tent", "tent-episodic", "eta", "eata", "eata-lifelong")
FIELD = (
    "source",
    "bn",
    "tent",
    "eta",
    "eata",
    "eata-come",
    "rdumb",
    "sar",
    "deyo",
    "roid",
    "lame",
    "lame-rbf",
    "rotta",
    "cotta",
)
RESET = tuple(row for row, _, _ in HELD)
LIFELONG = tuple(f"{row}-lifelong" for row in RESET)


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        head: what stands above it.
        folder: of ``results/``; several that have different rows are joined by ``+``.
        severity: as in the folder's ``table.csv``: 1 to 5, or ``"all"``.
        column: likewise, such as ``"mean"`` or ``"gaussian_noise"``.
        what: ``"measured"`` (with its deviation, if any), ``"published"``, ``"backwards"``, ``"seconds"``; ``"paper"``:
            a table of the paper that is not beside the run, whose label is the folder.
    """

    head: str
    folder: str
    severity: int | str = 5
    column: str = "mean"
    what: str = "measured"


@cache
def records(folder: str) -> dict[tuple[str, str, str], dict[str, str]]:
    """The lines of a folder's table by row, severity and column; none if there is no such folder."""
    found = {}
    for path in (RESULTS / name / "table.csv" for name in folder.split("+")):
        if path.is_file():
            with path.open(encoding="utf-8", newline="") as lines:
                found |= {(line["row"], line["severity"], line["column"]): line for line in csv.DictReader(lines)}
    return found


def cell(row: str, column: Column) -> str:
    """One number, as it is shown."""
    if column.what == "paper":
        paper = published.value([column.folder], row, int(column.severity), column.column)
        return "" if paper is None else f"{paper:.1f}"
    found = records(column.folder).get((row, str(column.severity), column.column), {})
    value = found.get(column.what)
    if not value:
        return ""
    if column.what == "backwards":
        return f"{float(value):,.0f}"
    deviation = found["deviation"] if column.what == "measured" else ""
    return f"{float(value):.1f} ± {float(deviation):.2f}" if deviation else f"{float(value):.1f}"


def grid(rows: Sequence[str], columns: Iterable[Column]) -> str:
    """A table with a line for each row that has any number; columns without any are left out."""
    shown = [column for column in columns if any(cell(row, column) for row in rows)]
    if not shown:
        return MISSING
    lines = [[name_of(row), *found] for row in rows if any(found := [cell(row, column) for column in shown])]
    return text([unit(shown), *(column.head for column in shown)], lines, shown)


def text(head: Sequence[str], lines: Iterable[Sequence[str]], columns: Iterable[Column]) -> str:
    """A table, and where its columns are from."""
    table = [head, ["---", *["---:"] * (len(head) - 1)], *lines]
    names = (name for column in columns for name in column.folder.split("+"))
    return "\n".join(f"| {' | '.join(line)} |" for line in table) + f"\n\n{data(names)}"


def unit(columns: Sequence[Column]) -> str:
    """Of a table's numbers: what its first measured column has, or what is counted if there is none."""
    measured = (column.folder for column in columns if column.what == "measured")
    measure = next((record["measure"] for folder in measured for record in records(folder).values()), None)
    return f"{measure} (%)" if measure else {"backwards": "backward passes"}.get(columns[0].what, columns[0].what)


def data(folders: Iterable[str]) -> str:
    """Links to the folders that are there."""
    there = (name for name in dict.fromkeys(folders) if (RESULTS / name / "table.md").is_file())
    return f"Data: {', '.join(f'[{name}](../results/{name}/table.md)' for name in there)}."


def swept(what: str, series: Sequence[tuple[str, Column]]) -> str:
    """A table of what varies: a line for each value, and a column for each series that has any number.

    Args:
        what: varies.
        series: rows of tables, the values being their columns; the ``column`` that is given here stands before a
            value's name, such as ``CLEAN_AFTER``.
    """
    names = [column for _, of in series[:1] for _, _, column in records(of.folder)]
    values = [
        name for name in dict.fromkeys(names) if name not in ("clean", "new") and not name.startswith(CLEAN_AFTER)
    ]
    found = {of: [cell(row, replace(of, column=of.column + value)) for value in values] for row, of in series}
    shown = [of for of in found if any(found[of])]
    if not shown:
        return MISSING
    lines = ([column_name(value), *(found[of][n] for of in shown)] for n, value in enumerate(values))
    return text([f"{what}: {unit(shown)}", *(of.head for of in shown)], lines, shown)


def beside(folder: str, rows: Sequence[str], column: str, severities: Sequence[int]) -> str:
    """Ours and the paper's at each severity, with the backward passes."""
    return grid(
        rows,
        [
            Column(head, folder, severity, column, what)
            for severity in severities
            for head, what in (
                (f"severity {severity}", "measured"),
                ("backwards", "backwards"),
                ("ImageNet-C", "published"),
            )
        ],
    )


def written(folder: str) -> str:
    """The table that a benchmark wrote itself."""
    path = RESULTS / folder / "table.md"
    return f"{path.read_text('utf-8').strip()}\n\n{data([folder])}" if path.is_file() else MISSING


def cifar10c() -> str:
    """The main table beside the paper's."""
    folder = "cifar10-c"
    return grid(
        MAIN,
        [
            Column("75 streams", folder, "all"),
            Column("paper", folder, "all", what="published"),
            Column("backwards", folder, "all", what="backwards"),
            Column("clean after", folder, "all", "clean"),
            Column("severity 5", folder),
        ],
    )


def paired(folder: str, rows: Sequence[str], other: str, severities: Sequence[int], before: str = "") -> str:
    """How the rows differ from another one, stream by stream: the same images in the same order.

    The severities of a corruption are no independent samples, so the standard error is over the corruptions.

    Args:
        folder: of ``results/``; several are joined by ``+``.
        rows: beside ``other``.
        other: also a row.
        severities: all their streams are compared.
        before: ``CLEAN_AFTER`` for the clean set after each corruption, in place of the corruption.
    """
    lines = [f"| beside {name_of(other)} | better in | by points (mean, its standard error) |", "|---|---:|---:|"]
    for row in rows:
        found = (gains(folder, row, other, before + corruption, severities) for corruption in CORRUPTIONS)
        of_corruptions = [of_one for of_one in found if of_one]
        if of_corruptions:
            every = [gain for of_one in of_corruptions for gain in of_one]
            error = statistics.stdev(map(statistics.fmean, of_corruptions)) / math.sqrt(len(of_corruptions))
            better = f"{sum(gain > 0 for gain in every)} of {len(every)}"
            lines.append(f"| {name_of(row)} | {better} | {statistics.fmean(every):+.2f} ± {error:.2f} |")
    return "\n".join(lines) if len(lines) > 2 else MISSING


def gains(folder: str, row: str, other: str, column: str, severities: Sequence[int]) -> list[float]:
    """By how many points the row is better than the other, at each severity where both are there."""
    places = [[records(folder).get((name, str(severity), column)) for name in (row, other)] for severity in severities]
    return [right(ours) - right(theirs) for ours, theirs in places if ours is not None and theirs is not None]


def right(record: dict[str, str]) -> float:
    """The accuracy in %, whichever was measured."""
    return float(record["measured"]) if record["measure"] == "accuracy" else 100 - float(record["measured"])


def forgetting(severity: int) -> str:
    """Corruptions, and the clean set before and after, in one stream."""
    folder = f"forgetting-lifelong-{severity}"
    return grid(
        LIFELONG,
        [
            Column("corruptions", folder, severity),
            Column("clean, a new model", folder, severity, "new"),
            Column("after 5 corruptions", folder, severity, "clean after glass_blur"),
            Column("after 10", folder, severity, "clean after fog"),
            Column("after all 15", folder, severity, "clean"),
        ],
    )


def streams(net: str) -> str:
    """Methods and streams; the long ones have folders of their own."""
    apart = {"recurring:5": f"streams-{net}-recurring", "gradual": f"streams-{net}-gradual"}
    names = ("reset", "continual", "gradual", "mixed", "correlated", "correlated:0.1", "recurring:5")
    others = f"streams-{net}+streams-{net}-cotta"
    return grid(FIELD, [Column(name, apart.get(name, others), 5, name) for name in names])


def rounds(folder: str) -> str:
    """The error in each round of a recurring stream, from its cells."""
    found = {}
    for path in sorted((RESULTS / folder / "cells").glob("*.json")):
        cell = json.loads(path.read_text("utf-8"))
        stages = [stage for stage in cell["stages"] if stage["role"] == "shift"]
        by_round = [stages[start : start + len(CORRUPTIONS)] for start in range(0, len(stages), len(CORRUPTIONS))]
        found[cell["cell"].partition("-recurring")[0]] = [
            100 - 100 * sum(stage["correct"] for stage in own) / sum(stage["known"] for stage in own)
            for own in by_round
        ]
    if not found:
        return MISSING
    heads = [f"round {number}" for number in range(1, len(next(iter(found.values()))) + 1)]
    lines = [["", *heads], ["---", *["---:"] * len(heads)]]
    lines += [[name_of(row), *(f"{value:.1f}" for value in found[row])] for row in FIELD if row in found]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n\n{data([folder])}"


def backbones() -> str:
    """Gaussian noise on several nets; photographs, which the large one sees, have a folder of their own."""
    nets = {
        "ResNet-26, BatchNorm": ("backbones", "resnet26-bn-cifar10"),
        "the published GroupNorm": ("backbones", "benchmarks.memo_gn:net"),
        "our GroupNorm, joint": ("backbones", "resnet26-gn-rotation-cifar10"),
        "ResNet-50, photographs": ("backbones-resnet50", "benchmarks.imagenet_resnet50:resnet50"),
    }
    return grid(("source", "tent", "eata"), [Column(head, folder, 5, model) for head, (folder, model) in nets.items()])


def photographs(severity: int) -> str:
    """ResNet-50, reset and never reset."""
    folder, lifelong = f"photographs-{severity}", f"photographs-lifelong-{severity}"
    rows = [row for row in (*MAIN, "tent-lifelong") if (row, str(severity), "mean") in records(f"{folder}+{lifelong}")]
    paper = "tab:imagenet-c-level-5" if severity == 5 else "tab:imagenet-c-levels"
    columns = [
        Column("500 images", f"{folder}+{lifelong}", severity),
        Column("backwards", f"{folder}+{lifelong}", severity, what="backwards"),
        Column("clean after", lifelong, severity, "clean"),
        Column("paper, 50,000 images", paper, severity, what="paper"),
    ]
    return grid(rows, columns) if rows else MISSING


COMPONENTS = ("s=1", "s=ent", "s=ent*div")
RATES = ("tent", "tent-lr-x4", "tent-lr-x8", "tent-lr-x10", "eata")
WINDOWS = tuple(f"{m}-window-{n}{e}" for n in (32, 64) for e in ("-exact", "") for m in ("tent", "eta"))
LIFELONG_5 = "cifar10-c-lifelong+cifar10-c-severity-5"
TABLES = {
    "lifelong": lambda: grid(
        LIFELONG,
        [
            Column("corruptions", LIFELONG_5),
            Column("clean afterwards", LIFELONG_5, column="clean"),
            Column("backwards", LIFELONG_5, what="backwards"),
        ],
    ),
    "lifelong-orders": lambda: written("lifelong"),
    "cifar10-c": cifar10c,
    "paired": lambda: paired("cifar10-c", ("bn", "eta", "eata", "eata-lifelong"), "tent", (1, 2, 3, 4, 5)),
    "paired-orders": lambda: paired(
        "forgetting-reset-5+rows-accuracy", ("eta", "eta (full)", "eata", "eata (full)", "eata-budget"), "tent", (5,)
    ),
    "backwards": lambda: grid(
        ("tent", "eta", "eata"),
        [Column(f"severity {severity}", "cifar10-c", severity, what="backwards") for severity in range(1, 6)],
    ),
    "forgetting-5": lambda: forgetting(5),
    "forgetting-3": lambda: forgetting(3),
    "forgetting-reset": lambda: grid(
        RESET,
        [
            Column(f"{what}, severity {severity}", f"forgetting-reset-{severity}", severity, column)
            for severity in (5, 3)
            for what, column in (("corruptions", "mean"), ("clean after", "clean"))
        ],
    ),
    "forgetting-reset-paired": lambda: paired(
        "forgetting-reset-5+forgetting-reset-3", RESET[1:], "tent", (5, 3), CLEAN_AFTER
    ),
    "gn": lambda: grid(
        ("source-gn", "augment", "augment-crops", "memo"),
        [
            Column("75 x 10,000", "gn-source", "all"),
            Column("75 x 100", "gn-tta-memo", "all"),
            Column("paper", "gn-tta-memo", "all", what="published"),
        ],
    ),
    "paired-orders-3": lambda: paired("forgetting-reset-3", RESET[1:], "tent", (3,)),
    "gn-paired": lambda: paired("gn-tta-memo", ("augment", "augment-crops", "memo"), "source-gn", (1, 2, 3, 4, 5)),
    "ttt-paired": lambda: paired("ttt-severity-5", ("ttt", "ttt-episodic"), "source-gn-jt", (5,)),
    "ttt": lambda: grid(
        ("source-gn-jt", "ttt", "ttt-episodic"),
        [
            Column("severity 5, 1,000 images", "ttt-severity-5"),
            Column("severity 5, 100 images", "ttt"),
            Column("75 x 100", "ttt", "all"),
            Column("paper", "ttt", "all", what="published"),
        ],
    ),
    "components": lambda: beside("components", COMPONENTS, "gaussian_noise", (3, 5)),
    "components-gn": lambda: grid(
        COMPONENTS,
        [
            Column(head, "components-gn", severity, "gaussian_noise", what)
            for severity in (3, 5)
            for head, what in ((f"severity {severity}", "measured"), ("backwards", "backwards"))
        ],
    ),
    "learning-rates": lambda: beside("learning-rates", RATES, "gaussian_noise", (3, 5)),
    "e0": lambda: swept(
        "E0 / ln C", [("eata", Column("BatchNorm", "e0", column="")), ("eata", Column("GroupNorm", "e0-gn", column=""))]
    ),
    "fisher-size": lambda: swept(
        "samples",
        [
            (row, Column(f"{name_of(row)}{head}", "fisher-size", column=before))
            for before, head in (("", ""), (CLEAN_AFTER, ", clean set"))
            for row in ("eta", "eata")
        ],
    ),
    "test-size": lambda: swept(
        "samples",
        [
            (row, Column(f"{name_of(row)}{head}", folder, column="", what=what))
            for head, folder, what in (
                ("", "test-size", "measured"),
                (", GroupNorm", "test-size-gn", "measured"),
                (", ImageNet-C", "test-size", "published"),
            )
            for row in ("tent", "eata")
        ],
    ),
    "entropy": lambda: swept(
        "share in %",
        [
            (f"{side} entropy", Column(f"{net}, {side} entropy", folder, 3, ""))
            for net, folder in (("BatchNorm", "entropy"), ("GroupNorm", "entropy-gn"))
            for side in ("lowest", "highest")
        ],
    ),
    "orders": lambda: swept(
        "EATA",
        [
            ("eata", Column("here", "orders", column="")),
            ("eata", Column("ImageNet-C", "tab:mean_and_std", column="", what="paper")),
            ("eata-stdev", Column("its deviation", "tab:mean_and_std", column="", what="paper")),
        ],
    ),
    "mixed": lambda: beside("mixed", ("source", "tent", "eata"), "mixed", (3, 5)),
    "batch-1": lambda: beside("batch-1", ("source", "tent", "eta", *WINDOWS), "gaussian_noise", (5,)),
    "backbones": backbones,
    "wall-clock": lambda: grid(
        [f"{method} ({mode})" for method in ("tent", "eata") for mode in ("full", "rows")],
        [
            Column("ResNet-26, 2,000 images", "wall-clock", 5, "mean", "seconds"),
            Column("ResNet-50, 128 photographs", "wall-clock-resnet50", 5, "mean", "seconds"),
        ],
    ),
    "last-layers": lambda: paired(
        "forgetting-reset-5+rows-accuracy", ("eata (full)", "eata (last 8 layers)"), "eata", (5,)
    ),
    "photographs-rates": lambda: beside("photographs-learning-rates", RATES, "gaussian_noise", (5,)),
    **{
        name: partial(written, name)
        for name in (
            "speed-step-resnet50",
            "speed-step-resnet26",
            "speed-memory",
            "speed-window",
            "memo-gn",
            "memo-gn-2000",
        )
    },
    "photographs-5": lambda: photographs(5),
    "photographs-3": lambda: photographs(3),
    "streams-bn": lambda: streams("bn"),
    "streams-gn": lambda: streams("gn"),
    "rounds-bn": lambda: rounds("streams-bn-recurring"),
    "rounds-gn": lambda: rounds("streams-gn-recurring"),
    "streams-bn-200": lambda: grid(FIELD, [Column(name, "streams-bn-200", 5, name) for name in ("continual", "mixed")]),
}


def filled(text: str) -> str:
    """The page with every table made anew."""
    return BLOCK.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[3]}", text)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text("utf-8")), "utf-8")
