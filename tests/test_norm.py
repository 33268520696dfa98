import copy

import pytest
import torch
from torch import nn

import eata
from eata import norm


def test_every_kind_of_layer_is_found():
    kinds = [
        nn.BatchNorm1d(4), nn.BatchNorm2d(4), nn.BatchNorm3d(4), nn.SyncBatchNorm(4),
        nn.GroupNorm(2, 4), nn.LayerNorm(4),
        nn.InstanceNorm1d(4, affine=True), nn.InstanceNorm2d(4, affine=True), nn.InstanceNorm3d(4, affine=True),
    ]  # fmt: skip
    names = norm.affine_parameters(nn.Sequential(nn.Linear(4, 4), *kinds, nn.Dropout()))
    assert set(names) == {f"{i}.{kind}" for i in range(1, 10) for kind in ("weight", "bias")}


def test_shared_layers_count_once():
    shared = nn.BatchNorm1d(4)
    assert set(norm.affine_parameters(nn.Sequential(shared, nn.ReLU(), shared))) == {"0.weight", "0.bias"}


class Watch(nn.Module):
    """Remembers whether it ever ran in training mode."""

    def __init__(self):
        super().__init__()
        self.live = False

    def forward(self, x):
        self.live |= self.training
        return x


@pytest.mark.parametrize("mode", [True, False])
def test_only_normalization_uses_the_batch(mode):
    watch = Watch()
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), watch, nn.Linear(4, 2)).train(mode)
    model = eata.Tent(net)
    x = 5 + 3 * torch.randn(16, 3)
    with model.frozen():
        assert torch.equal(model(x), model(x))  # live dropout would differ
    hidden = net[0](x)
    normalized = (hidden - hidden.mean(0)) / (hidden.var(0, correction=0) + net[1].eps).sqrt()
    with model.frozen():
        torch.testing.assert_close(model(x), net[4](normalized), atol=1e-5, rtol=1e-5)
    assert not watch.live


def test_running_statistics_are_neither_used_nor_changed():
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    net[0].running_mean += 100
    kept = copy.deepcopy(net.state_dict())
    model = eata.Tent(net, lr=1e-9)
    assert model(torch.randn(64, 3)).abs().max() < 10  # with the buffers in use, logits would be near 100
    model.unwrap()
    assert torch.equal(net[0].running_mean, kept["0.running_mean"])
    assert net[0].num_batches_tracked == kept["0.num_batches_tracked"]


def test_instance_norm_with_buffers_uses_the_input():
    net = nn.Sequential(nn.InstanceNorm1d(3, affine=True, track_running_stats=True))
    net[0].running_mean += 100
    x = torch.randn(4, 3, 10)
    net.eval()
    with norm.Normalizing([], norm.Statistics(prior=0)):
        torch.testing.assert_close(net(x).mean(2), torch.zeros(4, 3), atol=1e-5, rtol=0)
    assert (net(x).mean(2) < -50).all()
    assert net[0].track_running_stats
    assert net[0].running_mean[0] == 100
