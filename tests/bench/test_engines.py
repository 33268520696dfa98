"""Worker processes: killed, orphaned, lost again and again, and always with the bits of one process."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import eata
from eata.bench import materials
from eata.bench.materials import Materials
from eata.bench.protocol import Request, plan
from eata.bench.store import Run

BENCH = ("bench", "learning-rates", "--data", "digits", "--model", "tiny:net", "--limit", "64")
Start = Callable[..., Any]
CELLS = 10


def results(folder: Path) -> dict[str, Any]:
    found = {path.name: json.loads(path.read_text()) for path in folder.glob("runs/*/cells/*.json")}
    for result in found.values():
        for stage in result.get("stages", ()):
            del stage["seconds"]
    return found


def wait_for(condition: Callable[[], Any], seconds: float = 120) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.02)
    return found


def at_work(folder: Path, parent: int) -> list[int]:
    """Processes other than the parent that have left a line in the log of forwards."""
    log = folder / "forwards.log"
    pids = {int(pid) for pid in log.read_text().split()} if log.exists() else set()
    return sorted(pids - {parent})


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, start_in: Start) -> dict[str, Any]:
    """What one process gives."""
    folder = tmp_path_factory.mktemp("alone")
    process = start_in(folder, *BENCH, "--workers", "1")
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    found = results(folder)
    assert len(found) == CELLS
    return found


def test_three_workers_give_the_bits_of_one(place: Path, start: Start, expected: dict[str, Any]) -> None:
    process = start(*BENCH, "--workers", "3", PAUSE="0.05")
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert results(place) == expected
    assert process.pid not in at_work(place, 0)
    assert len(at_work(place, 0)) >= 2
    forwards = len((place / "forwards.log").read_text().splitlines())
    assert forwards == CELLS + 15  # the Fisher information's 15 batches were done by one of them, for all
    assert not list(place.glob("runs/*/streams"))


def test_a_killed_workers_cell_is_run_again(place: Path, start: Start, expected: dict[str, Any]) -> None:
    process = start(*BENCH, "--workers", "2", PAUSE="0.3")
    victim = wait_for(lambda: at_work(place, process.pid))[0]
    os.kill(victim, signal.SIGKILL)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert results(place) == expected
    assert len(at_work(place, process.pid)) == 3


def test_workers_do_not_outlive_their_parent(place: Path, start: Start, expected: dict[str, Any]) -> None:
    process = start(*BENCH, "--workers", "2", PAUSE="0.3")
    workers = wait_for(lambda: len(found := at_work(place, process.pid)) == 2 and found)
    process.kill()
    process.communicate(timeout=60)
    wait_for(lambda: not any(alive(pid) for pid in workers))
    kept = results(place)
    assert kept.items() <= expected.items()
    process = start(*BENCH, "--workers", "2")
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert results(place) == expected


def test_ctrl_c_at_the_terminal_ends_all_of_them_quietly(place: Path, start_in: Start) -> None:
    process = start_in(place, *BENCH, "--workers", "2", PAUSE="0.3", new_group="1")
    workers = wait_for(lambda: len(found := at_work(place, process.pid)) == 2 and found)
    os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to the whole group
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "eata: stopped; what was finished is kept." in output
    assert "Traceback" not in output
    assert not any(alive(pid) for pid in workers)


def test_a_cell_that_ends_its_worker_each_time_has_failed(place: Path, start: Start) -> None:
    process = start(
        *("bench", "backbones", "--data", "digits", "--limit", "64", "--methods", "source,tent", "--workers", "2"),
        *("--model", "tiny:net,tiny:deadly"),
    )
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 1, output
    found = results(place)
    assert len(found) == 4
    lost = [result["error"] for result in found.values() if "error" in result]
    assert len(lost) == 2
    assert all("its worker process ended 4 times (exit code -9)" in error for error in lost)
    assert "cells failed; the same command tries them again" in output


def test_two_runs_with_workers_share_the_cells(place: Path, start: Start, expected: dict[str, Any]) -> None:
    both = [start(*BENCH, "--workers", "2", PAUSE="0.1") for _ in range(2)]
    for process in both:
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 0, output
    assert results(place) == expected
    forwards = len((place / "forwards.log").read_text().splitlines())
    assert forwards == CELLS + 15


def test_decoded_images_are_made_once_and_mapped(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request("imagenet-c", "digits", models=("tiny:net",), limit=32)
    made: list[str | None] = []
    load = eata.data.load

    def counted(spec: str, **options: Any) -> Any:
        made.append(options.get("corruption"))
        return load(spec, **options)

    monkeypatch.setattr(eata.data, "load", counted)
    first, second = (Materials(request, place / "run") for _ in range(2))
    for shared in (first, second):
        stream = shared.stream("fog", 5, 32, False, "tiny:net")
        shared.stream("fog", 5, 32, False, "tiny:net")
        assert len(stream) == 32
    assert made.count("fog") == 1
    first.clear()
    assert not (place / "run" / "streams").exists()
    assert next(iter(stream.batches(32)))[0].shape == (32, 3, 32, 32)  # whoever has it open keeps it
    monkeypatch.setattr(materials, "KEPT_BYTES", 1000)
    Materials(request, place / "run").stream("fog", 5, 32, False, "tiny:net")
    assert not list((place / "run" / "streams").glob("[!.]*"))


def test_the_manifest_and_each_result_name_the_code(place: Path, eata_says: Start) -> None:
    arguments = ("bench", "components", "--model", "tiny:net", "--limit", "32", "--methods", "s=1", "--workers", "1")
    code, output = eata_says(*arguments)
    assert code == 0, output
    (folder,) = (place / "runs").iterdir()
    run = Run(folder)
    here = Path(eata.__file__).parent
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=False)
    assert run.manifest["commit"].removesuffix("-dirty") == head.stdout.strip()
    assert all(result["commit"] == run.manifest["commit"] for result in run.results().values())
    assert re.fullmatch("[0-9a-f]{12}", run.manifest["data"]["clean_digest"])
    assert run.manifest["hardware"]["device"] == "cpu"


def test_another_torch_is_another_run_and_another_commit_is_not(
    place: Path, eata_says: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("bench", "components", "--model", "tiny:net", "--limit", "32", "--methods", "s=1", "--workers", "1")
    for module, name, value in (
        ("eata.origin", "commit", lambda: "a" * 40),
        ("eata.origin", "commit", lambda: "b" * 40),
        ("torch", "__version__", "2.13.99"),
    ):
        monkeypatch.setattr(f"{module}.{name}", value)
        code, output = eata_says(*arguments)
        assert code == 0, output
    assert len(list((place / "runs").iterdir())) == 2


def test_a_run_without_the_newer_entries_is_still_read(place: Path, eata_says: Start) -> None:
    arguments = ("bench", "components", "--model", "tiny:net", "--limit", "32", "--methods", "s=1", "--workers", "1")
    code, output = eata_says(*arguments)
    assert code == 0, output
    (folder,) = (place / "runs").iterdir()
    manifest = json.loads((folder / "run.json").read_text())
    del manifest["commit"], manifest["data"]["clean_digest"], manifest["hardware"]["device"]
    del manifest["request"]["device"], manifest["request"]["amp"]
    (folder / "run.json").write_text(json.dumps(manifest))
    code, output = eata_says("report", str(folder))
    assert code == 0, output
    assert Run(folder).request.device == "cpu"


def test_long_cells_come_first_in_effort(place: Path) -> None:
    cells = plan(Request("imagenet-c", "digits", models=("m",)), 900)
    lifelong = [cell for cell in cells if cell.lifelong]
    others = [cell for cell in cells if not cell.lifelong]
    assert min(cell.effort(900) for cell in lifelong) > max(cell.effort(900) for cell in others)
    tent = next(cell for cell in others if cell.row == "tent" and len(cell.stages) == 2)
    assert tent.effort(900) == 2 * 900 * 3
