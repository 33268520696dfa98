from __future__ import annotations

import json
import shutil
from pathlib import Path


def test_report_writes_what_is_asked_for(place: Path, eata_says) -> None:  # type: ignore[no-untyped-def]
    code, output = eata_says("bench", "e0", "--model", "resnet26-bn-digits", "--limit", "4", "--threads", "1")
    assert code == 0, output
    (run,) = Path("runs").iterdir()
    code, output = eata_says("report", str(run), "--markdown", "--csv", "--out", "page")
    assert code == 0, output
    assert sorted(path.name for path in Path("page").iterdir()) == ["report.csv", "report.html", "report.md"]
    assert output.splitlines() == ["page/report.html", "page/report.md", "page/report.csv"]


def test_what_was_measured_is_kept_as_data_and_goes_on_from_there(place: Path, eata_says) -> None:  # type: ignore[no-untyped-def]
    command = ("bench", "e0", "--model", "resnet26-bn-digits", "--limit", "4", "--threads", "1", "--workers", "1")
    code, output = eata_says(*command)
    assert code == 0, output
    (run,) = Path("runs").iterdir()
    text = (run / "run.json").read_text()
    (run / "run.json").write_text(text.replace('"command": "', '"command": "eata bench --out /home/me e0 ', 1))
    code, output = eata_says("report", str(run), "--into", "results/e0")
    assert (code, output.strip()) == (0, "results/e0")
    kept = Path("results/e0")
    names = {path.relative_to(kept).parts[0] for path in kept.rglob("*") if path.is_file()}
    assert names == {"run.json", "cells", "table.md", "table.csv", "sweep.svg"}
    assert len(list(kept.glob("cells/*.json"))) == 8
    assert "eata" in (kept / "table.csv").read_text()
    assert json.loads((kept / "run.json").read_text())["command"].startswith("eata bench e0 ")  # no path of a machine
    # A copy of it is the run: one cell that is missing is run again, the others are not.
    again = Path("again") / run.name
    shutil.copytree(kept, again)
    missing, *rest = sorted(again.glob("cells/*.json"))
    missing.unlink()
    before = {path: path.stat().st_mtime_ns for path in rest}
    code, output = eata_says(*command, "--out", "again")
    assert code == 0, output
    assert missing.exists()
    assert before == {path: path.stat().st_mtime_ns for path in rest}
    code, output = eata_says("report", str(run), "--into", str(run))
    assert code == 2
    assert "is the run itself" in output
