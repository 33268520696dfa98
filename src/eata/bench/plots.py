"""The paper's figures from a table of results: SVG or PNG, told apart by colour, marker and line alike."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from eata.bench.lines import CLEAN_AFTER, Line
from eata.bench.tables import Table, column_name

# Okabe and Ito's colours, safe for the colour-blind, from dark to light enough in grey print
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9", "#7F7F7F")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), "-")
HATCHES = ("", "///", "...", "xx", "\\\\\\", "++", "oo", "--")
# whose look a row has, by how its name begins; no figure has both TTT and the budget
LOOKS = {"eata-budget": 6, "eata": 0, "tent": 1, "eta": 2, "bn": 3, "source": 4, "memo": 5, "ttt": 6, "augment": 7}
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#555555",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 4.5,
    "svg.fonttype": "none",
    "svg.hashsalt": "eata",
}


class Plot:
    """A figure with its caption, drawn when it is asked for."""

    def __init__(self, name: str, caption: str, figure: Figure) -> None:
        self.name = name
        self.caption = caption
        self.figure = figure

    def svg(self) -> str:
        """The drawing as an ``<svg>`` element, without the XML head that pages do not want."""
        file = io.StringIO()
        with matplotlib.rc_context(STYLE):
            self.figure.savefig(file, format="svg", bbox_inches="tight", metadata={"Date": None})
        text = file.getvalue()
        return re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)

    def png(self) -> bytes:
        """The drawing as pixels, 200 to the inch."""
        file = io.BytesIO()
        with matplotlib.rc_context(STYLE):
            self.figure.savefig(file, format="png", dpi=200, bbox_inches="tight")
        return file.getvalue()


def draw(table: Table) -> list[Plot]:
    """Every plot of the table's experiment that its results are enough for."""
    if not table.lines:
        return []
    with matplotlib.rc_context(STYLE):
        return [plot for name in table.experiment.plots for plot in PLOTS[name](table)]


def _style(table: Table, line: Line) -> dict[str, Any]:
    """The same look for a method in every plot; rows that are not named after a method go by their order."""
    rows = list(dict.fromkeys(one.row for one in table.lines))
    known = (place for name, place in LOOKS.items() if re.match(rf"{name}\b", line.row))
    place = next(known, rows.index(line.row)) % len(COLOURS)
    return {"color": COLOURS[place], "marker": MARKERS[place], "linestyle": DASHES[place]}


def _face(line: Line) -> dict[str, Any]:
    """How the marker is filled tells a method's variants apart: hollow if lifelong, half if anything else."""
    if line.row.endswith("-lifelong"):
        return {"markerfacecolor": "white"}
    return {"fillstyle": "left", "markerfacecoloralt": "white"} if "-" in line.row else {}


def _learners(table: Table) -> list[Line]:
    """Lines that learn from samples, without the slow methods: their passes over copies would dwarf all others."""
    slow = {variant.row for variant in table.experiment.variants if variant.slow}
    return [line for line in table.lines if line.backwards and line.row not in slow]


def _panels(number: int, width: float = 4.2, height: float = 2.9, share: bool = True) -> tuple[Figure, list[Any]]:
    figure = Figure(figsize=(width * number, height), layout="constrained")
    axes = figure.subplots(1, number, sharey=share, squeeze=False)[0]
    return figure, list(axes)


def _summary(table: Table) -> list[Line]:
    """The lines to show where there is room for one severity: the mean over all if there are several."""
    severity = table.severities[-1]
    return [line for line in table.lines if line.severity == severity]


def _columns_axis(axis: Any, table: Table) -> None:
    axis.set_xticks(
        range(len(table.columns)), [column_name(column) for column in table.columns], rotation=60, ha="right"
    )
    axis.grid(axis="x", visible=False)


def _measure(table: Table) -> str:
    return f"{table.experiment.measure} (%)"


def _curve(axis: Any, places: Sequence[float], means: list[Any], spread: list[float | None], **look: Any) -> None:
    """A line, and around it the standard deviation over the orders where there are several."""
    axis.plot(places, means, **look)
    known = [(x, mean - by, mean + by) for x, mean, by in zip(places, means, spread, strict=True) if by is not None]
    if known:
        axis.fill_between(*zip(*known, strict=True), color=look["color"], alpha=0.15, linewidth=0)


