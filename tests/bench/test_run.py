"""Runs as real processes: stopped, killed, doubled, failed."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rich.console import Console

from eata.bench.experiments import find
from eata.bench.materials import Materials
from eata.bench.protocol import Request
from eata.bench.run import execute
from eata.bench.store import Run
from eata.bench.tables import load
from eata.bench.work import Worker

BENCH = ("bench", "learning-rates", "--data", "digits", "--model", "tiny:net", "--limit", "64", "--threads", "1")
Start = Callable[..., Any]
CELLS = 10  # 5 rows at 2 severities


def results(folder: Path) -> dict[str, Any]:
    """Of each cell by its name; times left out, for they are never the same."""
    (run,) = (folder / "runs").iterdir()
    found = {path.name: json.loads(path.read_text()) for path in (run / "cells").glob("*.json")}
    for result in found.values():
        for stage in result.get("stages", ()):
            del stage["seconds"]
    return found


def wait_for(condition: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.02)


def cells_there(folder: Path) -> int:
    return len(list((folder / "runs").glob("*/cells/*.json")))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, start_in: Start) -> Path:
    """A folder with a run that nothing happened to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    process = start_in(folder, *BENCH)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    return folder


@pytest.fixture
def expected(undisturbed: Path) -> dict[str, Any]:
    found = results(undisturbed)
    assert len(found) == CELLS
    return found


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_stopped_run_loses_the_cell_in_work_at_most(
    place: Path, start: Start, expected: dict[str, Any], how: signal.Signals
) -> None:
    process = start(*BENCH, PAUSE="0.1")
    wait_for(lambda: cells_there(place) >= 3)
    process.send_signal(how)
    output, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    kept = results(place)
    assert 3 <= len(kept) < CELLS
    assert kept.items() <= expected.items()
    files = {path: path.stat().st_mtime_ns for path in place.glob("runs/*/cells/*.json")}
    process = start(*BENCH)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert f"{len(kept)} of {CELLS} cells are there from before" in output
    assert results(place) == expected
    assert all(path.stat().st_mtime_ns == written for path, written in files.items())


def test_two_processes_share_a_run(place: Path, start: Start, expected: dict[str, Any]) -> None:
    first, second = start(*BENCH, PAUSE="0.05"), start(*BENCH, PAUSE="0.05")
    for process in (first, second):
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 0, output
        assert "EATA" in output
    assert results(place) == expected
    forwards = len((place / "forwards.log").read_text().splitlines())
    fisher = 15  # batches of the 900 clean images; both processes may have begun with it
    assert forwards - CELLS in (fisher, 2 * fisher)


def test_a_failing_cell_is_recorded_and_the_rest_goes_on(place: Path, eata_says: Start) -> None:
    arguments = ("bench", "backbones", "--data", "digits", "--limit", "64", "--threads", "1")
    code, output = eata_says(*arguments, "--model", "tiny:net,tiny:broken")
    assert code == 1
    assert output.count("failed:") == 6  # three cells, as they fail and in the end
    found = results(place)
    assert len(found) == 6
    assert sum("error" in result for result in found.values()) == 3
    code, output = eata_says(*arguments, "--model", "tiny:net,tiny:broken")
    assert "3 of 6 cells are there from before" in output
    assert code == 1


