"""The sentences say what the table says, and the pictures what was predicted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

import eata
from eata.bench.protocol import Request, plan
from eata.bench.run import execute
from eata.bench.story import pictures, sentences
from eata.bench.tables import tabulate

REQUEST = Request("demo", "digits", models=("tiny:net",), limit=64)


def test_the_sentences(result: Callable[..., dict[str, Any]]) -> None:
    cells = plan(REQUEST, 900)
    score = {"source": 50, "bn": 70, "tent": 72, "eta": 74, "eata": 76, "eata-budget": 77}
    results = {
        cell.id: result(cell, score[cell.row], clean=90 if len(cell.stages) == 1 else 85, backwards=30)
        for cell in cells
    }
    first, second, third = sentences(tabulate(REQUEST, cells, results))
    assert first.startswith("EATA takes the trained net's error from 50.0 % to 24.0 %")
    assert first.endswith("it is better on all 15 corruptions.")
    assert second == (
        "Beside it: BN 30.0 %, Tent 28.0 %, ETA 26.0 %, EATA (budget) 23.0 %. EATA spent a backward pass on 30 % of "
        "the images and 1.0 times the time of plain inference."
    )
    said = ", ".join(f"{name} 10.0 -> 15.0 %" for name in ("Tent", "ETA", "EATA", "EATA (budget)"))
    assert third.endswith(f"after the whole stream: {said}. The untouched net: 15.0 %.")
    fog = next(cell for cell in cells if cell.row == "source" and cell.stages[0].corruption == "fog")
    results[fog.id] = result(fog, 90)
    assert "better on 14 of 15 corruptions" in sentences(tabulate(REQUEST, cells, results))[0]
    del results[fog.id]
    assert sentences(tabulate(REQUEST, cells, results)) == []  # nothing is said of an unfinished row


def test_the_pictures_are_of_the_stream_and_say_what_was_predicted(place: Path) -> None:
    run, table = execute(REQUEST, place / "runs", Console(quiet=True))
    assert table.failures == []
    found = pictures(run)
    assert found
    net = eata.models.load("tiny:net")
    for one in found:
        stream = eata.data.load("digits", corruption=one.corruption.replace(" ", "_"), severity=5, limit=64)
        images, labels = next(stream.batches(64, seed=2020))
        (place_in_stream,) = (number for number, image in enumerate(images) if torch.equal(image, one.pixels))
        assert one.truth == stream.class_names[int(labels[place_in_stream])]
        with torch.no_grad():
            logits = net((one.pixels[None] - 0.5) / 0.5)
        assert one.before == stream.class_names[int(logits.argmax())]
        assert one.before != one.after
    assert len({one.corruption for one in found}) == len(found)
    assert np.unique([one.truth for one in found]).size > 1
