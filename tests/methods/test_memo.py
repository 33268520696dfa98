from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import eata


def configured(net):
    net.pretrained_cfg = {"mean": (0.5,), "std": (0.5,)}
    return net


def spied(model):
    """The copies that the model makes, in a list."""
    made = []
    augmix = model.copies.augmix
    model.copies.augmix = lambda image: made.append(augmix(image)) or made[-1]
    return made


def naive_memo(net, image, copies, lr):
    """One episode on a deep copy, class by class and copy by copy."""
    net = copy.deepcopy(net).eval().requires_grad_(True)
    rows = [net(one[None])[0] for one in copies]
    marginal = sum(torch.exp(row) / torch.exp(row).sum() for row in rows) / len(rows)
    entropy = -sum(p * torch.log(p) for p in marginal)
    entropy.backward()
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.grad is not None:
                parameter -= lr * parameter.grad
        return net(image[None])[0]


@pytest.mark.parametrize("norm", ["gn", "ln"])
def test_is_one_step_on_the_marginal_entropy(trained, stream, norm):
    net = configured(trained(norm, torch.float64))
    plain = copy.deepcopy(net)
    (x,) = stream([3], torch.float64)
    model = eata.MEMO(net, copies=5, lr=0.05)
    made = spied(model)
    logits = model(x)
    for i in range(3):
        torch.testing.assert_close(logits[i], naive_memo(plain, x[i], made[i], 0.05), rtol=1e-6, atol=1e-8)
    assert (logits - plain.eval()(x)).abs().max() > 1e-3  # the step is felt
    assert vars(model.stats) == {"forwards": 18, "backwards": 15, "reliable": 0, "steps": 3, "rejected": 0}


def test_counts_as_the_paper(trained, stream):
    (x,) = stream([1])
    model = eata.MEMO(configured(trained("gn")), copies=64)
    model(x)
    assert (model.stats.forwards, model.stats.backwards) == (65, 64)


class PriorNorm(nn.Module):
    """BatchNorm with N/(N+1) of the source statistics, and the rest of those of the batch, as constants."""

    def __init__(self, layer, prior):
        super().__init__()
        self.layer, self.share = layer, prior / (prior + 1)

    def forward(self, x):
        values = x.detach().transpose(0, 1).flatten(1)
        mean = self.share * self.layer.running_mean + (1 - self.share) * values.mean(1)
        var = self.share * self.layer.running_var + (1 - self.share) * values.var(1, correction=0)
        flat = (x - mean.view(-1, 1, 1)) / (var.view(-1, 1, 1) + self.layer.eps).sqrt()
        return flat * self.layer.weight.view(-1, 1, 1) + self.layer.bias.view(-1, 1, 1)


def test_batch_norm_mixes_with_the_prior_and_copies_count_as_one(trained, stream):
    net = configured(trained("bn", torch.float64))
    plain = nn.Sequential(*(PriorNorm(m, 16) if isinstance(m, nn.BatchNorm2d) else m for m in copy.deepcopy(net)))
    plain.eval().requires_grad_(True)
    (x,) = stream([2], torch.float64)
    model = eata.MEMO(net, copies=4, lr=0.05)
    made = spied(model)
    logits = model(x)
    for i in range(2):
        stepped = copy.deepcopy(plain)
        log_mean = torch.log(torch.softmax(stepped(made[i]), 1).mean(0))
        (-(log_mean.exp() * log_mean).sum()).backward()
        torch.optim.SGD(stepped.parameters(), 0.05).step()
        torch.testing.assert_close(logits[i], stepped(x[i][None])[0].detach(), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("norm", ["bn", "gn"])
def test_the_net_is_bit_identical_after_each_image(trained, stream, norm):
    net = configured(trained(norm))
    before = copy.deepcopy(net.state_dict())
    model = eata.MEMO(net, copies=3, lr=0.1)
    for x in stream([1, 2]):
        model(x)
        for name, value in net.state_dict().items():
            assert torch.equal(value, before[name]), name


def test_restores_when_predicting_fails(trained, stream):
    net = configured(trained("gn"))
    before = copy.deepcopy(net.state_dict())
    model = eata.MEMO(net, copies=3, lr=0.1)
    forward = model.forward
    model.forward = lambda inputs, **how: forward(inputs, **how) if len(inputs) > 1 else 1 / 0
    with pytest.raises(ZeroDivisionError):
        model(stream([1])[0])
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_images_are_episodes_of_their_own(trained, stream):
    (x,) = stream([3])
    together = eata.MEMO(configured(trained("gn")), copies=4)(x)
    model = eata.MEMO(configured(trained("gn")), copies=4)
    assert torch.equal(torch.cat([model(image[None]) for image in x]), together)


def test_frozen_predicts_only(trained, stream):
    net = configured(trained("gn"))
    (x,) = stream([2])
    expected = copy.deepcopy(net).eval()(x)
    model = eata.MEMO(net, copies=4)
    with model.frozen():
        torch.testing.assert_close(model(x), expected.detach())
    assert (model.stats.forwards, model.stats.backwards) == (2, 0)


def test_resumes_bit_for_bit(trained, stream, tmp_path):
    x, y = stream([1, 2])
    model = eata.MEMO(configured(trained("gn")), copies=4)
    model(x)
    model.save(tmp_path / "state.safetensors")
    expected = model(y)
    other = eata.MEMO(configured(trained("gn")), copies=4)
    other.load(tmp_path / "state.safetensors")
    assert torch.equal(other(y), expected)
    assert other.stats == model.stats
    model.reset()
    assert model.stats.forwards == 0


def test_any_optimizer_is_made_anew_for_each_image(trained, stream):
    (x,) = stream([2])
    model = eata.MEMO(configured(trained("gn")), copies=4, optimizer=lambda p: torch.optim.Adam(p, 0.01))
    logits = model(x)
    model.reset()
    assert torch.equal(model(x), logits)


def test_an_infinite_gradient_means_the_source_prediction(trained, stream):
    net = configured(trained("gn"))
    (x,) = stream([1])
    expected = copy.deepcopy(net).eval()(x)
    model = eata.MEMO(net, copies=4)
    augmix = model.copies.augmix
    model.copies.augmix = lambda image: augmix(image) * math.inf
    with pytest.warns(UserWarning, match="not finite"):
        torch.testing.assert_close(model(x), expected.detach())
    assert model.stats.steps == 0


def test_bad_arguments_are_named(trained):
    with pytest.raises(ValueError, match="copies"):
        eata.MEMO(trained(), copies=0)
    with pytest.raises(ValueError, match="prior"):
        eata.MEMO(trained(), prior=-1)
    with pytest.raises(ValueError, match="lr"):
        eata.MEMO(trained(), lr=0)
