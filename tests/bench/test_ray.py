"""A real Ray cluster on this machine: two workers, one of them killed in mid-run."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'eata[ray]'")

BENCH = ("bench", "learning-rates", "--data", "digits", "--model", "tiny:net", "--limit", "64", "--threads", "1")


def results(folder: Path) -> dict[str, Any]:
    found = {path.name: json.loads(path.read_text()) for path in folder.glob("runs/*/cells/*.json")}
    for result in found.values():
        assert "error" not in result, result
        for stage in result["stages"]:
            del stage["seconds"]
    return found


def begin_on_ray(folder: Path, start_in: Callable[..., Any]) -> tuple[Any, list[int]]:
    """A run with its first workers at work; none if Ray gave up, as it does after 30 seconds on a busy machine."""
    log = folder / "forwards.log"
    log.unlink(missing_ok=True)
    # Ray gives its workers the lowest priority, which on a busy machine means that they never run
    process = start_in(folder, *BENCH, "--engine", "ray", PAUSE="0.3", RAY_worker_niceness="0")
    deadline = time.monotonic() + 400
    while process.poll() is None:
        workers = {int(pid) for pid in log.read_text().split()} - {process.pid} if log.exists() else set()
        if workers:
            return process, sorted(workers)
        assert time.monotonic() < deadline
        time.sleep(0.05)
    output, _ = process.communicate()
    assert "Ray did not start" in output, output
    return process, []


def test_a_lost_workers_cells_are_run_again_with_the_same_bits(
    tmp_path_factory: pytest.TempPathFactory, start_in: Callable[..., Any]
) -> None:
    alone, cluster = tmp_path_factory.mktemp("alone"), tmp_path_factory.mktemp("cluster")
    process = start_in(alone, *BENCH)
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output

    for _ in range(3):
        process, workers = begin_on_ray(cluster, start_in)
        if workers:
            break
    else:
        pytest.fail("Ray did not start within its 30 seconds, 3 times: a bug, or a machine that is too busy")
    log = cluster / "forwards.log"
    os.kill(workers[0], signal.SIGKILL)
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    later = {int(pid) for pid in log.read_text().split()} - {process.pid, workers[0]}
    assert later, "the other workers did the rest"
    assert results(cluster) == results(alone)
    assert len(results(cluster)) == 10
