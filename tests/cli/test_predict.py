from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import eata
from eata import state
from eata.models import load

Says = Callable[..., tuple[object, str]]
MAIN = "from eata.cli import main; main()"
TENT = ("--method", "tent", "--lr", "0.01", "--batch", "4")


def rows(path: str | Path) -> list[dict[str, str]]:
    with Path(path).open(newline="") as file:
        return list(csv.DictReader(file))


def predict(says: Says, *arguments: str, code: int = 0) -> str:
    found, output = says("predict", "own:net", *arguments)
    assert found == code, output
    return output


def test_every_image_has_its_row_in_order_and_the_plain_loop_agrees(place: Path, eata_says: Says) -> None:
    output = predict(eata_says, "--images", "loose", "--out", "out.csv", *TENT)
    found = rows("out.csv")
    assert [Path(row["path"]).name for row in found] == [f"{index:03}.png" for index in range(20)]
    model = eata.Tent(eata.models.load("own:net"), lr=0.01)
    stream = eata.data.load("folder:loose", size=16)
    expected = [
        (str(best), f"{confidence:.6f}")
        for images, _ in stream.batches(4, seed=None, mean=(0.5,) * 3, std=(0.5,) * 3)
        for confidence, best in zip(*(part.tolist() for part in model(images).softmax(1).max(1)), strict=True)
    ]
    assert [(row["prediction"], row["confidence"]) for row in found] == expected
    assert found[0]["class"] == "abc"[int(found[0]["prediction"])]
    assert "20 images, 20 forwards, 20 backwards" in output
    assert "Accuracy" not in output
    assert Path("out.csv.state.safetensors").exists()


def test_class_folders_are_shuffled_and_give_an_accuracy(place: Path, eata_says: Says) -> None:
    output = predict(eata_says, "--images", "labelled", "--out", "out.csv", "--method", "source")
    found = rows("out.csv")
    labels = [row["label"] for row in found]
    assert sorted(labels) == ["a"] * 10 + ["b"] * 10 + ["c"] * 10 != labels
    right = sum(row["label"] == row["class"] for row in found)
    assert f"Accuracy {100 * right / 30:.1f} % of 30" in output


def test_eata_needs_clean_images_or_says_what_to_do(place: Path, eata_says: Says) -> None:
    output = predict(eata_says, "--images", "loose", "--out", "out.csv", code=2)
    assert "--fisher FOLDER" in output
    assert "--method eta" in output
    assert not Path("out.csv").exists()
    predict(eata_says, "--images", "loose", "--out", "out.csv", "--fisher", "clean", "--batch", "4")
    assert len(rows("out.csv")) == 20


@pytest.mark.parametrize(
    ("method", "how", "every"),
    [("tent", signal.SIGKILL, "2"), ("eata", signal.SIGKILL, "100"), ("tent", signal.SIGINT, "100")],
)
def test_a_stopped_stream_resumes_without_a_double_or_missing_row(
    place: Path, eata_says: Says, method: str, how: signal.Signals, every: str
) -> None:
    arguments = ("--images", "loose", "--method", method, "--lr", "0.01", "--batch", "2", "--save-every", every)
    fisher = ("--fisher", "clean") if method == "eata" else ()
    predict(eata_says, *arguments, *fisher, "--out", "whole.csv")
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, "predict", "own:net", *arguments, *fisher, "--out", "out.csv"],
        env={**os.environ, "PAUSE": "0.2", "OMP_NUM_THREADS": str(torch.get_num_threads())},
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background jobs ignore Ctrl-C, and their children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 240
    while not Path("out.csv").exists() or Path("out.csv").read_text().count("\n") < 8:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(how)
    _, said = process.communicate(timeout=240)
    assert 0 < len(rows("out.csv")) < 20  # what came before the stop is there
    if how == signal.SIGINT:  # the batch in work is finished, and the state is of the last row
        assert process.returncode == 130
        assert f"{len(rows('out.csv'))} of 20 images" in said
        assert state.read("out.csv.state.safetensors")["predict"]["files"] == len(rows("out.csv"))
    predict(eata_says, *arguments, "--out", "out.csv", "--resume")  # the state has the Fisher information
    assert rows("out.csv") == rows("whole.csv")
    saved, whole = (state.read(f"{name}.csv.state.safetensors") for name in ("out", "whole"))
    assert saved["stats"] == whole["stats"]
    assert all(torch.equal(saved["parameters"][name], value) for name, value in whole["parameters"].items())


