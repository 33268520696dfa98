from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from eata.augmentation import crop_and_flip, rotate
from eata.models import ResNet26
from eata.models import train as training
from eata.models.train import RECIPES, Recipe, error, normalize, train

TINY = Recipe(epochs=3, lr=0.05, nesterov=True, batch=8, sizes=((0, 8), (2, 16)))


def data(count: int = 20) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    images = torch.randint(0, 256, (count, 3, 16, 16), generator=generator, dtype=torch.uint8)
    return images, torch.randint(0, 4, (count,), generator=generator)


def fit(checkpoint, recipe=TINY, rotation=False, seed=0, **options):
    torch.manual_seed(seed)
    net = ResNet26(4, "gn" if rotation else "bn", rotation).to(memory_format=torch.channels_last)
    history = train(net, data(), data(6), recipe, checkpoint, seed=seed, **options)
    return net, history


def same(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


@pytest.mark.parametrize("rotation", [False, True])
def test_stopped_and_resumed_gives_the_same_weights(tmp_path, rotation):
    whole, history = fit(tmp_path / "whole", rotation=rotation)

    class StoppedError(Exception):
        pass

    def stop(epoch):
        if epoch.number == 2:
            raise StoppedError

    with pytest.raises(StoppedError):
        fit(tmp_path / "part", rotation=rotation, report=stop)
    torch.rand(5)  # what happens in between must not matter
    resumed, again = fit(tmp_path / "part", rotation=rotation, resume=True)
    assert same(whole, resumed)
    assert [(e.number, e.loss, e.error) for e in again] == [(e.number, e.loss, e.error) for e in history]
    assert not whole.training


def test_a_finished_checkpoint_only_gives_its_weights(tmp_path):
    whole, _ = fit(tmp_path / "c")
    ticks = []
    resumed, history = fit(tmp_path / "c", resume=True, tick=ticks.append)
    assert same(whole, resumed)
    assert len(history) == 3
    assert ticks == []


def test_the_seed_decides(tmp_path):
    assert same(fit(tmp_path / "a")[0], fit(tmp_path / "b")[0])
    assert not same(fit(tmp_path / "a")[0], fit(tmp_path / "b", seed=1)[0])


def test_each_step_is_told_and_an_incomplete_batch_left_out(tmp_path):
    ticks = []
    fit(tmp_path / "c", tick=ticks.append)
    assert ticks == [8, 8] * 3


def test_foreign_and_damaged_checkpoints(tmp_path):
    path = tmp_path / "c"
    fit(path)
    with pytest.raises(ValueError, match="no checkpoint of this recipe, seed and data set"):
        fit(path, dataclasses.replace(TINY, lr=0.1), resume=True)
    with pytest.raises(ValueError, match=r"does not fit the model: it lacks rotation_head.* and \d+ more"):
        fit(path, rotation=True, resume=True)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match="c is damaged"):
        fit(path, resume=True)
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match="no checkpoint of this recipe"):
        fit(path, resume=True)


def test_it_learns(tmp_path):
    """Two classes that a glance tells apart: bright and dark."""
    labels = torch.arange(64) % 2
    images = (labels.view(-1, 1, 1, 1) * 120 + torch.randint(0, 100, (64, 3, 8, 8))).byte()
    net = ResNet26(2)
    train(net, (images, labels), (images, labels), Recipe(epochs=6, lr=0.05, batch=16), tmp_path / "c")
    assert error(net, images, labels) < 10


@pytest.mark.parametrize("flip", [False, True])
def test_augment_crops_and_mirrors(flip):
    images = torch.randint(1, 256, (30, 3, 6, 6), dtype=torch.uint8)
    result = crop_and_flip(images, torch.Generator().manual_seed(0), 2, flip)
    padded = F.pad(images, (2, 2, 2, 2))
    offsets, mirrored = set(), 0
    for image, big in zip(result, padded, strict=True):
        crops = {(t, left): big[:, t : t + 6, left : left + 6] for t in range(5) for left in range(5)}
        plain = [place for place, crop in crops.items() if torch.equal(crop, image)]
        mirror = [place for place, crop in crops.items() if torch.equal(crop.flip(2), image)]
        assert len(plain) + len(mirror) == 1
        offsets.update(plain, mirror)
        mirrored += len(mirror)
    assert len(offsets) > 10
    assert (5 < mirrored < 25) if flip else mirrored == 0


def test_rotate():
    images = torch.randn(8, 3, 5, 5)
    turns = torch.arange(8) % 4
    for image, turned, count in zip(images, rotate(images, turns), turns.tolist(), strict=True):
        assert np.array_equal(turned.numpy(), np.rot90(image.numpy(), count, (1, 2)))


def test_normalize():
    assert normalize(torch.tensor([0, 255], dtype=torch.uint8)).tolist() == [-1.0, 1.0]


def test_error_counts_and_keeps_the_mode():
    class Brightest(torch.nn.Module):
        def forward(self, x):
            assert not self.training
            return x.mean((2, 3))

    images = torch.zeros(5, 3, 2, 2, dtype=torch.uint8)
    images[torch.arange(5), torch.tensor([0, 1, 2, 0, 1])] = 200
    net = Brightest().train()
    assert error(net, images, torch.tensor([0, 1, 2, 1, 2]), batch=2) == 40.0
    assert net.training


def test_recipes():
    paper = RECIPES["paper"]
    assert [paper.rate(epoch) for epoch in (0, 49.9, 50, 65, 74)] == pytest.approx([0.1, 0.1, 0.01, 0.001, 0.001])
    short = RECIPES["short"]
    rates = [short.rate(step / 10) for step in range(10 * short.epochs + 1)]
    assert max(rates) == pytest.approx(short.lr)
    assert rates[0] == rates[-1] == 0
    assert training.RECIPES["short"].size(0, 32) == 24
    assert short.size(short.epochs - 1, 32) == 32
    assert short.size(0, 16) == 16  # never larger than the data
