import copy
import math
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import eata
import naive


@pytest.mark.parametrize("norm", ["bn", "gn", "in", "ln"])
def test_per_batch_is_the_naive_loop(norm, trained, digits):
    net = trained(norm, torch.float64)
    images = digits[0][:150].double()
    got, want = eata.fisher(net, images, per="batch"), naive.fisher_of_batches(net, images)
    assert got.per == "batch"
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name], atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("norm", ["bn", "gn", "in", "ln"])
def test_per_sample_is_equation_9_sample_by_sample(norm, trained, digits):
    net = trained(norm, torch.float64)
    images = digits[0][:70].double()
    got, want = eata.fisher(net, images), naive.fisher_of_samples(net, images)
    assert got.per == "sample"
    for name in want:
        torch.testing.assert_close(got[name], want[name], atol=1e-12, rtol=1e-9)


def test_per_sample_with_a_layer_used_twice():
    shared = nn.GroupNorm(2, 4)
    net = nn.Sequential(nn.Linear(3, 4), shared, nn.Tanh(), shared, nn.Linear(4, 5)).double()
    images = torch.randn(9, 3, dtype=torch.float64)
    got = eata.fisher(net, images, per="sample")
    for name, parameter in (("1.weight", shared.weight), ("1.bias", shared.bias)):
        total = 0
        for x in images:
            row = net(x[None])[0]
            loss = -torch.log_softmax(row, 0)[row.argmax()]
            total = total + torch.autograd.grad(loss, parameter)[0] ** 2
        torch.testing.assert_close(got[name], total / 9)


class Odd(nn.LayerNorm):
    def forward(self, x):
        return (x - x.mean(-1, keepdim=True)) * self.weight + self.bias


def test_per_sample_takes_what_it_cannot_see_one_by_one():
    net = nn.Sequential(Odd(3), nn.Linear(3, 2)).double()
    images = torch.randn(4, 3, dtype=torch.float64)
    with pytest.warns(UserWarning, match="one by one"):
        got = eata.fisher(net, images)
    total = 0
    for x in images:
        row = net(x[None])[0]
        total = total + torch.autograd.grad(-torch.log_softmax(row, 0)[row.argmax()], net[0].weight)[0] ** 2
    torch.testing.assert_close(got["0.weight"], total / 4)


def test_coupled_samples_get_per_batch_with_a_sentence():
    net = nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False), nn.Linear(3, 2))
    images = torch.randn(8, 3)
    with pytest.warns(UserWarning, match="per='batch'"):
        got = eata.fisher(net, images)
    assert got.per == "batch"
    want = eata.fisher(net, images, per="batch")
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("per", ["sample", "batch"])
def test_a_last_batch_of_one(per, trained, digits):
    images = digits[0][:65]
    got = eata.fisher(trained(), images, per=per)
    if per == "batch":  # one image has no statistics: it is left out
        want = eata.fisher(trained(), images[:64], per=per)
    else:
        want = naive.fisher_of_samples(trained(), images)
    for name in want:
        torch.testing.assert_close(got[name], want[name], atol=1e-7, rtol=1e-3)


def test_a_fisher_of_the_other_kind_is_said(trained, digits):
    net = trained()
    fisher = eata.fisher(net, digits[0][:64], per="batch")
    with pytest.warns(UserWarning, match="per='sample'"):
        eata.EATA(net, fisher, **eata.preset("cifar10"))


def test_tensors_batches_and_loaders_agree_and_stop_at_samples(trained, digits):
    images, labels = digits[0][:300], digits[1][:300]
    want = eata.fisher(trained(), images[:160], samples=160)
    loader = DataLoader(TensorDataset(images, labels), batch_size=64)
    for source in (images, images.split(64), loader):
        got = eata.fisher(trained(), source, samples=160)
        assert all(torch.equal(got[name], want[name]) for name in want)


def test_nothing_of_the_net_or_the_world_changes(trained, digits):
    net = trained()
    net[1].eval()
    net[0].weight.requires_grad_(False)
    before = copy.deepcopy(net.state_dict())
    flags = [(p.requires_grad, p.grad) for p in net.parameters()]
    modes = [m.training for m in net.modules()]
    worlds = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    loader = DataLoader(TensorDataset(digits[0][:200]), batch_size=64, shuffle=True)
    for per in ("batch", "sample"):
        with torch.inference_mode():
            eata.fisher(net, loader, per=per)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert flags == [(p.requires_grad, p.grad) for p in net.parameters()]
    assert modes == [m.training for m in net.modules()]
    assert torch.equal(torch.get_rng_state(), worlds[0])
    assert random.getstate() == worlds[1]
    assert (np.random.get_state()[1] == worlds[2]).all()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"per": "pixel"}, "per="),
        ({"samples": 0}, "samples="),
        ({"images": []}, "no images"),
        ({"images": torch.full((8, 1, 8, 8), float("nan"))}, "not finite"),
    ],
)
def test_bad_arguments(arguments, words, trained, digits):
    net = trained()
    with pytest.raises(ValueError, match=words):
        eata.fisher(net, **{"images": digits[0][:64], **arguments})
    eata.Tent(net)  # still free


def test_a_net_without_normalization_is_refused():
    with pytest.raises(ValueError, match="no normalization layer"):
        eata.fisher(nn.Linear(2, 2), torch.randn(4, 2))


def test_in_distribution_keeps_the_lowest_energies(trained, digits):
    net = trained()
    pool = torch.cat([digits[0][1000:1100], 0.3 * torch.randn(100, 1, 8, 8)])[torch.randperm(200)]
    energies = [-math.log(sum(math.exp(v) for v in row)) for row in copy.deepcopy(net).eval()(pool).tolist()]
    best = sorted(sorted(range(200), key=energies.__getitem__)[:60])
    for keep in (60, 0.3):
        assert torch.equal(eata.in_distribution(net, pool, keep), pool[best])
    for keep in (0, 201, 0.0):
        with pytest.raises(ValueError, match="keep="):
            eata.in_distribution(net, pool, keep)
