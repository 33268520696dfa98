"""The stress suite on digits, small: what is measured, kept and drawn."""

import json
import math

import pytest

import eata
from eata.bench import hard, stress

SOURCE = hard.Source(128, data="digits")


def test_it_measures_keeps_and_draws(tmp_path):
    methods = ["source", "budget+guard"]
    rows = list(stress.run(["sorted", "nan"], methods, SOURCE, tmp_path))
    assert [(row["stream"], row["method"]) for row in rows] == [(s, m) for s in ("sorted", "nan") for m in methods]
    by = {(row["stream"], row["method"]): row for row in rows}
    assert by["sorted", "source"]["alarms"] == 0
    assert by["sorted", "source"]["drift"] is None
    assert 0 <= by["sorted", "budget+guard"]["drift"] <= 0.0201
    assert all(0 <= row["during"] <= row["worst"] + 1e-9 <= 100 + 1e-9 for row in rows)

    assert list(stress.run(["sorted"], methods, SOURCE, tmp_path)) == []  # known already
    saved = json.loads((tmp_path / "stress.json").read_text())
    assert saved["rows"] == rows
    assert saved["manifest"]["net"] == "resnet26-bn-digits"
    text = stress.write(tmp_path)
    assert text.count("\n") == 2 + 4
    assert (tmp_path / "stress.md").read_text() == text
    assert (tmp_path / "stress.svg").read_text().startswith("<?xml")


def rows_of(stream, method, during, after=10.0, alarms=0):
    return [
        {"stream": stream, "method": method, "during": value, "after": after, "alarms": alarms, "stretches": [after]}
        for value in during
    ]


def test_goals_are_told_from_the_rows():
    """One that is met, one for each way to miss; the mean over the orders counts."""
    rows = rows_of("new", "budget", [math.nan], after=9.5)
    for stream, source, plain, guarded in (
        ("shift", [40.0, 44.0], [20.0, 24.0], [20.0, 25.0]),  # 0.5 above, 97.5 % kept
        ("continual", [32.0], [22.0], [22.8]),  # 0.8 above, 92 % kept
        ("sorted", [8.0], [70.0], [9.1]),
        ("clean", [8.0], [10.0], [8.0]),
    ):
        rows += rows_of(stream, "source", source) + rows_of(stream, "budget", plain)
        alarms = 1 if stream in ("sorted", "clean") else 0
        rows += rows_of(stream, "budget+guard", guarded, after=11.0 if stream == "sorted" else 10.5, alarms=alarms)
    found = {goal["stream"]: goal for goal in stress.goals(rows, "budget+guard")}
    assert found["shift"]["missed"] == []
    assert found["shift"]["above"] == pytest.approx(0.5)
    assert found["shift"]["kept"] == pytest.approx(97.5)
    assert found["continual"]["missed"] == ["gain"]
    assert found["sorted"]["missed"] == ["error", "clean after"]  # an alarm is right there
    assert found["clean"]["missed"] == ["alarms"]
    text = stress.goals_table(rows, "budget+guard")
    assert "All met on 1 of 4 streams" in text
    assert "| continual | 22.8 | 22.0 | +0.8 | 92 % | 0 | +1.0 | no: gain |" in text
    assert stress.goals_table(rows, "auto+guard") == ""


def test_a_new_model_is_the_stream_of_nothing(tmp_path):
    (row,) = stress.run(["new"], ["source"], SOURCE, tmp_path)
    assert math.isnan(row["during"])
    assert 0 <= row["after"] <= 100
    assert "| new: nothing: a new model | source |  |" in stress.write(tmp_path)


def test_the_source_is_measured_as_it_is(tmp_path):
    """Beside a loop of its own over the same images."""
    (row,) = stress.run(["nan"], ["source"], SOURCE, tmp_path)
    net = eata.models.load("resnet26-bn-digits").eval()
    wrong = total = 0
    for x, y in hard.STREAMS["nan"].make(SOURCE):
        for image, label in zip(x, y.tolist(), strict=True):
            if label >= 0:
                total += 1
                wrong += int(net(image[None]).argmax()) != label
    assert row["during"] == pytest.approx(100 * wrong / total)


def test_recovery_is_the_first_stretch_that_is_near():
    row = {"stretches": [50.0, 20.0, 14.0, 30.0]}
    assert stress.recovery(row, fresh=10.0) == 2
    assert stress.recovery(row, fresh=1.0) is None


def test_a_stretch_in_which_nothing_counts_is_left_out():
    assert stress._windows([(0, 0), (0, 0), (1, 2)], 2) == [[(0, 0), (1, 2)]]
    assert math.isnan(stress._mean([(0, 0)]))


def test_unknown_names_are_said(tmp_path):
    with pytest.raises(ValueError, match="no stream 'sotred'; did you mean 'sorted'"):
        next(stress.run(["sotred"], ["source"], SOURCE, tmp_path))
    with pytest.raises(ValueError, match="no method 'budgt'"):
        next(stress.run(["sorted"], ["budgt"], SOURCE, tmp_path))
