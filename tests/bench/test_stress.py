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