@pytest.mark.parametrize("where", ["adapter", "write"])
def test_a_full_disk_ends_the_run_and_what_is_done_stays(
    place: Path, eata_says: Start, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    arguments = ("bench", "components", "--model", "tiny:net", "--limit", "32", "--severity", "5", "--workers", "1")
    owner = Worker if where == "adapter" else Run
    whole = getattr(owner, where)

    def full(self: Any, cell: Any, *more: Any) -> Any:
        if cell.row == "s=ent":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return whole(self, cell, *more)

    monkeypatch.setattr(owner, where, full)
    code, output = eata_says(*arguments)
    assert code == 2
    assert "The disk is full; what was finished is kept." in output
    assert len(results(place)) == 1


def test_a_changed_setting_is_a_new_run(place: Path, eata_says: Start) -> None:
    for batch in ("32", "16", "32"):
        arguments = ("--model", "tiny:net", "--limit", "32", "--batch", batch, "--methods", "s=1", "--severity", "5")
        code, output = eata_says("bench", "components", *arguments)
        assert code == 0, output
    assert len(list((place / "runs").iterdir())) == 2


def test_the_manifest_says_how_it_was_run(place: Path, undisturbed: Path) -> None:
    (folder,) = (undisturbed / "runs").iterdir()
    run = Run(folder)
    manifest = run.manifest
    assert manifest["command"].startswith("eata bench learning-rates")
    assert manifest["data"]["generated"] is True
    assert manifest["seeds"] == [2020]
    assert manifest["models"]["tiny:net"] == Materials(run.request).weights("tiny:net")
    assert manifest["hardware"]["cores"] == os.cpu_count()
    assert run.request == Request("learning-rates", "digits", models=("tiny:net",), limit=64, threads=1)
    assert all(run.done(cell) for cell in run.cells)


def test_a_run_of_another_version_is_refused(place: Path, undisturbed: Path) -> None:
    (original,) = (undisturbed / "runs").iterdir()
    folder = Path(shutil.copytree(original, place / "runs" / original.name))
    path = folder / "run.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 99'))
    with pytest.raises(ValueError, match=r"format 99.*are not mixed"):
        Run(folder)
    cell = next((folder / "cells").iterdir())
    path.write_text((original / "run.json").read_text())
    cell.write_text("{")
    with pytest.raises(ValueError, match=r"is damaged .* remove it"):
        load(Run(folder))
    path.write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        Run(folder)
    with pytest.raises(ValueError, match="is not a run: it holds the runs learning-rates-digits"):
        Run(folder.parent)
    with pytest.raises(ValueError, match=r"there is no run\.json in it"):
        Run(place)


def test_bad_words_get_one_sentence(place: Path, eata_says: Start) -> None:
    (place / "loose").mkdir()
    Image.new("RGB", (32, 32)).save(place / "loose" / "one.png")
    for arguments, sentence in (
        (("bench", "forgeting"), "There is no experiment 'forgeting'; did you mean 'forgetting'?"),
        (("bench", "imagenet-c"), "imagenet-c needs its data: --data imagenet-c:PATH"),
        (("bench", "imagenet-c", "--data", "imagenet-c:nowhere"), "nowhere (of imagenet-c:nowhere) is not a folder"),
        (("bench", "e0", "--severity", "high"), "'high' is not a list of numbers"),
        (("bench", "e0", "--severity", "6", "--model", "tiny:net"), "There is no severity 6"),
        (("bench", "test-size", "--limit", "8", "--model", "tiny:net"), "test-size needs more images of digits than 8"),
        (("bench", "e0", "--data", "folder:loose", "--model", "tiny:net"), "folder:loose has no labels"),
        (("bench", "e0", "--engine", "spark"), "There is no engine 'spark'"),
        (("report", "nowhere"), "nowhere is not a run"),
    ):
        code, output = eata_says(*arguments)
        assert code == 2, output
        assert sentence in output
        assert "Traceback" not in output


@pytest.mark.parametrize(
    "name",
    [
        *("imagenet-r", "entropy", "e0", "fisher-size", "components", "batch-1", "wall-clock", "memory", "mixed"),
        *("backbones", "test-size", "learning-rates", "rows"),
    ],
)
def test_every_kind_of_experiment_runs(place: Path, name: str) -> None:
    limit = None if name == "test-size" else 8
    request = Request(name, "digits", models=("tiny:net",), limit=limit, seeds=(2020,))
    _, table = execute(request, place / "runs", Console(quiet=True))
    assert table.failures == []
    assert {line.row for line in table.lines} == {variant.row for variant in find(name).variants if not variant.slow}