def test_resuming_a_finished_stream_takes_what_is_new(place: Path, eata_says: Says) -> None:
    predict(eata_says, "--images", "loose", "--out", "out.csv", *TENT)
    Image.new("RGB", (16, 16)).save("loose/new.png")
    predict(eata_says, "--images", "loose", "--out", "out.csv", *TENT, "--resume")
    assert [Path(row["path"]).name for row in rows("out.csv")][-2:] == ["019.png", "new.png"]
    output = predict(eata_says, "--images", "labelled", "--out", "out.csv", *TENT, "--resume", code=2)
    assert "other images" in output
    assert len(rows("out.csv")) == 21


def test_a_state_goes_on_to_the_next_stream(place: Path, eata_says: Says) -> None:
    predict(eata_says, "--images", "loose", "--out", "first.csv", *TENT)
    output = predict(
        eata_says, "--images", "clean", "--out", "second.csv", *TENT, "--state", "first.csv.state.safetensors"
    )
    assert "8 images, 28 forwards" in output
    predict(eata_says, "--images", "clean", "--out", "afresh.csv", *TENT)
    assert rows("second.csv") != rows("afresh.csv")
    output = predict(
        eata_says,
        "--images",
        "clean",
        "--out",
        "x.csv",
        "--method",
        "bn",
        "--state",
        "first.csv.state.safetensors",
        code=2,
    )
    assert "eata.Tent" in output


def test_a_broken_image_has_a_row_that_says_why(place: Path, eata_says: Says) -> None:
    Path("loose/005.png").write_bytes(b"not a picture")
    Path("loose/zzz.png").write_bytes(b"")
    output = predict(eata_says, "--images", "loose", "--out", "out.csv", *TENT)
    assert "2 could not be read" in output
    found = rows("out.csv")
    assert len(found) == 21
    assert found[5]["prediction"] == ""
    assert found[5]["problem"]
    assert found[20]["problem"] == "the file is empty"
    assert all(row["prediction"] for row in found[6:20])


def test_lists_and_single_images(place: Path, eata_says: Says) -> None:
    Path("some.txt").write_text("loose/003.png\nloose/001.png\n")
    predict(eata_says, "--images", "some.txt", "--images", "loose/007.png", "--out", "out.csv", "--method", "source")
    assert [Path(row["path"]).name for row in rows("out.csv")] == ["003.png", "001.png", "007.png"]
    Path("some.txt").write_text("loose/003.png\nnowhere.png\n")
    assert "nowhere.png is not there." in predict(eata_says, "--images", "some.txt", "--out", "x.csv", code=2)
    Path("some.txt").write_text("")
    assert "some.txt is empty" in predict(eata_says, "--images", "some.txt", "--out", "x.csv", code=2)
    Path("some.txt").write_bytes(b"\xff\xfe\x00")
    assert "neither an image nor a text file" in predict(eata_says, "--images", "some.txt", "--out", "x.csv", code=2)
    Path("broken.png").write_bytes(b"no picture")
    output = predict(eata_says, "--images", "broken.png", "--out", "y.csv", "--method", "source", code=2)
    assert "None of the images could be read; y.csv says why" in output
    assert not Path("x.csv").exists()


def test_parquet_has_the_same_rows(place: Path, eata_says: Says) -> None:
    parquet: Any = pytest.importorskip(
        "pyarrow.parquet", reason="pyarrow is not installed: pip install 'eata[parquet]'"
    )
    predict(eata_says, "--images", "loose", "--out", "out.csv", *TENT)
    predict(eata_says, "--images", "loose", "--out", "out.parquet", *TENT)
    table = parquet.read_table("out.parquet").to_pylist()
    assert [str(row["prediction"]) for row in table] == [row["prediction"] for row in rows("out.csv")]


