"""Streams as cells: the plain loop in the stream's order, and a cell that resumes in the middle of a stage."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import eata
from eata.bench import streams, work
from eata.bench.protocol import Cell, Request, plan
from eata.bench.tables import tabulate
from eata.bench.work import Worker
from eata.data import CORRUPTIONS

HALF = (0.5, 0.5, 0.5)
LIMIT = 60


def request(stream: str | None = None, experiment: str = "methods", methods: tuple[str, ...] = ("tent",)) -> Request:
    return Request(experiment, "digits", models=("tiny:net",), limit=LIMIT, methods=methods, batch=16, stream=stream)


def by_hand(model: eata.Adapter, name: str) -> list[int]:
    """Right answers of each part, with the sets laid end to end."""
    correct = []
    for part in streams.parts(streams.parse(name), CORRUPTIONS, 5, 2020):
        if name == "reset":
            model.reset()
        sets = [eata.data.load("digits", corruption=c, severity=s, limit=LIMIT) for c, s in part.shifts]
        pairs = [next(one.batches(LIMIT, seed=None, mean=HALF, std=HALF)) for one in sets]
        images, labels = torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])
        order = torch.from_numpy(streams.order(part, pairs[0][1].numpy()))
        correct.append(sum(int((model(images[i]).argmax(1) == labels[i]).sum()) for i in order.split(16)))
    return correct


@pytest.mark.parametrize("name", ["reset", "continual", "correlated", "correlated:0.1", "mixed+correlated"])
def test_a_stream_is_the_plain_loop(place: Path, name: str) -> None:
    asked = request(name)
    worker = Worker(asked, place / "run")
    results = [worker.run(cell) for cell in plan(asked, 900)]
    assert all("error" not in result for result in results), results[0]
    found = [stage["correct"] for result in results for stage in result["stages"]]
    model = eata.Tent(eata.models.load("tiny:net"), **eata.preset("digits", eata.Tent))
    assert found == by_hand(model, name)
    assert [len(result["stages"]) for result in results] == {"reset": [1] * 15, "mixed+correlated": [1]}.get(name, [15])
    for result in results:
        for stage in result["stages"]:
            assert np.sum(stage["course"], axis=0).tolist() == [stage["samples"], stage["correct"]]


@pytest.mark.parametrize("method", ["roid", "rotta", "sar"])
def test_a_cell_resumes_in_the_middle_of_a_stage(place: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Request("methods", "digits", models=("tiny:net",), limit=20, methods=(method,), batch=8, stream="mixed")
    (cell,) = plan(asked, 900)
    if method == "sar":  # a net without stages
        cell = Cell(**{**vars(cell), "settings": {**cell.settings, "layers": 1}})
    monkeypatch.setattr(work, "SAVE_EVERY", 64)

    def stages(result: dict[str, object]) -> object:
        assert "error" not in result, result
        return [{k: v for k, v in stage.items() if k != "seconds"} for stage in result["stages"]]  # type: ignore[attr-defined]

    whole = stages(Worker(asked, place / "whole").run(cell))
    seen: list[int] = []

    def stop(images: int) -> None:
        seen.append(images)
        if sum(seen) >= 200:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Worker(asked, place / "run").run(cell, stop)
    assert len(list(place.glob("run/partial/*/*.safetensors"))) == 1
    again: list[int] = []
    assert stages(Worker(asked, place / "run").run(cell, again.append)) == whole
    assert again[0] == 192  # what was kept
    assert sum(again) == 300
    assert not list(place.glob("run/partial/*"))


def test_the_table_has_a_column_a_stream(place: Path) -> None:
    asked = request(experiment="streams", methods=("source",))
    cells = plan(asked, 900)
    assert [len(cell.stages) for cell in cells if cell.column == "recurring:5"] == [75]
    few = [cell for cell in cells if cell.column in ("reset", "continual", "mixed")]
    worker = Worker(asked, place / "run")
    (line,) = tabulate(asked, few, {cell.id: worker.run(cell) for cell in few}).lines
    assert set(line.values) == {"reset", "continual", "mixed"}
    # a model that learns nothing answers alike in every order
    assert line.values["reset"] == pytest.approx(line.values["continual"])
    assert line.values["reset"] == pytest.approx(line.values["mixed"])
    assert not line.deviations
    images, errors = zip(*line.course["mixed"], strict=True)
    assert images[-1] == 15 * LIMIT
    assert min(errors) >= 0
    assert max(errors) <= 100


def test_a_result_says_what_made_it(place: Path) -> None:
    asked = request("continual", methods=("roid",))
    worker = Worker(asked, place / "run")
    (cell,) = plan(asked, 900)
    settings = worker.run(cell)["settings"]
    assert settings["lr"] == 0.001
    assert settings["optimizer"].startswith("Adam(")
    json.dumps(settings)
    assert worker.materials.facts("tiny:net")["normalization"] == {"mean": [0.5] * 3, "std": [0.5] * 3}


def test_every_method_sees_the_same_order() -> None:
    cells = plan(request("gradual+correlated:0.5", methods=("source", "roid", "lame")), 900)
    assert len({cell.stages for cell in cells}) == 1
    assert len(cells[0].stages) == 9 * 15


def test_the_paper_s_cells_keep_their_names() -> None:
    (tent,) = [cell for cell in plan(Request("components", "digits"), 900) if cell.row == "s=1" and cell.severity == 5]
    assert all(stage.seed is None for stage in tent.stages)
    assert "seed" not in str([{k: v for k, v in vars(stage).items() if v is not None} for stage in tent.stages])


@pytest.mark.parametrize(
    ("experiment", "stream", "words"),
    [
        ("methods", "recurring:0", "1 or more"),
        ("methods", "correlated:0", "delta above 0"),
        ("methods", "graduel", "did you mean"),
        ("mixed", "continual", "stream of its own"),
        ("imagenet-r", "continual", "stream of its own"),
        ("backbones", "continual", "stream of its own"),
    ],
)
def test_streams_that_cannot_be_are_refused(experiment: str, stream: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        plan(Request(experiment, "digits", stream=stream), 900)


def test_some_streams_of_the_comparison_can_be_run_by_themselves():
    cells = plan(Request("streams", "digits", methods=("tent",), stream="gradual,recurring:5"), 900)
    assert {cell.column for cell in cells} == {"gradual", "recurring:5"}
    everything = plan(Request("streams", "digits", methods=("tent",)), 900)
    assert {cell.id for cell in cells} < {cell.id for cell in everything}  # the same cells: their results can be joined
    with pytest.raises(
        ValueError, match=r"no stream in this experiment 'recurring:2'; .*'eata bench methods' takes any"
    ):
        plan(Request("streams", "digits", stream="recurring:2"), 900)
    with pytest.raises(ValueError, match="no stream 'continual,mixed'"):
        plan(Request("methods", "digits", stream="continual,mixed"), 900)
