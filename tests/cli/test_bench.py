from __future__ import annotations

import pytest

from eata.bench.experiments import EXPERIMENTS
from eata.cli.bench import names, numbers


def test_lists_of_numbers_and_names() -> None:
    assert numbers("1,3-5") == (1, 3, 4, 5)
    assert names(" a, b,") == ("a", "b")
    for wrong in ("", "a", "1-", "-3", "1,,2"):
        with pytest.raises(ValueError, match="not a list of numbers"):
            numbers(wrong)
    with pytest.raises(ValueError, match="'5-1' goes backwards; write 1-5"):
        numbers("5-1")


def test_the_list_has_every_experiment_with_its_label(eata_says) -> None:  # type: ignore[no-untyped-def]
    code, output = eata_says("bench", "--list")
    assert code == 0
    for experiment in EXPERIMENTS.values():
        for label in experiment.labels:
            assert experiment.name in output
            assert label in output


def test_the_stress_suite(eata_says, tmp_path) -> None:  # type: ignore[no-untyped-def]
    chosen = ("--data", "digits", "--limit", "128", "--stream", "nan", "--methods", "source", "--out", str(tmp_path))
    code, output = eata_says("bench", "stress", *chosen)
    assert code == 0
    assert "nan, source:" in output
    kept = {file.name for file in (tmp_path / "stress-digits").iterdir()} - {".lock"}
    assert kept == {"stress.json", "stress.md", "stress.svg"}
    code, output = eata_says("bench", "stress", "--data", "folder:x")
    assert code == 2
    assert "is for cifar10 and digits" in output
