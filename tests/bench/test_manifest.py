"""What a result is kept with."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from benchmarks import record

import eata
from eata import origin
from eata.bench.manifest import manifest


def test_it_names_command_code_versions_and_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/eata", "bench", "a b"])
    made = manifest("eata")
    assert made["command"] == "eata bench 'a b'"
    assert made["commit"] == origin.commit()
    assert made["versions"]["eata"] == eata.__version__
    assert made["versions"]["torch"] == torch.__version__
    assert made["hardware"]["device"] == "cpu"
    assert made["hardware"]["cores"] >= 1


def test_a_benchmark_keeps_its_numbers_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/benchmarks/step.py", "--quick"])
    record.keep_folder(tmp_path / "speed", record.manifest(), {"ratio": 0.5}, ["| a |", "| b |"])
    assert json.loads((tmp_path / "speed/manifest.json").read_text())["command"] == "python -m benchmarks.step --quick"
    assert json.loads((tmp_path / "speed/numbers.json").read_text()) == {"ratio": 0.5}
    assert (tmp_path / "speed/table.md").read_text() == "| a |\n\n| b |\n"
    record.keep_folder(None, {}, {}, [])  # nowhere: nothing is written