def _errors(table: Table) -> Iterator[Plot]:
    lines = _summary(table)
    if len(table.columns) < 2:
        return
    figure, (axis,) = _panels(1, 8.4, 3.2)
    shift = 0.6 / max(1, len(lines))
    for number, line in enumerate(lines):
        look = _style(table, line) | _face(line) | {"linestyle": "none"}
        places = [i + (number - (len(lines) - 1) / 2) * shift for i, c in enumerate(table.columns) if c in line.values]
        axis.plot(places, [line.values[c] for c in table.columns if c in line.values], label=line.name, **look)
    _columns_axis(axis, table)
    axis.set_ylabel(_measure(table))
    axis.set_ylim(0, 1.06 * max(value for line in lines for value in line.values.values()))
    axis.legend(ncols=len(lines) if len(lines) < 6 else 4, loc="lower left", bbox_to_anchor=(0, 1))
    hollow = "; hollow: lifelong, never reset" if any(line.row.endswith("-lifelong") for line in lines) else ""
    yield Plot("errors", f"{table.experiment.measure.capitalize()} by corruption{hollow}.", figure)


def _backwards(table: Table) -> Iterator[Plot]:
    severities = [severity for severity in table.severities if severity is not None]
    chosen = [line for line in _learners(table) if not line.row.endswith("-lifelong")]
    if not chosen:
        return
    height = 3.2 if len(severities) == 1 else 0.8 + 1.4 * len(severities)
    figure = Figure(figsize=(8.4, height), layout="constrained")
    axes = figure.subplots(len(severities), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axis, severity in zip(axes, severities, strict=True):
        lines = [line for line in chosen if line.severity == severity]
        width = 0.8 / max(1, len(lines))
        for number, line in enumerate(lines):
            places = [i + (number - (len(lines) - 1) / 2) * width for i in range(len(table.columns))]
            heights = [line.backwards_by.get(column, 0) for column in table.columns]
            look = {"color": _style(table, line)["color"], "hatch": HATCHES[number % len(HATCHES)]}
            axis.bar(places, heights, width, label=line.name, alpha=0.85, edgecolor="white", **look)
        _columns_axis(axis, table)
        axis.set_title(f"severity {severity}", fontsize=9, loc="right")
    figure.supylabel("backward passes", fontsize=9)
    axes[0].legend(ncols=5, loc="lower left", bbox_to_anchor=(0, 0.98))
    yield Plot("backwards", "Backward passes: how many samples of a stream each method learns from.", figure)


def _forgetting(table: Table) -> Iterator[Plot]:
    severity = next((severity for severity in reversed(table.severities) if severity is not None), None)
    lines = [line for line in _learners(table) if line.severity == severity and line.clean_by]
    kinds = [
        ("reset before each corruption", [line for line in lines if not line.row.endswith("-lifelong")]),
        ("lifelong: never reset", [line for line in lines if line.row.endswith("-lifelong")]),
    ]
    kinds = [(title, group) for title, group in kinds if any(len(line.clean_by) > 1 for line in group)]
    if not kinds:
        return
    figure, axes = _panels(len(kinds), 4.4 if len(kinds) > 1 else 6.4, 3.2)
    for axis, (title, group) in zip(axes, kinds, strict=True):
        for line in group:
            look = _style(table, line)
            for values, before, dash, what in (
                (line.values, "", "-", "corruption"),
                (line.clean_by, CLEAN_AFTER, "--", "clean"),
            ):
                heights = [values.get(column) for column in table.columns]
                spread = [line.deviations.get(before + column) for column in table.columns]
                face = {} if dash == "-" else {"markerfacecolor": "white"}
                own = look | face | {"linestyle": dash, "label": f"{line.name}: {what}"}
                _curve(axis, range(len(heights)), heights, spread, **own)
        _columns_axis(axis, table)
        axis.set_title(title, fontsize=9)
    axes[0].set_ylabel(_measure(table))
    axes[0].legend(fontsize=7.5, ncols=2, loc="lower left", bbox_to_anchor=(0, 1.1))
    measure = table.experiment.measure
    caption = f"Forgetting (severity {severity}): {measure} on each corruption, and on the clean set after it."
    yield Plot("forgetting", caption, figure)


def _sweep(table: Table) -> Iterator[Plot]:
    lines = _summary(table)
    panels: list[tuple[str, str, str | None]] = [(_measure(table), "values", "")]
    panels += [(f"clean {_measure(table)}", "clean_by", CLEAN_AFTER)] if any(line.clean_by for line in lines) else []
    panels += [("backward passes", "backwards_by", None)]
    figure, axes = _panels(len(panels), 3.4, 2.9, share=False)
    for axis, (label, what, before) in zip(axes, panels, strict=True):
        for line in lines:
            values = getattr(line, what)
            known = [column for column in table.columns if column in values]
            places = [float(column) for column in known]
            spread = [None if before is None else line.deviations.get(before + column) for column in known]
            _curve(axis, places, [values[c] for c in known], spread, label=line.name, **_style(table, line))
            paper = [table.published(line, column) for column in known] if what == "values" and table.comparable else []
            if any(number is not None for number in paper):
                axis.plot(places, paper, color="#7F7F7F", linestyle=":", marker="x", label=f"{line.name}, published")
        axis.set_ylabel(label)
        axis.set_xlabel(_SWEPT.get(table.experiment.name, ""))
    axes[0].legend(fontsize=8)
    yield Plot("sweep", table.experiment.about, figure)


_SWEPT = {
    "entropy": "share of the samples adapted on (%)",
    "e0": "E0 / ln C",
    "fisher-size": "Q, samples for the Fisher information",
    "test-size": "N, test samples",
}


def _methods(table: Table) -> Iterator[Plot]:
    """The whole table in one glance: a bar a method, and the source model as the line to beat."""
    lines = [line for line in _summary(table) if line.complete]
    source = next((line for line in lines if line.row == "source"), None)
    if source is None or len(lines) < 2 or table.summary != "mean":
        return
    kept = any(line.clean_before is not None for line in lines)
    figure = Figure(figsize=(11.4, 0.8 + 0.36 * len(lines)), layout="constrained")
    widths = [3, 2] if kept else [1]
    axis, *beside = figure.subplots(1, len(widths), sharey=True, squeeze=False, width_ratios=widths)[0]
    for place, line in enumerate(lines):
        axis.barh(place, line.mean, color=_colour(table, line), height=0.66)
        axis.annotate(f"{line.mean:.1f}", (line.mean, place), (5, 0), textcoords="offset points", va="center")
    axis.axvline(source.mean, color="black", linestyle="--", linewidth=1.1)
    axis.set_yticks(range(len(lines)), [line.name for line in lines])
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="y", visible=False)
    axis.invert_yaxis()
    axis.set_xlabel(f"corrupted images: mean {_measure(table)}")
    for panel in beside:
        _clean_panel(panel, table, lines)
    severity = "" if source.severity is None else f", severity {source.severity}"
    caption = (
        f"Mean {table.experiment.measure} over {len(table.columns)} corruptions{severity}; dashed: the source model."
    )
    more = " Right: the clean images, by a new model (hollow) and after the whole stream (filled)." if kept else ""
    yield Plot("methods", caption + more, figure)


