from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Callable

import pytest

from eata.bench.lines import name_of
from eata.bench.protocol import Request, Result, plan
from eata.bench.tables import Table, latex, markdown, tabulate, to_csv

Make = Callable[..., Result]
MakeTable = Callable[[Request, dict[str, int]], Table]


@pytest.fixture
def table(result: Make) -> MakeTable:
    def make(request: Request, score: dict[str, int]) -> Table:
        cells = [cell for cell in plan(request, 10_000) if cell.row in score]
        return tabulate(request, cells, {cell.id: result(cell, score[cell.row]) for cell in cells})

    return make


def test_means_counts_and_clean_error(table: MakeTable) -> None:
    found = table(Request("cifar10-c", "cifar10"), {"tent": 70, "eata-lifelong": 80})
    assert [line.severity for line in found.lines] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, None, None]
    tent, eata = found.lines[-2:]
    assert (tent.mean, eata.mean) == (30, 20)
    assert len(tent.values) == 15
    assert (tent.clean, eata.clean) == (10, 10)
    assert (tent.forwards, tent.backwards, tent.seconds) == (100, 40, 0.5)
    assert eata.backwards == 40
    assert list(tent.clean_by) == list(eata.clean_by) == ["jpeg_compression"]


def test_difference_only_where_data_and_severities_are_the_same(table: MakeTable) -> None:
    whole = table(Request("cifar10-c", "cifar10"), {"tent": 70})
    mean = whole.lines[-1]
    assert whole.difference(mean, "mean") == pytest.approx(30 - 20.2)
    assert whole.difference(whole.lines[0], "mean") is None
    one = table(Request("cifar10-c", "cifar10", severities=(5,)), {"tent": 70})
    assert one.published(one.lines[0], "mean") == 20.2
    assert one.difference(one.lines[0], "mean") is None
    digits = table(Request("imagenet-c", "digits"), {"tent": 70})
    assert digits.published(digits.lines[0], "fog") == 42.5
    assert digits.difference(digits.lines[0], "fog") is None
    imagenet = table(Request("imagenet-c", "imagenet-c:x", clean="imagenet:x"), {"tent": 70})
    assert imagenet.difference(imagenet.lines[0], "fog") == pytest.approx(30 - 42.5)


def test_deviation_over_the_orders(result: Make) -> None:
    request = Request("orders", "digits", models=("m",))
    cells = plan(request, 900)
    scores = {cell.id: 60 + cell.seed % 10 for cell in cells}
    found = tabulate(request, cells, {cell.id: result(cell, scores[cell.id]) for cell in cells})
    (line,) = found.lines
    assert line.values["shot_noise"] == statistics.fmean(range(60, 70))
    assert line.deviations["shot_noise"] == pytest.approx(statistics.stdev(range(60, 70)))


def test_spread_of_the_mean_and_of_the_clean_set_over_the_orders(result: Make) -> None:
    request = Request("forgetting", "digits", models=("m",), methods=("eata-budget-lifelong",), seeds=(1, 2, 3))
    cells = plan(request, 900)
    results = {cell.id: result(cell, 60 + cell.seed, clean=80 + 2 * cell.seed) for cell in cells}
    found = tabulate(request, cells, results)
    (line,) = found.lines
    assert (line.mean, line.clean, line.clean_before) == (62, 84, 84)
    assert line.clean_by["fog"] == 84
    assert line.deviations["mean"] == pytest.approx(1)
    assert [line.deviations[name] for name in ("clean", "new", "clean after fog")] == pytest.approx([2, 2, 2])
    assert "| 62.0 ± 1.0 | 84.0 ± 2.0 | 84.0 ± 2.0 |" in markdown(found)
    records = {record["column"]: record for record in csv.DictReader(io.StringIO(to_csv(found)))}
    assert (float(records["mean"]["measured"]), float(records["mean"]["deviation"])) == (62, pytest.approx(1))
    after = records["clean after fog"]
    assert (float(after["measured"]), float(after["deviation"])) == (84, pytest.approx(2))


