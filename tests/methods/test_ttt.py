from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import eata


class TwoHeads(nn.Module):
    """A shared convolution, a classifier and a rotation head."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU())
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 10))
        self.rotation_head = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 4))
        self.pretrained_cfg = {"mean": (0.5,), "std": (0.5,)}

    def forward(self, x):
        return self.head(self.shared(x))

    def rotation(self, x):
        return self.rotation_head(self.shared(x))


def make():
    torch.manual_seed(0)
    return TwoHeads().double()


def spied(model):
    """The copies and the quarter turns that the model draws."""
    made, turns = [], []
    crops, quarter_turns = model.copies.crops, model.copies.quarter_turns
    model.copies.crops = lambda image: made.append(crops(image)) or made[-1]
    model.copies.quarter_turns = lambda: turns.append(quarter_turns()) or turns[-1]
    return made, turns


def naive_episode(net, image, copies, turns, lr):
    """Change ``net`` by one step of plain SGD on the rotation loss; predict the image."""
    net.zero_grad()
    loss = 0.0
    for one, turn in zip(copies, turns.tolist(), strict=True):
        for _ in range(turn):
            one = one.transpose(1, 2).flip(1)  # a quarter turn counter-clockwise
        loss = loss + F.cross_entropy(net.rotation(one[None]), torch.tensor([turn])) / len(copies)
    loss.backward()
    with torch.no_grad():
        for parameter in [*net.shared.parameters(), *net.rotation_head.parameters()]:
            parameter -= lr * parameter.grad
        return net(image[None])[0]


@pytest.mark.parametrize("episodic", [False, True])
def test_is_a_step_on_the_rotation_loss_then_a_prediction(stream, episodic):
    net = make()
    plain = copy.deepcopy(net)
    batches = stream([2, 2], torch.float64)
    model = eata.TTT(net, copies=6, lr=0.1, episodic=episodic)
    made, turns = spied(model)
    logits = torch.cat([model(x) for x in batches])
    current = copy.deepcopy(plain)
    for i, image in enumerate(torch.cat(batches)):
        if episodic:
            current = copy.deepcopy(plain)
        expected = naive_episode(current, image, made[i], turns[i], 0.1)
        torch.testing.assert_close(logits[i], expected, rtol=1e-6, atol=1e-8)
    assert vars(model.stats) == {"forwards": 28, "backwards": 24, "reliable": 0, "steps": 4, "rejected": 0}
    same = all(torch.equal(value, plain.state_dict()[name]) for name, value in net.state_dict().items())
    assert same == episodic  # bit-identical


def test_the_classifiers_own_weights_never_move(stream):
    net = make()
    before = copy.deepcopy(net.head.state_dict())
    model = eata.TTT(net, copies=4, lr=0.1)
    for x in stream([2, 2], torch.float64):
        model(x)
    assert all(torch.equal(value, before[name]) for name, value in net.head.state_dict().items())


def test_counts_as_the_paper(stream):
    model = eata.TTT(make())
    model(stream([1], torch.float64)[0])
    assert (model.stats.forwards, model.stats.backwards) == (33, 32)


def test_reset_frozen_and_resume(stream, tmp_path):
    x, y = stream([2, 2], torch.float64)
    net = make()
    plain = copy.deepcopy(net)
    model = eata.TTT(net, copies=4, lr=0.1)
    first = model(x)
    model.save(tmp_path / "state.safetensors")
    second = model(y)
    other = eata.TTT(make(), copies=4, lr=0.1)
    other.load(tmp_path / "state.safetensors")
    assert torch.equal(other(y), second)
    model.reset()
    with model.frozen():
        torch.testing.assert_close(model(x), plain(x).detach())
    assert model.stats.backwards == 0
    assert torch.equal(model(x), first)


def test_works_on_resnet26(stream):
    net = eata.models.ResNet26(norm="gn", rotation=True)
    net.pretrained_cfg = {"mean": (0.5,) * 3, "std": (0.5,) * 3}
    model = eata.TTT(net, copies=2)
    assert model(torch.randn(1, 3, 16, 16)).shape == (1, 10)
    assert model.stats.steps == 1


@pytest.mark.parametrize("net", [eata.models.ResNet26(norm="gn"), nn.Linear(2, 2)])
def test_a_net_without_rotation_head_is_told_how_to_get_one(net):
    with pytest.raises(ValueError, match="eata train --model resnet26-gn-rotation"):
        eata.TTT(net)


def test_images_have_to_be_square():
    model = eata.TTT(make(), copies=2)
    with pytest.raises(ValueError, match="square, not 8 x 12"):
        model(torch.zeros(1, 1, 8, 12, dtype=torch.float64))
    assert model.stats.forwards == 0


def test_needs_a_copy():
    with pytest.raises(ValueError, match="copies"):
        eata.TTT(make(), copies=0)
