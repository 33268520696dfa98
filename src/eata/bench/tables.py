"""Results gathered into the paper's tables, with the published numbers beside them; and the tables as text."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from eata.bench import published
from eata.bench.experiments import Experiment, find
from eata.bench.lines import CLEAN_AFTER, Line, line_of
from eata.bench.protocol import Cell, Request, Result
from eata.bench.store import Run

COSTS = ("forwards", "backwards", "seconds", "memory")
SHORT = {
    "gaussian_noise": "Gauss.",
    "shot_noise": "Shot",
    "impulse_noise": "Impul.",
    "defocus_blur": "Defoc.",
    "glass_blur": "Glass",
    "motion_blur": "Motion",
    "zoom_blur": "Zoom",
    "snow": "Snow",
    "frost": "Frost",
    "fog": "Fog",
    "brightness": "Brit.",
    "contrast": "Contr.",
    "elastic_transform": "Elastic",
    "pixelate": "Pixel",
    "jpeg_compression": "JPEG",
}


@dataclass
class Table:
    """An experiment's results.

    Attributes:
        experiment: which.
        data: where the streams came from, as the user named it.
        family: of the data, to know whether published numbers may be compared.
        columns: corruptions or what else varies.
        lines: rows, best read by severity.
        failures: cell and error of each that failed.
    """

    experiment: Experiment
    data: str
    family: str
    columns: list[str]
    lines: list[Line]
    failures: list[tuple[str, str]]

    @property
    def title(self) -> str:
        """The experiment's, with the data that was used where the experiment is named after other data."""
        _, colon, what = self.experiment.title.partition(": ")
        own = self.family == self.experiment.name or not (colon and self.experiment.needs_data)
        return self.experiment.title if own else f"{self.data}: {what}"

    @property
    def severities(self) -> list[int | None]:
        """In the table, each once."""
        return list(dict.fromkeys(line.severity for line in self.lines))

    @property
    def source(self) -> published.Published | None:
        """The paper's table beside this one."""
        return next((published.tables()[name] for name in self.experiment.labels if name in published.tables()), None)

    @property
    def comparable(self) -> bool:
        """Whether the published numbers are of the same data."""
        return self.source is not None and self.source.data == self.family

    @property
    def summary(self) -> str | None:
        """The column that speaks for a row: the mean of the corruptions, or the only one; None if settings vary."""
        if len(self.columns) == 1:
            return self.columns[0]
        swept = self.experiment.by_model or any(variant.column for variant in self.experiment.variants)
        return None if swept else "mean"

    def published(self, line: Line, column: str) -> float | None:
        """The paper's number at this place, if it has one; a mean over severities stands in the line of means only."""
        if line.severity is not None and None in self.severities and self.source and not self._exact(line):
            return None
        return published.value(self.experiment.labels, line.row, line.severity, column)

    def _exact(self, line: Line) -> bool:
        known = (published.tables()[label] for label in self.experiment.labels if label in published.tables())
        return any((line.row, line.severity) in table.rows for table in known)

    def overall(self, line: Line) -> tuple[float | None, float | None]:
        """The paper's number for the whole row, and how far ours is from it."""
        keys = [self.summary, "mean"] if self.summary else []
        key = next((key for key in keys if self.published(line, key) is not None), None)
        return (None, None) if key is None else (self.published(line, key), self.difference(line, key))

    def difference(self, line: Line, column: str) -> float | None:
        """Measured less published; None where the two are not of the same data and severities."""
        paper = self.published(line, column)
        ours = self.value(line, column)
        exact = self._exact(line) or line.severity is None
        if self.experiment.name == "cifar10-c" and self.severities[0] is not None and len(self.severities) < 6:
            exact = False  # the paper's is a mean over five severities
        return None if paper is None or ours is None or not (exact and self.comparable) else ours - paper

    def ranked(self, severity: int | None, column: str) -> list[float]:
        """Values of a column, best first; a line that has none does not count."""
        found = (self.value(line, column) for line in self.lines if line.severity == severity)
        values = {round(value, 1) for value in found if value is not None}
        return sorted(values, reverse=self.experiment.measure == "accuracy")

    def times(self, line: Line) -> float | None:
        """The time a stream over that of plain inference, where that was measured beside it."""
        found = (one for one in self.lines if one.row == "source" and one.severity == line.severity)
        source = next(found, None)
        return line.seconds / source.seconds if source and source.seconds else None

    @staticmethod
    def value(line: Line, column: str) -> float | None:
        """Measured; a mean only of all columns."""
        if column == "mean":
            return line.mean if line.complete else None
        return line.values.get(column)


def column_name(column: str) -> str:
    """A column's name for people."""
    return SHORT.get(column, column)


def load(run: Run) -> Table:
    """The table of what a run has so far."""
    return tabulate(run.request, run.cells, run.results())