def test_nothing_is_overwritten(place: Path, eata_says: Says) -> None:
    Path("out.csv").write_text("mine")
    output = predict(eata_says, "--images", "loose", "--out", "out.csv", *TENT, code=2)
    assert "remove it, or choose another --out" in output
    assert "remove out.csv to begin" in predict(eata_says, "--images", "loose", "--out", "out.csv", "--resume", code=2)
    assert Path("out.csv").read_text() == "mine"
    assert "neither a .csv nor a .parquet" in predict(eata_says, "--images", "loose", "--out", "out.txt", code=2)
    assert "nothing to resume" in predict(eata_says, "--images", "loose", "--out", "new.csv", "--resume", code=2)
    assert "no folder or file" in predict(eata_says, "--images", "gone", "--out", "new.csv", code=2)


def test_a_name_that_is_not_utf8_is_a_row_like_any_other(place: Path, eata_says: Says) -> None:
    odd = os.fsencode(place / "loose") + b"/a\xff\xe9.png"
    try:
        (place / "loose" / "003.png").rename(os.fsdecode(odd))
    except OSError:
        pytest.skip("this file system takes names in UTF-8 only")
    predict(eata_says, "--images", "loose", "--out", "out.csv", *TENT)
    found = rows("out.csv")
    assert len(found) == 20
    assert found[-1]["path"].endswith(r"a\udcff\udce9.png")
    assert found[-1]["prediction"]
    Image.new("RGB", (16, 16)).save("loose/zzz.png")
    predict(eata_says, "--images", "loose", "--out", "out.csv", *TENT, "--resume")
    assert len(rows("out.csv")) == 21
    Path("list.txt").write_bytes(odd + b"\n")
    predict(eata_says, "--images", "list.txt", "--out", "one.csv", *TENT)
    assert rows("one.csv")[0]["prediction"]


def test_words_in_brackets_are_no_markup(place: Path, eata_says: Says) -> None:
    folder = place / "[bold]photos[" / "dim]"
    folder.mkdir(parents=True)
    (folder / "one.png").write_bytes(Path("loose/000.png").read_bytes())
    output = predict(eata_says, "--images", str(place / "[bold]photos["), "--out", "[red]out.csv", *TENT)
    assert "Predictions: [red]out.csv" in output
    output = predict(eata_says, "--images", "[/data/x.png]", "--out", "x.csv", *TENT, code=2)
    assert f"There is no folder or file {place}/[/data/x.png]." in output


def test_paths_are_hashed_once_however_often_the_state_is_saved(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from eata import predictions

    order = predictions.ordered([place / "loose"])
    job = predictions.Job(place / "out.csv", order, 4, load("own:net").pretrained_cfg)  # type: ignore[arg-type]
    seen: list[Path] = []
    monkeypatch.setattr(predictions.os, "fsencode", lambda path: seen.append(path) or str(path).encode())
    digests = [job._digest(files) for files in range(21)]
    assert len(set(digests)) == 21
    assert seen == [path for path, _ in order]


def test_a_device_and_mixed_precision(place: Path, eata_says: Says) -> None:
    predict(eata_says, "--images", "loose", "--out", "plain.csv", *TENT, "--device", "cpu")
    predict(eata_says, "--images", "loose", "--out", "half.csv", *TENT, "--amp")
    plain, half = rows("plain.csv"), rows("half.csv")
    assert [row["path"] for row in plain] == [row["path"] for row in half]
    assert [row["confidence"] for row in plain] != [row["confidence"] for row in half]
    assert sum(a["prediction"] == b["prediction"] for a, b in zip(plain, half, strict=True)) >= 16
    output = predict(eata_says, "--images", "loose", "--out", "x.csv", *TENT, "--device", "cuda:7", code=2)
    assert "--device cuda:7 can't be used" in output
