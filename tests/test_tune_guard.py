"""The folder of a benchmark, and the replay by which the guard's thresholds were chosen."""

import json

import pytest
import torch
from benchmarks import tune_guard
from benchmarks.kept import Kept

from eata import guard


def test_a_folder_is_gone_on_with_and_takes_only_its_own(tmp_path):
    kept = Kept(tmp_path, "x", images=5)
    assert kept.cell("a 1") is None
    kept.add("a 1", {"error": 2.5})
    kept.add("b", {"error": 1.5})
    again = Kept(tmp_path, "x", images=5)
    assert again.cell("a 1")["error"] == 2.5
    assert [cell["error"] for cell in again.cells()] == [2.5, 1.5]
    assert json.loads((tmp_path / "manifest.json").read_text())["images"] == 5
    with pytest.raises(ValueError, match="has results of images=5, and this is 6"):
        Kept(tmp_path, "x", images=6)


def recorded(sure, source_sure, count=256):
    """The adapted model always says class 1, the source what is right."""
    labels = torch.arange(count) % 5
    adapted = sure * torch.nn.functional.one_hot(torch.ones_like(labels), 5).float()
    source = source_sure * torch.nn.functional.one_hot(labels, 5).float()
    return {"both": torch.stack([adapted, source], 1), "labels": labels, "sizes": torch.tensor([64] * (count // 64))}


def test_the_guard_itself_is_replayed():
    row = tune_guard.replay(recorded(sure=1.0, source_sure=6.0))
    assert (row["source"], row["error"], row["regret"]) == (0.0, 0.0, 0.0)
    assert row["unguarded"] == pytest.approx(80, abs=1)
    assert (row["alarms"], row["asked"]) == (1, 1.0)


def test_a_rule_holds_for_its_replays_only(monkeypatch):
    monkeypatch.setattr(tune_guard, "STREAMS", ["shift"])
    monkeypatch.setattr(tune_guard, "METHODS", ("budget",))
    before = guard.CLASSES, guard.ALARM
    records = {("budget", "shift", 1): recorded(sure=9.0, source_sure=6.0)}  # sure, wrong, and collapsed
    blind = tune_guard.judged(records, {"CLASSES": 0.0, "ALARM": 1.0})
    seeing = tune_guard.judged(records, {"CLASSES": 0.5, "ALARM": 1.0})
    assert before == (guard.CLASSES, guard.ALARM)
    assert blind["budget"]["mean regret"] == pytest.approx(80, abs=1)
    assert seeing["budget"]["mean regret"] == 0.0
