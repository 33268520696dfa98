"""A net so small that cells take milliseconds, as a factory in a folder of its own, like a user's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from eata.bench.protocol import Cell

TINY = '''
import os, time
import torch
from torch import nn

class Logged(nn.Module):
    """Leaves a line for each forward pass, and takes its time if asked to."""
    def forward(self, x):
        if os.environ.get("PAUSE"):
            time.sleep(float(os.environ["PAUSE"]))
            with open("forwards.log", "a") as log:
                log.write(f"{os.getpid()}\\n")
        return x

def net():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 5, stride=4), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), Logged(), nn.Linear(8 * 49, 10)
    )
    with torch.no_grad():
        model[-1].weight *= 8  # confident enough for ETA to choose some samples
    model.pretrained_cfg = {"mean": (0.5,) * 3, "std": (0.5,) * 3, "input_size": (3, 32, 32), "num_classes": 10}
    return model

def broken():
    model = net()
    model[4] = nn.Linear(7, 7)
    return model

class Deadly(nn.Module):
    """Ends its process, as a system out of memory does."""
    def forward(self, x):
        os.kill(os.getpid(), 9)

def deadly():
    model = net()
    model[4] = Deadly()
    return model
'''
Start = Callable[..., Any]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder with ``tiny:net`` in reach."""
    (tmp_path / "tiny.py").write_text(TINY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("tiny", None)
    return tmp_path


def begin(folder: Path, *arguments: str, new_group: str = "", **environment: str) -> subprocess.Popen[str]:
    """Start ``eata`` as a process of its own in this folder, as a terminal does if it gets a group of its own."""
    (folder / "tiny.py").write_text(TINY)
    return subprocess.Popen(
        [sys.executable, "-c", "from eata.cli import main; main()", *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=bool(new_group),
        # A shell's background jobs ignore Ctrl-C, and their children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@pytest.fixture
def start(place: Path) -> Start:
    """Start ``eata`` as a process of its own."""
    return partial(begin, place)


@pytest.fixture(scope="session")
def start_in() -> Start:
    """The same, in a folder of one's choice."""
    return begin


@pytest.fixture
def eata_says(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Start:
    """Run ``eata`` in this process, which is quicker; gives its exit code and what it printed."""

    def run(*arguments: str) -> tuple[object, str]:
        from eata.cli import main

        monkeypatch.setattr(sys, "argv", ["eata", *arguments])
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return ended.value.code, captured.out + captured.err

    return run


@pytest.fixture(scope="session")
def result() -> Callable[..., dict[str, Any]]:
    """Make a cell's result as a worker gives it, for 100 images a stage."""

    def make(cell: Cell, correct: int, clean: int = 90, backwards: int = 40) -> dict[str, Any]:
        stages = [
            {
                "corruption": stage.corruption,
                "severity": stage.severity,
                "role": stage.role,
                "samples": 100,
                "known": 100,
                "correct": clean if stage.role == "clean" else correct,
                "forwards": 100,
                "backwards": backwards,
                "seconds": 0.5,
                **({"course": [[100, correct]]} if "stream" in cell.settings else {}),
            }
            for stage in cell.stages
        ]
        return {"cell": cell.id, "stages": stages}

    return make
