from __future__ import annotations

from pathlib import Path


def test_report_writes_what_is_asked_for(place: Path, eata_says) -> None:  # type: ignore[no-untyped-def]
    code, output = eata_says("bench", "e0", "--model", "resnet26-bn-digits", "--limit", "4", "--threads", "1")
    assert code == 0, output
    (run,) = Path("runs").iterdir()
    code, output = eata_says("report", str(run), "--markdown", "--csv", "--out", "page")
    assert code == 0, output
    assert sorted(path.name for path in Path("page").iterdir()) == ["report.csv", "report.html", "report.md"]
    assert output.splitlines() == ["page/report.html", "page/report.md", "page/report.csv"]