def test_an_entropy_curve_counts_the_backwards_of_its_preparation(result: Make) -> None:
    request = Request("entropy", "digits", models=("m",))
    cells = plan(request, 900)
    results = {cell.id: result(cell, 50) for cell in cells}
    for one in results.values():
        one["stages"][1]["backwards"] = 0
    found = tabulate(request, cells, results)
    assert [line.row for line in found.lines] == ["lowest entropy", "highest entropy"]
    assert found.columns == [str(percent) for percent in range(10, 101, 10)]
    assert found.lines[0].values["10"] == 50
    assert found.lines[0].backwards_by["10"] == 40


def test_failures_are_listed_and_the_rest_is_there(result: Make) -> None:
    request = Request("e0", "digits", models=("m",))
    cells = plan(request, 900)
    first = cells[0]
    results = {cell.id: result(cell, 50) for cell in cells} | {first.id: {"error": "ValueError: no"}}
    found = tabulate(request, cells, results)
    assert found.failures == [(first.id, "ValueError: no")]
    assert len(found.columns) == 7


def test_what_is_missing_neither_ranks_nor_compares(result: Make) -> None:
    request = Request("cifar10-c", "cifar10", methods=("tent", "eata"))
    cells = plan(request, 10_000)
    results = {cell.id: result(cell, 70 if cell.row == "tent" else 60) for cell in cells}
    late = [cell for cell in cells if cell.row == "tent" and cell.stages[0].corruption == "fog" and cell.severity == 3]
    for cell in late:
        del results[cell.id]
    found = tabulate(request, cells, results)
    assert found.ranked(3, "fog") == [40.0]  # of EATA alone: nothing is not 0
    assert found.ranked(3, "mean") == [40.0]
    assert found.ranked(5, "mean") == [30.0, 40.0]
    tent, eata = found.lines[-2:]
    assert (tent.severity, tent.complete, eata.complete) == (None, False, True)
    assert found.overall(tent) == (20.2, None)  # the paper's number, but no difference of a partial mean to it
    assert found.overall(eata)[1] == pytest.approx(40 - 19.7)
    assert "| (30.0) |" in markdown(found)
    means = [one for one in csv.DictReader(io.StringIO(to_csv(found))) if one["column"] == "mean"]
    assert ("tent", "all") not in {(one["row"], one["severity"]) for one in means}
    assert ("eata", "all") in {(one["row"], one["severity"]) for one in means}


def test_images_without_labels_have_no_score(result: Make) -> None:
    request = Request("imagenet-r", "digits", models=("m",), methods=("tent",))
    (cell,) = plan(request, 900)
    unknown = result(cell, 0)
    unknown["stages"][0]["known"] = 0
    assert tabulate(request, [cell], {cell.id: unknown}).lines == []


def test_texts(table: MakeTable) -> None:
    found = table(Request("cifar10-c", "cifar10", severities=(5,)), {"source": 60, "eata": 80})
    head, rule, source, eata = markdown(found).splitlines()
    assert head.count("|") == rule.count("|") == source.count("|") == eata.count("|")
    assert head.startswith("| Method | Gauss. | Shot |")
    assert eata.startswith("| EATA | 20.0 |")
    assert "| 19.7 |  |" in eata
    tex = latex(found)
    assert r"\#Backwards" in tex
    assert tex.count(r"\\") == 3
    records = list(csv.DictReader(io.StringIO(to_csv(found))))
    assert len(records) == 2 * 17
    fog = next(one for one in records if one["row"] == "eata" and one["column"] == "fog")
    assert (float(fog["measured"]), fog["published"], float(fog["backwards"])) == (20.0, "", 40.0)


def test_names_for_people() -> None:
    assert name_of("tent (full)") == "Tent (full)"
    assert name_of("tent-lr-x4") == "Tent (lr x4)"
    assert name_of("s=ent*div") == "S"


@pytest.mark.parametrize(
    ("experiment", "data", "title"),
    [
        ("imagenet-r", "imagenet-r:here", "ImageNet-R: one natural shift"),
        ("imagenet-r", "folder:photos", "folder:photos: one natural shift"),
        ("cifar10-c", "cifar10", "CIFAR-10-C: error by corruption"),
        ("cifar10-c", "digits", "digits: error by corruption"),
        ("mixed", "digits", "Mixed shifts"),
    ],
)
def test_the_title_names_the_data_that_was_used(experiment: str, data: str, title: str) -> None:
    assert tabulate(Request(experiment, data), [], {}).title == title
