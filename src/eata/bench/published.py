"""The paper's tables as data: transcribed from ``eata.tex``, rows and columns under the names of our experiments.

``published.json`` holds, by label: the caption in short, the data set, the measure (``error`` or ``accuracy``, in %),
columns and rows. Counts such as 50,000 x 21 are multiplied out. The paper's own oddities are kept, such as the mean of
35.8 in ``tab:mean_and_std``, which is not the mean of its columns.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources


@dataclass(frozen=True)
class Published:
    """One table of the paper.

    Attributes:
        label: in ``eata.tex``.
        caption: which data and model.
        data: family of data sets that its numbers may be compared with.
        measure: ``"error"`` or ``"accuracy"``.
        columns: corruptions or what else varies, ``"mean"``, ``"forwards"``, ``"backwards"``.
        rows: values by (row name, severity); the severity is None where the table has a mean over all.
    """

    label: str
    caption: str
    data: str
    measure: str
    columns: tuple[str, ...]
    rows: dict[tuple[str, int | None], tuple[float, ...]]


@cache
def tables() -> dict[str, Published]:
    """Every table by its label.

    >>> tables()["tab:cifar-10-c"].rows["eata", None]
    (19.7, 10000, 8153)
    """
    raw = json.loads(resources.files("eata.bench").joinpath("published.json").read_text("utf-8"))
    return {
        label: Published(
            label,
            table["caption"],
            table["data"],
            table["measure"],
            tuple(table["columns"]),
            {(row["name"], row["severity"]): tuple(row["values"]) for row in table["rows"]},
        )
        for label, table in raw.items()
    }


def value(labels: Sequence[str], row: str, severity: int | None, column: str) -> float | None:
    """The number printed in the first of these tables that has it, or None; a missing mean is that of the corruptions.

    >>> value(["tab:imagenet-c-level-5"], "tent", 5, "gaussian_noise")
    71.6
    >>> round(value(["tab:imagenet-c-level-5"], "tent", 5, "mean"), 1)
    57.4
    """
    for table in (tables()[label] for label in labels if label in tables()):
        values = table.rows.get((row, severity)) or table.rows.get((row, None))
        if values is None:
            continue
        named = dict(zip(table.columns, values, strict=True))
        if column == "mean" and "mean" not in named:
            measured = [number for name, number in named.items() if name not in ("forwards", "backwards")]
            return sum(measured) / len(measured)
        if column in named:
            return named[column]
    return None