def _clean_panel(axis: Any, table: Table, lines: list[Line]) -> None:
    """What each method has forgotten: an arrow from a new model's clean error to that after the stream."""
    for place, line in enumerate(lines):
        if line.clean is None:
            continue
        colour = _colour(table, line)
        if line.clean_before is not None:
            axis.plot([line.clean_before, line.clean], [place, place], color=colour, linewidth=2.2, alpha=0.6)
            axis.plot(line.clean_before, place, "o", color=colour, markerfacecolor="white", markersize=7)
        axis.plot(line.clean, place, "o", color=colour, markersize=7)
        right = line.clean_before is None or line.clean >= line.clean_before
        where = {"xytext": (8 if right else -8, 0), "ha": "left" if right else "right"}
        axis.annotate(f"{line.clean:.1f}", (line.clean, place), textcoords="offset points", va="center", **where)
    source = next(line for line in lines if line.row == "source")
    if source.clean is not None:
        axis.axvline(source.clean, color="black", linestyle="--", linewidth=1.1)
    axis.margins(x=0.18)
    axis.grid(axis="y", visible=False)
    axis.tick_params(axis="y", length=0)
    axis.set_xlabel(f"clean images: {_measure(table)}")


def _colour(table: Table, line: Line) -> str:
    return "#9AA3AB" if line.row == "source" else str(_style(table, line)["color"])