def tabulate(request: Request, cells: Sequence[Cell], results: Mapping[str, Result]) -> Table:
    """Gather what is there.

    Args:
        request: the run's.
        cells: those that the table is about, done or not.
        results: by the cells' names; those that are not there yet are missing.
    """
    experiment = find(request.experiment)
    failures = [(cell.id, str(results[cell.id]["error"])) for cell in cells if "error" in results.get(cell.id, ())]
    good = [(cell, results[cell.id]) for cell in cells if "stages" in results.get(cell.id, ())]
    rows = dict.fromkeys(variant.row for variant in experiment.variants)
    severities: list[int | None] = [*sorted({cell.severity for cell, _ in good})]
    if len(severities) > 1:
        severities.append(None)
    lines = []
    for severity in severities:
        for row in rows:
            found = [(c, r) for c, r in good if c.row == row and severity in (c.severity, None)]
            wanted = sum(cell.row == row and severity in (cell.severity, None) for cell in cells)
            lines.append(line_of(row, severity, found, experiment))
            lines[-1].complete = len(found) == wanted
    lines = [line for line in lines if line.values]
    columns = list(dict.fromkeys(column for line in lines for column in line.values))
    order = list(experiment.corruptions)
    columns.sort(key=lambda column: order.index(column) if column in order else 0)
    return Table(experiment, request.data, request.traits.family, columns, lines, failures)


# --- as text ----------------------------------------------------------------------------------------------------------


def _heads(table: Table) -> list[str]:
    heads = ["Method", *([] if len(table.severities) < 2 else ["Severity"]), *map(column_name, table.columns)]
    heads += ["Mean"] if table.summary == "mean" else []
    heads += ["Published", "Difference"] if table.source and table.summary else []
    heads += ["New"] if any(line.clean_before is not None for line in table.lines) else []
    heads += ["Clean"] if any(line.clean is not None for line in table.lines) else []
    heads += ["#Forwards", "#Backwards", "Time (s)"]
    return heads + (["Memory (MB)"] if any(line.memory for line in table.lines) else [])


def _rows(table: Table) -> Iterator[list[str]]:
    heads = _heads(table)
    for line in table.lines:
        cells = [line.name]
        if "Severity" in heads:
            cells.append("all" if line.severity is None else str(line.severity))
        cells += [_number(line.values.get(column), line.deviations.get(column)) for column in table.columns]
        if "Mean" in heads:
            cells.append(mean_of(line))
        if "Published" in heads:
            paper, difference = table.overall(line)
            cells += [_number(paper), "" if difference is None else f"{difference:+.1f}"]
        if "New" in heads:
            cells.append(_number(line.clean_before, line.deviations.get("new")))
        if "Clean" in heads:
            cells.append(_number(line.clean, line.deviations.get("clean")))
        cells += [f"{line.forwards:,.0f}", f"{line.backwards:,.0f}", f"{line.seconds:.1f}"]
        if "Memory (MB)" in heads:
            cells.append(_number(None if line.memory is None else line.memory / 1e6))
        yield cells


def mean_of(line: Line) -> str:
    """The mean as text; in brackets where some of its cells are missing.

    >>> mean_of(Line("tent", 5, {"fog": 20.0})), mean_of(Line("tent", 5, {"fog": 20.0}, complete=False))
    ('20.0', '(20.0)')
    """
    text = _number(line.mean, line.deviations.get("mean"))
    return text if line.complete else f"({text})"


def _number(value: float | None, deviation: float | None = None) -> str:
    if value is None:
        return ""
    return f"{value:.1f}" if deviation is None else f"{value:.1f} ± {deviation:.1f}"


def markdown(table: Table) -> str:
    """A GitHub table."""
    heads = _heads(table)
    rows = [heads, ["---", *["---:"] * (len(heads) - 1)], *_rows(table)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def latex(table: Table) -> str:
    """A ``tabular`` for booktabs."""

    def line(cells: list[str]) -> str:
        escaped = (cell.replace("#", r"\#").replace("_", r"\_").replace("±", r"$\pm$") for cell in cells)
        return " & ".join(escaped) + r" \\"

    heads = _heads(table)
    body = [line(row) for row in _rows(table)]
    columns = "l" + "r" * (len(heads) - 1)
    begin = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", line(heads), r"\midrule"]
    return "\n".join([*begin, *body, r"\bottomrule", r"\end{tabular}", ""])


def to_csv(table: Table) -> str:
    """One record a value, unrounded: for programs."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["row", "severity", "column", "measure", "measured", "deviation", "published", *COSTS])
    for line in table.lines:
        severity = "all" if line.severity is None else line.severity
        values = line.values | ({"clean": line.clean} if line.clean is not None else {})
        values |= {"mean": line.mean} if table.summary and line.complete else {}
        values |= {"new": line.clean_before} if line.clean_before is not None else {}
        if len(line.clean_by) > 1:
            values |= {f"{CLEAN_AFTER}{column}": value for column, value in line.clean_by.items()}
        for column, value in values.items():
            record = [line.row, severity, column, table.experiment.measure, value, line.deviations.get(column)]
            writer.writerow([*record, table.published(line, column), *(getattr(line, cost) for cost in COSTS)])
    return file.getvalue()
