"""The transcription against the paper's source, read by a parser that knows nothing of our layout."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from eata.bench.published import tables, value

PAPER = Path(__file__).parents[3] / "shared" / "paper" / "eata.tex"


def printed_numbers(tex: str, label: str) -> Counter[float]:
    """Every number in the rows of a table, counts multiplied out, differences to the base left out."""
    start = tex.index(f"\\label{{{label}}}")
    head, _, body = tex[start : tex.index("\\bottomrule", start)].partition("\\midrule")
    kept = [float(base) for base in re.findall(r"\((\d+\.\d)\)", head)]  # tab:big_models has them in its head
    unnamed = label in ("tab:bs=1", "tab:mean_and_std")  # no row names: the first cell is a number too
    for line in body.split("\\\\"):
        if "Gauss." in line:
            continue
        for cell in line.split("&")[0 if unnamed else 1 :]:
            plain = re.sub(r"\$_\{\(.*?\)\}", "", cell).replace(",", "")
            product = re.search(r"(\d+)\$\\times\$(\d+)", plain)
            numbers = [int(product[1]) * int(product[2])] if product else re.findall(r"\d+(?:\.\d+)?", plain)
            kept += [float(number) for number in numbers]
    return Counter(kept)


@pytest.mark.skipif(not PAPER.exists(), reason="no ../shared/paper/eata.tex beside the repository")
@pytest.mark.parametrize("label", list(tables()))
def test_every_number_is_the_papers(label: str) -> None:
    ours = Counter(float(number) for values in tables()[label].rows.values() for number in values)
    assert ours == printed_numbers(PAPER.read_text(), label)


@pytest.mark.parametrize(
    ("label", "row", "severity", "column", "expected"),
    [  # read off the printed page by eye: the place of a number, which the counts above do not see
        ("tab:imagenet-c-level-5", "eata-lifelong", 5, "glass_blur", 65.8),
        ("tab:imagenet-c-levels", "memo", 3, "fog", 47.9),
        ("tab:imagenet-c-levels", "tent-episodic", 4, "forwards", 100_000),
        ("tab:imagenet-r", "eta", None, "backwards", 14_847),
        ("tab:cifar-10-c", "ttt", None, "mean", 15.6),
        ("tab:effects_diff_components", "s=ent", 5, "backwards", 26_694),
        ("tab:bs=1", "eta-window-64", 5, "gaussian_noise", 32.4),
        ("tab:mixed_distribution", "tent", 5, "mixed", 2.3),
        ("tab:big_models", "eata", 5, "resnet152", 40.2),
        ("tab:small_testset", "eata", 5, "2048", 18.7),
        ("tab:eta_vs_tent_diff_lrs", "tent-lr-x8", 5, "gaussian_noise", 83.6),
        ("tab:mean_and_std", "eata-stdev", 5, "defocus_blur", 0.3),
    ],
)
def test_numbers_stand_in_their_places(label: str, row: str, severity: int, column: str, expected: float) -> None:
    assert value([label], row, severity, column) == expected


def test_rows_have_a_value_for_each_column() -> None:
    for table in tables().values():
        assert {len(values) for values in table.rows.values()} == {len(table.columns)}


def test_means_are_those_that_facts_quotes() -> None:
    quoted = {"source": 82.0, "bn": 66.5, "memo": 76.1, "ttt": 62.4, "tent": 57.4, "eta": 51.9, "eata": 52.2}
    for row, mean in quoted.items():
        assert value(["tab:imagenet-c-level-5"], row, 5, "mean") == pytest.approx(mean, abs=0.06)


def test_what_the_paper_does_not_have_is_none() -> None:
    assert value(["tab:cifar-10-c"], "bn", 5, "mean") is None
    assert value(["fig:ablation_e0_fisher_num"], "eata", 5, "0.40") is None
