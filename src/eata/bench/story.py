"""A run in a few plain sentences, and in pictures: what the source model said, and what the adapted one says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import eata
from eata.bench.lines import Line
from eata.bench.protocol import Cell
from eata.bench.store import Run
from eata.bench.tables import Table
from eata.errors import EataError

ADAPTED = ("eata", "eta", "tent", "bn")  # the first of these that was run is the one the story is about
PICTURES = 8


def sentences(table: Table) -> list[str]:
    """The answer in a sentence, and two that follow; none where there is no source model to compare with."""
    severity = table.severities[-1] if table.severities else None
    lines = {line.row: line for line in table.lines if line.severity == severity and line.complete}
    source = lines.get("source")
    ours = next((lines[row] for row in ADAPTED if row in lines), None)
    if source is None or ours is None or table.summary != "mean" or table.experiment.measure != "error":
        return []
    found = [
        f"{ours.name} takes the trained net's error from {source.mean:.1f} % to {ours.mean:.1f} % by learning from the "
        f"corrupted images themselves, without labels; it is {_better(table, source, ours)}."
    ]
    rest = [line for line in lines.values() if line is not ours and line is not source]
    if rest:
        others = ", ".join(f"{line.name} {line.mean:.1f} %" for line in rest)
        share = 100 * ours.backwards / ours.forwards if ours.forwards else 0
        times = table.times(ours)
        found.append(
            f"Beside it: {others}. {ours.name} spent a backward pass on {share:.0f} % of the images and "
            f"{times:.1f} times the time of plain inference."
        )
    found += _forgetting(source, [line for line in lines.values() if line.clean_before is not None])
    return found


def _better(table: Table, source: Line, ours: Line) -> str:
    columns = [column for column in table.columns if column in source.values and column in ours.values]
    wins = sum(ours.values[column] < source.values[column] for column in columns)
    return f"better on {'all' if wins == len(columns) else f'{wins} of'} {len(columns)} corruptions"


def _forgetting(source: Line, lines: list[Line]) -> list[str]:
    """What became of the clean images, before and after the stream."""
    found = [f"{line.name} {line.clean_before:.1f} -> {line.clean:.1f} %" for line in lines if line.clean is not None]
    if not found:
        return []
    untouched = "" if source.clean is None else f" The untouched net: {source.clean:.1f} %."
    said = f"Error on the clean images, by a new model -> after the whole stream: {', '.join(found)}."
    return [said + untouched]


@dataclass(frozen=True)
class Picture:
    """One image, and what two models say it is.

    Attributes:
        corruption: of the image.
        pixels: float (3, H, W), 0 to 1.
        truth: its class.
        before: what the source model says.
        after: what the adapted one says.
    """

    corruption: str
    pixels: Any
    truth: str
    before: str
    after: str


def pictures(run: Run) -> list[Picture]:
    """From some corruptions an image each that the source and the adapted model disagree on: the last of the first
    corruption, the last but one of the second, and so on, so that they are not all of the same thing.

    None where the run did not write down what was predicted, or where its data is out of reach.
    """
    answers = {cell.row: _answers(run, cell.row) for cell in run.cells}
    source = answers.get("source", {})
    adapted = next((answers[row] for row in ADAPTED if answers.get(row)), {})
    shared = [place for place in source if place in adapted]
    chosen = [shared[number * len(shared) // PICTURES] for number in range(min(PICTURES, len(shared)))]
    try:
        return [
            picture
            for number, place in enumerate(chosen, 1)
            if (picture := _picture(run, place, source[place], adapted[place], number)) is not None
        ]
    except (EataError, OSError):  # the page is about the results; they are here without the data
        return []


def _answers(run: Run, row: str) -> dict[tuple[str, int], tuple[Cell, list[int]]]:
    """What was predicted of each image, by corruption and severity."""
    found = {}
    for cell in (cell for cell in run.cells if cell.row == row):
        for stage in (run.result(cell) or {}).get("stages", ()):
            if "answers" in stage and stage["role"] == "shift" and stage["corruption"]:
                found[stage["corruption"], stage["severity"]] = (cell, stage["answers"])
    return found


def _picture(
    run: Run, stage: tuple[str, int], source: tuple[Cell, list[int]], adapted: tuple[Cell, list[int]], number: int
) -> Picture | None:
    """The image that is this many from the last of those that the two disagree on."""
    (cell, before), (_, after) = source, adapted
    differ = [place for place, (one, other) in enumerate(zip(before, after, strict=True)) if one != other]
    if len(differ) < number:
        return None
    corruption, severity = stage
    stream = eata.data.load(run.request.data, corruption=corruption, severity=severity, limit=cell.limit)
    images, labels = next(stream.batches(len(stream), seed=cell.seed))
    names, place = stream.class_names, differ[-number]
    truth, first, second = names[int(labels[place])], names[before[place]], names[after[place]]
    return Picture(corruption.replace("_", " "), images[place], truth, first, second)
