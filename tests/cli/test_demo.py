from __future__ import annotations

import re
from pathlib import Path

import pytest


@pytest.mark.parametrize("data", ["cifar10-sample", "digits"])
def test_the_demo_on_a_few_images(place: Path, eata_says, data: str) -> None:  # type: ignore[no-untyped-def]
    arguments = ("demo", "--limit", "8", "--data", data, "--workers", "1")
    code, output = eata_says(*arguments)
    assert code == 0, output
    for name in (
        "Source",
        "BN",
        "Tent",
        "ETA",
        "EATA",
        "(budget)",
        "Clean after",
        "Forwards",
        "Backwards",
        "Times Source",
    ):
        assert name in output
    assert re.search(r"EATA takes the trained net's error from \d+\.\d % to \d+\.\d % by learning", output)
    assert re.search(r"Error on the clean images.*: Tent \d+\.\d -> \d+\.\d %", output)
    assert "eata predict" in output
    page = Path(output.strip().splitlines()[-1].removeprefix("Report: "))
    html = page.read_text()
    for plot in ("methods", "errors", "backwards"):
        assert f'<figure class="plot" id="{plot}">' in html
    # the first screen is the answer: the sentence, the figure, the pictures; then the rest
    order = [
        "EATA takes the trained net",
        'id="methods"',
        '<div class="pictures">',
        '<dl class="facts">',
        "<h2>Results",
    ]
    assert [html.index(text) for text in order] == sorted(html.index(text) for text in order)
    code, output = eata_says(*arguments)
    assert "38 of 38 cells are there from before" in output
