from __future__ import annotations

import os
from pathlib import Path

import pytest


def test_the_demo_on_a_few_images(place: Path, eata_says, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(os, "cpu_count", lambda: 1)  # threads that wait for each other starve on a busy machine
    code, output = eata_says("demo", "--limit", "4")
    assert code == 0, output
    for name in ("Source", "BN", "Tent", "ETA", "EATA", "(lifelong)", "Clean after", "Forwards", "Backwards"):
        assert name in output
    assert "EATA got" in output
    assert "eata predict" in output
    page = Path(output.strip().splitlines()[-1].removeprefix("Report: "))
    html = page.read_text()
    for plot in ("errors", "backwards", "forgetting"):
        assert f'<figure class="plot" id="{plot}">' in html
    code, output = eata_says("demo", "--limit", "4")
    assert "77 of 77 cells are there from before" in output
