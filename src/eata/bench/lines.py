"""One row of a table, gathered from the results of its cells: means, spread over the seeds, the clean set, costs."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from eata.bench.experiments import NATURAL, Experiment
from eata.bench.protocol import Cell, Result

NAMES = {
    "source": "Source",
    "bn": "BN",
    "tent": "Tent",
    "eta": "ETA",
    "eata": "EATA",
    "augment": "TTA",
    "memo": "MEMO",
    "ttt": "TTT",
    "rdumb": "RDumb",
    "sar": "SAR",
    "deyo": "DeYO",
    "roid": "ROID",
    "lame": "LAME",
    "cotta": "CoTTA",
    "rotta": "RoTTA",
    "source-gn": "Source (GN)",
    "source-gn-jt": "Source (GN, joint)",
    "s=1": "S = 1",
    "s=ent": "S_ent",
    "s=ent*div": "S",
}
POINTS = 30  # of a course
CLEAN_AFTER = "clean after "  # and a column: the clean set when that was over


@dataclass
class Line:
    """One row of a table: a method at one severity (None: the mean over all that were run).

    Attributes:
        row: name in the experiment.
        severity: 1 to 5 or None.
        values: error or accuracy in % by column, mean over the seeds.
        deviations: standard deviation over the seeds, where there are several: by column, of the ``"mean"``, and of the
            clean set as the names in a CSV file are: ``"clean"``, ``"new"``, ``"clean after "`` and a column.
        course: for each column that is a stream, (images so far, error in % of the last of them) along it.
        clean: error or accuracy on the clean set after adaptation, in %.
        clean_before: that of a new model, which has seen nothing else.
        forwards: samples a stream.
        backwards: samples a stream.
        seconds: a stream, in the model only.
        memory: bytes of a step at its peak.
        complete: whether all of the row's cells have their result: a mean of some says little beside a mean of all.
    """

    row: str
    severity: int | None
    values: dict[str, float] = field(default_factory=dict)
    deviations: dict[str, float] = field(default_factory=dict)
    backwards_by: dict[str, float] = field(default_factory=dict)
    clean_by: dict[str, float] = field(default_factory=dict)
    course: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    clean: float | None = None
    clean_before: float | None = None
    forwards: float = 0
    backwards: float = 0
    seconds: float = 0
    memory: int | None = None
    complete: bool = True

    @property
    def name(self) -> str:
        """For people."""
        return name_of(self.row)

    @property
    def mean(self) -> float:
        """Over the columns that are there."""
        return statistics.fmean(self.values.values())


def name_of(row: str) -> str:
    """A row's name for people.

    >>> name_of("eata-lifelong"), name_of("tent-window-32"), name_of("lowest entropy")
    ('EATA (lifelong)', 'Tent (window 32)', 'lowest entropy')
    """
    if row in NAMES:
        return NAMES[row]
    method, _, rest = row.partition("-" if "-" in row else " ")
    return f"{NAMES[method]} ({rest.strip('()').replace('-', ' ')})" if method in NAMES else row


def line_of(row: str, severity: int | None, results: list[tuple[Cell, Result]], experiment: Experiment) -> Line:
    """The line of a row at a severity (None: all of them), from the cells of it that are done."""
    line = Line(row, severity)
    shifts = [(c, s) for c, r in results for s in r["stages"] if s["role"] == "shift"]
    every = [(c, s) for c, r in results for s in r["stages"]]
    for column in dict.fromkeys(_column(cell, stage) for cell, stage in shifts):
        own = [(cell, stage) for cell, stage in shifts if _column(cell, stage) == column]
        stages = [stage for _, stage in own]
        if _over_seeds(line.values, line.deviations, column, _by_seed(own, experiment)):
            first = own[0][0].seed  # of several seeds, the course of one
            line.course[column] = _course([s["course"] for c, s in own if "course" in s and c.seed == first])
        used = [s["backwards"] for c, s in every if s["role"] != "clean" and _column(c, s) == column]
        line.backwards_by[column] = sum(used) / len(stages)
    by_seed = _by_seed(shifts, experiment)
    if len(by_seed) > 1:
        line.deviations["mean"] = statistics.stdev(map(statistics.fmean, by_seed.values()))
    _clean_set(line, results, experiment)
    for name in ("forwards", "backwards", "seconds"):
        total = sum(stage[name] for _, stage in every if stage["role"] != "clean")
        setattr(line, name, total / max(1, len(shifts)))
    line.memory = max((stage.get("memory", 0) for _, stage in shifts), default=0) or None
    return line


def _by_seed(stages: list[tuple[Cell, Result]], experiment: Experiment) -> dict[int, list[float]]:
    """What these stages scored, by the seed of their cells."""
    found: dict[int, list[float]] = {}
    for cell, stage in stages:
        if (score := _score(stage, experiment.measure)) is not None:
            found.setdefault(cell.seed, []).append(score)
    return found


def _over_seeds(
    means: dict[str, float], deviations: dict[str, float], name: str, scores: dict[int, list[float]]
) -> bool:
    """Mean and, of several, standard deviation over the seeds, under this name; whether there is any."""
    of_seeds = [statistics.fmean(of_seed) for of_seed in scores.values()]
    if of_seeds:
        means[name] = statistics.fmean(of_seeds)
    if len(of_seeds) > 1:
        deviations[name] = statistics.stdev(of_seeds)
    return bool(of_seeds)


def _clean_set(line: Line, results: list[tuple[Cell, Result]], experiment: Experiment) -> None:
    """The clean set after each corruption, at the end of the streams, and by a new model."""
    after: dict[str, list[tuple[Cell, Result]]] = {}
    for cell, result in results:
        for before, stage in zip(result["stages"], result["stages"][1:], strict=False):
            if stage["role"] == "clean" and before["role"] == "shift":
                after.setdefault(_column(cell, before), []).append((cell, stage))
    last = [(cell, result["stages"][-1]) for cell, result in results]
    ends = [(cell, stage) for cell, stage in last if stage["role"] == "clean"]
    found: dict[str, float] = {}
    _over_seeds(found, line.deviations, "clean", _by_seed([e for e in ends if len(e[0].stages) > 1], experiment))
    _over_seeds(found, line.deviations, "new", _by_seed([e for e in ends if len(e[0].stages) == 1], experiment))
    line.clean, line.clean_before = found.get("clean"), found.get("new")
    for column, stages in after.items():
        name = CLEAN_AFTER + column
        _over_seeds(found, line.deviations, name, _by_seed(stages, experiment))
        line.clean_by[column] = found[name]


def _course(parts: list[list[list[int]]]) -> list[tuple[float, float]]:
    """The error along a stream, in as many pieces as it has parts, or POINTS."""
    batches = [batch for part in parts for batch in part]
    size = max(1, round(len(batches) / max(POINTS, len(parts)))) if batches else 1
    found, seen = [], 0
    for start in range(0, len(batches), size):
        piece = batches[start : start + size]
        images = sum(number for number, _ in piece)
        seen += images
        found.append((float(seen), 100 - 100 * sum(correct for _, correct in piece) / images))
    return found


def _column(cell: Cell, stage: Result) -> str:
    return cell.column or stage["corruption"] or NATURAL


def _score(stage: Result, measure: str) -> float | None:
    if not stage["known"]:
        return None
    accuracy: float = 100 * stage["correct"] / stage["known"]
    return accuracy if measure == "accuracy" else 100 - accuracy
