"""``eata predict --processes``: one adaptation, shared by real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from eata import state

Says = Callable[..., tuple[object, str]]
MAIN = "from eata.cli import main; main()"
TENT = ("--images", "loose", "--method", "tent", "--lr", "0.01", "--batch", "3")


def predict(says: Says, *arguments: str, code: int = 0) -> str:
    found, output = says("predict", "own:net", *arguments)
    assert found == code, output
    return output


def helpers_of(process: int) -> list[int]:
    """Its children that were spawned to help, and not to keep count of resources."""
    children = [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    return [child for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


def test_two_processes_write_the_rows_of_one(place: Path, eata_says: Says) -> None:
    Path("loose/005.png").write_text("no picture")
    predict(eata_says, *TENT, "--out", "one.csv")
    output = predict(eata_says, *TENT, "--out", "two.csv", "--processes", "2")
    assert "19 forwards, 19 backwards" in output
    assert Path("two.csv").read_text() == Path("one.csv").read_text()
    one, two = (state.read(f"{name}.csv.state.safetensors") for name in ("one", "two"))
    assert one["stats"] == two["stats"]
    for name, value in one["parameters"].items():
        torch.testing.assert_close(two["parameters"][name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(sys.platform != "linux", reason="the helper is found in /proc")
def test_a_helper_that_is_killed_ends_the_command_and_one_process_resumes(place: Path, eata_says: Says) -> None:
    predict(eata_says, *TENT, "--out", "whole.csv")
    command = [sys.executable, "-c", MAIN, "predict", "own:net", *TENT, "--out", "out.csv", "--processes", "2"]
    process = subprocess.Popen(
        command, env={**os.environ, "PAUSE": "0.3", "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 240
    while not Path("out.csv").exists() or Path("out.csv").read_text().count("\n") < 5:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)
    for helper in helpers_of(process.pid):
        os.kill(helper, signal.SIGKILL)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 2, said
    assert "Another process of this adaptation stopped" in " ".join(said.split()) or "Process 1 ended" in said
    predict(eata_says, *TENT, "--out", "out.csv", "--resume")
    assert Path("out.csv").read_text() == Path("whole.csv").read_text()


def test_processes_are_for_the_cpu(place: Path, eata_says: Says, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eata.device.choose", lambda name: torch.device("cuda"))
    output = predict(eata_says, *TENT, "--out", "out.csv", "--processes", "2", "--device", "cuda", code=2)
    assert "torchrun" in output
