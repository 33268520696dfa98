"""Cells against loops written out by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

import eata
from eata import device
from eata.bench.materials import Materials
from eata.bench.protocol import Cell, Request, Result, Stage, plan
from eata.bench.work import Worker, needs_fisher

REQUEST = Request("imagenet-c", "digits", models=("tiny:net",), limit=96)
HALF = (0.5, 0.5, 0.5)


@pytest.fixture
def worker(place: Path) -> Worker:
    return Worker(REQUEST, place / "run")


def cell(row: str, request: Request = REQUEST, corruption: str = "fog") -> Cell:
    cells = plan(request, 900)
    return next(one for one in cells if one.row == row and (one.lifelong or one.stages[0].corruption == corruption))


def good(result: Result) -> list[Result]:
    assert "error" not in result, result
    return [{name: value for name, value in stage.items() if name != "seconds"} for stage in result["stages"]]


def test_a_cell_is_the_plain_loop(worker: Worker) -> None:
    shift, clean = good(worker.run(cell("tent")))
    model = eata.Tent(eata.models.load("tiny:net"), **eata.preset("digits", eata.Tent))
    for stage, corruption in ((shift, "fog"), (clean, None)):
        stream = eata.data.load("digits", corruption=corruption, severity=5, limit=96)
        correct = sum(
            int((model(x).argmax(1) == y).sum()) for x, y in stream.batches(64, seed=2020, mean=HALF, std=HALF)
        )
        assert stage["correct"] == correct
        assert stage["samples"] == stage["known"] == stage["forwards"] == stage["backwards"] == 96


def test_eata_gets_the_fisher_of_clean_images_once(worker: Worker) -> None:
    one = cell("eata")
    assert needs_fisher(one)
    assert not needs_fisher(cell("eta"))
    kept = worker.adapter(one).importance
    clean = eata.data.load("digits").batches(64, seed=2020, mean=HALF, std=HALF)
    expected = eata.fisher(eata.models.load("tiny:net"), clean, per="batch")  # as the preset of digits asks
    assert all(torch.allclose(kept[name], value) for name, value in expected.items())
    (path,) = worker.folder.glob("fisher/*.safetensors")
    written = path.stat().st_mtime_ns
    Worker(REQUEST, worker.folder).prepare([one])
    assert path.stat().st_mtime_ns == written


def test_a_budget_takes_the_place_of_the_presets_beta(worker: Worker) -> None:
    held = replace(cell("eata"), settings={"budget": 0.02})
    model = worker.adapter(held)
    assert (model.beta, model.budget, model.fisher_per) == (None, 0.02, "sample")
    good(worker.run(held))
    assert worker.adapter(cell("eata")).fisher_per == "batch"


def test_a_window_is_remembered_or_exact(worker: Worker) -> None:
    remembered, exact = (
        worker.adapter(replace(cell("eta"), settings={"window": 4, **more})) for more in ({}, {"exact": 1})
    )
    assert (remembered.length, remembered.exact, exact.length, exact.exact) == (4, False, 4, True)


def test_every_cell_starts_afresh(worker: Worker) -> None:
    assert good(worker.run(cell("eta"))) == good(worker.run(cell("eta")))


def test_a_lifelong_stream_resumes_between_stages_bit_for_bit(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    long = replace(cell("eata-lifelong"), stages=(Stage("fog", 5), Stage("snow", 5), Stage("frost", 5)))
    whole = good(worker.run(long))
    work = Worker._stage

    def stop(self: Worker, cell: Cell, stage: Stage, *rest: object) -> Result:
        if stage.corruption == "frost":
            raise KeyboardInterrupt
        return work(self, cell, stage, *rest)  # type: ignore[arg-type]

    second = Worker(REQUEST, worker.folder)
    with monkeypatch.context() as patch:
        patch.setattr(Worker, "_stage", stop)
        with pytest.raises(KeyboardInterrupt):
            second.run(long)
    assert len(list(worker.folder.glob("partial/*/*.safetensors"))) == 1
    seen: list[int] = []
    assert good(Worker(REQUEST, worker.folder).run(long, seen.append)) == whole
    assert sum(seen) == 96  # only the third stage was run again
    assert not list(worker.folder.glob("partial/*"))


def test_mixed_takes_every_image_of_every_corruption_once(place: Path) -> None:
    request = Request("mixed", "digits", models=("tiny:net",), limit=8)
    mixed = cell("tent", request, "mixed")
    worker = Worker(request, place / "run")
    batches = list(worker.images(mixed, mixed.stages[0]))
    assert [len(labels) for _, labels in batches] == [64, 56]
    found = {tuple(image.flatten().tolist()) for images, _ in batches for image in images}
    expected = {
        tuple(image.flatten().tolist())
        for name in eata.data.CORRUPTIONS
        for images, _ in eata.data.load("digits", corruption=name, severity=3, limit=8).batches(mean=HALF, std=HALF)
        for image in images
    }
    assert found == expected
    order = [tuple(image.flatten().tolist()) for images, _ in worker.images(mixed, mixed.stages[0]) for image in images]
    again = [tuple(image.flatten().tolist()) for images, _ in worker.images(mixed, mixed.stages[0]) for image in images]
    assert order == again


@pytest.mark.parametrize("keep", ["lowest", "highest"])
def test_entropy_adapts_on_the_part_it_says_and_measures_on_all(place: Path, keep: str) -> None:
    request = Request("entropy", "digits", models=("tiny:net",), limit=96)
    worker = Worker(request, place / "run")
    part = next(one for one in plan(request, 900) if one.row == f"{keep} entropy" and one.column == "30")
    chosen = torch.cat([images for images, _ in worker.images(part, part.stages[0])])
    stream = eata.data.load("digits", corruption="gaussian_noise", severity=3, limit=96)
    images = torch.cat([x for x, _ in stream.batches(64, seed=2020, mean=HALF, std=HALF)])
    net = eata.models.load("tiny:net")
    with torch.no_grad():
        p = net(images).softmax(1)
    entropy = -(p * p.log()).sum(1)
    ranked = sorted(range(96), key=lambda i: float(entropy[i]), reverse=keep == "highest")
    assert torch.equal(chosen, images[sorted(ranked[:29])])
    prepare, measured = good(worker.run(part))
    assert prepare["backwards"] == 29
    assert (measured["backwards"], measured["samples"]) == (0, 96)


def test_learning_rates_are_scaled(place: Path) -> None:
    request = Request("learning-rates", "digits", models=("tiny:net",))
    worker = Worker(request, place / "run")
    rate = {one.row: worker.adapter(one).settings["lr"] for one in plan(request, 900)}
    assert rate["tent-lr-x8"] == pytest.approx(8 * rate["tent"])


def test_a_step_before_the_clock_changes_no_result(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = replace(REQUEST, experiment="wall-clock")
    own, calls = Worker(request, place / "run"), []
    monkeypatch.setattr(own, "adapter", lambda one, build=own.adapter: calls.append(one.id) or build(one))
    for row in ("tent (full)", "eata (rows)"):
        timed = cell(row, request, "gaussian_noise")
        (shift,) = good(own.run(timed))
        (plain,) = good(Worker(REQUEST, place / "plain").run(timed))
        assert shift == plain
        assert shift["forwards"] == shift["samples"] == 96
        assert calls == [timed.id] * 2  # the one that is measured, and the one that is thrown away
        calls.clear()


def test_memory_of_a_step_is_measured(place: Path) -> None:
    request = Request("memory", "digits", models=("tiny:net",), limit=64)
    worker = Worker(request, place / "run")
    (stage,) = good(worker.run(cell("tent (full)", request, "gaussian_noise")))
    activations = 64 * 8 * 7 * 7 * 4  # bytes of one map of the net, of which a step keeps a few
    assert activations < stage["memory"] < 100 * activations


def test_imagenet_r_logits_are_restricted() -> None:
    from eata.bench.materials import Restricted

    net = torch.nn.Linear(3, 5)
    x = torch.randn(2, 3)
    assert torch.equal(Restricted(net, (4, 1))(x), net(x)[:, [4, 1]])


def test_epsilon_goes_with_the_number_of_classes_that_count(place: Path) -> None:
    from eata.data import imagenet

    (place / "thousand.py").write_text(
        "import torch\n"
        "def net():\n"
        "    net = torch.nn.Sequential(torch.nn.BatchNorm2d(3), torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 1000))\n"
        "    net.pretrained_cfg = dict(mean=(.5,) * 3, std=(.5,) * 3, input_size=(3, 8, 8), num_classes=1000)\n"
        "    return net\n"
    )
    for wnid in imagenet.wnids()[:3]:
        (place / "some" / wnid).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(place / "some" / wnid / "1.png")
    request = replace(REQUEST, experiment="components", data=f"folder:{place / 'some'}", models=("thousand:net",))
    worker = Worker(request, place / "run")
    some = replace(cell("eta"), model="thousand:net")
    assert worker.adapter(some).epsilon == 0.4
    assert worker.adapter(some).lr == 0.00025  # the preset is still the net's
    assert worker.adapter(replace(some, settings={"epsilon": 1.0})).epsilon == 1.0


def test_a_model_that_does_not_say_its_classes_is_refused(place: Path) -> None:
    (place / "silent.py").write_text(
        "import torch\n"
        "def net():\n"
        "    net = torch.nn.Linear(2, 2)\n"
        "    net.pretrained_cfg = dict(mean=(.5,), std=(.5,), input_size=(3, 8, 8))\n"
        "    return net\n"
    )
    with pytest.raises(eata.EataError, match="silent:net does not say its num_classes"):
        Materials(replace(REQUEST, models=("silent:net",))).available("silent:net")


def test_a_failing_cell_says_why(place: Path) -> None:
    request = replace(REQUEST, models=("tiny:broken",))
    result = Worker(request, place / "run").run(cell("tent", request))
    assert "shapes cannot be multiplied" in result["error"]
    assert "Traceback" in result["trace"]


def test_a_model_of_other_classes_does_not_fit(place: Path) -> None:
    for name in ("a", "b"):
        (place / "images" / name).mkdir(parents=True)
        Image.new("RGB", (40, 40)).save(place / "images" / name / "1.png")
    materials = Materials(replace(REQUEST, data=f"folder:{place / 'images'}", clean="digits"))
    with pytest.raises(ValueError, match="10 classes"):
        materials.available("tiny:net")


def test_mixed_precision_is_near_and_another_run(worker: Worker, place: Path) -> None:
    (plain, _), (half, _) = (
        good(Worker(replace(REQUEST, amp=amp), place / f"run-{amp}").run(cell("tent"))) for amp in (False, True)
    )
    assert half["samples"] == plain["samples"] == half["backwards"] == 96
    assert abs(half["correct"] - plain["correct"]) <= 10
    request = replace(REQUEST, amp=True)
    seen: list[torch.dtype] = []
    adapter = Worker(request, place / "run").adapter(cell("source"))
    adapter.net.register_forward_hook(lambda net, x, y: seen.append(y.dtype))
    with device.precision(torch.device("cpu"), request.amp):
        adapter(torch.zeros(2, 3, 32, 32))
    assert seen == [torch.bfloat16]
