"""A small net of one's own in a folder of one's own, and pictures for it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

OWN = """
import os, time
import torch
from torch import nn

class Pause(nn.Module):
    def forward(self, x):
        time.sleep(float(os.environ.get("PAUSE", "0")))
        return x

def net():
    torch.manual_seed(0)
    first = (Pause(), nn.Conv2d(3, 4, 5, stride=4), nn.BatchNorm2d(4), nn.ReLU())
    model = nn.Sequential(*first, nn.Flatten(), nn.Linear(36, 3))
    with torch.no_grad():
        model[-1].weight *= 8
    model.pretrained_cfg = {"mean": (0.5,) * 3, "std": (0.5,) * 3, "input_size": (3, 16, 16)}
    model.pretrained_cfg |= {"num_classes": 3, "label_names": ("a", "b", "c")}
    return model
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with ``own:net`` (3 classes, 16x16), pictures in ``loose`` and ``labelled``."""
    (tmp_path / "own.py").write_text(OWN)
    draw = np.random.RandomState(0)
    for folder, number in (("loose", 20), ("labelled/a", 10), ("labelled/b", 10), ("labelled/c", 10), ("clean", 8)):
        (tmp_path / folder).mkdir(parents=True)
        for index in range(number):
            picture = Image.fromarray(draw.randint(0, 256, (16, 16, 3)).astype(np.uint8))
            picture.save(tmp_path / folder / f"{index:03}.png")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("own", None)
    return tmp_path


@pytest.fixture
def eata_says(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[object, str]]:
    """Run ``eata`` in this process; gives its exit code and what it printed."""

    def run(*arguments: str) -> tuple[object, str]:
        from eata.cli import main

        monkeypatch.setattr(sys, "argv", ["eata", *arguments])
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return ended.value.code, captured.out + captured.err

    return run