def _bars(table: Table) -> Iterator[Plot]:
    yield _barh(table, "bars", _measure(table), lambda line: line.mean, scores=True)


def _seconds(table: Table) -> Iterator[Plot]:
    yield _barh(table, "seconds", "seconds a stream", lambda line: line.seconds, scores=False)


def _barh(table: Table, name: str, label: str, value: Callable[[Line], float], scores: bool) -> Plot:
    """A bar a line; a score has a published one beside it, and a standard deviation where there are several orders."""
    published = scores and table.comparable
    lines = [line for line in table.lines if line.severity is not None]
    figure, (axis,) = _panels(1, 6.4, 0.9 + 0.3 * len(lines))
    for place, line in enumerate(lines):
        severity = f", severity {line.severity}" if len(table.severities) > 1 else ""
        axis.barh(place, value(line), color=_style(table, line)["color"], alpha=0.85, height=0.65)
        paper = table.published(line, "mean") if published else None
        spread = line.deviations.get("mean", 0) if scores else 0
        if spread:
            axis.errorbar(value(line), place, xerr=spread, color="black", capsize=2)
        end = max(value(line) + spread, paper or 0)
        axis.annotate(f"{value(line):.1f}", (end, place), (6, 0), textcoords="offset points", va="center")
        if paper is not None:
            axis.plot(paper, place, "D", color="white", markeredgecolor="black")
        lines_text = f"{line.name}{severity}"
        axis.annotate(lines_text, (0, place), (-4, 0), textcoords="offset points", va="center", ha="right")
    axis.set_yticks([])
    axis.invert_yaxis()
    axis.set_xlabel(label)
    caption = table.experiment.about + (" Diamonds: published." if published else "")
    return Plot(name, caption, figure)


def _course(table: Table) -> Iterator[Plot]:
    """Error over the course of each stream, a line a method; beside the source's, if it took part."""
    columns = [column for column in table.columns if any(line.course.get(column) for line in table.lines)]
    lines = _summary(table)
    if not columns or not lines:
        return
    wide = 1 if len(columns) == 1 else 2
    rows = -(-len(columns) // wide)
    figure = Figure(figsize=(9.5, 4.5 if wide == 1 else 2.6 * rows), layout="constrained")
    axes = figure.subplots(rows, wide, sharey=True, squeeze=False).flatten()
    source = next((line for line in lines if line.row == "source"), None)
    for axis, column in zip(axes, columns, strict=False):
        # some corruptions are harder than others: without the source's error that would be all one sees
        least = dict(source.course.get(column, ())) if source else {}
        for place, line in enumerate(lines):
            if line.course.get(column):
                images, errors = zip(*line.course[column], strict=True)
                # by their order: there are more methods than colours, and no two may look the same
                again, colour = divmod(place, len(COLOURS))
                above = [error - least.get(at, 0.0) for at, error in zip(images, errors, strict=True)]
                axis.plot(images, above, label=line.name, color=COLOURS[colour], linestyle=DASHES[again])
        axis.set_title(column, fontsize=9)
        axis.set_xlabel("images")
    for axis in axes[len(columns) :]:
        axis.set_visible(False)
    axes[0].set_ylabel("error - source's (points)" if source else "error (%)")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper")
    beside = ", beside the source's: below 0 is better than not adapting" if source else ""
    yield Plot("course", f"Error over the course of each stream{beside}.", figure)


PLOTS: dict[str, Callable[[Table], Iterator[Plot]]] = {
    "methods": _methods,
    "errors": _errors,
    "backwards": _backwards,
    "forgetting": _forgetting,
    "sweep": _sweep,
    "bars": _bars,
    "seconds": _seconds,
    "course": _course,
}
