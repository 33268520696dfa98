"""A kept stream gives what the stream gave that it was made from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import eata
from eata.data.kept import KeptStream, keep


def same(one: eata.data.Stream, other: eata.data.Stream) -> bool:
    pairs = list(zip(one.batches(3, seed=7), other.batches(3, seed=7), strict=True))
    assert pairs
    return all(torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in pairs)


@pytest.mark.parametrize("corruption", [None, "fog"])
def test_arrays(tmp_path: Path, corruption: str | None) -> None:
    stream = eata.data.load("digits", corruption=corruption, limit=10)
    keep(stream, tmp_path / "kept")
    kept = KeptStream(tmp_path / "kept")
    assert same(stream, kept)
    assert (kept.name, kept.digest, kept.generated) == (stream.name, stream.digest, stream.generated)
    assert (kept.class_names, kept.class_index) == (stream.class_names, stream.class_index)


def test_files_some_of_which_cannot_be_read(tmp_path: Path) -> None:
    draw = np.random.RandomState(0)
    for name in "abcdefgh":
        (tmp_path / "set" / ("x" if name < "e" else "y")).mkdir(parents=True, exist_ok=True)
        path = tmp_path / "set" / ("x" if name < "e" else "y") / f"{name}.png"
        Image.fromarray(draw.randint(0, 256, (40, 30, 3)).astype(np.uint8)).save(path)
    (tmp_path / "set" / "x" / "c.png").write_bytes(b"no picture")
    stream = eata.data.load(f"folder:{tmp_path / 'set'}", corruption="snow", size=32)
    keep(stream, tmp_path / "kept")
    kept = KeptStream(tmp_path / "kept")
    assert same(stream, kept)
    assert len(kept) == len(stream) == 8
    assert [path.name for path, _ in kept.skipped] == ["c.png"]
    assert sum(len(labels) for _, labels in kept.batches(3)) == 7
    again = tmp_path / "again"
    keep(kept, again)
    assert same(KeptStream(again), kept)
