import copy

import pytest
import torch
from torch import nn

import eata


def test_source_is_the_net_in_eval_mode(trained, stream):
    net = trained()
    want = copy.deepcopy(net).eval()
    for x in stream([16, 1, 7]):
        assert torch.equal(eata.Source(copy.deepcopy(net))(x), want(x).detach())


def test_source_takes_a_net_without_normalization():
    assert eata.Source(nn.Linear(2, 3))(torch.zeros(4, 2)).shape == (4, 3)


def naive_bn(net, x, prior):
    """The two BatchNorm layers of the test net with mixed statistics, channel by channel."""
    net = copy.deepcopy(net).eval()
    for module in net:
        if isinstance(module, nn.BatchNorm2d):
            out = x.clone()
            for c in range(x.shape[1]):
                values = x[:, c].flatten()
                mean = (prior * module.running_mean[c] + len(x) * values.mean()) / (prior + len(x))
                var = (prior * module.running_var[c] + len(x) * values.var(correction=0)) / (prior + len(x))
                out[:, c] = (x[:, c] - mean) / (var + module.eps).sqrt() * module.weight[c] + module.bias[c]
            x = out
        else:
            x = module(x)
    return x.detach()


@pytest.mark.parametrize("prior", [0, 16, 256])
def test_bn_mixes_statistics(prior, trained, stream):
    net = trained("bn", torch.float64)
    model = eata.BN(copy.deepcopy(net), prior=prior)
    for x in stream([16, 3, 1, 64] if prior else [16, 3, 64], torch.float64):
        torch.testing.assert_close(model(x), naive_bn(net, x, prior), atol=1e-10, rtol=1e-10)


def test_bn_without_prior_is_tent_before_its_first_step(trained, stream):
    x = stream([32])[0]
    torch.testing.assert_close(eata.BN(trained(), prior=0)(x), eata.Tent(trained())(x))


def test_bn_of_a_huge_prior_is_the_source(trained, stream):
    x = stream([32])[0]
    torch.testing.assert_close(eata.BN(trained(), prior=1e12)(x), eata.Source(trained())(x), atol=1e-4, rtol=1e-4)


def test_bn_needs_statistics():
    with pytest.raises(ValueError, match="running statistics"):
        eata.BN(nn.GroupNorm(1, 2))
    with pytest.raises(ValueError, match="running statistics"):
        eata.BN(nn.BatchNorm1d(2, track_running_stats=False))
    with pytest.raises(ValueError, match="prior="):
        eata.BN(nn.BatchNorm1d(2), prior=-1)
