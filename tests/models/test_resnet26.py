from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from eata.models import ResNet26


def naive(state, x, prefixes):
    """ResNet-26 written out from its description, in eval mode, on a bare state dict."""

    def norm_relu(x, name):
        if f"{name}.running_mean" in state:
            mean, variance = state[f"{name}.running_mean"], state[f"{name}.running_var"]
            x = (x - mean.view(-1, 1, 1)) / (variance.view(-1, 1, 1) + 1e-5).sqrt()
        else:
            groups = x.reshape(len(x), 8, -1)
            groups = (groups - groups.mean(2, True)) / (groups.var(2, unbiased=False, keepdim=True) + 1e-5).sqrt()
            x = groups.reshape(x.shape)
        return (x * state[f"{name}.weight"].view(-1, 1, 1) + state[f"{name}.bias"].view(-1, 1, 1)).clamp(min=0)

    x = F.conv2d(x, state["conv.weight"], padding=1)
    for stage, prefix in enumerate(prefixes):
        for block in range(4):
            first = stage > 0 and block == 0
            name = f"{prefix}.{block}"
            out = F.conv2d(norm_relu(x, f"{name}.norm1"), state[f"{name}.conv1.weight"], padding=1, stride=1 + first)
            out = F.conv2d(norm_relu(out, f"{name}.norm2"), state[f"{name}.conv2.weight"], padding=1)
            if first:
                n, c, h, w = x.shape
                pooled = x.reshape(n, c, h // 2, 2, w // 2, 2).mean((3, 5))
                x = torch.cat([pooled, torch.zeros_like(pooled)], 1)
            x = x + out
    head = prefixes[-1].removesuffix(".stage")
    features = norm_relu(x, f"{head}.norm").mean((2, 3))
    return features @ state[f"{head}.linear.weight"].T + state[f"{head}.linear.bias"]


def shaken(norm: str, rotation: bool) -> ResNet26:
    net = ResNet26(7, norm, rotation).double().eval()
    for name, value in net.state_dict().items():
        if "norm" in name and value.is_floating_point():
            value.uniform_(0.5, 1.5)
    return net


@pytest.mark.parametrize("norm", ["bn", "gn"])
def test_forward_is_that_of_the_description(norm):
    net = shaken(norm, rotation=True)
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(net(x), naive(net.state_dict(), x, ("stage1", "stage2", "head.stage")))
        turned = naive(net.state_dict(), x, ("stage1", "stage2", "rotation_head.stage"))
        torch.testing.assert_close(net.rotation(x), turned)


def test_size():
    net = ResNet26()
    layers = [module for module in net.modules() if isinstance(module, (nn.Conv2d, nn.Linear))]
    assert len(layers) == 26
    assert sum(parameter.numel() for parameter in net.parameters()) == pytest.approx(370_000, rel=0.02)
    groups = {module.num_groups for module in ResNet26(norm="gn").modules() if isinstance(module, nn.GroupNorm)}
    assert groups == {8}


def test_bad_use():
    with pytest.raises(ValueError, match="norm='ln' is neither"):
        ResNet26(norm="ln")
    with pytest.raises(ValueError, match="no rotation head"):
        ResNet26().rotation(torch.zeros(1, 3, 32, 32))
