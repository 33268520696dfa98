from __future__ import annotations

from pathlib import Path


def test_the_demo_on_a_few_images(place: Path, eata_says) -> None:  # type: ignore[no-untyped-def]
    code, output = eata_says("demo", "--limit", "4")
    assert code == 0, output
    for name in ("Source", "BN", "Tent", "ETA", "EATA", "(lifelong)", "Clean after", "Forwards", "Backwards"):
        assert name in output
    assert "EATA got" in output
    assert "eata predict" in output
    page = Path(output.strip().splitlines()[-1].removeprefix("Report: "))
    assert page.is_file()
    code, output = eata_says("demo", "--limit", "4")
    assert "77 of 77 cells are there from before" in output
