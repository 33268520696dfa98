from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from eata.bench.experiments import EXPERIMENTS, find
from eata.bench.plots import COLOURS, MARKERS, draw
from eata.bench.protocol import Request, plan
from eata.bench.tables import tabulate


@pytest.mark.parametrize("name", [name for name, experiment in EXPERIMENTS.items() if experiment.plots])
def test_every_experiment_draws_its_plots(name: str, result: Callable[..., dict[str, Any]]) -> None:
    request = Request(name, "digits", models=("m",))
    cells = plan(request, 900)
    results = {cell.id: result(cell, 50 + number % 30) for number, cell in enumerate(cells)}
    plots = draw(tabulate(request, cells, results))
    assert [plot.name for plot in plots] == list(find(name).plots)
    for plot in plots:
        assert plot.svg().startswith("<svg")
        assert plot.caption


def test_nothing_to_draw() -> None:
    assert draw(tabulate(Request("e0", "digits", models=("m",)), [], {})) == []


def test_looks_differ_by_more_than_colour() -> None:
    assert len(set(COLOURS)) == len(set(MARKERS)) == len(COLOURS)


def test_course_is_beside_the_source_and_no_two_methods_look_alike(result: Callable[..., dict[str, Any]]) -> None:
    request = Request("streams", "digits", models=("m",))
    cells = plan(request, 900)
    results = {cell.id: result(cell, 50 + number % 30) for number, cell in enumerate(cells)}
    table = tabulate(request, cells, results)
    (plot,) = draw(table)
    axis = plot.figure.axes[0]
    drawn = {line.get_label(): line for line in axis.get_lines()}
    assert set(drawn["Source"].get_ydata()) == {0.0}
    assert len(drawn) > len(COLOURS)
    assert len({(line.get_color(), line.get_linestyle()) for line in drawn.values()}) == len(drawn)
    column = table.columns[0]
    by_name = {line.name: line.course[column] for line in table.lines}
    wanted = [error - least for (_, error), (_, least) in zip(by_name["Tent"], by_name["Source"], strict=True)]
    assert list(drawn["Tent"].get_ydata()) == pytest.approx(wanted)


def test_no_two_lines_of_forgetting_look_alike(result: Callable[..., dict[str, Any]]) -> None:
    request = Request("forgetting", "digits", models=("m",))
    cells = plan(request, 900)
    results = {cell.id: result(cell, 50 + number % 30) for number, cell in enumerate(cells)}
    (plot,) = draw(tabulate(request, cells, results))
    for axis in plot.figure.axes:
        looks = [(line.get_color(), line.get_marker(), line.get_linestyle()) for line in axis.get_lines()]
        assert len(set(looks)) == len(looks) == 8


@pytest.mark.parametrize("name", ["forgetting", "fisher-size"])
def test_a_band_of_one_deviation_over_the_orders(name: str, result: Callable[..., dict[str, Any]]) -> None:
    request = Request(name, "digits", models=("m",), seeds=(1, 2, 3))
    cells = plan(request, 900)
    results = {cell.id: result(cell, 60 + cell.seed, clean=80 + 2 * cell.seed) for cell in cells}
    (plot,) = draw(tabulate(request, cells, results))
    for axis in plot.figure.axes[:2]:
        reaches = {tuple(band.get_datalim(axis.transData).intervaly) for band in axis.collections}
        assert len(axis.collections) == len(axis.get_lines())
        assert reaches <= {(61, 63), (82, 86)}  # 62 ± 1 on the corruption, 84 ± 2 on the clean set
        assert reaches


def test_bars_show_the_deviation_over_the_orders(result: Callable[..., dict[str, Any]]) -> None:
    request = Request("learning-rates", "digits", models=("m",), severities=(5,), seeds=(1, 2, 3))
    cells = plan(request, 900)
    (plot,) = draw(tabulate(request, cells, {cell.id: result(cell, 60 + cell.seed) for cell in cells}))
    (axis,) = plot.figure.axes
    reaches = [segment[:, 0].tolist() for bar in axis.containers[1::2] for segment in bar[2][0].get_segments()]
    assert reaches == [pytest.approx([37, 39])] * 5  # an error of 38 ± 1
