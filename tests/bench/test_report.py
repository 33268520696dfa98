"""The page: complete, self-contained, and without an error in a real browser."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from eata.bench.protocol import Request
from eata.bench.report import write
from eata.bench.run import execute
from eata.bench.store import Run

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--enable-logging=stderr", "--dump-dom"),
)


@pytest.fixture
def run(place: Path) -> Run:
    request = Request("imagenet-c", "digits", models=("tiny:net",), limit=16)
    done, table = execute(request, place / "runs", Console(quiet=True))
    assert table.failures == []
    return done


def test_the_page_and_its_companions(run: Run, place: Path) -> None:
    written = write(run, place / "out", ("markdown", "latex", "csv", "png"))
    assert [path.name for path in written] == [
        *("report.html", "report.md", "report.tex", "report.csv"),
        *("errors.png", "backwards.png", "forgetting.png"),
    ]
    assert all(path.stat().st_size > 100 for path in written)
    html = written[0].read_text()
    assert "://" not in html.replace("http://www.w3.org/", "")  # SVG's own names, which nobody fetches
    assert "Generated corruptions" in html
    assert html.count("data:image/png;base64,") == 16
    for name in ("Source", "BN", "Tent", "ETA", "EATA", "Tent (lifelong)", "EATA (lifelong)"):
        assert f"<th>{name}</th>" in html
    assert run.manifest["data"]["digest"] in html


def test_an_unfinished_or_failed_run_says_so(run: Run, place: Path) -> None:
    first, second, *_ = run.cells
    (run.folder / "cells" / f"{first.id}.json").unlink()
    run.write(second, {"cell": second.id, "error": "ValueError: <broken> & gone"})
    html = write(run, place / "out")[0].read_text()
    assert "This run is not finished: 76 of 78 streams" in html
    assert "1 streams failed" in html
    assert "&lt;broken&gt; &amp; gone" in html


@pytest.mark.skipif(BROWSER is None, reason="no chromium here to open the page in: apt-get install chromium")
def test_a_browser_shows_every_table_and_plot_without_an_error(run: Run, place: Path) -> None:
    page = write(run, place / "out")[0]
    shown = subprocess.run(
        [str(BROWSER), *FLAGS, f"--user-data-dir={place / 'profile'}", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert shown.returncode == 0, shown.stderr
    assert "CONSOLE" not in shown.stderr
    assert shown.stdout.count('<table class="results">') == 1
    for name in ("errors", "backwards", "forgetting"):
        start = shown.stdout.index(f'<figure class="plot" id="{name}">')
        assert "<svg" in shown.stdout[start : start + 200]
    assert shown.stdout.rstrip().endswith("</html>")
